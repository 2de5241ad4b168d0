"""Key/value cache with slots laid out in advance, which the original and a drafter with the same weights share.

Slot s of a row holds the token of column s of the (left-padded) text. Rows may have different lengths: each call says
at which slots its tokens lie (`SlotCache.at`), so that rejected tokens are simply written over. Growing copies the
buffers only when they are full, by an eighth of their size.

B rows, T tokens of a call, S slots read, G key/value heads, K head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from surgery.core.errors import SurgeryError

MIN_FREE = 64  # slots that a new buffer has beyond those in use


@dataclass
class SlotCall:
    """Where one call writes and what it reads.

    start: slot of the call's first token, if all rows have the same; otherwise start_B, one per row. stop: slots below
    it are read, unless columns_BS lists the slots.
    """

    start: int
    start_B: Tensor | None = None
    stop: int = 0
    columns_BS: Tensor | None = None


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, (B, G, slots, K)."""

    is_compileable = (
        False  # a call reads no slot that is empty, so that one token needs no mask unless the rows' lengths differ
    )
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: SlotCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers at the first call."""
        self.keys, self.values = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the call's keys and values and return those that its queries read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        call, tokens = self.cache.call, key_states.shape[2]
        stop = max(call.stop, call.start + tokens)
        self.keys, self.values = (_grown(x, stop) for x in (self.keys, self.values))
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            _write(buffer, new, call)
        return _read(self.keys, call, stop), _read(self.values, call, stop)

    def get_seq_length(self) -> int:
        """Return the slots before the call's first token."""
        return self.cache.call.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns, offset) of masks."""
        return self.cache.call.start + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the length is unlimited."""
        return -1

    def get_max_cache_shape(self) -> int:  # get_max_length before transformers 5.20
        """Return -1: the length is unlimited."""
        return -1

    def nbytes(self) -> int:
        """Return the size of the buffers in bytes."""
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values) if x is not None)


class SlotCache(Cache):
    """A cache of SlotLayers. `call` describes the next call of the model."""

    def __init__(self, layers: int):
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])
        self.call = SlotCall(0)

    @contextmanager
    def at(self, start_B: Tensor, tokens: int, columns_BS: Tensor | None = None) -> Iterator[int]:
        """Let calls inside write `tokens` tokens per row from the slots start_B (B,) on; yields the slots that they
        read.
        """
        starts = start_B.tolist()
        stop = max(starts) + tokens
        same = min(starts) == max(starts)
        self.call = SlotCall(starts[0] if same else min(starts), None if same else start_B, stop, columns_BS)
        yield stop if columns_BS is None else columns_BS.shape[1]

    def nbytes(self) -> int:
        """Return the size of all layers in bytes."""
        return sum(layer.nbytes() for layer in self.layers)  # type: ignore[union-attr]


def _grown(buffer: Tensor, slots: int) -> Tensor:
    """Return the buffer, or a larger copy if it has fewer than `slots` slots.

    New slots are zero, because masked values must be finite.
    """
    used = buffer.shape[2]
    if slots <= used:
        return buffer
    size = slots + max(MIN_FREE, slots // 8)
    larger = buffer.new_zeros(*buffer.shape[:2], size, buffer.shape[3])
    larger[:, :, :used] = buffer
    return larger


def _write(buffer: Tensor, new: Tensor, call: SlotCall) -> None:
    if call.start_B is None:
        buffer[:, :, call.start : call.start + new.shape[2]] = new
        return
    slot_BT = call.start_B[:, None].to(buffer.device) + torch.arange(new.shape[2], device=buffer.device)
    buffer.scatter_(2, slot_BT[:, None, :, None].expand(new.shape), new)


def _read(buffer: Tensor, call: SlotCall, stop: int) -> Tensor:
    if call.columns_BS is None:
        return buffer[:, :, :stop]
    columns_BS = call.columns_BS.to(buffer.device)
    index = columns_BS[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
    return buffer.gather(2, index)


# -- which layers a model has --------------------------------------------------------------------------
def attention_windows(model: Any) -> list[int | None]:
    """Return the sliding window of each layer, None: full attention.

    Raises SurgeryError for models whose layers keep anything but keys and values, or not in every layer.
    """
    config = model.config.get_text_config(decoder=True)
    windows: list[int | None] = []
    kinds = getattr(config, "layer_types", None) or []
    if "chunked_attention" in kinds:
        raise SurgeryError(f"{type(model).__name__} has chunked attention, which the drafting loop cannot mask")
    for index, layer in enumerate(DynamicCache(config=config).layers):
        kind = type(layer)
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise SurgeryError(
                f"layer {index} of {type(model).__name__} keeps a {kind.__name__}, not keys and values of its own; "
                "drafts are verified "
                "with per-row slots of keys and values. Use model.generate(.., assistant_model=..)"
            )
        windows.append(getattr(layer, "sliding_window", None))
    if len(windows) != config.num_hidden_layers:  # filled lazily where the config has no layer types
        windows += [None] * (config.num_hidden_layers - len(windows))
    return windows


# -- masks ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sight:
    """Which earlier tokens a query sees besides itself: the last `window` tokens (None: all) and the first `sinks` of
    its row.
    """

    window: int | None = None
    sinks: int = 0

    def columns(self, slot_B: Tensor, pad_B: Tensor) -> Tensor | None:
        """Return the slots that one query per row at slot_B reads, (B, sinks + window); None: all.

        Slots may repeat or not exist.
        """
        if self.window is None:
            return None
        near_BW = slot_B[:, None] + torch.arange(1 - self.window, 1, device=slot_B.device)
        sink_BS = pad_B[:, None] + torch.arange(self.sinks, device=slot_B.device)
        return torch.cat([sink_BS, near_BW], 1).clamp_min(0).minimum(slot_B[:, None])

    def allowed(self, slot_BT: Tensor, column_BS: Tensor, pad_B: Tensor) -> Tensor:
        """Return whether the query at each slot sees the key at each column, (B, T, S)."""
        column_B1S, slot_BT1 = column_BS[:, None], slot_BT[:, :, None]
        first_B11 = pad_B[:, None, None]
        allowed = (column_B1S >= first_B11) & (column_B1S <= slot_BT1)
        if self.window is None:
            return allowed
        return allowed & ((slot_BT1 - column_B1S < self.window) | (column_B1S - first_B11 < self.sinks))

    def once(self, slot_B: Tensor, pad_B: Tensor) -> Tensor:
        """Return which entries of `columns` count, (B, sinks + window): not those before the row, nor a sink within the
        window again.
        """
        assert self.window is not None
        first_B1, low_B1 = pad_B[:, None], slot_B[:, None] + 1 - self.window
        near_BW = low_B1 + torch.arange(self.window, device=slot_B.device) >= first_B1
        sink_BS = first_B1 + torch.arange(self.sinks, device=slot_B.device) < low_B1
        return torch.cat([sink_BS, near_BW], 1)


def additive(allowed_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that is added to scores, (B, 1, T, S): 0 where allowed, else the lowest number."""
    zeros = torch.zeros(allowed_BTS.shape, dtype=dtype, device=allowed_BTS.device)
    return zeros.masked_fill(~allowed_BTS, torch.finfo(dtype).min)[:, None]


def masks_by_type(allowed: Tensor, distance_BTS: Tensor, windows: list[int | None], dtype: torch.dtype) -> Any:
    """Return the 4-D mask of all layers, or a dict of masks by layer type where layers have different windows.

    allowed (B, T, S): what is visible apart from the layers' own windows. distance_BTS: tokens between query and key.
    """
    made = {w: additive(allowed if w is None else allowed & (distance_BTS < w), dtype) for w in set(windows)}
    if len(made) == 1:
        return next(iter(made.values()))
    return {"full_attention" if w is None else "sliding_attention": mask for w, mask in made.items()}
