"""Bilinear BTT: a score matrix over features in b x c blocks, M[b,c] = left[b,c] right[b,c]^T. See bilinear.py."""

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
from surgery.structures.btt import sqrt_blocks

EPS = 1e-5  # of F.layer_norm


@dataclass(frozen=True)
class BilinearBTT(MixerConfig):
    """blocks: the grid (b, c) over D x D; "sqrt": about the square root of D, a divisor. rank: s of each block. scale: C of
    norm 'qk', eq. 40."""

    name: ClassVar[str] = "bilinear_btt"
    blocks: tuple[int, int] | Literal["sqrt"] = "sqrt"
    rank: int = 1
    base: Literal["kept", "own"] = "kept"
    norm: Literal["none", "layer", "qk"] = "none"
    contraction: Literal["auto", "split", "query"] = "auto"
    scale: float = SCALE

    def __post_init__(self) -> None:
        check_choices(self)
        if self.rank < 1:
            raise ValueError(f"rank {self.rank} must be 1 or more")
        if self.norm != "none" and self.contraction == "split":
            raise ValueError(
                f"norm {self.norm!r} is of M's products, which contraction 'split' never makes; use 'query'"
            )


@MIXERS.register(BilinearBTT)
class BilinearBTTAttention(Bilinear):
    """left (H, b, c, a, s), right (G, b, c, d, s): D = b a = c d.

    M's rows are in the order (b, a); with norm `qk` in the paper's, (a, b), which is the permutation P_L of eq. 5.
    """

    left: Tensor
    right: Tensor
    norms_features = False

    @classmethod
    def grid(cls, config: Any, shape: AttentionShape) -> tuple[int, int]:
        return (sqrt_blocks(shape.dim),) * 2 if config.blocks == "sqrt" else tuple(config.blocks)

    @classmethod
    def check_config(cls, config: Any, shape: AttentionShape) -> None:
        """Raise SurgeryError if the config does not fit the attention shape."""
        b, c = cls.grid(config, shape)
        if b < 1 or c < 1 or shape.dim % b or shape.dim % c:
            raise SurgeryError(
                f"bilinear_btt: blocks ({b}, {c}) cannot tile {shape.dim} x {shape.dim} features: both must divide "
                f"{shape.dim}; for example blocks: [{sqrt_blocks(shape.dim)}, {sqrt_blocks(shape.dim)}]"
            )

    @classmethod
    def factor_shapes(cls, config: Any, shape: AttentionShape) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every factor."""
        b, c = cls.grid(config, shape)
        return {
            "left": (shape.heads, b, c, shape.dim // b, config.rank),
            "right": (shape.groups, b, c, shape.dim // c, config.rank),
        }

    @classmethod
    def dims(cls, config: Any, shape: AttentionShape) -> int:
        """Return F, the score dimensions of a head."""
        b, c = cls.grid(config, shape)
        return b * c * config.rank

    def features(self, x_BTD: Tensor, side: str) -> Tensor:
        """Return the features of x (B, H or G, T, F) on one side: 'left' for queries, 'right' for keys."""
        b, c = self.grid(self.config, self.shape)
        if side == "right":
            right = self.right.to(x_BTD.dtype)
            return torch.einsum("btyd,gxyds->bgtxys", x_BTD.unflatten(-1, (c, -1)), right).flatten(-3)
        left = self.left.to(x_BTD.dtype)
        rows = x_BTD.unflatten(-1, (-1, b)).mT if self.config.norm == "qk" else x_BTD.unflatten(-1, (b, -1))
        return torch.einsum("btxa,hxyas->bhtxys", rows, left).flatten(-3)

    def product(self, features_BHTF: Tensor) -> Tensor:
        """Return query features times the right factors, (B, H, T, D)."""
        b, c = self.grid(self.config, self.shape)
        parts = group_heads(features_BHTF, self.shape.groups).unflatten(-1, (b, c, self.config.rank))
        right = self.right.to(parts.dtype)
        return torch.einsum("bgjtxys,gxyds->bgjtyd", parts, right).flatten(-2).flatten(1, 2)

    def qk_queries(self, x_BTD: Tensor) -> Tensor:
        """M^T (gain LN(x)), centred: q . (y - mean(y)) = (q - mean(q)) . y with y = M x'. So the keys stay x', and all that
        is left of their layer norm is the deviation of y, one number for each head and token."""
        x_BTD = F.layer_norm(x_BTD, x_BTD.shape[-1:]) * self.key_gain.to(x_BTD.dtype)
        x_BTD = (x_BTD - x_BTD.mean(-1, keepdim=True)) * (self.config.scale / self.shape.dim)
        return self.product(self.features(x_BTD, "left"))

    def qk_keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the keys of norm 'qk' and their scale, or None without a scale."""
        b, c = self.grid(self.config, self.shape)
        parts = self.features(x_BTD, "right").unflatten(-1, (b, c, self.config.rank))
        left = self.left.to(x_BTD.dtype).unflatten(0, (self.shape.groups, -1))
        y_BHTD = torch.einsum("bgtxys,gjxyas->bgjtxa", parts, left).flatten(-2).flatten(1, 2)
        return x_BTD[:, None], torch.rsqrt(y_BHTD.var(-1, correction=0, keepdim=True) + EPS)

    def mup(self) -> dict[str, MuP]:
        """Fans in the order in which the normalised vector is made. `qk`: M x', right and then left (eqs. 37, 38, whose a is
        the fan-in d where grids are square). `layer`: x^T M, left and then right. `none`: features of both sides, whose
        products are summed and divided by their number in either order of contraction."""
        (heads, b, c, a, s), (groups, _, _, d, _) = self.left.shape, self.right.shape
        if self.config.norm == "qk":
            return {"left": Factor(c * s, a), "right": Factor(d, groups * b * s)}
        if self.config.norm == "layer":
            return {"left": Factor(a, heads * c * s), "right": Factor(b * s, d)}
        return {"left": Factor(a, heads * c * s), "right": Factor(d, groups * b * s)}

    @torch.no_grad()
    def fit_blocks(self, target_HDD: Tensor, a_DD: Tensor, c_DD: Tensor) -> None:
        """Set the factors by truncated SVDs of whitened blocks of the target (H, D, D)."""
        heads, dims = self.shape.heads // self.shape.groups, self.dims(self.config, self.shape)
        _, b, c, a, rank = self.left.shape
        d = self.shape.dim // c
        for g, x, y in itertools.product(range(self.shape.groups), range(b), range(c)):
            rows, columns, of = slice(x * a, x * a + a), slice(y * d, y * d + d), slice(g * heads, g * heads + heads)
            left, right = best_factors(target_HDD[of, rows, columns], a_DD[rows, rows], c_DD[columns, columns], rank)
            self.left[of, x, y], self.right[g, x, y] = (left * dims).to(self.left.dtype), right.to(self.right.dtype)
