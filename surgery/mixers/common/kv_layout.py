"""Key slots of softmax attention: rows packed so that padding comes first, caches that grow behind it and are cut.

Packed, the distance of two slots is the distance of their positions in every row, and what a cache no longer needs
are its first slots. Positions are counted in each row over its real tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from surgery.core.dispatch import dispatched
from surgery.mixers.base import MixerInputs, MixerState


class KVLayout(NamedTuple):
    """T queries are the last of S slots; slot s holds position end - S + s, and nothing where that is negative.

    end_B: tokens seen after this call, (1,) where rows are alike; holes: whether some slot may hold nothing.
    """

    end_B: Tensor
    queries: int
    slots: int
    holes: bool

    def positions(self, low: int, high: int) -> Tensor:
        """(B, slots low .. high)"""
        return self.end_B[:, None] + torch.arange(low - self.slots, high - self.slots, device=self.end_B.device)

    def reach(self, start: int, stop: int, extent: int | None, causal: bool) -> tuple[int, int]:
        """Slots that queries start .. stop can see within the extent."""
        first, last = self.slots - self.queries + start, self.slots - self.queries + stop
        low = 0 if extent is None else max(0, first - extent + 1)
        ahead = self.slots if extent is None else min(self.slots, last + extent - 1)
        return low, last if causal else ahead


def positions_from_mask(valid_BT: Tensor) -> Tensor:
    """position_BT: how many real tokens of the row come before."""
    return valid_BT.long().cumsum(1) - 1


def token_positions(inputs: MixerInputs) -> tuple[Tensor, Tensor | None]:
    """position_BT and which slots are real (None: all), for definitions."""
    if inputs.valid_BT is None:
        return torch.arange(inputs.q_BHTK.shape[2], device=inputs.q_BHTK.device)[None], None
    return positions_from_mask(inputs.valid_BT), inputs.valid_BT


def drop_full_mask(valid_BT: Tensor | None) -> Tensor | None:
    """None where nothing is padding."""
    return None if valid_BT is None or bool(valid_BT.all()) else valid_BT


def left_pad(inputs: MixerInputs) -> tuple[MixerInputs, Tensor | None]:
    """Each row's padding moved to its front, and the index that puts outputs back, or None where nothing moves."""
    valid_BT = drop_full_mask(inputs.valid_BT)
    if valid_BT is None:
        return replace(inputs, valid_BT=None), None
    order_BT = valid_BT.to(torch.int8).argsort(dim=1, stable=True)
    mask = inputs.mask_BHTS
    if mask is not None:
        mask = mask.expand(order_BT.shape[0], *mask.shape[1:])
        mask = gather_slots(mask, order_BT, 2)[..., -order_BT.shape[1] :]
        mask = gather_slots(mask, order_BT, 3)
    q, k, v = (gather_slots(x, order_BT, 2) for x in (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV))
    valid = gather_slots(valid_BT, order_BT, 1)
    return replace(
        inputs,
        q_BHTK=q,
        k_BGTK=k,
        v_BGTV=v,
        x_BTD=gather_slots(inputs.x_BTD, order_BT, 1),
        valid_BT=valid,
        mask_BHTS=mask,
    ), order_BT.argsort(dim=1)


def gather_slots(x: Tensor, index_BN: Tensor, dim: int) -> Tensor:
    """x of each row at that row's indices along `dim`."""
    shape = [index_BN.shape[0]] + [1] * (x.dim() - 1)
    shape[dim] = index_BN.shape[1]
    return x.gather(dim, index_BN.view(shape).expand(*x.shape[:dim], index_BN.shape[1], *x.shape[dim + 1 :]))


MIN_BUFFER_SLOTS = 256  # slots; fewer are copied at every call
MIN_FREE_SLOTS = 64  # slots of a new buffer, at least


class KVBuffer:
    """A buffer with free slots behind those that states look at. A state whose slots end where the written ones end
    may be followed by the next ones in place; whatever else goes on from an older state is copied to a new buffer, so
    that every state stays as it was."""

    def __init__(self, old_BGSX: Tensor, new_BGTX: Tensor):
        slots = old_BGSX.shape[2] + new_BGTX.shape[2]
        # Whole units of 16: rows stay where wide copies can begin.
        size = -(-(slots + max(MIN_FREE_SLOTS, slots // 32)) // 16) * 16
        self.buffer = new_BGTX.new_empty(*new_BGTX.shape[:2], size, new_BGTX.shape[3])
        self.n_written = old_BGSX.shape[2]
        self.buffer[:, :, : self.n_written] = old_BGSX

    def fits(self, stop: int, new_BGTX: Tensor) -> bool:
        has_space = stop == self.n_written and stop + new_BGTX.shape[2] <= self.buffer.shape[2]
        ours = torch.is_inference_mode_enabled() or not self.buffer.is_inference()
        return has_space and ours and self.buffer.dtype == new_BGTX.dtype and self.buffer.device == new_BGTX.device

    def view(self, start: int, stop: int) -> Tensor:
        """Those slots, as a tensor that knows where it lies."""
        view = self.buffer[:, :, start:stop]
        view.room = (self, start, stop)  # type: ignore[attr-defined]
        return view


@dispatched
def write_slots(new_BGTX: Tensor, buffers: list[Tensor], starts: list[int], news: list[Tensor]) -> None:
    """Writes each of `news`, of which new_BGTX is the first, into its buffer from its start on."""
    for buffer, start, new in zip(buffers, starts, news):
        buffer[:, :, start : start + new.shape[2]] = new


def append_slots(old_BGSX: Tensor, new_BGTX: Tensor, count_B: Tensor | None) -> Tensor:
    return append_all_slots([old_BGSX], [new_BGTX], count_B)[0]


def append_all_slots(olds: list[Tensor], news: list[Tensor], count_B: Tensor | None) -> list[Tensor]:
    """The slots of each and its new ones, packed again; count_B: real tokens among the new (None: all). Long ones are not
    copied at every call: they lie in a Room, and what is new to buffers is written at once."""
    both, writes = [], []
    for old, new in zip(olds, news):
        learns = torch.is_grad_enabled() and (old.requires_grad or new.requires_grad)
        if count_B is not None or old.shape[2] < MIN_BUFFER_SLOTS or learns or torch.compiler.is_compiling():
            both.append(copy_and_append(old, new, count_B))
            continue
        room, start, stop = getattr(old, "room", (None, 0, 0))
        if room is None or not room.fits(stop, new):
            room, start = KVBuffer(old, new), 0
        writes.append((room.buffer, room.n_written, new))
        room.n_written += new.shape[2]
        both.append(room.view(start, room.n_written))
    if writes:
        buffers, starts, late = map(list, zip(*writes))
        write_slots(late[0], buffers, starts, late)
    return both


def copy_and_append(old_BGSX: Tensor, new_BGTX: Tensor, count_B: Tensor | None) -> Tensor:
    if old_BGSX.shape[2] == 0:
        return new_BGTX.clone()  # what is given may be a view of far more: of all levels, of a fused q, k, v
    both = torch.cat([old_BGSX.to(new_BGTX.dtype), new_BGTX], 2)
    if count_B is None:
        return both
    slot_S = torch.arange(both.shape[2], device=both.device)
    shift_B1 = (new_BGTX.shape[2] - count_B)[:, None]
    moved_BS = torch.where(slot_S >= old_BGSX.shape[2] + shift_B1, slot_S, (slot_S - shift_B1).clamp_min(0))
    return gather_slots(both, moved_BS, 2)


def last_slots(x_BGSX: Tensor, slots: int) -> Tensor:
    """The last slots, in storage of their own: a view would keep what was evicted alive; in a Room, which is given up
    when it is full, they stay."""
    if slots >= x_BGSX.shape[2]:
        return x_BGSX
    room, _, stop = getattr(x_BGSX, "room", (None, 0, 0))
    if room is not None and slots >= MIN_BUFFER_SLOTS:
        return room.view(stop - slots, stop)
    return x_BGSX[:, :, x_BGSX.shape[2] - slots :].clone()


def make_kv_layout(inputs: MixerInputs, state: MixerState | None, slots: int) -> tuple[KVLayout, Tensor | None]:
    """The layout of packed inputs behind `slots` remembered ones, and how many of each row's tokens are real."""
    length, device = inputs.q_BHTK.shape[2], inputs.q_BHTK.device
    count_B = None if inputs.valid_BT is None else inputs.valid_BT.sum(1)
    seen_B = torch.zeros(1, dtype=torch.long, device=device) if state is None else state.seen_B
    end_B = seen_B + (length if count_B is None else count_B)
    return KVLayout(end_B, length, slots + length, holes=count_B is not None or slots > 0), count_B
