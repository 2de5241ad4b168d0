"""Softmax attention over all tokens: what a hybrid keeps, with the options that long contexts ask for.

    out_t = softmax_s(f_t h scaling q_t . k_s) V

    rope: drop      q and k before RoPE (NoPE). h, learned per query head and initially 1, sets how sharp the scores without positions are
    scale: length   f_t = max(1, log(t + 1) / log(L))      t: number of tokens before the query; L: the trained length

Both from HypeNet (Chen et al. 2026, arXiv 2601.22156), which drops RoPE in the softmax layers of a hybrid, where the
linear layers keep the order of tokens, and lets the scores grow with the logarithm of the position, so that the softmax
over many more tokens than in training stays as sharp. Its factor is log_a(t + a) with a constant a found by search.
Here the factor is 1 up to the trained length, so that a model within that length is unchanged.

Without options this is the model's own attention. The state holds all keys and values, or those of the module's own
window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from surgery.core.errors import SurgeryError
from surgery.mixers.base import MIXERS, AttentionShape, Mixer, MixerConfig, MixerCost, MixerInputs, MixerState
from surgery.mixers.common.kv_layout import (
    KVLayout,
    append_all_slots,
    last_slots,
    left_pad,
    make_kv_layout,
    token_positions,
)
from surgery.mixers.common.softmax import (
    ScoreTerm,
    dense_attention,
    group_heads,
    sdpa_attention,
    sdpa_attn_mask,
    sdpa_without_cache,
)
from surgery.mixers.padding import gather_rowwise

MIN_TRAINED = 2  # tokens: the logarithm of the trained length must be positive


@dataclass(frozen=True)
class Softmax(MixerConfig):
    """Config of softmax attention. rope, scale: see the module's docstring. trained_length: L in tokens, read by scale:
    length only.
    """

    name: ClassVar[str] = "softmax"
    rope: Literal["keep", "drop"] = "keep"
    scale: Literal["none", "length"] = "none"
    trained_length: int = 0

    def __post_init__(self) -> None:
        if self.rope not in ("keep", "drop"):
            raise SurgeryError(f"softmax: rope must be keep or drop (got {self.rope!r})")
        if self.scale not in ("none", "length"):
            raise SurgeryError(f"softmax: scale must be none or length (got {self.scale!r})")
        if self.scale == "length" and self.trained_length < MIN_TRAINED:
            raise SurgeryError(
                "softmax: scale: length needs the length of the sequences that the model was trained on, "
                f"{MIN_TRAINED} or more "
                f"tokens (got trained_length: {self.trained_length})"
            )
        if self.scale == "none" and self.trained_length:
            raise SurgeryError(
                f"softmax: trained_length is read by scale: length only (got trained_length: {self.trained_length}, "
                "scale: none)"
            )

    @property
    def is_plain(self) -> bool:
        """Whether this is the model's own attention."""
        return self.rope == "keep" and self.scale == "none"


def describe_softmax(config: Softmax) -> str:
    """Format the options of softmax attention, for example "no RoPE, logits scaled beyond 4,096 tokens"."""
    words = ["no RoPE"] if config.rope == "drop" else []
    words += [f"logits scaled beyond {config.trained_length:,} tokens"] if config.scale == "length" else []
    return ", ".join(words) or "as it was"


def length_factor(position_BT: Tensor, trained: int) -> Tensor:
    """Return f_t = max(1, log(t + 1) / log(trained)) of each position, in float64."""
    return ((position_BT.clamp_min(0) + 1).double().log() / math.log(trained)).clamp_min(1.0)


@MIXERS.register(Softmax)
class SoftmaxAttention(Mixer):
    """Softmax attention over all tokens. sharpness_H: h, None unless rope is "drop"."""

    config: Softmax
    reads_mask = True

    def __init__(self, config: Softmax, shape: AttentionShape):
        super().__init__(config, shape)
        self.check_config(config, shape)
        self.rotated = config.rope == "keep"
        self.counts_tokens = config.scale == "length"
        self.sharpness_H = None if self.rotated else nn.Parameter(torch.ones(shape.heads))

    @classmethod
    def check_config(cls, config: Softmax, shape: AttentionShape) -> None:
        """Raise SurgeryError if the config does not fit the attention shape."""
        if config.scale == "length" and not shape.causal:
            raise SurgeryError(
                "softmax: scale: length counts the tokens before the query, and this module is bidirectional; use "
                "scale: none"
            )

    def empty_state(self, batch: int, device: torch.device | str) -> MixerState:
        """Return the state of `batch` sequences before their first token."""
        sizes = {"keys": self.shape.key, "values": self.shape.value}
        tensors = {name: torch.empty(batch, self.shape.groups, 0, size, device=device) for name, size in sizes.items()}
        return MixerState(torch.zeros(batch, dtype=torch.long, device=device), tensors)

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return (out_BHTV, state after these tokens, or None without a state)."""
        if state is None:
            return sdpa_without_cache(self._with_factors(inputs, token_positions(inputs)[0]), self.shape), None
        padded, back = left_pad(inputs)
        layout, count_B = make_kv_layout(padded, state, state.tensors["values"].shape[2])
        padded = self._with_factors(padded, layout.positions(layout.slots - layout.queries, layout.slots))
        olds, news = [state.tensors["keys"], state.tensors["values"]], [padded.k_BGTK, padded.v_BGTV]
        keys, values = append_all_slots(olds, news, count_B)
        after = self._next_state(layout, keys, values, count_B)
        layout = layout._replace(holes=layout.holes and bool((layout.end_B < layout.slots).any()))
        mask = sdpa_attn_mask(layout, self.shape, None, None)
        out = sdpa_attention(padded.q_BHTK, keys, values, self.shape, mask, padded.dropout)
        return out if back is None else gather_rowwise(out, back, 2), after

    def next_state(self, inputs: MixerInputs, state: MixerState) -> MixerState:
        """Return the state after these tokens, without their outputs."""
        padded, _ = left_pad(inputs)
        layout, count_B = make_kv_layout(padded, state, state.tensors["values"].shape[2])
        olds, news = [state.tensors["keys"], state.tensors["values"]], [padded.k_BGTK, padded.v_BGTV]
        keys, values = append_all_slots(olds, news, count_B)
        return self._next_state(layout, keys, values, count_B)

    def _next_state(self, layout: KVLayout, keys: Tensor, values: Tensor, count_B: Tensor | None) -> MixerState:
        slots = layout.slots if count_B is None else int(layout.end_B.max())
        if self.shape.window is not None:
            slots = min(slots, self.shape.window - 1)
        return MixerState(layout.end_B, {"keys": last_slots(keys, slots), "values": last_slots(values, slots)})

    def _with_factors(self, inputs: MixerInputs, position_BT: Tensor) -> MixerInputs:
        """Return the inputs with f_t h q in place of q. position_BT: of the queries, (1 or B, T)."""
        q_BHTK = inputs.q_BHTK
        if self.config.is_plain:
            return inputs
        wide = torch.promote_types(q_BHTK.dtype, torch.float32)
        scaled_BHTK = q_BHTK.to(wide)
        if self.config.scale == "length":
            scaled_BHTK = (
                scaled_BHTK * length_factor(position_BT, self.config.trained_length).to(wide)[:, None, :, None]
            )
        if self.sharpness_H is not None:
            scaled_BHTK = scaled_BHTK * self.sharpness_H.to(wide)[:, None, None]
        return replace(inputs, q_BHTK=scaled_BHTK.to(q_BHTK.dtype))

    def dense(self, inputs: MixerInputs) -> Tensor:
        """Return out_BHTV by the definition, in quadratic time."""
        inputs = self._with_factors(inputs, token_positions(inputs)[0])
        terms = [ScoreTerm(group_heads(inputs.q_BHTK, self.shape.groups), inputs.k_BGTK)]
        return dense_attention(terms, inputs, self.shape)

    @classmethod
    def cost(cls, config: Softmax, shape: AttentionShape, length: int) -> MixerCost:
        """Return cache size, multiply-accumulates and parameters for a context of `length` tokens."""
        live = length if shape.window is None else min(length, shape.window - 1)
        per_head = live * (shape.key + shape.value)
        return MixerCost(shape.groups * per_head, shape.heads * per_head, 0 if config.rope == "keep" else shape.heads)
