"""One token through a linear mixer with a window in two launches: projections of the hidden states, then everything
else.

The first launch computes gates, step sizes and lambdas (kernels/ssd/fused_token.py). The second updates and reads the
states, does the softmax over window and sinks, adds both, and writes the token into its slots of the rings
(kernels/window_step/step.py), and multiplies by the output gate. Mixers that rotate q and k themselves or have Hedgehog
features need a third launch (kernels/window_step/prepare.py). Other feature maps, the short convolution, the product of
the output gate and the norm run in torch before and behind.

The reference takes 151 operations of torch for such a step of SSD and 212 of log-linear GDN (window 64, four sinks),
counted without views.

A state that is donated is updated in place: its rings always, its states unless they get more levels or are normalised.

A server's step, with or without a window, has one launch more, with a program for each state: `step_in_pages` reads and
writes the states of all rows where they lie in the server's cache, by the page numbers and lengths on the device. It
launches the same kernels for all lengths and never waits for the GPU, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.kernel_tensors import unit_last_stride
from surgery.kernels.launch import CachedLaunch
from surgery.kernels.local_attention import DTYPES, MAX_DIMS, MAX_SINKS
from surgery.kernels.ssd.fused_token import (
    block_bits,
    count_lambdas,
    count_states,
    gates_of,
    knows_mask,
    project_signals,
    reads_plain_linears,
)
from surgery.kernels.ssd.layout import power_of_two
from surgery.kernels.ssd.recurrent import MAX_FEATURES, MAX_HEADS
from surgery.kernels.tuning import CallReader, TuningQuery, is_capturing, is_fastest, named_sizes, step_pass
from surgery.kernels.window_step.prepare import Features, KeyRings, fits, prepare_heads
from surgery.kernels.window_step.step import bucket_step, window_step
from surgery.mixers.base import MixerInputs, MixerState
from surgery.mixers.common.window_hybrid import Tensors
from surgery.mixers.features.hedgehog import HedgehogMap
from surgery.mixers.features.simple import IdentityMap
from surgery.mixers.linear import MIN_DENOMINATOR, LinearMixer, one_token, step_in_pool
from surgery.mixers.linear_config import TWO_FORMS
from surgery.mixers.masks.gates import GatesMask
from surgery.mixers.masks.log_linear import HierarchicalMask
from surgery.mixers.padding import gather_rowwise
from surgery.mixers.projections import autocast_disabled, is_hooked

VALUES_PER_PROGRAM = 32
FEW_PROGRAMS = 256  # fewer leave processors of an H100 without work
RECENT_PER_TILE = 64


class StepTokens(NamedTuple):
    """The token of each row as the two branches read it.

    q, far_k: (B, H, F) and a key for each group of states, without their factor `root`; far_k is a ring (B, slots, KV,
    F) if `in_ring`, else (B, G, F). near_q (B, H, K), k (B, KV, K), v (B, KV, V): of the softmax. new_far_k (B, KV,
    F'): the key that the ring `linear_k` keeps, None without that ring. x: hidden states (B, 1, D). others: the state's
    tensors that torch has updated.
    """

    q: Tensor
    far_k: Tensor
    in_ring: bool
    root: float
    near_q: Tensor
    k: Tensor
    v: Tensor
    new_far_k: Tensor | None
    x: Tensor
    others: dict[str, Tensor]


def prepare_tokens(
    mixer: LinearMixer, inputs: MixerInputs, state: MixerState, page_B: Tensor | None = None
) -> StepTokens:
    """Return the token of each row, after convolution, RoPE and feature map. page_B: the rows' pages in the tensors of
    the state, if it is a server's cache."""
    far_q, far_k, v = (t[:, :, 0] for t in (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV))
    near_q, near_k, x_B1D = far_q, far_k, inputs.x_BTD
    others: dict[str, Tensor] = {}
    two, both = mixer.rope in TWO_FORMS, mixer.rope == "both"
    rope = inputs.rope if two and mixer.convolution is None else None  # which this step has to apply
    if rope is None and (mixer.convolution is not None or two):
        tokens, others = mixer.project_tokens(inputs, state)
        forms = tokens.q_BTHK, tokens.k_BTGK, tokens.v_BTGV, tokens.window_q_BTHK, tokens.window_k_BTGK
        far_q, far_k, v, near_q, near_k = (t[:, 0] for t in forms)
        x_B1D = tokens.x_BTD
    root, linear_k = mixer.shape.scaling**0.5, far_k[..., : mixer.shape.key] if two else None
    ring = state.tensors["ring.linear_k" if two else "ring.k"] if mixer.config.window else None
    is_identity, features = type(mixer.feature_map) is IdentityMap, None
    if (not is_identity or both) and knows_features(mixer):
        features = _features(mixer, state, root, ring, page_B)
    if rope is not None or features is not None:
        q_BHF, k_BGF, turned_q, turned_k = prepare_heads(far_q, far_k, rope, features)
        if rope is not None:
            near_q, near_k = turned_q, turned_k
        if q_BHF is not None and k_BGF is not None:
            return StepTokens(q_BHF, k_BGF, False, 1.0, near_q, near_k, v, linear_k, x_B1D, others)
    if is_identity:
        key, in_ring = (far_k, False) if ring is None else (ring, True)
        return StepTokens(far_q, key, in_ring, root, near_q, near_k, v, linear_k, x_B1D, others)
    if rope is not None and both:
        far_q, far_k = torch.cat([far_q, near_q], dim=-1), torch.cat([far_k, near_k], dim=-1)
    position_B1 = state.seen_B.unsqueeze(1)
    key_BGK = far_k
    if ring is not None:
        slot_B = (state.seen_B + 1) % ring.shape[1]
        rings = (ring, state.tensors["ring.k"]) if both else (ring,)
        key_BGK = torch.cat([take_slots(x, slot_B, page_B) for x in rings], dim=-1)
    copies = mixer.linear_shape.groups // mixer.shape.groups
    key_BGK = key_BGK if copies == 1 else key_BGK.repeat_interleave(copies, dim=1)
    q_BHF = mixer.feature_map("queries", far_q.unsqueeze(2).float() * root, position_B1)[:, :, 0]
    k_BGF = mixer.feature_map("keys", key_BGK.unsqueeze(2).float() * root, position_B1 - mixer.config.window)[:, :, 0]
    q_BHF, k_BGF = unit_last_stride(q_BHF), unit_last_stride(k_BGF)
    return StepTokens(q_BHF, k_BGF, False, 1.0, near_q, near_k, v, linear_k, x_B1D, others)


def knows_features(mixer: LinearMixer) -> bool:
    """Return whether a kernel computes the mixer's feature map: none, or Hedgehog's without hooks."""
    feature_map, both = mixer.feature_map, mixer.rope == "both"
    if type(feature_map) is IdentityMap:
        return True
    columns = mixer.shape.key * (2 if both else 1)
    return type(feature_map) is HedgehogMap and not is_hooked(feature_map) and fits(columns, both)


def _features(
    mixer: LinearMixer, state: MixerState, root: float, ring: Tensor | None, page_B: Tensor | None
) -> Features:
    feature_map, rings = mixer.feature_map, None
    if ring is not None:
        rings = KeyRings(ring, state.tensors["ring.k"], state.seen_B, page_B, mixer.config.window)
    query_w, key_w = None, None
    if isinstance(feature_map, HedgehogMap):
        query_w, key_w = feature_map.query_HKK, feature_map.key_GKK
    return Features(query_w, key_w, root, mixer.linear_shape.groups, mixer.rope == "both", rings)


def take_slots(ring: Tensor, slot_B: Tensor, page_B: Tensor | None) -> Tensor:
    """Return a slot of each row's ring, (B, KV, ..)."""
    if page_B is None:
        taken: Tensor = gather_rowwise(ring, slot_B.unsqueeze(1), dim=1)[:, 0]
        return taken
    return ring[page_B.clamp_min(0), slot_B]  # the clamp is for rows without a token


def writable_tensors(mixer: LinearMixer, state: MixerState, after: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return (rings and sinks that the launch may write to, states before the token, tensor for the states behind
    it).
    """
    waiting = {name: t for name, t in state.tensors.items() if name.startswith(("ring.", "sink."))}
    before = state.tensors[states_name(mixer)]
    if not state.donated:
        waiting = {name: t.clone() for name, t in waiting.items()}
    # Programs of other tiles read a normalised state's column of ones, which the first tile writes.
    if state.donated and after == before.shape[1] and not mixer.config.normalise:
        return waiting, before, before
    return waiting, before, before.new_empty(len(before), after, *before.shape[2:])


def states_name(mixer: LinearMixer) -> str:
    """Return the name of the mask's states among the tensors of a mixer's state."""
    return "mask.buckets" if isinstance(mixer.mask, HierarchicalMask) else "mask.sum"


@lru_cache(maxsize=1024)
def _launch(
    kernel: Any, grid: tuple[int, ...], sizes: tuple[int, ...], names: tuple[str, ...], options: tuple[Any, ...]
) -> CachedLaunch:
    return CachedLaunch(kernel, grid, sizes, dict(zip(names, options)))


def step_tile(features: int, values: int) -> tuple[int, int]:
    """Return (values of a program, its warps, as few as do not spill registers) of a step outside of pages."""
    block = min(power_of_two(values), VALUES_PER_PROGRAM if features <= 256 else 16)
    return block, 16 if features > 512 else 8 if features > 128 else 4


def bucket_tile(features: int, values: int, lanes: int) -> tuple[int, int]:
    """Return (values of a program of `bucket_step`, its warps). lanes: rows times groups of states.

    A warp has 2,048 numbers of a state; few lanes get more programs. With 256 features and 8 groups of 64 values a step of
    a layer took, on an H200, 22 us at one row with 8 values and one warp, and at 64 rows 193 us with 32 values and four
    warps, 208 with 16 and four, 242 with 8 and one.
    """
    block = next((n for n in (32, 16) if lanes * triton.cdiv(values, n) >= FEW_PROGRAMS), 8)
    return block, min(16, max(1, power_of_two(features) * block // 2048))


def finish_tile(values: int, lanes: int) -> tuple[int, int]:
    """Return (values of a program, its warps) where `bucket_step` has updated the states: 64 rows as above took 199 us with
    32 values, 208 with 16."""
    return min(power_of_two(values), 32 if lanes >= FEW_PROGRAMS else 16), 4


def launch_step(
    mixer: LinearMixer, tokens: StepTokens, inputs: MixerInputs, state: MixerState, dtype: torch.dtype
) -> tuple[Tensor, MixerState]:
    """Return (out (B, H, V) in that dtype, the state behind the token)."""
    config, states = mixer.config, state.tensors[states_name(mixer)]
    max_seen = (state.max_seen or 0) + 1
    after = count_states(mixer, states, max(0, max_seen - config.window - config.sinks))
    held, buckets, new_buckets = writable_tensors(mixer, state, after)
    seen_B = torch.empty_like(state.seen_B)
    count_B = None if inputs.valid_BT is None else inputs.valid_BT[:, 0]
    out_BHV = _launch_on(
        mixer, tokens, held, (buckets, new_buckets), (state.seen_B, seen_B, count_B), page_B=None, dtype=dtype
    )
    held |= {**tokens.others, states_name(mixer): new_buckets}
    return out_BHV, MixerState(seen_B, {name: held[name] for name in state.tensors}, max_seen)


def _launch_on(
    mixer: LinearMixer,
    tokens: StepTokens,
    held: Tensors,
    states: tuple[Tensor, Tensor],
    seen: tuple[Tensor, Tensor, Tensor | None],
    *,
    page_B: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return out (B, H, V) in that dtype, and write what the kernel stores.

    held: rings and sinks. states: before and behind the token. seen: tokens of each row before the step, where to store
    those after it, and the count of the step, or None if every row has a token. page_B: each row's page in rings, sinks
    and states, None if they have a row each.
    """
    shape, config, groups = mixer.shape, mixer.config, mixer.linear_shape.groups
    (buckets, new_buckets), (seen_B, seen_after_B, count_B), window = states, seen, mixer.config.window
    gate_BG, beta_BG, level = project_signals(mixer, tokens.x[:, 0], count_lambdas(mixer, buckets))
    output_gate = None if mixer.gate is None or mixer.norm is not None else mixer.gate.logits(tokens.x).contiguous()
    batch, levels = len(tokens.q), 0 if level is None else level.shape[-1]
    out_BHV = torch.empty(batch, shape.heads, shape.value, dtype=dtype, device=tokens.q.device)
    count = seen_B if count_B is None else count_B
    far_k, absent, ring_gates = tokens.far_k, gate_BG, window > 0 and isinstance(gates_of(mixer), GatesMask)
    new_far_k = tokens.k if tokens.new_far_k is None else tokens.new_far_k
    rings = [held.get(f"ring.{name}", absent) for name in ("k", "v", "linear_k", "gate", "beta")]
    far_weight, near_weight = (absent if w is None else w for w in (mixer.linear_weight_H, mixer.near_weight_H))
    tensors = (
        tokens.q, far_k, gate_BG if level is None else level, buckets, new_buckets, tokens.near_q, tokens.k, tokens.v,
        new_far_k, gate_BG, beta_BG, *rings, held.get("sink.k", absent), held.get("sink.v", absent), out_BHV, seen_B,
        seen_after_B, count, far_weight, near_weight, seen_B if page_B is None else page_B,
        absent if output_gate is None else output_gate,
    )  # fmt: skip
    features, per_group = tokens.q.shape[-1], shape.heads // groups
    far_strides = far_k.stride()[:3] if tokens.in_ring else (far_k.stride(0), 0, far_k.stride(1))
    sizes = (
        buckets.shape[1], new_buckets.shape[1], buckets.stride(0), *tokens.q.stride()[:2], *far_strides,
        *tokens.near_q.stride()[:2], *tokens.k.stride()[:2], *tokens.v.stride()[:2], *new_far_k.stride()[:2],
        count.stride(0),
    )  # fmt: skip
    paged = page_B is not None
    block, warps = (
        finish_tile(shape.value, batch * groups) if paged else step_tile(max(features, shape.key), shape.value)
    )
    options = {
        "ROOT": tokens.root,
        "SCALE": shape.scaling,
        "FLOOR": max(mixer.feature_map.min_denominator, MIN_DENOMINATOR),
        "G": groups,
        "COPIES": groups // shape.groups,
        "FAR_COPIES": groups // far_k.shape[-2],
        "J": per_group,
        "F": features,
        "V": shape.value,
        "K": shape.key,
        "FAR": 0 if tokens.new_far_k is None else new_far_k.shape[-1],
        "W": window,
        "S": config.sinks,
        "LEVELS": levels,
        "BITS": block_bits(mixer),
        "DELTA": mixer.beta_proj is not None,
        "UNIT": mixer.beta_proj is not None,
        "MORE": config.normalise,
        "RING_GATE": ring_gates,
        "IN_RING": tokens.in_ring,
        "COUNT": count_B is not None,
        "FAR_WEIGHT": mixer.linear_weight_H is not None,
        "GATES": 0 if output_gate is None else output_gate.shape[-1],
        "PAGED": paged,
        "CAP": shape.softcap or 0.0,
        "N": min(RECENT_PER_TILE, power_of_two(max(1, window))),
        "BS": power_of_two(max(1, config.sinks)),
        "BF": power_of_two(features),
        "BK": power_of_two(shape.key),
        "BX": power_of_two(new_far_k.shape[-1]),
        "BV": block,
        "BP": triton.next_power_of_2(buckets.shape[1]) if paged else 1,
        "M": power_of_two(per_group),
        "PRECISION": "tf32x3" if tokens.k.dtype == torch.float32 else None,
        "num_warps": warps,
    }
    parts = more_parts = gate_BG
    if page_B is not None:
        parts = gate_BG.new_empty(buckets.shape[1], batch, shape.heads, shape.value)
        more_parts = gate_BG.new_empty(parts.shape[:3] if config.normalise else 0)
        states = (
            tokens.q, far_k, gate_BG if level is None else level, buckets, tokens.v, gate_BG, beta_BG, rings[1], *rings[3:],
            parts, more_parts, seen_B, page_B,
        )  # fmt: skip
        advance = buckets.shape[1], buckets.stride(0), *tokens.q.stride()[:2], *far_strides, *tokens.v.stride()[:2]
        _launch_buckets(states, advance, options)
    _launch(
        window_step, (batch * groups, triton.cdiv(shape.value, block)), sizes, tuple(options), tuple(options.values())
    )(*tensors, parts, more_parts)
    return out_BHV


def _launch_buckets(tensors: tuple[Tensor, ...], sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    """Run `bucket_step`. options: those of `window_step`."""
    features, values, lanes = options["F"], options["V"], len(tensors[0]) * options["G"]
    block, warps = bucket_tile(features, values, lanes)
    tiles = triton.cdiv(values, block)
    together = tiles if options["MORE"] else 1
    names = "ROOT G COPIES FAR_COPIES J F V W S LEVELS BITS DELTA UNIT MORE RING_GATE IN_RING BF M"
    options = {name: options[name] for name in names.split()} | {"TILES": together, "BV": block, "num_warps": warps}
    grid = lanes, tiles // together, sizes[0]
    _launch(bucket_step, grid, sizes, tuple(options), tuple(options.values()))(*tensors)


def finish_outputs(
    mixer: LinearMixer, out_BHV: Tensor, x_B1D: Tensor, dtype: torch.dtype, valid_BT: Tensor | None = None
) -> Tensor:
    """Return out_BHTV in that dtype (T = 1), after the norm and the gate behind it."""
    if mixer.norm is None:
        return out_BHV.unsqueeze(2)
    out_B1HV = mixer.norm(out_BHV.unsqueeze(1))
    out_B1HV = out_B1HV if mixer.gate is None else mixer.gate(out_B1HV, x_B1D)
    if valid_BT is not None:
        out_B1HV = out_B1HV.masked_fill((valid_BT == 0)[:, :, None, None], 0)
    return out_B1HV.transpose(1, 2).to(dtype)


# -- registration ------------------------------------------------------------------------------------
def knows_mixer(mixer: LinearMixer) -> bool:
    """Return whether the kernels compute a step of this mixer: gated or log-linear states, alone or behind a sliding
    window, without what reads a linear's parameters in another way (hooks, LoRA)."""
    config, shape, features = mixer.config, mixer.shape, mixer.mask.shape.key
    return (
        config.near_tokens == "sliding"
        and (config.sinks <= MAX_SINKS if config.window else config.sinks == 0)
        and knows_mask(mixer)
        and shape.causal
        and shape.scaling > 0
        and shape.key <= MAX_DIMS
        and features <= MAX_FEATURES
        and shape.heads <= MAX_HEADS * mixer.linear_shape.groups
        and reads_plain_linears(mixer)
    )


def knows_tokens(q_BHTK: Tensor, inputs: MixerInputs) -> bool:
    """Return whether the kernels read these tokens: one for each row, without gradients."""
    tensors = (q_BHTK, inputs.k_BGTK, inputs.v_BGTV)
    return (
        q_BHTK.shape[2] == 1
        and q_BHTK.dtype in DTYPES
        and q_BHTK.numel() > 0
        and all(x.dtype == q_BHTK.dtype and x.stride(-1) == 1 for x in tensors)
        and inputs.x_BTD.dtype in DTYPES
        and inputs.x_BTD.stride(-1) == 1
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def accepts(q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, state: MixerState) -> bool:
    """Return whether the kernels compute this call: one token behind a window, no gradients, gated or log-linear
    states.
    """
    return (
        mixer.config.window > 0
        and knows_tokens(q_BHTK, inputs)
        and knows_mixer(mixer)
        and state.max_seen is not None
        and states_name(mixer) in state.tensors
        and all(t.is_contiguous() and t.dtype == tensor_dtype(n, q_BHTK) for n, t in state.tensors.items())
    )


def tensor_dtype(name: str, q_BHTK: Tensor) -> torch.dtype:
    """Return the dtype that a tensor of the state has: the tokens' for keys and values that wait, else float32."""
    waits = name.startswith(("ring.", "sink.")) and name.rpartition(".")[2] in ("k", "v", "linear_k")
    return q_BHTK.dtype if waits else torch.float32


def _query(q_BHTK: Tensor, mixer: LinearMixer, *_: Any) -> TuningQuery:
    lanes, window = q_BHTK.shape[0] * q_BHTK.shape[1], mixer.config.window
    return TuningQuery(step_pass(q_BHTK), named_sizes(lanes=lanes, window=window), q_BHTK)


def _key(q_BHTK: Tensor, mixer: LinearMixer, *_: Any) -> Hashable:
    capturing, autocast = is_capturing(q_BHTK), torch.is_autocast_enabled()
    return q_BHTK.shape, mixer.config.window, q_BHTK.dtype, q_BHTK.get_device(), capturing, autocast


def _unmeasured(*_: Any) -> bool:
    """Return False: the reference runs until the kernels are measured."""
    return False


def _is_fastest_step(op: str) -> Callable[..., bool]:
    return is_fastest(op, CallReader(_query, _key), otherwise=_unmeasured)


IS_FASTEST_STEP = {
    (tree, delta): _is_fastest_step(f"window {'hierarchical' if tree else 'gates'}{' delta' if delta else ''}")
    for tree in (False, True)
    for delta in (False, True)
}


def is_faster(q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, state: MixerState) -> bool:
    """Return whether the step was measured to be faster (kernels/tuning.py)."""
    chosen = IS_FASTEST_STEP[isinstance(mixer.mask, HierarchicalMask), mixer.beta_proj is not None]
    return chosen(q_BHTK, mixer)


@register_kernel(one_token, accepts=accepts, is_faster=is_faster)
def one_token_with_window(
    q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, state: MixerState
) -> tuple[Tensor, MixerState]:
    """Return (out_BHTV, the state behind the token) with T = 1."""
    dtype = inputs.v_BGTV.dtype
    with autocast_disabled(q_BHTK.device):
        tokens = prepare_tokens(mixer, inputs, state)
        out_BHV, after = launch_step(mixer, tokens, inputs, state, torch.float32 if mixer.norm is not None else dtype)
        return finish_outputs(mixer, out_BHV, tokens.x, dtype, inputs.valid_BT), after


# -- a server's cache --------------------------------------------------------------------------------
def accepts_pages(
    q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, seen_B: Tensor, pool: Tensors, page_B: Tensor
) -> bool:
    """Return whether the kernels compute this call: tensors of the state side by side in pages of float32 numbers."""
    filled = [t for t in pool.values() if t.numel()]  # without sinks their tensors are empty
    return (
        mixer.convolution is None
        and inputs.valid_BT is None
        and knows_tokens(q_BHTK, inputs)
        and knows_mixer(mixer)
        and states_name(mixer) in pool
        and len({t.stride(0) for t in filled}) == 1
        and all(t[0].is_contiguous() and t.dtype == torch.float32 for t in filled)
    )


@register_kernel(step_in_pool, accepts=accepts_pages)
def step_in_pages(
    q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, seen_B: Tensor, pool: Tensors, page_B: Tensor
) -> Tensor:
    """`step_in_pool` in place: three launches, a fourth one for RoPE and features, and torch for other feature maps, the
    norm and the product of the output gate."""
    dtype = inputs.v_BGTV.dtype
    with autocast_disabled(q_BHTK.device):
        tokens = prepare_tokens(mixer, inputs, MixerState(seen_B, pool), page_B)
        states = pool[states_name(mixer)]
        working = torch.float32 if mixer.norm is not None else dtype
        out_BHV = _launch_on(
            mixer, tokens, pool, (states, states), (seen_B, seen_B, None), page_B=page_B, dtype=working
        )
        valid_B1 = None if mixer.norm is None else (seen_B >= 0).unsqueeze(1)
        return finish_outputs(mixer, out_BHV, tokens.x, dtype, valid_B1)
