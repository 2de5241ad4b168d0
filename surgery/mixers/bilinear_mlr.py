"""Bilinear MLR: a score matrix over features, M = sum_l (+)_p left[l,p] right[l,p]^T. See bilinear.py."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import MIXERS, AttentionShape, MixerConfig
from surgery.mixers.bilinear import SCALE, Bilinear, Factor, best_factors, check_choices
from surgery.mixers.common.softmax import group_heads
from surgery.structures.base import MuP


@dataclass(frozen=True)
class BilinearMLR(MixerConfig):
    """ranks of levels 1 .. L, with base 'kept' the first of them K or, whatever K is, 0; contraction auto: the order that
    keeps fewer numbers. scale: C of norm 'qk', eq. 39."""

    name: ClassVar[str] = "bilinear_mlr"
    ranks: tuple[int, ...] = ()
    base: Literal["kept", "own"] = "kept"
    norm: Literal["none", "layer", "qk"] = "none"
    contraction: Literal["auto", "split", "query"] = "auto"
    scale: float = SCALE

    def __post_init__(self) -> None:
        check_choices(self)
        own = 1 if self.base == "kept" else 0
        if len(self.ranks) < 1 + own or min(self.ranks[own:]) < 1 or min(self.ranks) < 0:
            raise ValueError(
                f"ranks {list(self.ranks)} must give every level a rank, base 'kept' two levels or more (the first is "
                "the head's own, and may be written 0); for example ranks: [64, 8, 4]"
            )
        if self.norm != "none" and self.contraction == "query":
            raise ValueError(f"norm {self.norm!r} is of the features that contraction 'query' never makes; use 'split'")
        if self.norm == "qk" and self.base == "own" and self.ranks[0] == 1:
            raise ValueError(
                "norm 'qk' normalises each level on its own, and level 1 of rank 1 has a single feature, whose layer norm "
                "is always 0; for example ranks: [2, 1]"
            )


@MIXERS.register(BilinearMLR)
class BilinearMLRAttention(Bilinear):
    """left{l} (H, p, m, r), right{l} (G, p, m, r) of level l: p = 2^(l-1) blocks of m = D / p features."""

    norms_features = True

    @classmethod
    def levels(cls, config: Any) -> list[tuple[int, int, int]]:
        """(l, p, r) of every level with factors of its own."""
        all_levels = [(level, 2 ** (level - 1), rank) for level, rank in enumerate(config.ranks, 1)]
        return all_levels[1:] if config.base == "kept" else all_levels

    @classmethod
    def check_config(cls, config: Any, shape: AttentionShape) -> None:
        """Raise SurgeryError if the config does not fit the attention shape."""
        if config.base == "kept" and config.ranks[0] not in (0, shape.key):
            raise SurgeryError(
                f"bilinear_mlr: base 'kept' has the head's own {shape.key} dims as level 1, not {config.ranks[0]}; "
                f"for example ranks: [{shape.key}, {max(1, shape.key // 8)}]"
            )
        blocks = 2 ** (len(config.ranks) - 1)
        if shape.dim % blocks:
            raise SurgeryError(
                f"bilinear_mlr: {len(config.ranks)} levels cut {shape.dim} features into {blocks} blocks, which must "
                "divide them; use fewer levels"
            )

    @classmethod
    def factor_shapes(cls, config: Any, shape: AttentionShape) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every factor."""
        sizes: dict[str, tuple[int, ...]] = {}
        for level, p, rank in cls.levels(config):
            sizes[f"left{level}"] = (shape.heads, p, shape.dim // p, rank)
            sizes[f"right{level}"] = (shape.groups, p, shape.dim // p, rank)
        return sizes

    @classmethod
    def dims(cls, config: Any, shape: AttentionShape) -> int:
        """Return F, the score dimensions of a head."""
        return sum(p * rank for _, p, rank in cls.levels(config))

    def features(self, x_BTD: Tensor, side: str) -> Tensor:
        """Return the features of x (B, H or G, T, F) on one side: 'left' for queries, 'right' for keys."""
        parts = []
        for level, p, _ in self.levels(self.config):
            factor = getattr(self, f"{side}{level}").to(x_BTD.dtype)
            part = torch.einsum("btpm,hpmr->bhtpr", x_BTD.unflatten(-1, (p, -1)), factor).flatten(-2)
            parts.append(part)
        return torch.cat(parts, -1)

    def product(self, features_BHTF: Tensor) -> Tensor:
        """Return query features times the right factors, (B, H, T, D)."""
        levels = self.levels(self.config)
        total: Any = 0.0
        for part, (level, p, rank) in zip(features_BHTF.split([p * r for _, p, r in levels], -1), levels):
            right_GPMR = getattr(self, f"right{level}").to(part.dtype)
            grouped_part = group_heads(part, self.shape.groups).unflatten(-1, (p, rank))
            total = total + torch.einsum("bgjtpr,gpmr->bgjtpm", grouped_part, right_GPMR).flatten(-2)
        return total.flatten(1, 2)

    def qk_queries(self, x_BTD: Tensor) -> Tensor:
        """Return the query side of the score for norm 'qk'."""
        parts = self._normed(self.features(x_BTD, "left"))
        return torch.cat([part * (self.config.scale / part.shape[-1]) for part in parts], -1)

    def qk_keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the keys of norm 'qk' and their scale, or None without a scale."""
        keys = torch.cat(self._normed(self.features(x_BTD, "right")), -1)
        return keys * self.key_gain.to(keys.dtype), None

    def _normed(self, features_BHTF: Tensor) -> list[Tensor]:
        """LN of each level's r_l p_l features, eq. 39."""
        parts = features_BHTF.split([p * rank for _, p, rank in self.levels(self.config)], -1)
        return [F.layer_norm(part, part.shape[-1:]) for part in parts]

    def mup(self) -> dict[str, MuP]:
        """Fan-in D / p_l on both sides, whose features meet in the score (eqs. 32, 36)."""
        shapes = self.factor_shapes(self.config, self.shape)
        return {name: Factor(size[2], size[0] * size[3]) for name, size in shapes.items()}

    @torch.no_grad()
    def fit_blocks(self, target_HDD: Tensor, a_DD: Tensor, c_DD: Tensor) -> None:
        """Level by level, four rounds, each on what the other levels leave."""
        levels, dims = self.levels(self.config), self.dims(self.config, self.shape)
        residual, parts = target_HDD.clone(), [torch.zeros_like(target_HDD) for _ in levels]
        for _ in range(4 if len(levels) > 1 else 1):
            for i, (level, p, rank) in enumerate(levels):
                residual += parts[i]
                left, right = (getattr(self, f"{side}{level}") for side in ("left", "right"))
                for g, k in itertools.product(range(self.shape.groups), range(p)):
                    at = slice(k * left.shape[2], (k + 1) * left.shape[2])
                    heads = slice(g * len(left) // len(right), (g + 1) * len(left) // len(right))
                    new_left, new_right = best_factors(residual[heads, at, at], a_DD[at, at], c_DD[at, at], rank)
                    left[heads, k], right[g, k] = (new_left * dims).to(left.dtype), new_right.to(right.dtype)
                    parts[i][heads, at, at] = new_left @ new_right.mT
                residual -= parts[i]
