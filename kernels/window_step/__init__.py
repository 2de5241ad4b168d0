"""One token through a linear mixer with a window in two launches: projections of the hidden states, then everything
else.

The first launch computes gates, step sizes and lambdas (kernels/ssd/fused_token.py). The second updates and reads the
states, does the softmax over window and sinks, adds both, and writes the token into its slots of the rings
(kernels/window_step/step.py). Mixers that rotate q and k themselves need a third launch
(kernels/window_step/rotate.py). Feature maps, the short convolution, the norm and the output gate run in torch before
and behind.

The reference takes 151 operations of torch for such a step of SSD and 212 of log-linear GDN (window 64, four sinks),
counted without views.

A state that is donated is updated in place: its rings always, its states unless they get more levels or are normalised.
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
from surgery.kernels.window_step.rotate import rotate_token
from surgery.kernels.window_step.step import window_step
from surgery.mixers.base import MixerInputs, MixerState
from surgery.mixers.common.padding import gather_rowwise
from surgery.mixers.features.simple import IdentityMap
from surgery.mixers.linear import MIN_DENOMINATOR, LinearMixer, one_token
from surgery.mixers.linear_config import TWO_FORMS
from surgery.mixers.masks.gates import GatesMask
from surgery.mixers.masks.log_linear import HierarchicalMask
from surgery.mixers.projections import autocast_disabled

VALUES_PER_PROGRAM = 32
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


def prepare_tokens(mixer: LinearMixer, inputs: MixerInputs, state: MixerState) -> StepTokens:
    """Return the token of each row, after convolution, RoPE and feature map."""
    far_q, far_k, v = (t[:, :, 0] for t in (inputs.q_BHTK, inputs.k_BGTK, inputs.v_BGTV))
    near_q, near_k, x_B1D = far_q, far_k, inputs.x_BTD
    others: dict[str, Tensor] = {}
    two, both = mixer.rope in TWO_FORMS, mixer.rope == "both"
    if mixer.convolution is None and two and inputs.rope is not None:
        far_q, far_k, near_q, near_k = rotate_token(far_q, far_k, inputs.rope, both)
    elif mixer.convolution is not None or two:
        tokens, others = mixer.project_tokens(inputs, state)
        forms = tokens.q_BTHK, tokens.k_BTGK, tokens.v_BTGV, tokens.window_q_BTHK, tokens.window_k_BTGK
        far_q, far_k, v, near_q, near_k = (t[:, 0] for t in forms)
        x_B1D = tokens.x_BTD
    ring = state.tensors["ring.linear_k" if two else "ring.k"]
    root, linear_k = mixer.shape.scaling**0.5, far_k[..., : mixer.shape.key] if two else None
    if type(mixer.feature_map) is IdentityMap and not both:
        return StepTokens(far_q, ring, True, root, near_q, near_k, v, linear_k, x_B1D, others)
    slot_B1 = ((state.seen_B + 1) % ring.shape[1]).unsqueeze(1)
    position_B1 = state.seen_B.unsqueeze(1)
    rings = (ring, state.tensors["ring.k"]) if both else (ring,)
    key_BGK = torch.cat([gather_rowwise(x, slot_B1, dim=1)[:, 0] for x in rings], dim=-1)
    copies = mixer.linear_shape.groups // mixer.shape.groups
    key_BGK = key_BGK if copies == 1 else key_BGK.repeat_interleave(copies, dim=1)
    q_BHF = mixer.feature_map("queries", far_q.unsqueeze(2).float() * root, position_B1)[:, :, 0]
    k_BGF = mixer.feature_map("keys", key_BGK.unsqueeze(2).float() * root, position_B1 - mixer.config.window)[:, :, 0]
    q_BHF, k_BGF = unit_last_stride(q_BHF), unit_last_stride(k_BGF)
    return StepTokens(q_BHF, k_BGF, False, 1.0, near_q, near_k, v, linear_k, x_B1D, others)


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
    grid: tuple[int, int], sizes: tuple[int, ...], names: tuple[str, ...], options: tuple[Any, ...]
) -> CachedLaunch:
    return CachedLaunch(window_step, grid, sizes, dict(zip(names, options)))


def step_warps(features: int) -> int:
    """Return the warps of a program, with as few as do not spill registers."""
    return 16 if features > 512 else 8 if features > 128 else 4


def launch_step(
    mixer: LinearMixer, tokens: StepTokens, inputs: MixerInputs, state: MixerState, dtype: torch.dtype
) -> tuple[Tensor, MixerState]:
    """Return (out (B, H, V) in that dtype, the state behind the token)."""
    shape, config, groups = mixer.shape, mixer.config, mixer.linear_shape.groups
    states, max_seen = state.tensors[states_name(mixer)], (state.max_seen or 0) + 1
    before, after = states.shape[1], count_states(mixer, states, max(0, max_seen - config.window - config.sinks))
    held, buckets, new_buckets = writable_tensors(mixer, state, after)
    gate_BG, beta_BG, level = project_signals(mixer, tokens.x[:, 0], count_lambdas(mixer, buckets))
    batch, levels = len(tokens.q), 0 if level is None else level.shape[-1]
    out_BHV = torch.empty(batch, shape.heads, shape.value, dtype=dtype, device=tokens.q.device)
    seen_B = torch.empty_like(state.seen_B)
    count = seen_B if inputs.valid_BT is None else inputs.valid_BT[:, 0]
    far_k, ring_k = tokens.far_k, held["ring.k"]
    new_far_k = tokens.k if tokens.new_far_k is None else tokens.new_far_k
    tensors = (
        tokens.q, far_k, gate_BG if level is None else level, buckets, new_buckets, tokens.near_q, tokens.k, tokens.v,
        new_far_k, gate_BG, beta_BG, ring_k, held["ring.v"], held.get("ring.linear_k", ring_k),
        held.get("ring.gate", gate_BG), held.get("ring.beta", gate_BG), held["sink.k"], held["sink.v"], out_BHV,
        state.seen_B, seen_B, count, mixer.linear_weight_H, mixer.near_weight_H,
    )  # fmt: skip
    features, per_group = tokens.q.shape[-1], shape.heads // groups
    copies = groups // shape.groups
    far_strides = far_k.stride()[:3] if tokens.in_ring else (far_k.stride(0), 0, far_k.stride(1))
    sizes = (
        before, after, *tokens.q.stride()[:2], *far_strides, *tokens.near_q.stride()[:2], *tokens.k.stride()[:2],
        *tokens.v.stride()[:2], *new_far_k.stride()[:2], count.stride(0),
    )  # fmt: skip
    block = min(power_of_two(shape.value), VALUES_PER_PROGRAM if features <= 256 else 16)
    options = {
        "ROOT": tokens.root,
        "SCALE": shape.scaling,
        "FLOOR": max(mixer.feature_map.min_denominator, MIN_DENOMINATOR),
        "G": groups,
        "COPIES": copies,
        "FAR_COPIES": copies if tokens.in_ring else 1,
        "J": per_group,
        "F": features,
        "V": shape.value,
        "K": shape.key,
        "FAR": 0 if tokens.new_far_k is None else new_far_k.shape[-1],
        "W": config.window,
        "S": config.sinks,
        "LEVELS": levels,
        "BITS": block_bits(mixer),
        "DELTA": mixer.beta_proj is not None,
        "UNIT": mixer.beta_proj is not None,
        "MORE": config.normalise,
        "RING_GATE": isinstance(gates_of(mixer), GatesMask),
        "COUNT": inputs.valid_BT is not None,
        "CAP": shape.softcap or 0.0,
        "N": min(RECENT_PER_TILE, power_of_two(config.window)),
        "BS": power_of_two(max(1, config.sinks)),
        "BF": power_of_two(features),
        "BK": power_of_two(shape.key),
        "BX": power_of_two(new_far_k.shape[-1]),
        "BV": block,
        "M": power_of_two(per_group),
        "PRECISION": "tf32x3" if tokens.k.dtype == torch.float32 else None,
        "num_warps": step_warps(max(features, shape.key)),
    }
    grid = batch * groups, triton.cdiv(shape.value, block)
    _launch(grid, sizes, tuple(options), tuple(options.values()))(*tensors)
    held |= {**tokens.others, states_name(mixer): new_buckets}
    return out_BHV, MixerState(seen_B, {name: held[name] for name in state.tensors}, max_seen)


# -- registration ------------------------------------------------------------------------------------
def accepts(q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, state: MixerState) -> bool:
    """Return whether the kernels compute this call: one token behind a window, no gradients, gated or log-linear
    states.
    """
    tensors = (q_BHTK, inputs.k_BGTK, inputs.v_BGTV)
    return (
        q_BHTK.shape[2] == 1
        and mixer.config.window > 0
        and mixer.config.near_tokens == "sliding"
        and mixer.config.sinks <= MAX_SINKS
        and knows_mask(mixer)
        and mixer.shape.causal
        and mixer.shape.scaling > 0
        and state.max_seen is not None
        and states_name(mixer) in state.tensors
        and mixer.shape.key <= MAX_DIMS
        and state.tensors[states_name(mixer)].shape[3] <= MAX_FEATURES
        and mixer.shape.heads <= MAX_HEADS * mixer.linear_shape.groups
        and q_BHTK.dtype in DTYPES
        and q_BHTK.numel() > 0
        and all(x.dtype == q_BHTK.dtype and x.stride(-1) == 1 for x in tensors)
        and inputs.x_BTD.dtype in DTYPES
        and inputs.x_BTD.stride(-1) == 1
        and all(t.is_contiguous() and t.dtype == tensor_dtype(n, q_BHTK) for n, t in state.tensors.items())
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and reads_plain_linears(mixer)
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
    behind = mixer.norm is not None or mixer.gate is not None
    dtype = inputs.v_BGTV.dtype
    with autocast_disabled(q_BHTK.device):
        tokens = prepare_tokens(mixer, inputs, state)
        out_BHV, after = launch_step(mixer, tokens, inputs, state, torch.float32 if behind else dtype)
        if not behind:
            return out_BHV.unsqueeze(2), after
        out_B1HV = out_BHV.unsqueeze(1)
        out_B1HV = out_B1HV if mixer.norm is None else mixer.norm(out_B1HV)
        out_B1HV = out_B1HV if mixer.gate is None else mixer.gate(out_B1HV, tokens.x)
        if inputs.valid_BT is not None:
            out_B1HV = out_B1HV.masked_fill(~inputs.valid_BT[:, :, None, None].bool(), 0)
        return out_B1HV.transpose(1, 2).to(dtype), after
