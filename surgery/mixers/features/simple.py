"""Feature maps without parameters: identity, 1 + elu, relu.

identity: A = q . k, as in RetNet, Mamba-2 and the delta rule; scores may be negative.
1 + elu: Katharopoulos et al. 2020, "Transformers are RNNs", eq. 7. relu: Kasai et al. 2021, without its learned matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.features.base import FEATURES, FeatureMap


@dataclass(frozen=True)
class Identity:
    """Config of the identity."""

    name: ClassVar[str] = "identity"


@dataclass(frozen=True)
class Elu:
    """Config of 1 + elu."""

    name: ClassVar[str] = "elu"


@dataclass(frozen=True)
class Relu:
    """Config of relu."""

    name: ClassVar[str] = "relu"


@FEATURES.register(Identity)
class IdentityMap(FeatureMap):
    """phi(x) = x."""

    positive: ClassVar[bool] = False

    def queries(self, q_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of queries, (B, H, T, F)."""
        return q_BHTK

    def keys(self, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of keys, (B, G, T, F)."""
        return k_BGTK


@FEATURES.register(Elu)
class EluMap(FeatureMap):
    """phi(x) = 1 + elu(x)."""

    def queries(self, q_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of queries, (B, H, T, F)."""
        return 1 + F.elu(q_BHTK)

    def keys(self, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of keys, (B, G, T, F)."""
        return 1 + F.elu(k_BGTK)


@FEATURES.register(Relu)
class ReluMap(FeatureMap):
    """phi(x) = relu(x)."""

    def queries(self, q_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of queries, (B, H, T, F)."""
        return F.relu(q_BHTK)

    def keys(self, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of keys, (B, G, T, F)."""
        return F.relu(k_BGTK)
