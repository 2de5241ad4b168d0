"""Counted work and memory of the fits of one layer, by running the fits themselves on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from surgery.calibration.moments import InputMoments
from surgery.calibration.partition import Round
from surgery.calibration.routing import shared_weight
from surgery.conversion.estimation.counting import OperationCounter, Work, counted_as
from surgery.conversion.fisher import cost_points
from surgery.conversion.fit import FitContext, fit_linear, quick_fit
from surgery.core.distributed import DistContext
from surgery.core.errors import NumericalError, SurgeryError
from surgery.planning.plan import fit_config_to_budget
from surgery.planning.targets import LinearTarget
from surgery.structures import Metric, StructureConfig
from surgery.structures.btt import BTT
from surgery.structures.low_rank import LowRank
from surgery.structures.metric import damp_output_gram
from surgery.structures.monarch import Monarch
from surgery.structures.pivoted_low_rank import PivotedLowRank


@dataclass(frozen=True)
class FitTask:
    """One matrix to be fitted. target: without its names. full_gram: whether its output Gram matrix is full. residual:
    whether its output is added to the residual stream."""

    target: LinearTarget
    full_gram: bool
    residual: bool


@dataclass(frozen=True)
class StageTask:
    """What the count of a stage depends on.

    fit, held: tokens. chunk: tokens of one forward. shards: row shards of the tokens to fit. borrowed: rows of other
    experts that an expert gets.
    """

    tasks: tuple[FitTask, ...]
    device: str
    fit: int
    held: int
    chunk: int
    shards: int
    borrowed: int
    diverged: bool
    sweeps: int
    damping: float
    activations: int


@dataclass(frozen=True)
class StageCount:
    """moments: work of the sums over the tokens to fit and over the held-out ones. fits: work of each matrix. peak:
    bytes beside the weights. dense: bytes of the fitted matrices as dense ones, which later stages read."""

    moments: tuple[Work, Work]
    fits: tuple[Work, ...]
    peak: int
    dense: int


def bare_target(target: LinearTarget) -> LinearTarget:
    """Return a target without the names of its module, so that equal matrices of several layers are counted once.

    Pivoted low rank is counted as low rank (and `lu_work`), because its pivots need numbers, which the meta device
    lacks. Monarch is counted as BTT on a grid of 16 x 16 (less where that does not fit), because its own grids have
    thousands of blocks, which take as many steps to count.
    """
    linear, *neurons = (
        replace(linear, path="matrix", layer="layer", index=0, expert=0, experts="", active=1.0)
        for linear in (target.linear, *target.neurons)
    )
    configs = tuple(dict.fromkeys(_counted_config(c, target) for c in target.configs))
    return replace(
        target, linear=linear, part=None, configs=configs, share=False, basis="", stores_basis=False, joined=(),
        neurons=tuple(neurons),
    )  # fmt: skip


def _counted_config(config: StructureConfig, target: LinearTarget) -> StructureConfig:
    if isinstance(config, PivotedLowRank):
        return LowRank(config.rank)
    return _counted_grid(target) if isinstance(config, Monarch) else config


def _counted_grid(target: LinearTarget) -> BTT:
    """Return BTT on the largest grid of at most 16 x 16 that tiles a matrix and has at most its parameters at rank
    one.
    """
    budget, size = target.uniform_budget(), target.out + target.in_
    fitting = (n for n in (16, 8, 4, 2) if target.out % n == 0 == target.in_ % n and n * size <= budget)
    blocks = next(fitting, 1)
    return BTT((blocks, blocks))


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def _gram(task: FitTask) -> Tensor:
    return _zeros(task.target.out, task.target.out) if task.full_gram else _zeros(task.target.out)


def _is_numerical(error: SurgeryError) -> bool:
    """Return whether an error is a NumericalError, or one with the name of a matrix (surgery.core.errors.naming)."""
    return isinstance(error, NumericalError) or isinstance(error.__context__, NumericalError)


class NotCountedError(Exception):
    """A fit that does not run on the meta device, so that its work and memory are unknown.

    The message is a sentence for the user.
    """


@contextlib.contextmanager
def _counted(device: str, *targets: LinearTarget) -> Iterator[OperationCounter]:
    """Count the operations inside, which belong to the fits of these targets.

    Raises NotCountedError for any error but a SurgeryError, which the conversion would raise too. A structure may fit
    by operations that have no kernel for the meta device, or by numbers that a meta tensor lacks. A NumericalError is
    about such numbers.
    """
    try:
        with counted_as(device) as counter:
            yield counter
    except Exception as error:
        if isinstance(error, SurgeryError) and not _is_numerical(error):
            raise
        matrices = dict.fromkeys(f"{c.name} ({t.out} x {t.in_})" for t in targets for c in t.configs)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise NotCountedError(
            f"the fit of {' or '.join(matrices)} cannot be counted on PyTorch's meta device ({reason}). The conversion "
            "itself does not "
            "need the estimate"
        ) from error


@lru_cache(1024)
def count_stage(stage: StageTask) -> StageCount:
    """Return the count of the moments and fits of one stage, on the outputs of the converted layers."""
    with _counted(stage.device, *(task.target for task in stage.tasks)) as counter:
        targets = [replace(t.target, linear=replace(t.target.linear, path=str(i))) for i, t in enumerate(stage.tasks)]
        weights = {
            target.name: (_zeros(target.out, target.in_), task.residual) for target, task in zip(targets, stage.tasks)
        }
        start = counter.held
        counter.peak = start
        fit, of_fit = _count_moments(counter, weights, stage, stage.fit, stage.shards)
        held, of_held = _count_moments(counter, weights, stage, stage.held, 1) if stage.held else (None, Work())
        context = FitContext(fit, None if held is None else lambda: held, damping=stage.damping, sweeps=stage.sweeps)
        fits, dense = [], []
        for target, task in zip(targets, stage.tasks):
            before = counter.mark()
            context.gram = _gram(task)
            fit.targets[target.name].weight_OI = weights[target.name][0]
            result = fit_linear(target, target.uniform_budget(), weights[target.name][0], context)
            dense.append(result.linear.dense() if result.linear is not None else result.dense_OI)
            del result
            fits.append(counter.work.minus(before))
        size = sum(4 * matrix.numel() for matrix in dense if matrix is not None)
        return StageCount((of_fit, of_held), tuple(fits), counter.peak - start, size)


def _count_moments(
    counter: OperationCounter, weights: dict[str, tuple[Tensor, bool]], stage: StageTask, tokens: int, shards: int
) -> tuple[InputMoments, Work]:
    """Return the moments of a stage over `tokens` tokens, and the work of their sums; one chunk is run and
    multiplied.
    """
    before = counter.mark()
    total = InputMoments(weights)
    shard_moments = InputMoments(weights) if shards > 1 else total
    made = counter.mark()
    rows = max(1, min(stage.chunk, tokens // shards))
    activations = _zeros(stage.activations // 4)
    x = _zeros(rows, total.c_II.shape[0])
    x0 = _zeros(rows, total.c_II.shape[0]) if stage.diverged else x
    first = next(iter(weights.values()))
    gap = _zeros(rows, first[0].shape[0]) if first[1] and stage.diverged else None
    add = counter.mark()
    shard_moments.add(x, x0, gap)
    work = counter.work.minus(add).times(tokens / rows) + made.minus(before)
    del x, x0, gap, activations
    again = counter.mark()
    if shard_moments is not total:
        total.ordered_reduce(shard_moments, Round((0,), range(0)), DistContext(), True)
        work += counter.work.minus(again).times(max(0, shards - 1))
        del shard_moments
    if stage.borrowed:
        shared = InputMoments({"shared": (shared_weight(total.c_II.shape[0], first[0]), False)})
        total.borrow(shared, stage.borrowed)
    total.count = max(1, tokens)
    total.means()
    return total, work + counter.work.minus(again)


@lru_cache(1024)
def count_rank_errors(tasks: tuple[FitTask, ...], device: str, damping: float) -> tuple[tuple[Work, ...], int, int]:
    """Return (work of the cost points of each matrix, peak bytes beside weights and moments, bytes that stay cached) of
    a stage.
    """
    with _counted(device, *(task.target for task in tasks)) as counter:
        moment = _zeros(tasks[0].target.in_, tasks[0].target.in_)
        weights = [_zeros(task.target.out, task.target.in_) for task in tasks]
        grams = [_gram(task) for task in tasks]
        metric, start, works = Metric(moment), counter.held, []
        counter.peak = start
        for task, weight, gram in zip(tasks, weights, grams):
            before = counter.mark()
            cost_points(task.target, weight, Metric(moment, damp_output_gram(gram), metric.c_cache))
            works.append(counter.work.minus(before))
        return tuple(works), counter.peak - start, counter.held - start


@lru_cache(1024)
def count_quick_fits(tasks: tuple[FitTask, ...], device: str, sweeps: int) -> tuple[tuple[Work, ...], int]:
    """Return (work of a trial's fit of each matrix, peak bytes beside weights and moments) of a stage."""
    with _counted(device, *(task.target for task in tasks)) as counter:
        moment, cache = _zeros(tasks[0].target.in_, tasks[0].target.in_), dict[object, object]()
        weights, start, works = [_zeros(t.target.out, t.target.in_) for t in tasks], counter.held, []
        counter.peak = start
        for task, weight in zip(tasks, weights):
            before = counter.mark()
            configs = [fit_config_to_budget(c, task.target, task.target.uniform_budget()) for c in task.target.configs]
            metric = Metric(moment, damp_output_gram(_gram(task)), cache)
            fitted = quick_fit(task.target, [c for c in configs if c is not None] or [None], weight, metric, sweeps)
            if fitted.linear is not None:
                fitted.linear.dense()
            works.append(counter.work.minus(before))
        return tuple(works), counter.peak - start


@lru_cache(1024)
def count_projection(target: LinearTarget, device: str) -> tuple[Work, int]:
    """Return (work, peak bytes with the weight) of a fit without calibration text."""
    with _counted(device, target) as counter:
        start = counter.held
        counter.peak = start
        fit_linear(target, target.uniform_budget(), _zeros(target.out, target.in_), FitContext())
        return counter.work, counter.peak - start


def lu_work(targets: Sequence[LinearTarget]) -> Work:
    """Return the work that pivoted low rank adds to low rank: an LU factorization and two solves of each matrix."""
    total = 0.0
    for target in targets:
        for config in target.configs:
            if isinstance(config, PivotedLowRank):
                with contextlib.suppress(SurgeryError):
                    fitted = fit_config_to_budget(config, target, target.uniform_budget())
                    total += 5.0 * target.out * (getattr(fitted, "rank", 0) or 0) ** 2
    return Work(solves=total)
