"""Protocol of the feature maps phi of kernel scores A = phi(Q) phi(K)^T.

A map is learned, random or fixed. Random projections are drawn from a seed and saved in the checkpoint as buffers.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from surgery.core.registry import Registry
from surgery.mixers.base import AttentionShape, MethodModule


class FeatureMap(MethodModule):
    """Base class of feature maps. Positions are arguments because some maps (cosFormer) depend on them.

    positive: whether phi(q) . phi(k) >= 0 always, so that scores can be normalised. min_denominator: for maps that are
    positive only in expectation, the lower bound of the denominator in normalised attention (0: none).
    """

    config_type: ClassVar[type]
    positive: ClassVar[bool] = True
    min_denominator: ClassVar[float] = 0.0

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__()
        self.config, self.shape = config, shape

    @classmethod
    def features(cls, config: Any, shape: AttentionShape) -> int:
        """Return F, the number of features."""
        return shape.key

    @classmethod
    def macs(cls, config: Any, shape: AttentionShape) -> int:
        """Return multiply-accumulates per token for all queries and keys."""
        return 0

    def queries(self, q_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of queries, (B, H, T, F)."""
        raise NotImplementedError

    def keys(self, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of keys, (B, G, T, F)."""
        raise NotImplementedError


FEATURES: Registry[FeatureMap] = Registry(
    "feature map", "surgery.mixers.features", dict.fromkeys(("identity", "elu", "relu"), "simple")
)
