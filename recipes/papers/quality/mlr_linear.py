"""Multi-level low-rank (MLR) linear: W = sum_l (+)_k left[l, k] right[l, k], k = 1 .. 2^(l - 1) diagonal blocks of rank
r.

    l: level    k: block of the level    a, d: out, in over 2^(l - 1)    r: rank of a block        y_k += left (right x_k)

(Parshakova et al. 2023, "Factor fitting, rank allocation, and partitioning in multilevel low rank matrices"; a special
case of Kuang et al. 2025, eq. 8.) For training from scratch only: it has no projection of a given matrix, so recipes do
not offer it. Its learning rates treat the left factors of all levels as one layer whose fan-in is the sum of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from surgery.structures.base import MuP, StructureConfig, StructuredLinear


@dataclass(frozen=True)
class MLRLinearConfig(StructureConfig):
    """Config of MLRLinear."""

    name: ClassVar[str] = "mlr"
    ranks: tuple[int, ...] = (4, 4, 4, 4)


class MLRLinear(StructuredLinear):
    """Multi-level low-rank linear."""

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the cores: weight<l> (k, rank, out/k) and right<l> (k, in/k, rank) of each level l, k =
        2^l.
        """
        found: dict[str, tuple[int, ...]] = {}
        for level, rank in enumerate(config.ranks):
            k, tail = 2**level, str(level or "")
            found |= {f"weight{tail}": (k, rank, out // k), f"right{tail}": (k, in_ // k, rank)}
        return found

    def product(self, x: Tensor) -> Tensor:
        """Return W x."""
        y: Any = 0.0
        for level in range(len(self.config.ranks)):
            left_kra, right_kdr = (getattr(self, f"{name}{level or ''}") for name in ("weight", "right"))
            x_Nkd = x.unflatten(-1, (2**level, -1))
            z_Nkr = torch.einsum("...kd,kdr->...kr", x_Nkd, right_kdr)
            y = y + torch.einsum("...kr,kra->...ka", z_Nkr, left_kra).flatten(-2)
        return y

    def macs(self) -> int:
        """Return the multiply-accumulates per token."""
        return sum(getattr(self, name).numel() for name in self.core_names())

    def mup(self) -> dict[str, MuP]:
        """Return the fans of the cores; all left factors have the sum of all ranks as fan-in."""
        found, rank = {}, sum(self.config.ranks)
        for name, (_, first, last) in self.shapes(self.config, self.out_features, self.in_features).items():
            found[name] = MuP(rank, last) if name.startswith("weight") else MuP(first, last)
        return found


def zero_output(linear: MLRLinear) -> None:
    """Set the left factors to zero, so that the layer's output is zero."""
    for name in linear.core_names():
        if name.startswith("weight"):
            nn.init.zeros_(getattr(linear, name))
