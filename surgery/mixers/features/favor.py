"""FAVOR+: positive random features, phi(q) . phi(k) estimates exp(q . k).

    one side    phi(x)_f = exp(w_f . x - |x|^2 / 2) / sqrt(F)                       w ~ N(0, I), orthogonal in runs of K
    two sides   phi(x) = (exp(w_f . x), exp(-w_f . x)) exp(-|x|^2 / 2) / sqrt(F)    F / 2 draws, each with both signs

Choromanski et al. 2021, "Rethinking Attention with Performers", Lemma 1 (which has both) and section 2.4. Two sides are
what Dao and Gu 2024, section 4.1.3, describe as Performer. The paper's code steadies
the keys by the largest exponent over all tokens, which a causal step cannot know. Here no token looks at another: an
exponent stops at CEILING (|w|^2 / 2 bounds it, so this is rare), and a query is divided by its largest feature,
which the normaliser takes out exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.features.base import FEATURES, FeatureMap
from surgery.mixers.features.random_draws import draw_orthogonal, project_groups

MAX_EXPONENT = 40.0  # the product of two features stays below e^80, inside float32


@dataclass(frozen=True)
class Favor:
    """queries: "scaled": divided by their largest feature, for normalised attention; "exact": as they are. sides: 1, a
    feature for each draw w; 2, features of w and of -w, half as many draws."""

    name: ClassVar[str] = "favor"
    features: int = 128
    queries: Literal["scaled", "exact"] = "scaled"
    seed: int = 0
    sides: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        check_queries_option(self.name, self.queries)
        if self.sides not in (1, 2) or self.features % self.sides:
            raise SurgeryError(
                f"favor: features {self.features} with sides {self.sides}; sides must be 1 or 2, and 2 needs an even "
                "number of features. Use for example features: 128 and sides: 2"
            )


def check_queries_option(name: str, queries: str) -> None:
    """Raise SurgeryError if `queries` is not 'scaled' or 'exact'."""
    if queries not in ("scaled", "exact"):
        raise SurgeryError(f"{name}: queries {queries!r} is neither 'scaled' nor 'exact'; use queries: scaled")


@FEATURES.register(Favor)
class FavorMap(FeatureMap):
    """F features from `w_GFK`, the random directions (G, F or F / 2, K)."""

    w_GFK: Tensor

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__(config, shape)
        draws = config.features // config.sides
        self.register_buffer("w_GFK", draw_orthogonal(config.seed, shape.groups, draws, shape.key))

    @classmethod
    def features(cls, config: Any, shape: AttentionShape) -> int:
        """Return F, the number of features."""
        return config.features

    @classmethod
    def macs(cls, config: Any, shape: AttentionShape) -> int:
        """Return multiply-accumulates per token for all queries and keys."""
        return (shape.heads + shape.groups) * (config.features // config.sides) * shape.key

    def queries(self, q_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of queries, (B, H, T, F)."""
        log_BHTF = self._logarithms(q_BHTK)
        return query_features(log_BHTF, self.config.queries) * self.config.features**-0.5

    def keys(self, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of keys, (B, G, T, F)."""
        return bounded_exp(self._logarithms(k_BGTK)) * self.config.features**-0.5

    def _logarithms(self, x_BHTK: Tensor) -> Tensor:
        """(B, H, T, F)"""
        w_GFK = self.w_GFK if self.config.sides == 1 else torch.cat([self.w_GFK, -self.w_GFK], dim=1)
        return exponents(x_BHTK, w_GFK)


def exponents(x_BHTK: Tensor, w_GFK: Tensor) -> Tensor:
    """w x - |x|^2 / 2, (B, H, T, F)."""
    return project_groups(x_BHTK, w_GFK) - x_BHTK.square().sum(-1, keepdim=True) / 2


def bounded_exp(log: Tensor) -> Tensor:
    """Return exp(min(log, MAX_EXPONENT))."""
    return log.clamp_max(MAX_EXPONENT).exp()


def query_features(log_BHTF: Tensor, queries: str) -> Tensor:
    """Return exp of the logarithms; 'scaled' divides by the largest feature of each query."""
    if queries == "exact":
        return bounded_exp(log_BHTF)
    return torch.exp(log_BHTF - log_BHTF.amax(-1, keepdim=True))
