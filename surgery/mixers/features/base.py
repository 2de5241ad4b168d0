"""Feature maps phi of kernel scores A = phi(Q) phi(K)^T. One file for each kind.

A map may be learned, random (drawn from a seed, kept as a buffer so that a checkpoint is whole) or fixed.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from surgery.core.registry import Registry
from surgery.mixers.base import AttentionShape, MethodModule


class FeatureMap(MethodModule):
    """phi of queries and of keys; both take positions because some (cosFormer) depend on them."""

    config_type: ClassVar[type]
    positive: ClassVar[bool] = True  # whether phi(q) . phi(k) >= 0, so that it can be normalised
    least: ClassVar[float] = 0.0  # a map that is positive only in expectation: the least denominator to divide by

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__()
        self.config, self.shape = config, shape

    @classmethod
    def features(cls, config: Any, shape: AttentionShape) -> int:
        """F, the number of features."""
        return shape.key

    @classmethod
    def macs(cls, config: Any, shape: AttentionShape) -> int:
        """Multiply-accumulates for a token: all its queries and keys."""
        return 0

    def queries(self, q_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        """q_BHTF"""
        raise NotImplementedError

    def keys(self, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
        """k_BGTF"""
        raise NotImplementedError


FEATURES: Registry[FeatureMap] = Registry("feature map", "surgery.mixers.features")
