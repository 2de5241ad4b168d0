"""Fit one matrix by a structure: closed-form projection, then sweeps, each accepted only if the held-out error
falls.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.moments import HeldOutError, InputMoments
from surgery.core.errors import NumericalError, SurgeryError, naming
from surgery.core.repeats import repeated
from surgery.planning.plan import fit_config_to_budget
from surgery.planning.targets import LinearTarget
from surgery.structures import STRUCTURES, Metric, StructureConfig, StructuredLinear, linalg
from surgery.structures.metric import damp_, damp_output_gram, spd_factor

MIN_SWEEP_GAIN = 1e-3  # sweeps stop when one lowers the error of the fit by less than this fraction


@dataclass(frozen=True)
class FitRecord:
    """The report's entry of one matrix.

    shape: (out, in). error: relative output error on held-out rows, sqrt(E|y* - B x|^2 / E|y*|^2); without calibration
    the relative error of the weights (Frobenius). start: the error after the closed-form projection. sweeps: sweeps
    accepted after it. refit: whether the matrix was fitted to the regression K C^-1, which compensates errors of
    earlier layers. rows: of a routed expert's matrix, how many calibration rows were routed to the expert. shared_rows:
    how many average rows of all experts of the layer were added, because these were too few; of a pruned expert how
    many rows of white inputs, which draw the fit towards the original. outputs: of joined linears, how many each has.
    """

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
    rows: int | None = None
    shared_rows: int | None = None
    outputs: list[int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as they stand in the report; `rows` and `shared_rows` only of a routed expert, `outputs` of
        joined linears.
        """
        fields = asdict(self)
        left_out = () if self.rows is not None else ("rows", "shared_rows")
        return {k: v for k, v in fields.items() if k not in left_out and (k != "outputs" or v is not None)}


@dataclass
class FitResult:
    """The result of a fit: a structured linear, or the dense matrix dense_OI. Both are in float32, with values that the
    stored dtype represents exactly. bias_change_O: added to the bias (O,); None if it stays as it is."""

    record: FitRecord
    linear: StructuredLinear | None
    dense_OI: Tensor | None = None
    bias_change_O: Tensor | None = None


@dataclass
class FitContext:
    """Inputs of a fit.

    fit: moments of the calibration rows, None without calibration. held_out: returns the moments of the held-out rows,
    computed on first use. gram: output Gram matrix G (O, O) or its diagonal (O,). damping: relative ridge added to C.
    sweeps: maximum number of sweeps after the projection. stored_dtype: dtype in which the result is saved.
    """

    fit: InputMoments | None = None
    held_out: Callable[[], InputMoments] | None = None
    gram: Tensor | None = None
    damping: float = 0.01
    sweeps: int = 6
    stored_dtype: torch.dtype = torch.float32


@dataclass
class Candidate:
    """One fitted approximation b of target_OI. The candidate with the lowest `loss` is chosen; `error` is reported.

    config: of the structure; None if b is a dense matrix.
    """

    config: StructureConfig | None
    target_OI: Tensor
    b: StructuredLinear | Tensor
    loss: float
    error: float
    refit: bool
    start: float = 0.0
    sweeps: int = 0


# How candidates are ranked: by held-out error, by the fit metric, or not at all (a trial with one candidate).
CandidateScorer = HeldOutError | Metric | None


@torch.no_grad()
def fit_linear(target: LinearTarget, budget: float, weight_OI: Tensor, fit_context: FitContext) -> FitResult:
    """Return the best of the target's structures with at most `budget` parameters, by held-out error.

    Two matrices are approximated: W itself, and the regression K C^-1 of the original output on the input from the
    converted layers. The regression and the sweeps are accepted only if the held-out error falls.
    Raises SurgeryError with the matrix's name if its values cannot be fitted or stored.
    """
    with naming(target.name):
        return _fit_best_candidate(target, budget, weight_OI, fit_context)


def _fit_best_candidate(target: LinearTarget, budget: float, weight_OI: Tensor, fit_context: FitContext) -> FitResult:
    began = time.perf_counter()
    metric = stage_metric(fit_context)
    configs = candidate_configs(target, budget)
    targets_OI = [weight_OI, *regression_target(target, weight_OI, fit_context, metric)]
    scorer: CandidateScorer = metric
    if fit_context.held_out is not None:
        scorer = HeldOutError(fit_context.held_out(), target.name, damp_output_gram(fit_context.gram))
    else:  # no held-out rows to choose by: take the regression, which accounts for errors of the layers below
        targets_OI = targets_OI[-1:]
        if len(configs) == 1 and metric.c_II is not None:
            scorer = None
    candidates = []
    for config in configs:
        # The regression first: its product with C is in the cache, which keeps only the last such product.
        starts = [
            _initial_candidate(config, target_OI, metric, scorer, target_OI is not weight_OI)
            for target_OI in reversed(targets_OI)
        ]
        start = min(reversed(starts), key=lambda candidate: candidate.loss)
        candidates.append(_sweep(start, metric, scorer, fit_context.sweeps))
    best = min(candidates, key=lambda candidate: candidate.loss)
    return fit_result(target, best, fit_context.stored_dtype, time.perf_counter() - began)


@torch.no_grad()
def quick_fit(
    target: LinearTarget, configs: list[StructureConfig | None], weight_OI: Tensor, metric: Metric, sweeps: int
) -> FitResult:
    """Return the best of `configs` by the metric (C, G) itself, without held-out rows.

    For trials, whose held-out score is measured on the whole model.
    """
    began, scorer = time.perf_counter(), metric if len(configs) > 1 else None
    with naming(target.name):
        candidates = [
            _sweep(_initial_candidate(c, weight_OI, metric, scorer, False), metric, scorer, sweeps) for c in configs
        ]
        best = min(candidates, key=lambda candidate: candidate.loss)
        return fit_result(target, best, torch.float32, time.perf_counter() - began)


def stage_metric(fit_context: FitContext) -> Metric:
    """Return the metric (C, G) of a fit. Factors of C are cached for all matrices of the stage."""
    if fit_context.fit is None:
        return Metric()
    moments = fit_context.fit
    if "ridge" not in moments.cache:  # damped in place: for a wide input, C is the largest tensor in memory
        moments.cache["ridge"] = damp_(moments.c_II, fit_context.damping)
    return Metric(moments.c_II, damp_output_gram(fit_context.gram), moments.cache)


def candidate_configs(target: LinearTarget, budget: float) -> list[StructureConfig | None]:
    """Return the candidate configs with at most `budget` parameters; [None] if the matrix stays dense.

    It stays dense if the recipe says so, or if the budget covers all of its parameters.
    Raises SurgeryError if no structure fits.
    """
    if not target.configs or (budget >= target.numel and not target.has_fixed_rank):
        return [None]
    configs = [c for config in target.configs if (c := fit_config_to_budget(config, target, budget)) is not None]
    if not configs:
        raise SurgeryError(
            f"convert: no structure of {target.name} ({target.out} x {target.in_}) fits into {int(budget):,} "
            "parameters. "
            "Raise keep"
        )
    return configs


def regression_target(target: LinearTarget, weight_OI: Tensor, fit_context: FitContext, metric: Metric) -> list[Tensor]:
    """Return [(K + ridge W)(C + ridge)^-1], which the ridge keeps close to W; [] if that is W itself."""
    fit = fit_context.fit
    if fit is None or metric.c_II is None or not fit.diverged:
        return []
    moment_II = metric.c_II
    # In place: K of this matrix is not read again, and it is as large as W.
    wanted_OI = fit.cross(target.name).add_(weight_OI, alpha=fit.cache["ridge"])
    # The Cholesky factor is as large as C: it is cached only if another matrix of the stage will read it.
    is_only = len(fit.targets) == 1
    factor_II = spd_factor(moment_II) if is_only else metric.compute_once("factor", lambda: spd_factor(moment_II))
    moved_OI = linalg.cholesky_solve(wanted_OI.mT, factor_II).mT.contiguous()
    metric.cache_times_c(moved_OI, wanted_OI)
    return [moved_OI]


def _evaluate(b: StructuredLinear | Tensor, target_OI: Tensor, scorer: CandidateScorer) -> tuple[float, float]:
    """Return (loss, error), both NaN without a scorer.

    NaN compares false, so `_sweep` then accepts every sweep, and sweeps never increase the error in the metric.
    """
    if scorer is None:
        return float("nan"), float("nan")
    matrix_OI = b if isinstance(b, Tensor) else b.dense()
    if isinstance(scorer, HeldOutError):
        return scorer.measure(matrix_OI)
    error = scorer.relative_error(target_OI, matrix_OI)
    return error, error


def _initial_candidate(
    config: StructureConfig | None, target_OI: Tensor, metric: Metric, scorer: CandidateScorer, refit: bool
) -> Candidate:
    b: StructuredLinear | Tensor = target_OI
    if config is not None:
        b = STRUCTURES[config].project(target_OI, config, metric)
    loss, error = _evaluate(b, target_OI, scorer)
    return Candidate(config, target_OI, b, loss, error, refit, start=error)


def _sweep(start: Candidate, metric: Metric, scorer: CandidateScorer, sweeps: int) -> Candidate:
    """Return the candidate after up to `sweeps` sweeps, or unchanged if they do not lower its loss.

    The held-out error is measured after the last sweep, and also after the first: the first sweep gains most, so if it
    overfits already, more sweeps would only overfit more. On the meta device the second sweep stands for all later ones.
    """
    if isinstance(start.b, Tensor):
        return start
    best, linear, previous = start, copy.deepcopy(start.b), float("inf")
    tried = min(sweeps, 2) if start.target_OI.is_meta else sweeps
    for done in range(1, tried + 1):
        with repeated(sweeps - 1 if done == 2 and tried < sweeps else 1):
            error_now = linear.sweep(start.target_OI, metric)
        if error_now is None:
            break
        is_last = done == tried or error_now > previous * (1 - MIN_SWEEP_GAIN)
        if is_last or (done == 1 and isinstance(scorer, HeldOutError)):
            loss, error = _evaluate(linear, start.target_OI, scorer)
            if loss >= best.loss:
                break
            best = replace(start, b=linear if is_last else copy.deepcopy(linear), loss=loss, error=error, sweeps=done)
        if is_last:
            break
        previous = error_now
    return best


def fit_result(target: LinearTarget, best: Candidate, stored: torch.dtype, seconds: float) -> FitResult:
    """Return the fit of a candidate, rounded to the stored dtype.

    Raises NumericalError if it holds values that are not finite.
    """
    linear = None if isinstance(best.b, Tensor) else round_to_dtype(best.b, stored)
    dense_OI = best.b.to(stored).float().contiguous() if isinstance(best.b, Tensor) else None
    for tensor in [*linear.parameters()] if linear is not None else [dense_OI]:
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            largest = float(torch.finfo(stored).max)
            raise NumericalError(
                f"its fit holds NaN or Inf in {str(stored).removeprefix('torch.')} (numbers up to {largest:.1e}). "
                "Leave it "
                f"dense (a rule {{match: {target.linear.path}, structure: dense}}), or convert from a checkpoint in "
                "bfloat16 or float32"
            )
    share = {"share": "experts"} if target.basis else {"share": "input"} if target.joined else {}
    record = FitRecord(
        name=target.name,
        roles=target.roles,
        structure={**linear.config.to_dict(), **share} if linear is not None else {"structure": "dense"},
        shape=(target.out, target.in_),
        params_before=target.numel,
        params_after=target.params(linear.config) if linear is not None else target.numel,
        macs_before=target.numel,
        macs_after=target.macs(linear) if linear is not None else target.numel,
        error=best.error,
        start=best.start,
        sweeps=best.sweeps,
        refit=best.refit,
        seconds=seconds,
        outputs=[joined.out for joined in target.joined] or None,
    )
    return FitResult(record, linear, dense_OI)


def round_to_dtype(linear: StructuredLinear, dtype: torch.dtype) -> StructuredLinear:
    """Round the parameters in place to values of `dtype`, kept in float32, so that later layers see what will be
    loaded.
    """
    for parameter in linear.parameters():
        parameter.data = parameter.data.to(dtype).float().contiguous()
    return linear
