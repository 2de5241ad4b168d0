"""Compare base and converted model: pair samples by (task, group, id) and compute a row per task, metric and group.

A row has both values with standard errors, their difference (for perplexity also the ratio) with its 95% interval, and
for accuracies the exact p-value of McNemar's test. A row is flagged if the base does no better than guessing, because a
loss cannot be seen in it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from surgery.core.errors import SurgeryError
from surgery.eval.results.statistics import (
    Interval,
    Transform,
    Units,
    estimate,
    mcnemar,
    paired_interval,
    wilson_interval,
)
from surgery.eval.suite import BOUNDED_METRICS, EvalMetric, Role, Sample, SuiteResult, infer_metric_kind

Key = tuple[str, tuple[tuple[str, Any], ...], str]  # task, group, id
MIN_UNITS = 10


@dataclass
class ComparisonRow:
    """One row of the comparison.

    Attributes:
        values, errors: value and standard error by role, scaled for display.
        intervals: Wilson's 95% interval by role, scaled, for accuracies; empty for others.
        difference: converted - base, scaled.
        ratio: converted / base.
        p: McNemar's exact p-value, for accuracies.
        flags: warnings.
    """

    suite: str
    task: str
    metric: EvalMetric
    group: dict[str, Any]
    samples: int
    units: int
    values: dict[str, float]
    errors: dict[str, float | None]
    difference: Interval | None = None
    ratio: Interval | None = None
    p: float | None = None
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)

    @property
    def is_summary(self) -> bool:
        """Whether the row summarizes its task."""
        return not self.group if self.metric.pooled else len(self.group) == 1

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON data."""
        return asdict(self)


def compare_results(
    suite: str,
    results: Mapping[Role, SuiteResult],
    same: bool,
    seed: int = 0,
    shown: Iterable[SuiteResult] | None = None,
) -> list[ComparisonRow]:
    """Return the rows of one suite.

    Args:
        same: both results are of one model, so the difference is exactly zero.
        shown: all results of the suite that are shown together; None: these. They decide which tasks have accuracies.

    Raises SurgeryError if the samples of both models differ.
    """
    first = next(iter(results.values()))
    metrics = _TaskMetrics(list(shown) if shown is not None else list(results.values()))
    keys, samples = shared_samples(suite, results)
    whole = Counter(task for task, _, _ in keys)
    rows = []
    for task, group, chosen in _iterate_groups(keys):
        for name in first.metrics:
            metric = metrics.of(task, name)
            alone = len(chosen) == whole[task]  # the task has a single group
            if (alone and group and metric.pooled) or (not group and not metric.pooled and chosen[0][1]):
                continue
            held = [k for k in chosen if all(name in samples[role][k].metrics for role in results)]
            if held:
                floor = first.floors.get(task, {}).get(name, metric.floor)
                picked = {role: [samples[role][k] for k in held] for role in results}
                rows.append(_make_row(suite, task, metric, group, picked, floor=floor, same=same, seed=seed))
    return rows


def shared_metrics(results: Iterable[SuiteResult]) -> dict[str, EvalMetric]:
    """Return the metrics of a suite for several models.

    Where the scores of one model are all 0 or 1, its metric is an accuracy; it is a mean if those of another model are
    not, and has no top if those of another model have none.
    """
    metrics: dict[str, EvalMetric] = {}
    for result in results:
        for name, metric in result.metrics.items():
            known = metrics.setdefault(name, metric)
            kind = "mean" if {known.kind, metric.kind} == {"mean", "accuracy"} else known.kind
            metrics[name] = replace(known, kind=kind, top=None if metric.top is None else known.top)
    return metrics


class _TaskMetrics:
    """Metric of each task: a suite may hold accuracies of some tasks and means, such as F1, of others."""

    def __init__(self, results: Sequence[SuiteResult]):
        self.metrics = shared_metrics(results)
        self.values: dict[tuple[str, str], list[float]] = defaultdict(list)
        for result in results:
            for sample in result.samples:
                for name, value in sample.metrics.items():
                    if name.split(",")[0] in BOUNDED_METRICS:
                        self.values[sample.task, name].append(float(value))

    def of(self, task: str, name: str) -> EvalMetric:
        """Return the metric `name` of a task: an accuracy if the scores of all models in this task are 0 or 1."""
        values = self.values.get((task, name))
        return infer_metric_kind(self.metrics[name], values) if values else self.metrics[name]


def shared_samples(suite: str, results: Mapping[Any, SuiteResult]) -> tuple[list[Key], dict[Any, dict[Key, Sample]]]:
    """Return (keys, samples by model and key). Raises SurgeryError if the samples of the models differ."""
    samples = {role: _index_samples(result.samples) for role, result in results.items()}
    return _shared_keys(suite, samples), samples


def sample_keys(result: SuiteResult) -> set[Key]:
    """Return what identifies the samples of a result."""
    return set(_index_samples(result.samples))


def _index_samples(samples: Iterable[Sample]) -> dict[Key, Sample]:
    samples_by_key: dict[Key, Sample] = {}
    for sample in samples:
        key = (sample.task, tuple(sorted(sample.group.items())), sample.id)
        if key in samples_by_key:
            key = (*key[:2], f"{sample.id} again {len(samples_by_key)}")  # a data set may contain a document twice
        samples_by_key[key] = sample
    return samples_by_key


def _shared_keys(suite: str, samples: Mapping[Role, dict[Key, Sample]]) -> list[Key]:
    every = [set(by_key) for by_key in samples.values()]
    keys = set.intersection(*every)
    if any(by_key != keys for by_key in every):
        counts = ", ".join(f"{role} {len(by_key)}" for role, by_key in samples.items())
        raise SurgeryError(
            f"{suite}: base and converted model have different samples ({counts}, {len(keys)} in common), so they "
            "cannot be paired. "
            "Their tokenizers or options differ."
        )
    return [key for key in next(iter(samples.values())) if key in keys]


def _iterate_groups(keys: list[Key]) -> Iterable[tuple[str, dict[str, Any], list[Key]]]:
    """Yield (task, group, keys): the whole task, then by each group name, then by all names together."""
    tasks: dict[str, list[Key]] = defaultdict(list)
    for key in keys:
        tasks[key[0]].append(key)
    for task, held in tasks.items():
        yield task, {}, held
        names = sorted({name for key in held for name, _ in key[1]})
        cuts = [(name,) for name in names] + ([tuple(names)] if len(names) > 1 else [])
        for cut in cuts:
            yield from _split_by_names(task, held, cut)


def _split_by_names(
    task: str, keys: list[Key], names: tuple[str, ...]
) -> Iterable[tuple[str, dict[str, Any], list[Key]]]:
    cells: dict[tuple[Any, ...], list[Key]] = defaultdict(list)
    for key in keys:
        group = dict(key[1])
        cells[tuple(group.get(name) for name in names)].append(key)
    for values in sorted(cells, key=lambda v: tuple((isinstance(x, str), x is not None, x or 0) for x in v)):
        yield task, dict(zip(names, values)), cells[values]


def collect_units(samples: list[Sample], name: str) -> Units:
    """Sum weighted values and weights over the samples of each bootstrap unit."""
    sums: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    for index, sample in enumerate(samples):
        unit = sample.unit if sample.unit is not None else f"sample {index}"
        sums[unit] += sample.weight * float(sample.metrics[name])
        weights[unit] += sample.weight
    weights_N = np.array([sample.weight for sample in samples], dtype=np.float64)
    count = float(weights_N.sum() ** 2 / (weights_N @ weights_N))
    return Units(np.array(list(sums.values())), np.array(list(weights.values())), count)


def _make_row(
    suite: str,
    task: str,
    metric: EvalMetric,
    group: dict[str, Any],
    samples: Mapping[Role, list[Sample]],
    *,
    floor: float | None,
    same: bool,
    seed: int,
) -> ComparisonRow:
    units = {role: collect_units(held, metric.name) for role, held in samples.items()}
    shape: Transform = "exp" if metric.kind == "ppl" else "mean"
    top = 1.0 if metric.kind == "accuracy" else metric.top
    shown = {role: estimate(held, top, shape) for role, held in units.items()}
    first = next(iter(units.values()))
    row = ComparisonRow(
        suite, task, metric, group, len(next(iter(samples.values()))), len(first),
        {role: metric.scale * value for role, (value, _) in shown.items()},
        {role: None if error is None else metric.scale * error for role, (_, error) in shown.items()},
    )  # fmt: skip
    if metric.kind == "accuracy":
        shares = {role: wilson_interval(held) for role, held in units.items()}
        row.intervals = {role: (metric.scale * low, metric.scale * high) for role, (low, high) in shares.items()}
    if "base" in shown and floor is not None and metric.higher_is_better:
        value, error = shown["base"]
        if value - 1.96 * (error or 0) <= floor:
            row.flags.append("the base does no better than guessing: no evidence of what was lost")
    if len(units) == 2:
        _add_comparison(row, units, samples, top, shape, same=same, seed=seed)
    if not all(math.isfinite(held.value) for held in units.values()):
        row.flags.append("not a finite number")
    if len(first) < MIN_UNITS:
        row.flags.append(f"fewer than {MIN_UNITS} units")
    elif metric.kind != "accuracy" and (few := min(held.effective for held in units.values())) < MIN_UNITS:
        row.flags.append(
            f"documents of very unequal length count as {few:.0f} of equal length: the interval may be too narrow"
        )
    return row


def _add_comparison(
    row: ComparisonRow,
    units: Mapping[Role, Units],
    samples: Mapping[Role, list[Sample]],
    top: float | None,
    shape: Transform,
    *,
    same: bool,
    seed: int,
) -> None:
    ours, base = units["converted"], units["base"]
    if same:
        row.difference, row.ratio = Interval(0.0, 0.0, 0.0), Interval(1.0, 1.0, 1.0)
    else:
        row.difference = _scale_interval(paired_interval(ours, base, top, shape, seed), row.metric.scale)
        row.ratio = _ratio_interval(row, ours, base, seed)
    if row.metric.kind == "accuracy" and row.units == row.samples:
        values = [np.array([s.metrics[row.metric.name] for s in samples[role]]) for role in ("converted", "base")]
        if not all(np.isin(v, (0, 1)).all() for v in values):
            raise SurgeryError(
                f"{row.task}: {row.metric.name} is declared as an accuracy, so its values must be 0 or 1"
            )
        row.p = mcnemar(*values)


def _scale_interval(interval: Interval, scale: float) -> Interval:
    return Interval(*(None if x is None else scale * x for x in (interval.change, interval.low, interval.high)))


def _ratio_interval(row: ComparisonRow, ours: Units, base: Units, seed: int) -> Interval | None:
    """Return the ratio of perplexities with its interval; of other metrics the ratio alone, for --fail-below."""
    if row.metric.kind == "ppl":
        nats = paired_interval(ours, base, None, "mean", seed)
        return Interval(*(None if x is None else math.exp(min(x, 700.0)) for x in (nats.change, nats.low, nats.high)))
    value = row.values["base"]
    return Interval(row.values["converted"] / value, None, None) if value else None
