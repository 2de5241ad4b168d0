"""Time, memory and cache of decoding, measured on any causal language model: what `surgery bench serve` and the suite
`speed` share.

A batch of B rows that have read T tokens each is made from one row: its cache is copied to every row, which costs no
prefill of B x T tokens and changes no time, because the time of a step does not depend on the values in the cache.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer

from surgery.mixers import MixerState
from surgery.mixers.common.kv_layout import drop_later_slots, is_view_of_buffer
from surgery.modeling.cache import MixerCacheLayer, mixer_modules
from surgery.modeling.cuda_graph import can_capture, record_graph, reserve_buckets

FULL_ROWS = "surgery_full_rows"  # attention implementation, see `full_rows_attention`
MOST_REPEATS = 4096  # tokens that a repeated step may write: log-linear states have room for them


class PreallocatedLayer(DynamicLayer):
    """Keys and values of B rows with room for further tokens, so that a step writes one token and does not copy the
    others.

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
        """Make the first `tokens` tokens the content of the layer and return their keys and values (B, G, tokens,
        K).
        """
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
    """Return a cache of `batch` rows equal to the one row of `cache`, which stays as it is.

    Plain layers get `room` further tokens.
    """
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
    """Return the model's output on a prompt, with the logits of the last token only, where the model can leave out the
    others.
    """
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


def full_rows_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention function for rows without padding, whose last tokens are the queries: SDPA without a mask, so that
    heads share keys.

    Returns (out_BTHV, None). Several queries see the keys up to their own, which needs no mask in the flash kernel.
    """
    causal = None if query.shape[2] == 1 else causal_lower_right(query.shape[2], key.shape[2])
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=causal, scale=kwargs.get("scaling"), enable_gqa=query.shape[1] > key.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(FULL_ROWS, full_rows_attention)
AttentionMaskInterface.register(
    FULL_ROWS, lambda *args, **kwargs: None
)  # transformers makes masks while a graph is captured


class RepeatedStep:
    """A greedy decoding step of B rows at a context of one length, which can be repeated; on a GPU it is a CUDA graph.

    Each call reads the same number of tokens: keys and values of the new token are written behind the context, and the
    next call writes over them. Recurrent states move on, in the same memory.

    Args:
        model: a causal language model.
        cache: rows made by `repeat_rows`, with room for WARMUPS + 1 tokens.
        token_B1: the first tokens.

    Attributes:
        problem: why the step could not be captured and runs one operation at a time; None: it was captured, or there is
            no GPU.
    """

    WARMUPS = 2  # they compile kernels and let buffers of keys grow

    def __init__(self, model: Any, cache: Any, token_B1: Tensor):
        self.model, self.cache, self.token_B1 = model, cache, token_B1.clone()
        self.problem: str | None = None
        seen = cache.get_seq_length()
        self.place_B1 = torch.full_like(token_B1, seen)
        self.linear = {m.layer_idx for _, m in mixer_modules(model) if can_capture(m.mixer)}
        for layer in cache.layers:
            if isinstance(layer, MixerCacheLayer):
                reserve_buckets(layer, seen + self.WARMUPS + MOST_REPEATS)
        for _ in range(self.WARMUPS):
            self._forward()
            rewind(cache)
        self.held = [(x.state, x.seen) if isinstance(x, MixerCacheLayer) else None for x in cache.layers]
        self.run: Callable[[], None] = self._step
        if token_B1.device.type == "cuda":
            self._capture()

    def __call__(self) -> None:
        """Run the step once."""
        self.run()

    def _capture(self) -> None:
        try:
            self.run = record_graph(self._step, warmups=1)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self.problem = " ".join(str(error).split())[:200]
            self._go_back()

    def _forward(self) -> None:
        out = self.model(
            input_ids=self.token_B1, position_ids=self.place_B1, past_key_values=self.cache, use_cache=True
        )
        self.token_B1.copy_(out.logits[:, -1:].argmax(-1))

    def _step(self) -> None:
        self._forward()
        for index, (layer, held) in enumerate(zip(self.cache.layers, self.held)):
            if held is not None and held[0] is not None:
                write_state(held[0], layer.state, all_of_it=index in self.linear)
        self._go_back()

    def _go_back(self) -> None:
        rewind(self.cache)
        for layer, held in zip(self.cache.layers, self.held):
            if held is not None:
                layer.state, layer.seen = held


def write_state(held: MixerState, new_state: MixerState, all_of_it: bool) -> None:
    """Write a step's state into the memory of the state before it, as the next step will read it.

    all_of_it: of a recurrent state every tensor. Of a cache of keys that grows, tensors that a step copies; slots that
    it appended to a buffer are free again.
    """
    if all_of_it:
        held.seen_B.copy_(new_state.seen_B)
    else:
        drop_later_slots(held, new_state)
    for name, tensor in held.tensors.items():
        new = new_state.tensors[name]
        if new is not tensor and new.shape == tensor.shape and (all_of_it or not is_view_of_buffer(new)):
            tensor.copy_(new)


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
