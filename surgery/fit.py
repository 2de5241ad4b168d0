"""Fitting one matrix: closed-form start, sweeps, and a held-out check before anything is accepted."""

from __future__ import annotations

import copy
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.calibrate import Check, Moments
from surgery.errors import SurgeryError
from surgery.plan import Cut, with_budget
from surgery.structures import STRUCTURES, Metric, StructuredLinear, damped
from surgery.structures.btt import solve_spd

# A sweep must lower the held-out loss by this share to be worth another.
WORTHWHILE = 1e-4


@dataclass(frozen=True)
class Record:
    """What the report says of one matrix. Errors are relative to the output it was to reproduce,
    sqrt(E|y* - B x|^2 / E|y*|^2): `error` on the rows it was fitted to, `held_out` on others; `start` is the
    closed form's in the metric of the fit. Without calibration they are of the weights (Frobenius).
    refit: whether the target was moved to make up for the layers below."""

    name: str
    roles: list[str]
    structure: dict[str, Any]
    params_before: int
    params_after: int
    macs_before: int
    macs_after: int
    error: float
    held_out: float | None
    start: float
    sweeps: int
    refit: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Fitted:
    """linear: the structure, float32 and already rounded to the stored dtype; or dense_OI, kept dense."""

    record: Record
    linear: StructuredLinear | None
    dense_OI: Tensor | None = None


@dataclass
class Judge:
    """Everything a cut is fitted and judged with; moments are None without calibration text."""

    fit: Moments | None = None
    held: Moments | None = None
    gram: Tensor | None = None
    damping: float = 0.01
    sweeps: int = 6
    stored: torch.dtype = torch.float32


@dataclass
class Attempt:
    b: Any  # StructuredLinear or a dense matrix
    loss: float
    start: float
    sweeps: int
    refit: bool

    def matrix(self) -> Tensor:
        return self.b if isinstance(self.b, Tensor) else self.b.dense().detach()


@torch.no_grad()
def fit_cut(cut: Cut, budget: float, weight_OI: Tensor, judge: Judge) -> Fitted:
    """The best of the cut's structures within `budget` numbers, by held-out error.

    Two targets are tried: W itself, and the regression K C^-1 of the wanted output on the input that the
    converted layers give; the second is taken only if the held-out error falls.
    """
    began = time.perf_counter()
    metric, check = _metric(cut, judge), _check(cut, judge)
    targets = [weight_OI, *_moved_target(cut, weight_OI, judge, metric)]
    attempts: list[Attempt] = []
    for config in _fitting(cut, budget):
        attempts += [_attempt(config, target, metric, check, judge, i > 0) for i, target in enumerate(targets)]
    best = min(attempts, key=lambda a: a.loss)
    return _fitted(cut, best, weight_OI, judge, check, time.perf_counter() - began)


def _fitting(cut: Cut, budget: float) -> list[Any]:
    """Resolved configs, or [None] to stay dense: where the recipe says so or the budget pays for all of it."""
    if not cut.configs or (budget >= cut.numel and not cut.explicit):
        return [None]
    configs = [c for config in cut.configs if (c := with_budget(config, cut, budget)) is not None]
    if not configs:
        raise SurgeryError(
            f"convert: no structure of {cut.name} ({cut.out} x {cut.in_}) fits into {int(budget):,} numbers; raise keep"
        )
    return configs


def _metric(cut: Cut, judge: Judge) -> Metric:
    return Metric() if judge.fit is None else gram_metric(judge.fit.second(), judge.gram, judge.damping)


def gram_metric(moment_II: Tensor, gram: Tensor | None, damping: float) -> Metric:
    """The metric of a projection, both sides damped."""
    return Metric(damped(moment_II, damping), _damped_gram(gram))


def _damped_gram(gram: Tensor | None) -> Tensor | None:
    """5% of the mean: between 0.1% and 10% the result does not move (docs/quality.md)."""
    if gram is None:
        return None
    return damped(gram, 0.05) if gram.dim() == 2 else gram + 0.05 * gram.mean().clamp_min(1e-30)


def _check(cut: Cut, judge: Judge) -> Check | None:
    moments = judge.held or judge.fit
    return None if moments is None else Check(moments, cut.name, _damped_gram(judge.gram))


def _moved_target(cut: Cut, weight_OI: Tensor, judge: Judge, metric: Metric) -> list[Tensor]:
    """(K + ridge W)(C + ridge)^-1, with the ridge pulling towards W; [] where it would be W itself."""
    fit = judge.fit
    if fit is None or metric.c_II is None or not (fit.diverged or fit.targets[cut.name].residual):
        return []
    ridge = judge.damping * fit.second().diagonal().mean()
    return [solve_spd(metric.c_II, (fit.cross(cut.name) + ridge * weight_OI).mT).mT.contiguous()]


def _attempt(config: Any, target_OI: Tensor, metric: Metric, check: Check | None, judge: Judge, moved: bool) -> Attempt:
    def loss(b_OI: Tensor) -> float:
        return check.loss(b_OI) if check is not None else metric.error(target_OI, b_OI)

    if config is None:
        return Attempt(target_OI, loss(target_OI), 0.0, 0, moved)
    linear = STRUCTURES[config].project(target_OI, config, metric)
    best, start = loss(linear.dense()), metric.error(target_OI, linear.dense())
    accepted = 0
    for _ in range(judge.sweeps):
        candidate = copy.deepcopy(linear)
        if not candidate.refine(target_OI, metric):
            break
        now = loss(candidate.dense())
        if now > best - WORTHWHILE * abs(best):
            break
        linear, best, accepted = candidate, now, accepted + 1
    return Attempt(linear, best, start, accepted, moved)


def _fitted(cut: Cut, best: Attempt, weight_OI: Tensor, judge: Judge, check: Check | None, seconds: float) -> Fitted:
    linear = None if isinstance(best.b, Tensor) else round_to(best.b, judge.stored)
    dense_OI = best.b.to(judge.stored).float() if isinstance(best.b, Tensor) else None
    matrix = linear.dense() if linear is not None else dense_OI
    assert matrix is not None
    cost = linear.cost() if linear is not None else (cut.numel, cut.numel)
    error = Check(judge.fit, cut.name, None).relative(matrix) if judge.fit else Metric().error(weight_OI, matrix)
    return Fitted(
        Record(
            name=cut.name,
            roles=[cut.part.role] if cut.part else list(cut.linear.roles),
            structure=linear.config.to_dict() if linear is not None else {"structure": "dense"},
            params_before=cut.numel,
            params_after=cost[0],
            macs_before=cut.numel,
            macs_after=cost[1],
            error=error,
            held_out=check.relative(matrix) if check is not None and judge.held is not None else None,
            start=best.start,
            sweeps=best.sweeps,
            refit=best.refit,
            seconds=seconds,
        ),
        linear,
        dense_OI,
    )


def round_to(linear: StructuredLinear, dtype: torch.dtype) -> StructuredLinear:
    """Float32 holding exactly what `dtype` will store, so that later layers see what will be loaded."""
    for parameter in linear.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return linear
