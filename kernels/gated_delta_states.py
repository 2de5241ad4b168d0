"""States of the gated delta rule between chunks, one after the other (terms: gated_delta_wy.py).

    forward     x = u - w S      S' = gamma S + K^T e x
    backward    dx = sum_j P_j^T dO_j + e (K dS')      dS = gamma dS' + sum_j (D Q_j)^T dO_j - w^T dx

P = tril(Q K^T . M). A program has a block of values; S and dS stay in its registers.      J query heads of a group
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.gated_delta_rows import (
    Sizes,
    chunks_of,
    fade_of,
    mask_of,
    matrix,
    put_matrix,
    row_of,
    tile,
    to_end_of,
    tokens_of,
)


@triton.jit
def _forward(
    k, rows, c, w, u, first, last, states, x, k_b, k_g, k_t,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    r, g, at_v = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1) * BV
    batch, bos, length, start, base = row_of(rows, r, WIDTH)
    here = tl.program_id(0).to(tl.int64) * K * V
    if FIRST:
        s_KV = matrix(first + here, K, V, at_v, BK, BV).to(tl.float32)
    else:
        s_KV = tl.zeros([BK, BV], tl.float32)
    for n in range(chunks_of(length, start, C)):
        at = (base + n) * G + g
        t_C, here_C = tokens_of(n, bos, length, start, C)
        k_CK = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
        w_CK = matrix(w + at * C * K, C, K, 0, C, BK)
        u_CV = matrix(u + at * C * V, C, V, at_v, C, BV)
        to_end_C, total = to_end_of(c, at, C)
        put_matrix(states + at * K * V, K, V, at_v, s_KV, BK, BV)
        x_CV = u_CV - tl.dot(w_CK, s_KV.to(k_CK.dtype), input_precision=P)
        put_matrix(x + at * C * V, C, V, at_v, x_CV, C, BV)
        x_CV = (x_CV * to_end_C[:, None]).to(k_CK.dtype)
        s_KV = tl.dot(tl.trans(k_CK), x_CV, s_KV * total, input_precision=P)
    put_matrix(last + here, K, V, at_v, s_KV, BK, BV)


def forward(
    k: Tensor, c: Tensor, w: Tensor, u: Tensor, first: Tensor | None, s: Sizes
) -> tuple[Tensor, Tensor, Tensor]:
    """(S at the start of every chunk, x, the last S_RGKV in float32)."""
    last = torch.empty(s.R, s.G, s.K, s.V, dtype=torch.float32, device=k.device)
    states, x = s.buffer(s.K, s.V), s.buffer(s.C, s.V)
    _forward[(s.R * s.G, s.blocks)](
        k, s.table, c, w, u, last if first is None else first, last, states, x, *k.stride()[:3],
        **s.kernel, FIRST=first is not None, num_warps=s.warps(8192), num_stages=2,
    )  # fmt: skip
    return states, x, last


@triton.jit
def _local(
    q, k, do, rows, c, dx, q_b, q_g, q_j, q_t, k_b, k_g, k_t, do_b, do_g, do_j, do_t, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """dx = sum_j P_j^T dO_j, of every chunk by itself."""
    r, n, g, at_v = tl.program_id(0) // N, tl.program_id(0) % N, tl.program_id(1), tl.program_id(2) * BV
    batch, bos, length, start, base = row_of(rows, r, WIDTH)
    if n >= chunks_of(length, start, C):
        return
    at = (base + n) * G + g
    t_C, here_C = tokens_of(n, bos, length, start, C)
    k_CK = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
    dx_CV = tl.zeros([C, BV], tl.float32)
    for j in range(J):
        q_CK = tile(q + batch * q_b + g * q_g + j * q_j, t_C, q_t, here_C, K, 0, BK)
        do_CV = tile(do + batch * do_b + g * do_g + j * do_j, t_C, do_t, here_C, V, at_v, BV)
        p_CC = (tl.dot(q_CK, tl.trans(k_CK), input_precision=P) * mask_of(c, at, C)).to(k_CK.dtype)
        dx_CV = tl.dot(tl.trans(p_CC), do_CV, dx_CV, input_precision=P)
    put_matrix(dx + at * C * V, C, V, at_v, dx_CV, C, BV)


@triton.jit
def _backward(
    q, k, do, rows, c, w, dlast, dfirst, dstates, dx, q_b, q_g, q_j, q_t, k_b, k_g, k_t, do_b, do_g, do_j, do_t, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    r, g, at_v = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1) * BV
    batch, bos, length, start, base = row_of(rows, r, WIDTH)
    here = tl.program_id(0).to(tl.int64) * K * V
    ds_KV = matrix(dlast + here, K, V, at_v, BK, BV).to(tl.float32)
    chunks = chunks_of(length, start, C)
    for i in range(chunks):
        n = chunks - 1 - i
        at = (base + n) * G + g
        t_C, here_C = tokens_of(n, bos, length, start, C)
        k_CK = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
        w_CK = matrix(w + at * C * K, C, K, 0, C, BK)
        dx_CV = matrix(dx + at * C * V, C, V, at_v, C, BV).to(tl.float32)
        to_end_C, total = to_end_of(c, at, C)
        fade_C = fade_of(c, at, C)
        put_matrix(dstates + at * K * V, K, V, at_v, ds_KV, BK, BV)
        dx_CV += tl.dot(k_CK, ds_KV.to(k_CK.dtype), input_precision=P) * to_end_C[:, None]
        put_matrix(dx + at * C * V, C, V, at_v, dx_CV, C, BV)
        ds_KV = ds_KV * total - tl.dot(tl.trans(w_CK), dx_CV.to(k_CK.dtype), input_precision=P)
        for j in range(J):
            q_CK = tile(q + batch * q_b + g * q_g + j * q_j, t_C, q_t, here_C, K, 0, BK)
            do_CV = tile(do + batch * do_b + g * do_g + j * do_j, t_C, do_t, here_C, V, at_v, BV)
            do_CV = (do_CV * fade_C[:, None]).to(k_CK.dtype)
            ds_KV = tl.dot(tl.trans(q_CK), do_CV, ds_KV, input_precision=P)
    put_matrix(dfirst + here, K, V, at_v, ds_KV, BK, BV)


def backward(
    q: Tensor, k: Tensor, do: Tensor, c: Tensor, w: Tensor, dlast: Tensor, s: Sizes
) -> tuple[Tensor, Tensor, Tensor]:
    """(dS' at the end of every chunk, dx, dS at the rows' starts in float32)."""
    dstates, dx, dfirst = s.buffer(s.K, s.V), s.buffer(s.C, s.V), torch.empty_like(dlast)
    strides = (*q.stride()[:4], *k.stride()[:3], *do.stride()[:4])
    _local[(s.R * s.N, s.G, s.blocks)](q, k, do, s.table, c, dx, *strides, s.N, s.J, **s.kernel, num_warps=4)
    _backward[(s.R * s.G, s.blocks)](
        q, k, do, s.table, c, w, dlast, dfirst, dstates, dx, *strides, s.J, **s.kernel, num_warps=s.warps(8192),
        num_stages=2,
    )  # fmt: skip
    return dstates, dx, dfirst
