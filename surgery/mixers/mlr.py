"""MLR attention: near pairs of tokens are scored with more dims of a head than far pairs.

    S = sum_l (+)_k Q[l,k] K[l,k]^T      ranks r_1|r_2|..|r_L; level 1 applies to all pairs, level l within its extent

Kuang et al. 2025, "Customizing the Inductive Biases of Softmax Attention", section 3.4, eq. 9. There extents are
T / 2^(l-1) and the form is nested. Here extents are numbers of tokens, so that the score of a pair depends only on its
two positions, and prefill, chunks and single steps agree exactly. Beyond eq. 9, each level and head adds a learned
bias, initially zero, to scores within its extent.

    nested    t // extent = s // extent     key cache of a level: the current block, n mod extent keys after n tokens
    sliding   t - s < extent                key cache of a level: the last extent - 1 keys

After n tokens the state has G (sum_l r_l live_l(n) + V n) elements. With the paper's extents, the keys take the share
sum_l r_l / 2^(l-1) / K of a full key cache: for sliding at length T, for nested on average over lengths up to T. Keys
of a complete block are dropped at once, as no later query reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

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
)
from surgery.mixers.common.softmax import (
    ScoreTerm,
    attend,
    dense_attention,
    group_heads,
    sdpa_attention,
    sdpa_attn_mask,
    sdpa_without_cache,
)
from surgery.mixers.padding import gather_rowwise


def rotary_units(shape: AttentionShape) -> list[list[int]]:
    """Return the dims of a head in units that RoPE mixes: rotary pairs, then single dims that do not rotate."""
    half = shape.rotary // 2
    pairs = [[2 * f, 2 * f + 1] if shape.interleaved else [f, f + half] for f in range(half)]
    return pairs + [[dim] for dim in range(2 * half, shape.key)]


def unrotated_dims(shape: AttentionShape) -> int:
    """Return how many dims of a head RoPE does not rotate: the last ones."""
    return shape.key - shape.rotary // 2 * 2


def slowest_first(shape: AttentionShape) -> list[int]:
    """Return an order of the dims for conversions without calibration text.

    Dims that do not rotate come first, then rotary pairs from the slowest to the fastest: slow pairs still distinguish
    far positions, while fast ones rotate many times in between.
    """
    together, pairs = rotary_units(shape), shape.rotary // 2
    return [dim for dims in (*together[pairs:], *reversed(together[:pairs])) for dim in dims]


@dataclass(frozen=True)
class MLR(MixerConfig):
    """Config of MLR attention.

    ranks: score dims of levels 1 .. L. extents: of levels 2 .. L, in tokens, not increasing. form: see the module's
    docstring. basis: "own", the dims of the head; "turned", the dims that RoPE does not rotate in another basis with the
    same q . k; "centered", the same with a constant subtracted from the keys, which the softmax cancels.
    """

    name: ClassVar[str] = "mlr"
    ranks: tuple[int, ...] = ()
    extents: tuple[int, ...] = ()
    form: Literal["nested", "sliding"] = "sliding"
    basis: Literal["own", "turned", "centered"] = "own"

    def __post_init__(self) -> None:
        example = "; for example ranks: [32, 16, 16], extents: [256, 64]"
        if not self.ranks or min(self.ranks) < 0 or sum(self.ranks) < 1:
            raise ValueError(f"ranks must be the score dims of levels 1, 2, .. (got {list(self.ranks)}){example}")
        if len(self.extents) != len(self.ranks) - 1:
            raise ValueError(
                f"{len(self.ranks)} ranks need {len(self.ranks) - 1} extents, as level 1 applies to all pairs "
                f"(got {list(self.extents)}){example}"
            )
        if any(e < 1 for e in self.extents) or list(self.extents) != sorted(self.extents, reverse=True):
            raise ValueError(f"extents must be positive and not increase (got {list(self.extents)}){example}")
        if self.form not in ("nested", "sliding"):
            raise ValueError(f"form must be 'nested' or 'sliding' (got {self.form!r})")
        if self.basis not in ("own", "turned", "centered"):
            raise ValueError(f"basis must be 'own', 'turned' or 'centered' (got {self.basis!r})")


class LeveledConfig(Protocol):
    """Options of a mixer whose scores have levels: MLR, and GlobalWindow with two levels."""

    @property
    def name(self) -> str:
        """Name of the mixer in recipes and checkpoints."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Score dims of levels 1 .. L."""

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of levels 2 .. L in tokens."""

    @property
    def form(self) -> str:
        """Form of the levels: nested or sliding."""

    @property
    def basis(self) -> str:
        """Basis of the score dims: own, turned or centered."""


def cached_keys(config: LeveledConfig, length: int, window: int | None) -> list[int]:
    """Return the number of cached keys of each level after `length` tokens.

    Nested blocks are empty at multiples of their extent.
    """
    bound = length if window is None else min(length, window - 1)
    nested = config.form == "nested"
    return [bound, *(min(bound, length % extent if nested else extent - 1) for extent in config.extents)]


def scored_keys(config: LeveledConfig, length: int, window: int | None) -> list[int]:
    """Return the largest number of keys that a query scores at each level after `length` tokens; nested blocks count in
    full.
    """
    bound = length if window is None else min(length, window - 1)
    past = 0 if config.form == "nested" else 1
    return [bound, *(min(bound, extent - past) for extent in config.extents)]


@MIXERS.register(MLR)
class MLRAttention(Mixer):
    """MLR attention.

    order (G, K): order of the dims of a key/value head (after RoPE); the first ranks[0] are level 1, and so on.
    near (H, L - 1): biases of levels 2 .. L within their extents.
    query_basis, key_basis (G, F, F): A and B with q A . k B = q . k for the last F dims, which RoPE does not rotate;
    initially the identity. Only with basis "turned" or "centered".
    key_center (G, F): c of k - c, initially zero; q . c is the same for all keys of a query, so the softmax cancels it.
    Only with basis "centered".
    """

    config: LeveledConfig
    order: Tensor
    query_basis: Tensor
    key_basis: Tensor
    key_center: Tensor
    near: Tensor | None
    reads_mask = True

    def __init__(self, config: LeveledConfig, shape: AttentionShape):
        super().__init__(config, shape)
        self.register_buffer("order", torch.arange(shape.key).repeat(shape.groups, 1))
        self.counts_tokens = (
            config.form == "nested" and len(config.extents) > 0
        )  # blocks are counted from a row's first token
        levels = len(config.ranks) - 1
        self.register_parameter("near", nn.Parameter(torch.zeros(shape.heads, levels)) if levels else None)
        free = unrotated_dims(shape)
        if config.basis != "own":
            for name in ("query_basis", "key_basis"):
                self.register_buffer(name, torch.eye(free).repeat(shape.groups, 1, 1))
        if config.basis == "centered":
            self.register_buffer("key_center", torch.zeros(shape.groups, free))

    @classmethod
    def check_config(cls, config: LeveledConfig, shape: AttentionShape) -> None:
        """Raise SurgeryError if the config does not fit the attention shape."""
        if sum(config.ranks) > shape.key:
            raise SurgeryError(
                f"{config.name}: ranks {list(config.ranks)} take {sum(config.ranks)} score dims and a head has "
                f"{shape.key}; "
                f"use a sum of at most {shape.key}, for example ranks: [{shape.key // 2}, {shape.key - shape.key // 2}]"
            )
        if config.basis != "own" and not unrotated_dims(shape):
            raise SurgeryError(
                f"{config.name}: basis '{config.basis}' mixes the dims of a head that RoPE does not rotate, and RoPE "
                f"rotates all {shape.key}, by {shape.rotary // 2} different angles; use basis: own"
            )
        if config.basis == "centered" and shape.softcap is not None:
            raise SurgeryError(
                f"{config.name}: basis 'centered' subtracts a constant from the scores of a query, which a softmax with "
                f"softcap {shape.softcap} does not cancel; use basis: turned"
            )

    def empty_state(self, batch: int, device: torch.device | str) -> MixerState:
        """Return the state of `batch` sequences before their first token."""
        sizes = {f"keys{level}": rank for level, rank in enumerate(self.config.ranks)}
        sizes["values"] = self.shape.value
        tensors = {name: torch.empty(batch, self.shape.groups, 0, size, device=device) for name, size in sizes.items()}
        return MixerState(torch.zeros(batch, dtype=torch.long, device=device), tensors)

    @property
    def is_unstructured(self) -> bool:
        """Whether level 1 has all dims, so that the scores are those of standard attention."""
        return self.config.ranks == (self.shape.key,)

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return (out_BHTV, state after these tokens, or None without a state)."""
        if state is None and self.is_unstructured:
            return sdpa_without_cache(inputs, self.shape), None
        padded, back = left_pad(inputs)
        layout, count_B = make_kv_layout(padded, state, 0 if state is None else state.tensors["values"].shape[2])
        keys, values = self.levels(padded.k_BGTK), padded.v_BGTV
        if state is not None:
            olds = [state.tensors[f"keys{level}"] for level in range(len(keys))]
            *keys, values = append_all_slots([*olds, state.tensors["values"]], [*keys, values], count_B)
        if self.is_unstructured:
            layout = layout._replace(holes=layout.holes and bool((layout.end_B < layout.slots).any()))
            mask = sdpa_attn_mask(layout, self.shape, None, None)
            out = sdpa_attention(padded.q_BHTK, keys[0], values, self.shape, mask, padded.dropout)
        else:
            mask = padded.mask_BHTS if state is None else None
            out = self.attend_terms(self.terms(padded.q_BHTK, keys), values, layout, mask, padded.dropout)
        out = out if back is None else gather_rowwise(out, back, 2)
        return out, None if state is None else self._next_state(layout, keys, values, count_B)

    def next_state(self, inputs: MixerInputs, state: MixerState) -> MixerState:
        """Return the state after these tokens, without their outputs."""
        padded, _ = left_pad(inputs)
        layout, count_B = make_kv_layout(padded, state, state.tensors["values"].shape[2])
        levels = self.levels(padded.k_BGTK)
        olds = [state.tensors[f"keys{level}"] for level in range(len(levels))]
        *keys, values = append_all_slots([*olds, state.tensors["values"]], [*levels, padded.v_BGTV], count_B)
        return self._next_state(layout, keys, values, count_B)

    def attend_terms(
        self, terms: list[ScoreTerm], values: Tensor, layout: KVLayout, mask: Tensor | None, p: float
    ) -> Tensor:
        """Return out_BHTV of softmax attention over the sum of the terms."""
        return attend(terms, values, layout, self.shape, mask, p)

    def levels(self, x: Tensor) -> list[Tensor]:
        """Return q (B, G, J, T, K) or k (B, G, T, K) split into the dims of each level."""
        if self.is_unstructured:
            return [x]
        if self.config.basis != "own":
            x = self.turn(x)
        index = self.order[:, : sum(self.config.ranks)]
        index = index.view(1, index.shape[0], *[1] * (x.dim() - 3), index.shape[1])
        return list(x.gather(-1, index.expand(*x.shape[:-1], -1)).split(self.config.ranks, -1))

    def turn(self, x: Tensor) -> Tensor:
        """Return q (B, G, J, T, K) or k (B, G, T, K) with the dims that RoPE does not rotate in the mixer's basis."""
        basis_GFF = self.query_basis[:, None] if x.dim() == 5 else self.key_basis
        rotated, free = x.split([x.shape[-1] - basis_GFF.shape[-1], basis_GFF.shape[-1]], -1)
        if self.config.basis == "centered" and x.dim() == 4:
            free = free - self.key_center[:, None].to(x.dtype)
        return torch.cat([rotated, free @ basis_GFF.to(x.dtype)], -1)

    def terms(self, q_BHTK: Tensor, keys: list[Tensor]) -> list[ScoreTerm]:
        """Return the terms whose sum is the attention score."""
        queries = self.levels(group_heads(q_BHTK, self.shape.groups))
        extents = (None, *self.config.extents)
        near = () if self.near is None else self.near.unflatten(0, (self.shape.groups, -1)).unbind(-1)
        biases = (None, *near)
        return [ScoreTerm(q, k, e, self.config.form, b) for q, k, e, b in zip(queries, keys, extents, biases)]

    def _next_state(self, layout: KVLayout, keys: list[Tensor], values: Tensor, count_B: Tensor | None) -> MixerState:
        """Return the state with the keys and values that later queries may read.

        The form nested keeps the longest current block of any row, which synchronizes with the device.
        """
        slots = layout.slots if count_B is None else int(layout.end_B.max())
        if self.shape.window is not None:
            slots = min(slots, self.shape.window - 1)
        live = [slots, *(min(slots, extent - 1) for extent in self.config.extents)]
        if self.config.form == "nested" and self.config.extents:
            extents = torch.tensor(self.config.extents, device=layout.end_B.device)
            block_keys = (layout.end_B[:, None] % extents).amax(0).tolist()
            live[1:] = [min(slots, n) for n in block_keys]
        tensors = {f"keys{level}": last_slots(k, n) for level, (k, n) in enumerate(zip(keys, live))}
        return MixerState(layout.end_B, {**tensors, "values": last_slots(values, slots)})

    def dense(self, inputs: MixerInputs) -> Tensor:
        """Return out_BHTV by the definition, in quadratic time."""
        return dense_attention(self.terms(inputs.q_BHTK, self.levels(inputs.k_BGTK)), inputs, self.shape)

    @classmethod
    def cost(cls, config: LeveledConfig, shape: AttentionShape, length: int) -> MixerCost:
        """Return cache size, multiply-accumulates and parameters for a context of `length` tokens."""
        keys = scored_keys(config, length, shape.window)
        scores = sum(rank * n for rank, n in zip(config.ranks, keys))
        cached = sum(rank * n for rank, n in zip(config.ranks, cached_keys(config, length, shape.window)))
        cache = shape.groups * (cached + shape.value * keys[0])
        params = shape.groups * shape.key + shape.heads * (len(config.ranks) - 1)
        macs = shape.heads * (scores + shape.value * keys[0])
        free = unrotated_dims(shape)
        if config.basis != "own":
            params, macs = params + 2 * shape.groups * free**2, macs + (shape.heads + shape.groups) * free**2
        if config.basis == "centered":
            params += shape.groups * free
        return MixerCost(cache, macs, params)
