"""cosFormer feature map: A_ts = relu(q_t) . relu(k_s) cos(pi/2 (t - s) / length).

Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention", eqs. 9-12. The cosine of a difference is a sum of two
products, so phi(x_t) = [relu(x) cos(theta_t), relu(x) sin(theta_t)], theta_t = pi/2 t / length. From position `length`
on, theta stays at pi/2; the weights of the paper would become negative there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.features.base import FEATURES, FeatureMap


@dataclass(frozen=True)
class CosFormer:
    """Config of cosFormer. length: M of the paper, the longest context in tokens; later tokens get equal weights."""

    name: ClassVar[str] = "cosformer"
    length: int = 4096

    def __post_init__(self) -> None:
        if self.length < 1:
            raise SurgeryError(f"cosformer: length must be 1 or more tokens (got {self.length}); for example 4096")


@FEATURES.register(CosFormer)
class CosFormerMap(FeatureMap):
    """cosFormer map with F = 2 K features."""

    config: CosFormer

    @classmethod
    def features(cls, config: Any, shape: AttentionShape) -> int:
        """Return F, the number of features."""
        return 2 * shape.key

    def queries(self, q_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of queries, (B, H, T, F)."""
        return self._features(q_BHTK, position_BT)

    def keys(self, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of keys, (B, G, T, F)."""
        return self._features(k_BGTK, position_BT)

    def _features(self, x_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        share_BT = position_BT.clamp(0, self.config.length).to(x_BHTK.dtype) / self.config.length
        theta_B1T1 = (0.5 * math.pi * share_BT)[:, None, :, None]
        # cos(pi/2) is slightly negative after rounding, and scores must not be.
        x_BHTK = F.relu(x_BHTK)
        return torch.cat([x_BHTK * theta_B1T1.cos().clamp_min(0), x_BHTK * theta_B1T1.sin()], dim=-1)
