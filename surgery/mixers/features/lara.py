"""LARA feature map: random features from several proposals N(mu_c, I), weighted for each query.

phi(q) . phi(k) estimates exp(q . k).

    phi(k)_c = xi(k, w_c)     phi(q)_c = alpha_c(q) N(w_c; 0, I) / N(w_c; mu_c, I) xi(q, w_c)
    xi(x, w) = exp(w . x - |x|^2 / 2)     w_c = mu_c + a fixed draw

Zheng et al. 2022, "Linear Complexity Randomized Self-attention Mechanism", section 4.2 (self-normalised multiple
importance sampling), with two differences. The paper pools mu_c from all queries and keys, which is not causal; here
mu_c are parameters. The paper's alpha = balance + r(q) - mean r can be negative; here alpha is the mean of the balance
heuristic and r(q) = softmax(mu . q). It also sums to 1 over the proposals, so estimates stay unbiased.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from surgery.mixers.base import AttentionShape
from surgery.mixers.features.base import FEATURES, FeatureMap
from surgery.mixers.features.favor import bounded_exp, check_count, check_queries_option, exponents, query_features
from surgery.mixers.features.random_draws import draw_gaussian, project_groups


@dataclass(frozen=True)
class Lara:
    """Config of LARA.

    features: number of proposals, with one draw each. spread: initial standard deviation of the centres mu. queries:
    see `Favor`. seed: of the centres and draws.
    """

    name: ClassVar[str] = "lara"
    features: int = 64
    spread: float = 0.5
    queries: Literal["scaled", "exact"] = "scaled"
    seed: int = 0

    def __post_init__(self) -> None:
        check_queries_option(self.name, self.queries)
        check_count(self.name, self.features)


@FEATURES.register(Lara)
class LaraMap(FeatureMap):
    """LARA map. mu_GCK, draw_GCK: centres and draws of each key/value head, shared by queries and keys."""

    config: Lara
    draw_GCK: Tensor

    def __init__(self, config: Lara, shape: AttentionShape):
        super().__init__(config, shape)
        size = (shape.groups, config.features, shape.key)
        self.mu_GCK = nn.Parameter(config.spread * draw_gaussian(config.seed, *size))
        self.register_buffer("draw_GCK", draw_gaussian(config.seed + 1, *size))

    @classmethod
    def features(cls, config: Lara, shape: AttentionShape) -> int:
        """Return F, the number of features."""
        return config.features

    @classmethod
    def macs(cls, config: Lara, shape: AttentionShape) -> int:
        """Return multiply-accumulates per token for all queries and keys."""
        return (2 * shape.heads + shape.groups) * config.features * shape.key

    def queries(self, q_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of queries, (B, H, T, F)."""
        mu_GCK, draw_GCK = self.mu_GCK.to(q_BHTK.dtype), self.draw_GCK.to(q_BHTK.dtype)
        w_GCK = mu_GCK + draw_GCK
        # log N(w_c; mu_d) up to a term that is the same for all d; on the diagonal, the proposal that w_c is drawn
        # from.
        density_GCD = w_GCK @ mu_GCK.mT - mu_GCK.square().sum(-1).unsqueeze(-2) / 2
        own_GC = density_GCD.diagonal(dim1=-2, dim2=-1)
        balance_GC = (own_GC - density_GCD.logsumexp(-1)).exp()
        heads = q_BHTK.shape[1] // self.shape.groups
        r_BHTC = project_groups(q_BHTK, mu_GCK).softmax(-1)
        alpha_BHTC = (r_BHTC + balance_GC.repeat_interleave(heads, 0).unsqueeze(1)) / 2
        log_BHTC = exponents(q_BHTK, w_GCK) - own_GC.repeat_interleave(heads, 0).unsqueeze(1)
        return query_features(log_BHTC + alpha_BHTC.clamp_min(math.exp(-80)).log(), self.config.queries)

    def keys(self, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of keys, (B, G, T, F)."""
        return bounded_exp(exponents(k_BGTK, self.mu_GCK + self.draw_GCK))
