"""Decay mask M_ts = gamma^(t - s), with one gamma per key/value head: RetNet (Sun et al. 2023, eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Signals
from surgery.mixers.masks.semiseparable import Semiseparable


@dataclass(frozen=True)
class Decay:
    """Config of the decay mask."""

    name: ClassVar[str] = "decay"


@MASKS.register(Decay)
class DecayMask(Semiseparable):
    """Decay with a learned rate. log_decay_G: log(-log gamma), so that 0 < gamma < 1. Head g starts at
    gamma = 1 - 2^(-5 - g)."""

    def __init__(self, config: Decay, shape: AttentionShape):
        super().__init__(config, shape)
        # g is taken modulo 19: in float32, gamma of head 19 and above would round to 1.
        power_G = 5 + torch.arange(shape.groups, dtype=torch.float64) % 19
        self.log_decay_G = nn.Parameter(torch.log(-torch.log1p(-torch.exp2(-power_G))).float())

    def log_gates(self, start_B: Tensor, count_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return log-gates g_BRGT <= 0; B, R and G may be 1."""
        wide_G = self.log_decay_G.to(torch.promote_types(self.log_decay_G.dtype, torch.float32))
        real_BT = torch.arange(length, device=count_B.device) < count_B.unsqueeze(1)
        return -wide_G.exp()[:, None] * real_BT[:, None, None]
