"""Dropped matrices: B = 0, without parameters.

They stand in place of all linears of an MLP, or of the projections of attention that is dropped (`mixer: none`), so that
the module adds nothing to the residual stream but the bias of its last linear, which is stored unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from surgery.structures.base import STRUCTURES, MuP, StructureConfig, StructuredLinear
from surgery.structures.metric import Metric


@dataclass(frozen=True)
class Dropped(StructureConfig):
    """Config of a dropped matrix. rank: of the zero matrix, which no budget chooses."""

    name: ClassVar[str] = "dropped"
    of_mlp: ClassVar[bool] = True
    rank: ClassVar[int] = 0


@STRUCTURES.register(Dropped)
class DroppedLinear(StructuredLinear):
    """A linear layer y = bias. `weight` is stored with 0 elements, by which other libraries find that they cannot read
    the checkpoint.
    """

    weight: Tensor

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of the empty core."""
        return {"weight": (0,)}

    @classmethod
    def fit(cls, config: Any, out: int, in_: int, budget: float) -> Any:
        """Return the config, which fits every budget."""
        return config

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return 0, the only rank."""
        return 0

    @classmethod
    def project(cls, weight_OI: Tensor, config: Any, metric: Metric | None = None) -> DroppedLinear:
        """Return the zero matrix (O, I)."""
        linear = cls.from_cores(config, weight_OI.shape, {"weight": weight_OI.new_zeros(0)})
        assert isinstance(linear, DroppedLinear)
        return linear

    @classmethod
    def rank_error_curve(
        cls, weight_OI: Tensor, config: Any, metric: Metric, steps: int = 64
    ) -> list[tuple[Any, float]]:
        """Return the only config and its squared error, that of leaving W out."""
        return [(config, metric.squared_norm(weight_OI))]

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of the matrix."""
        return {"weight": MuP(self.in_features, self.out_features)}

    def macs(self) -> int:
        """Return 0."""
        return 0

    def dense(self) -> Tensor:
        """Return zeros (O, I)."""
        return self.weight.new_zeros(self.out_features, self.in_features)

    def product(self, x: Tensor) -> Tensor:
        """Return zeros (..., O), as sums over no elements of x and of the core, so that both have a gradient of 0:
        replicas of DistributedDataParallel wait for the gradient of each parameter.
        """
        zero = x[..., :0].sum(-1, keepdim=True) + self.weight.sum().to(x.dtype)
        return zero.repeat(*(1,) * (x.dim() - 1), self.out_features)
