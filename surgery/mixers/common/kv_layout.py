"""Layout of keys and values in softmax attention: left padding, caches that grow at the end and are cut at the front.

With left padding, the distance of two slots is the distance of their positions in every row, and the keys that a cache
no longer needs are its first slots. A position counts the real tokens of the row before the token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from surgery.core.dispatch import dispatched
from surgery.mixers.base import MixerInputs, MixerState
from surgery.mixers.padding import gather_rowwise


class KVLayout(NamedTuple):
    """Positions of the key slots. The queries are the last slots; slot s holds position end - slots + s, or is empty if
    that is negative.

    end_B: number of real tokens after this call, (1,) if it is the same for all rows. queries, slots: numbers of both.
    holes: whether slots may be empty.
    """

    end_B: Tensor
    queries: int
    slots: int
    holes: bool

    def positions(self, low: int, high: int) -> Tensor:
        """Return the positions of slots low .. high - 1, (B, high - low)."""
        return self.end_B[:, None] + torch.arange(low - self.slots, high - self.slots, device=self.end_B.device)

    def reach(self, start: int, stop: int, extent: int | None, causal: bool) -> tuple[int, int]:
        """Return (first, stop) of the slots within `extent` of the queries start .. stop - 1. extent None: all
        slots.
        """
        first, last = self.slots - self.queries + start, self.slots - self.queries + stop
        low = 0 if extent is None else max(0, first - extent + 1)
        ahead = self.slots if extent is None else min(self.slots, last + extent - 1)
        return low, last if causal else ahead


def positions_from_mask(valid_BT: Tensor) -> Tensor:
    """Return position_BT: the number of real tokens before each token of its row."""
    return valid_BT.long().cumsum(1) - 1


def token_positions(inputs: MixerInputs) -> tuple[Tensor, Tensor | None]:
    """Return (position_BT, valid_BT or None) of sequences from their start; position is (1, T) without padding."""
    if inputs.valid_BT is None:
        return torch.arange(inputs.q_BHTK.shape[2], device=inputs.q_BHTK.device)[None], None
    return positions_from_mask(inputs.valid_BT), inputs.valid_BT


def drop_full_mask(valid_BT: Tensor | None) -> Tensor | None:
    """Return None if no token is padding, else the mask. Synchronizes with the device.

    Compiled and exported programs keep the mask: they hold for any mask of its shape.
    """
    if valid_BT is None or torch.compiler.is_compiling():
        return valid_BT
    return None if bool(valid_BT.all()) else valid_BT


def left_pad(inputs: MixerInputs) -> tuple[MixerInputs, Tensor | None]:
    """Return (the inputs with the padding of each row moved to its front, the index that restores the order of
    outputs).

    The index is None without padding.
    """
    valid_BT = drop_full_mask(inputs.valid_BT)
    if valid_BT is None:
        return replace(inputs, valid_BT=None), None
    order_BT = valid_BT.to(torch.int8).argsort(dim=1, stable=True)
    mask = inputs.mask_BHTS
    if mask is not None:
        mask = mask.expand(order_BT.shape[0], *mask.shape[1:])
        mask = gather_rowwise(mask, order_BT, 2)[..., -order_BT.shape[1] :]
        mask = gather_rowwise(mask, order_BT, 3)
    q, k, v = (gather_rowwise(x, order_BT, 2) for x in (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV))
    valid = gather_rowwise(valid_BT, order_BT, 1)
    return replace(
        inputs,
        q_BHTK=q,
        k_BGTK=k,
        v_BGTV=v,
        x_BTD=gather_rowwise(inputs.x_BTD, order_BT, 1),
        valid_BT=valid,
        mask_BHTS=mask,
    ), order_BT.argsort(dim=1)


MIN_BUFFER_SLOTS = 256  # caches with fewer slots are copied at every call
MIN_FREE_SLOTS = 64  # minimum number of free slots in a new buffer


class KVBuffer:
    """A buffer of keys or values with free slots at its end, of which states hold views.

    A state that ends at the last written slot grows in place. Any other state is copied to a new buffer when it grows,
    so that states stay values: growing one does not change another.
    """

    def __init__(self, old_BGSX: Tensor, new_BGTX: Tensor):
        slots = old_BGSX.shape[2] + new_BGTX.shape[2]
        # A multiple of 16, so that rows stay aligned for vectorized copies.
        size = -(-(slots + max(MIN_FREE_SLOTS, slots // 32)) // 16) * 16
        self.buffer = new_BGTX.new_empty(*new_BGTX.shape[:2], size, new_BGTX.shape[3])
        self.n_written = old_BGSX.shape[2]
        self.buffer[:, :, : self.n_written] = old_BGSX

    def fits(self, stop: int, new_BGTX: Tensor) -> bool:
        """Return whether a view that ends at slot `stop` can grow by the new slots in place."""
        has_space = stop == self.n_written and stop + new_BGTX.shape[2] <= self.buffer.shape[2]
        is_writable = torch.is_inference_mode_enabled() or not self.buffer.is_inference()
        return (
            has_space and is_writable and self.buffer.dtype == new_BGTX.dtype and self.buffer.device == new_BGTX.device
        )

    def view(self, start: int, stop: int) -> Tensor:
        """Return slots start .. stop - 1, with a reference to this buffer (see `_location`)."""
        view = self.buffer[:, :, start:stop]
        view.kv_buffer = (self, start, stop)  # type: ignore[attr-defined]
        return view


def _location(view: Tensor) -> tuple[KVBuffer | None, int, int]:
    """Return (buffer, start, stop) of a view of a KVBuffer; (None, 0, 0) for any other tensor."""
    location: tuple[KVBuffer | None, int, int] = getattr(view, "kv_buffer", (None, 0, 0))
    return location


def is_view_of_buffer(slots_BGSX: Tensor) -> bool:
    """Return whether keys or values are slots of a `KVBuffer`, in which a later state has them in the same place."""
    return _location(slots_BGSX)[0] is not None


def drop_later_slots(earlier: MixerState, dropped: MixerState) -> None:
    """Let `earlier` grow in place again, in the buffers that it shares with `dropped`.

    dropped: a later state, which is not read again.
    """
    for name, view in earlier.tensors.items():
        buffer, _, stop = _location(view)
        if buffer is not None and name in dropped.tensors and buffer is _location(dropped.tensors[name])[0]:
            buffer.n_written = stop


@dispatched
def write_slots(new_BGTX: Tensor, buffers: list[Tensor], starts: list[int], news: list[Tensor]) -> None:
    """Write each tensor of `news` into its buffer from slot `start` on, in one kernel launch if there is a kernel.

    new_BGTX: news[0]; dispatch looks at its device.
    """
    for buffer, start, new in zip(buffers, starts, news):
        buffer[:, :, start : start + new.shape[2]] = new


def append_slots(old_BGSX: Tensor, new_BGTX: Tensor, count_B: Tensor | None) -> Tensor:
    """Return the old slots with the new ones appended, left-padded. See `append_all_slots`."""
    return append_all_slots([old_BGSX], [new_BGTX], count_B)[0]


def append_all_slots(olds: list[Tensor], news: list[Tensor], count_B: Tensor | None) -> list[Tensor]:
    """Return each of the old tensors (B, G, S, X) with its new slots (B, G, T, X) appended, left-padded.

    count_B: number of real tokens among the new ones (None: all). Long tensors are not copied: they are views of a
    `KVBuffer`, and only the new slots are written, in one launch for all tensors.
    """
    both, writes = [], []
    for old, new in zip(olds, news):
        needs_grad = torch.is_grad_enabled() and (old.requires_grad or new.requires_grad)
        if count_B is not None or old.shape[2] < MIN_BUFFER_SLOTS or needs_grad or torch.compiler.is_compiling():
            both.append(copy_and_append(old, new, count_B))
            continue
        buffer, start, stop = _location(old)
        if buffer is None or not buffer.fits(stop, new):
            buffer, start = KVBuffer(old, new), 0
        writes.append((buffer.buffer, buffer.n_written, new))
        buffer.n_written += new.shape[2]
        both.append(buffer.view(start, buffer.n_written))
    if writes:
        buffers, starts, late = map(list, zip(*writes))
        write_slots(late[0], buffers, starts, late)
    return both


def copy_and_append(old_BGSX: Tensor, new_BGTX: Tensor, count_B: Tensor | None) -> Tensor:
    """Return a new tensor of the old and the new slots, left-padded."""
    if old_BGSX.shape[2] == 0:
        return (
            new_BGTX.clone()
        )  # new_BGTX may be a view of a larger tensor (a fused q, k, v), which it would keep alive
    both = torch.cat([old_BGSX.to(new_BGTX.dtype), new_BGTX], 2)
    if count_B is None:
        return both
    slot_S = torch.arange(both.shape[2], device=both.device)
    shift_B1 = (new_BGTX.shape[2] - count_B)[:, None]
    moved_BS = torch.where(slot_S >= old_BGSX.shape[2] + shift_B1, slot_S, (slot_S - shift_B1).clamp_min(0))
    return gather_rowwise(both, moved_BS, 2)


def last_slots(x_BGSX: Tensor, slots: int) -> Tensor:
    """Return the last `slots` slots.

    A copy, because a view would keep the evicted slots in memory. Views of a `KVBuffer` stay views: the buffer is
    replaced when it is full.
    """
    if slots >= x_BGSX.shape[2]:
        return x_BGSX
    buffer, _, stop = _location(x_BGSX)
    if buffer is not None and slots >= MIN_BUFFER_SLOTS:
        return buffer.view(stop - slots, stop)
    return x_BGSX[:, :, x_BGSX.shape[2] - slots :].clone()


def make_kv_layout(inputs: MixerInputs, state: MixerState | None, slots: int) -> tuple[KVLayout, Tensor | None]:
    """Return (layout of left-padded inputs behind `slots` cached slots, number of real tokens per row or None: all)."""
    length, device = inputs.q_BHTK.shape[2], inputs.q_BHTK.device
    count_B = None if inputs.valid_BT is None else inputs.valid_BT.sum(1)
    seen_B = torch.zeros(1, dtype=torch.long, device=device) if state is None else state.seen_B
    end_B = seen_B + (length if count_B is None else count_B)
    return KVLayout(end_B, length, slots + length, holes=count_B is not None or slots > 0), count_B
