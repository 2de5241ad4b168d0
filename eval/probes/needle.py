"""Needles for small models, by length and depth.

needle         the question that the embedded checkpoint has learnt; every token of the answer must be the likeliest
needle-rank    any tokenizer, no training: sixteen candidates ranked, see needle_rank.py
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from surgery.calibrate import document_stream
from surgery.errors import SurgeryError, nearest
from surgery.eval.batching import in_batches
from surgery.eval.encoding import counter
from surgery.eval.losses import check_head
from surgery.eval.needle import DEPTHS, LENGTHS, encode, numbered_question
from surgery.eval.needle import score as found
from surgery.eval.needle_rank import CANDIDATES, KEYS, SHORTEST, Ranking, Vocabulary, rank, ranking
from surgery.eval.suites import EvalOptions, Metric, Sample, Subject, Suite, SuiteResult, register, stable_id
from surgery.eval.text import note_text

TASKS = ("needle", "needle-rank")
SAMPLES = 32
ACCURACY = Metric("accuracy", "accuracy", scale=100, unit="%")
METRICS = {
    "accuracy": ACCURACY,
    "any": Metric("any", "accuracy", scale=100, unit="%", title="any value of the context"),
    "reciprocal_rank": Metric("reciprocal_rank", "mean", top=1, title="reciprocal rank"),
    "nll": Metric("nll", "mean", higher_is_better=False, unit="nats"),
}
FLOORS = {
    "needle": {"accuracy": 0.01},  # two digits
    "needle-rank": {"accuracy": 1 / CANDIDATES, "any": KEYS / CANDIDATES},
}


@dataclass(frozen=True)
class Cell:
    """Which question; it is written when it is its turn."""

    task: str
    length: int
    depth: float
    index: int

    def sample(self, metrics: dict[str, float], shown: dict[str, Any]) -> Sample:
        name = stable_id(self.task, self.index, shown)
        return Sample(self.task, name, metrics, {"length": self.length, "depth": self.depth}, shown=shown)


def run(subject: Subject, options: EvalOptions) -> SuiteResult:
    check_head(subject.model)
    tasks = options.tasks or TASKS
    for task in tasks:
        if task not in TASKS:
            raise SurgeryError(f"needle has no task {task!r}{nearest(task, TASKS)}")
    lengths = options.lengths or tuple(n for n in LENGTHS if n <= (subject.longest or n))
    depths, count = options.depths or DEPTHS, options.limit or SAMPLES
    samples: list[Sample] = []
    for task in tasks:
        cells = [Cell(task, n, depth, i) for n in lengths for depth in depths for i in range(count)]
        if task == "needle":
            samples += _stories(subject, options, cells)
        else:
            samples += _rankings(subject, options, [cell for cell in cells if cell.length >= SHORTEST])
    result = SuiteResult(samples, METRICS, floors={task: FLOORS[task] for task in tasks})
    if beyond := [n for n in lengths if subject.longest and n > subject.longest]:
        said = ", ".join(f"{n:,}" for n in beyond)
        result.notes.append(f"lengths beyond the {subject.longest:,} tokens the model was made for: {said}")
    if short := [n for n in lengths if n < SHORTEST and "needle-rank" in tasks]:
        said = ", ".join(f"{n:,}" for n in short)
        result.notes.append(f"needle-rank was not asked at {said} tokens: a question takes {SHORTEST}")
    if not samples:
        raise SurgeryError(f"needle: nothing fits; {'; '.join(result.notes)}. Give --lengths {SHORTEST} or more")
    return result


def _stories(subject: Subject, options: EvalOptions, cells: list[Cell]) -> list[Sample]:
    counts = counter(subject.tokenizer, special=False)

    def write(cell: Cell) -> tuple[Cell, Any, Any]:
        try:
            question = numbered_question(subject.tokenizer, cell.length, cell.depth, cell.index, options.seed, counts)
        except ValueError as error:  # too short for its facts
            raise SurgeryError(f"needle: {error}") from None
        return cell, question, encode(subject.tokenizer, question)

    def score(batch: list[tuple[Cell, Any, Any]]) -> list[Sample]:
        right = found(subject.model, [encoded for _, _, encoded in batch], subject.model.device)
        shown = [{"prompt": q.prompt[-200:], "target": q.answer} for _, q, _ in batch]
        return [cell.sample({"accuracy": float(r)}, s) for (cell, _, _), r, s in zip(batch, right, shown)]

    return in_batches(
        subject, options, cells, score, lambda cell: cell.length, f"needles of {subject.name}", prepare=write
    )


def _rankings(subject: Subject, options: EvalOptions, cells: list[Cell]) -> list[Sample]:
    vocabulary = Vocabulary(subject.tokenizer)
    text = _text_ids(vocabulary, options, 16 * max((cell.length for cell in cells), default=0))

    def write(cell: Cell) -> tuple[Cell, Ranking]:
        rng = Random(f"needle-rank {options.seed} {cell.length} {cell.depth} {cell.index}")
        return cell, ranking(vocabulary, cell.length, cell.depth, rng, text)

    def score(batch: list[tuple[Cell, Ranking]]) -> list[Sample]:
        every = rank(subject.model, [question for _, question in batch])
        targets = [subject.tokenizer.decode([q.candidates[q.answer]]) for _, q in batch]
        return [cell.sample(m, {"target": target}) for (cell, _), m, target in zip(batch, every, targets)]

    return in_batches(
        subject, options, cells, score, lambda cell: cell.length, f"rankings of {subject.name}", prepare=write
    )


def _text_ids(vocabulary: Vocabulary, options: EvalOptions, wanted: int) -> list[int] | None:
    if options.text is None:
        return None
    note_text(options.text, options)
    ids: list[int] = []
    for document in islice(document_stream(options.text), 1000):
        ids += vocabulary.ids(document[: 8 * wanted])
        if len(ids) >= wanted:
            break
    return ids[:wanted]


register(Suite("needle", "codes hidden in small models' texts: depth x length", run))
