"""Bilinear MLBTC: the score matrix M is a sum of levels, each with blocks along the diagonal or a grid of blocks.

    M = sum_l M_l     M_l = (+)_p left[l,p] right[l,p]^T            p blocks along the diagonal, each of rank r_l
                      M_l[b,c] = left[l,b,c] right[l,b,c]^T         a grid of b x c blocks of rank r_l

Kuang et al. 2025, "Customizing the Inductive Biases of Softmax Attention", section 3.3, eq. 8, with alpha_l in the left
factors; appendix C leaves "an efficient full-rank scoring function" of this family to future work, so that the layer
norms of eqs. 39 and 40 have no form here. Levels of 1, 2, 4, .. blocks are bilinear MLR, and one grid is bilinear BTT.
See bilinear.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import MIXERS, AttentionShape
from surgery.mixers.bilinear import (
    SCALE,
    Bilinear,
    BilinearConfig,
    FactorMuP,
    block_features,
    block_product,
    check_choices,
    fit_levels,
    grid_left_features,
    grid_product,
    grid_right_features,
)
from surgery.mixers.common.softmax import group_heads
from surgery.structures.base import MuP
from surgery.structures.btt import sqrt_blocks


@dataclass(frozen=True)
class BilinearMLBTC(BilinearConfig):
    """Config of bilinear MLBTC.

    levels: of each level the number p of blocks along the diagonal, a grid (b, c), or "sqrt", a square grid of the
    largest divisor of D up to its square root. ranks: rank of the blocks of each level. base, contraction: see
    bilinear.py; with base 'kept' all levels are added to the module's own score. norm: only 'none'.
    """

    name: ClassVar[str] = "bilinear_mlbtc"
    levels: tuple[int | tuple[int, int] | Literal["sqrt"], ...] = (2, "sqrt")
    ranks: tuple[int, ...] = (2, 1)
    base: Literal["kept", "own"] = "kept"
    norm: Literal["none"] = "none"
    contraction: Literal["auto", "split", "query"] = "auto"
    scale: float = SCALE

    def __post_init__(self) -> None:
        check_choices(self)
        if self.norm != "none":
            raise ValueError(
                f"norm must be none (got {self.norm!r}): the layer norms of the paper are defined for levels of one "
                "kind. Use bilinear_mlr or bilinear_btt for norm 'qk'"
            )
        if not self.levels or len(self.ranks) != len(self.levels) or min(self.ranks) < 1:
            raise ValueError(
                f"ranks must be a number of 1 or more for each level (got ranks {list(self.ranks)} for levels "
                f"{list(self.levels)}); for example levels: [1, [4, 4]], ranks: [8, 1]"
            )


@MIXERS.register(BilinearMLBTC)
class BilinearMLBTCAttention(Bilinear):
    """Bilinear attention with MLBTC matrices. Factors of level l with blocks: left<l> (H, p, m, r), right<l> (G, p, m,
    r), D = p m; with a grid: left<l> (H, b, c, a, r), right<l> (G, b, c, d, r), D = b a = c d.
    """

    config: BilinearMLBTC
    norms_features = True

    @classmethod
    def grids(cls, config: BilinearMLBTC, shape: AttentionShape) -> list[tuple[int, ...]]:
        """Return (p,) or (b, c) of each level."""
        root = sqrt_blocks(shape.dim)
        return [
            (level,) if isinstance(level, int) else (root, root) if level == "sqrt" else level
            for level in config.levels
        ]

    @classmethod
    def check_config(cls, config: BilinearMLBTC, shape: AttentionShape) -> None:
        """Raise SurgeryError if the config does not fit the attention shape."""
        for level, grid in zip(config.levels, cls.grids(config, shape)):
            if any(n < 1 or shape.dim % n for n in grid):
                raise SurgeryError(
                    f"bilinear_mlbtc: level {level!r} cannot divide {shape.dim} features into equal blocks: its numbers "
                    f"must divide {shape.dim}; for example levels: [2, {sqrt_blocks(shape.dim)}]"
                )

    @classmethod
    def factor_shapes(cls, config: BilinearMLBTC, shape: AttentionShape) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every factor."""
        sizes: dict[str, tuple[int, ...]] = {}
        for at, (grid, rank) in enumerate(zip(cls.grids(config, shape), config.ranks), 1):
            sizes[f"left{at}"] = (shape.heads, *grid, shape.dim // grid[0], rank)
            sizes[f"right{at}"] = (shape.groups, *grid, shape.dim // grid[-1], rank)
        return sizes

    @classmethod
    def dims(cls, config: BilinearMLBTC, shape: AttentionShape) -> int:
        """Return F, the score dimensions of a head."""
        return sum(cls.level_dims(config, shape))

    @classmethod
    def level_dims(cls, config: BilinearMLBTC, shape: AttentionShape) -> list[int]:
        """Return the score dimensions of a head at each level, p r or b c r."""
        grids = cls.grids(config, shape)
        return [torch.Size(grid).numel() * rank for grid, rank in zip(grids, config.ranks)]

    def factors(self, side: str) -> list[Tensor]:
        """Return the factors of a side, "left" or "right", level by level."""
        return [getattr(self, f"{side}{at}") for at in range(1, len(self.config.levels) + 1)]

    def features(self, x_BTD: Tensor, side: str) -> Tensor:
        """Return the features of x (B, H or G, T, F). side: "left" for queries, "right" for keys."""
        parts = []
        for factor in self.factors(side):
            if factor.dim() == 4:
                parts.append(block_features(x_BTD, factor))
            elif side == "left":
                parts.append(grid_left_features(x_BTD.unflatten(-1, (factor.shape[1], -1)), factor))
            else:
                parts.append(grid_right_features(x_BTD, factor))
        return torch.cat(parts, -1)

    def product(self, features_BHTF: Tensor) -> Tensor:
        """Return x^T M (B, H, T, D) from the left features of x."""
        total = torch.zeros((), dtype=features_BHTF.dtype, device=features_BHTF.device)
        sizes = self.level_dims(self.config, self.shape)
        for level_features, right in zip(features_BHTF.split(sizes, -1), self.factors("right")):
            run = block_product if right.dim() == 4 else grid_product
            total = total + run(group_heads(level_features, self.shape.groups), right)
        return total.flatten(1, 2)

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of each factor: features of both sides, as in bilinear MLR and BTT."""
        fans: dict[str, MuP] = {}
        for name, (heads, *grid, size, rank) in self.factor_shapes(self.config, self.shape).items():
            others = 1 if len(grid) == 1 else grid[-1] if name.startswith("left") else grid[0]
            fans[name] = FactorMuP(size, heads * others * rank)
        return fans

    @torch.no_grad()
    def fit_blocks(self, target_HDD: Tensor, a_DD: Tensor, c_DD: Tensor) -> None:
        """Set the factors, in place: rounds over the levels, each fitted to the residual of the others."""
        levels = list(zip(self.factors("left"), self.factors("right")))
        fit_levels(levels, target_HDD, a_DD, c_DD, self.dims(self.config, self.shape))
