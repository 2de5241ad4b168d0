"""Fitting one matrix: closed-form start, sweeps, and a held-out check before anything is accepted."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.moments import HeldOutError, InputMoments
from surgery.core.errors import NumbersError, SurgeryError, naming
from surgery.planning.plan import LinearTarget, fit_config_to_budget
from surgery.structures import STRUCTURES, Metric, StructuredLinear, linalg
from surgery.structures.metric import damp_, damp_output_gram, spd_factor

# Sweeps go on while they lower the error of the fit by this share.
MIN_SWEEP_GAIN = 1e-3


@dataclass(frozen=True)
class FitRecord:
    """What the report says of one matrix, of (out, in) numbers. error: relative to the output it was to reproduce, on held-out rows,
    sqrt(E|y* - B x|^2 / E|y*|^2); without calibration, of the weights (Frobenius). start: the closed form's.
    refit: whether the target was moved to make up for the layers below."""

    name: str
    roles: list[str]
    structure: dict[str, Any]
    shape: tuple[int, int]
    params_before: int
    params_after: int
    macs_before: int
    macs_after: int
    error: float
    start: float
    sweeps: int
    refit: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class FitResult:
    """linear: the structure, float32 and already rounded to the stored dtype; or dense_OI, kept dense."""

    record: FitRecord
    linear: StructuredLinear | None
    dense_OI: Tensor | None = None


@dataclass
class FitContext:
    """Everything a cut is fitted and judged with; moments are None without calibration text, the held-out ones
    gathered when asked for."""

    fit: InputMoments | None = None
    held: Callable[[], InputMoments] | None = None
    gram: Tensor | None = None
    damping: float = 0.01
    sweeps: int = 6
    stored: torch.dtype = torch.float32


@dataclass
class Candidate:
    """A candidate and how it was judged: loss decides, error is shown. config None: a dense matrix."""

    config: Any
    target_OI: Tensor
    b: Any  # StructuredLinear or a dense matrix
    loss: float
    error: float
    refit: bool
    start: float = 0.0
    sweeps: int = 0


# Who tells candidates apart: held-out rows; the metric of the fit; nobody, where a trial has one candidate.
CandidateScorer = HeldOutError | Metric | None


@torch.no_grad()
def fit_linear(cut: LinearTarget, budget: float, weight_OI: Tensor, judge: FitContext) -> FitResult:
    """The best of the cut's structures within `budget` numbers, by held-out error.

    SurgeryError with the matrix's name where its numbers cannot be fitted or stored. Two targets are tried: W itself, and the regression K C^-1 of the wanted output on the input that the
    converted layers give; the second is taken only if the held-out error falls. So is what sweeps gain.
    """
    with naming(cut.name):
        return _fit_cut(cut, budget, weight_OI, judge)


def _fit_cut(cut: LinearTarget, budget: float, weight_OI: Tensor, judge: FitContext) -> FitResult:
    began = time.perf_counter()
    metric = stage_metric(judge)
    configs, targets = candidate_configs(cut, budget), [weight_OI, *_regression_target(cut, weight_OI, judge, metric)]
    arbiter: CandidateScorer = metric
    if judge.held is not None:
        arbiter = HeldOutError(judge.held(), cut.name, damp_output_gram(judge.gram))
    else:  # no held-out rows: the target that takes the layers below into account
        targets = targets[-1:]
        if len(configs) == 1 and metric.c_II is not None:
            arbiter = None
    attempts = []
    for config in configs:
        # The moved target first: its product with C is known, and only the last such product is kept.
        starts = [_initial_candidate(config, target, metric, arbiter, target is not weight_OI) for target in reversed(targets)]
        attempts.append(_refine(min(reversed(starts), key=lambda a: a.loss), metric, arbiter, judge.sweeps))
    best = min(attempts, key=lambda a: a.loss)
    return _fit_result(cut, best, judge.stored, time.perf_counter() - began)


@torch.no_grad()
def quick_fit(cut: LinearTarget, configs: list[Any], weight_OI: Tensor, metric: Metric, sweeps: int) -> FitResult:
    """The best of `task_configs` in the metric itself, nothing held out: for a trial, which is judged as a whole."""
    began, arbiter = time.perf_counter(), metric if len(configs) > 1 else None
    with naming(cut.name):
        attempts = [_refine(_initial_candidate(c, weight_OI, metric, arbiter, False), metric, arbiter, sweeps) for c in configs]
        return _fit_result(cut, min(attempts, key=lambda a: a.loss), torch.float32, time.perf_counter() - began)


def stage_metric(judge: FitContext) -> Metric:
    """Roots of C are found once for all matrices of the stage."""
    if judge.fit is None:
        return Metric()
    moments = judge.fit
    if "ridge" not in moments.known:  # in place: C of a wide input is the largest thing in memory
        moments.known["ridge"] = damp_(moments.c_II, judge.damping)
    return Metric(moments.c_II, damp_output_gram(judge.gram), moments.known)


def candidate_configs(cut: LinearTarget, budget: float) -> list[Any]:
    """Resolved configs, or [None] to stay dense: where the recipe says so or the budget pays for all of it."""
    if not cut.configs or (budget >= cut.numel and not cut.explicit):
        return [None]
    configs = [c for config in cut.configs if (c := fit_config_to_budget(config, cut, budget)) is not None]
    if not configs:
        raise SurgeryError(
            f"convert: no structure of {cut.name} ({cut.out} x {cut.in_}) fits into {int(budget):,} numbers; raise keep"
        )
    return configs


def _regression_target(cut: LinearTarget, weight_OI: Tensor, judge: FitContext, metric: Metric) -> list[Tensor]:
    """(K + ridge W)(C + ridge)^-1, with the ridge pulling towards W; [] where it would be W itself."""
    fit = judge.fit
    if fit is None or metric.c_II is None or not fit.diverged:
        return []
    moment_II = metric.c_II
    # In place: nobody asks for this matrix's K again, and it is as large as W.
    wanted_OI = fit.cross(cut.name).add_(weight_OI, alpha=fit.known["ridge"])
    # Kept only where another matrix will ask for it: of a wide input it is as large as C.
    only = len(fit.targets) == 1
    factor_II = spd_factor(moment_II) if only else metric.once("factor", lambda: spd_factor(moment_II))
    moved_OI = linalg.cholesky_solve(wanted_OI.mT, factor_II).mT.contiguous()
    metric.know_times_c(moved_OI, wanted_OI)
    return [moved_OI]


def _evaluate(b: Any, target_OI: Tensor, arbiter: CandidateScorer) -> tuple[float, float]:
    """(loss, error); NaN from nobody, and what sweeps make of it is then taken: they descend in the metric."""
    if arbiter is None:
        return float("nan"), float("nan")
    matrix_OI = b if isinstance(b, Tensor) else b.dense()
    if isinstance(arbiter, HeldOutError):
        return arbiter.measure(matrix_OI)
    error = arbiter.error(target_OI, matrix_OI)
    return error, error


def _initial_candidate(config: Any, target_OI: Tensor, metric: Metric, arbiter: CandidateScorer, refit: bool) -> Candidate:
    b = target_OI if config is None else STRUCTURES[config].project(target_OI, config, metric)
    loss, error = _evaluate(b, target_OI, arbiter)
    return Candidate(config, target_OI, b, loss, error, refit, start=error)


def _refine(start: Candidate, metric: Metric, arbiter: CandidateScorer, sweeps: int) -> Candidate:
    """The start after up to `sweeps` sweeps, or the start itself where held-out rows do not agree; they are asked
    after the first sweep too, which gains most: what overfits then will only do so more."""
    if start.config is None:
        return start
    best, linear, left = start, copy.deepcopy(start.b), float("inf")
    for done in range(1, sweeps + 1):
        now = linear.refine(start.target_OI, metric)
        if now is None:
            break
        last = done == sweeps or now > left * (1 - MIN_SWEEP_GAIN)
        if last or (done == 1 and isinstance(arbiter, HeldOutError)):
            loss, error = _evaluate(linear, start.target_OI, arbiter)
            if loss >= best.loss:
                break
            best = replace(start, b=linear if last else copy.deepcopy(linear), loss=loss, error=error, sweeps=done)
        if last:
            break
        left = now
    return best


def _fit_result(cut: LinearTarget, best: Candidate, stored: torch.dtype, seconds: float) -> FitResult:
    linear = None if isinstance(best.b, Tensor) else round_to_dtype(best.b, stored)
    dense_OI = best.b.to(stored).float().contiguous() if isinstance(best.b, Tensor) else None
    for tensor in [*linear.parameters()] if linear is not None else [dense_OI]:
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            largest = float(torch.finfo(stored).max)
            raise NumbersError(
                f"its fit holds NaN or Inf in {str(stored).removeprefix('torch.')} (numbers up to {largest:.1e}); leave it "
                f"dense (a rule {{match: {cut.name}, structure: dense}}), or convert from a checkpoint in bfloat16 or float32"
            )
    params, macs = linear.cost() if linear is not None else (cut.numel, cut.numel)
    record = FitRecord(
        name=cut.name,
        roles=[cut.part.role] if cut.part else list(cut.linear.roles),
        structure=linear.config.to_dict() if linear is not None else {"structure": "dense"},
        shape=(cut.out, cut.in_),
        params_before=cut.numel,
        params_after=params,
        macs_before=cut.numel,
        macs_after=macs,
        error=best.error,
        start=best.start,
        sweeps=best.sweeps,
        refit=best.refit,
        seconds=seconds,
    )
    return FitResult(record, linear, dense_OI)


def round_to_dtype(linear: StructuredLinear, dtype: torch.dtype) -> StructuredLinear:
    """Float32 holding exactly what `dtype` will store, so that later layers see what will be loaded."""
    for parameter in linear.parameters():
        parameter.data = parameter.data.to(dtype).float().contiguous()
    return linear
