"""Structures chosen by time: the candidates of each matrix with their predicted nanoseconds, and the allocation of a
time over matrices.

A recipe's `speed` asks for a ratio of the time of the replaced linears, dense / structured. Candidates have ranks that
GPUs like and that the table of measured times covers, and take less time than the dense matrix. Allocation spends the
time that the ratio leaves as `allocate_budget` spends parameters: where a nanosecond lowers the error most. A matrix
that no candidate serves stays dense.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from surgery.architectures.linears import ModelLayout
from surgery.core.errors import SurgeryError
from surgery.planning.allocate import CostPoint, spend
from surgery.planning.measured_times import LINEAR_OPS, MeasuredTimes, included_tables, read_measured_times
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.speed_recipe import SpeedRecipe
from surgery.planning.targets import LinearTarget, Plan, TimedOption, TimeTarget
from surgery.structures import STRUCTURES, StructureConfig

RANK_MULTIPLE = 64  # of candidates' ranks, unless the recipe has round_ranks
MEASURE = "Measure it with: surgery bench linear --model SRC --out FILE, and set speed.measured=FILE"


# -- the table ---------------------------------------------------------------------------------------------
def find_table(speed: SpeedRecipe) -> dict[str, Any]:
    """Return the table of measured times that a recipe names. Raises SurgeryError if there is none."""
    tables = included_tables() if speed.measured is None else (read_measured_times(Path(speed.measured)),)
    where = speed.measured or "kernels/tuning.json"
    known = ", ".join(f"{table['device']} ({table['dtype']})" for table in tables)
    matches = [
        table
        for table in tables
        if (speed.device is None or table["device"].casefold() == speed.device.casefold())
        and speed.dtype in (None, table["dtype"])
    ]
    if not matches:
        query = " ".join(word for word in (speed.device, speed.dtype) if word)
        raise SurgeryError(f"speed: {where} has no times of {query!r}, it has those of {known}. {MEASURE}")
    matches = [table for table in matches if table["device"] == matches[0]["device"]]  # the first, if none is named
    if len({table["dtype"] for table in matches}) > 1:
        raise SurgeryError(f"speed: {where} has times of several dtypes ({known}). Set speed.dtype")
    return {**matches[0], "rows": [row for table in matches for row in table["rows"]]}


def named_table(recipe: ConversionRecipe, measured: Path | None) -> dict[str, Any] | None:
    """Return the table that predictions use: that of the file `measured`, else of the recipe's `speed`; None if neither
    names one.
    """
    if measured is not None:
        return read_measured_times(measured)
    return None if recipe.speed is None else find_table(recipe.speed)


def time_target(speed: SpeedRecipe, table: dict[str, Any]) -> TimeTarget:
    """Return the target of a recipe, with the device and digest of its table."""
    digest = hashlib.sha256(json.dumps([table["dtype"], table["rows"]], sort_keys=True).encode()).hexdigest()
    return TimeTarget(speed.phase, speed.call_tokens, speed.ratio, table["device"], table["dtype"], digest)


# -- the candidates of a matrix ------------------------------------------------------------------------------
class TimedCandidates:
    """The candidates of matrices on the device of one table. multiple: ranks are multiples of it."""

    def __init__(self, table: dict[str, Any], target: TimeTarget, multiple: int):
        self.times, self.target, self.multiple = MeasuredTimes(table), target, multiple
        self.known: dict[Any, tuple[int, tuple[TimedOption, ...]]] = {}  # by shape and configs: layers repeat them

    def dense_ns(self, name: str, shape: tuple[int, int]) -> int:
        """Return the nanoseconds of a dense matrix (out, in). Raises SurgeryError if no size near it was measured."""
        target = self.target
        prediction = self.times.dense(target.phase, target.tokens, *shape)
        if prediction is None or not self.times.covers_dense(target.phase, target.tokens, *shape):
            raise SurgeryError(
                f"speed: a linear of {shape[1]:,} -> {shape[0]:,} ({name}) was not measured for "
                f"{target.describe_call()}, nor were widths "
                f"within a factor of 2 and tokens within a factor of 4. {MEASURE}; or leave it dense"
            )
        return _nanoseconds(prediction.ms)

    def options(
        self, name: str, shape: tuple[int, int], configs: Sequence[StructureConfig], joined: tuple[int, ...] = ()
    ) -> tuple[int, tuple[TimedOption, ...]]:
        """Return (nanoseconds of the dense matrix, the structures that take less).

        joined: outputs of the linears that the matrix joins, which are products of their own while they are dense.
        Raises SurgeryError if the dense matrix was not measured, or none of the structures was near its shape.
        """
        key = (shape, tuple(configs), joined)
        if key not in self.known:
            dense = sum(self.dense_ns(name, (out, shape[1])) for out in joined or shape[:1])
            timed = [option for config in configs for option in self._timed(config, shape)]
            if not timed:
                names = " or ".join(dict.fromkeys(config.name for config in configs))
                raise SurgeryError(
                    f"speed: {names} for {shape[1]:,} -> {shape[0]:,} ({name}) was not measured for "
                    f"{self.target.describe_call()} at a rank that "
                    f"is a multiple of {self.multiple} and stores less than the dense matrix. {MEASURE}; or leave it "
                    "dense"
                )
            self.known[key] = dense, tuple(option for option in timed if option.ns < dense)
        return self.known[key]

    def _timed(self, config: StructureConfig, shape: tuple[int, int]) -> list[TimedOption]:
        """Return the measured candidates of one structure; [] if it was not measured, or does not fit the shape."""
        cls, target, timed_options = STRUCTURES[config], self.target, []
        if {"monarch": "btt"}.get(config.name, config.name) not in LINEAR_OPS:
            return []
        try:
            resolved: Any = cls.resolve(config, *shape)
        except SurgeryError:
            return []
        if resolved.__dict__.get("blocks") == "budget":  # Monarch, whose grid follows from the parameters
            return []
        for ranked in self._ranked(cls, resolved, shape):
            params, terms = cls.params(ranked, *shape), ranked.to_dict()
            if params >= shape[0] * shape[1] or not self.times.covers(target.phase, target.tokens, terms, shape):
                continue
            time = self.times.structured(target.phase, target.tokens, terms, shape)
            if time is not None:
                timed_options.append(TimedOption(ranked, _nanoseconds(time.ms), params))
        return timed_options

    def _ranked(self, cls: Any, resolved: Any, shape: tuple[int, int]) -> list[Any]:
        """Return the config at each candidate rank: multiples of `multiple`, and for blocks measured ranks below it."""
        if resolved.rank is not None:
            return [resolved]
        full = cls.full_rank(resolved, *shape)
        ranks = set(range(self.multiple, full, self.multiple))
        if hasattr(resolved, "blocks"):
            measured = self.times.measured_ranks(self.target.phase, resolved.to_dict())
            ranks |= {rank for rank in measured if rank < min(self.multiple, full)}
        return [type(resolved)(**{**resolved.__dict__, "rank": rank}) for rank in sorted(ranks)]


def plan_by_time(
    targets: Targets, speed: SpeedRecipe, round_ranks: int, layout: ModelLayout
) -> tuple[Targets, TimeTarget, list[str]]:
    """Return (the targets with their options, the target of time, notes for the user).

    The structures shown spend the time evenly (`even_points`). Raises SurgeryError if a matrix was not measured, or if
    the target cannot be reached.
    """
    table = find_table(speed)
    time, multiple = time_target(speed, table), round_ranks if round_ranks > 1 else RANK_MULTIPLE
    candidates = TimedCandidates(table, time, multiple)
    timed: Targets = {}
    for path, slices in targets.items():
        if slices[0].linear.experts and any(target.configs for target in slices):
            raise SurgeryError(
                f"speed: {path} belongs to routed experts, of which few compute a token, so its time is not known. "
                "Leave experts dense with "
                "rules: [{match: 'expert.*', structure: dense}], or give keep"
            )
        timed[path] = tuple(_timed_target(target, candidates) if target.configs else target for target in slices)
    replaced = [target for slices in timed.values() for target in slices if target.configs]
    if not replaced:
        raise SurgeryError("speed: the recipe replaces no linear, so there is no time to save. Leave speed out")
    choice = allocate_time(replaced, {target.name: even_points(target) for target in replaced}, time)
    names = dict.fromkeys(config.name for slices in targets.values() for target in slices for config in target.configs)
    unmeasured = [name for name in names if name not in {o.config.name for t in replaced for o in t.options}]
    notes = []
    if unmeasured:
        notes.append(
            f"speed: {', '.join(unmeasured)} left out of the candidates: near these shapes no measured time is shorter "
            "than that of dense"
        )
    time = replace(time, share=_share_of_linears(replaced, timed, layout, candidates))
    return _previewed(timed, choice), time, notes


def _timed_target(target: LinearTarget, candidates: TimedCandidates) -> LinearTarget:
    outs = tuple(linear.out for linear in target.joined)
    dense, options = candidates.options(target.name, (target.out, target.in_), target.configs, outs)
    kinds = {type(option.config) for option in options}
    configs = tuple(config for config in target.configs if type(config) in kinds) or target.configs
    return replace(target, dense_ns=dense, options=options, configs=configs)


def _share_of_linears(
    replaced: Sequence[LinearTarget], targets: Targets, layout: ModelLayout, candidates: TimedCandidates
) -> float | None:
    """Return time of the replaced linears / time of all, all dense; None if one was not measured or belongs to routed
    experts.
    """
    rest = [(target.out, target.in_) for slices in targets.values() for target in slices if not target.configs]
    covered = {linear.path for slices in targets.values() for linear in slices[0].linears}
    linears = [linear for linear in layout.linears if linear.path not in covered]
    mine, shapes = sum(target.dense_ns for target in replaced), Counter([*rest, *((x.out, x.in_) for x in linears)])
    try:
        others = sum(count * candidates.dense_ns("", shape) for shape, count in shapes.items())
    except SurgeryError:
        return None
    return None if any(linear.experts for linear in linears) else mine / (mine + others)


def _nanoseconds(ms: float) -> int:
    return math.ceil(ms * 1e6)


# -- the choice ----------------------------------------------------------------------------------------------
Choice = dict[str, StructureConfig | None]  # target name -> its structure, None: dense
Targets = dict[str, tuple["LinearTarget", ...]]


def even_points(target: LinearTarget) -> list[CostPoint]:
    """Return cost points without knowledge of the weights: the error falls with the square of the share of dropped
    parameters.
    """
    param_counts = [target.numel, *(option.params for option in target.options)]
    return [
        CostPoint(ns, target.numel * (1 - params / target.numel) ** 2)
        for ns, params in zip(option_times(target), param_counts)
    ]


def option_times(target: LinearTarget) -> list[int]:
    """Return the nanoseconds of the dense matrix and of each of its options."""
    return [target.dense_ns, *(option.ns for option in target.options)]


def allocate_time(
    targets: Sequence[LinearTarget], points: Mapping[str, Sequence[CostPoint]], time: TimeTarget
) -> Choice:
    """Return the structure of each target, so that all take at most the time of the dense matrices / ratio.

    points: for each target by name (nanoseconds, error) of the dense matrix and of each option. Raises SurgeryError,
    with the best ratio that is reachable, if the fastest options take longer.
    """
    budget = int(sum(target.dense_ns for target in targets) / time.ratio)
    chosen = spend({target.name: points[target.name] for target in targets}, budget)
    if chosen is None:
        raise SurgeryError(_unreachable(targets, time))
    choice: Choice = {}
    for target in targets:
        index = list(points[target.name]).index(chosen[target.name])
        choice[target.name] = target.options[index - 1].config if index else None
    return choice


def _unreachable(targets: Sequence[LinearTarget], time: TimeTarget) -> str:
    before, least = sum(t.dense_ns for t in targets), sum(min(option_times(t)) for t in targets)
    best = math.floor(100 * before / least) / 100
    said = f"speed: {time.phase} {time.ratio:g} cannot be reached for {time.describe_call()}"
    if best <= 1:
        return (
            f"{said}: none of the structures is faster than the dense matrices. Choose other structures, blocks or a "
            "longer prompt"
        )
    dense = sum(not target.options for target in targets)
    stay = f"; {dense} of {len(targets)} matrices have no faster structure and stay dense" if dense else ""
    return (
        f"{said}: the fastest structures of these matrices reach {best:g}{stay}. Set speed.{time.phase} to {best:g} or "
        "less"
    )


def option_of(target: LinearTarget, structure: Any) -> TimedOption | None:
    """Return the option of a target with a structure as plain data; None for None and dense.

    Raises SurgeryError if the target has no such option.
    """
    if structure is None or structure == {"structure": "dense"}:
        return None
    for option in target.options:
        if option.config.to_dict() == {k: v for k, v in structure.items() if k != "share"}:
            return option
    raise SurgeryError(f"{target.name} has no option {str(structure)[:100]} in time")


def time_after(plan: Plan, structures: Mapping[str, Any]) -> int:
    """Return the nanoseconds of all replaced targets with structures as plain data, by name."""
    options = ((target, option_of(target, structures[target.name])) for target in plan.replaced_targets())
    return sum(target.dense_ns if option is None else option.ns for target, option in options)


def time_before(plan: Plan) -> int:
    """Return the nanoseconds of all replaced targets while they are dense."""
    return sum(target.dense_ns for target in plan.replaced_targets())


def with_structures(plan: Plan, structures: Mapping[str, Any]) -> Plan:
    """Return the plan with exactly these structures (plain data by target name; None: dense)."""

    def narrowed(target: LinearTarget) -> LinearTarget:
        if not target.configs:
            return target
        option = option_of(target, structures[target.name])
        return (
            _with_preview(target, option)
            if option is None
            else replace(_with_preview(target, option), configs=(option.config,))
        )

    return replace(plan, targets={path: tuple(map(narrowed, slices)) for path, slices in plan.targets.items()})


def _with_preview(target: LinearTarget, option: TimedOption | None) -> LinearTarget:
    if option is None:
        return replace(target, preview=None, keep=1.0)
    return replace(target, preview=option.config, keep=option.params / target.numel)


def _previewed(targets: Targets, choice: Choice) -> Targets:
    """Return the targets with the structures of a choice as preview."""

    def shown(target: LinearTarget) -> LinearTarget:
        option = next((o for o in target.options if o.config == choice.get(target.name)), None)
        return _with_preview(target, option) if target.configs else target

    return {path: tuple(map(shown, slices)) for path, slices in targets.items()}


def speed_dict(plan: Plan, structures: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the target and the predicted milliseconds of the replaced linears as JSON data; None without `speed`."""
    if plan.time is None:
        return None
    time, before, after = plan.time, time_before(plan), time_after(plan, structures)
    dense = sum(option_of(target, structures[target.name]) is None for target in plan.replaced_targets())
    return {
        "device": time.device,
        "dtype": time.dtype,
        "phase": time.phase,
        "tokens": time.tokens,
        "target": time.ratio,
        "before": before / 1e6,
        "after": after / 1e6,
        "ratio": before / after,
        "matrices": len(plan.replaced_targets()),
        "dense": dense,
        "share": time.share,
    }
