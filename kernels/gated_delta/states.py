"""States of the gated delta rule between chunks, one after the other (terms: kernels/gated_delta/wy.py).

    forward     x = u - w S      S' = gamma S + K^T e x
    backward    dx = sum_j P_j^T dO_j + e (K dS')      dS = gamma dS' + sum_j (D Q_j)^T dO_j - w^T dx

P = tril(Q K^T . M). A program has a block of values. States are held as S^T, values by features: so they are the left
operands of all that follows and never leave the registers; x, dx, S lie in memory that way too.      J query heads
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.gated_delta.layout import (
    DeltaSizes,
    chunk_tokens,
    count_chunks,
    decay_from_start,
    decay_mask,
    decay_to_end,
    load_matrix,
    load_row,
    load_tile,
    program_chunk,
    store_matrix,
)


@triton.jit
def _forward(
    k, rows, c, w, u, first, last, states, x, k_b, k_g, k_t,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    r, g, at_v = tl.program_id(0) // G, (tl.program_id(0) % G).to(tl.int64), tl.program_id(1) * BV
    batch, bos, length, start, base = load_row(rows, r, WIDTH)
    here = tl.program_id(0).to(tl.int64) * K * V
    if FIRST:
        s_VK = tl.trans(load_matrix(first + here, K, V, at_v, BK, BV).to(tl.float32))
    else:
        s_VK = tl.zeros([BV, BK], tl.float32)
    for n in range(count_chunks(length, start, C)):
        at = (base + n) * G + g
        t_C, here_C = chunk_tokens(n, bos, length, start, C)
        k_CK = load_tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
        w_CK = load_matrix(w + at * C * K, C, K, 0, C, BK)
        u_VC = load_matrix(u + (at * V + at_v) * C, V - at_v, C, 0, BV, C)
        to_end_C, total = decay_to_end(c, at, C)
        half_VK = s_VK.to(k_CK.dtype)
        store_matrix(states + (at * V + at_v) * K, V - at_v, K, 0, half_VK, BV, BK)
        x_VC = u_VC - tl.dot(half_VK, tl.trans(w_CK), input_precision=P)
        store_matrix(x + (at * V + at_v) * C, V - at_v, C, 0, x_VC, BV, C)
        x_VC = (x_VC * to_end_C[None, :]).to(k_CK.dtype)
        s_VK = tl.dot(x_VC, k_CK, s_VK * total, input_precision=P)
    store_matrix(last + here, K, V, at_v, tl.trans(s_VK), BK, BV)


def forward(
    k: Tensor, c: Tensor, w: Tensor, u: Tensor, first: Tensor | None, s: DeltaSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """(S^T at the start of every chunk, x^T, the last S_RGKV in float32)."""
    last = torch.empty(s.R, s.G, s.K, s.V, dtype=torch.float32, device=k.device)
    states, x = s.buffer(s.V, s.K), s.buffer(s.V, s.C)
    _forward[(s.R * s.G, s.blocks)](
        k, s.table, c, w, u, last if first is None else first, last, states, x, *k.stride()[:3],
        **s.kernel, FIRST=first is not None, num_warps=s.warps(8192), num_stages=s.stages(4),
    )  # fmt: skip
    return states, x, last


@triton.jit
def _local_backward(
    q, k, do, rows, c, dx, q_b, q_g, q_j, q_t, k_b, k_g, k_t, do_b, do_g, do_j, do_t, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """dx = sum_j P_j^T dO_j, of every chunk by itself."""
    g, at_v = tl.program_id(1).to(tl.int64), tl.program_id(2) * BV
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    k_CK = load_tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
    dx_VC = tl.zeros([BV, C], tl.float32)
    for j in range(J):
        q_CK = load_tile(q + batch * q_b + g * q_g + (0 * g + j) * q_j, t_C, q_t, here_C, K, 0, BK)
        do_CV = load_tile(do + batch * do_b + g * do_g + (0 * g + j) * do_j, t_C, do_t, here_C, V, at_v, BV)
        p_CC = (tl.dot(q_CK, tl.trans(k_CK), input_precision=P) * decay_mask(c, at, C)).to(k_CK.dtype)
        dx_VC = tl.dot(tl.trans(do_CV), p_CC, dx_VC, input_precision=P)
    store_matrix(dx + (at * V + at_v) * C, V - at_v, C, 0, dx_VC, BV, C)


@triton.jit
def _backward(
    q, k, do, rows, c, w, dlast, dfirst, dstates, dx, q_b, q_g, q_j, q_t, k_b, k_g, k_t, do_b, do_g, do_j, do_t, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    r, g, at_v = tl.program_id(0) // G, (tl.program_id(0) % G).to(tl.int64), tl.program_id(1) * BV
    batch, bos, length, start, base = load_row(rows, r, WIDTH)
    here = tl.program_id(0).to(tl.int64) * K * V
    ds_VK = tl.trans(load_matrix(dlast + here, K, V, at_v, BK, BV).to(tl.float32))
    chunks = count_chunks(length, start, C)
    for i in range(chunks):
        n = chunks - 1 - i
        at = (base + n) * G + g
        t_C, here_C = chunk_tokens(n, bos, length, start, C)
        k_CK = load_tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
        w_CK = load_matrix(w + at * C * K, C, K, 0, C, BK)
        dx_VC = load_matrix(dx + (at * V + at_v) * C, V - at_v, C, 0, BV, C).to(tl.float32)
        to_end_C, total = decay_to_end(c, at, C)
        fade_C = decay_from_start(c, at, C)
        half_VK = ds_VK.to(k_CK.dtype)
        store_matrix(dstates + (at * V + at_v) * K, V - at_v, K, 0, half_VK, BV, BK)
        dx_VC += tl.dot(half_VK, tl.trans(k_CK), input_precision=P) * to_end_C[None, :]
        store_matrix(dx + (at * V + at_v) * C, V - at_v, C, 0, dx_VC, BV, C)
        ds_VK = tl.dot((-dx_VC).to(k_CK.dtype), w_CK, ds_VK * total, input_precision=P)
        for j in range(J):
            q_CK = load_tile(q + batch * q_b + g * q_g + (0 * g + j) * q_j, t_C, q_t, here_C, K, 0, BK)
            do_CV = load_tile(do + batch * do_b + g * do_g + (0 * g + j) * do_j, t_C, do_t, here_C, V, at_v, BV)
            do_CV = (do_CV * fade_C[:, None]).to(k_CK.dtype)
            ds_VK = tl.dot(tl.trans(do_CV), q_CK, ds_VK, input_precision=P)
    store_matrix(dfirst + here, K, V, at_v, tl.trans(ds_VK), BK, BV)


def backward(
    q: Tensor, k: Tensor, do: Tensor, c: Tensor, w: Tensor, dlast: Tensor, s: DeltaSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """(dS'^T at the end of every chunk, dx^T, dS at the rows' starts in float32)."""
    dstates, dx, dfirst = s.buffer(s.V, s.K), s.buffer(s.V, s.C), torch.empty_like(dlast)
    strides = (*q.stride()[:4], *k.stride()[:3], *do.stride()[:4])
    _local_backward[(s.R * s.N, s.G, s.blocks)](q, k, do, s.table, c, dx, *strides, s.N, s.J, **s.kernel, num_warps=4)
    _backward[(s.R * s.G, s.blocks)](
        q, k, do, s.table, c, w, dlast, dfirst, dstates, dx, *strides, s.J, **s.kernel, num_warps=s.warps(8192),
        num_stages=2,
    )  # fmt: skip
    return dstates, dx, dfirst
