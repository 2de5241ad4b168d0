"""Gate mask M_ts = alpha_s+1 .. alpha_t, with gates computed from the hidden states.

1-semiseparable (Mamba-2 / SSD, Dao and Gu 2024, eq. 6); with the delta rule, Gated DeltaNet (Yang et al. 2025, eq. 10).

    log alpha_t = -exp(A) softplus(W x_t + b)      for each key/value head

As in Guo et al. 2025, eq. 2, a token is written with weight 1. The layer of Mamba-2 also multiplies the written token
by the time step softplus(W x_t + b); here only the gate depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Signals
from surgery.mixers.masks.chunking import inverse_softplus
from surgery.mixers.masks.semiseparable import Semiseparable
from surgery.mixers.projections import Float32Linear


@dataclass(frozen=True)
class Gates:
    """Config of the gate mask."""

    name: ClassVar[str] = "gates"


@MASKS.register(Gates)
class GatesMask(Semiseparable):
    """Gates per token and key/value head. Signal `gate` (B, T, G): log alpha.

    Initially W = 0 and A = 0, so gates are constant: the rates -log alpha are log-spaced over 0.001 .. 0.1 (half-lives
    of 693 .. 7 tokens), the range of Mamba-2's time steps.
    """

    written_signals: tuple[str, ...] = ("gate",)

    def __init__(self, config: Gates, shape: AttentionShape):
        super().__init__(config, shape)
        self.rate = Float32Linear(shape.dim, shape.groups)
        self.log_scale_G = nn.Parameter(torch.zeros(shape.groups))
        with torch.no_grad():
            self.rate.weight.zero_()
            spread_G = torch.logspace(-3, -1, shape.groups) if shape.groups > 1 else torch.full((1,), 0.01)
            self.rate.bias.copy_(inverse_softplus(spread_G))

    def signals(self, x_BTD: Tensor, length: int | None = None) -> Signals:
        """Return the tensors (B, T, ..) that the mask computes from the hidden states."""
        rate_BTG = F.softplus(self.rate(x_BTD))
        return {"gate": -self.log_scale_G.to(rate_BTG.dtype).exp() * rate_BTG}

    def log_gates(self, start_B: Tensor, count_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return log-gates g_BRGT <= 0; B, R and G may be 1."""
        return signals["gate"].transpose(1, 2).unsqueeze(1)
