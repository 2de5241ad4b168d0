"""LongBench's scores of one prediction against one reference, 0 to 1, by the rules of its metrics.py (THUDM, MIT).

Apparent errors of the original are kept where they change scores, and noted.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

CHINESE_PUNCTUATION = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
Classes = Sequence[str]


def first_line(prediction: str) -> str:
    """Return the first nonempty line, which trec, triviaqa, samsum and lsht score."""
    return prediction.lstrip("\n").split("\n")[0]


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Return 2 p r / (p + r) over tokens, each counted as often as it occurs in both."""
    same = sum((Counter(prediction) & Counter(reference)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, reference: str, classes: Classes = ()) -> float:
    """Return F1 over normalized English words."""
    return f1(_words(prediction), _words(reference))


def qa_f1_zh(prediction: str, reference: str, classes: Classes = ()) -> float:
    """Return F1 over segmented Chinese words."""
    return f1(_chinese_words(prediction), _chinese_words(reference))


def rouge(prediction: str, reference: str, classes: Classes = ()) -> float:
    """Return the F-score of ROUGE-L by the package rouge; 0 for text that it rejects (empty, or only dots)."""
    try:
        return float(_rouge_scorer().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def rouge_zh(prediction: str, reference: str, classes: Classes = ()) -> float:
    """Return ROUGE-L over segmented Chinese words."""
    return rouge(" ".join(_segment_chinese(prediction)), " ".join(_segment_chinese(reference)))


def classification(prediction: str, reference: str, classes: Classes) -> float:
    """Return 1/n if the reference is among the n class names in the prediction, otherwise 0.

    Names contained in the reference do not count. The original removes them from the list while iterating, so of two in
    a row the second remains.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str, classes: Classes = ()) -> float:
    """Return the share of the paragraph numbers in the prediction that are correct."""
    return _correct_share(prediction, re.findall(r"Paragraph (\d+)", reference)[0])


def retrieval_zh(prediction: str, reference: str, classes: Classes = ()) -> float:
    """Return the share of the Chinese paragraph numbers in the prediction that are correct."""
    return _correct_share(prediction, re.findall(r"段落(\d+)", reference)[0])


def count(prediction: str, reference: str, classes: Classes = ()) -> float:
    """Return the share of the numbers in the prediction that are correct."""
    return _correct_share(prediction, str(reference))


def code(prediction: str, reference: str, classes: Classes = ()) -> float:
    """Return the similarity (fuzzywuzzy's ratio, whole percent) of the first line that is neither a comment nor a
    fence.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


SCORES: dict[str, Callable[[str, str, Classes], float]] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge": rouge,
    "rouge_zh": rouge_zh,
    "classification": classification,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "count": count,
    "code": code,
}


def _words(text: str) -> list[str]:
    """Return lower-case words without punctuation and articles."""
    characters = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", characters).split()


def _chinese_words(text: str) -> list[str]:
    marks = set(string.punctuation + CHINESE_PUNCTUATION)
    words = ("".join("".join(c for c in word.lower() if c not in marks).split()) for word in _segment_chinese(text))
    return [word for word in words if word]


def _correct_share(prediction: str, number: str) -> float:
    """Return the share of the numbers in the text that are correct."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


@cache
def _rouge_scorer() -> Any:
    from rouge import Rouge

    return Rouge()


def _segment_chinese(text: str) -> list[str]:
    import logging

    import jieba

    jieba.setLogLevel(logging.ERROR)
    return list(jieba.cut(text, cut_all=False))
