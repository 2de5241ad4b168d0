"""Compute averages over tasks (eval/averages.py) of one or several models, with 95% intervals.

    average      A = sum_k c_k v_k over tasks k, with v_k the weighted mean of task k's units and sum_k c_k = 1
    draw         A* = sum_k c_k (v_k + sqrt(n_k / (n_k - 1)) (v_k* - v_k))

Units are resampled within each task (stratified bootstrap; the root corrects the variance of few units, Davison and
Hinkley 1997, section 3.2), the same units for all models, so that the difficulty of a unit cancels in a difference.
Intervals are percentiles, after one question is added in each direction where one question moves the average most: as
in statistics.py, equal answers are no certainty.

An average is computed only if all its tasks were measured. Otherwise a note names the missing tasks, and a mean of the
others has another name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from surgery.eval.averages import Average, EffectiveLength, Member, SuiteAverages
from surgery.eval.results.compare import Key, collect_units, shared_metrics, shared_samples
from surgery.eval.results.statistics import Interval, Units, draw_values
from surgery.eval.suite import EvalMetric, Sample, SuiteResult

Cell = tuple[str, "int | None", "tuple[str, Any] | None"]  # task, length, another group
MAX_NAMED = 6  # missing tasks that a note names


@dataclass
class AverageRow:
    """An average of one suite.

    Attributes:
        length: length of the tasks, if all have the same.
        values, intervals: value and its interval (low, high) by model, scaled for display; None: a task has a single
            unit.
        differences: by model: change against the base, with its interval.
        tasks, samples: how many tasks and samples it averages.
        unit: "tokens" for an effective length, else "".
        missing: tasks that were not measured; the row then has another name than the average.
        source: the paper that reports it.
    """

    suite: str
    name: str
    length: int | None
    metric: str
    values: dict[str, float]
    intervals: dict[str, tuple[float, float] | None]
    differences: dict[str, Interval] = field(default_factory=dict)
    tasks: int = 0
    samples: int = 0
    unit: str = ""
    missing: list[str] = field(default_factory=list)
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON data."""
        return asdict(self)

    @property
    def label(self) -> str:
        """Name of the row in tables."""
        return self.name + (f", length {self.length}" if self.length is not None else "")


def average_rows(
    suite: str,
    declare: Callable[[Sequence[int | None]], SuiteAverages],
    results: Mapping[str, SuiteResult],
    base: str | None = None,
    same: Sequence[str] = (),
    *,
    seed: int = 0,
) -> tuple[list[AverageRow], list[str]]:
    """Return the averages of a suite and notes on those that cannot be computed.

    Args:
        results: by model. All have the same samples.
        base: the model that the others are compared with; None: no differences.
        same: models that are the base itself, which differ from it by exactly zero.
    """
    keys, samples = shared_samples(suite, results)
    lengths = sorted({dict(group).get("length") for _, group, _ in keys}, key=lambda n: (n is not None, n))
    if all(n is None for n in lengths):
        lengths = []
    declared = declare(lengths)
    table = _Table(shared_metrics(results.values()), keys, samples, base, same, seed)
    rows: list[AverageRow] = []
    absent: dict[str, list[str]] = {}
    whole: dict[tuple[str, int | None], _Draws] = {}
    for average in declared.averages:
        there = [m for m in average.members if table.has(m)]
        missing = [
            m.label if average.length is None else m.task
            for m in average.members
            if m not in there and not (average.by_size and m.where and table.has(replace(m, where=None)))
        ]
        if not missing and there:
            drawn = whole[average.name, average.length] = table.draw(there, average.by_size)
            rows.append(table.row(suite, average, average.name, drawn, there))
        elif average.partial and len(there) > 1:
            name = f"mean of {len(there)} of the {len(average.members)} tasks"
            rows.append(table.row(suite, average, name, table.draw(there), there, missing))
        if missing and 2 * len(there) >= len(average.members):
            absent.setdefault(_describe(average), []).extend(missing)
    unfit: list[str] = []
    for effective in declared.effective:
        row = _effective_row(suite, effective, whole, base, unfit)
        rows += [row] if row else []
    notes = unfit + [f"{name} is not given: {_listed(missing)} not measured" for name, missing in absent.items()]
    return rows, notes


def _describe(average: Average) -> str:
    return average.name + (f" at {average.length:,}" if average.length is not None else "")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more + (" was" if len(names) == 1 else " were")


@dataclass
class _Draws:
    """An average: values and bootstrap draws (R,) by model, scaled; step: what one question moves the average by, at
    most.
    """

    values: dict[str, float]
    draws: dict[str, np.ndarray]
    step: float
    top: float
    whole: bool


class _Table:
    """Means and bootstrap draws of the members of a suite's averages, each computed once."""

    def __init__(
        self,
        metrics: Mapping[str, EvalMetric],
        keys: Sequence[Key],
        samples: Mapping[str, dict[Key, Sample]],
        base: str | None,
        same: Sequence[str],
        seed: int,
    ):
        self.metrics, self.samples, self.base, self.same, self.seed = metrics, samples, base, same, seed
        self.cells: dict[Cell, list[Key]] = {}
        for key in keys:
            length = dict(key[1]).get("length")
            for n in {length, None}:
                for where in (None, *(group for group in key[1] if group[0] != "length")):
                    self.cells.setdefault((key[0], n, where), []).append(key)
        self.drawn: dict[tuple[Any, ...], tuple[dict[str, Units], dict[str, np.ndarray]]] = {}

    def has(self, member: Member) -> bool:
        """Return whether a member was measured, by every model."""
        return member.metric in self.metrics and bool(self._keys(member))

    def _keys(self, member: Member) -> list[Key]:
        keys = self.cells.get((member.task, member.length, member.where), [])
        return [k for k in keys if all(member.metric in held[k].metrics for held in self.samples.values())]

    def samples_of(self, member: Member) -> int:
        """Return how many samples a member has."""
        return len(self._keys(member))

    def _draw_members(self, members: Sequence[Member]) -> tuple[dict[str, Units], dict[str, np.ndarray]]:
        """Return (units, draws (R,)) by model, of all samples of the members; the same units are drawn for all
        models.
        """
        metric, first = members[0].metric, members[0]
        key = (metric, *((m.task, m.length, m.where) for m in members))
        if key not in self.drawn:
            keys = [k for member in members for k in self._keys(member)]
            units = {name: collect_units([held[k] for k in keys], metric) for name, held in self.samples.items()}
            words = f"{first.task} {first.length}{first.where or ''}{len(members) if len(members) > 1 else ''}"
            rng = np.random.default_rng([self.seed, *map(ord, words)])
            drawn = draw_values(list(units.values()), rng)
            n = len(next(iter(units.values())))
            spread = math.sqrt(n / (n - 1)) if n > 1 else 1.0
            values = {name: u.value + spread * (draws_R - u.value) for (name, u), draws_R in zip(units.items(), drawn)}
            self.drawn[key] = (units, values)
        return self.drawn[key]

    def draw(self, members: Sequence[Member], by_size: bool = False) -> _Draws:
        """Return the average of members that were measured. by_size: the mean over all their samples, drawn
        together.
        """
        strata = [(list(members), 1.0)] if by_size else [([member], member.weight) for member in members]
        total = sum(weight for _, weight in strata)
        drawn = _Draws({}, {}, 0.0, 0.0, True)
        for stratum, weight in strata:
            units, draws = self._draw_members(stratum)
            share, metric = weight / total, self.metrics[stratum[0].metric]
            scale, top = share * metric.scale, metric.scale * (1.0 if metric.kind == "accuracy" else metric.top or 0.0)
            for name, held in units.items():
                drawn.values[name] = drawn.values.get(name, 0.0) + scale * held.value
                drawn.draws[name] = drawn.draws.get(name, 0.0) + scale * draws[name]
                drawn.whole = drawn.whole and len(held) > 1 and math.isfinite(held.value)
            n = len(next(iter(units.values())))
            drawn.step, drawn.top = max(drawn.step, share / (n + 1)), max(drawn.top, top)
        return drawn

    def row(
        self,
        suite: str,
        average: Average,
        name: str,
        drawn: _Draws,
        members: Sequence[Member],
        missing: Sequence[str] = (),
    ) -> AverageRow:
        """Return the row of an average."""
        top = drawn.top
        intervals = {
            model: _percentiles(draws_R, top, 0.0, top, drawn.step) if drawn.whole else None
            for model, draws_R in drawn.draws.items()
        }
        differences: dict[str, Interval] = {}
        base = self.base
        for model in drawn.values:
            if base is None or model == base:
                continue
            change = drawn.values[model] - drawn.values[base]
            low, high = None, None
            if model in self.same:
                change, low, high = 0.0, 0.0, 0.0
            elif drawn.whole:
                low, high = _percentiles(drawn.draws[model] - drawn.draws[base], top, -top, top, drawn.step)
            differences[model] = Interval(change, low, high)
        return AverageRow(
            suite, name, average.length, members[0].metric, dict(drawn.values), intervals, differences,
            tasks=len({m.task for m in members}), samples=sum(self.samples_of(m) for m in members),
            missing=list(missing), source="" if missing else average.source,
        )  # fmt: skip


def _percentiles(draws_R: np.ndarray, top: float, lowest: float, highest: float, step: float) -> tuple[float, float]:
    """Return the 2.5% and 97.5% percentiles after one question of each extreme value is added, each drawn Poisson(1)
    times.

    step: share of the average that one question has. Without bounds (top 0) nothing is added.
    """
    if top == 0:
        low, high = np.quantile(draws_R, (0.025, 0.975))
        return float(low), float(high)
    low, high = np.quantile(_add_questions(draws_R, lowest, highest, step), (0.025, 0.975))
    return max(float(low), lowest), min(float(high), highest)


def _add_questions(draws_R: np.ndarray, lowest: float, highest: float, step: float, seed: int = 0) -> np.ndarray:
    """Return draws (R,) with one more question of each extreme value, each drawn Poisson(1) times."""
    added_2R = np.random.default_rng(seed).poisson(1.0, (2, len(draws_R)))
    return draws_R + step * (added_2R[0] * (highest - draws_R) + added_2R[1] * (lowest - draws_R))


def _effective_row(
    suite: str,
    effective: EffectiveLength,
    whole: Mapping[tuple[str, int | None], _Draws],
    base: str | None,
    notes: list[str],
) -> AverageRow | None:
    """Return the row of an effective length; None unless every length has its average, or without a base where it is
    needed.

    0 stands for "none of the measured lengths". Draws have the same added questions as those of averages. A base that
    scores 0 is no threshold, because nothing is below it: a note says so.
    """
    by_length = [(average.length, whole.get((average.name, average.length))) for average in effective.averages]
    if not by_length or any(drawn is None for _, drawn in by_length) or (effective.threshold is None and base is None):
        return None
    lengths = np.array([length for length, _ in by_length])
    averages_drawn = [drawn for _, drawn in by_length if drawn is not None]
    name, row = effective.name, AverageRow(suite, effective.name, None, "tokens", {}, {}, unit="tokens")
    is_of_base = effective.threshold is None
    limit = (
        averages_drawn[0].values[str(base)] if is_of_base else float(effective.threshold or 0.0) * averages_drawn[0].top
    )
    if is_of_base and limit <= 0:
        notes.append(f"{name} is not given: the base scores 0 at {lengths[0]:,}")
        return None
    if is_of_base:
        name = f"effective length, threshold {limit:.3g} (the base at {lengths[0]:,})"
    for model in averages_drawn[0].values:
        passes_L = np.array([drawn.values[model] >= limit for drawn in averages_drawn])
        passes_RL = np.stack(
            [
                _passes(drawn, averages_drawn[0], model, base if is_of_base else None, limit, i)
                for i, drawn in enumerate(averages_drawn)
            ],
            axis=1,
        )
        drawn_R = np.where(passes_RL, lengths, 0).max(1)
        row.values[model] = float(np.where(passes_L, lengths, 0).max())
        low, high = np.quantile(drawn_R, (0.025, 0.975), method="inverted_cdf")
        row.intervals[model] = (float(low), float(high)) if all(drawn.whole for drawn in averages_drawn) else None
    row.name, row.source = name, effective.source
    row.tasks = len({m.task for average in effective.averages for m in average.members})
    return row


def _passes(drawn: _Draws, first: _Draws, model: str, base: str | None, limit: float, seed: int) -> np.ndarray:
    """Return in which draws (R,) an average reaches the limit, or the base's average of the shortest length,
    `first`.
    """
    draws_R, top = drawn.draws[model], drawn.top
    if base is None:
        return _add_questions(draws_R, 0.0, top, drawn.step, seed) >= limit
    if drawn is first and model == base:
        return np.ones(len(draws_R), dtype=bool)
    return _add_questions(draws_R - first.draws[base], -top, top, max(drawn.step, first.step), seed) >= 0
