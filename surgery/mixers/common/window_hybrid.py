"""The linear part of a hybrid runs behind: at token t it reads the state after token t - window, and the first
`sinks` tokens never enter it. What was not written yet waits in rings, part of the state:

    ring.*    the last `window` tokens' keys, values and written signals, the last slot the latest token
    sink.*    keys and values of the first tokens, zeros until they come

All (B, T, ..), T the axis of the window, the sinks or the call's tokens.

The softmax part of a hybrid: each query looks at the last `window` tokens, itself included, and at the first
`sinks` ones exactly (LoLCATs, Zhang et al. 2025, eq. 6; StreamingLLM, Xiao et al. 2024).

    numerator_t = sum over those s of exp(score_ts - max) v_s      denominator_t = the same of 1

What it remembers is in surgery/mixers/common/window_hybrid.py. Scores for T queries take T x (2 window + sinks) numbers a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.base import AttentionShape
from surgery.mixers.common.padding import Unpadder, gather_rowwise, shift_rows, zero_outside
from surgery.mixers.masks.base import MaskInputs

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class WindowBuffer:
    window: int
    sinks: int

    def queue(self, new: Tensors, past: Tensors) -> Tensors:
        """The ring, then the call's tokens."""
        return {name: torch.cat([past[f"ring.{name}"].to(t.dtype), t], dim=1) for name, t in new.items()}

    def delayed_tokens(self, queue: Tensors) -> Tensors:
        """What the call's queries find written last: entry i for query i."""
        return {name: t[:, : t.shape[1] - self.window] for name, t in queue.items()}

    def next_rings(self, queue: Tensors, unpadder: Unpadder) -> Tensors:
        return {f"ring.{name}": unpadder.latest(t, self.window, dim=1) for name, t in queue.items()}

    def fill_sinks(self, name: str, new_BTGK: Tensor, past: Tensors, seen_B: Tensor, unpadder: Unpadder) -> Tensor:
        """The sinks with the call's tokens taken in: slot j is the token at position j."""
        position_S = torch.arange(self.sinks, device=seen_B.device)
        all_BXGK = torch.cat([past[f"sink.{name}"].to(new_BTGK.dtype), new_BTGK], dim=1)
        late_BS = (self.sinks + position_S - seen_B.unsqueeze(1)).clamp_max(all_BXGK.shape[1] - 1)
        index_BS = torch.where(position_S < seen_B.unsqueeze(1), position_S, late_BS)
        there_BS = position_S < (seen_B + unpadder.count_B).unsqueeze(1)
        return zero_outside(gather_rowwise(all_BXGK, index_BS, dim=1), there_BS, dim=1)

    def align_inputs(self, rows: MaskInputs) -> tuple[MaskInputs, Tensor]:
        """Rows whose entry i pairs query i with what is due then, as the mask wants them: from the first token written
        on, at its position behind the sinks. And how many queries of each row came before it."""
        offset_B = (self.window + self.sinks - rows.start_B).clamp_min(0)
        beta_BGT = rows.beta_BGT
        moved = replace(
            rows,
            q_BGJTF=shift_rows(rows.q_BGJTF, offset_B, dim=3),
            k_BGTF=shift_rows(rows.k_BGTF, offset_B, dim=2),
            v_BGTV=shift_rows(rows.v_BGTV, offset_B, dim=2),
            beta_BGT=None if beta_BGT is None else shift_rows(beta_BGT, offset_B, dim=2),
            start_B=(rows.start_B - self.window - self.sinks).clamp_min(0),
            count_B=(rows.count_B - offset_B).clamp_min(0),
            signals={name: shift_rows(t, offset_B, dim=1) for name, t in rows.signals.items()},
            max_seen=None if rows.max_seen is None else max(0, rows.max_seen - self.window - self.sinks),
        )
        return moved, offset_B


RingAndSinks = tuple[Tensor, Tensor]  # (B, G, T, .): of the ring and the call joined, and of the sinks


def local_attention(
    q_BGJTK: Tensor, keys: RingAndSinks, values: RingAndSinks, seen_B: Tensor, shape: AttentionShape, block: int
) -> tuple[Tensor, Tensor]:
    """(numerator_BGJTV, denominator_BGJT1) in q's dtype, `block` queries at a time against the keys in their reach."""
    length, dtype = q_BGJTK.shape[3], q_BGJTK.dtype
    window, sinks = keys[0].shape[2] - length, keys[1].shape[2]
    block = min(length, block)
    count = -(-length // block)
    q_BGJNCK = _pad_length(q_BGJTK, count * block).unflatten(3, (count, block)) * shape.scaling
    k_BGNXK, v_BGNXV = (
        _pad_length(t[0].to(dtype), window + count * block).unfold(2, window + block, block).mT for t in (keys, values)
    )
    band_BGJNCX = torch.einsum("bgjnck,bgnxk->bgjncx", q_BGJNCK, k_BGNXK)
    sink_BGJNCS = torch.einsum("bgjnck,bgsk->bgjncs", q_BGJNCK, keys[1].to(dtype))
    seen_BNCX = _visible_slots(seen_B, window, sinks, count, block)
    score = apply_softcap(torch.cat([sink_BGJNCS, band_BGJNCX], dim=-1), shape.softcap)
    weight = masked_exp(score, seen_BNCX[:, None, None])
    out = torch.einsum("bgjncx,bgnxv->bgjncv", weight[..., sinks:], v_BGNXV)
    out = out + torch.einsum("bgjncs,bgsv->bgjncv", weight[..., :sinks], values[1].to(dtype))
    total = weight.sum(-1, keepdim=True)
    return out.flatten(3, 4)[:, :, :, :length], total.flatten(3, 4)[:, :, :, :length]


def _visible_slots(seen_B: Tensor, window: int, sinks: int, count: int, block: int) -> Tensor:
    """(B, N, C, S + W + C): which sinks and which slots of its band a query sees."""
    device = seen_B.device
    start_BN11 = (seen_B.unsqueeze(1) + block * torch.arange(count, device=device))[:, :, None, None]
    row_C1 = torch.arange(block, device=device).unsqueeze(1)
    slot_X = torch.arange(window + block, device=device)
    near_CX = (slot_X > row_C1) & (slot_X <= row_C1 + window)
    band_BNCX = near_CX & (start_BN11 - window + slot_X >= sinks)  # sinks are not seen twice
    sink_BNCS = torch.arange(sinks, device=device) <= start_BN11 + row_C1
    return torch.cat([sink_BNCS, band_BNCX], dim=-1)


def masked_exp(score: Tensor, seen: Tensor) -> Tensor:
    """exp(score - the largest seen), zero where not seen."""
    score = score.masked_fill(~seen, -torch.inf)
    largest = score.amax(-1, keepdim=True)
    return torch.exp(score - largest.clamp_min(torch.finfo(score.dtype).min))


def apply_softcap(score: Tensor, softcap: float | None) -> Tensor:
    return score if softcap is None else softcap * torch.tanh(score / softcap)


def _pad_length(t: Tensor, length: int) -> Tensor:
    """Zeros behind along the axis before the last, up to that length."""
    return F.pad(t, (0, 0, 0, length - t.shape[-2]))
