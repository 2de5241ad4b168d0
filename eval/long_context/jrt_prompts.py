"""Prompts, truncation and scores of the Just-Read-Twice harness, for `surgery eval --suite retrieval --prompts jrt`.

Source: lm-eval-harness/ of HazyResearch/prefix-linear-attention at commit 7490f22bda3e38dc057bcbaffe6bdb09b4d475e6
(2024-07-08), the code of Just Read Twice (Arora et al. 2024, arXiv:2407.05483): the tasks based_*,
`Task.truncate_context`, and the arguments of the scripts launch_jrt and run_jrt_rnn. These read a document once; the
prompts that repeat it (`*_twice`) are not here.

    SWDE, FDA      document, then ". Director:"; cut around the first occurrence of key or value
    SQuAD          text that ends within its last sentence; cut around the value, so the end of a long text is lost
    TriviaQA, DROP, NQ   context. question. The harness cuts the field `text`, but its prompts have the field `context`: these are never cut

A document is dropped if its key or its value has at most one character (SQuAD: its value); rows of TriviaQA, DROP and
NQ without these fields are kept. 50 of the tokens are left for the answer. An empty answer among others counts as said,
as in the harness.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surgery.eval.long_context.truncate import cut_window

ANSWER_ROOM = 50  # tokens, --answer_length of run_jrt_rnn.sh
SUMMARY = "Summary of information above..."  # SWDE's documents end with it and the key
PASSAGE_MARKS = re.compile(r"\[PAR\]|\[DOC\]|\[TLE\]")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class JrtPrompt:
    """How the harness asks one task.

    Attributes:
        build: row with its cut `text` -> prompt.
        searched: fields around whose first occurrence the text is cut, and by which documents are dropped.
        is_cut: whether the prompt has the field `text`, which is cut.
        prepare: row -> row, applied before the cut.
        answers: row -> accepted answers.
    """

    build: Callable[[Row], str]
    answers: Callable[[Row], list[str]]
    searched: tuple[str, ...] = ("key", "value")
    is_cut: bool = True
    prepare: Callable[[Row], Row] = dict


def jrt_prompt(task: JrtPrompt, row: Row, tokenizer: Any, length: int) -> tuple[str, list[str]] | None:
    """Return (prompt, accepted answers) for `length` tokens of prompt and answer; None for a document that the harness
    drops.

    Raises KeyError for a row without a field that the task needs, ValueError for a document of SWDE without its last
    line.
    """
    row = task.prepare(row)
    words = [_first(row[name]) for name in task.searched if task.is_cut or name in row]
    if any(len(word) <= 1 for word in words):
        return None
    if task.is_cut:
        text = cut_window(
            row["text"], words, row.get("alt_answers") or (), tokenizer, length - ANSWER_ROOM, row.get("tok_pos")
        )
        row = {**row, "text": text}
    return task.build(row), task.answers(row)


def says_answer(output: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the output contains one of the answers, ignoring case as the harness does; otherwise 0.0."""
    return float(any(re.search(re.escape(answer), output, re.IGNORECASE) for answer in answers))


def _first(value: Any) -> str:
    return str(value[0] if isinstance(value, list) else value)


def _split_summary(row: Row) -> Row:
    """Remove the last line of a document of SWDE, which names the key."""
    text, _ = row["text"].split(SUMMARY)
    return {**row, "text": text}


def _without_question(text: str, question: str) -> str:
    """Remove the question from the end of the text as often as it is there."""
    while question and text.lower().endswith(question.lower()):
        text = text[: -len(question)]
    return text


def _title(row: Row) -> str:
    return row["key"][0].upper() + row["key"][1:] + ":"


def swde(row: Row) -> str:
    """Return the prompt of SWDE."""
    text = _without_question(row["text"].split(SUMMARY)[0], row["key"] + ":")
    return text.strip("\n").strip().strip("\n").strip().strip(".") + ". " + _title(row)


def fda(row: Row) -> str:
    """Return the prompt of FDA; unlike that of SWDE, it may have spaces before the full stop."""
    text = _without_question(row["text"], row["key"] + ":").strip("\n").strip(".")
    return text + ("" if text.endswith(".") else ".") + " " + _title(row)


def squad(row: Row) -> str:
    """Return the prompt of SQuAD."""
    return str(row["text"].strip())


def drop(row: Row) -> str:
    """Return the prompt of DROP."""
    return _question(row["context"].strip(), row["question"].strip())


def trivia(row: Row) -> str:
    """Return the prompt of TriviaQA: that of DROP without the marks of passages."""
    return _question(PASSAGE_MARKS.sub("", row["context"].strip()), row["question"].strip())


def _question(context: str, asked: str) -> str:
    return _without_question(context, asked).strip().strip(".") + ". " + asked


def natural_question(row: Row) -> str:
    """Return the prompt of NQ: the question is removed from the end of the context once, and only with the same
    case.
    """
    context, asked = row["context"].strip(), row["question"].strip()
    return context.removesuffix(asked).strip().strip(".") + ". " + asked


def _value(row: Row) -> list[str]:
    return [row["value"]]


def _answers(row: Row) -> list[str]:
    return list(row["answers"])


JRT_PROMPTS = {
    "swde": JrtPrompt(swde, _value, prepare=_split_summary),
    "fda": JrtPrompt(fda, _value),
    "squad": JrtPrompt(squad, _value, searched=("value",)),
    "triviaqa": JrtPrompt(trivia, _answers, is_cut=False),
    "drop": JrtPrompt(drop, _answers, is_cut=False),
    "nq": JrtPrompt(natural_question, _answers, is_cut=False),
}
