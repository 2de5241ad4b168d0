"""Mask of ones, M_ts = 1: linear attention (Katharopoulos et al. 2020); with the delta rule, DeltaNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surgery.mixers.masks.base import MASKS, Signals
from surgery.mixers.masks.semiseparable import Semiseparable


@dataclass(frozen=True)
class Ones:
    """Config of the mask of ones."""

    name: ClassVar[str] = "ones"


@MASKS.register(Ones)
class OnesMask(Semiseparable):
    """Causal mask of ones: all log-gates are 0."""

    def log_gates(self, start_B: Tensor, count_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return log-gates g_BRGT <= 0; B, R and G may be 1."""
        return torch.zeros(1, 1, 1, length, device=start_B.device)
