"""Hybrids of linear and softmax attention: a softmax branch over near and first tokens, and the delay of the linear
one.

Softmax branch: query t attends to the last `window` tokens, itself included, and to the first `sinks` tokens (LoLCATs,
Zhang et al. 2025, eq. 6; StreamingLLM, Xiao et al. 2024). Scores of T queries take T x (2 window + sinks) elements per
head.

    out_t = sum over those s of exp(score_ts - lse_t) v_s      lse_t = log sum over them of exp(score_ts)

Linear branch: at token t it reads the state after token t - window, and the first `sinks` tokens never enter its state.
Tokens that are not written to it yet are part of the mixer's state:

    ring.*    keys, values and written signals of the last tokens, (B, window + 1, ..): the token at position p is in slot
              p mod (window + 1), zeros before it arrives
    sink.*    keys and values of the first `sinks` tokens, (B, sinks, ..): the token at position p is in slot p, zeros
              before it arrives

A ring has one slot more than the window. A decoding step can then write its token while the token that leaves the
window is still read: they have different slots, so a kernel needs no order between its programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.dispatch import dispatched
from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MaskInputs
from surgery.mixers.padding import Unpadder, gather_rowwise, shift_rows, zero_outside

if TYPE_CHECKING:
    from surgery.mixers.common.packed_pieces import WindowPlan

Tensors = dict[str, Tensor]  # by name: "k", "v" and the written signals


@dataclass(frozen=True)
class WindowBuffer:
    """Sizes of the window and the sinks in tokens, and the operations on rings and sinks."""

    window: int
    sinks: int

    @property
    def slots(self) -> int:
        """Slots of a ring: one more than the window, none without a window."""
        return self.window + 1 if self.window else 0

    def queue(self, new: Tensors, past: Tensors, seen_B: Tensor) -> Tensors:
        """Return the rings in order of position joined with the call's tokens, (B, slots + T, ..) each: entry i is the
        token at position seen - slots + i."""
        index_BS = oldest_first(seen_B, self.slots)
        return {
            name: torch.cat([gather_rowwise(past[f"ring.{name}"].to(t.dtype), index_BS, dim=1), t], dim=1)
            for name, t in new.items()
        }

    def recent_tokens(self, queue: Tensors) -> Tensors:
        """Return the last `window` tokens before the call and its own, (B, window + T, ..) each."""
        return {name: t[:, self.slots - self.window :] for name, t in queue.items()}

    def recent_first_tokens(self, new: Tensors) -> Tensors:
        """Return the keys and values of `recent_tokens` for rows that begin with the call."""
        return {name: F.pad(new[name], (0, 0, 0, 0, self.window, 0)) for name in "kv"}

    def first_sinks(self, new: Tensors) -> Tensors:
        """Return the keys and values of the sinks, (B, sinks, G, .), of rows that begin with the call and fill them."""
        return {name: new[name][:, : self.sinks] for name in "kv"}

    def delayed_tokens(self, queue: Tensors) -> Tensors:
        """Return the tokens that enter the linear branch in this call: entry i just before query i reads."""
        return {name: t[:, : t.shape[1] - self.window] for name, t in self.recent_tokens(queue).items()}

    def next_rings(self, queue: Tensors, seen_B: Tensor, unpadder: Unpadder) -> Tensors:
        """Return the rings after the call's tokens, under their names in the state.

        Slot s holds the latest position p with p mod slots = s.
        """
        if not self.slots:
            return {f"ring.{name}": t[:, :0] for name, t in queue.items()}
        slot_S = torch.arange(self.slots, device=seen_B.device)
        last_B1 = (seen_B + unpadder.count_B - 1).unsqueeze(1)
        index_BS = unpadder.count_B.unsqueeze(1) + self.slots - 1 - (last_B1 - slot_S) % self.slots
        return {f"ring.{name}": gather_rowwise(t, index_BS, dim=1) for name, t in queue.items()}

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

        In the given rows, entry i pairs query i with the token written before it, which early in a sequence is a sink
        or does not exist. The mask expects written tokens only, so those entries are shifted out and positions count
        from the first token behind the sinks.
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


def oldest_first(seen_B: Tensor, slots: int) -> Tensor:
    """Return the slots of a ring in order of position, (B, slots): entry i holds the token at position seen - slots +
    i.
    """
    index_BS = seen_B.unsqueeze(1) + torch.arange(slots, device=seen_B.device)
    return index_BS % slots if slots else index_BS


def rings_to_queues(tensors: Tensors, seen_B: Tensor) -> Tensors:
    """Return a mixer's state as files store it: ring.* hold the last `window` tokens, (B, window, ..), the latest token
    last.
    """
    stored = dict(tensors)
    for name, t in tensors.items():
        if name.startswith("ring.") and t.shape[1]:
            stored[name] = gather_rowwise(t, oldest_first(seen_B, t.shape[1])[:, 1:], dim=1)
    return stored


def queues_to_rings(stored: Tensors, seen_B: Tensor) -> Tensors:
    """Return the tensors of a mixer's state from those in a file; the inverse of `rings_to_queues`."""
    tensors = dict(stored)
    for name, t in stored.items():
        if name.startswith("ring.") and t.shape[1]:
            slots = t.shape[1] + 1
            all_BS = torch.cat([torch.zeros_like(t[:, :1]), t], dim=1)  # the extra slot is written before it is read
            index_BS = (torch.arange(slots, device=seen_B.device) - seen_B.unsqueeze(1)) % slots
            tensors[name] = gather_rowwise(all_BS, index_BS, dim=1)
    return tensors


class RecentAndSinks(NamedTuple):
    """Keys or values of the softmax branch. recent: of the ring and the call, (B, G, window + T, .); sinks: (B, G,
    sinks, .).
    """

    recent: Tensor
    sinks: Tensor


class WindowTokens(NamedTuple):
    """What a window reads of stored tokens and those of a call. recent: keys and values of the X blocks of queries, (X,
    Y, G, .); sinks: theirs, (X, sinks, G, .); far: what is written to the states, (1, L, ..)."""

    recent: Tensors
    sinks: Tensors
    far: Tensors


@dispatched
def gather_window(
    k_NGK: Tensor, new: Tensors, pool: Tensors, page_R: Tensor, plan: WindowPlan, far: Sequence[str]
) -> WindowTokens:
    """Return what pieces of several sequences read of their windows. k_NGK: the keys of `new`, the tokens (N, ..) of the
    pieces by name; pool: rings and sinks (pages, slots, ..), of which sequence r has those at page_R[r]. far: names of
    what is written to the states. A kernel may replace this function.
    """
    recent, written, numbers = {}, {}, plan.near_XY.numel()
    for name, t in new.items():
        stored = t
        if plan.reads_rings:
            stored = torch.cat([pool[f"ring.{name}"][page_R].flatten(0, 1).to(t.dtype), t])
        if name in ("k", "v"):
            taken = stored[plan.near_far_T[2:] if name in far else plan.near_XY.flatten()]
            recent[name] = taken[:numbers].unflatten(0, plan.near_XY.shape)
            if name in far:
                written[name] = taken[numbers:].unsqueeze(0)
        elif name in far:
            written[name] = stored[plan.far_written_L].unsqueeze(0)
    sinks = {}
    for name in ("k", "v"):
        t = new[name]
        if plan.reads_sinks:
            t = torch.cat([pool[f"sink.{name}"][page_R].flatten(0, 1).to(t.dtype), t])
        sinks[name] = t[plan.sink_XK]
    return WindowTokens(recent, sinks, written)


@dispatched
def store_window(k_NGK: Tensor, new: Tensors, pool: Tensors, page_R: Tensor, plan: WindowPlan) -> None:
    """Store the tokens of pieces in their rings and sinks, in place. Arguments as in `gather_window`."""
    for part, places, names in (("ring", plan.to_rings, tuple(new)), ("sink", plan.to_sinks, ("k", "v"))):
        if not len(places.token_W):
            continue
        page_W = page_R[places.request_W]
        for name in names:
            slots = pool[f"{part}.{name}"]
            slots[page_W, places.slot_W] = new[name][places.token_W].to(slots.dtype)


class LocalOutput(NamedTuple):
    """Output of the softmax branch, float32 (float64 of float64 inputs).

    out: softmax-weighted values, (B, G, J, T, V). lse: log-sum-exp of the scores of each query, (B, G, J, T). largest:
    largest score of each query, (B, G, J, T). lse and largest are None if they were not asked for.
    """

    out: Tensor
    lse: Tensor | None
    largest: Tensor | None

    def sums(self) -> Tensor:
        """Return sum exp(score - largest) v and, as the last column, sum exp(score - largest): (B, G, J, T, V + 1)."""
        assert self.largest is not None and self.lse is not None, (
            "the largest scores are missing; call local_attention with with_largest=True"
        )
        total_BGJT1 = torch.exp(self.lse - self.largest).unsqueeze(-1)
        return torch.cat([self.out * total_BGJT1, total_BGJT1], dim=-1)


@dispatched
def local_attention(
    q_BGJTK: Tensor,
    keys: RecentAndSinks,
    values: RecentAndSinks,
    seen_B: Tensor,
    shape: AttentionShape,
    block: int,
    *,
    with_largest: bool = False,
) -> LocalOutput:
    """Return the output of the softmax branch.

    seen_B: tokens of each row before this call. block: queries per block; each block attends to window + block keys.
    with_largest: also return the largest scores. A kernel may replace this function.
    """
    length, sinks = q_BGJTK.shape[3], keys.sinks.shape[2]
    window = keys.recent.shape[2] - length
    block = min(length, block)
    count = -(-length // block)
    seen_BNCX = _visible_slots(seen_B, window, sinks, count, block)
    return attend_visible_slots(q_BGJTK, keys, values, seen_BNCX, shape, with_largest=with_largest)


def attend_visible_slots(
    q_BGJTK: Tensor,
    keys: RecentAndSinks,
    values: RecentAndSinks,
    seen_BNCX: Tensor,
    shape: AttentionShape,
    *,
    with_largest: bool,
) -> LocalOutput:
    """Return the output of softmax attention of N blocks of C queries, each over its visible slots, see
    `_visible_slots`.

    Arguments as in `local_attention`.
    """
    length, dtype = q_BGJTK.shape[3], torch.promote_types(q_BGJTK.dtype, torch.float32)
    window, sinks = keys.recent.shape[2] - length, keys.sinks.shape[2]
    count, block = seen_BNCX.shape[1:3]
    q_BGJNCK = _pad_length(q_BGJTK.to(dtype), count * block).unflatten(3, (count, block)) * shape.scaling
    k_BGNXK, v_BGNXV = (
        _pad_length(t.recent.to(dtype), window + count * block).unfold(2, window + block, block).mT
        for t in (keys, values)
    )
    band_BGJNCX = torch.einsum("bgjnck,bgnxk->bgjncx", q_BGJNCK, k_BGNXK)
    sink_BGJNCS = torch.einsum("bgjnck,bgsk->bgjncs", q_BGJNCK, keys.sinks.to(dtype))
    score = apply_softcap(torch.cat([sink_BGJNCS, band_BGJNCX], dim=-1), shape.softcap)
    weight, largest = masked_exp(score, seen_BNCX[:, None, None])
    out = torch.einsum("bgjncx,bgnxv->bgjncv", weight[..., sinks:], v_BGNXV)
    out = out + torch.einsum("bgjncs,bgsv->bgjncv", weight[..., :sinks], values.sinks.to(dtype))
    total = weight.sum(-1, keepdim=True)
    parts = (out / total, largest + total.log(), largest)
    out, lse, largest = (t.flatten(3, 4)[:, :, :, :length] for t in parts)
    return LocalOutput(out, lse.squeeze(-1), largest.squeeze(-1) if with_largest else None)


def attend_slots(
    q_BGJTK: Tensor, k_BXGK: Tensor, v_BXGV: Tensor, visible_BX: Tensor, shape: AttentionShape, *, with_largest: bool
) -> LocalOutput:
    """Return the output of the softmax branch of one token per row (T = 1), over slots in any order, in float32 or
    wider.

    Without a softcap and the largest scores it is one call of PyTorch's attention, which reads keys and values as they
    lie.
    """
    dtype = torch.promote_types(q_BGJTK.dtype, torch.float32)
    k_BGXK, v_BGXV = (t.transpose(1, 2).to(dtype) for t in (k_BXGK, v_BXGV))
    if with_largest or shape.softcap is not None:
        keys, values = (RecentAndSinks(t, t[:, :, :0]) for t in (k_BGXK, v_BGXV))
        visible_BNCX = visible_BX[:, None, None]
        return attend_visible_slots(q_BGJTK, keys, values, visible_BNCX, shape, with_largest=with_largest)
    q_BGJK, visible_B11X = q_BGJTK.squeeze(3).to(dtype), visible_BX[:, None, None]
    out_BGJV = F.scaled_dot_product_attention(q_BGJK, k_BGXK, v_BGXV, attn_mask=visible_B11X, scale=shape.scaling)
    return LocalOutput(out_BGJV.unsqueeze(3), None, None)


def _visible_slots(seen_B: Tensor, window: int, sinks: int, count: int, block: int) -> Tensor:
    """Return whether query c of block n attends to each of the S sinks and W + C recent tokens, (B, N, C, S + W +
    C).
    """
    device = seen_B.device
    start_BN11 = (seen_B.unsqueeze(1) + block * torch.arange(count, device=device))[:, :, None, None]
    row_C1 = torch.arange(block, device=device).unsqueeze(1)
    slot_X = torch.arange(window + block, device=device)
    near_CX = (slot_X > row_C1) & (slot_X <= row_C1 + window)
    band_BNCX = near_CX & (start_BN11 - window + slot_X >= sinks)  # a sink within the window counts once
    sink_BNCS = torch.arange(sinks, device=device) <= start_BN11 + row_C1
    return torch.cat([sink_BNCS, band_BNCX], dim=-1)


def masked_exp(score: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return (exp(score - the row's maximum over visible keys), and 0 for keys that are not visible; that maximum)."""
    score = score.masked_fill(~seen, -torch.inf)
    largest = score.amax(-1, keepdim=True).clamp_min(torch.finfo(score.dtype).min)
    return torch.exp(score - largest), largest


def apply_softcap(score: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(score / softcap), or the score if softcap is None."""
    return score if softcap is None else softcap * torch.tanh(score / softcap)


def _pad_length(t: Tensor, length: int) -> Tensor:
    """Pad axis -2 at its end with zeros up to that length."""
    return F.pad(t, (0, 0, 0, length - t.shape[-2]))


class _JoinedBranches(torch.autograd.Function):
    """near * near_H1 + far * far_H1 with one pass over the far branch, whose tokens are the last ones."""

    @staticmethod
    def forward(ctx: Any, near_BTHV: Tensor, far_BTHV: Tensor, near_H1: Tensor, far_H1: Tensor) -> Tensor:
        """Return the sum (B, T, H, V)."""
        ctx.save_for_backward(near_BTHV, far_BTHV, near_H1, far_H1)
        out_BTHV = near_BTHV * near_H1
        out_BTHV[:, out_BTHV.shape[1] - far_BTHV.shape[1] :].addcmul_(far_BTHV, far_H1)
        return out_BTHV

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of branches and weights."""
        near_BTHV, far_BTHV, near_H1, far_H1 = ctx.saved_tensors
        needs, (grad_BTHV,) = ctx.needs_input_grad, grads
        late_BTHV = grad_BTHV[:, near_BTHV.shape[1] - far_BTHV.shape[1] :]
        return (
            grad_BTHV * near_H1 if needs[0] else None,
            late_BTHV * far_H1 if needs[1] else None,
            (grad_BTHV * near_BTHV).sum_to_size(near_H1.shape) if needs[2] else None,
            (late_BTHV * far_BTHV).sum_to_size(far_H1.shape) if needs[3] else None,
        )


def join_branches(near_BTHV: Tensor, far_BTHV: Tensor, near_H1: Tensor, far_H1: Tensor) -> Tensor:
    """Return near * near_H1 + far * far_H1, (B, T, H, V). far_BTHV: of the last tokens; earlier ones have none."""
    apply: Any = _JoinedBranches.apply  # this function has no types
    joined: Tensor = apply(near_BTHV, far_BTHV, near_H1, far_H1)
    return joined


@dispatched
def join_and_gate(
    near_BHTV: Tensor, far_BHLV: Tensor, near_H: Tensor, far_H: Tensor, gate_BTHV: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return (near * near_H + far * far_H) * 2 sigmoid(gate), (B, T, H, V).

    far_BHLV: of the last L tokens. gate_BTHV: logits, None for no gate; its last axis may be 1. dtype: in which the
    caller reads the output; kernels return it in that dtype, the reference in float32 or float64.
    """
    near_BTHV, far_BTHV = near_BHTV.transpose(1, 2), far_BHLV.transpose(1, 2).to(near_BHTV.dtype)
    near_H1, far_H1 = (weight_H.to(far_BTHV.dtype).unsqueeze(-1) for weight_H in (near_H, far_H))
    out_BTHV = join_branches(near_BTHV, far_BTHV, near_H1, far_H1)
    return out_BTHV if gate_BTHV is None else apply_gate(out_BTHV, gate_BTHV)


def apply_gate(y_BTHV: Tensor, gate_BTHV: Tensor) -> Tensor:
    """Return 2 sigmoid(gate) y, (B, T, H, V)."""
    return y_BTHV * (2 * gate_BTHV.to(y_BTHV.dtype).sigmoid())
