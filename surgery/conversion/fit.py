"""Fit one matrix by a structure: closed-form projection, then sweeps, each accepted only if the held-out error falls."""

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

# Sweeps stop when one lowers the error of the fit by less than this share.
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
    """Inputs of a fit.

    fit: moments of the calibration rows, None without calibration. held_out: returns the moments of the held-out rows,
    computed on first use. gram: output Gram matrix G (O, O) or its diagonal (O,). damping: relative ridge added to C.
    sweeps: most sweeps after the projection. stored_dtype: dtype in which the result is saved.
    """

    fit: InputMoments | None = None
    held_out: Callable[[], InputMoments] | None = None
    gram: Tensor | None = None
    damping: float = 0.01
    sweeps: int = 6
    stored_dtype: torch.dtype = torch.float32


@dataclass
class Candidate:
    """A fitted candidate. The lowest `loss` wins; `error` is reported. config None: a dense matrix."""

    config: Any
    target_OI: Tensor
    b: Any  # StructuredLinear or a dense matrix
    loss: float
    error: float
    refit: bool
    start: float = 0.0
    sweeps: int = 0


# How candidates are ranked: by held-out error, by the fit metric, or not at all (a trial with one candidate).
CandidateScorer = HeldOutError | Metric | None


@torch.no_grad()
def fit_linear(target: LinearTarget, budget: float, weight_OI: Tensor, fit_context: FitContext) -> FitResult:
    """The best of the target's structures within `budget` numbers, by held-out error.

    SurgeryError with the matrix's name where its numbers cannot be fitted or stored. Two targets are tried: W itself, and the regression K C^-1 of the wanted output on the input that the
    converted layers give; the second is taken only if the held-out error falls. So is what sweeps gain.
    """
    with naming(target.name):
        return _fit_cut(target, budget, weight_OI, fit_context)


def _fit_cut(target: LinearTarget, budget: float, weight_OI: Tensor, fit_context: FitContext) -> FitResult:
    began = time.perf_counter()
    metric = stage_metric(fit_context)
    configs, targets_OI = (
        candidate_configs(target, budget),
        [weight_OI, *_regression_target(target, weight_OI, fit_context, metric)],
    )
    scorer: CandidateScorer = metric
    if fit_context.held_out is not None:
        scorer = HeldOutError(fit_context.held_out(), target.name, damp_output_gram(fit_context.gram))
    else:  # no held-out rows: the target that takes the layers below into account
        targets_OI = targets_OI[-1:]
        if len(configs) == 1 and metric.c_II is not None:
            scorer = None
    candidates = []
    for config in configs:
        # The moved target first: its product with C is known, and only the last such product is kept.
        starts = [
            _initial_candidate(config, target_OI, metric, scorer, target_OI is not weight_OI)
            for target_OI in reversed(targets_OI)
        ]
        candidates.append(_refine(min(reversed(starts), key=lambda a: a.loss), metric, scorer, fit_context.sweeps))
    best = min(candidates, key=lambda a: a.loss)
    return _fit_result(target, best, fit_context.stored_dtype, time.perf_counter() - began)


@torch.no_grad()
def quick_fit(target: LinearTarget, configs: list[Any], weight_OI: Tensor, metric: Metric, sweeps: int) -> FitResult:
    """The best of `configs` in the metric itself, nothing held out: for a trial, which is judged as a whole."""
    began, scorer = time.perf_counter(), metric if len(configs) > 1 else None
    with naming(target.name):
        candidates = [
            _refine(_initial_candidate(c, weight_OI, metric, scorer, False), metric, scorer, sweeps) for c in configs
        ]
        return _fit_result(target, min(candidates, key=lambda a: a.loss), torch.float32, time.perf_counter() - began)


def stage_metric(fit_context: FitContext) -> Metric:
    """Return the metric (C, G) of a fit; factors of C are cached for all matrices of the stage."""
    if fit_context.fit is None:
        return Metric()
    moments = fit_context.fit
    if "ridge" not in moments.cache:  # in place: C of a wide input is the largest thing in memory
        moments.cache["ridge"] = damp_(moments.c_II, fit_context.damping)
    return Metric(moments.c_II, damp_output_gram(fit_context.gram), moments.cache)


def candidate_configs(target: LinearTarget, budget: float) -> list[Any]:
    """Resolved configs, or [None] to stay dense: where the recipe says so or the budget pays for all of it."""
    if not target.configs or (budget >= target.numel and not target.has_fixed_rank):
        return [None]
    configs = [c for config in target.configs if (c := fit_config_to_budget(config, target, budget)) is not None]
    if not configs:
        raise SurgeryError(
            f"convert: no structure of {target.name} ({target.out} x {target.in_}) fits into {int(budget):,} numbers; raise keep"
        )
    return configs


def _regression_target(
    target: LinearTarget, weight_OI: Tensor, fit_context: FitContext, metric: Metric
) -> list[Tensor]:
    """(K + ridge W)(C + ridge)^-1, with the ridge pulling towards W; [] where it would be W itself."""
    fit = fit_context.fit
    if fit is None or metric.c_II is None or not fit.diverged:
        return []
    moment_II = metric.c_II
    # In place: nobody asks for this matrix's K again, and it is as large as W.
    wanted_OI = fit.cross(target.name).add_(weight_OI, alpha=fit.cache["ridge"])
    # Kept only where another matrix will ask for it: of a wide input it is as large as C.
    only = len(fit.targets) == 1
    factor_II = spd_factor(moment_II) if only else metric.compute_once("factor", lambda: spd_factor(moment_II))
    moved_OI = linalg.cholesky_solve(wanted_OI.mT, factor_II).mT.contiguous()
    metric.cache_times_c(moved_OI, wanted_OI)
    return [moved_OI]


def _evaluate(b: Any, target_OI: Tensor, scorer: CandidateScorer) -> tuple[float, float]:
    """(loss, error); NaN from nobody, and what sweeps make of it is then taken: they descend in the metric."""
    if scorer is None:
        return float("nan"), float("nan")
    matrix_OI = b if isinstance(b, Tensor) else b.dense()
    if isinstance(scorer, HeldOutError):
        return scorer.measure(matrix_OI)
    error = scorer.relative_error(target_OI, matrix_OI)
    return error, error


def _initial_candidate(
    config: Any, target_OI: Tensor, metric: Metric, scorer: CandidateScorer, refit: bool
) -> Candidate:
    b = target_OI if config is None else STRUCTURES[config].project(target_OI, config, metric)
    loss, error = _evaluate(b, target_OI, scorer)
    return Candidate(config, target_OI, b, loss, error, refit, start=error)


def _refine(start: Candidate, metric: Metric, scorer: CandidateScorer, sweeps: int) -> Candidate:
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
        if last or (done == 1 and isinstance(scorer, HeldOutError)):
            loss, error = _evaluate(linear, start.target_OI, scorer)
            if loss >= best.loss:
                break
            best = replace(start, b=linear if last else copy.deepcopy(linear), loss=loss, error=error, sweeps=done)
        if last:
            break
        left = now
    return best


def _fit_result(target: LinearTarget, best: Candidate, stored: torch.dtype, seconds: float) -> FitResult:
    linear = None if isinstance(best.b, Tensor) else round_to_dtype(best.b, stored)
    dense_OI = best.b.to(stored).float().contiguous() if isinstance(best.b, Tensor) else None
    for tensor in [*linear.parameters()] if linear is not None else [dense_OI]:
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            largest = float(torch.finfo(stored).max)
            raise NumbersError(
                f"its fit holds NaN or Inf in {str(stored).removeprefix('torch.')} (numbers up to {largest:.1e}); leave it "
                f"dense (a rule {{match: {target.name}, structure: dense}}), or convert from a checkpoint in bfloat16 or float32"
            )
    params, macs = linear.cost() if linear is not None else (target.numel, target.numel)
    record = FitRecord(
        name=target.name,
        roles=[target.part.role] if target.part else list(target.linear.roles),
        structure=linear.config.to_dict() if linear is not None else {"structure": "dense"},
        shape=(target.out, target.in_),
        params_before=target.numel,
        params_after=params,
        macs_before=target.numel,
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
