"""Toeplitz block mixing (TBM): M_ts = K(block(t) - block(s)), K(d) = sum_r a_r exp(-lambda_r d), a and lambda >= 0.

FARS 2026, "Toeplitz Block Mixing for Scalable Multi-Head Linear Attention", eqs. 3 to 6. K depends on the distance of
blocks only, so a mask learned on M blocks extends to any length. Each of the R exponentials is a gate mask whose gate
is exp(-lambda_r) at the first token of each block and 1 elsewhere: time is linear and the state is R sums.

    causal          mixed_n = sum_m<n  K(n - m) X_m = sum_r a_r E_r,n      E_r,n+1 = e^(-lambda_r) (E_r,n + X_n)
    bidirectional   mixed_n = sum_m K(|n - m|) X_m: one sweep from each end, with X_n counted once

X_n: sum of k v^T over block n. E_n: state that enters block n, with its gate applied; S_n = E_n + X_n leaves it.
Attention inside a block is causal too, so K(0) X_n is not part of mixed_n in the causal case. Bidirectional sequences
begin at position 0. R components, M blocks; a per query head, lambda per key/value head.

Differences from the paper: equation 6 as printed reads the states of equation 5 one block too early, K(i - 1 - b), and
leaves out block i. The text of the paper and its equation 4 have K(i - b), as here. Equation 1 sums over the tokens of
a sequence before t without t itself, which gives 0 / 0 at the first token; here t is included, as the block b = i is in
equation 2. The denominator of equation 4 cancels if the mixer normalises (a column of ones beside V, equation 1);
otherwise the sum is unnormalised as in equation 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.core.dispatch import dispatched
from surgery.core.errors import SurgeryError
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Mask, MaskInputs, MaskState, Signals
from surgery.mixers.masks.chunking import ChunkLayout, inverse_softplus
from surgery.mixers.masks.semiseparable import Semiseparable, semiseparable

if TYPE_CHECKING:
    from surgery.mixers.common.packed_pieces import PackedPieces


@dispatched
def block_scan(
    sum_BGMFV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    first_BRGFV: Tensor | None = None,
    count_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (mixed_BGJMFV, S of the last block (B, R, G, F, V)) of causal mixing.

    sum_BGMFV: X. rate_RG: lambda. weight_RGJ: a. first_BRGFV: E_0, None: zeros. count_B: number of blocks per row,
    None: M; mixed is 0 for later blocks. S is E_0 if count_B is 0.
    """
    batch, groups, _, features, values = sum_BGMFV.shape
    gate_RG11 = torch.exp(-rate_RG)[:, :, None, None]
    enters = first_BRGFV
    if enters is None:
        enters = gate_RG11.new_zeros(batch, len(rate_RG), groups, features, values)
    mixed, last = [], enters
    for n, sum_BGFV in enumerate(sum_BGMFV.unbind(2)):
        mixed_BGJFV = torch.einsum("rgj,brgfv->bgjfv", weight_RGJ, enters)
        leaves = enters + sum_BGFV.unsqueeze(1)
        if count_B is not None:
            here_B = (n < count_B)[:, None, None, None, None]
            mixed_BGJFV, leaves = torch.where(here_B, mixed_BGJFV, 0), torch.where(here_B, leaves, last)
        mixed.append(mixed_BGJFV)
        enters, last = gate_RG11 * leaves, leaves
    return torch.stack(mixed, 3).to(sum_BGMFV.dtype), last


@dispatched
def block_scan_bidirectional(sum_BGMFV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor) -> Tensor:
    """Return mixed_BGJMFV of bidirectional mixing. Arguments as in `block_scan`."""
    dtype, sum_BGMFV = sum_BGMFV.dtype, sum_BGMFV.to(torch.promote_types(sum_BGMFV.dtype, torch.float32))
    out = torch.zeros_like(sum_BGMFV[:, :, None])
    for weight_GJ, rate_G in zip(weight_RGJ, rate_RG):
        gate_G11 = torch.exp(-rate_G)[:, None, None]
        back = _sweep(sum_BGMFV.flip(2), gate_G11).flip(2)
        both_BGMFV = _sweep(sum_BGMFV, gate_G11) + back - sum_BGMFV
        out = out + weight_GJ[:, :, None, None, None] * both_BGMFV.unsqueeze(2)
    return out.to(dtype)


def _sweep(sum_BGMFV: Tensor, gate_G11: Tensor) -> Tensor:
    """Return S_BGMFV of S_n = gate S_n-1 + sum_n."""
    states = [sum_BGMFV[:, :, 0]]
    for n in range(1, sum_BGMFV.shape[2]):
        states.append(torch.addcmul(sum_BGMFV[:, :, n], gate_G11, states[-1]))
    return torch.stack(states, 2)


@dataclass(frozen=True)
class ToeplitzBlocks:
    """Config of Toeplitz block mixing. block: tokens per block. components: R, the number of exponentials."""

    name: ClassVar[str] = "toeplitz_blocks"
    block: int = 64
    components: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.components <= 16:
            raise SurgeryError(f"toeplitz_blocks: components must be 1 to 16 (got {self.components}); for example 4")
        if self.block < 1:
            raise SurgeryError(f"toeplitz_blocks: block must be 1 or more tokens (got {self.block}); for example 64")


@MASKS.register(ToeplitzBlocks)
class ToeplitzBlocksMask(Semiseparable):
    """Toeplitz block mixing. amplitude_RGJ, rate_RG: a and lambda before softplus.

    Initially a = 1 / R, and lambda is log-spaced over 1 .. 1/64 (1/8 for one component).
    """

    config: ToeplitzBlocks

    def __init__(self, config: ToeplitzBlocks, shape: AttentionShape):
        super().__init__(config, shape)
        r, g, j = config.components, shape.groups, shape.heads // shape.groups
        spread_R = torch.logspace(0, -6, r, base=2) if r > 1 else torch.full((1,), 0.125)
        self.amplitude_RGJ = nn.Parameter(inverse_softplus(torch.full((r, g, j), 1 / r)))
        self.rate_RG = nn.Parameter(inverse_softplus(spread_R)[:, None].repeat(1, g))

    @classmethod
    def check_config(cls, config: Any, shape: AttentionShape, delta: bool) -> None:
        """Raise SurgeryError if the mask cannot serve this attention."""
        if delta and not shape.causal:
            raise SurgeryError(
                "toeplitz_blocks: bidirectional attention cannot use the delta rule, which depends on the order of "
                "tokens; "
                "use scores: kernel"
            )

    @classmethod
    def components(cls, config: ToeplitzBlocks) -> int:
        """Return R, the number of exponential components."""
        return config.components

    def amplitudes(self) -> Tensor:
        """Return the amplitudes a_RGJ >= 0."""
        return _positive(self.amplitude_RGJ)

    def kernel(self, distance: Tensor) -> Tensor:
        """Return K at distances in blocks (..), as (.., G, J)."""
        powers = torch.exp(-distance[..., None, None].abs() * _positive(self.rate_RG))
        return torch.einsum("...rg,rgj->...gj", powers, self.amplitudes())

    @torch.no_grad()
    def initialize(self, amplitude_RGJ: Tensor, rate_RG: Tensor) -> None:
        """Set the parameters so that the amplitudes are a and the rates lambda."""
        self.amplitude_RGJ.copy_(inverse_softplus(amplitude_RGJ.double().clamp_min(1e-12)))
        self.rate_RG.copy_(inverse_softplus(rate_RG.double().clamp_min(1e-12)))

    def log_gates(self, start_B: Tensor, count_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return log-gates g_BRGT <= 0."""
        return block_log_gates(_positive(self.rate_RG), start_B, count_B, length, self.config.block)

    def dense(self, start_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return M_BGJTT of tokens at start .. start + length."""
        block_BT = (start_B.unsqueeze(1) + torch.arange(length, device=start_B.device)) // self.config.block
        mask = self.kernel(block_BT.unsqueeze(2) - block_BT.unsqueeze(1)).permute(0, 3, 4, 1, 2)
        return mask.tril() if self.shape.causal else mask

    def chunked(self, rows: MaskInputs, state: MaskState | None, chunk: int) -> tuple[Tensor, MaskState | None]:
        """Return (out_BGJTV, state after the rows' tokens, or None without a state)."""
        if rows.beta_BGT is not None:
            return super().chunked(rows, state, chunk)
        qkv, block = (rows.q_BGJTF, rows.k_BGTF, rows.v_BGTV), self.config.block
        kernel = _positive(self.rate_RG), self.amplitudes()
        if not self.shape.causal:
            return toeplitz_bidirectional(*qkv, *kernel, block), state
        first = None if state is None else state["sum"]
        out, last = toeplitz_causal(
            *qkv,
            *kernel,
            first_BRGFV=first,
            start_B=rows.start_B,
            count_B=rows.count_B,
            block=block,
            chunk=chunk,
        )
        return out, None if state is None or last is None else {"sum": last}

    def packed(self, row: MaskInputs, pieces: PackedPieces, state: MaskState, chunk: int) -> tuple[Tensor, MaskState]:
        """Return (out_BGJTV, state after the pieces) of pieces of several sequences in one row: as rows, because gates
        and sums of blocks depend on the position in the block."""
        return Mask.packed(self, row, pieces, state, chunk)

    def step(self, rows: MaskInputs, state: MaskState) -> tuple[Tensor, MaskState]:
        """Return (out_BGJTV, state) for one token of each row."""
        if rows.beta_BGT is not None:
            return super().step(rows, state)
        qkv, kernel = (rows.q_BGJTF, rows.k_BGTF, rows.v_BGTV), (_positive(self.rate_RG), self.amplitudes())
        out, after = toeplitz_step(
            *qkv,
            *kernel,
            sum_BRGFV=state["sum"],
            start_B=rows.start_B,
            count_B=rows.count_B,
            block=self.config.block,
        )
        return out, {"sum": after}


@dispatched
def toeplitz_causal(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    *,
    first_BRGFV: Tensor | None,
    start_B: Tensor,
    count_B: Tensor,
    block: int,
    chunk: int,
) -> tuple[Tensor, Tensor | None]:
    """Return (out_BGJTV, last_BRGFV), as `semiseparable` does, of causal mixing with kernel scores.

    rate_RG: lambda. weight_RGJ: a. block, chunk: tokens. Kernels may return None for `last` if first_BRGFV is None.
    """
    gates_BRGT = block_log_gates(rate_RG, start_B, count_B, v_BGTV.shape[2], block)
    operands = q_BGJTF, k_BGTF, v_BGTV, None, gates_BRGT, weight_RGJ
    return semiseparable(*operands, first_BRGFV=first_BRGFV, chunk=chunk)


@dispatched
def toeplitz_step(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    *,
    sum_BRGFV: Tensor,
    start_B: Tensor,
    count_B: Tensor,
    block: int,
) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV, sum_BRGFV after the token) for one token per row (T = 1).

    Arguments as in `toeplitz_causal`.
    """
    wide = torch.promote_types(v_BGTV.dtype, torch.float32)
    gate_BRG1 = block_log_gates(rate_RG, start_B, count_B, 1, block).to(wide).exp()
    written_BGFV = k_BGTF.to(wide).mT * v_BGTV.to(wide)
    sum_BRGFV = gate_BRG1.unsqueeze(-1) * sum_BRGFV.to(wide) + written_BGFV.unsqueeze(1)
    out_BRGJV = q_BGJTF.to(wide).squeeze(3).unsqueeze(1) @ sum_BRGFV
    return (weight_RGJ.unsqueeze(-1) * out_BRGJV).sum(1).unsqueeze(3), sum_BRGFV


@dispatched
def toeplitz_bidirectional(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, block: int
) -> Tensor:
    """Return out_BGJTV of bidirectional mixing in float32 or float64; kernels may return v's dtype.

    Sequences begin at position 0. Arguments as in `toeplitz_causal`.
    """
    wide = torch.promote_types(v_BGTV.dtype, torch.float32)
    layout = ChunkLayout.unaligned(torch.zeros(len(v_BGTV), dtype=torch.int64), v_BGTV.shape[2], block)
    k_BGNCF, v_BGNCV = layout.to_chunks(k_BGTF.to(wide), 2), layout.to_chunks(v_BGTV.to(wide), 2)
    mixed_BGJNFV = block_scan_bidirectional(k_BGNCF.mT @ v_BGNCV, rate_RG, weight_RGJ)
    return layout.from_chunks(layout.to_chunks(q_BGJTF.to(wide), 3) @ mixed_BGJNFV, 3)


def block_log_gates(rate_RG: Tensor, start_B: Tensor, count_B: Tensor, length: int, block: int) -> Tensor:
    """Return log-gates (B, R, G, T): -lambda at the first token of each block, 0 elsewhere."""
    token_T = torch.arange(length, device=start_B.device)
    enters_BT = ((start_B.unsqueeze(1) + token_T) % block == 0) & (token_T < count_B.unsqueeze(1))
    return -rate_RG.unsqueeze(-1) * enters_BT[:, None, None]


def _positive(raw: Tensor) -> Tensor:
    return F.softplus(raw.to(torch.promote_types(raw.dtype, torch.float32)))
