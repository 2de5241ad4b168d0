"""M_ts = gamma^(t - s), one gamma for each key/value head: RetNet (Sun et al. 2023, eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS
from surgery.mixers.masks.semiseparable import Semiseparable


@dataclass(frozen=True)
class Decay:
    """Config of the decay mask."""

    name: ClassVar[str] = "decay"


@MASKS.register(Decay)
class DecayMask(Semiseparable):
    """`log_decay_G` is log(-log gamma), learned, so that 0 < gamma < 1; head g starts at gamma = 1 - 2^(-5 - g)."""

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__(config, shape)
        # Heads past the 19th would round to gamma = 1 in float32.
        power_G = 5 + torch.arange(shape.groups, dtype=torch.float64) % 19
        self.log_decay_G = nn.Parameter(torch.log(-torch.log1p(-torch.exp2(-power_G))).float())

    def log_gates(self, start_B: Tensor, count_B: Tensor, length: int, signals: dict[str, Tensor]) -> Tensor:
        """Return log-gates g_BRGT <= 0; B, R and G may be 1."""
        wide_G = self.log_decay_G.to(torch.promote_types(self.log_decay_G.dtype, torch.float32))
        real_BT = torch.arange(length, device=count_B.device) < count_B.unsqueeze(1)
        return -wide_G.exp()[:, None] * real_BT[:, None, None]
