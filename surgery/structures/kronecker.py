"""Sum of Kronecker products: W = sum_k A_k (x) B_k, that is W[b,c] = sum_k left[k,b,c] right[k] for every block.

    b,c: block grid (shape of A)   a,d: block shape (shape of B)   r: terms        out = b*a, in = c*d

Rearranged with one row per block, W becomes a matrix of rank r, so one SVD gives the best fit in the Frobenius norm
(Van Loan & Pitsianis 1993, "Approximation with Kronecker Products"). A product with a vector costs min(r (c d a + b c
a), r (b c d + b d a)) multiplications, more than the r (b c + a d) stored elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.structures.base import (
    STRUCTURES,
    MuP,
    Rank,
    StructureConfig,
    StructuredLinear,
    balance_factors,
    curve_ranks,
    exact_factors,
    is_exporting,
)
from surgery.structures.btt import BTTLinear
from surgery.structures.low_rank import leading_directions, tail_energies
from surgery.structures.metric import Metric, inverse_size

RESIDUAL_ROUNDING = (
    1e-14  # squared residual, relative to the right side, below which only rounding errors of float32 are left
)


@dataclass(frozen=True)
class Kronecker(StructureConfig):
    """Config of a sum of Kronecker products.

    blocks: shape (b, c) of the left factors, where b divides out and c divides in; "sqrt": the largest divisors up to
    the square roots of out and in. rank: number of terms r.
    """

    name: ClassVar[str] = "kronecker"
    blocks: tuple[int, int] | Literal["sqrt"] = "sqrt"
    rank: Rank = None


def divisor_below_sqrt(n: int) -> int:
    """Return the largest divisor of n up to sqrt(n)."""
    return next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0)


def conjugate_gradient(apply: Callable[[Tensor], Tensor], rhs: Tensor, start: Tensor, steps: int) -> Tensor:
    """Return x after `steps` conjugate-gradient steps for apply(x) = rhs, with `apply` symmetric positive semidefinite.

    Both sides are divided by the size of rhs, a power of two: squares of gradients of 1e-20 are no numbers of float32.
    """
    scale = inverse_size(rhs.reshape(1, -1)).squeeze()
    rhs = rhs * scale
    x, residual = start, rhs - apply(start) * scale
    direction, square = residual, float((residual * residual).sum())
    least = RESIDUAL_ROUNDING * float((rhs * rhs).sum())
    for _ in range(steps):
        if square <= least:
            break
        image = apply(direction) * scale
        curvature = float((direction * image).sum())
        if curvature <= 0:  # the exact value is not negative: only rounding error is left
            break
        x = x + (square / curvature) * direction
        residual = residual - (square / curvature) * image
        square, before = float((residual * residual).sum()), square
        direction = residual + (square / before) * direction
    return x


@STRUCTURES.register(Kronecker)
class KroneckerLinear(StructuredLinear):
    """Sum of r Kronecker products. Cores: `weight` = left (r, b, c), `right` (r, a, d)."""

    weight: Tensor
    right: Tensor

    @classmethod
    def resolve(cls, config: Any, out: int, in_: int) -> Any:
        """Return the config with `blocks` as numbers. SurgeryError if they cannot tile an (out, in) matrix."""
        blocks = (divisor_below_sqrt(out), divisor_below_sqrt(in_)) if config.blocks == "sqrt" else tuple(config.blocks)
        if out % blocks[0] or in_ % blocks[1]:
            raise SurgeryError(
                f"{config} cannot tile a matrix of out={out}, in={in_}: the blocks must divide both. Use for example "
                f"blocks: [{divisor_below_sqrt(out)}, {divisor_below_sqrt(in_)}]"
            )
        if blocks in ((1, 1), (out, in_)):
            raise SurgeryError(
                f"{config} cannot tile a matrix of out={out}, in={in_}: one of the Kronecker factors would be a single "
                "number. "
                "Use btt or low_rank"
            )
        return replace(config, blocks=blocks)

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every core (layout in the class docstring)."""
        (b, c), (a, d), r = config.blocks, BTTLinear.block_shape(config, out, in_), config.rank
        return {"weight": (r, b, c), "right": (r, a, d)}

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return the smallest rank that represents every (out, in) matrix exactly."""
        (b, c), (a, d) = config.blocks, BTTLinear.block_shape(config, out, in_)
        return int(min(b * c, a * d))

    @classmethod
    def _block_rows(cls, weight_OI: Tensor, config: Any) -> Tensor:
        """Return the blocks as rows, (b c, a d)."""
        (b, c), (a, d) = config.blocks, BTTLinear.block_shape(config, *weight_OI.shape)
        return weight_OI.reshape(b, a, c, d).transpose(1, 2).reshape(b * c, a * d)

    @classmethod
    def project(cls, weight_OI: Tensor, config: Any, metric: Metric | None = None) -> StructuredLinear:
        """Return the closest sum of Kronecker products in the Frobenius norm. Exact at full rank.

        The metric is ignored, because C does not commute with the rearrangement; `sweep` reduces the error in the
        metric.
        """
        rows_XY = cls._block_rows(weight_OI, config)
        if config.rank >= min(rows_XY.shape):
            left_Xr, right_rY = exact_factors(rows_XY)
        else:
            u_Xr = leading_directions(rows_XY, config.rank)
            left_Xr, right_rY = balance_factors(u_Xr, u_Xr.mT @ rows_XY)
        shapes = cls.shapes(config, *weight_OI.shape)
        cores = {"weight": left_Xr.mT.reshape(shapes["weight"]), "right": right_rY.reshape(shapes["right"])}
        return cls.from_cores(config, weight_OI.shape, cores)

    @classmethod
    def rank_error_curve(
        cls, weight_OI: Tensor, config: Any, metric: Metric, steps: int = 64
    ) -> list[tuple[Any, float]]:
        """Return (config, squared error in the metric) at about `steps` ranks, cheapest first."""
        rows_XY = cls._block_rows(weight_OI, config)
        tail = tail_energies(rows_XY * inverse_size(rows_XY))
        share = (tail / torch.where(tail[0] > 0, tail[0], 1.0) * metric.squared_norm(weight_OI)).tolist()
        ranks = curve_ranks(cls.full_rank(config, *weight_OI.shape), steps)
        return [(replace(config, rank=r), share[r]) for r in ranks]

    @torch.no_grad()
    def sweep(self, weight_OI: Tensor, metric: Metric) -> float | None:
        """Run conjugate gradients on left given right, then on right given left, with the full C and G, in place.

        Returns the squared error that is left, or None if `project` is already optimal.
        """
        if metric.c_II is None or self.config.rank >= self.full_rank(self.config, *weight_OI.shape):
            return None
        target = metric.apply(weight_OI)

        def solve(core: Tensor, put: Callable[[Tensor], Tensor], take: Callable[[Tensor], Tensor]) -> None:
            def normal(x: Tensor) -> Tensor:
                return take(self._block_rows(metric.apply(put(x)), self.config))

            core.copy_(conjugate_gradient(normal, take(self._block_rows(target, self.config)), core.clone(), steps=6))

        left, right = self.weight.data, self.right.data
        solve(left, lambda x: self._assemble(x, right), lambda m: (m @ right.flatten(1).mT).mT.view_as(left))
        solve(right, lambda x: self._assemble(left, x), lambda m: (left.flatten(1) @ m).view_as(right))
        return metric.squared_norm(weight_OI - self.dense())

    def _assemble(self, left_rbc: Tensor, right_rad: Tensor) -> Tensor:
        (_, b, c), (_, a, d) = left_rbc.shape, right_rad.shape
        blocks_bcad = (left_rbc.flatten(1).mT @ right_rad.flatten(1)).view(b, c, a, d)
        return blocks_bcad.transpose(1, 2).reshape(b * a, c * d)

    def dense(self) -> Tensor:
        """Return B as a dense matrix (O, I)."""
        return self._assemble(self.weight, self.right)

    def product(self, x: Tensor) -> Tensor:
        """Return B x (..., O) without the bias, for x (..., I).

        Multiplies by the cheaper factor first, or by the dense matrix if x has so many rows that this costs less. An
        exported program, whose number of rows is not known, always multiplies by the factors.
        """
        (r, b, c), (_, a, d) = self.weight.shape, self.right.shape
        if not is_exporting() and x.numel() // (c * d) * (self.macs() - b * a * c * d) > r * b * a * c * d:
            return F.linear(x, self.dense())
        x_Ncd = x.reshape(-1, c, d)
        if self._right_first():
            y_Nba = torch.einsum("ncka,kbc->nba", torch.einsum("ncd,kad->ncka", x_Ncd, self.right), self.weight)
        else:
            y_Nba = torch.einsum("nbkd,kad->nba", torch.einsum("ncd,kbc->nbkd", x_Ncd, self.weight), self.right)
        return y_Nba.reshape(*x.shape[:-1], b * a)

    def _right_first(self) -> bool:
        (_, b, c), (_, a, d) = self.weight.shape, self.right.shape
        return c * a * (d + b) <= b * d * (c + a)

    def macs(self) -> int:
        """Return multiply-accumulates per token of the factored product; `product` uses the dense matrix where it is
        cheaper.
        """
        (r, b, c), (_, a, d) = self.weight.shape, self.right.shape
        return r * (c * a * (d + b) if self._right_first() else b * d * (c + a))

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of each core.

        Qiu et al. 2024, section 2, calls a sum of r Kronecker products a TT of rank r, where R has the fan-out r
        sqrt(d) and L sqrt(d). Here L has the r, because the terms share the scale of the sum. Fan-ins, and with them
        AdamW's rates, are the same, and so is everything for r = 1.
        """
        (r, b, c), (_, a, d) = self.weight.shape, self.right.shape
        # The output sums over r terms, each a pair of small layers, so only the second core has r in its fan-in.
        return {"right": MuP(d, a), "weight": MuP(r * c, r * b)}
