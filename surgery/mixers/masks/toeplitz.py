"""M_ts = c[t - s], a free coefficient for each distance and query head; 0 from `length` on (Guo et al. 2025, table 1).

By FFT over the time axis with kernel scores; exact and quadratic with the delta rule; a step keeps the last
length - 1 keys and values (surgery/mixers/masks/fft_convolution.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS
from surgery.mixers.masks.fft_convolution import DistanceMask


@dataclass(frozen=True)
class Toeplitz:
    """length: distances that have a coefficient."""

    name: ClassVar[str] = "toeplitz"
    length: int = 1024

    def __post_init__(self) -> None:
        if self.length < 1:
            raise SurgeryError(f"toeplitz: length={self.length} lets no token see itself; use 1 or more, say 1024")


@MASKS.register(Toeplitz)
class ToeplitzMask(DistanceMask):
    """Starts at c[d] = (1 + d)^(-1/2)."""

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__(config, shape)
        fall_L = (1 + torch.arange(config.length)).float().rsqrt()
        self.coefficient_GJL = nn.Parameter(fall_L.repeat(shape.groups, shape.heads // shape.groups, 1))

    @classmethod
    def reach(cls, config: Any) -> int | None:
        """Return the first distance from which M is 0, or None."""
        return config.length

    def entries(self, at_BT: Tensor, from_BS: Tensor) -> Tensor:
        """The same for all rows, whose distances agree."""
        distance_TS = at_BT[0].unsqueeze(1) - from_BS[0]
        seen_TS = (distance_TS >= 0) & (distance_TS < self.config.length)
        coefficient_GJTS = self._wide()[:, :, distance_TS.clamp(0, self.config.length - 1)]
        return torch.where(seen_TS, coefficient_GJTS, 0).unsqueeze(0)

    def distances(self, length: int) -> Tensor:
        """Return h_GJS at distances 0 .. length - 1."""
        return self._wide()[..., :length]

    def _wide(self) -> Tensor:
        return self.coefficient_GJL.to(torch.promote_types(self.coefficient_GJL.dtype, torch.float32))
