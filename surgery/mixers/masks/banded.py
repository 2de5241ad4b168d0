"""Banded mask, dilated or not: M_ts = 1 at the distances t - s = 0, r, 2 r, .., (width - 1) r, and 0 elsewhere.

Dao and Gu 2024, "Transformers are SSMs", section 4.1.4: sparsity patterns of masks "such as banded, dilated, or block
diagonal". r is the dilation: 1 for a band of `width` tokens.

Tokens whose positions have the same remainder modulo r see each other only. With kernel scores these r subsequences are
rows of their own, in chunks of `width` tokens, of which each reads itself and the one before it: T width multiplications
per feature and value dim. The delta rule takes quadratic time. The state holds the last (width - 1) r keys and values
(fft_convolution.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.masks.base import MASKS, MaskInputs, Signals
from surgery.mixers.masks.fft_convolution import DistanceMask


@dataclass(frozen=True)
class Banded:
    """Config of the banded mask. width: number of tokens that a query sees. dilation: distance between two of them."""

    name: ClassVar[str] = "banded"
    width: int = 256
    dilation: int = 1

    def __post_init__(self) -> None:
        for option, value, example in (("width", self.width, 256), ("dilation", self.dilation, 2)):
            if value < 1:
                raise SurgeryError(f"banded: {option} must be 1 or more tokens (got {value}); for example {example}")


@MASKS.register(Banded)
class BandedMask(DistanceMask):
    """Banded mask, without parameters."""

    config: Banded

    @classmethod
    def reach(cls, config: Banded) -> int | None:
        """Return the first distance from which on M is 0."""
        return (config.width - 1) * config.dilation + 1

    def entries(self, at_BT: Tensor, from_BS: Tensor, signals: Signals) -> Tensor:
        """Return M_111TS of positions at_BT and from_BS: distances are the same in all rows."""
        return self.is_seen(at_BT[0].unsqueeze(1) - from_BS[0]).float()[None, None, None]

    def is_seen(self, distance: Tensor) -> Tensor:
        """Return whether M is 1 at each distance."""
        width, dilation = self.config.width, self.config.dilation
        return (distance >= 0) & (distance < width * dilation) & (distance % dilation == 0)

    def kernel_output(self, rows: MaskInputs, k_BGSF: Tensor, v_BGSV: Tensor, signals: Signals) -> Tensor:
        """Return out_BGJTV for kernel scores, in time T width."""
        size, length, stride = v_BGSV.shape[2], rows.v_BGTV.shape[2], self.config.dilation
        chunk = min(self.config.width, -(-size // stride))
        count = -(-size // (stride * chunk))
        empty = count * chunk * stride - size

        def chunks(x: Tensor) -> Tensor:
            """Return x (.., S, Z) by remainder r and chunk n of `chunk` tokens c, (.., r, n, c, Z)."""
            x_rncZ: Tensor = F.pad(x, (0, 0, empty, 0)).unflatten(-2, (count, chunk, stride)).movedim(-2, -4)
            return x_rncZ

        q_BGJrncF = chunks(F.pad(rows.q_BGJTF, (0, 0, size - length, 0)))
        k_BGrncF, v_BGrncV = (x.unsqueeze(2) for x in (chunks(k_BGSF), chunks(v_BGSV)))
        k_BGrnsF, v_BGrnsV = (
            torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[..., :-1, :, :], x], -2) for x in (k_BGrncF, v_BGrncV)
        )
        at_c = torch.arange(chunk, device=v_BGSV.device)
        distance_cs = at_c.unsqueeze(1) - torch.arange(-chunk, chunk, device=v_BGSV.device)
        seen_cs = self.is_seen(distance_cs * stride)
        out_BGJrncV: Tensor = (q_BGJrncF @ k_BGrnsF.mT).masked_fill(~seen_cs, 0) @ v_BGrnsV
        out_BGJSV: Tensor = out_BGJrncV.movedim(-4, -2).flatten(-4, -2)
        return out_BGJSV[..., empty + size - length :, :]
