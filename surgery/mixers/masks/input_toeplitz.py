"""Toeplitz mask whose coefficients depend on the input: M_ts = alpha[t - s], alpha[d] = c[d] (w x_d + b).

Dao and Gu 2024, "Transformers are SSMs", section 4.3: L_ij = alpha_(i-j) for "learnable (or input-dependent)" parameters
alpha. M is a Toeplitz matrix of each sequence, so that products with it are convolutions (fft_convolution.py), and it is
causal. As M_(d,0) = M_(t,t-d) for all t >= d, alpha[d] may then depend on the tokens 0 .. d alone: here on token d,
counted from the first one of the sequence, and on a learned coefficient c[d] of each distance and query head.

Coefficients are 0 from distance `length` on, and later tokens change none. Bidirectional attention has alpha of the
sequence for earlier tokens, and alpha of the reversed sequence for later ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, MaskState, Signals
from surgery.mixers.masks.toeplitz import ToeplitzMask
from surgery.mixers.projections import Float32Linear


@dataclass(frozen=True)
class InputToeplitz:
    """Config of the Toeplitz mask of the input. length: number of distances with a coefficient, 0 .. length - 1."""

    name: ClassVar[str] = "input_toeplitz"
    length: int = 1024

    def __post_init__(self) -> None:
        if self.length < 1:
            raise SurgeryError(f"input_toeplitz: length must be 1 or more tokens (got {self.length}); for example 1024")


@MASKS.register(InputToeplitz)
class InputToeplitzMask(ToeplitzMask):
    """Toeplitz mask with a factor w x_d + b per token and query head, signal `factor` (B, T, H).

    Initially w = 0 and b = 1: the Toeplitz mask.
    """

    config: InputToeplitz  # type: ignore[assignment]
    written_signals: tuple[str, ...] = ("factor",)

    def __init__(self, config: InputToeplitz, shape: AttentionShape):
        super().__init__(config, shape)  # type: ignore[arg-type]
        self.factor = Float32Linear(shape.dim, shape.heads)
        with torch.no_grad():
            self.factor.weight.zero_()
            self.factor.bias.fill_(1)

    def signals(self, x_BTD: Tensor, length: int | None = None) -> Signals:
        """Return the tensors (B, T, ..) that the mask computes from the hidden states."""
        return {"factor": self.factor(x_BTD)}

    def coefficients(self, signals: Signals) -> Tensor:
        """Return alpha_BGJL in float32 or wider, at the distances 0 .. L - 1 of the sequence's first L tokens."""
        factor_BHL = signals["factor"][:, : self.config.length].mT
        factor_BGJL = factor_BHL.unflatten(1, (self.shape.groups, -1))
        alpha_BGJL: Tensor = super().coefficients(signals)[..., : factor_BGJL.shape[-1]] * factor_BGJL
        return alpha_BGJL

    def diagonal(self, start_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return M_tt = alpha[0] of `length` tokens (B, G, J, T)."""
        return self.coefficients(signals)[..., :1].expand(-1, -1, -1, length)

    def empty_state(self, rows: int, features: int, values: int, device: torch.device | str) -> MaskState:
        """Return the state of `rows` sequences before their first token."""
        factor = torch.zeros(rows, 0, self.shape.heads, device=device)
        return super().empty_state(rows, features, values, device) | {"factor": factor}

    @classmethod
    def state_size(cls, config: Any, shape: AttentionShape, features: int, values: int, length: int) -> int:
        """Return the number of elements in the state after `length` tokens, per key/value head."""
        return super().state_size(config, shape, features, values, length) + kept_factors(config, shape, length)

    @classmethod
    def state_size_by_block(cls, config: Any, shape: AttentionShape, features: int, values: int, length: int) -> int:
        """Return the number of elements in the state that `by_block` leaves after `length` tokens, per key/value
        head.
        """
        return super().state_size_by_block(config, shape, features, values, length) + kept_factors(
            config, shape, length
        )


def kept_factors(config: InputToeplitz, shape: AttentionShape, length: int) -> int:
    """Return how many factors the state keeps after `length` tokens, per key/value head."""
    return min(length, config.length) * (shape.heads // shape.groups)
