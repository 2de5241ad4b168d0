"""Bilinear BTT: the score matrix M is a grid of low-rank blocks, M[b,c] = left[b,c] right[b,c]^T. See bilinear.py."""

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
    check_choices,
    fit_levels,
    grid_left_features,
    grid_product,
    grid_right_features,
)
from surgery.mixers.common.softmax import group_heads
from surgery.structures.base import MuP
from surgery.structures.btt import sqrt_blocks

EPS = 1e-5  # default of F.layer_norm


@dataclass(frozen=True)
class BilinearBTT(BilinearConfig):
    """Config of bilinear BTT.

    blocks: the grid (b, c) over D x D; "sqrt": b = c, the largest divisor of D up to its square root. rank: s of each
    block. base, norm, contraction: see bilinear.py. scale: C of norm 'qk', eq. 40.
    """

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
            raise ValueError(f"rank must be 1 or more (got {self.rank})")
        if self.norm != "none" and self.contraction == "split":
            raise ValueError(
                f"norm {self.norm!r} normalises products with M, which contraction 'split' does not form; use 'query'"
            )


@MIXERS.register(BilinearBTT)
class BilinearBTTAttention(Bilinear):
    """Bilinear attention with BTT matrices. left (H, b, c, a, s), right (G, b, c, d, s): D = b a = c d.

    The rows of M are in the order (b, a); with norm `qk`, in the order of the paper, (a, b), the permutation P_L of eq.
    5.
    """

    config: BilinearBTT
    left: Tensor
    right: Tensor
    norms_features = False

    @classmethod
    def grid(cls, config: BilinearBTT, shape: AttentionShape) -> tuple[int, int]:
        """Return the grid (b, c) of blocks."""
        if config.blocks == "sqrt":
            return sqrt_blocks(shape.dim), sqrt_blocks(shape.dim)
        b, c = config.blocks
        return b, c

    @classmethod
    def check_config(cls, config: BilinearBTT, shape: AttentionShape) -> None:
        """Raise SurgeryError if the config does not fit the attention shape."""
        b, c = cls.grid(config, shape)
        if b < 1 or c < 1 or shape.dim % b or shape.dim % c:
            raise SurgeryError(
                f"bilinear_btt: blocks ({b}, {c}) cannot tile {shape.dim} x {shape.dim} features: both must divide "
                f"{shape.dim}; for example blocks: [{sqrt_blocks(shape.dim)}, {sqrt_blocks(shape.dim)}]"
            )

    @classmethod
    def factor_shapes(cls, config: BilinearBTT, shape: AttentionShape) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every factor."""
        b, c = cls.grid(config, shape)
        return {
            "left": (shape.heads, b, c, shape.dim // b, config.rank),
            "right": (shape.groups, b, c, shape.dim // c, config.rank),
        }

    @classmethod
    def dims(cls, config: BilinearBTT, shape: AttentionShape) -> int:
        """Return F, the score dimensions of a head."""
        b, c = cls.grid(config, shape)
        return b * c * config.rank

    def features(self, x_BTD: Tensor, side: str) -> Tensor:
        """Return the features of x (B, H or G, T, F). side: "left" for queries, "right" for keys."""
        if side == "right":
            return grid_right_features(x_BTD, self.right)
        b, _ = self.grid(self.config, self.shape)
        rows = x_BTD.unflatten(-1, (-1, b)).mT if self.config.norm == "qk" else x_BTD.unflatten(-1, (b, -1))
        return grid_left_features(rows, self.left)

    def product(self, features_BHTF: Tensor) -> Tensor:
        """Return x^T M (B, H, T, D) from the left features of x."""
        return grid_product(group_heads(features_BHTF, self.shape.groups), self.right).flatten(1, 2)

    def qk_queries(self, x_BTD: Tensor) -> Tensor:
        """Return the queries M^T (gain LN(x)) C / D, (B, H, T, D), with gain LN(x) centred.

        With y = M x', q . (y - mean(y)) = (q - mean(q)) . y. So the cached keys are x' itself, and their layer norm
        needs only the standard deviation of y, one factor per head and token (`qk_keys`).
        """
        x_BTD = F.layer_norm(x_BTD, x_BTD.shape[-1:]) * self.key_gain.to(x_BTD.dtype)
        x_BTD = (x_BTD - x_BTD.mean(-1, keepdim=True)) * (self.config.scale / self.shape.dim)
        return self.product(self.features(x_BTD, "left"))

    def qk_keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the keys x' (B, 1, T, D) and 1 / std(M x') (B, H, T, 1)."""
        b, c = self.grid(self.config, self.shape)
        parts = self.features(x_BTD, "right").unflatten(-1, (b, c, self.config.rank))
        left = self.left.to(x_BTD.dtype).unflatten(0, (self.shape.groups, -1))
        y_BHTD = torch.einsum("bgtxys,gjxyas->bgjtxa", parts, left).flatten(-2).flatten(1, 2)
        return x_BTD[:, None], torch.rsqrt(y_BHTD.var(-1, correction=0, keepdim=True) + EPS)

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of the factors, which depend on the order in which they are applied.

        `qk`: M x', right and then left (eqs. 37, 38; their a is the fan-in d for square grids). `layer`: x^T M, left
        and then right. `none`: features of both sides, whose products are summed and divided by their number.
        """
        (heads, b, c, a, s), (groups, _, _, d, _) = self.left.shape, self.right.shape
        if self.config.norm == "qk":
            return {"left": FactorMuP(c * s, a), "right": FactorMuP(d, groups * b * s)}
        if self.config.norm == "layer":
            return {"left": FactorMuP(a, heads * c * s), "right": FactorMuP(b * s, d)}
        return {"left": FactorMuP(a, heads * c * s), "right": FactorMuP(d, groups * b * s)}

    @torch.no_grad()
    def fit_blocks(self, target_HDD: Tensor, a_DD: Tensor, c_DD: Tensor) -> None:
        """Set the factors, in place, by truncated SVDs of the whitened blocks of the target."""
        fit_levels([(self.left, self.right)], target_HDD, a_DD, c_DD, self.dims(self.config, self.shape))
