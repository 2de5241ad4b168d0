"""Hybrids of linear and softmax attention: a softmax branch over near and first tokens, and the delay of the linear one.

Softmax branch: query t attends to the last `window` tokens, itself included, and to the first `sinks` tokens (LoLCATs,
Zhang et al. 2025, eq. 6; StreamingLLM, Xiao et al. 2024). Scores of T queries take T x (2 window + sinks) elements per
head.

    numerator_t = sum over those s of exp(score_ts - max) v_s      denominator_t = sum over them of exp(score_ts - max)

Linear branch: at token t it reads the state after token t - window, and the first `sinks` tokens never enter its state.
Tokens that are not written to it yet are part of the mixer's state, (B, T, ..) each:

    ring.*    keys, values and written signals of the last `window` tokens, the latest token last
    sink.*    keys and values of the first `sinks` tokens, zeros before they arrive
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.base import AttentionShape
from surgery.mixers.common.padding import Unpadder, gather_rowwise, shift_rows, zero_outside
from surgery.mixers.masks.base import MaskInputs

Tensors = dict[str, Tensor]  # by name: "k", "v" and the written signals


@dataclass(frozen=True)
class WindowBuffer:
    """Sizes of the rings and sinks in tokens, and the operations on them."""

    window: int
    sinks: int

    def queue(self, new: Tensors, past: Tensors) -> Tensors:
        """Return the rings joined with the call's tokens, (B, window + T, ..) each."""
        return {name: torch.cat([past[f"ring.{name}"].to(t.dtype), t], dim=1) for name, t in new.items()}

    def delayed_tokens(self, queue: Tensors) -> Tensors:
        """Return the tokens that enter the linear branch in this call: entry i just before query i reads."""
        return {name: t[:, : t.shape[1] - self.window] for name, t in queue.items()}

    def next_rings(self, queue: Tensors, unpadder: Unpadder) -> Tensors:
        """Return the rings after the call's tokens, under their names in the state."""
        return {f"ring.{name}": unpadder.latest(t, self.window, dim=1) for name, t in queue.items()}

    def fill_sinks(self, name: str, new_BTGK: Tensor, past: Tensors, seen_B: Tensor, unpadder: Unpadder) -> Tensor:
        """Return the sinks `name` after the call's tokens, (B, sinks, G, K): slot j holds the token at position j."""
        position_S = torch.arange(self.sinks, device=seen_B.device)
        all_BXGK = torch.cat([past[f"sink.{name}"].to(new_BTGK.dtype), new_BTGK], dim=1)
        late_BS = (self.sinks + position_S - seen_B.unsqueeze(1)).clamp_max(all_BXGK.shape[1] - 1)
        index_BS = torch.where(position_S < seen_B.unsqueeze(1), position_S, late_BS)
        there_BS = position_S < (seen_B + unpadder.count_B).unsqueeze(1)
        return zero_outside(gather_rowwise(all_BXGK, index_BS, dim=1), there_BS, dim=1)

    def align_inputs(self, rows: MaskInputs) -> tuple[MaskInputs, Tensor]:
        """Return (rows that begin with the first token written, the number of queries before it).

        In the given rows, entry i pairs query i with the token written before it, which early in a sequence is a sink or
        does not exist. The mask expects written tokens only, so those entries are shifted out and positions count from
        the first token behind the sinks.
        """
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


class RecentAndSinks(NamedTuple):
    """Keys or values of the softmax branch. recent: of the ring and the call, (B, G, window + T, .); sinks: (B, G, sinks, .)."""

    recent: Tensor
    sinks: Tensor


class SoftmaxSums(NamedTuple):
    """Output of the softmax branch before the division: numerator (B, G, J, T, V) and denominator (B, G, J, T, 1)."""

    numerator: Tensor
    denominator: Tensor


def local_attention(
    q_BGJTK: Tensor, keys: RecentAndSinks, values: RecentAndSinks, seen_B: Tensor, shape: AttentionShape, block: int
) -> SoftmaxSums:
    """Return the output of the softmax branch in q's dtype.

    seen_B: tokens of each row before this call. block: queries per block; each block attends to window + block keys.
    """
    length, dtype = q_BGJTK.shape[3], q_BGJTK.dtype
    window, sinks = keys.recent.shape[2] - length, keys.sinks.shape[2]
    block = min(length, block)
    count = -(-length // block)
    q_BGJNCK = _pad_length(q_BGJTK, count * block).unflatten(3, (count, block)) * shape.scaling
    k_BGNXK, v_BGNXV = (
        _pad_length(t.recent.to(dtype), window + count * block).unfold(2, window + block, block).mT
        for t in (keys, values)
    )
    band_BGJNCX = torch.einsum("bgjnck,bgnxk->bgjncx", q_BGJNCK, k_BGNXK)
    sink_BGJNCS = torch.einsum("bgjnck,bgsk->bgjncs", q_BGJNCK, keys.sinks.to(dtype))
    seen_BNCX = _visible_slots(seen_B, window, sinks, count, block)
    score = apply_softcap(torch.cat([sink_BGJNCS, band_BGJNCX], dim=-1), shape.softcap)
    weight = masked_exp(score, seen_BNCX[:, None, None])
    out = torch.einsum("bgjncx,bgnxv->bgjncv", weight[..., sinks:], v_BGNXV)
    out = out + torch.einsum("bgjncs,bgsv->bgjncv", weight[..., :sinks], values.sinks.to(dtype))
    total = weight.sum(-1, keepdim=True)
    return SoftmaxSums(out.flatten(3, 4)[:, :, :, :length], total.flatten(3, 4)[:, :, :, :length])


def _visible_slots(seen_B: Tensor, window: int, sinks: int, count: int, block: int) -> Tensor:
    """Return whether query c of block n attends to each of the S sinks and W + C recent tokens, (B, N, C, S + W + C)."""
    device = seen_B.device
    start_BN11 = (seen_B.unsqueeze(1) + block * torch.arange(count, device=device))[:, :, None, None]
    row_C1 = torch.arange(block, device=device).unsqueeze(1)
    slot_X = torch.arange(window + block, device=device)
    near_CX = (slot_X > row_C1) & (slot_X <= row_C1 + window)
    band_BNCX = near_CX & (start_BN11 - window + slot_X >= sinks)  # a sink within the window counts once
    sink_BNCS = torch.arange(sinks, device=device) <= start_BN11 + row_C1
    return torch.cat([sink_BNCS, band_BNCX], dim=-1)


def masked_exp(score: Tensor, seen: Tensor) -> Tensor:
    """Return exp(score - the row's maximum over visible keys), and 0 for keys that are not visible."""
    score = score.masked_fill(~seen, -torch.inf)
    largest = score.amax(-1, keepdim=True)
    return torch.exp(score - largest.clamp_min(torch.finfo(score.dtype).min))


def apply_softcap(score: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(score / softcap), or the score if softcap is None."""
    return score if softcap is None else softcap * torch.tanh(score / softcap)


def _pad_length(t: Tensor, length: int) -> Tensor:
    """Pad axis -2 at its end with zeros up to that length."""
    return F.pad(t, (0, 0, 0, length - t.shape[-2]))
