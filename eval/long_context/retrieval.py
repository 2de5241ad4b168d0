"""Suite `retrieval`: complete a sentence with a fact that the context states (SWDE, FDA, SQuAD, TriviaQA, DROP, NQ).

The tasks are those of Based (Arora et al. 2024, arXiv:2402.18668) and Just Read Twice (arXiv:2407.05483). The context
is truncated to given lengths around the answer. An output is correct if its first line, of at most 48 tokens, contains
one of the answers. `--prompts jrt` takes the prompts and the truncation of the Just-Read-Twice harness
(jrt_prompts.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.eval import offline_data as mirror
from surgery.eval.lm_eval.bridge import run_own_tasks
from surgery.eval.lm_eval.tasks import OwnTask
from surgery.eval.long_context import prompt_token_counter
from surgery.eval.long_context.jrt_prompts import JRT_PROMPTS, jrt_prompt, says_answer
from surgery.eval.long_context.truncate import truncate_around
from surgery.eval.suite import EvalMetric, EvalModel, EvalOptions, SuiteResult, select_tasks

LENGTHS = (512, 1024, 2048, 16384)  # Log-Linear Attention's table (arXiv:2506.04761)
ANSWER_TOKENS = 48
SCORE = EvalMetric("score", "accuracy", True, scale=100.0, top=1.0, floor=0.0)
PASSAGE_MARKS = re.compile(r"\[PAR\]|\[DOC\]|\[TLE\]")


@dataclass(frozen=True)
class Cloze:
    """A prompt context + tail; only the context is truncated."""

    context: str
    tail: str
    answers: tuple[str, ...]


def parse_field(row: Mapping[str, Any]) -> Cloze:
    """Read a row of SWDE or FDA: a text that ends with the name of a field, `key:`."""
    text, key = row["text"].strip(), row["key"].strip()
    return Cloze(*_split_at(text, text.lower().rfind(key.lower())), (row["value"].strip(),))


def parse_sentence(row: Mapping[str, Any]) -> Cloze:
    """Read a row of SQuAD: a text whose last sentence is to be completed."""
    text, context = row["text"].strip(), str(row.get("context") or "").strip()
    known = len(context) if context and text.startswith(context) and len(context) < len(text) else -1
    ends = [match.end() for match in re.finditer(r"[.!?\n]\s+", text)]
    return Cloze(*_split_at(text, known if known > 0 else ends[-1] if ends else 0), (row["value"].strip(),))


def parse_question(row: Mapping[str, Any]) -> Cloze:
    """Read a row of TriviaQA, DROP or NQ: a text, and a question phrased as the beginning of its answer."""
    context, asked = PASSAGE_MARKS.sub("", row["context"].strip()), row["question"].strip()
    while asked and context.lower().endswith(asked.lower()):
        context = context[: -len(asked)].strip()
    return Cloze(context.strip().strip("."), f". {asked}", tuple(row["answers"]))


@dataclass(frozen=True)
class RetrievalTask:
    """A task of the suite.

    Attributes:
        path: data set of the Hub.
        read: function that turns a row into a Cloze.
        lengths: lengths in tokens at which the data set exists; its path then ends with one of them. Empty: texts are
            complete.
    """

    path: str
    read: Any
    lengths: tuple[int, ...] = ()

    def path_for_length(self, length: int) -> str:
        """Return the data set with the shortest texts of at least `length` tokens, or else with the longest texts."""
        fitting = [n for n in self.lengths if n >= length] or list(self.lengths[-1:])
        return self.path + (str(fitting[0]) if fitting else "")

    @property
    def paths(self) -> list[str]:
        """All data sets of the task."""
        return [f"{self.path}{n}" for n in self.lengths] or [self.path]


TASKS = {
    "swde": RetrievalTask("hazyresearch/based-swde-v2", parse_field),
    "squad": RetrievalTask("hazyresearch/based-squad", parse_sentence),
    "fda": RetrievalTask("hazyresearch/based-fda", parse_field),
    "triviaqa": RetrievalTask("hazyresearch/based_triviaqa", parse_question),
    "drop": RetrievalTask("hazyresearch/based_drop", parse_question),
    "nq": RetrievalTask("hazyresearch/based_nq_", parse_question, (512, 1024, 2048)),
}


def retrieval_tasks(options: EvalOptions) -> tuple[str, ...]:
    """Return the tasks of the suite that are run."""
    return select_tasks("retrieval", options, tuple(TASKS), TASKS)


def run_retrieval(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Run the suite `retrieval`."""
    names = retrieval_tasks(options)
    reach = eval_model.longest or LENGTHS[-1]
    lengths = options.lengths or tuple(n for n in LENGTHS if n <= reach) or (reach,)
    mirror.check_datasets(
        options.data_root, "retrieval", sorted({TASKS[name].path_for_length(n) for name in names for n in lengths})
    )
    tasks = [(f"{name}_{n}", partial(_make_task, name, eval_model, options, n)) for n in lengths for name in names]
    result = run_own_tasks(eval_model, tasks, options, SCORE, max(*lengths, eval_model.longest or 0))
    if options.prompts == "jrt" and (whole := [name for name in names if not JRT_PROMPTS[name].is_cut]):
        result.notes.append(
            f"{', '.join(whole)}: the Just-Read-Twice harness does not truncate these prompts to --lengths"
        )
    for name in names:
        most = max(TASKS[name].lengths, default=None)
        if most is not None and (beyond := [f"{n:,}" for n in lengths if n > most]):
            result.notes.append(f"{name} at {', '.join(beyond)} tokens: the data set truncates its texts to {most:,}")
    return result


def contains_answer(output: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the output contains one of the nonempty answers, ignoring case; otherwise 0.0."""
    return float(any(answer.strip() and answer.lower() in output.lower() for answer in answers))


def _make_task(name: str, eval_model: EvalModel, options: EvalOptions, length: int) -> OwnTask:
    source, is_jrt = TASKS[name], options.prompts == "jrt"
    rows = mirror.load_rows(options.data_root, "retrieval", source.path_for_length(length), None, "validation")
    ask, contains = (_ask_jrt, says_answer) if is_jrt else (_ask_based, contains_answer)
    docs = []
    for number, row in enumerate(rows):
        asked = ask(name, row, eval_model.tokenizer, length, options)
        if asked is None:
            continue
        prompt, answers = asked
        docs.append(
            {"id": f"{name} {length} {number}{' jrt' if is_jrt else ''}", "task": name, "prompt": prompt, "prefix": "",
             "answers": answers, "length": length}
        )  # fmt: skip
        if options.limit is not None and len(docs) == options.limit:
            break
    return OwnTask(
        f"{name}_{length}",
        docs,
        lambda doc, output: contains(output, doc["answers"]),
        ANSWER_TOKENS,
        until=("\n",),
    )


def _ask_based(
    name: str, row: Mapping[str, Any], tokenizer: Any, length: int, options: EvalOptions
) -> tuple[str, list[str]] | None:
    """Return (prompt, answers) with the prompts of Based, of at most `length` tokens; None without an answer."""
    cloze = TASKS[name].read(row)
    if not any(answer.strip() for answer in cloze.answers):
        return None
    count = prompt_token_counter(tokenizer, options.apply_chat_template)
    prompt = truncate_around(cloze.context, cloze.tail, cloze.answers, tokenizer, count, length - ANSWER_TOKENS)
    return prompt, list(cloze.answers)


def _ask_jrt(
    name: str, row: Mapping[str, Any], tokenizer: Any, length: int, options: EvalOptions
) -> tuple[str, list[str]] | None:
    """Return (prompt, answers) as the Just-Read-Twice harness does; None for a document that it drops."""
    try:
        return jrt_prompt(JRT_PROMPTS[name], row, tokenizer, length)
    except (KeyError, ValueError) as error:
        raise SurgeryError(
            f"--prompts jrt: a row of {TASKS[name].path_for_length(length)} is not of the harness's form ({error}). "
            "Use --prompts based, or "
            "fetch the data set again: surgery fetch-eval-data DATA --suite retrieval"
        ) from None


def _split_at(text: str, position: int) -> tuple[str, str]:
    return (text[:position], text[position:]) if position > 0 else ("", text)
