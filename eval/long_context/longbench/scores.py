"""LongBench's scores of one prediction against one reference, 0 to 1, by the rules of its metrics.py (THUDM, MIT).

What looks like a slip in the original is kept where it changes scores, and said.
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
    """Of trec, triviaqa, samsum and lsht, newlines before it left out."""
    return prediction.lstrip("\n").split("\n")[0]


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """2 p r / (p + r) over words, each counted as often as it is in both."""
    same = sum((Counter(prediction) & Counter(reference)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, reference: str, classes: Classes = ()) -> float:
    return f1(_words(prediction), _words(reference))


def qa_f1_zh(prediction: str, reference: str, classes: Classes = ()) -> float:
    return f1(_chinese_words(prediction), _chinese_words(reference))


def rouge(prediction: str, reference: str, classes: Classes = ()) -> float:
    """ROUGE-L F of the package rouge; 0 for what it refuses (nothing, or dots alone)."""
    try:
        return float(_rouge_scorer().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def rouge_zh(prediction: str, reference: str, classes: Classes = ()) -> float:
    return rouge(" ".join(_segment_chinese(prediction)), " ".join(_segment_chinese(reference)))


def classification(prediction: str, reference: str, classes: Classes) -> float:
    """One of the n classes named is the reference: 1/n. Names inside the reference's own do not count; the original takes them
    out of the list it walks along, so of two in a row the second stays."""
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str, classes: Classes = ()) -> float:
    return _correct_share(prediction, re.findall(r"Paragraph (\d+)", reference)[0])


def retrieval_zh(prediction: str, reference: str, classes: Classes = ()) -> float:
    return _correct_share(prediction, re.findall(r"段落(\d+)", reference)[0])


def count(prediction: str, reference: str, classes: Classes = ()) -> float:
    return _correct_share(prediction, str(reference))


def code(prediction: str, reference: str, classes: Classes = ()) -> float:
    """Likeness of the first line that is no comment and no fence, in whole percent (fuzzywuzzy's ratio)."""
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
    """Lower case, without punctuation and articles."""
    kept = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def _chinese_words(text: str) -> list[str]:
    marks = set(string.punctuation + CHINESE_PUNCTUATION)
    words = ("".join("".join(c for c in word.lower() if c not in marks).split()) for word in _segment_chinese(text))
    return [word for word in words if word]


def _correct_share(prediction: str, number: str) -> float:
    """Of the numbers said, how many are the right one."""
    said = re.findall(r"\d+", prediction)
    return said.count(number) / len(said) if said else 0.0


@cache
def _rouge_scorer() -> Any:
    from rouge import Rouge

    return Rouge()


def _segment_chinese(text: str) -> list[str]:
    import logging

    import jieba

    jieba.setLogLevel(logging.ERROR)
    return list(jieba.cut(text, cut_all=False))
