"""Linear attention: O = (A . M) V with scores A and one structured mask M, optionally with softmax over near tokens.

    scores: kernel   A_ts = phi(q_t) . phi(k_s), phi from mixers/features
    scores: delta    A of the delta rule, on queries and keys of unit norm (masks/delta_rule.py), with step sizes beta =
                     sigmoid(W x + b), or twice that with negative_eigenvalues
    mask             M, from mixers/masks
    normalise        O_t / sum_s (A . M)_ts. The denominator is a column of ones beside V in the same recurrence
                     (z of Katharopoulos et al. 2020, eq. 12; TBM eq. 1, where the denominator of its eq. 4 cancels).
    window, sinks    softmax branch over the last `window` and the first `sinks` tokens, linear branch over the tokens
                     between them (common/window_hybrid.py)
    near_tokens: chunks
                     softmax branch over the query's aligned block of `window` tokens and the one before it, linear
                     branch over the blocks before these (common/near_chunks.py)

Differences from softmax attention: padding (valid_BT) is the only mask applied. A row holds one document: the attention
module splits packed rows before it calls the mixer (common/packed_documents.py). A sliding window of the original
module is dropped: the linear branch sees all tokens. Attention dropout is ignored. Bidirectional attention runs a
causal mask forwards and backwards (common/bidirectional.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.core.dispatch import dispatched
from surgery.core.errors import SurgeryError
from surgery.mixers.base import (
    MIXERS,
    AttentionShape,
    Mixer,
    MixerCost,
    MixerInputs,
    MixerState,
)
from surgery.mixers.common.bidirectional import bidirectional_output, dense_output, zero_padding_writes
from surgery.mixers.common.linear_features import FeaturePlan, l2_normalize, linear_features
from surgery.mixers.common.meta_weights import EmptyOnMeta
from surgery.mixers.common.near_chunks import ChunkBuffer, chunk_attention
from surgery.mixers.common.packed_pieces import PackedPieces, WindowPlan
from surgery.mixers.common.rope import apply_rope
from surgery.mixers.common.window_hybrid import (
    LocalOutput,
    RecentAndSinks,
    Tensors,
    attend_slots,
    gather_window,
    join_and_gate,
    join_branches,
    local_attention,
    store_window,
)
from surgery.mixers.features.base import FEATURES
from surgery.mixers.layers import HeadNorm, OutputGate, ShortConvolution
from surgery.mixers.linear_config import (
    BIDIRECTIONAL_MASKS,
    TWO_FORMS,
    LinearAttention,
    check_config,
    linear_shape,
    make_buffer,
    mask_shape,
    resolve_rope,
)
from surgery.mixers.masks.base import MASKS, MaskInputs, Signals
from surgery.mixers.padding import Unpadder, shift_rows
from surgery.mixers.projections import Float32Linear, autocast_disabled, is_hooked

# Applies the mask: (out_BGJTV, state of the mask after the tokens, or None without a state).
MaskFn = Callable[[MaskInputs], tuple[Tensor, Tensors | None]]

# Tensors of the state that are copies of keys and values; the others are computed in float32.
TOKENS_IN_MODEL_DTYPE = ("ring.k", "ring.v", "ring.linear_k", "sink.k", "sink.v")
MIN_DENOMINATOR = 1e-30  # avoids 0 / 0 if all scores of a query are zero


@dataclass
class ProjectedTokens:
    """Queries, keys, values and hidden states of one call, without padding and after the short convolution.

    window_q_BTHK, window_k_BTGK: q and k of the softmax branch, after RoPE unless rope is "drop".
    """

    q_BTHK: Tensor
    k_BTGK: Tensor
    v_BTGV: Tensor
    x_BTD: Tensor
    unpadder: Unpadder
    window_q_BTHK: Tensor
    window_k_BTGK: Tensor


@MIXERS.register(LinearAttention)
class LinearMixer(Mixer):
    """Linear attention with one mask, one feature map and an optional softmax branch.

    beta_proj: projection to the step sizes of the delta rule. near_weight_H, linear_weight_H: weights of the softmax
    branch and of the linear branch. near_switch: set by training with window dropout.
    """

    config: LinearAttention
    near_switch: Tensor | None = None  # in training: multiplies the weight of the softmax branch, 0 or 1

    def __init__(self, config: LinearAttention, shape: AttentionShape):
        super().__init__(config, shape)
        check_config(config, shape)
        self.rope = resolve_rope(config, shape)
        self.rotated = self.rope == "keep"
        self.linear_shape = linear_shape(config, shape)
        self.mask = MASKS[config.mask](config.mask, mask_shape(config, shape))
        self.feature_map = FEATURES[config.features](config.features, self.linear_shape)
        self.beta_proj = Float32Linear(shape.dim, self.linear_shape.groups) if config.scores == "delta" else None
        channels = shape.heads * shape.key + shape.groups * (shape.key + shape.value)
        self.convolution = ShortConvolution(channels, config.convolution) if config.convolution else None
        self.norm = HeadNorm(shape.heads, shape.value) if config.norm else None
        gates = {"head": 1, "value": shape.value}
        self.gate = OutputGate(shape.dim, shape.heads, gates[config.output_gate]) if config.output_gate else None
        self.window_buffer = make_buffer(config)
        self.near_weight_H = nn.Parameter(torch.ones(shape.heads)) if self.window_buffer else None
        # Without a softmax branch the weight would cancel in normalised attention.
        start_H = torch.full((shape.heads,), float(config.linear_weight))
        self.linear_weight_H = nn.Parameter(start_H) if self.window_buffer or not config.normalise else None

    @classmethod
    def check_config(cls, config: LinearAttention, shape: AttentionShape) -> None:
        """Raise SurgeryError if the config does not fit the attention shape."""
        check_config(config, shape)

    # -- states --------------------------------------------------------------------------------------
    def empty_state(self, batch: int, device: torch.device | str) -> MixerState:
        """Return the state of `batch` sequences before their first token."""
        if not self.shape.causal:
            raise SurgeryError("linear: bidirectional attention has no state; call mix without one")
        values = self.shape.value + self.config.normalise
        mask_state = self.mask.empty_state(batch, self._num_features(), values, device)
        past = self._empty_buffers(batch, device)
        return replace(past, tensors={**past.tensors, **{f"mask.{name}": t for name, t in mask_state.items()}})

    def _empty_buffers(self, batch: int, device: torch.device | str, *, rings: bool = True) -> MixerState:
        """Return the state without the mask's: last inputs of the convolution, and, if asked for, window and sinks."""
        tensors: dict[str, Tensor] = {}
        if self.convolution is not None:
            channels, width = self.convolution.channels, self.convolution.width
            tensors["convolution"] = torch.zeros(batch, width - 1, channels, device=device)
        if self.window_buffer is not None and rings:
            slots = self.window_buffer.slots
            zeros_BSD = torch.zeros(batch, slots, self.shape.dim, device=device)
            for name, t in self._written_signals(zeros_BSD, self.mask("signals", zeros_BSD)).items():
                tensors[f"ring.{name}"] = torch.zeros_like(t)
            sizes = {"k": self.shape.key, "v": self.shape.value}
            linear_sizes = {"linear_k": self.shape.key} if self.rope in TWO_FORMS else {}
            for name, size in {**sizes, **linear_sizes}.items():
                tensors[f"ring.{name}"] = torch.zeros(batch, slots, self.shape.groups, size, device=device)
            for name, size in sizes.items():
                tensors[f"sink.{name}"] = torch.zeros(
                    batch, self.window_buffer.sinks, self.shape.groups, size, device=device
                )
        return MixerState(torch.zeros(batch, dtype=torch.int64, device=device), tensors, max_seen=0)

    def _num_features(self) -> int:
        return self.feature_map.features(self.config.features, self.linear_shape)

    def _written_signals(self, x_BTD: Tensor, signals: Signals) -> Signals:
        """Return the signals (B, T, ..) that belong to the written token, like its key and value."""
        written = {name: signals[name] for name in self.mask.written_signals}
        if self.beta_proj is None:
            return written
        return {**written, "beta": self.config.largest_step * self.beta_proj(x_BTD).sigmoid()}

    def _written_tokens(self, tokens: ProjectedTokens, signals: Signals) -> Tensors:
        """Return what the tokens write to window and mask, (B, T, ..): keys, values and written signals."""
        written = {"k": tokens.window_k_BTGK, "v": tokens.v_BTGV, **self._written_signals(tokens.x_BTD, signals)}
        if self.rope in TWO_FORMS:
            written["linear_k"] = tokens.k_BTGK[..., : self.shape.key]
        return written

    # -- forward pass --------------------------------------------------------------------------------
    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return (out_BHTV, state after these tokens, or None without a state)."""
        window = self.config.window
        if state is None:
            apply = lambda rows: self._apply_mask(rows, None, inputs)  # noqa: E731
            return self._run(inputs, None, apply, max(window, 64))[0], None
        if not self.shape.causal:
            raise SurgeryError("linear: bidirectional attention has no state; call mix without one")
        return (one_token if inputs.x_BTD.shape[1] == 1 else mix_tokens)(inputs.q_BHTK, self, inputs, state)

    def mix_packed(self, inputs: MixerInputs, pieces: PackedPieces, state: MixerState) -> tuple[Tensor, MixerState]:
        """Return (out_BHTV, state after these tokens) of pieces of R sequences in one row (B = 1) without padding.

        state: of the R sequences before their pieces. See `mix_packed_in_pool`.
        """
        wide = torch.promote_types(inputs.v_BGTV.dtype, torch.float32)
        masks = {n.removeprefix("mask."): t for n, t in state.tensors.items() if n.startswith("mask.")}
        masks = self.mask.allocate(masks, pieces.behind(self.config.window + self.config.sinks).max_seen)
        pool = {**state.tensors, **{f"mask.{name}": t for name, t in masks.items()}}
        pool = {name: t.to(torch.promote_types(t.dtype, wide), copy=True) for name, t in pool.items()}
        page_R = torch.arange(len(pieces.counts), device=pieces.device)
        out_BHTV = self.mix_packed_in_pool(inputs, pieces, pool, page_R)
        return out_BHTV, MixerState(state.seen_B + pieces.count_R, pool, pieces.max_seen)

    @torch.no_grad()
    def mix_packed_in_pool(self, inputs: MixerInputs, pieces: PackedPieces, pool: Tensors, page_R: Tensor) -> Tensor:
        """Return out_BHTV of pieces of R sequences in one row (B = 1) without padding, and update their states in place.

        pool: the tensors of `empty_state`, with a page for each sequence of a server; sequence r has page_R[r] (int64).
        What a sequence has not written to its page yet is not read, whatever it holds. Nothing waits for the device.
        """
        assert not isinstance(self.window_buffer, ChunkBuffer), "near_tokens: chunks has no packed form; call mix"
        with autocast_disabled(inputs.x_BTD.device) if is_autocast(inputs.x_BTD) else nullcontext():
            tokens, q_BHTF = self._tokens_of_pieces(inputs, pieces, pool, page_R)
            signals, local, far, query_L = self.mask("signals", tokens.x_BTD), None, pieces, None
            written, written_BL = self._written_tokens(tokens, signals), pieces.position_N.unsqueeze(0)
            if self.window_buffer is not None:
                window, sinks, slots = self.config.window, self.config.sinks, self.window_buffer.slots
                plan, far = pieces.window_plan(window, sinks, slots, max(window, 64)), pieces.behind(window + sinks)
                local, written = self._window_in_pool(tokens, written, plan, pool, page_R)
                written_BL, query_L = plan.far_position_L.unsqueeze(0), plan.far_slice or plan.far_query_L
            if far.length < pieces.length:
                q_BHTF = q_BHTF[:, :, query_L]
                signals = {name: t if name in written else t[:, query_L] for name, t in signals.items()}
            q_BGJTF = q_BHTF.unflatten(1, (self.linear_shape.groups, -1))
            mask_pool = {name.removeprefix("mask."): t for name, t in pool.items() if name.startswith("mask.")}
            if far.length:
                row = self._row_of_pieces(q_BGJTF, written, written_BL, signals, far)
                out_BGJTV = self.mask("packed_in_pool", row, far, mask_pool, page_R, self.config.chunk)
                linear_BGJTV = self.mask.sum_queries(out_BGJTV.to(row.v_BGTV.dtype))
            if far.length < pieces.length and (len(pieces.counts) > 1 or not far.length):
                values = self.shape.value + self.config.normalise
                zeros = tokens.v_BTGV.new_zeros(
                    *q_BGJTF.shape[:3], pieces.length, values, dtype=matmul_dtype(tokens.v_BTGV)
                )
                if far.length:
                    zeros[:, :, :, query_L] = linear_BGJTV.to(zeros.dtype)
                linear_BGJTV = zeros
            out_BTHV = self._combine(linear_BGJTV, local, tokens.x_BTD, inputs.v_BGTV.dtype)
        return out_BTHV.transpose(1, 2).to(inputs.v_BGTV.dtype)

    def _tokens_of_pieces(
        self, inputs: MixerInputs, pieces: PackedPieces, pool: Tensors, page_R: Tensor
    ) -> tuple[ProjectedTokens, Tensor]:
        """Return (convolved tokens, features of their queries (1, H, N, F)), and update the states of the convolution.

        k of the tokens is what the softmax branch reads in `window_k_BTGK`, and as it was given in `k_BTGK`.
        """
        past = {n: pool[n][page_R].masked_fill(pieces.is_first_R[:, None, None], 0) for n in pool if n == "convolution"}
        tokens, after = self._convolved_tokens(inputs, MixerState(pieces.seen_R, past), pieces)
        for name, t in after.items():
            pool[name][page_R] = t.to(pool[name].dtype)
        rotation = self._rotation(inputs, tokens) if self.rope in TWO_FORMS else None
        plan, position_BT = self._feature_plan(inputs.v_BGTV, pieces.length), pieces.position_N.unsqueeze(0)
        q_BHTF, q_BTHK = linear_features(tokens.q_BTHK, rotation, self.feature_map, position_BT, plan)
        k_BTGK = tokens.k_BTGK
        if rotation is not None:  # features are those of the last token only: the branch reads features of earlier ones
            plan = replace(plan, side="keys", first=pieces.length - 1, copies=self.key_copies)
            _, k_BTGK = linear_features(k_BTGK, rotation, self.feature_map, position_BT, plan)
        return replace(tokens, window_q_BTHK=q_BTHK, window_k_BTGK=k_BTGK), q_BHTF

    def _window_in_pool(
        self, tokens: ProjectedTokens, written: Tensors, plan: WindowPlan, pool: Tensors, page_R: Tensor
    ) -> tuple[LocalOutput, Tensors]:
        """Return (softmax branch of the row, what is written to the mask (1, L, ..)), and store the tokens in rings and
        sinks.

        A block of queries is a row of its own, with the last tokens before it and the sinks of its sequence.
        """
        new = {name: t.squeeze(0) for name, t in written.items()}
        far = [name for name in new if name != "k" or self.rope != "window"]
        found = gather_window(new["k"], new, pool, page_R, plan, far)
        store_window(new["k"], new, pool, page_R, plan)
        q_NHK, count = tokens.window_q_BTHK.squeeze(0), len(plan.seen_X)
        q_XCHK = q_NHK.unflatten(0, (count, -1)) if plan.uniform else q_NHK[plan.query_XC]
        block = max(self.config.window, 64)
        blocks = self._local_attention(q_XCHK, found.recent, found.sinks, plan.seen_X, block)
        if count == 1:
            return blocks, found.far
        statistics = (blocks.lse, blocks.largest) if self.config.normalise else (None, None)
        every = (None if t is None else t.movedim(0, 2).flatten(2, 3) for t in (blocks.out, *statistics))
        parts = (None if t is None else (t if plan.uniform else t[:, :, plan.slot_N]).unsqueeze(0) for t in every)
        return LocalOutput(*parts), found.far  # type: ignore[arg-type]  # `out` is no None

    def _row_of_pieces(
        self, q_BGJTF: Tensor, written: Tensors, written_BL: Tensor, signals: Signals, far: PackedPieces
    ) -> MaskInputs:
        """Return the inputs of the mask of queries with these features. written_BL: positions of the written tokens."""
        k_BLGK, known = (
            written["linear_k" if "linear_k" in written else "k"],
            written["k"] if self.rope == "both" else None,
        )
        plan = self._feature_plan(written["v"], far.length)
        plan = replace(plan, side="keys", copies=self.key_copies, rotated=False)
        k_BGLF, _ = linear_features(k_BLGK, None, self.feature_map, written_BL, plan, known)
        sizes = far.zero_1, far.unpadder.count_B
        row = self._mask_rows(q_BGJTF, k_BGLF, written, signals, *sizes, dtype=matmul_dtype(written["v"]))
        return to_matmul_dtype(row, written["v"])

    @property
    def key_copies(self) -> int:
        """Groups of the linear branch that share a key."""
        return self.linear_shape.groups // self.shape.groups

    def _feature_plan(self, v: Tensor, length: int) -> FeaturePlan:
        """Return the plan of the features of all queries. v: the layer's values."""
        return FeaturePlan(
            side="queries",
            form="both" if self.rope == "both" else "given",
            rotated=self.rope in TWO_FORMS,
            root=self.shape.scaling**0.5,
            unit_norm=self.beta_proj is not None,
            first=0,
            last=length,
            copies=1,
            dtype=matmul_dtype(v),
        )

    @torch.no_grad()
    def step_in_pool(self, inputs: MixerInputs, seen_B: Tensor, pool: Tensors, page_B: Tensor) -> Tensor:
        """Return out_BHTV of one token per row (T = 1), and update the state of each row in place.

        pool: the tensors of `empty_state`, with a page for each sequence of a server; row b has page_B[b], whose
        sequence has seen seen_B[b] tokens. A page must be zeros before its sequence's first token.
        """
        mask_pool = {name.removeprefix("mask."): t for name, t in pool.items() if name.startswith("mask.")}
        apply: MaskFn = lambda rows: (self.mask("step_in_pool", rows, mask_pool, page_B), None)  # noqa: E731
        rings = ("ring.", "sink.") if self.config.window else ()  # which are updated by slots
        past = {n: t[page_B] for n, t in pool.items() if not n.startswith(("mask.", *rings))}
        if not self.config.window:
            out_BHTV, after = self._run(inputs, MixerState(seen_B, past), apply, block=64)
            states = after.tensors
        else:
            with autocast_disabled(inputs.x_BTD.device):
                tokens, states = self.project_tokens(inputs, MixerState(seen_B, past))
                rows, local = self._step_rings(tokens, seen_B, pool, page_B)
                linear_BGJTV = self.mask.sum_queries(apply(rows)[0])
                out_BTHV = self._combine(linear_BGJTV, local, tokens.x_BTD, inputs.v_BGTV.dtype)
            out_BHTV = out_BTHV.transpose(1, 2).to(inputs.v_BGTV.dtype)
        for name in past:
            pool[name][page_B] = states[name].to(pool[name].dtype)
        return out_BHTV

    def _step_rings(
        self, tokens: ProjectedTokens, seen_B: Tensor, pool: Tensors, page_B: Tensor
    ) -> tuple[MaskInputs, LocalOutput]:
        """Store a token of each row in rings and sinks; return (inputs of the mask, whose written token is the one that
        leaves the window, softmax branch).

        Softmax does not depend on the order of its keys, so rings are read in the order of their slots.
        """
        assert self.window_buffer is not None
        window, sinks, slots = self.config.window, self.config.sinks, self.window_buffer.slots
        signals = self.mask("signals", tokens.x_BTD)
        new = self._written_tokens(tokens, signals)
        plan, leaving = ring_plan(tuple(seen_B.tolist()), window, sinks, slots, seen_B.device), {}
        for name, t in new.items():
            ring = pool[f"ring.{name}"]
            ring[page_B, plan.slot_B] = t.squeeze(1).to(ring.dtype)
            leaving[name] = ring[page_B, plan.next_B].unsqueeze(1).to(t.dtype)
        if len(plan.first_M):
            for name in "kv":
                sink, first_M = pool[f"sink.{name}"], plan.first_M
                sink[page_B[first_M], seen_B[first_M]] = new[name][first_M, 0].to(sink.dtype)
        # index_select copies whole pages, which indexing copies element by element.
        keys_BXGK, values_BXGV = (
            torch.cat([pool[f"{part}.{name}"].index_select(0, page_B) for part in ("sink", "ring")], dim=1)
            for name in "kv"
        )
        q_BGJTK = tokens.window_q_BTHK.transpose(1, 2).unflatten(1, (self.shape.groups, -1))
        largest = self.config.normalise
        local = attend_slots(q_BGJTK, keys_BXGK, values_BXGV, plan.visible_BX, self.shape, with_largest=largest)
        rows = self._mask_inputs(tokens, leaving, signals, seen_B)
        rows = replace(rows, start_B=plan.start_B, count_B=plan.count_B)
        return (rows if plan.all_write else zero_padding_writes(rows, self.mask.written_signals)), local

    def dense(self, inputs: MixerInputs) -> Tensor:
        """Return out_BHTV by the definition, in quadratic time."""
        block = self.config.window if self.config.near_tokens == "chunks" else None
        apply = lambda rows: (dense_output(self.mask, rows, block), None)  # noqa: E731
        return self._run(inputs, None, apply, inputs.x_BTD.shape[1])[0]

    def _apply_mask(
        self, rows: MaskInputs, state: Tensors | None, inputs: MixerInputs
    ) -> tuple[Tensor, Tensors | None]:
        after: Tensors | None
        if self.config.near_tokens == "chunks":
            out_BGJTV, after = self.mask("by_block", rows, state, self.config.window)
            return out_BGJTV, after
        if state is not None and rows.v_BGTV.shape[2] == 1:
            out_BGJTV, after = self.mask("step", rows, state)
            return out_BGJTV, after
        out_BGJTV, after = self.mask("chunked", to_matmul_dtype(rows, inputs.v_BGTV), state, self.config.chunk)
        return out_BGJTV.to(rows.v_BGTV.dtype), after

    def _run(
        self, inputs: MixerInputs, past: MixerState | None, apply: MaskFn, block: int
    ) -> tuple[Tensor, MixerState]:
        with autocast_disabled(inputs.x_BTD.device):
            linear_BGJTV, local, tokens, after = self._branches(inputs, past, apply, block)
            dtype = inputs.v_BGTV.dtype
            out_BTHV = tokens.unpadder.pad(self._combine(linear_BGJTV, local, tokens.x_BTD, dtype), dim=1)
            return out_BTHV.transpose(1, 2).to(dtype), after

    def outputs_by_linear_weight(self, inputs: MixerInputs, weights: Sequence[float]) -> list[Tensor]:
        """Return one output (B, H, T, V) per weight: that weight on the linear branch of all heads, 1 on the softmax
        branch. The branches are computed once."""
        assert self.linear_weight_H is not None
        with autocast_disabled(inputs.x_BTD.device):
            apply = lambda rows: self._apply_mask(rows, None, inputs)  # noqa: E731
            linear_BGJTV, local, tokens, _ = self._branches(inputs, None, apply, max(self.config.window, 64))
            outs = []
            for weight in weights:
                linear_H = torch.full_like(self.linear_weight_H, weight)
                weights_H = linear_H, torch.ones_like(linear_H)
                out_BTHV = self._combine(linear_BGJTV, local, tokens.x_BTD, torch.float32, *weights_H)
                outs.append(tokens.unpadder.pad(out_BTHV, dim=1).transpose(1, 2))
        return outs

    def mask_inputs(self, inputs: MixerInputs) -> MaskInputs:
        """Return the inputs of the mask for rows that begin with these tokens."""
        found: list[MaskInputs] = []

        def apply(rows: MaskInputs) -> tuple[Tensor, None]:
            found.append(rows)
            return rows.v_BGTV.new_zeros(*rows.q_BGJTF.shape[:-1], rows.v_BGTV.shape[-1]), None

        with autocast_disabled(inputs.x_BTD.device):
            self._branches(inputs, None, apply, max(self.config.window, 64))
        return found[0]

    def _branches(
        self, inputs: MixerInputs, past: MixerState | None, apply: MaskFn, block: int
    ) -> tuple[Tensor, LocalOutput | None, ProjectedTokens, MixerState]:
        """Return (linear branch without its weight, softmax branch or None, tokens, state after the tokens).

        The linear branch may have the last tokens only, if those before read an empty state.
        past: None in a call without a state; the state after the tokens then lacks what only a later call reads.
        """
        buffer, stateless, first = self.window_buffer, past is None, self._are_first_tokens(inputs, past)
        past = past or self._empty_buffers(len(inputs.x_BTD), inputs.x_BTD.device, rings=not first)
        features = None
        if first:
            tokens, after, features = self._first_tokens(inputs, past)
        else:
            tokens, after = self.project_tokens(inputs, past)
        unpadder, local, queue = tokens.unpadder, None, {}
        # Only in training: kernels are compiled for a number of levels, and rows of inference have many lengths.
        length = inputs.x_BTD.shape[1] if stateless and torch.is_grad_enabled() else None
        signals = self.mask("signals", tokens.x_BTD, length)
        written = self._written_tokens(tokens, signals)
        if buffer is not None and stateless and first:
            recent = buffer.recent_first_tokens(written)
            # Slices of the padded tokens, so that the backward pass keeps one copy of keys and values.
            written.update({name: t[:, buffer.window :] for name, t in recent.items()})
            sinks = buffer.first_sinks(written)
            local = self._local_attention(tokens.window_q_BTHK, recent, sinks, past.seen_B, block)
        elif buffer is not None:
            queue = buffer.queue(written, past.tensors, past.seen_B)
            sinks = {n: buffer.fill_sinks(n, written[n], past.tensors, past.seen_B, unpadder) for n in "kv"}
            recent = buffer.recent_tokens(queue)
            local = self._local_attention(tokens.window_q_BTHK, recent, sinks, past.seen_B, block)
            after = {
                **after,
                **buffer.next_rings(queue, past.seen_B, unpadder),
                **{f"sink.{n}": t for n, t in sinks.items()},
            }
        max_seen = None if past.max_seen is None else past.max_seen + inputs.x_BTD.shape[1]
        if features is not None:
            linear_BGJTV, mask_state = self._branch_of_first_tokens(
                tokens, features, written, signals, past.seen_B, apply
            )
        elif isinstance(buffer, ChunkBuffer):
            linear_BGJTV, mask_state = self._branch_of_blocks(tokens, queue, signals, past, max_seen, apply)
        else:
            written = written if buffer is None else buffer.delayed_tokens(queue)
            rows = replace(self._mask_inputs(tokens, written, signals, past.seen_B), max_seen=max_seen)
            linear_BGJTV, mask_state = self._linear_branch(rows, apply, unpadder)
        linear_BGJTV = self.mask.sum_queries(linear_BGJTV)
        after.update({f"mask.{name}": t for name, t in (mask_state or {}).items()})
        return linear_BGJTV, local, tokens, MixerState(past.seen_B + unpadder.count_B, after, max_seen)

    def _are_first_tokens(self, inputs: MixerInputs, past: MixerState | None) -> bool:
        """Return whether all rows begin with this call, have no padding, and go on behind window and sinks.

        The first token written and the first query that reads it are then the same in all rows: slices take the place
        of tables. Without a window every query reads, and `linear_features` computes its features by a kernel.
        """
        buffer, length = self.window_buffer, inputs.x_BTD.shape[1]
        if isinstance(buffer, ChunkBuffer) or inputs.valid_BT is not None or not self.shape.causal:
            return False
        begins = past is None or past.max_seen == 0
        return begins and length > (1 if buffer is None else buffer.window + buffer.sinks)

    def _first_tokens(
        self, inputs: MixerInputs, past: MixerState
    ) -> tuple[ProjectedTokens, Tensors, tuple[Tensor, Tensor]]:
        """Return (tokens, state of the convolution, features of queries and of keys) of rows for which
        `_are_first_tokens` holds.

        Features are those of the queries that read a state (B, H, L, F), and of the tokens written before the last of
        them (B, G, L, F). q and k of the tokens have one form, that before RoPE where the branches read two.
        """
        tokens, after = self._convolved_tokens(inputs, past)
        window, sinks, length = self.config.window, self.config.sinks, tokens.x_BTD.shape[1]
        rotation = self._rotation(inputs, tokens) if self.rope in TWO_FORMS else None
        plan = replace(self._feature_plan(inputs.v_BGTV, length), first=window + sinks)
        key_plan = replace(plan, side="keys", first=sinks, last=length - window, copies=self.key_copies)
        position_BT = token_positions(tokens, past.seen_B)
        q_BHLF, q_BTHK = linear_features(tokens.q_BTHK, rotation, self.feature_map, position_BT, plan)
        k_BGLF, k_BTGK = linear_features(tokens.k_BTGK, rotation, self.feature_map, position_BT, key_plan)
        return replace(tokens, window_q_BTHK=q_BTHK, window_k_BTGK=k_BTGK), after, (q_BHLF, k_BGLF)

    def _branch_of_first_tokens(
        self,
        tokens: ProjectedTokens,
        features: tuple[Tensor, Tensor],
        written: Tensors,
        signals: Signals,
        seen_B: Tensor,
        apply: MaskFn,
    ) -> tuple[Tensor, Tensors | None]:
        """Return (out_BGJTV of the linear branch, state of the mask) of rows for which `_are_first_tokens` holds.

        The outputs are those of the queries that read a state; earlier ones have none. features: see `_first_tokens`.
        The token at position `sinks` is the first written, just before the query at `window + sinks` reads.
        """
        window, sinks, length = self.config.window, self.config.sinks, tokens.x_BTD.shape[1]
        start = window + sinks
        written = {name: t[:, sinks : length - window] for name, t in written.items()}
        rows = self._mask_rows(
            features[0].unflatten(1, (self.linear_shape.groups, -1)),
            features[1],
            written,
            {name: t[:, start:] for name, t in signals.items()},
            seen_B,
            tokens.unpadder.count_B - start,
            dtype=matmul_dtype(written["v"]),
        )
        return apply(replace(rows, max_seen=length - start))

    def project_tokens(self, inputs: MixerInputs, past: MixerState) -> tuple[ProjectedTokens, Tensors]:
        """Return (unpadded and convolved tokens with q and k of both branches, state of the convolution after them)."""
        tokens, after = self._convolved_tokens(inputs, past)
        if self.rope not in TWO_FORMS:
            return tokens, after
        cos_BTR, sin_BTR = self._rotation(inputs, tokens)
        q, k = (apply_rope(t, cos_BTR, sin_BTR) for t in (tokens.q_BTHK, tokens.k_BTGK))
        tokens = replace(tokens, window_q_BTHK=q, window_k_BTGK=k)
        if self.rope == "window":
            return tokens, after
        both_q, both_k = torch.cat([tokens.q_BTHK, q], dim=-1), torch.cat([tokens.k_BTGK, k], dim=-1)
        return replace(tokens, q_BTHK=both_q, k_BTGK=both_k), after

    def _convolved_tokens(
        self, inputs: MixerInputs, past: MixerState, pieces: PackedPieces | None = None
    ) -> tuple[ProjectedTokens, Tensors]:
        """Return (unpadded and convolved tokens with q and k as given, state of the convolution after them).

        pieces: of several sequences, if the tokens are those of one row.
        """
        x_BTD, heads = inputs.x_BTD, (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV)
        if pieces is None:
            unpadder = Unpadder.from_mask(inputs.valid_BT, x_BTD.shape[0], x_BTD.shape[1], x_BTD.device)
        else:
            unpadder = pieces.unpadder
        q, k, v = (unpadder.unpad(t.transpose(1, 2), dim=1) for t in heads)
        x_BTD = unpadder.unpad(x_BTD, dim=1)
        if self.convolution is None:
            return ProjectedTokens(q, k, v, x_BTD, unpadder, q, k), {}
        channels_BTC = torch.cat([t.flatten(2) for t in (q, k, v)], dim=-1)
        if pieces is None:
            channels_BTC, past_BWC = self.convolution(channels_BTC, past.tensors["convolution"], unpadder)
        else:
            channels_BTC, past_BWC = self._convolve_packed(channels_BTC, past.tensors["convolution"], pieces)
        parts = channels_BTC.split([t.shape[2] * t.shape[3] for t in (q, k, v)], dim=-1)
        q, k, v = (convolved.view_as(t) for convolved, t in zip(parts, (q, k, v)))
        return ProjectedTokens(q, k, v, x_BTD, unpadder, q, k), {"convolution": past_BWC}

    def _convolve_packed(self, x_BTC: Tensor, past_RPC: Tensor, pieces: PackedPieces) -> tuple[Tensor, Tensor]:
        """Return (convolved tokens of pieces in one row, last inputs of each sequence): each piece stands behind the last
        inputs of its sequence, whose outputs are dropped."""
        plan, dtype = pieces.convolution_plan(past_RPC.shape[1]), torch.promote_types(x_BTC.dtype, past_RPC.dtype)
        stored_SC = torch.cat([past_RPC.flatten(0, 1).to(dtype), x_BTC.squeeze(0).to(dtype)])
        all_BMC = stored_SC[plan.source_M].unsqueeze(0)
        unpadder = Unpadder.from_mask(None, 1, all_BMC.shape[1], all_BMC.device)
        assert self.convolution is not None
        y_BMC, _ = self.convolution(all_BMC, past_RPC.new_zeros(1, *past_RPC.shape[1:]), unpadder)
        return y_BMC[:, plan.place_N].to(x_BTC.dtype), stored_SC[plan.last_RP]

    def _rotation(self, inputs: MixerInputs, tokens: ProjectedTokens) -> tuple[Tensor, Tensor]:
        """Return cos and sin (B, T, R) of the unpadded tokens."""
        if inputs.rope is None:
            raise SurgeryError(
                f"linear: rope: {self.rope} reads the rotation from position_embeddings, which this attention does not "
                "get; use rope: keep"
            )
        batch = tokens.x_BTD.shape[0]
        cos_BTR, sin_BTR = (tokens.unpadder.unpad(t.expand(batch, -1, -1), dim=1) for t in inputs.rope)
        return cos_BTR, sin_BTR

    def _mask_inputs(self, tokens: ProjectedTokens, written: Tensors, signals: Signals, seen_B: Tensor) -> MaskInputs:
        """Return the inputs of the mask.

        Entry i holds query i and the key and value written just before query i reads: those of token i, or of token i -
        window if there is a softmax branch.
        """
        position_BT = token_positions(tokens, seen_B)
        return self._assemble_inputs(tokens, written, signals, seen_B, position_BT, position_BT - self.config.window)

    def _assemble_inputs(
        self,
        tokens: ProjectedTokens,
        written: Tensors,
        signals: Signals,
        seen_B: Tensor,
        position_BT: Tensor,
        written_BL: Tensor,
    ) -> MaskInputs:
        """Return the inputs of the mask of T queries at positions position_BT and L written tokens at written_BL."""
        dtype, root = accumulation_dtype(tokens.q_BTHK), self.shape.scaling**0.5
        copies = self.linear_shape.groups // self.shape.groups
        k = written.get("linear_k", written["k"])
        if self.rope == "both":
            k = torch.cat([k, written["k"]], dim=-1)
        k = k if copies == 1 else k.repeat_interleave(copies, dim=2)
        k_BGTF = self.feature_map("keys", k.transpose(1, 2).to(dtype) * root, written_BL)
        if self.beta_proj is not None:
            k_BGTF = l2_normalize(k_BGTF)
        q_BGJTF = self._query_features(tokens, position_BT)
        count_B, dtype = tokens.unpadder.count_B, accumulation_dtype(written["v"])
        return self._mask_rows(q_BGJTF, k_BGTF, written, signals, seen_B, count_B, dtype=dtype)

    def _mask_rows(
        self,
        q_BGJTF: Tensor,
        k_BGTF: Tensor,
        written: Tensors,
        signals: Signals,
        seen_B: Tensor,
        count_B: Tensor,
        *,
        dtype: torch.dtype,
    ) -> MaskInputs:
        """Return the inputs of the mask of features, with the values and signals that are written. dtype: of values
        that are not normalised."""
        copies, v = self.linear_shape.groups // self.shape.groups, written["v"]
        v = v if copies == 1 else v.repeat_interleave(copies, dim=2)
        # Values without a column of ones can stay in the dtype of the products, in which kernels read them.
        v_BGTV = v.transpose(1, 2).to(accumulation_dtype(v) if self.config.normalise else dtype)
        q_BGJTF, signals = self.mask("expand_queries", q_BGJTF, signals)
        return MaskInputs(
            q_BGJTF=q_BGJTF,
            k_BGTF=k_BGTF,
            v_BGTV=F.pad(v_BGTV, (0, 1), value=1.0) if self.config.normalise else v_BGTV,
            beta_BGT=written["beta"].mT if self.beta_proj is not None else None,
            start_B=seen_B,
            count_B=count_B,
            signals={name: written.get(name, t) for name, t in signals.items()},
        )

    def _query_features(self, tokens: ProjectedTokens, position_BT: Tensor) -> Tensor:
        """Return the features of the queries at these positions, (B, G, J, T, F)."""
        q_BHTK = tokens.q_BTHK.transpose(1, 2).to(accumulation_dtype(tokens.q_BTHK)) * self.shape.scaling**0.5
        q_BHTF = self.feature_map("queries", q_BHTK, position_BT)
        q_BHTF = q_BHTF if self.beta_proj is None else l2_normalize(q_BHTF)
        q_BGJTF: Tensor = q_BHTF.unflatten(1, (self.linear_shape.groups, -1))
        return q_BGJTF

    def _branch_of_blocks(
        self,
        tokens: ProjectedTokens,
        queue: Tensors,
        signals: Signals,
        past: MixerState,
        max_seen: int | None,
        apply: MaskFn,
    ) -> tuple[Tensor, Tensors | None]:
        """Return (out_BGJTV of the linear branch of `near_tokens: chunks`, state of the mask). queue: see
        `ChunkBuffer.queue`.
        """
        buffer, seen_B, length = self.window_buffer, past.seen_B, tokens.x_BTD.shape[1]
        assert isinstance(buffer, ChunkBuffer)
        before = {n.removeprefix("mask."): t for n, t in past.tensors.items() if n.startswith("mask.")}
        far_B = buffer.far_tokens_of_rows(seen_B)
        ends_block_B = buffer.far_tokens_of_rows(seen_B + tokens.unpadder.count_B) > far_B
        out_BGJTV: Tensor
        if before and length == 1 and not bool(ends_block_B.any()):
            q_BGJTF = self._query_features(tokens, token_positions(tokens, seen_B))
            q_BGJTF, signals = self.mask("expand_queries", q_BGJTF, signals)
            out_BGJTV = self.mask("read", q_BGJTF, far_B, signals, before)
            return out_BGJTV, before
        entries = length if past.max_seen == 0 else length + buffer.window - 1
        written, position_BL = buffer.written_tokens(queue, seen_B, entries)
        query_BT = token_positions(tokens, seen_B)
        rows = self._assemble_inputs(tokens, written, signals, seen_B, query_BT, position_BL)
        rows = replace(rows, max_seen=max_seen)
        names = self.mask.written_signals
        rows, place_B = buffer.align_queries(rows, [name for name in rows.signals if name not in names])
        out_BGJTV, mask_state = apply(zero_padding_writes(rows, names))
        out_BGJTV = shift_rows(out_BGJTV, place_B, dim=3)[:, :, :, :length]
        return out_BGJTV, mask_state

    def _linear_branch(self, rows: MaskInputs, apply: MaskFn, unpadder: Unpadder) -> tuple[Tensor, Tensors | None]:
        """Return (out_BGJTV of the linear branch, state of the mask)."""
        if self.window_buffer is not None:
            rows, offset_B = self.window_buffer.align_inputs(rows)
            out_BGJTV, mask_state = apply(zero_padding_writes(rows, self.mask.written_signals))
            return shift_rows(out_BGJTV, -offset_B, dim=3), mask_state
        if unpadder.index_BT is not None:
            rows = zero_padding_writes(rows, self.mask.written_signals)
        if self.shape.causal or self.config.mask.name in BIDIRECTIONAL_MASKS:
            return apply(rows)
        return bidirectional_output(lambda r: apply(r)[0], self.mask, rows, unpadder), None

    def _local_attention(
        self, q_BTHK: Tensor, recent: Tensors, sinks: Tensors, seen_B: Tensor, block: int
    ) -> LocalOutput:
        q_BGJTK = q_BTHK.transpose(1, 2).unflatten(1, (self.shape.groups, -1))
        keys, values = (RecentAndSinks(recent[n].transpose(1, 2), sinks[n].transpose(1, 2)) for n in "kv")
        attend = chunk_attention if self.config.near_tokens == "chunks" else local_attention
        return attend(q_BGJTK, keys, values, seen_B, self.shape, block, with_largest=self.config.normalise)

    def _combine(
        self,
        linear_BGJTV: Tensor,
        local: LocalOutput | None,
        x_BTD: Tensor,
        dtype: torch.dtype,
        linear_H: Tensor | None = None,
        local_H: Tensor | None = None,
    ) -> Tensor:
        """Return out_BTHV: the weighted sum of the branches, then normalisation, norm and gate.

        dtype: in which the caller reads the output; it may be wider. linear_H, local_H: weights of the branches, the
        learned ones if None.
        """
        linear_H = self.linear_weight_H if linear_H is None else linear_H
        local_H = self.near_weight_H if local_H is None else local_H
        out = linear_BGJTV.flatten(1, 2).transpose(1, 2)
        normalise = self.config.normalise
        if local is not None and local_H is not None and linear_H is not None and self._has_plain_join():
            if self.training and self.near_switch is not None:
                sums = accumulation_dtype(out)
                local_H = local_H.to(sums) * self.near_switch.to(sums)
            gate_BTHV = None if self.gate is None else self.gate.logits(x_BTD)
            return join_and_gate(local.out.flatten(1, 2), out.transpose(1, 2), local_H, linear_H, gate_BTHV, dtype)
        out = out.to(accumulation_dtype(out))
        far_H1 = None if linear_H is None else branch_weight(linear_H, out, normalise)
        if local is not None and local_H is not None and far_H1 is not None:
            # Under one denominator, weights of the softmax branch are exp(score - largest) (LoLCATs, eq. 6).
            near = (local.sums() if normalise else local.out).flatten(1, 2).transpose(1, 2)
            near_H1 = branch_weight(local_H, out, normalise)
            if self.training and self.near_switch is not None:
                near_H1 = near_H1 * self.near_switch.to(near_H1.dtype)
            out = join_branches(near, out, near_H1, far_H1)
        elif far_H1 is not None:
            out = out * far_H1
        if normalise:
            out = out[..., :-1] / out[..., -1:].clamp_min(max(self.feature_map.min_denominator, MIN_DENOMINATOR))
        if self.norm is not None:
            out = self.norm(out)
        return out if self.gate is None else self.gate(out, x_BTD)

    def _has_plain_join(self) -> bool:
        """Return whether `join_and_gate` computes what joins the branches: no norm, and a gate without hooks."""
        return not self.config.normalise and self.norm is None and (self.gate is None or not is_hooked(self.gate))

    @classmethod
    def cost(cls, config: LinearAttention, shape: AttentionShape, length: int) -> MixerCost:
        """Return cache size, multiply-accumulates and parameters for a context of `length` tokens."""
        with EmptyOnMeta():
            mixer = cls(config, shape)
        mixer.to("meta")
        for submodule in (
            mixer.mask,
            mixer.beta_proj,
        ):  # on meta tensors their functions would import torch._dynamo and sympy
            if submodule is not None:
                empty_on_cpu(submodule)
        buffers = mixer._empty_buffers(1, "cpu")
        features, values = mixer._num_features(), shape.value + config.normalise
        far, mask = max(0, length - config.window - config.sinks), MASKS[config.mask]
        state_size = mask.state_size
        if isinstance(mixer.window_buffer, ChunkBuffer):
            far, state_size = mixer.window_buffer.far_tokens(length), mask.state_size_by_block
        local, state = length - far, state_size(config.mask, mask_shape(config, shape), features, values, far)
        groups = mixer.linear_shape.groups
        writes = groups * features * values * (3 if config.scores == "delta" else 1)
        linears = sum(m.weight.numel() for m in mixer.modules() if isinstance(m, (nn.Linear, ShortConvolution)))
        macs = shape.heads * (state + local * (shape.key + shape.value)) + writes + linears
        macs += shape.heads * mask.query_macs(config.mask, mask_shape(config, shape), features)
        tokens = sum(t.numel() for name, t in buffers.tensors.items() if name in TOKENS_IN_MODEL_DTYPE)
        others = groups * state + sum(t.numel() for n, t in buffers.tensors.items() if n not in TOKENS_IN_MODEL_DTYPE)
        return MixerCost(
            cache=tokens + others,
            macs=macs + mixer.feature_map.macs(config.features, mixer.linear_shape),
            params=sum(t.numel() for t in (*mixer.parameters(), *mixer.buffers())),
            float32=others,
        )


def empty_on_cpu(module: nn.Module) -> None:
    """Replace the module's parameters and buffers by uninitialized ones of the same shapes on the CPU."""
    for submodule in module.modules():
        for name, t in submodule.named_parameters(recurse=False):
            setattr(submodule, name, nn.Parameter(torch.empty(t.shape, dtype=t.dtype)))
        for name, buffer in submodule.named_buffers(recurse=False):
            setattr(submodule, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def mix_tokens(q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, state: MixerState) -> tuple[Tensor, MixerState]:
    """Return `mixer.mix(inputs, state)` for any number of tokens. q_BHTK: the queries of `inputs`."""
    mask_state = {name.removeprefix("mask."): t for name, t in state.tensors.items() if name.startswith("mask.")}
    apply = lambda rows: mixer._apply_mask(rows, mask_state, inputs)  # noqa: E731
    return mixer._run(inputs, state, apply, max(mixer.config.window, 64))


@dispatched
def one_token(q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, state: MixerState) -> tuple[Tensor, MixerState]:
    """Return `mixer.mix(inputs, state)` for one token per row. A kernel may replace this function; the queries are an
    argument of their own because dispatch looks at the device of tensor arguments."""
    return mix_tokens(q_BHTK, mixer, inputs, state)


@dispatched
def step_in_pool(
    q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, seen_B: Tensor, pool: Tensors, page_B: Tensor
) -> Tensor:
    """Return out_BHTV of one token per row (T = 1), and update the rows' pages of a server's cache in place, as
    `LinearMixer.step_in_pool`. q_BHTK: the queries of `inputs`.

    A kernel that replaces this function takes the page of a row with seen_B = 0 as empty, whatever it holds, and rows
    with seen_B < 0 as padding: zeros, no page. The reference has neither: it needs pages of zeros.
    """
    return mixer.step_in_pool(inputs, seen_B, pool, page_B)


class RingPlan(NamedTuple):
    """Where the tokens of a decoding step are stored and read, of rows that have seen some tokens.

    slot_B, next_B: the slot of the ring that the token takes, and the one after it, of the token that leaves the window.
    first_M: the rows whose token is a sink. visible_BX: which sinks and slots a query attends to. start_B, count_B: the
    tokens in the mask's state, and whether one enters it, 0 or 1. all_write: whether one enters it in every row.
    """

    slot_B: Tensor
    next_B: Tensor
    first_M: Tensor
    visible_BX: Tensor
    start_B: Tensor
    count_B: Tensor
    all_write: bool


@lru_cache(maxsize=16)  # the layers of a model ask for the same plan
def ring_plan(seen: tuple[int, ...], window: int, sinks: int, slots: int, device: torch.device) -> RingPlan:
    """Return the plan of a window of these sizes."""
    seen_B = torch.tensor(seen, device=device)
    slot_X, seen_B1 = torch.arange(slots, device=device), seen_B.unsqueeze(1)
    position_BX = seen_B1 - (seen_B1 - slot_X) % slots
    recent_BX = (position_BX > seen_B1 - window) & (position_BX >= sinks)
    sink_BX = torch.arange(sinks, device=device) <= seen_B1
    first_M, far_B = (seen_B < sinks).nonzero().squeeze(1), seen_B - window - sinks
    visible_BX, writes_B = torch.cat([sink_BX, recent_BX], dim=1), far_B >= 0
    slots_B = seen_B % slots, (seen_B + 1) % slots
    return RingPlan(*slots_B, first_M, visible_BX, far_B.clamp_min(0), writes_B.long(), bool(writes_B.all()))


def token_positions(tokens: ProjectedTokens, seen_B: Tensor) -> Tensor:
    """Return the positions (B, T) of the tokens, which follow seen_B others."""
    return seen_B.unsqueeze(1) + torch.arange(tokens.x_BTD.shape[1], device=seen_B.device)


def is_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for the device of x."""
    return torch.is_autocast_enabled(x.device.type)


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for a float64 tensor, float32 for all others."""
    return torch.promote_types(tensor.dtype, torch.float32)


def matmul_dtype(v: Tensor) -> torch.dtype:
    """Return bfloat16 (tensor cores) if the layer's values `v` are bfloat16 on a GPU, else their accumulation dtype.

    float16 is not used, because features may exceed its range.
    """
    return torch.bfloat16 if v.dtype == torch.bfloat16 and v.is_cuda else accumulation_dtype(v)


def to_matmul_dtype(rows: MaskInputs, v: Tensor) -> MaskInputs:
    """Return the rows with q, k and v in `matmul_dtype` of the layer's values `v`, if that is bfloat16.

    Gates and states keep their dtype.
    """
    operands = rows.q_BGJTF, rows.k_BGTF, rows.v_BGTV
    if matmul_dtype(v) != torch.bfloat16 or all(x.dtype == torch.bfloat16 for x in operands):
        return rows
    q, k, v = (x.to(torch.bfloat16) for x in operands)
    return replace(rows, q_BGJTF=q, k_BGTF=k, v_BGTV=v)


def branch_weight(weight_H: Tensor, out_BTHV: Tensor, normalise: bool) -> Tensor:
    """Return the weight of a branch (H, 1) to multiply (B, T, H, V) with; clamped to >= 0 in normalised attention,
    where the branches share a denominator."""
    weight_H1 = weight_H.to(out_BTHV.dtype).unsqueeze(-1)
    return weight_H1.clamp_min(0) if normalise else weight_H1
