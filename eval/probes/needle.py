"""Needles for small models, by length and depth.

needle         the question that the embedded checkpoint has learnt; every token of the answer must be the likeliest
needle-rank    any tokenizer, no training: sixteen candidates ranked, see needle_rank.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from surgery.calibrate import document_stream
from surgery.errors import SurgeryError, nearest
from surgery.eval.batching import in_batches
from surgery.eval.losses import check_head
from surgery.eval.needle import DEPTHS, LENGTHS, encode, questions, score
from surgery.eval.needle_rank import CANDIDATES, KEYS, SHORTEST, Vocabulary, rank, ranking
from surgery.eval.suites import EvalOptions, Metric, Sample, Subject, Suite, SuiteResult, register, stable_id

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
class Asked:
    task: str
    length: int
    depth: float
    index: int
    size: int
    what: Any
    shown: dict[str, Any]


def run(subject: Subject, options: EvalOptions) -> SuiteResult:
    check_head(subject.model)
    tasks = options.tasks or TASKS
    for task in tasks:
        if task not in TASKS:
            raise SurgeryError(f"needle has no task {task!r}{nearest(task, TASKS)}")
    lengths = options.lengths or tuple(n for n in LENGTHS if n <= (subject.longest or n))
    depths, count = options.depths or DEPTHS, options.limit or SAMPLES
    makers = {"needle": _stories, "needle-rank": _rankings}
    samples: list[Sample] = []
    for task in tasks:
        asked = makers[task](subject, options, lengths, depths, count)
        scorer = _scorer(task, subject)
        found = in_batches(subject, options, asked, scorer, lambda q: q.size, f"{task} of {subject.name}")
        samples += [_sample(q, metrics) for q, metrics in zip(asked, found)]
    result = SuiteResult(samples, METRICS, floors={task: FLOORS[task] for task in tasks})
    result.info = {"longest": subject.longest}
    if beyond := [n for n in lengths if subject.longest and n > subject.longest]:
        said = ", ".join(f"{n:,}" for n in beyond)
        result.notes.append(f"lengths beyond the {subject.longest:,} tokens the model was made for: {said}")
    return result


def _sample(asked: Asked, metrics: dict[str, float]) -> Sample:
    group = {"length": asked.length, "depth": asked.depth}
    return Sample(asked.task, stable_id(asked.task, asked.index, asked.shown), metrics, group, shown=asked.shown)


def _stories(
    subject: Subject, options: EvalOptions, lengths: Sequence[int], depths: Sequence[float], count: int
) -> list[Asked]:
    found = []
    for length in lengths:
        for depth in depths:
            try:
                cell = list(questions(subject.tokenizer, length, depth, count, options.seed))
            except ValueError as error:  # too short for its facts
                raise SurgeryError(f"needle: {error}") from None
            for index, question in enumerate(cell):
                ids, start = encode(subject.tokenizer, question)
                shown = {"prompt": question.prompt[-200:], "target": question.answer}
                found.append(Asked("needle", length, depth, index, len(ids), (ids, start), shown))
    return found


def _rankings(
    subject: Subject, options: EvalOptions, lengths: Sequence[int], depths: Sequence[float], count: int
) -> list[Asked]:
    vocabulary = Vocabulary(subject.tokenizer)
    text = _text_ids(vocabulary, options, max(lengths) * 16)
    found = []
    for length in (n for n in lengths if n >= SHORTEST):
        for depth in depths:
            for index in range(count):
                rng = Random(f"needle-rank {options.seed} {length} {depth} {index}")
                question = ranking(vocabulary, length, depth, rng, text)
                value = subject.tokenizer.decode([question.candidates[question.answer]])
                found.append(Asked("needle-rank", length, depth, index, length, question, {"target": value}))
    return found


def _text_ids(vocabulary: Vocabulary, options: EvalOptions, wanted: int) -> list[int] | None:
    if options.text is None:
        return None
    ids: list[int] = []
    for document in islice(document_stream(options.text), 1000):
        ids += vocabulary.ids(document[: 8 * wanted])
        if len(ids) >= wanted:
            break
    return ids[:wanted]


def _scorer(task: str, subject: Subject) -> Callable[[list[Asked]], list[dict[str, float]]]:
    if task == "needle-rank":
        return lambda batch: rank(subject.model, [q.what for q in batch])
    return lambda batch: [
        {"accuracy": float(right)} for right in score(subject.model, [q.what for q in batch], subject.model.device)
    ]


def plot(results: Mapping[str, SuiteResult], folder: Path) -> list[Path]:
    """A pair of heat maps for each task, and its accuracy by length."""
    from surgery.eval.plots import heat_maps, lines

    written = []
    longest = next(iter(results.values())).info.get("longest")
    for task in dict.fromkeys(s.task for s in next(iter(results.values())).samples):
        cells = {role: _shares(result, task, ("length", "depth")) for role, result in results.items()}
        beyond = longest if any(x > (longest or x) for table in cells.values() for x, _ in table) else None
        written.append(
            heat_maps(folder / f"{task}.png", cells, "length, tokens", "depth", f"{task}, percent found", beyond)
        )
        curves = {role: _shares(result, task, ("length",)) for role, result in results.items()}
        series = {role: ([k[0] for k in sorted(c)], [c[k] for k in sorted(c)]) for role, c in curves.items()}
        written.append(lines(folder / f"{task}-length.png", series, "length, tokens", "share found", task, log=True))
    return written


def _shares(result: SuiteResult, task: str, names: tuple[str, ...]) -> dict[Any, float]:
    cells: dict[Any, list[float]] = defaultdict(list)
    for sample in result.samples:
        if sample.task == task:
            cells[tuple(sample.group[name] for name in names)].append(sample.metrics["accuracy"])
    return {key: sum(values) / len(values) for key, values in cells.items()}


register(Suite("needle", "codes hidden in small models' texts: depth x length", run, plot=plot))
