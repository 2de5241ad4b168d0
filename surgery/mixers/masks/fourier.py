"""Fourier mask M_ts = Re(omega^(t s)) = cos(2 pi t s / period), omega = e^(2 pi i / period), s <= t. No parameters.

Dao and Gu 2024, "Transformers are SSMs", section 4.3: L_ts = omega^(t s / T) with the sequence length T, complex and not
causal. With T every entry would change with each new token, so that no decoding step could reuse an earlier one: here the
period is an option, and equal to the paper's at period = T. Of the complex entry the real part is used, for s <= t.

t and s are absolute positions. Bluestein: t s = (t^2 + s^2 - (t - s)^2) / 2, so with the chirp w_n = e^(pi i n^2 /
period) M_ts = Re(w_t conj(w)[t - s] w_s): a Toeplitz mask between two phases, for any length and start
(fft_convolution.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Signals
from surgery.mixers.masks.fft_convolution import DistanceMask


@dataclass(frozen=True)
class Fourier:
    """Config of the Fourier mask. period: T of the paper, in tokens, whatever the length of the sequence is."""

    name: ClassVar[str] = "fourier"
    period: int = 4096

    def __post_init__(self) -> None:
        if self.period < 1:
            raise SurgeryError(f"fourier: period must be 1 or more positions (got {self.period}); for example 4096")


@MASKS.register(Fourier)
class FourierMask(DistanceMask):
    """Fourier mask. Angles are reduced modulo the period as integers, so that large positions lose no accuracy.

    omega_2: real and imaginary part of omega. Only its dtype is used: angles are computed in it, or in float32 if
    wider.
    """

    config: Fourier
    omega_2: Tensor

    def __init__(self, config: Fourier, shape: AttentionShape):
        super().__init__(config, shape)
        angle = 2 * math.pi / config.period
        self.register_buffer("omega_2", torch.tensor([math.cos(angle), math.sin(angle)]))

    def entries(self, at_BT: Tensor, from_BS: Tensor, signals: Signals) -> Tensor:
        """Return M_BGJTS for pairs of positions."""
        turn_BTS = at_BT.unsqueeze(2) * from_BS.unsqueeze(1) % self.config.period
        mask_BTS = torch.cos(self._angle(turn_BTS, self.config.period))
        return torch.where(from_BS.unsqueeze(1) <= at_BT.unsqueeze(2), mask_BTS, 0)[:, None, None]

    def distances(self, length: int, signals: Signals) -> Tensor:
        """Return h_BGJS at distances 0 .. length - 1."""
        return self.phase(torch.arange(length, device=self.omega_2.device)).conj()[None, None, None]

    def phase(self, position_BS: Tensor) -> Tensor:
        """Return the chirp w at each position."""
        angle_BS = self._angle(position_BS**2 % (2 * self.config.period), 2 * self.config.period)
        return torch.polar(torch.ones_like(angle_BS), angle_BS)

    def _angle(self, turn: Tensor, whole: int) -> Tensor:
        return turn.to(torch.promote_types(self.omega_2.dtype, torch.float32)) * (2 * math.pi / whole)
