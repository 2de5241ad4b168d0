"""Outputs and gradients of log-linear Gated DeltaNet inside chunks (terms: kernels/gated_delta/wy.py).

    P = tril(Q K^T . M)     R = D Q - P w: o = R S is what the queries read of a state S at the chunk's start
    O = (P Y diag(beta) . Lambda) V inside the chunk, Lambda_ts = lambda_t^(level(t, s)), level = bit_length(t xor s)

Backward, from dO and dR, with E = dO V^T . Lambda and T = Y diag(beta):
    dP = E T^T - dR w^T     dT = P^T E     dw -= P^T dR     dlambda_t^(l) = sum of (dO V^T . P T)_ts of that level
    dQ = D dR + (dP . M) K     dK += (dP . M)^T Q
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.gated_delta.layout import (
    decay_from_start,
    decay_mask,
    load_matrix,
    load_rows,
    load_tile,
    program_chunk,
    program_chunk_index,
    repeat,
    store_matrix,
    store_tile,
)
from surgery.kernels.log_linear_delta.levels import first_chunk, has_left, lambda_at


@triton.jit
def level_mask(lev: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr = 1):
    """Return whether bit_length(t xor s) is `lev`, as [t, s], for each of the program's heads."""
    differ_MC = repeat(tl.arange(0, C), C, HEADS)[:, None] ^ tl.arange(0, C)[None, :]
    return ((differ_MC << 1) >> lev) == 1 if lev > 0 else differ_MC == 0


@triton.jit
def token_rows(x, lane, t_C, C: tl.constexpr, HEADS: tl.constexpr):
    """Return pointers (HEADS x C) to the tokens' rows of x, a `HeadTensor` or `LevelTensor`. lane: (row of the batch,
    group, first head)."""
    batch, g, j = lane
    j_M = j + tl.arange(0, HEADS * C) // C
    return x.ptr + batch * x.b + g * x.g + j_M * x.j + repeat(t_C, C, HEADS) * x.t


@triton.jit
def lambdas(
    at_M, here_M, level, C: tl.constexpr, LOG_C: tl.constexpr, LAMBDAS: tl.constexpr, SHARED: tl.constexpr = 0,
    HEADS: tl.constexpr = 1,
):  # fmt: skip
    """Return Lambda_ts = lambda_t^(level(t, s)) as [t, s]. at_M: `token_rows` of `level`. SHARED: levels 0 .. SHARED have
    the first lambda.
    """
    lambda_MC = tl.zeros([HEADS * C, C], tl.float32)
    for lev in tl.static_range(LOG_C + 1):
        lambda_M = tl.load(at_M + max(min(lev - SHARED, LAMBDAS - 1), 0) * level.l, mask=here_M, other=0.0)
        lambda_MC = tl.where(level_mask(lev, C, HEADS), lambda_M[:, None], lambda_MC)
    return lambda_MC


@triton.jit
def query_key_products(
    q, k, lane, t_C, here_C, c, at, K: tl.constexpr, C: tl.constexpr, BX: tl.constexpr, P: tl.constexpr,
    HEADS: tl.constexpr = 1,
):  # fmt: skip
    """Return P = tril(Q K^T . M) of one chunk and HEADS query heads (HEADS x C, C), in k's dtype. lane: (row of the batch,
    group, first head)."""
    batch, g, _j = lane
    at_M, here_M = token_rows(q, lane, t_C, C, HEADS), repeat(here_C, C, HEADS)
    qk_MC = tl.zeros([HEADS * C, C], tl.float32)
    for first in range(0, K, BX):
        q_MX = load_rows(at_M, here_M, K, first, BX)
        k_CX = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, first, BX)
        qk_MC = tl.dot(q_MX, tl.trans(k_CX), qk_MC, input_precision=P)
    return (qk_MC * decay_mask(c, at, C, HEADS)).to(k.ptr.dtype.element_ty)


@triton.jit
def read_tile(
    q, w, p_MC, fade_C, lane, t_C, here_C, at, first, K: tl.constexpr, C: tl.constexpr, BX: tl.constexpr,
    P: tl.constexpr, HEADS: tl.constexpr = 1,
):  # fmt: skip
    """Return R = fade q - P w of one chunk and HEADS query heads, features `first` and on. lane: as in
    `query_key_products`."""
    q_MX = load_rows(token_rows(q, lane, t_C, C, HEADS), repeat(here_C, C, HEADS), K, first, BX)
    w_CX = load_matrix(w + at * C * K, C, K, first, C, BX)
    return q_MX * repeat(fade_C, C, HEADS)[:, None] - tl.dot(p_MC, w_CX, input_precision=P)


@triton.jit
def chunk_output(
    p_MC, v, beta, level, y, lane, t_C, here_C, at, at_v, V: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BV: tl.constexpr, P: tl.constexpr, LAMBDAS: tl.constexpr, SHARED: tl.constexpr = 0, HEADS: tl.constexpr = 1,
):  # fmt: skip
    """Return what one chunk and HEADS query heads read of the chunk itself, one block of values. lane: as in
    `query_key_products`."""
    batch, g, _j = lane
    half = p_MC.dtype
    beta_C = tl.load(beta.ptr + batch * beta.b + g * beta.g + t_C * beta.t, mask=here_C, other=0.0).to(tl.float32)
    t_CC = (load_matrix(y + at * C * C, C, C, 0, C, C) * beta_C[None, :]).to(half)
    at_M, here_M = token_rows(level, lane, t_C, C, HEADS), repeat(here_C, C, HEADS)
    lambda_MC = lambdas(at_M, here_M, level, C, LOG_C, LAMBDAS, SHARED, HEADS)
    inner_MC = (tl.dot(p_MC, t_CC, input_precision=P) * lambda_MC).to(half)
    v_CV = load_tile(v.ptr + batch * v.b + g * v.g, t_C, v.t, here_C, V, at_v, BV)
    return tl.dot(inner_MC, v_CV, input_precision=P)


@triton.jit
def query_reads(
    q, k, rows, c, w, read, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store R (chunks, G, J, C, K) of one chunk and query head.

    Grid: (R x N, G x J). q: `HeadTensor`; k: `GroupTensor`.
    """
    head = tl.program_id(1).to(tl.int64)
    g, j = head // J, head % J
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    lane = batch, g, j
    p_CC = query_key_products(q, k, lane, t_C, here_C, c, at, K, C, BX, P)
    fade_C = decay_from_start(c, at, C)
    for first in range(0, K, BX):
        read_CX = read_tile(q, w, p_CC, fade_C, lane, t_C, here_C, at, first, K, C, BX, P)
        store_matrix(read + (at * J + j) * C * K, C, K, first, read_CX, C, BX)


@triton.jit(do_not_specialize=["low", "high", "top", "T", "N", "MOST"])
def chunk_forward(
    q, k, v, beta, level, rows, terms, kept, out, low, high, top, T, N, J, MOST,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, LAMBDAS: tl.constexpr,
    BUCKET: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr = 0, HEADS: tl.constexpr = 1,
):  # fmt: skip
    """Store what one chunk and HEADS query heads of a group read of the chunk itself (INNER; else add to `out`) and of
    levels low .. high - 1. SHARED: as in `lambdas`. Grid: (R x N, G x J / HEADS, blocks of values).

    q: `HeadTensor`; k, v, beta: `GroupTensor`; level: `LevelTensor`; terms: (c, Y, w); kept: S^T of levels from `low`
    on.
    """
    c, y, w = terms
    head, at_v = tl.program_id(1).to(tl.int64) * HEADS, tl.program_id(2) * BV
    g, j = head // J, head % J
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    half = k.ptr.dtype.element_ty
    lane = batch, g, j
    here_M = repeat(here_C, C, HEADS)
    p_MC = query_key_products(q, k, lane, t_C, here_C, c, at, K, C, BX, P, HEADS)
    at_l_M = token_rows(level, lane, t_C, C, HEADS)
    at_out_M = out + (((batch * G + g) * J + j + tl.arange(0, HEADS * C) // C) * T + repeat(t_C, C, HEADS)) * V
    if INNER:
        out_MV = chunk_output(
            p_MC, v, beta, level, y, lane, t_C, here_C, at, at_v, V, C, LOG_C, BV, P, LAMBDAS, SHARED, HEADS
        )  # fmt: skip
    else:
        out_MV = load_rows(at_out_M, here_M, V, at_v, BV).to(tl.float32)
    n, start = program_chunk_index(rows, N, WIDTH)
    a0 = first_chunk(start, top, C)
    fade_C = decay_from_start(c, at, C)
    for first in range(0, K, BX):
        read_MX = read_tile(q, w, p_MC, fade_C, lane, t_C, here_C, at, first, K, C, BX, P, HEADS).to(half)
        for lev in range(low, high):
            if has_left(a0, n, lev, BUCKET):
                here = ((lev - low) * MOST.to(tl.int64) * G + at) * V + at_v
                which = tl.maximum(lambda_at(start, lev, top, C, LOG_C, LAMBDAS + SHARED) - SHARED, 0)
                lambda_M = tl.load(at_l_M + which * level.l, mask=here_M, other=0.0)
                s_VX = load_matrix(kept + here * K, V - at_v, K, first, BV, BX)
                out_MV += tl.dot(read_MX, tl.trans(s_VX), input_precision=P) * lambda_M[:, None]
    at_V = at_v + tl.arange(0, BV)
    inside = here_M[:, None] & (at_V < V)[None, :]
    tl.store(at_out_M[:, None] + at_V[None, :], out_MV.to(out.dtype.element_ty), mask=inside)


@triton.jit
def chunk_backward(
    q, k, v, beta, level, do, rows, terms, dread, ps, dps, dv, dt, dlevel, dc, T, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, LAMBDAS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store dv, dT, dlambda and dc of what one chunk reads of itself, and P and dP . M for `chunk_backward_features`.
    Grid: (R x N, G).

    q, do: `HeadTensor`; k, v, beta: `GroupTensor`; level: `LevelTensor`; terms: (c, Y, w). dread: dR (chunks, G, J, C,
    K). ps, dps (chunks, G, J, C, C). dlevel (B, T, G, J, L) and the last of the PARTS of dc (chunks, G, PARTS, C):
    float32.
    """
    c, y, w = terms
    g = tl.program_id(1).to(tl.int64)
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    at_C = tl.arange(0, C)
    half = k.ptr.dtype.element_ty
    beta_C = tl.load(beta.ptr + batch * beta.b + g * beta.g + t_C * beta.t, mask=here_C, other=0.0).to(tl.float32)
    mask_CC = decay_mask(c, at, C)
    lower_CC = at_C[:, None] >= at_C[None, :]
    t_CC = (load_matrix(y + at * C * C, C, C, 0, C, C) * beta_C[None, :]).to(half)
    dt_CC = tl.zeros([C, C], tl.float32)
    dc_C = tl.zeros([C], tl.float32)
    for j in range(J):
        q_here = q.ptr + batch * q.b + g * q.g + (0 * g + j) * q.j
        do_here = do.ptr + batch * do.b + g * do.g + (0 * g + j) * do.j
        dread_here = dread + (at * J + j) * C * K
        qk_CC = tl.zeros([C, C], tl.float32)
        dp_CC = tl.zeros([C, C], tl.float32)
        for first in range(0, K, BX):
            q_CX = load_tile(q_here, t_C, q.t, here_C, K, first, BX)
            k_CX = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, first, BX)
            qk_CC = tl.dot(q_CX, tl.trans(k_CX), qk_CC, input_precision=P)
            dread_CX = -load_matrix(dread_here, C, K, first, C, BX)
            w_CX = load_matrix(w + at * C * K, C, K, first, C, BX)
            dp_CC = tl.dot(dread_CX.to(half), tl.trans(w_CX), dp_CC, input_precision=P)
        p_CC = (qk_CC * mask_CC).to(half)
        inner_CC = tl.dot(p_CC, t_CC, input_precision=P)
        at_level_C = token_rows(level, (batch, g, 0 * g + j), t_C, C, 1)
        lambda_CC = lambdas(at_level_C, here_C, level, C, LOG_C, LAMBDAS)
        mixed_CC = (inner_CC * lambda_CC).to(half)
        e_CC = tl.zeros([C, C], tl.float32)
        for at_v in range(0, V, BV):
            do_CV = load_tile(do_here, t_C, do.t, here_C, V, at_v, BV)
            v_CV = load_tile(v.ptr + batch * v.b + g * v.g, t_C, v.t, here_C, V, at_v, BV)
            e_CC = tl.dot(do_CV, tl.trans(v_CV), e_CC, input_precision=P)
            dv_CV = tl.dot(tl.trans(mixed_CC), do_CV, input_precision=P)
            out = dv + (batch * G + g) * T * V
            if j > 0:
                dv_CV += load_tile(out, t_C, V, here_C, V, at_v, BV)
            store_tile(out, t_C, V, here_C, V, at_v, dv_CV, BV)
        e_CC = tl.where(lower_CC, e_CC, 0.0)
        inner_CC *= e_CC
        last_C = tl.zeros([C], tl.float32)
        dlambda = dlevel + ((batch * T + t_C) * G + g) * J * LAMBDAS + j * LAMBDAS
        for lev in tl.static_range(LOG_C + 1):
            dlambda_C = tl.sum(tl.where(level_mask(lev, C), inner_CC, 0.0), 1)
            if lev < LAMBDAS - 1:
                tl.store(dlambda + lev, dlambda_C, mask=here_C)
            else:
                last_C += dlambda_C
        if LOG_C >= LAMBDAS - 1:
            last_C += tl.load(dlambda + LAMBDAS - 1, mask=here_C, other=0.0)
            tl.store(dlambda + LAMBDAS - 1, last_C, mask=here_C)
        e_CC = (e_CC * lambda_CC).to(half)
        dt_CC = tl.dot(tl.trans(p_CC), e_CC, dt_CC, input_precision=P)
        dp_CC = tl.dot(e_CC, tl.trans(t_CC), dp_CC, input_precision=P) * mask_CC
        qk_CC *= dp_CC
        dc_C += tl.sum(qk_CC, 1) - tl.sum(qk_CC, 0)
        store_matrix(ps + (at * J + j) * C * C, C, C, 0, p_CC, C, C)
        store_matrix(dps + (at * J + j) * C * C, C, C, 0, dp_CC, C, C)
        tl.debug_barrier()  # the next head adds to the dv that this one stored
    store_matrix(dt + at * C * C, C, C, 0, dt_CC, C, C)
    tl.store(dc + (at * PARTS + PARTS - 1) * C + at_C, dc_C)


@triton.jit
def chunk_backward_features(
    q, k, rows, c, ps, dps, dread, dq, dk, dw, dc, T, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store dq of one chunk and block of features, and add to its dk, dw and part of dc.

    Grid: (R x N, G, blocks of features).

    q: `HeadTensor`; k: `GroupTensor`; ps, dps: P and dP . M of `chunk_backward`.
    """
    g, first = tl.program_id(1).to(tl.int64), tl.program_id(2) * BX
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    k_CX = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, first, BX)
    fade_C = decay_from_start(c, at, C)
    part = dc + (at * PARTS + tl.program_id(2)) * C + tl.arange(0, C)
    dc_C = tl.load(part)
    dk_CX = load_matrix(dk + at * C * K, C, K, first, C, BX)
    dw_CX = load_matrix(dw + at * C * K, C, K, first, C, BX).to(tl.float32)
    for j in range(J):
        q_CX = load_tile(q.ptr + batch * q.b + g * q.g + (0 * g + j) * q.j, t_C, q.t, here_C, K, first, BX)
        p_CC = load_matrix(ps + (at * J + j) * C * C, C, C, 0, C, C)
        dp_CC = load_matrix(dps + (at * J + j) * C * C, C, C, 0, C, C)
        dread_CX = load_matrix(dread + (at * J + j) * C * K, C, K, first, C, BX)
        dw_CX -= tl.dot(tl.trans(p_CC), dread_CX, input_precision=P)
        dq_CX = dread_CX * fade_C[:, None]
        dc_C += tl.sum(dq_CX * q_CX, 1)
        dq_CX = tl.dot(dp_CC, k_CX, dq_CX, input_precision=P)
        store_tile(dq + ((batch * G + g) * J + j) * T * K, t_C, K, here_C, K, first, dq_CX, BX)
        dk_CX = tl.dot(tl.trans(dp_CC), q_CX, dk_CX, input_precision=P)
    store_matrix(dk + at * C * K, C, K, first, dk_CX, C, BX)
    store_matrix(dw + at * C * K, C, K, first, dw_CX, C, BX)
    tl.store(part, dc_C)
