"""Random Fourier features of normalised queries and keys: phi(q) . phi(k) estimates exp(q' . k').

    phi(x) = e^(|x'|^2 / 2) [cos(w_1 x'), .., cos(w_F x'), sin(w_1 x'), .., sin(w_F x')] / sqrt(F)     w ~ N(0, I)

Peng et al. 2021, "Random Feature Attention", eqs. 4-5 and section 3.1: x' = sigma * x / |x|. The variance of the
estimate grows with the norms, so vectors are normalised, and a learned sigma per dim restores their scale. Estimates
can be negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from surgery.mixers.base import AttentionShape
from surgery.mixers.features.base import FEATURES, FeatureMap
from surgery.mixers.features.favor import check_count
from surgery.mixers.features.random_draws import draw_gaussian, project_groups


@dataclass(frozen=True)
class RFA:
    """Config of random Fourier features.

    features: number of draws w, with a cosine and a sine each. sigma: initial value of the learned one. seed: of the
    draws.
    """

    name: ClassVar[str] = "rfa"
    features: int = 64
    sigma: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self.name, self.features)


@FEATURES.register(RFA)
class RFAMap(FeatureMap):
    """Random Fourier features, F = 2 x config.features. w and sigma of each key/value head are shared by q and k."""

    config: RFA
    w_GFK: Tensor
    positive: ClassVar[bool] = False
    min_denominator: ClassVar[float] = 0.1  # the score of a token with itself is at least e^-1 at sigma = 1

    def __init__(self, config: RFA, shape: AttentionShape):
        super().__init__(config, shape)
        self.register_buffer("w_GFK", draw_gaussian(config.seed, shape.groups, config.features, shape.key))
        self.sigma_GK = nn.Parameter(torch.full((shape.groups, shape.key), float(config.sigma)))

    @classmethod
    def features(cls, config: RFA, shape: AttentionShape) -> int:
        """Return F, the number of features."""
        return 2 * config.features

    @classmethod
    def macs(cls, config: RFA, shape: AttentionShape) -> int:
        """Return multiply-accumulates per token for all queries and keys."""
        return (shape.heads + shape.groups) * config.features * shape.key

    def queries(self, q_BHTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of queries, (B, H, T, F)."""
        return self._features(q_BHTK)

    def keys(self, k_BGTK: Tensor, position_BT: Tensor) -> Tensor:
        """Return the features of keys, (B, G, T, F)."""
        return self._features(k_BGTK)

    def _features(self, x_BHTK: Tensor) -> Tensor:
        x_BHTK = x_BHTK * (x_BHTK.square().sum(-1, keepdim=True) + 1e-12).rsqrt()
        sigma_HK = self.sigma_GK.to(x_BHTK.dtype).repeat_interleave(x_BHTK.shape[1] // self.shape.groups, dim=0)
        x_BHTK = x_BHTK * sigma_HK.unsqueeze(1)
        angle_BHTF = project_groups(x_BHTK, self.w_GFK)
        scale_BHT1 = (x_BHTK.square().sum(-1, keepdim=True) / 2).exp() * float(self.config.features**-0.5)
        return scale_BHT1 * torch.cat([angle_BHTF.cos(), angle_BHTF.sin()], dim=-1)
