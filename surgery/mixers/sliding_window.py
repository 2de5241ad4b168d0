"""Sliding-window attention with attention sinks, and a global score beside a windowed one: baselines of MLR attention.

    window          out = softmax(S, where t - s < window or s < sinks) V
    global_window   out = (softmax(q_1 . k_1) + softmax(q_2 . k_2, where t - s < window)) V / 2

Sinks: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"; here keys keep the RoPE rotation of
their own position. global_window splits the dims of every head between the two scores. It is not the baseline
"Global + SWA" of Kuang et al. 2025, section 5 and Figure 13, which alternates whole layers of both kinds: that is
`mixer: window` with `hybrid: {softmax: 0.5, choose_by: every}`. In bidirectional attention the window is |t - s| < window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

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
    attend,
    dense_attention,
    dense_weighted_values,
    group_heads,
    run_in_passes,
    upcast,
    weighted_values,
)
from surgery.mixers.mlr import LeveledConfig, MLRAttention
from surgery.mixers.padding import gather_rowwise


@dataclass(frozen=True)
class Window(MixerConfig):
    """Config of sliding-window attention. window, sinks: numbers of last and of first tokens that are visible."""

    name: ClassVar[str] = "window"
    window: int = 256
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.window < 1 or self.sinks < 0:
            raise ValueError(
                f"window must be 1 or more and sinks 0 or more tokens (got window {self.window}, sinks {self.sinks})"
            )


@dataclass(frozen=True)
class GlobalWindow(MixerConfig):
    """Config of global_window. ranks: score dims of the global and of the windowed softmax. window: in tokens."""

    name: ClassVar[str] = "global_window"
    ranks: tuple[int, ...] = ()
    window: int = 256

    def __post_init__(self) -> None:
        if len(self.ranks) != 2 or min(self.ranks) < 1 or self.window < 1:
            raise ValueError(
                "ranks must be the score dims of the global and of the windowed softmax, and window 1 or more tokens "
                f"(got ranks {list(self.ranks)}, window {self.window}); for example ranks: [32, 32], window: 256"
            )

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of levels 2 .. L in tokens: the window."""
        return (self.window,)

    @property
    def form(self) -> str:
        """Form of the levels, as in MLR."""
        return "sliding"

    @property
    def basis(self) -> str:
        """Basis of the score dimensions, as in MLR."""
        return "own"


def windowed_shape(shape: AttentionShape, window: int) -> AttentionShape:
    """Return the attention shape with its window shortened to `window` tokens."""
    return replace(shape, window=window if shape.window is None else min(window, shape.window))


@MIXERS.register(Window)
class WindowAttention(Mixer):
    """Sliding-window attention with sinks. The state holds the last window - 1 tokens and the sinks."""

    config: Window
    reads_mask = True

    def __init__(self, config: Window, shape: AttentionShape):
        super().__init__(config, shape)
        self.counts_tokens = config.sinks > 0

    def empty_state(self, batch: int, device: torch.device | str) -> MixerState:
        """Return the state of `batch` sequences before their first token."""
        sizes = {"keys": self.shape.key, "values": self.shape.value}
        recent = {name: torch.empty(batch, self.shape.groups, 0, size, device=device) for name, size in sizes.items()}
        sinks = {f"sink_{name}": x.new_zeros(*x.shape[:2], self.config.sinks, x.shape[3]) for name, x in recent.items()}
        return MixerState(torch.zeros(batch, dtype=torch.long, device=device), {**recent, **sinks})

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return (out_BHTV, state after these tokens, or None without a state)."""
        padded, back = left_pad(inputs)
        layout, count_B = make_kv_layout(padded, state, 0 if state is None else state.tensors["values"].shape[2])
        keys, values = padded.k_BGTK, padded.v_BGTV
        if state is not None:
            keys, values = append_all_slots([state.tensors["keys"], state.tensors["values"]], [keys, values], count_B)
        mask, q_BGJTK = padded.mask_BHTS if state is None else None, group_heads(padded.q_BHTK, self.shape.groups)
        if self.config.sinks == 0:
            shape = windowed_shape(self.shape, self.config.window)
            out = attend([ScoreTerm(q_BGJTK, keys)], values, layout, shape, mask, padded.dropout)
        else:
            s_BS = layout.positions(0, layout.slots)
            t_BT = s_BS[:, layout.slots - layout.queries :]
            slots = (keys, values, s_BS) if state is None else self._prepend_sinks(state, keys, values, s_BS)
            out = self._attend_with_sinks(q_BGJTK, *slots, t_BT=t_BT, mask=mask, p=padded.dropout)
        out = out if back is None else gather_rowwise(out, back, 2)
        return out, None if state is None else self._next_state(state, layout, keys, values, padded)

    def next_state(self, inputs: MixerInputs, state: MixerState) -> MixerState:
        """Return the state after these tokens, without their outputs."""
        padded, _ = left_pad(inputs)
        layout, count_B = make_kv_layout(padded, state, state.tensors["values"].shape[2])
        olds, news = [state.tensors["keys"], state.tensors["values"]], [padded.k_BGTK, padded.v_BGTV]
        keys, values = append_all_slots(olds, news, count_B)
        return self._next_state(state, layout, keys, values, padded)

    def _prepend_sinks(
        self, state: MixerState, keys: Tensor, values: Tensor, s_BS: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (keys, values, positions) with the cached sinks before the recent tokens.

        Position -1 marks empty slots and recent tokens that are sinks themselves.
        """
        seen_B1 = state.seen_B[:, None]
        sink_BS = torch.arange(self.config.sinks, device=s_BS.device).expand(seen_B1.shape[0], -1)
        s_BS = torch.cat(
            [
                sink_BS.masked_fill(sink_BS >= seen_B1, -1),
                s_BS.masked_fill(s_BS < seen_B1.clamp_max(self.config.sinks), -1),
            ],
            1,
        )
        both = [
            torch.cat([state.tensors[f"sink_{name}"].to(x.dtype), x], 2)
            for name, x in (("keys", keys), ("values", values))
        ]
        return both[0], both[1], s_BS

    def _visible_pairs(self, t_BT1: Tensor, s_B1S: Tensor) -> Tensor:
        shape, near = self.shape, (t_BT1 - s_B1S).abs()
        allowed = (s_B1S >= 0) & ((near < self.config.window) | (s_B1S < self.config.sinks))
        if shape.causal:
            allowed &= s_B1S <= t_BT1
        return allowed if shape.window is None else allowed & (near < shape.window)

    def _attend_with_sinks(
        self, q: Tensor, k: Tensor, v: Tensor, s_BS: Tensor, *, t_BT: Tensor, mask: Tensor | None, p: float
    ) -> Tensor:
        """Return out_BHTV of attention within window and sinks. s_BS, t_BT: positions of keys and queries; p:
        dropout.
        """
        q, k, values = upcast(q), upcast(k), upcast(v)

        def attend_pass(start: int, stop: int) -> Tensor:
            q_rows = q[:, :, :, start:stop]
            score = (q_rows.flatten(2, 3) @ k.mT).unflatten(2, q_rows.shape[2:4])
            allowed = self._visible_pairs(t_BT[:, start:stop, None], s_BS[:, None])[:, None, None]
            return weighted_values(
                score, allowed, values, self.shape, None if mask is None else mask[:, :, start:stop], p
            )

        return run_in_passes(attend_pass, q.shape[3]).flatten(1, 2).to(v.dtype)

    def _next_state(
        self, state: MixerState, layout: KVLayout, keys: Tensor, values: Tensor, padded: MixerInputs
    ) -> MixerState:
        window = windowed_shape(self.shape, self.config.window).window or 0
        slots = min(window - 1, layout.slots if padded.valid_BT is None else int(layout.end_B.max()))
        tensors = {"keys": last_slots(keys, slots), "values": last_slots(values, slots)}
        sink_1S = torch.arange(self.config.sinks, device=layout.end_B.device)[None]
        new_BS = (sink_1S - layout.end_B[:, None] + layout.queries).clamp(0, layout.queries - 1)
        is_old = (sink_1S < state.seen_B[:, None])[:, None, :, None]
        for name, new in (("keys", padded.k_BGTK), ("values", padded.v_BGTV)):
            old = state.tensors[f"sink_{name}"].to(new.dtype)
            tensors[f"sink_{name}"] = (
                torch.where(is_old, old, gather_rowwise(new, new_BS, 2)) if self.config.sinks else old
            )
        return MixerState(layout.end_B, tensors)

    def dense(self, inputs: MixerInputs) -> Tensor:
        """Return out_BHTV by the definition, in quadratic time."""
        position_BT, valid_BS = token_positions(inputs)
        score = torch.einsum(
            "bgjtk,bgsk->bgjts", group_heads(upcast(inputs.q_BHTK), self.shape.groups), upcast(inputs.k_BGTK)
        )
        allowed = self._visible_pairs(position_BT.unsqueeze(-1), position_BT.unsqueeze(1))
        return dense_weighted_values(score, allowed, valid_BS, inputs, self.shape)

    @classmethod
    def cost(cls, config: Window, shape: AttentionShape, length: int) -> MixerCost:
        """Return cache size, multiply-accumulates and parameters for a context of `length` tokens."""
        live = min(length, (windowed_shape(shape, config.window).window or 0) - 1) + min(length, config.sinks)
        return MixerCost(
            shape.groups * live * (shape.key + shape.value), shape.heads * live * (shape.key + shape.value), 0
        )


@MIXERS.register(GlobalWindow)
class GlobalWindowAttention(MLRAttention):
    """Global and windowed attention: the levels and caches of MLR(ranks, extents=(window,)), with a softmax per level.

    It has no biases `near`, which a softmax per level would ignore.
    """

    config: GlobalWindow

    def __init__(self, config: GlobalWindow, shape: AttentionShape):
        super().__init__(config, shape)
        self.register_parameter("near", None)

    def terms(self, q_BHTK: Tensor, keys: list[Tensor]) -> list[ScoreTerm]:
        """Return the terms whose sum is the attention score."""
        return [ScoreTerm(q, k) for q, k in zip(self.levels(group_heads(q_BHTK, self.shape.groups)), keys)]

    def attend_terms(
        self, terms: list[ScoreTerm], values: Tensor, layout: KVLayout, mask: Tensor | None, p: float
    ) -> Tensor:
        """Return out_BHTV of softmax attention over the sum of the terms."""
        shapes = self.shape, windowed_shape(self.shape, self.config.window)
        both = [attend([t], values, layout, shape, mask, p) for t, shape in zip(terms, shapes)]
        return (both[0] + both[1]) / 2

    def dense(self, inputs: MixerInputs) -> Tensor:
        """Return out_BHTV by the definition, in quadratic time."""
        shapes = self.shape, windowed_shape(self.shape, self.config.window)
        terms = self.terms(inputs.q_BHTK, self.levels(inputs.k_BGTK))
        both = [dense_attention([t], inputs, shape) for t, shape in zip(terms, shapes)]
        return (both[0] + both[1]) / 2

    @classmethod
    def cost(cls, config: LeveledConfig, shape: AttentionShape, length: int) -> MixerCost:
        """Return cache size, multiply-accumulates and parameters for a context of `length` tokens."""
        return super().cost(config, shape, length)._replace(params=shape.groups * shape.key)
