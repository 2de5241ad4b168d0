"""Bilinear MLR: the score matrix M is a sum of block-diagonal low-rank matrices, M = sum_l (+)_p left[l,p]
right[l,p]^T.

See bilinear.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
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
)
from surgery.mixers.common.softmax import group_heads
from surgery.structures.base import MuP


@dataclass(frozen=True)
class BilinearMLR(BilinearConfig):
    """Config of bilinear MLR.

    ranks: of levels 1 .. L. With base 'kept', level 1 is the module's own score; its rank is written as K, or as 0.
    base, norm, contraction: see bilinear.py. scale: C of norm 'qk', eq. 39.
    """

    name: ClassVar[str] = "bilinear_mlr"
    ranks: tuple[int, ...] = ()
    base: Literal["kept", "own"] = "kept"
    norm: Literal["none", "layer", "qk"] = "none"
    contraction: Literal["auto", "split", "query"] = "auto"
    scale: float = SCALE

    def __post_init__(self) -> None:
        check_choices(self)
        base_levels = 1 if self.base == "kept" else 0
        if len(self.ranks) < 1 + base_levels or min(self.ranks[base_levels:]) < 1 or min(self.ranks) < 0:
            raise ValueError(
                f"ranks must be 1 or more for every level (got {list(self.ranks)}); base 'kept' needs two levels or "
                "more, "
                "and the rank of the first, the head's own score, may be written 0. For example ranks: [64, 8, 4]"
            )
        if self.norm != "none" and self.contraction == "query":
            raise ValueError(
                f"norm {self.norm!r} normalises features, which contraction 'query' does not form; use 'split'"
            )
        if self.norm == "qk" and self.base == "own" and self.ranks[0] == 1:
            raise ValueError(
                "norm 'qk' normalises each level separately, and level 1 with rank 1 has a single feature, whose layer "
                "norm "
                "is always 0; use a higher rank, for example ranks: [2, 1]"
            )


@MIXERS.register(BilinearMLR)
class BilinearMLRAttention(Bilinear):
    """Bilinear attention with MLR matrices. left{l} (H, p, m, r), right{l} (G, p, m, r): factors of level l, which has
    p = 2^(l-1) blocks of m = D / p features."""

    config: BilinearMLR
    norms_features = True

    @classmethod
    def levels(cls, config: BilinearMLR) -> list[tuple[int, int, int]]:
        """Return (l, p, r) of every level with factors: level, number of blocks and rank."""
        all_levels = [(level, 2 ** (level - 1), rank) for level, rank in enumerate(config.ranks, 1)]
        return all_levels[1:] if config.base == "kept" else all_levels

    @classmethod
    def check_config(cls, config: BilinearMLR, shape: AttentionShape) -> None:
        """Raise SurgeryError if the config does not fit the attention shape."""
        if config.base == "kept" and config.ranks[0] not in (0, shape.key):
            raise SurgeryError(
                f"bilinear_mlr: with base 'kept', level 1 is the head's own score, so ranks[0] must be {shape.key} or "
                "0 "
                f"(got {config.ranks[0]}); for example ranks: [{shape.key}, {max(1, shape.key // 8)}]"
            )
        blocks = 2 ** (len(config.ranks) - 1)
        if shape.dim % blocks:
            raise SurgeryError(
                f"bilinear_mlr: {len(config.ranks)} levels split {shape.dim} features into {blocks} blocks, and "
                f"{blocks} does "
                f"not divide {shape.dim}; use fewer levels"
            )

    @classmethod
    def factor_shapes(cls, config: BilinearMLR, shape: AttentionShape) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every factor."""
        sizes: dict[str, tuple[int, ...]] = {}
        for level, p, rank in cls.levels(config):
            sizes[f"left{level}"] = (shape.heads, p, shape.dim // p, rank)
            sizes[f"right{level}"] = (shape.groups, p, shape.dim // p, rank)
        return sizes

    @classmethod
    def dims(cls, config: BilinearMLR, shape: AttentionShape) -> int:
        """Return F, the score dimensions of a head."""
        return sum(p * rank for _, p, rank in cls.levels(config))

    def features(self, x_BTD: Tensor, side: str) -> Tensor:
        """Return the features of x (B, H or G, T, F). side: "left" for queries, "right" for keys."""
        parts = [block_features(x_BTD, getattr(self, f"{side}{level}")) for level, _, _ in self.levels(self.config)]
        return torch.cat(parts, -1)

    def product(self, features_BHTF: Tensor) -> Tensor:
        """Return x^T M (B, H, T, D) from the left features of x."""
        levels = self.levels(self.config)
        total = torch.zeros((), dtype=features_BHTF.dtype, device=features_BHTF.device)
        for level_features, (level, _, _) in zip(features_BHTF.split([p * r for _, p, r in levels], -1), levels):
            grouped_part = group_heads(level_features, self.shape.groups)
            total = total + block_product(grouped_part, getattr(self, f"right{level}"))
        return total.flatten(1, 2)

    def qk_queries(self, x_BTD: Tensor) -> Tensor:
        """Return the queries (B, H, T, F) of norm `qk`, eq. 39, times the constant."""
        parts = self._normed(self.features(x_BTD, "left"))
        return torch.cat([level_queries * (self.config.scale / level_queries.shape[-1]) for level_queries in parts], -1)

    def qk_keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the keys (B, G, T, F) of norm `qk`, eq. 39, and None: scores have no factor."""
        keys = torch.cat(self._normed(self.features(x_BTD, "right")), -1)
        return keys * self.key_gain.to(keys.dtype), None

    def _normed(self, features_BHTF: Tensor) -> list[Tensor]:
        """Return the layer norm of each level's r_l p_l features, eq. 39."""
        parts = features_BHTF.split([p * rank for _, p, rank in self.levels(self.config)], -1)
        return [F.layer_norm(level_features, level_features.shape[-1:]) for level_features in parts]

    def mup(self) -> dict[str, MuP]:
        """Return fan-in D / p_l and fan-out of each factor (eqs. 32, 36)."""
        shapes = self.factor_shapes(self.config, self.shape)
        return {name: FactorMuP(size[2], size[0] * size[3]) for name, size in shapes.items()}

    @torch.no_grad()
    def fit_blocks(self, target_HDD: Tensor, a_DD: Tensor, c_DD: Tensor) -> None:
        """Set the factors, in place: four rounds over the levels, each fitted to the residual of the others."""
        levels = [
            (getattr(self, f"left{level}"), getattr(self, f"right{level}")) for level, _, _ in self.levels(self.config)
        ]
        fit_levels(levels, target_HDD, a_DD, c_DD, self.dims(self.config, self.shape))
