"""The softmax part of a hybrid: each query looks at the last `window` tokens, itself included, and at the first
`sinks` ones exactly (LoLCATs, Zhang et al. 2025, eq. 6; StreamingLLM, Xiao et al. 2024).

    numerator_t = sum over those s of exp(score_ts - max) v_s      denominator_t = the same of 1

What it remembers is in delay.py. Scores for T queries take T x (2 window + sinks) numbers a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.base import AttentionShape

Pair = tuple[Tensor, Tensor]  # (B, G, T, .): of the ring and the call joined, and of the sinks


def nearby(
    q_BGJTK: Tensor, keys: Pair, values: Pair, seen_B: Tensor, shape: AttentionShape, block: int
) -> tuple[Tensor, Tensor]:
    """(numerator_BGJTV, denominator_BGJT1) in q's dtype, `block` queries at a time against the keys in their reach."""
    length, dtype = q_BGJTK.shape[3], q_BGJTK.dtype
    window, sinks = keys[0].shape[2] - length, keys[1].shape[2]
    block = min(length, block)
    count = -(-length // block)
    q_BGJNCK = _blocks(q_BGJTK, count * block).unflatten(3, (count, block)) * shape.scaling
    k_BGNXK, v_BGNXV = (
        _blocks(t[0].to(dtype), window + count * block).unfold(2, window + block, block).mT for t in (keys, values)
    )
    band_BGJNCX = torch.einsum("bgjnck,bgnxk->bgjncx", q_BGJNCK, k_BGNXK)
    sink_BGJNCS = torch.einsum("bgjnck,bgsk->bgjncs", q_BGJNCK, keys[1].to(dtype))
    seen_BNCX = _seen(seen_B, window, sinks, count, block)
    score = capped(torch.cat([sink_BGJNCS, band_BGJNCX], dim=-1), shape.softcap)
    weight = weights(score, seen_BNCX[:, None, None])
    out = torch.einsum("bgjncx,bgnxv->bgjncv", weight[..., sinks:], v_BGNXV)
    out = out + torch.einsum("bgjncs,bgsv->bgjncv", weight[..., :sinks], values[1].to(dtype))
    total = weight.sum(-1, keepdim=True)
    return out.flatten(3, 4)[:, :, :, :length], total.flatten(3, 4)[:, :, :, :length]


def _seen(seen_B: Tensor, window: int, sinks: int, count: int, block: int) -> Tensor:
    """(B, N, C, S + W + C): which sinks and which slots of its band a query sees."""
    device = seen_B.device
    start_BN11 = (seen_B.unsqueeze(1) + block * torch.arange(count, device=device))[:, :, None, None]
    row_C1 = torch.arange(block, device=device).unsqueeze(1)
    slot_X = torch.arange(window + block, device=device)
    near_CX = (slot_X > row_C1) & (slot_X <= row_C1 + window)
    band_BNCX = near_CX & (start_BN11 - window + slot_X >= sinks)  # sinks are not seen twice
    sink_BNCS = torch.arange(sinks, device=device) <= start_BN11 + row_C1
    return torch.cat([sink_BNCS, band_BNCX], dim=-1)


def weights(score: Tensor, seen: Tensor) -> Tensor:
    """exp(score - the largest seen), zero where not seen."""
    score = score.masked_fill(~seen, -torch.inf)
    largest = score.amax(-1, keepdim=True)
    return torch.exp(score - largest.clamp_min(torch.finfo(score.dtype).min))


def capped(score: Tensor, softcap: float | None) -> Tensor:
    return score if softcap is None else softcap * torch.tanh(score / softcap)


def _blocks(t: Tensor, length: int) -> Tensor:
    """Zeros behind along the axis before the last, up to that length."""
    return F.pad(t, (0, 0, 0, length - t.shape[-2]))
