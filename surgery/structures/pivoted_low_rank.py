"""Pivoted low rank: R rows of B are stored, and the other rows as linear combinations of them.

    B[pivots] = right (R, I),  B[others] = weight (O - R, R) @ right      stored: R (O + I - R) elements, O indices

A rank-R matrix has R (O + I - R) degrees of freedom, and two factors left (O, R) and right (R, I) store R^2 more than
that. This is "Pivoting Factorization" (PIFA, Zhao et al. 2025): an interpolative decomposition of the best low-rank
approximation in the metric. The pivots are rows of nearly maximal volume (Goreinov et al. 2010), so that no coefficient
is large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.structures import linalg
from surgery.structures.base import STRUCTURES, MuP, Rank, StructureConfig, StructuredLinear
from surgery.structures.coordinates import Coordinates, balanced_pivots
from surgery.structures.low_rank import LowRankLinear, low_rank_factors
from surgery.structures.metric import Metric


@dataclass(frozen=True)
class PivotedLowRank(StructureConfig):
    """Config of a pivoted low-rank matrix. rank: R."""

    name: ClassVar[str] = "pivoted_low_rank"
    rank: Rank = None


@torch.no_grad()
def maximal_volume_rows(tall_OR: Tensor, bound: float = 1.5, swaps: int = 200) -> tuple[Tensor, Tensor]:
    """Return pivots (R,) and coefficients (O, R) with tall = coefficients @ tall[pivots].

    LU with partial pivoting chooses the first pivots. Then, at most `swaps` times, the row with the largest coefficient
    becomes a pivot if that exceeds `bound`; each swap multiplies the volume by the coefficient.
    """
    rank = tall_OR.shape[1]
    _factors, pivot_steps = linalg.lu_factor(tall_OR)
    order = torch.arange(tall_OR.shape[0], device=tall_OR.device)
    for i, step in enumerate((pivot_steps - 1).tolist()):
        order[[i, step]] = order[[step, i]]
    pivots = order[:rank].clone()
    coefficients = linalg.solve(tall_OR[pivots], tall_OR, left=False)
    for _ in range(swaps):
        row, column = divmod(int(coefficients.abs().argmax()), rank)
        if float(coefficients[row, column].abs()) <= bound:
            break
        change = coefficients[row].clone()
        change[column] -= 1
        coefficients -= torch.outer(coefficients[:, column] / coefficients[row, column], change)
        pivots[column] = row
    # The rank-one updates accumulate rounding errors, so the coefficients are computed once more for the final pivots.
    return pivots, linalg.solve(tall_OR[pivots], tall_OR, left=False)


@STRUCTURES.register(PivotedLowRank)
class PivotedLowRankLinear(StructuredLinear):
    """Pivoted low-rank linear layer. Cores: `weight` (1, O - R, R), `right` (R, I).

    Buffer `place` (O,) int32: the position of output row o in the concatenation of pivot rows and other rows.
    """

    weight: Tensor
    right: Tensor
    place: Tensor

    def __init__(self, in_features: int, out_features: int, config: Any, bias: bool = True, **factory: Any):
        super().__init__(in_features, out_features, config, bias, **factory)
        device = factory.get("device")
        self.register_buffer("place", torch.arange(out_features, dtype=torch.int32, device=device))

    def check_loaded(self) -> None:
        """Raise SurgeryError if `place` is not a permutation of the output rows."""
        rows = torch.arange(self.out_features).to(self.place)
        if not self.place.is_meta and not torch.equal(self.place.sort().values, rows):
            raise SurgeryError(
                f"place of a pivoted_low_rank matrix must be a permutation of its {self.out_features} rows: the "
                "checkpoint is "
                "damaged. Download or convert it again"
            )

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every core (layout in the class docstring)."""
        return {"weight": (1, out - config.rank, config.rank), "right": (config.rank, in_)}

    @classmethod
    def params(cls, config: Any, out: int, in_: int) -> int:
        """Return the number of stored elements, index table included."""
        return super().params(config, out, in_) + out

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return the smallest rank that represents every (out, in) matrix exactly."""
        return min(out, in_)

    @classmethod
    def project(cls, weight_OI: Tensor, config: Any, metric: Metric | None = None) -> StructuredLinear:
        """Return the best rank-R approximation in the metric, as low_rank does; pivoting only changes how it is
        stored.
        """
        left_OR, right_RI = low_rank_factors(weight_OI, config.rank, metric or Metric())
        pivots, coefficients_OR = maximal_volume_rows(left_OR)
        others = torch.ones(len(left_OR), dtype=torch.bool, device=pivots.device)
        others[pivots] = False
        order = torch.cat([pivots, others.nonzero()[:, 0]])
        cores = {"weight": coefficients_OR[others][None], "right": left_OR[pivots] @ right_RI}
        linear = cls.from_cores(config, weight_OI.shape, cores)
        linear.register_buffer("place", order.argsort().to(torch.int32))
        return linear

    @classmethod
    def rank_error_curve(
        cls, weight_OI: Tensor, config: Any, metric: Metric, steps: int = 64
    ) -> list[tuple[Any, float]]:
        """Return (config, squared error in the metric) at about `steps` ranks, cheapest first."""
        return LowRankLinear.rank_error_curve(weight_OI, config, metric, steps)

    def core_names(self) -> list[str]:
        """Return the names of the stored tensors."""
        return ["weight", "right", "place"]

    def output_cores(self) -> list[str]:
        """Return the names of both cores: rows of `right` are copied to the output."""
        return ["weight", "right"]

    @torch.no_grad()
    def step_coordinates(self) -> dict[str, Coordinates]:
        """Return the coordinates of both cores: those of the two balanced factors of B, whose rows at the pivots do not
        change.

        Pivot rows of B resemble each other, so steps of equal size in `weight` and `right` change B mostly along its
        leading directions.
        """
        pivots_RR, inverse_RR = balanced_pivots(self.weight[0].detach(), self.right.detach())
        return {
            "weight": Coordinates(inverse_RR, pivots_RR, on_rows=False),
            "right": Coordinates(pivots_RR, inverse_RR, on_rows=True),
        }

    @classmethod
    def step_order(cls, config: Any, out: int, in_: int) -> int:
        """Return the rank: `step_coordinates` has a matrix (R, R) and its inverse."""
        return int(config.rank)

    def product(self, x: Tensor) -> Tensor:
        """Return B x (..., O) without the bias, for x (..., I)."""
        z = F.linear(x, self.right)
        return torch.cat([z, F.linear(z, self.weight[0])], dim=-1).index_select(-1, self.place)

    def product_by_cores(
        self, x: Tensor, multiply: Callable[[str, Tensor], Tensor], tables: Mapping[str, Any]
    ) -> Tensor:
        """Return B x (..., O), without the bias. multiply(name, x): the product of a core with x (..., K). tables:
        the index table `place`."""
        z = multiply("right", x)
        return torch.cat([z, multiply("weight", z)], dim=-1).index_select(-1, tables["place"])

    def dense(self) -> Tensor:
        """Return B as a dense matrix (O, I)."""
        return torch.cat([self.right, self.weight[0] @ self.right]).index_select(0, self.place)

    def macs(self) -> int:
        """Return multiply-accumulates per token."""
        return self.weight.numel() + self.right.numel()

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of each core."""
        rank = self.config.rank
        return {"right": MuP(self.in_features, rank), "weight": MuP(rank, max(1, self.out_features - rank))}
