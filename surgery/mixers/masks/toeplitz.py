"""Toeplitz mask M_ts = c[t - s], with a learned coefficient per distance and query head.

Dao and Gu 2024, "Transformers are SSMs", section 4.3; Guo et al. 2025, "Log-Linear Attention", table 1.

Coefficients are 0 from distance `length` on. Kernel scores are computed by FFT over the time axis; the delta rule takes
quadratic time. The state holds the last length - 1 keys and values (fft_convolution.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Signals
from surgery.mixers.masks.fft_convolution import DistanceMask


@dataclass(frozen=True)
class Toeplitz:
    """Config of the Toeplitz mask. length: number of distances with a coefficient, 0 .. length - 1."""

    name: ClassVar[str] = "toeplitz"
    length: int = 1024

    def __post_init__(self) -> None:
        if self.length < 1:
            raise SurgeryError(f"toeplitz: length must be 1 or more tokens (got {self.length}); for example 1024")


@MASKS.register(Toeplitz)
class ToeplitzMask(DistanceMask):
    """Toeplitz mask. Initially c[d] = (1 + d)^(-1/2)."""

    config: Toeplitz

    def __init__(self, config: Toeplitz, shape: AttentionShape):
        super().__init__(config, shape)
        fall_L = (1 + torch.arange(config.length)).float().rsqrt()
        self.coefficient_GJL = nn.Parameter(fall_L.repeat(shape.groups, shape.heads // shape.groups, 1))

    @classmethod
    def reach(cls, config: Toeplitz) -> int | None:
        """Return the first distance from which on M is 0."""
        return config.length

    def entries(self, at_BT: Tensor, from_BS: Tensor, signals: Signals) -> Tensor:
        """Return M_BGJTS of positions at_BT and from_BS: distances are the same in all rows."""
        distance_TS, coefficient_BGJL = at_BT[0].unsqueeze(1) - from_BS[0], self.coefficients(signals)
        length = coefficient_BGJL.shape[-1]
        index_TS = torch.where((distance_TS >= 0) & (distance_TS < length), distance_TS, length)
        return F.pad(coefficient_BGJL, (0, 1))[..., index_TS]

    def distances(self, length: int, signals: Signals) -> Tensor:
        """Return h_BGJS at distances 0 .. length - 1."""
        return self.coefficients(signals)[..., :length]

    def coefficients(self, signals: Signals) -> Tensor:
        """Return c_BGJL in float32 or wider, at the first distances, of which the tokens that are read have no more."""
        wide = torch.promote_types(self.coefficient_GJL.dtype, torch.float32)
        return self.coefficient_GJL.to(wide).unsqueeze(0)
