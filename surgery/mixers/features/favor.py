"""FAVOR+: positive random features, phi(q) . phi(k) estimates exp(q . k).

    phi(x)_f = exp(w_f . x - |x|^2 / 2) / sqrt(F)     w ~ N(0, I), orthogonal in runs of K

Choromanski et al. 2021, "Rethinking Attention with Performers", Lemma 1 and section 2.4. The paper's code steadies
the keys by the largest exponent over all tokens, which a causal step cannot know. Here no token looks at another: an
exponent stops at CEILING (|w|^2 / 2 bounds it, so this is rare), and a query is divided by its largest feature,
which the normaliser takes out exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.features.base import FEATURES, FeatureMap
from surgery.mixers.features.draws import orthogonal, per_group

CEILING = 40.0  # the product of two features stays below e^80, inside float32


@dataclass(frozen=True)
class Favor:
    """queries: "scaled": divided by their largest feature, for normalised attention; "exact": as they are."""

    name: ClassVar[str] = "favor"
    features: int = 128
    queries: Literal["scaled", "exact"] = "scaled"
    seed: int = 0

    def __post_init__(self) -> None:
        known(self.name, self.queries)


def known(name: str, queries: str) -> None:
    if queries not in ("scaled", "exact"):
        raise SurgeryError(f"{name}: queries {queries!r} is neither 'scaled' nor 'exact'; use queries: scaled")


@FEATURES.register(Favor)
class FavorMap(FeatureMap):
    w_GFK: Tensor

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__(config, shape)
        self.register_buffer("w_GFK", orthogonal(config.seed, shape.groups, config.features, shape.key))

    @classmethod
    def features(cls, config: Any, shape: AttentionShape) -> int:
        return config.features

    @classmethod
    def macs(cls, config: Any, shape: AttentionShape) -> int:
        return (shape.heads + shape.groups) * config.features * shape.key

    def queries(self, q_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        log_BHTF = exponents(q_BHTK, self.w_GFK)
        return of_queries(log_BHTF, self.config.queries) * self.config.features**-0.5

    def keys(self, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
        return bounded_exp(exponents(k_BGTK, self.w_GFK)) * self.config.features**-0.5


def exponents(x_BHTK: Tensor, w_GFK: Tensor) -> Tensor:
    """w x - |x|^2 / 2, (B, H, T, F)."""
    return per_group(x_BHTK, w_GFK) - x_BHTK.square().sum(-1, keepdim=True) / 2


def bounded_exp(log: Tensor) -> Tensor:
    return log.clamp_max(CEILING).exp()


def of_queries(log_BHTF: Tensor, queries: str) -> Tensor:
    if queries == "exact":
        return bounded_exp(log_BHTF)
    return torch.exp(log_BHTF - log_BHTF.amax(-1, keepdim=True))
