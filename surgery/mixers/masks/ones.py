"""M_ts = 1: linear attention (Katharopoulos et al. 2020), or DeltaNet with the delta rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surgery.mixers.masks.base import MASKS
from surgery.mixers.masks.semiseparable import Semiseparable


@dataclass(frozen=True)
class Ones:
    """Config of the mask of ones."""

    name: ClassVar[str] = "ones"


@MASKS.register(Ones)
class OnesMask(Semiseparable):
    """Nothing is forgotten."""

    def log_gates(self, start_B: Tensor, count_B: Tensor, length: int, signals: dict[str, Tensor]) -> Tensor:
        """Return log-gates g_BRGT <= 0; B, R and G may be 1."""
        return torch.zeros(1, 1, 1, length, device=start_B.device)
