"""States of the gated delta rule between chunks, one after the other (terms: kernels/gated_delta/wy.py).

    forward     x = u - w S      S' = gamma S + K^T e x
    backward    dx = sum_j P_j^T dO_j + e (K dS')      dS = gamma dS' + sum_j (D Q_j)^T dO_j - w^T dx

P_j = tril(Q_j K^T . M) for query head j. A program has a block of values and walks through the chunks of a row. States
are held as S^T (V, K): so they are the left operands of all products and stay in registers. x, dx and S are stored
transposed too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.gated_delta.layout import (
    DeltaPlan,
    chunk_tokens,
    count_chunks,
    decay_from_start,
    decay_mask,
    decay_to_end,
    load_matrix,
    load_row,
    load_tile,
    program_chunk,
    state_product,
    store_matrix,
)
from surgery.kernels.gated_delta.wy import WYTerms
from surgery.kernels.kernel_tensors import GroupTensor, HeadTensor


class ChunkStates(NamedTuple):
    """Per chunk the state at its start, S^T (V, K), and x^T (V, C); or the gradients dS'^T of the state at its end, and
    dx^T.
    """

    s: Tensor
    x: Tensor


@triton.jit
def pass_forward(
    k, rows, c, w, u, first, last, states, x,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Store S^T and x^T of every chunk of a row, and the last state. Grid: (R x G, blocks of values).

    k: `GroupTensor`. FIRST: rows start from first (R, G, K, V), else from 0; last (R, G, K, V), float32.
    """
    r, g, at_v = tl.program_id(0) // G, (tl.program_id(0) % G).to(tl.int64), tl.program_id(1) * BV
    row = load_row(rows, r, WIDTH)
    batch = row.batch
    here = tl.program_id(0).to(tl.int64) * K * V
    if FIRST:
        s_VK = tl.trans(load_matrix(first + here, K, V, at_v, BK, BV).to(tl.float32))
    else:
        s_VK = tl.zeros([BV, BK], tl.float32)
    at_C = tl.arange(0, C)
    for n in range(count_chunks(row, C)):
        at = (row.base + n) * G + g
        t_C, here_C = chunk_tokens(n, row, C)
        k_CK = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, 0, BK)
        u_VC = load_matrix(u + (at * V + at_v) * C, V - at_v, C, 0, BV, C)
        to_end_C, total = decay_to_end(c, at, C)
        half_VK = s_VK.to(k_CK.dtype)
        kept = states + (at * V + at_v) * K
        store_matrix(kept, V - at_v, K, 0, half_VK, BV, BK)
        x_VC = u_VC - state_product(
            half_VK, kept, V - at_v, w + at * C * K, at_C, K, at_C >= 0, K, C, BK, BV, BX, P
        )  # fmt: skip
        store_matrix(x + (at * V + at_v) * C, V - at_v, C, 0, x_VC, BV, C)
        x_VC = (x_VC * to_end_C[None, :]).to(k_CK.dtype)
        s_VK = tl.dot(x_VC, k_CK, s_VK * total, input_precision=P)
    store_matrix(last + here, K, V, at_v, tl.trans(s_VK), BK, BV)


def launch_pass_forward(plan: DeltaPlan, terms: WYTerms, first_RGKV: Tensor | None) -> tuple[ChunkStates, Tensor]:
    """Return (the states of all chunks, last_RGKV in float32)."""
    s = plan.sizes
    last = torch.empty(s.R, s.G, s.K, s.V, dtype=torch.float32, device=plan.k.device)
    states = ChunkStates(s.buffer(s.V, s.K), s.buffer(s.V, s.C))
    pass_forward[(s.R * s.G, s.blocks)](
        GroupTensor.from_tensor(plan.k), s.table, terms.c, terms.w, terms.u, last if first_RGKV is None else first_RGKV,
        last, *states, **s.state_kernel, FIRST=first_RGKV is not None, num_warps=s.warps(8192), num_stages=s.stages(4),
    )  # fmt: skip
    return states, last


@triton.jit
def local_backward(
    q, k, do, rows, c, dx, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store dx^T = sum_j (P_j^T dO_j)^T, the part of dx from inside a chunk. Grid: (R x N, G, blocks of values).

    q, do: `HeadTensor`; k: `GroupTensor`.
    """
    g, at_v = tl.program_id(1).to(tl.int64), tl.program_id(2) * BV
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    dx_VC = tl.zeros([BV, C], tl.float32)
    for j in range(J):
        qk_CC = tl.zeros([C, C], tl.float32)
        for first in range(0, K, BX):
            q_CX = load_tile(q.ptr + batch * q.b + g * q.g + (0 * g + j) * q.j, t_C, q.t, here_C, K, first, BX)
            k_CX = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, first, BX)
            qk_CC = tl.dot(q_CX, tl.trans(k_CX), qk_CC, input_precision=P)
        do_CV = load_tile(do.ptr + batch * do.b + g * do.g + (0 * g + j) * do.j, t_C, do.t, here_C, V, at_v, BV)
        p_CC = (qk_CC * decay_mask(c, at, C)).to(k.ptr.dtype.element_ty)
        dx_VC = tl.dot(tl.trans(do_CV), p_CC, dx_VC, input_precision=P)
    store_matrix(dx + (at * V + at_v) * C, V - at_v, C, 0, dx_VC, BV, C)


@triton.jit
def pass_backward(
    q, k, do, rows, c, w, dlast, dfirst, dstates, dx, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store dS'^T of every chunk of a row, complete dx^T, and store dfirst. Grid: (R x G, blocks of values).

    q, do: `HeadTensor`; k: `GroupTensor`; dlast, dfirst (R, G, K, V): gradients of the last and first state, float32.
    """
    r, g, at_v = tl.program_id(0) // G, (tl.program_id(0) % G).to(tl.int64), tl.program_id(1) * BV
    row = load_row(rows, r, WIDTH)
    batch = row.batch
    here = tl.program_id(0).to(tl.int64) * K * V
    ds_VK = tl.trans(load_matrix(dlast + here, K, V, at_v, BK, BV).to(tl.float32))
    chunks = count_chunks(row, C)
    half = k.ptr.dtype.element_ty
    for i in range(chunks):
        n = chunks - 1 - i
        at = (row.base + n) * G + g
        t_C, here_C = chunk_tokens(n, row, C)
        w_CK = load_matrix(w + at * C * K, C, K, 0, C, BK)
        dx_VC = load_matrix(dx + (at * V + at_v) * C, V - at_v, C, 0, BV, C).to(tl.float32)
        to_end_C, total = decay_to_end(c, at, C)
        fade_C = decay_from_start(c, at, C)
        half_VK = ds_VK.to(half)
        kept = dstates + (at * V + at_v) * K
        store_matrix(kept, V - at_v, K, 0, half_VK, BV, BK)
        dx_VC += (
            state_product(
                half_VK, kept, V - at_v, k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, C, BK, BV, BX, P
            )
            * to_end_C[None, :]
        )  # fmt: skip
        store_matrix(dx + (at * V + at_v) * C, V - at_v, C, 0, dx_VC, BV, C)
        ds_VK = tl.dot((-dx_VC).to(half), w_CK, ds_VK * total, input_precision=P)
        for j in range(J):
            q_CK = load_tile(q.ptr + batch * q.b + g * q.g + (0 * g + j) * q.j, t_C, q.t, here_C, K, 0, BK)
            do_CV = load_tile(do.ptr + batch * do.b + g * do.g + (0 * g + j) * do.j, t_C, do.t, here_C, V, at_v, BV)
            do_CV = (do_CV * fade_C[:, None]).to(half)
            ds_VK = tl.dot(tl.trans(do_CV), q_CK, ds_VK, input_precision=P)
    store_matrix(dfirst + here, K, V, at_v, tl.trans(ds_VK), BK, BV)


def launch_pass_backward(plan: DeltaPlan, terms: WYTerms, do: Tensor, dlast: Tensor) -> tuple[ChunkStates, Tensor]:
    """Return (the gradients of all chunks' states, dfirst_RGKV in float32)."""
    s, (q, k) = plan.sizes, plan.queries_keys
    grads, dfirst = ChunkStates(s.buffer(s.V, s.K), s.buffer(s.V, s.C)), torch.empty_like(dlast)
    arguments = q, k, HeadTensor.from_tensor(do), s.table, terms.c
    local_backward[(s.R * s.N, s.G, s.wide_blocks)](
        *arguments, grads.x, s.N, s.J, **s.wide_kernel, BX=s.tile_features, **s.tile_options(4)
    )
    pass_backward[(s.R * s.G, s.blocks)](
        *arguments,
        terms.w,
        dlast,
        dfirst,
        *grads,
        s.J,
        **s.state_kernel,
        num_warps=s.warps(8192),
        num_stages=s.stages(2),
    )
    return grads, dfirst
