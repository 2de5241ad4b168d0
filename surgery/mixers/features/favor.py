"""FAVOR+ feature map: positive random features, phi(q) . phi(k) estimates exp(q . k).

    one side    phi(x)_f = exp(w_f . x - |x|^2 / 2) / sqrt(F)                       w ~ N(0, I), orthogonal in groups of K
    two sides   phi(x) = (exp(w_f . x), exp(-w_f . x)) exp(-|x|^2 / 2) / sqrt(F)    F / 2 draws, each with both signs

Choromanski et al. 2021, "Rethinking Attention with Performers", Lemma 1 (which has both) and section 2.4. Two sides are
what Dao and Gu 2024, section 4.1.3, describe as Performer.

For numerical stability, the paper's code divides keys by their maximum over all tokens, which a causal step does not
know. Here exponents are clamped at MAX_EXPONENT, which is rare because |w|^2 / 2 bounds them, and the features of a
query are divided by their maximum, which cancels in normalised attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.features.base import FEATURES, FeatureMap
from surgery.mixers.features.random_draws import draw_orthogonal, project_groups

MAX_EXPONENT = 40.0  # the product of two features stays below e^80, inside float32


@dataclass(frozen=True)
class Favor:
    """Config of FAVOR+.

    features: F. queries: "scaled" divides the features of a query by their maximum (normalised attention only), "exact"
    does not. sides: 1 for one feature per draw w; 2 for features of w and of -w, from F / 2 draws. seed: of the draws.
    """

    name: ClassVar[str] = "favor"
    features: int = 128
    queries: Literal["scaled", "exact"] = "scaled"
    seed: int = 0
    sides: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        check_queries_option(self.name, self.queries)
        check_count(self.name, self.features)
        if self.sides not in (1, 2) or self.features % self.sides:
            raise SurgeryError(
                "favor: sides must be 1 or 2, and sides: 2 needs an even number of features "
                f"(got features {self.features}, sides {self.sides}); for example features: 128, sides: 2"
            )


def check_count(name: str, features: int) -> None:
    """Raise SurgeryError unless a random feature map has at least one feature."""
    if features < 1:
        raise SurgeryError(f"{name}: features must be 1 or more (got {features}); for example 64")


def check_queries_option(name: str, queries: str) -> None:
    """Raise SurgeryError if `queries` is not 'scaled' or 'exact'."""
    if queries not in ("scaled", "exact"):
        raise SurgeryError(f"{name}: queries must be 'scaled' or 'exact' (got {queries!r}); use queries: scaled")


@FEATURES.register(Favor)
class FavorMap(FeatureMap):
    """FAVOR+ map. w_GFK: random projections (G, F or F / 2, K)."""

    config: Favor
    w_GFK: Tensor

    def __init__(self, config: Favor, shape: AttentionShape):
        super().__init__(config, shape)
        draws = config.features // config.sides
        self.register_buffer("w_GFK", draw_orthogonal(config.seed, shape.groups, draws, shape.key))

    @classmethod
    def features(cls, config: Favor, shape: AttentionShape) -> int:
        """Return F, the number of features."""
        return config.features

    @classmethod
    def macs(cls, config: Favor, shape: AttentionShape) -> int:
        """Return multiply-accumulates per token for all queries and keys."""
        return (shape.heads + shape.groups) * (config.features // config.sides) * shape.key

    def queries(self, q_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of queries, (B, H, T, F)."""
        return query_features(self._exponents(q_BHTK), self.config.queries) * float(self.config.features**-0.5)

    def keys(self, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of keys, (B, G, T, F)."""
        return bounded_exp(self._exponents(k_BGTK)) * float(self.config.features**-0.5)

    def _exponents(self, x_BHTK: Tensor) -> Tensor:
        w_GFK = self.w_GFK if self.config.sides == 1 else torch.cat([self.w_GFK, -self.w_GFK], dim=1)
        return exponents(x_BHTK, w_GFK)


def exponents(x_BHTK: Tensor, w_GFK: Tensor) -> Tensor:
    """Return w x - |x|^2 / 2, the logarithms of the features, (B, H, T, F)."""
    return project_groups(x_BHTK, w_GFK) - x_BHTK.square().sum(-1, keepdim=True) / 2


def bounded_exp(log: Tensor) -> Tensor:
    """Return exp(min(log, MAX_EXPONENT))."""
    return log.clamp_max(MAX_EXPONENT).exp()


def query_features(log_BHTF: Tensor, queries: str) -> Tensor:
    """Return exp(log); with queries "scaled", divided by the maximum feature of each query."""
    if queries == "exact":
        return bounded_exp(log_BHTF)
    return torch.exp(log_BHTF - log_BHTF.amax(-1, keepdim=True))
