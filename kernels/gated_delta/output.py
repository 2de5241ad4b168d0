"""Outputs of every chunk of the gated delta rule, given the state S at its start (terms:
kernels/gated_delta/states.py).

    O_j = D Q_j S + P_j x        P_j = tril(Q_j K^T . M)        j: query head

Backward, with dS' the gradient of the state at its end, and Z_j = (dO_j x^T . M) . Q_j K^T for the gates:
    dQ_j = D dO_j S^T + (dO_j x^T . M) K      dK = e x dS'^T + sum_j (dO_j x^T . M)^T Q_j      dw = -dx S^T
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.gated_delta.layout import (
    DeltaPlan,
    decay_from_start,
    decay_mask,
    decay_to_end,
    load_matrix,
    load_tile,
    program_chunk,
    store_matrix,
    store_tile,
)
from surgery.kernels.gated_delta.states import ChunkStates
from surgery.kernels.gated_delta.wy import WYTerms
from surgery.kernels.kernel_tensors import HeadTensor, empty_out


class OutputGradients(NamedTuple):
    """Results of `output_backward`: dq (B, G, J, T, K); per chunk dk (C, K) and dc (1, C) in float32, and dw (C, K)."""

    dq: Tensor
    dk: Tensor
    dw: Tensor
    dc: Tensor


@triton.jit
def output_forward(
    q, k, rows, c, states, x, out, T, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store out (B, T, G, J, V) of one chunk, query head and block of values. Grid: (R x N, G x J, blocks of values).

    q: `HeadTensor`; k: `GroupTensor`; states, x: `ChunkStates` of all chunks.
    """
    head, at_v = tl.program_id(1).to(tl.int64), tl.program_id(2) * BV
    g, j = head // J, head % J
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    qk_CC = tl.zeros([C, C], tl.float32)
    out_CV = tl.zeros([C, BV], tl.float32)
    for first in range(0, K, BX):
        k_CX = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, first, BX)
        q_CX = load_tile(q.ptr + batch * q.b + g * q.g + j * q.j, t_C, q.t, here_C, K, first, BX)
        s_VX = load_matrix(states + (at * V + at_v) * K, V - at_v, K, first, BV, BX)
        qk_CC = tl.dot(q_CX, tl.trans(k_CX), qk_CC, input_precision=P)
        out_CV = tl.dot(q_CX, tl.trans(s_VX), out_CV, input_precision=P)
    x_VC = load_matrix(x + (at * V + at_v) * C, V - at_v, C, 0, BV, C)
    p_CC = (qk_CC * decay_mask(c, at, C)).to(k.ptr.dtype.element_ty)
    out_CV *= decay_from_start(c, at, C)[:, None]
    out_CV = tl.dot(p_CC, tl.trans(x_VC), out_CV, input_precision=P)
    store_tile(out + (batch * T * G * J + head) * V, t_C, G * J * V, here_C, V, at_v, out_CV, BV)


def launch_output(plan: DeltaPlan, terms: WYTerms, states: ChunkStates) -> Tensor:
    """Return out_BGJTV."""
    s, q = plan.sizes, plan.q
    out = empty_out(q, plan.v)
    output_forward[(s.R * s.N, s.G * s.J, s.wide_blocks)](
        *plan.queries_keys, s.table, terms.c, *states, out, q.shape[3], s.N, s.J, **s.wide_kernel, BX=s.tile_features,
        **s.tile_options(s.warps(16384)),
    )  # fmt: skip
    return out


@triton.jit
def output_backward(
    q, k, do, rows, c, states, x, dstates, dx, dq, dk, dw, dc, T, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store the `OutputGradients` of one chunk: dq of its query heads, and dk, dw, dc summed over them.

    Grid: (R x N, G).

    q, do: `HeadTensor`; k: `GroupTensor`; dstates, dx: gradients of states and x (`ChunkStates`).
    """
    g = tl.program_id(1).to(tl.int64)
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    at_C = tl.arange(0, C)
    half = k.ptr.dtype.element_ty
    to_end_C, total = decay_to_end(c, at, C)
    fade_C = decay_from_start(c, at, C)
    mask_CC = decay_mask(c, at, C)
    dc_C = tl.zeros([C], tl.float32)
    z_C = tl.zeros([C], tl.float32)
    both = 0.0
    for j in range(J):
        q_here = q.ptr + batch * q.b + g * q.g + (0 * g + j) * q.j
        do_here = do.ptr + batch * do.b + g * do.g + (0 * g + j) * do.j
        qk_CC = tl.zeros([C, C], tl.float32)
        dp_CC = tl.zeros([C, C], tl.float32)
        for first in range(0, K, BX):
            q_CX = load_tile(q_here, t_C, q.t, here_C, K, first, BX)
            k_CX = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, first, BX)
            qk_CC = tl.dot(q_CX, tl.trans(k_CX), qk_CC, input_precision=P)
        for at_v in range(0, V, BV):
            do_CV = load_tile(do_here, t_C, do.t, here_C, V, at_v, BV)
            x_VC = load_matrix(x + (at * V + at_v) * C, V - at_v, C, 0, BV, C)
            dp_CC = tl.dot(do_CV, x_VC, dp_CC, input_precision=P)
        dp_CC *= mask_CC
        qk_CC *= dp_CC
        dc_C += tl.sum(qk_CC, 1) - tl.sum(qk_CC, 0)
        dp_CC = dp_CC.to(half)
        for first in range(0, K, BX):
            dq_CX = tl.zeros([C, BX], tl.float32)
            dw_CX = tl.zeros([C, BX], tl.float32)
            dk_CX = tl.zeros([C, BX], tl.float32)
            for at_v in range(0, V, BV):
                s_VX = load_matrix(states + (at * V + at_v) * K, V - at_v, K, first, BV, BX)
                do_CV = load_tile(do_here, t_C, do.t, here_C, V, at_v, BV)
                dq_CX = tl.dot(do_CV, s_VX, dq_CX, input_precision=P)
                if j == 0:
                    ds_VX = load_matrix(dstates + (at * V + at_v) * K, V - at_v, K, first, BV, BX)
                    both += tl.sum(s_VX.to(tl.float32) * ds_VX)
                    dx_VC = load_matrix(dx + (at * V + at_v) * C, V - at_v, C, 0, BV, C)
                    dw_CX = tl.dot(tl.trans(dx_VC), s_VX, dw_CX, input_precision=P)
                    x_VC = load_matrix(x + (at * V + at_v) * C, V - at_v, C, 0, BV, C)
                    dk_CX = tl.dot(tl.trans(x_VC), ds_VX, dk_CX, input_precision=P)
            k_CX = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, first, BX)
            if j == 0:
                store_matrix(dw + at * C * K, C, K, first, -dw_CX, C, BX)
                dk_CX *= to_end_C[:, None]
                z_C += tl.sum(dk_CX * k_CX, 1)
            else:
                dk_CX = load_matrix(dk + at * C * K, C, K, first, C, BX)
            q_CX = load_tile(q_here, t_C, q.t, here_C, K, first, BX)
            dq_CX *= fade_C[:, None]
            dc_C += tl.sum(dq_CX * q_CX, 1)
            dq_CX = tl.dot(dp_CC, k_CX, dq_CX, input_precision=P)
            dk_CX = tl.dot(tl.trans(dp_CC), q_CX, dk_CX, input_precision=P)
            store_tile(dq + ((batch * G + g) * J + j) * T * K, t_C, K, here_C, K, first, dq_CX, BX)
            store_matrix(dk + at * C * K, C, K, first, dk_CX, C, BX)
        tl.debug_barrier()  # the next head adds to the dk that this one stored
    at_C = tl.arange(0, C)
    dc_C += tl.where(at_C == C - 1, total * both + tl.sum(z_C), 0.0) - z_C
    tl.store(dc + at * C + at_C, dc_C)


def launch_output_backward(
    plan: DeltaPlan, terms: WYTerms, do: Tensor, states: ChunkStates, dstates: ChunkStates
) -> OutputGradients:
    """Run `output_backward` on all chunks."""
    s, q = plan.sizes, plan.q
    dk, dc = s.buffer(s.C, s.K, dtype=torch.float32), s.buffer(1, s.C, dtype=torch.float32)
    grads = OutputGradients(torch.empty(q.shape, dtype=q.dtype, device=q.device), dk, s.buffer(s.C, s.K), dc)
    output_backward[(s.R * s.N, s.G)](
        *plan.queries_keys, HeadTensor.from_tensor(do), s.table, terms.c, *states, *dstates, *grads, q.shape[3], s.N,
        s.J, **s.wide_kernel, BX=s.features, num_warps=s.loop_warps, num_stages=1,
    )  # fmt: skip
    return grads
