"""M_ts = K(block(t) - block(s)), K(delta) = sum_r a_r exp(-lambda_r delta), a and lambda >= 0: Toeplitz block mixing
(TBM; FARS 2026, "Toeplitz Block Mixing for Scalable Multi-Head Linear Attention", eqs. 3 to 6). Any length: what it learned on M blocks it extends to more.

    R sums of exponentials are R masks of gates whose gate is exp(-lambda_r) at the first token of each block,
    so it is linear in time and keeps R states, whatever the chunks.
The sum over b <= i of K(i - b) S_b, with its own block read causally. Equation 6 as printed reads the states of equation 5
one block too early, K(i - 1 - b), and leaves block i out; its text says K(i - b), as equation 4 does. The denominator of
equation 4 cancels where the mixer normalises (a column of ones beside V, equation 1); without, the sum is unnormalised as
in equation 6. Where attention is not causal, K(|delta|) over all blocks: a sweep over the blocks' sums from either end. Sequences then begin at 0.
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
from surgery.mixers.masks.block_scan import block_scan_both
from surgery.mixers.masks.frame import Frame, inverse_softplus
from surgery.mixers.masks.semiseparable import Semiseparable, semiseparable
from surgery.op import op

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
        return gates(_positive(self.rate_RG), start_B, count_B, length, self.config.block)

    def dense(self, start_B: Tensor, length: int, signals: State) -> Tensor:
        block_BT = (start_B.unsqueeze(1) + torch.arange(length, device=start_B.device)) // self.config.block
        mask = self.kernel(block_BT.unsqueeze(2) - block_BT.unsqueeze(1)).permute(0, 3, 4, 1, 2)
        return mask.tril() if self.shape.causal else mask

    def chunked(self, rows: Rows, state: State | None, chunk: int) -> tuple[Tensor, State | None]:
        if rows.beta_BGT is not None:
            return super().chunked(rows, state, chunk)
        qkv, block = (rows.q_BGJTF, rows.k_BGTF, rows.v_BGTV), self.config.block
        kernel = _positive(self.rate_RG), self.amplitudes()
        if not self.shape.causal:
            return toeplitz_both_ways(*qkv, *kernel, block), state
        first = None if state is None else state["sum"]
        out, last = toeplitz_causal(*qkv, *kernel, first, rows.start_B, rows.count_B, block, chunk)
        return out, None if state is None or last is None else {"sum": last}

    def step(self, rows: Rows, state: State) -> tuple[Tensor, State]:
        if rows.beta_BGT is not None:
            return super().step(rows, state)
        qkv, kernel = (rows.q_BGJTF, rows.k_BGTF, rows.v_BGTV), (_positive(self.rate_RG), self.amplitudes())
        out, after = toeplitz_step(*qkv, *kernel, state["sum"], rows.start_B, rows.count_B, self.config.block)
        return out, {"sum": after}


@op
def toeplitz_causal(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    first_BRGFV: Tensor | None,
    start_B: Tensor,
    count_B: Tensor,
    block: int,
    chunk: int,
) -> tuple[Tensor, Tensor | None]:
    """(out_BGJTV, last_BRGFV) as `semiseparable` gives them; a kernel may leave `last` where no state came in."""
    gates_BRGT = gates(rate_RG, start_B, count_B, v_BGTV.shape[2], block)
    return semiseparable(q_BGJTF, k_BGTF, v_BGTV, None, gates_BRGT, weight_RGJ, first_BRGFV, chunk)


@op
def toeplitz_step(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    sum_BRGFV: Tensor,
    start_B: Tensor,
    count_B: Tensor,
    block: int,
) -> tuple[Tensor, Tensor]:
    """The same of one token a row (T = 1)."""
    wide = torch.promote_types(v_BGTV.dtype, torch.float32)
    gate_BRG1 = gates(rate_RG, start_B, count_B, 1, block).to(wide).exp()
    written_BGFV = k_BGTF.to(wide).mT * v_BGTV.to(wide)
    sum_BRGFV = gate_BRG1.unsqueeze(-1) * sum_BRGFV.to(wide) + written_BGFV.unsqueeze(1)
    out_BRGJV = q_BGJTF.to(wide).squeeze(3).unsqueeze(1) @ sum_BRGFV
    return (weight_RGJ.unsqueeze(-1) * out_BRGJV).sum(1).unsqueeze(3), sum_BRGFV


@op
def toeplitz_both_ways(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, block: int
) -> Tensor:
    """out_BGJTV in float32 or wider (a kernel: or v's dtype) of sequences that begin at position 0."""
    wide = torch.promote_types(v_BGTV.dtype, torch.float32)
    frame = Frame.plain(torch.zeros(len(v_BGTV), dtype=torch.int64), v_BGTV.shape[2], block)
    k_BGNCF, v_BGNCV = frame.cut(k_BGTF.to(wide), 2), frame.cut(v_BGTV.to(wide), 2)
    mixed_BGJNFV = block_scan_both(k_BGNCF.mT @ v_BGNCV, rate_RG, weight_RGJ)
    return frame.joined(frame.cut(q_BGJTF.to(wide), 3) @ mixed_BGJNFV, 3)


def gates(rate_RG: Tensor, start_B: Tensor, count_B: Tensor, length: int, block: int) -> Tensor:
    """Log-gates (B, R, G, T): -lambda at the first token of each block."""
    token_T = torch.arange(length, device=start_B.device)
    enters_BT = ((start_B.unsqueeze(1) + token_T) % block == 0) & (token_T < count_B.unsqueeze(1))
    return -rate_RG.unsqueeze(-1) * enters_BT[:, None, None]


def _positive(raw: Tensor) -> Tensor:
    return F.softplus(raw.to(torch.promote_types(raw.dtype, torch.float32)))
