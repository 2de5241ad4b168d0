"""Fit the matrices of experts that share a basis: jointly, with the statistics of each expert weighted by its rows.

An error of expert e counts with s_e, its number of calibration rows; with output Gram matrices G_e it counts with 1,
because they are sums over the expert's rows, divided by all tokens. As for one matrix (surgery.conversion.fit), W and
the regression K C^-1 are approximated, and the regression and the sweeps are accepted only if the held-out error falls,
which is here summed over the experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.calibration.moments import HeldOutError, InputMoments
from surgery.conversion.fit import Candidate, FitContext, FitResult, fit_result, regression_target, stage_metric
from surgery.core.errors import naming
from surgery.planning.targets import LinearTarget
from surgery.structures import Metric
from surgery.structures.low_rank import LowRank, LowRankLinear
from surgery.structures.metric import damp_output_gram
from surgery.structures.shared_basis import SharedBasis, SharedLowRankLinear, shared_factors


@dataclass(frozen=True)
class SharedFactors:
    """One joint fit. lefts: left_e (O, R) of each expert. right_RI: the basis. refit: whether it fits the regressions.
    sweeps: done.
    """

    lefts: list[Tensor]
    right_RI: Tensor
    refit: bool
    sweeps: int

    def dense(self, index: int) -> Tensor:
        """Return B_e (O, I)."""
        return self.lefts[index] @ self.right_RI


@torch.no_grad()
def fit_shared(
    targets: Sequence[LinearTarget],
    weights: Sequence[Tensor],
    contexts: Sequence[FitContext],
    held_out: Callable[[int], InputMoments] | None = None,
) -> dict[str, FitResult]:
    """Return the fits of matrices that share a basis, by name; the results are LowRankLinears with equal right factors.

    targets: with the same `basis`, at the rank of their `preview`. weights: W_e (O, I). contexts: of each expert; their
    `held_out` is not read. held_out(index): moments of an expert's held-out rows; None to keep the last candidate.
    Raises SurgeryError with the path of the basis if values cannot be fitted or stored.
    """
    began, config = time.perf_counter(), targets[0].preview
    assert isinstance(config, LowRank) and isinstance(config.rank, int)
    with naming(targets[0].basis):
        metrics = [stage_metric(context) for context in contexts]
        scales = _scales(contexts, metrics)
        candidates = []
        for matrices in _matrices_to_fit(targets, weights, contexts, metrics, held_out is not None):
            is_refit = matrices is not weights
            factors = shared_factors(matrices, metrics, scales, config.rank, contexts[0].sweeps)
            for index, (lefts, right_RI) in enumerate(factors):
                candidates.append(SharedFactors(lefts, right_RI, is_refit, contexts[0].sweeps if index else 0))
        best, errors = _choose(targets, weights, contexts, metrics, scales, candidates, held_out=held_out)
    results, seconds = {}, (time.perf_counter() - began) / len(targets)
    for index, (target, (start, error)) in enumerate(zip(targets, errors)):
        cores = {"weight": best.lefts[index][None], "right": best.right_RI.clone()}
        linear = LowRankLinear.from_cores(config, (target.out, target.in_), cores)
        chosen = Candidate(config, weights[index], linear, 0.0, error, best.refit, start, best.sweeps)
        results[target.name] = fit_result(target, chosen, contexts[index].stored_dtype, seconds)
    return results


def _scales(contexts: Sequence[FitContext], metrics: Sequence[Metric]) -> list[float]:
    """Return the weight of each expert's error."""
    if all(metric.g_OO is not None for metric in metrics):
        return [1.0] * len(metrics)
    moments = [context.fit for context in contexts]
    rows = [1.0 if m is None else float(m.count - m.borrowed) for m in moments]
    return rows if any(rows) else [1.0] * len(rows)


def _matrices_to_fit(
    targets: Sequence[LinearTarget],
    weights: Sequence[Tensor],
    contexts: Sequence[FitContext],
    metrics: Sequence[Metric],
    has_choice: bool,
) -> list[Sequence[Tensor]]:
    """Return what is approximated: the weights, and the regressions if the inputs of the two models differ (these alone
    without a choice).
    """
    parts = zip(targets, weights, contexts, metrics)
    moved = [regression_target(target, w_OI, context, metric) for target, w_OI, context, metric in parts]
    if not any(moved):
        return [weights]
    refitted = [regression[0] if regression else w_OI for regression, w_OI in zip(moved, weights)]
    return [weights, refitted] if has_choice else [refitted]


def _choose(
    targets: Sequence[LinearTarget],
    weights: Sequence[Tensor],
    contexts: Sequence[FitContext],
    metrics: Sequence[Metric],
    scales: Sequence[float],
    candidates: list[SharedFactors],
    *,
    held_out: Callable[[int], InputMoments] | None,
) -> tuple[SharedFactors, list[tuple[float, float]]]:
    """Return the candidate with the least held-out error, and of each expert the relative errors (of its first
    candidate, of the chosen one).
    """
    losses = [0.0] * len(candidates)
    errors: list[list[float]] = [[] for _ in candidates]
    for index, (target, scale) in enumerate(zip(targets, scales)):
        held = None if held_out is None else held_out(index)
        scorer = None if held is None else HeldOutError(held, target.name, damp_output_gram(contexts[index].gram))
        for number, candidate in enumerate(candidates):
            b_OI = candidate.dense(index)
            if scorer is None:
                loss, error = -float(number), metrics[index].relative_error(weights[index], b_OI)
            else:
                loss, error = scorer.measure(b_OI)
                loss *= scale
            losses[number] += loss
            errors[number].append(error)
    best = min(range(len(candidates)), key=lambda number: losses[number])
    first = next(number for number, candidate in enumerate(candidates) if candidate.refit == candidates[best].refit)
    return candidates[best], list(zip(errors[first], errors[best]))


def share_modules(modules: dict[str, nn.Module], targets: Sequence[LinearTarget]) -> SharedBasis:
    """Replace the LowRankLinears of experts among `modules` by SharedLowRankLinears, in place; return their basis.

    modules: by path, those of `targets` with equal right factors.
    """
    first = modules[targets[0].linear.path]
    assert isinstance(first, LowRankLinear)
    basis = SharedBasis(first.in_features, first.config.rank, device="meta")
    basis.weight = nn.Parameter(first.right.detach()[None], requires_grad=False)
    for target in targets:
        linear = modules[target.linear.path]
        assert isinstance(linear, LowRankLinear)
        shared = SharedLowRankLinear(linear.in_features, linear.out_features, linear.config, bias=False, device="meta")
        shared.weight, shared.bias = linear.weight, linear.bias
        shared.connect(basis)
        modules[target.linear.path] = shared
    return basis


def targets_by_basis(targets: Sequence[LinearTarget]) -> dict[str, list[LinearTarget]]:
    """Return the targets that share a basis, by its path, in their order."""
    by_basis: dict[str, list[LinearTarget]] = {}
    for target in targets:
        if target.basis:
            by_basis.setdefault(target.basis, []).append(target)
    return by_basis
