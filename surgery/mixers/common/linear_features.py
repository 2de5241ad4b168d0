"""Queries or keys of a mixer in the forms that its two branches read: rotated for the softmax branch, features for the
linear branch.

    u = x before RoPE | x after it, or one of them        features = phi(sqrt(scaling) u), with unit norm for the delta rule

A kernel may replace `linear_features`; it then keeps x alone for its backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from surgery.core.dispatch import dispatched
from surgery.mixers.common.rope import apply_rope
from surgery.mixers.features.base import FeatureMap

Rotation = tuple[Tensor, Tensor]  # cos_BTR, sin_BTR


@dataclass(frozen=True)
class FeaturePlan:
    """Which features of a call's tokens are computed.

    side: queries or keys of the feature map. form: what the features are of: `given`, x as it is; `both`, x before and
    after RoPE. rotated: whether the softmax branch reads x after RoPE and x is given before it. root: the factor
    of x. unit_norm: whether features get an L2 norm of 1. first, last: tokens first <= t < last have features. copies: of
    each key head. dtype: of the features from a kernel; the reference returns float32 or float64.
    """

    side: Literal["queries", "keys"]
    form: Literal["given", "both"]
    rotated: bool
    root: float
    unit_norm: bool
    first: int
    last: int
    copies: int
    dtype: torch.dtype


@dispatched
def linear_features(
    x_BTHK: Tensor,
    rotation: Rotation | None,
    feature_map: FeatureMap,
    position_BT: Tensor,
    plan: FeaturePlan,
    known_BTHK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (features (B, H, last - first, F), x of the softmax branch (B, T, H, K)).

    rotation: cos and sin (B, T, R), None if the plan needs none. position_BT: of all tokens. known_BTHK: x after RoPE, if a
    plan of both forms does not rotate.
    """
    rotated_BTHK = x_BTHK if known_BTHK is None else known_BTHK
    if plan.rotated:
        assert rotation is not None
        rotated_BTHK = apply_rope(x_BTHK, *rotation)
    u_BTHK = torch.cat([x_BTHK, rotated_BTHK], dim=-1) if plan.form == "both" else x_BTHK
    u_BLHK = u_BTHK[:, plan.first : plan.last]
    if plan.copies != 1:
        u_BLHK = u_BLHK.repeat_interleave(plan.copies, dim=2)
    u_BHLK = u_BLHK.transpose(1, 2).to(torch.promote_types(x_BTHK.dtype, torch.float32)) * plan.root
    features_BHLF: Tensor = feature_map(plan.side, u_BHLK, position_BT[:, plan.first : plan.last])
    return l2_normalize(features_BHLF) if plan.unit_norm else features_BHLF, rotated_BTHK


def l2_normalize(x: Tensor) -> Tensor:
    """Return x divided by its L2 norm over the last axis."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
