"""One token through a linear mixer in two launches: projections of the hidden states, then the states
(kernels/ssd/recurrent.py).

    gate = -exp(A) softplus(W x + b)      beta = DELTA sigmoid(W x + b)      lambda = softplus(W x + b), of the levels in use

For gated and log-linear masks on plain q, k, v: no feature map, convolution, window, norm or output gate. The cost of a
decoding step is its launches; torch needs about forty for the same step.

Suffixes: N rows of W, B rows of the batch, D width of the hidden states, H query heads, L levels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.ssd.recurrent import MAX_FEATURES, MAX_HEADS, StepInputs
from surgery.kernels.tuning import is_fastest_mask_step
from surgery.mixers.base import MixerInputs, MixerState
from surgery.mixers.features.simple import IdentityMap
from surgery.mixers.linear import LinearMixer, one_token
from surgery.mixers.masks.base import Mask
from surgery.mixers.masks.decay import DecayMask
from surgery.mixers.masks.gates import GatesMask
from surgery.mixers.masks.log_linear import HierarchicalMask
from surgery.mixers.masks.ones import OnesMask
from surgery.mixers.projections import Float32Linear, is_hooked

ROWS_PER_PROGRAM = 4  # rows of W
TILE = 8192  # products that a program holds: rows of W x rows of the batch x columns of W. Few tiles hide latency
GATES: dict[type[Mask], int] = {OnesMask: 0, DecayMask: 1, GatesMask: 2}  # GATE of `signals`


@triton.jit
def affine_rows(
    x, weight, bias, n_N, ok_N, b_B, ok_B, x_b, D: tl.constexpr, BD: tl.constexpr, N: tl.constexpr, B: tl.constexpr
):
    """Return (W x + b)_NB of the rows n_N of W and the rows b_B of x, in float32. x_b: stride of x along the batch."""
    sum_NBD = tl.zeros([N, B, BD], tl.float32)
    for first in range(0, D, BD):
        d_D = first + tl.arange(0, BD)
        at_ND = weight + n_N[:, None] * D + d_D[None, :]
        w_ND = tl.load(at_ND, mask=ok_N[:, None] & (d_D < D)[None, :], other=0.0).to(tl.float32)
        x_BD = tl.load(x + b_B[:, None] * x_b + d_D[None, :], mask=ok_B[:, None] & (d_D < D)[None, :], other=0.0)
        sum_NBD += w_ND[:, None, :] * x_BD.to(tl.float32)[None, :, :]
    return tl.sum(sum_NBD, 2) + tl.load(bias + n_N, mask=ok_N, other=0.0).to(tl.float32)[:, None]


@triton.jit
def softplus(x):
    """Return log(1 + e^x). log1p(y) = y log(u) / (u - 1) with the rounded u = 1 + y keeps small results exact
    (Kahan).
    """
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, y, y * tl.log(u) / tl.where(u == 1.0, 1.0, u - 1.0))


@triton.jit(do_not_specialize=["batch", "used"])
def signals(
    x, rate, rate_bias, scale, beta, beta_bias, level, level_bias, gates_BG, betas_BG, levels_BHL, batch, used, x_b,
    D: tl.constexpr, G: tl.constexpr, H: tl.constexpr, L: tl.constexpr, GATE: tl.constexpr, DELTA: tl.constexpr,
    LEVELS: tl.constexpr, N: tl.constexpr, B: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store gates_BG, betas_BG and the first `used` lambdas of levels_BHL.

    Grid: (blocks of B rows, blocks of N rows of W).

    rate, beta, level and their biases: weights (G or H x L, D). GATE: 0 no gates, 1 the constant -exp(scale), 2 the
    formula of this module. DELTA: upper bound of the betas, 1 or 2; 0 without betas. LEVELS: whether there are lambdas.
    The arguments are flat because torch.compile traces this launch.
    """
    program = tl.program_id(1)
    groups: tl.constexpr = (G + N - 1) // N
    before: tl.constexpr = groups * (2 if DELTA else 1)  # programs of gates and betas
    b_B = (tl.program_id(0) * B + tl.arange(0, B)).to(tl.int64)
    ok_B = b_B < batch
    n_N = program * N + tl.arange(0, N)
    if program < groups:
        ok_N = n_N < G
        to_NB, put_NB = b_B[None, :] * G + n_N[:, None], ok_N[:, None] & ok_B[None, :]
        gate_NB = tl.zeros([N, B], tl.float32)
        if GATE > 0:
            gate_NB -= tl.exp(tl.load(scale + n_N, mask=ok_N, other=0.0).to(tl.float32))[:, None]
        if GATE == 2:
            gate_NB *= softplus(affine_rows(x, rate, rate_bias, n_N, ok_N, b_B, ok_B, x_b, D, BD, N, B))
        tl.store(gates_BG + to_NB, gate_NB, mask=put_NB)
    elif program < before:
        if DELTA:
            n_N -= groups * N
            ok_N = n_N < G
            to_NB, put_NB = b_B[None, :] * G + n_N[:, None], ok_N[:, None] & ok_B[None, :]
            beta_NB = tl.sigmoid(affine_rows(x, beta, beta_bias, n_N, ok_N, b_B, ok_B, x_b, D, BD, N, B))
            if DELTA == 2:
                beta_NB *= 2
            tl.store(betas_BG + to_NB, beta_NB, mask=put_NB)
    elif LEVELS:
        blocks = (used + N - 1) // N
        head, first = (program - before) // blocks, (program - before) % blocks * N
        l_N = first + tl.arange(0, N)
        ok_N = l_N < used
        level_NB = softplus(affine_rows(x, level, level_bias, head * L + l_N, ok_N, b_B, ok_B, x_b, D, BD, N, B))
        to_NB = (b_B[None, :] * H + head) * L + l_N[:, None]
        tl.store(levels_BHL + to_NB, level_NB, mask=ok_N[:, None] & ok_B[None, :])


def gates_of(mixer: LinearMixer) -> Mask:
    """Return the mask that gates the states: the gates of a log-linear mask, else the mask itself."""
    return mixer.mask.gates if isinstance(mixer.mask, HierarchicalMask) else mixer.mask


def knows_mask(mixer: LinearMixer) -> bool:
    """Return whether the fused kernels compute this mask: gates, decay or ones, or these with standard log-linear
    levels.
    """
    mask = mixer.mask
    return type(gates_of(mixer)) in GATES and (not isinstance(mask, HierarchicalMask) or mask.is_standard)


def signal_rows(batch: int) -> int:
    """Return the rows of the batch of a program of `signals`: few, as long as there are few programs, because a program
    takes the columns of W one tile after another."""
    return min(triton.next_power_of_2(batch), 2 if batch <= 16 else 4 if batch <= 32 else 8)


def project_signals(mixer: LinearMixer, x_BD: Tensor, used: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (log-gates_BG, beta_BG, level_BGJL or None), float32.

    Of the levels the first `used` are filled; beta is not filled for kernel scores.
    """
    batch, dim = x_BD.shape
    inner, groups, heads = gates_of(mixer), mixer.linear_shape.groups, mixer.shape.heads
    tree = mixer.mask if isinstance(mixer.mask, HierarchicalMask) else None
    lambdas = 0 if tree is None else tree.config.lambdas
    buffer = torch.empty(batch * (2 * groups + heads * lambdas), dtype=torch.float32, device=x_BD.device)
    gates, betas, levels = buffer.split([batch * groups, batch * groups, batch * heads * lambdas])
    scale = buffer  # not read for a mask of ones
    if isinstance(inner, GatesMask):
        scale = inner.log_scale_G
    elif isinstance(inner, DecayMask):
        scale = inner.log_decay_G
    linears = (
        inner.rate if isinstance(inner, GatesMask) else None,
        mixer.beta_proj,
        None if tree is None else tree.level,
    )
    delta = 0 if mixer.beta_proj is None else mixer.config.largest_step
    pairs = [(x_BD, x_BD) if linear is None else (linear.weight, linear.bias) for linear in linears]
    rows = signal_rows(batch)
    programs = triton.cdiv(groups, ROWS_PER_PROGRAM) * (2 if delta else 1)
    programs += heads * triton.cdiv(used, ROWS_PER_PROGRAM) if tree else 0
    columns = max(16, min(TILE // (ROWS_PER_PROGRAM * rows), triton.next_power_of_2(dim)))
    signals[(triton.cdiv(batch, rows), programs)](
        x_BD, *pairs[0], scale, *pairs[1], *pairs[2], gates, betas, levels, batch, used, x_BD.stride(0), D=dim, G=groups,
        H=heads, L=lambdas, GATE=GATES[type(inner)], DELTA=delta, LEVELS=tree is not None, N=ROWS_PER_PROGRAM,
        B=rows, BD=columns, num_warps=4,
    )  # fmt: skip
    level_BGJL = levels.view(batch, groups, -1, lambdas) if tree else None
    return gates.view(batch, groups), betas.view(batch, groups), level_BGJL


def reads_plain_linears(mixer: LinearMixer) -> bool:
    """Return whether the parameters of the mixer's submodules may be read without calling the submodules: no hooks, no
    offloading, no LoRA or quantized layer in the place of a linear."""
    mask, inner = mixer.mask, gates_of(mixer)
    linears = [mixer.beta_proj, inner.rate if isinstance(inner, GatesMask) else None]
    linears.append(mask.level if isinstance(mask, HierarchicalMask) else None)
    return all(type(linear) is Float32Linear for linear in linears if linear is not None) and not any(
        is_hooked(module) for module in mixer.modules() if module is not mixer
    )


def accepts(q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, state: MixerState) -> bool:
    """Return whether the kernel computes this call: one token, no gradients, nothing between projections and states."""
    extras = (mixer.window_buffer, mixer.convolution, mixer.norm, mixer.gate)
    tensors = (q_BHTK, inputs.k_BGTK, inputs.v_BGTV, inputs.x_BTD, *state.tensors.values())
    return (
        q_BHTK.shape[2] == 1
        and knows_mask(mixer)
        and type(mixer.feature_map) is IdentityMap
        and reads_plain_linears(mixer)
        and mixer.config.states == "shared"
        and not any(module is not None for module in extras)
        and not mixer.config.normalise
        and mixer.shape.causal
        and state.max_seen is not None
        and mixer.shape.key <= MAX_FEATURES
        and mixer.shape.heads <= MAX_HEADS * mixer.shape.groups
        and all(x.dtype != torch.float64 and x.stride(-1) == 1 for x in tensors)
        and all(t.is_contiguous() and t.dtype == torch.float32 for t in state.tensors.values())
        and not torch.is_grad_enabled()
    )


IS_FASTEST_STEP = {False: is_fastest_mask_step("gates"), True: is_fastest_mask_step("hierarchical")}


def is_faster(q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, state: MixerState) -> bool:
    """Return whether the step was measured to be faster (kernels/tuning.py)."""
    tree = isinstance(mixer.mask, HierarchicalMask)
    return IS_FASTEST_STEP[tree](q_BHTK, inputs.k_BGTK, inputs.v_BGTV, mixer.beta_proj)


@register_kernel(one_token, accepts=accepts, is_faster=is_faster)
def one_token_triton(
    q_BHTK: Tensor, mixer: LinearMixer, inputs: MixerInputs, state: MixerState
) -> tuple[Tensor, MixerState]:
    """Return (out_BHTV, the state behind the token) with T = 1."""
    ((name, states),) = state.tensors.items()
    shape, max_seen = mixer.shape, (state.max_seen or 0) + 1
    after = count_states(mixer, states, max_seen)
    gate_BG, beta_BG, level_BGJL = project_signals(mixer, inputs.x_BTD[:, 0], count_lambdas(mixer, states))
    weight_H = mixer.linear_weight_H
    token = StepInputs(
        q_BHTK[:, :, 0].unflatten(1, (shape.groups, -1)),
        inputs.k_BGTK[:, :, 0],
        inputs.v_BGTV[:, :, 0],
        beta_BG if mixer.beta_proj is not None else None,
        gate_BG,
        level_BGJL=level_BGJL,
        start_B=state.seen_B,
        count_B=None if inputs.valid_BT is None else inputs.valid_BT[:, 0],
        weight_GJ=None if weight_H is None else weight_H.view(shape.groups, -1),
        root=shape.scaling**0.5,
        bits=block_bits(mixer),
        unit=mixer.beta_proj is not None,
    )
    out_BHTV = torch.empty(len(q_BHTK), shape.heads, 1, shape.value, dtype=inputs.v_BGTV.dtype, device=q_BHTK.device)
    seen_B = torch.empty_like(state.seen_B)
    new_states = token.advance_states(states, after, out_BHTV, seen_B)
    return out_BHTV, MixerState(seen_B, {name: new_states}, max_seen)


def block_bits(mixer: LinearMixer) -> int:
    """Return log2 of a log-linear mask's block, 0 for other masks."""
    return mixer.mask.config.block_bits if isinstance(mixer.mask, HierarchicalMask) else 0


def count_states(mixer: LinearMixer, states: Tensor, seen: int) -> int:
    """Return how many states there are once `seen` tokens were written to them."""
    if not isinstance(mixer.mask, HierarchicalMask):
        return states.shape[1]
    bits = block_bits(mixer)
    return max(states.shape[1], max(0, seen.bit_length() - bits) + (bits > 0))


def count_lambdas(mixer: LinearMixer, states: Tensor) -> int:
    """Return how many lambdas the step reads: one for the token itself, which the first state shares if the mask has
    blocks, and one for each state."""
    if not isinstance(mixer.mask, HierarchicalMask):
        return 0
    return min(states.shape[1] + (block_bits(mixer) == 0), mixer.mask.config.lambdas)
