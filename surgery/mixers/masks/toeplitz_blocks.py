"""M_ts = K(block(t) - block(s)), K(delta) = sum_r a_r exp(-lambda_r delta), a and lambda >= 0: Toeplitz block mixing
(TBM). Any length: what it learned on M blocks it extends to more.

    R sums of exponentials are R masks of gates whose gate is exp(-lambda_r) at the first token of each block,
    so it is linear in time and keeps R states, whatever the chunks.
Its equation 6 is this; equation 4, normalised, appends a column of ones to V (the mixer does). Where attention is
not causal, K(|delta|) over all blocks: a sweep over the blocks' sums from either end. Sequences then begin at 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Rows
from surgery.mixers.masks.frame import Frame, inverse_softplus, widened
from surgery.mixers.masks.semiseparable import Semiseparable

State = dict[str, Tensor]


@dataclass(frozen=True)
class ToeplitzBlocks:
    """block: tokens in a block. components: R."""

    name: ClassVar[str] = "toeplitz_blocks"
    block: int = 64
    components: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.components <= 16:
            raise SurgeryError(f"toeplitz_blocks mixes 1 to 16 exponentials, not components={self.components}; try 4")
        if self.block < 1:
            raise SurgeryError(f"toeplitz_blocks: block={self.block} holds no token; use 1 or more, for example 64")


@MASKS.register(ToeplitzBlocks)
class ToeplitzBlocksMask(Semiseparable):
    """`amplitude_RGJ` and `rate_RG` hold a and lambda before softplus: a for each query head, lambda for each key/value
    head, whose states they shape. Starts at a = 1 / R and lambda spread over 1 .. 1/64 (one component: 1/8)."""

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__(config, shape)
        r, g, j = config.components, shape.groups, shape.heads // shape.groups
        spread_R = torch.logspace(0, -6, r, base=2) if r > 1 else torch.full((1,), 0.125)
        self.amplitude_RGJ = nn.Parameter(inverse_softplus(torch.full((r, g, j), 1 / r)))
        self.rate_RG = nn.Parameter(inverse_softplus(spread_R)[:, None].repeat(1, g))

    @classmethod
    def refuse(cls, config: Any, shape: AttentionShape, delta: bool) -> None:
        if delta and not shape.causal:
            raise SurgeryError(
                "toeplitz_blocks in both directions needs kernel scores: the delta rule has an order of tokens; "
                "use scores: kernel, or a causal attention"
            )

    @classmethod
    def components(cls, config: Any) -> int:
        return config.components

    def amplitudes(self) -> Tensor:
        return _positive(self.amplitude_RGJ)

    def kernel(self, distance: Tensor) -> Tensor:
        """K(distance in blocks), (.., G, J) for a tensor of any shape."""
        powers = torch.exp(-distance[..., None, None].abs() * _positive(self.rate_RG))
        return torch.einsum("...rg,rgj->...gj", powers, self.amplitudes())

    @torch.no_grad()
    def start(self, amplitude_RGJ: Tensor, rate_RG: Tensor) -> None:
        """Set a and lambda."""
        self.amplitude_RGJ.copy_(inverse_softplus(amplitude_RGJ.double().clamp_min(1e-12)))
        self.rate_RG.copy_(inverse_softplus(rate_RG.double().clamp_min(1e-12)))

    def log_gates(self, start_B: Tensor, count_B: Tensor, length: int, signals: State) -> Tensor:
        token_T = torch.arange(length, device=start_B.device)
        enters_BT = ((start_B.unsqueeze(1) + token_T) % self.config.block == 0) & (token_T < count_B.unsqueeze(1))
        return -_positive(self.rate_RG).unsqueeze(-1) * enters_BT[:, None, None]

    def dense(self, start_B: Tensor, length: int, signals: State) -> Tensor:
        block_BT = (start_B.unsqueeze(1) + torch.arange(length, device=start_B.device)) // self.config.block
        mask = self.kernel(block_BT.unsqueeze(2) - block_BT.unsqueeze(1)).permute(0, 3, 4, 1, 2)
        return mask.tril() if self.shape.causal else mask

    def chunked(self, rows: Rows, state: State | None, chunk: int) -> tuple[Tensor, State | None]:
        if self.shape.causal:
            return super().chunked(rows, state, chunk)
        rows = widened(rows)
        frame = Frame.plain(rows.start_B, rows.v_BGTV.shape[2], self.config.block)
        k_BGNCF, v_BGNCV = frame.cut(rows.k_BGTF, 2), frame.cut(rows.v_BGTV, 2)
        mixed_BGJNFV = self._both_ways(k_BGNCF.mT @ v_BGNCV)
        return frame.joined(frame.cut(rows.q_BGJTF, 3) @ mixed_BGJNFV, 3), state

    def _both_ways(self, sum_BGNFV: Tensor) -> Tensor:
        """sum_m K(|n - m|) of the blocks' sums, for each query head: (B, G, J, N, F, V)."""
        rate_RG, out = _positive(self.rate_RG), torch.zeros_like(sum_BGNFV[:, :, None])
        for weight_GJ, rate_G in zip(self.amplitudes(), rate_RG):
            gate_G11 = torch.exp(-rate_G)[:, None, None]
            back = _sweep(sum_BGNFV.flip(2), gate_G11).flip(2)
            both_BGNFV = _sweep(sum_BGNFV, gate_G11) + back - sum_BGNFV
            out = out + weight_GJ[:, :, None, None, None] * both_BGNFV.unsqueeze(2)
        return out


def _sweep(sum_BGNFV: Tensor, gate_G11: Tensor) -> Tensor:
    """S_n = gate S_n-1 + sum_n."""
    states = [sum_BGNFV[:, :, 0]]
    for n in range(1, sum_BGNFV.shape[2]):
        states.append(torch.addcmul(sum_BGNFV[:, :, n], gate_G11, states[-1]))
    return torch.stack(states, 2)


def _positive(raw: Tensor) -> Tensor:
    return F.softplus(raw.to(torch.promote_types(raw.dtype, torch.float32)))
