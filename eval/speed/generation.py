"""Time, memory and cache of decoding, measured on any causal language model: what `surgery bench serve` and the suite `speed` share.

A batch of B rows that have read T tokens each is made from one row: its cache is copied to every row, which costs no prefill of
B x T tokens and changes no time, because the time of a step does not depend on the values in the cache.
"""

from __future__ import annotations

import copy
import inspect
import time
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """Keys and values of B rows with room for further tokens, so that a step writes one token and does not copy the others.

    Args:
        row: layer of one row with keys and values (1, G, T, K).
        batch: B.
        room: tokens that can be appended.
    """

    def __init__(self, row: DynamicLayer, batch: int, room: int):
        super().__init__()
        keys, values = row.keys, row.values
        if keys is None or values is None:
            raise ValueError("a row must have read tokens before it is copied")
        self.seen = self.tokens = keys.shape[2]
        self.lazy_initialization(keys, values)
        self.buffers = self._with_room(keys, batch, room), self._with_room(values, batch, room)
        self.show(self.seen)

    def _with_room(self, row_1GTK: Tensor, batch: int, room: int) -> Tensor:
        buffer = row_1GTK.new_empty(batch, row_1GTK.shape[1], self.seen + room, row_1GTK.shape[3])
        buffer[:, :, : self.seen] = row_1GTK
        return buffer

    def show(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Make the first `tokens` tokens the content of the layer and return their keys and values (B, G, tokens, K)."""
        self.tokens = tokens
        keys, values = (buffer[:, :, :tokens] for buffer in self.buffers)
        self.keys, self.values = keys, values
        return keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, G, N, K) behind the content, and return all of it."""
        start, stop = self.tokens, self.tokens + key_states.shape[2]
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, start:stop] = new
        return self.show(stop)


def repeat_rows(cache: Any, batch: int, room: int) -> Any:
    """Return a cache of `batch` rows equal to the one row of `cache`, which stays as it is. Plain layers get `room` further tokens."""
    if not hasattr(cache, "layers"):  # a model's own kind of cache
        rows = copy.deepcopy(cache)
        if batch > 1:
            rows.batch_repeat_interleave(batch)
        return rows
    rows = copy.copy(cache)
    rows.layers = []
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            rows.layers.append(PreallocatedLayer(layer, batch, room))
        else:
            rows.layers.append(copy.deepcopy(layer))
            rows.layers[-1].batch_repeat_interleave(batch)
    return rows


def rewind(cache: Any) -> None:
    """Remove the tokens that were appended to preallocated layers."""
    for layer in cache.layers:
        if isinstance(layer, PreallocatedLayer):
            layer.show(layer.seen)


@torch.inference_mode()
def prefill(model: Any, ids_BT: Tensor, cache: Any = None) -> Any:
    """Return the model's output on a prompt, with the logits of the last token only, where the model can leave out the others."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return model(input_ids=ids_BT, past_key_values=cache, use_cache=True, **last)


@torch.inference_mode()
def decode(model: Any, token_B1: Tensor, cache: Any, steps: int) -> float:
    """Write `steps` tokens greedily after `token_B1` and return the ms of a step."""
    began = synchronized_time(token_B1.device)
    for _ in range(steps):
        out = model(input_ids=token_B1, past_key_values=cache, use_cache=True)
        token_B1 = out.logits[:, -1:].argmax(-1)
    return 1e3 * (synchronized_time(token_B1.device) - began) / steps


def synchronized_time(device: torch.device) -> float:
    """Return the time in seconds after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def cache_bytes(cache: Any, allocated: bool = True) -> int:
    """Return the bytes of keys, values and mixer states.

    allocated: whether room of preallocated layers for further tokens counts; False: only what the cache holds.
    """
    total = 0
    for layer in getattr(cache, "layers", []):
        if (state := getattr(layer, "state", None)) is not None and hasattr(state, "nbytes"):
            total += state.nbytes()
        else:
            tensors = getattr(layer, "keys", None), getattr(layer, "values", None)
            tensors = getattr(layer, "buffers", tensors) if allocated else tensors
            total += sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
    return total


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that memory ran out."""
    from accelerate.utils.memory import should_reduce_batch_size

    return should_reduce_batch_size(error)
