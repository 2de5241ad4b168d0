"""Hedgehog feature map: phi(x) = [softmax(W x), softmax(-W x)] with a learned W per head.

Zhang et al. 2024, "The Hedgehog & the Porcupine", section 4.2 (both signs; the softmax over features keeps attention
spiky), as in LoLCATs (Zhang et al. 2025, section 3.1). W is initialised as the identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from surgery.mixers.base import AttentionShape
from surgery.mixers.features.base import FEATURES, FeatureMap


@dataclass(frozen=True)
class Hedgehog:
    """Config of the Hedgehog map."""

    name: ClassVar[str] = "hedgehog"


@FEATURES.register(Hedgehog)
class HedgehogMap(FeatureMap):
    """Hedgehog map with F = 2 K features. query_HKK, key_GKK: W per head; rows are features."""

    def __init__(self, config: Hedgehog, shape: AttentionShape):
        super().__init__(config, shape)
        self.query_HKK = nn.Parameter(torch.eye(shape.key).repeat(shape.heads, 1, 1))
        self.key_GKK = nn.Parameter(torch.eye(shape.key).repeat(shape.groups, 1, 1))

    @classmethod
    def features(cls, config: Any, shape: AttentionShape) -> int:
        """Return F, the number of features."""
        return 2 * shape.key

    @classmethod
    def macs(cls, config: Any, shape: AttentionShape) -> int:
        """Return multiply-accumulates per token for all queries and keys."""
        return (shape.heads + shape.groups) * shape.key**2

    def queries(self, q_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of queries, (B, H, T, F)."""
        return signed_softmax(q_BHTK, self.query_HKK)

    def keys(self, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of keys, (B, G, T, F)."""
        return signed_softmax(k_BGTK, self.key_GKK)


def signed_softmax(x_BHTK: Tensor, w_HKK: Tensor) -> Tensor:
    """Return [softmax(W x), softmax(-W x)], (B, H, T, 2 K)."""
    y_BHTK = torch.einsum("bhtk,hfk->bhtf", x_BHTK, w_HKK.to(x_BHTK.dtype))
    return torch.cat([y_BHTK.softmax(-1), (-y_BHTK).softmax(-1)], dim=-1)
