"""Low rank with one right factor for the experts of a layer: B_e = left_e @ basis, left_e (O, R), basis (R, I).

The experts of a layer read one input, so their right singular vectors span nearly the same space. E experts store R (E
O + I) numbers, where E low-rank matrices of their own store E R (O + I): at equal storage the rank is larger.

    min sum_e s_e tr(G_e (W_e - left_e basis) C_e (W_e - left_e basis)^T)      s_e: weight of expert e, e.g. its number of rows

has no closed form, unless all C_e are equal. `shared_factors` starts with the optimum for the metric sum_e s_e C_e, and
alternates least squares: left_e = W_e C_e basis^T (basis C_e basis^T)^-1, then the basis for given left factors, by
conjugate gradients.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.structures import linalg
from surgery.structures.base import MuP, StructuredLinear, balance_factors
from surgery.structures.low_rank import LowRank, low_rank_factors
from surgery.structures.metric import Metric, inner_product, spd_inverse

STEPS = 20  # most steps of conjugate gradients, for one update of the basis
TOLERANCE = (
    1e-8  # squared residual in the norm of the preconditioner, relative to that of a basis of zeros, at which they stop
)
MIN_GAIN = 1e-3  # sweeps stop when one lowers the squared error by less than this fraction


# -- modules -----------------------------------------------------------------------------------------------
class SharedBasis(StructuredLinear):
    """The right factor of the experts of a layer, z = basis x. Core: `weight` = basis, stored as (1, R, I)."""

    weight: Tensor
    config_type = LowRank

    def __init__(self, in_features: int, rank: int, **factory: Any):
        super().__init__(in_features, rank, LowRank(rank), bias=False, **factory)

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every core (layout in the class docstring)."""
        return {"weight": (1, out, in_)}

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return the smallest rank that represents every right factor."""
        return in_

    def product(self, x: Tensor) -> Tensor:
        """Return basis x (..., R), for x (..., I)."""
        return F.linear(x, self.weight[0])

    def dense(self) -> Tensor:
        """Return the basis (R, I)."""
        return self.weight[0]

    def macs(self) -> int:
        """Return multiply-accumulates per token."""
        return self.weight.numel()

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of the core."""
        return {"weight": MuP(self.in_features, self.out_features)}


class SharedLowRankLinear(StructuredLinear):
    """Low-rank linear layer of an expert, y = left basis(x). Core: `weight` = left, stored as (1, O, R).

    The basis is a module of the experts of the layer, which `connect` gives; it is no submodule of this one, and stored
    once.
    """

    weight: Tensor
    config_type = LowRank

    def __init__(self, in_features: int, out_features: int, config: Any, bias: bool = True, **factory: Any):
        super().__init__(in_features, out_features, config, bias, **factory)
        self._basis: tuple[SharedBasis, ...] = ()  # in a tuple, which nn.Module does not register

    def connect(self, basis: SharedBasis) -> None:
        """Use this basis. Raises SurgeryError if its sizes do not fit."""
        if (basis.in_features, basis.out_features) != (self.in_features, self.config.rank):
            raise SurgeryError(
                f"a basis of rank {basis.out_features} for {basis.in_features} inputs does not fit an expert of rank "
                f"{self.config.rank} with "
                f"{self.in_features} inputs; the experts of a layer must have one rank"
            )
        self._basis = (basis,)

    @property
    def basis(self) -> SharedBasis:
        """The basis. Raises SurgeryError before `connect`."""
        if not self._basis:
            raise SurgeryError("an expert with a shared basis was built without the basis; load the whole checkpoint")
        return self._basis[0]

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every core of its own (layout in the class docstring)."""
        return {"weight": (1, out, config.rank)}

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return the smallest rank at which the matrices of any number of experts are exact."""
        return in_

    def product(self, x: Tensor) -> Tensor:
        """Return B x (..., O) without the bias, for x (..., I)."""
        return F.linear(self.basis(x), self.weight[0])

    def dense(self) -> Tensor:
        """Return B as a dense matrix (O, I)."""
        return self.weight[0] @ self.basis.weight[0]

    def macs(self) -> int:
        """Return multiply-accumulates per token, those of the basis included."""
        return self.weight.numel() + int(self.config.rank) * self.in_features

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of the core."""
        return {"weight": MuP(self.config.rank, self.out_features)}


def basis_path(path: str) -> str:
    """Return the path of the basis that an expert's linear shares: mlp.experts.3.gate_proj ->
    mlp.experts.gate_proj_basis.

    Raises SurgeryError if the path is not that of an expert's linear.
    """
    match = re.fullmatch(r"(.+)\.\d+\.(\w+)", path)
    if match is None:
        raise SurgeryError(f"{path} is not the linear of an expert, so it has no experts to share a basis with")
    return f"{match[1]}.{match[2]}_basis"


def first_expert(path: str) -> str:
    """Return the path of the linear of expert 0 that uses the basis at `path`, or "" if that is no path of a basis."""
    match = re.fullmatch(r"(.+)\.(\w+)_basis", path)
    return f"{match[1]}.0.{match[2]}" if match else ""


def shared_rank(budget: float, experts: int, shape: tuple[int, int]) -> int:
    """Return the largest rank at which `experts` matrices of a shape (O, I) with one basis store at most `budget`
    numbers, 0 if none does.
    """
    out, in_ = shape
    return int(min(full_shared_rank(experts, shape), budget // (experts * out + in_)))


def full_shared_rank(experts: int, shape: tuple[int, int]) -> int:
    """Return the smallest rank at which every `experts` matrices of a shape (O, I) are exact with one basis."""
    out, in_ = shape
    return min(experts * out, in_)


# -- fits ----------------------------------------------------------------------------------------------------
def shared_factors(
    weights: Sequence[Tensor],
    metrics: Sequence[Metric],
    scales: Sequence[float],
    rank: int,
    sweeps: int,
    min_gain: float = MIN_GAIN,
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield (left_e (O, R) of each expert, basis (R, I)): the start, then the end of `sweeps` sweeps, none of which
    increases the error.

    weights: W_e (O, I). metrics: their C_e, damped, and G_e. scales: s_e >= 0. min_gain: sweeps stop when one lowers
    the squared error by less than this fraction. Yields the start alone if it is optimal.
    """
    in_ = weights[0].shape[1]
    if rank >= in_:
        eye_II = torch.eye(in_, dtype=weights[0].dtype, device=weights[0].device)
        yield balanced([w_OI.clone() for w_OI in weights], eye_II)
        return
    right_RI = start_basis(weights, metrics, scales, rank)
    lefts = best_lefts(weights, metrics, right_RI)
    yield balanced(lefts, right_RI)
    if all(metric.c_II is None and metric.g_OO is None for metric in metrics):
        return
    before = squared_error(weights, metrics, scales, lefts, right_RI)
    for done in range(1, sweeps + 1):
        right_RI = orthonormal_rows(solve_basis(weights, metrics, scales, lefts, right_RI))
        lefts = best_lefts(weights, metrics, right_RI)
        error = squared_error(weights, metrics, scales, lefts, right_RI)
        if done == sweeps or error > before * (1 - min_gain):
            break
        before = error
    if sweeps:
        yield balanced(lefts, right_RI)


def start_basis(weights: Sequence[Tensor], metrics: Sequence[Metric], scales: Sequence[float], rank: int) -> Tensor:
    """Return the right factor (R, I) that is optimal for one metric, the sum of all s_e C_e, with orthonormal rows."""
    pooled_II = pooled_moment(metrics, scales)
    roots = [1.0 if pooled_II is not None else math.sqrt(scale) for scale in scales]
    stacked_XI = torch.cat([r * m.apply_output_root(w_OI) for w_OI, m, r in zip(weights, metrics, roots)])
    return orthonormal_rows(low_rank_factors(stacked_XI, rank, Metric(pooled_II))[1])


def orthonormal_rows(right_RI: Tensor) -> Tensor:
    """Return orthonormal rows (R, I) with the span of the rows of a right factor."""
    return linalg.qr(right_RI.mT)[0].mT.contiguous()


def best_lefts(weights: Sequence[Tensor], metrics: Sequence[Metric], right_RI: Tensor) -> list[Tensor]:
    """Return left_e = W_e C_e basis^T (basis C_e basis^T)^-1 (O, R), the optimum for a basis (R, I)."""
    lefts = []
    for w_OI, metric in zip(weights, metrics):
        weighed_RI = right_RI if metric.c_II is None else right_RI @ metric.c_II
        lefts.append(linalg.solve(weighed_RI @ right_RI.mT, weighed_RI @ w_OI.mT).mT)
    return lefts


def solve_basis(
    weights: Sequence[Tensor],
    metrics: Sequence[Metric],
    scales: Sequence[float],
    lefts: Sequence[Tensor],
    right_RI: Tensor,
) -> Tensor:
    """Return the basis (R, I) for given left factors after at most STEPS steps of conjugate gradients from the given
    basis.

    It solves sum_e s_e left_e^T G_e left_e basis C_e = sum_e s_e left_e^T G_e W_e C_e. The preconditioner is the
    inverse of (sum_e s_e left_e^T G_e left_e) basis (sum_e s_e C_e), which is the operator itself, up to a factor, if
    all C_e are equal.
    """
    heavy = [weighed_left(left_OR, metric).mul(scale) for left_OR, metric, scale in zip(lefts, metrics, scales)]
    grams = [heavy_OR.mT @ left_OR for heavy_OR, left_OR in zip(heavy, lefts)]
    inverse_RR, pooled_II = spd_inverse(sum_of(grams)), pooled_moment(metrics, scales)
    inverse_II = None if pooled_II is None else spd_inverse(pooled_II)

    def times(r_RI: Tensor) -> Tensor:
        return sum_of(times_c(gram_RR @ r_RI, metric) for gram_RR, metric in zip(grams, metrics))

    def precondition(r_RI: Tensor) -> Tensor:
        moved_RI = inverse_RR @ r_RI
        return moved_RI if inverse_II is None else moved_RI @ inverse_II

    rhs = sum_of(times_c(heavy_OR.mT @ w_OI, metric) for heavy_OR, w_OI, metric in zip(heavy, weights, metrics))
    residual = rhs - times(right_RI)
    step = precondition(residual)
    energy, least = inner_product(residual, step), TOLERANCE * inner_product(rhs, precondition(rhs))
    for _ in range(STEPS):
        if not energy > least:
            break
        product = times(step)
        size = energy / inner_product(step, product)
        right_RI, residual = right_RI + size * step, residual - size * product
        moved = precondition(residual)
        energy, before = inner_product(residual, moved), energy
        step = moved + (energy / before) * step
    return right_RI


def pooled_moment(metrics: Sequence[Metric], scales: Sequence[float]) -> Tensor | None:
    """Return sum_e s_e C_e (I, I), None if an expert has no C_e."""
    moments = [scale * metric.c_II for metric, scale in zip(metrics, scales) if metric.c_II is not None]
    return sum_of(moments) if len(moments) == len(metrics) else None


def weighed_left(left_OR: Tensor, metric: Metric) -> Tensor:
    """Return G left (O, R)."""
    if metric.g_OO is None:
        return left_OR.clone()
    return metric.g_OO[:, None] * left_OR if metric.g_OO.dim() == 1 else metric.g_OO @ left_OR


def times_c(matrix_RI: Tensor, metric: Metric) -> Tensor:
    """Return a matrix times C, (R, I). Unlike `Metric.times_c` it caches nothing."""
    return matrix_RI if metric.c_II is None else matrix_RI @ metric.c_II


def squared_error(
    weights: Sequence[Tensor],
    metrics: Sequence[Metric],
    scales: Sequence[float],
    lefts: Sequence[Tensor],
    right_RI: Tensor,
) -> float:
    """Return sum_e s_e tr(G_e (W_e - left_e basis) C_e (W_e - left_e basis)^T)."""
    parts = zip(weights, metrics, scales, lefts)
    return sum(scale * metric.squared_norm(w_OI - left_OR @ right_RI) for w_OI, metric, scale, left_OR in parts)


def balanced(lefts: Sequence[Tensor], right_RI: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the factors, rescaled by powers of two so that column r of all left factors and row r of the basis have
    about equal norms.
    """
    sizes = [len(left_OR) for left_OR in lefts]
    left_XR, right_RI = balance_factors(torch.cat(list(lefts)), right_RI)
    starts = [0, *itertools.accumulate(sizes)]
    return [left_XR[start:stop].contiguous() for start, stop in itertools.pairwise(starts)], right_RI.contiguous()


def sum_of(terms: Any) -> Tensor:
    """Return the sum of tensors."""
    first, *rest = terms
    for term in rest:
        first = first + term
    total: Tensor = first
    return total
