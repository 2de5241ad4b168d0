"""Levels of log-linear Gated DeltaNet above chunks (Guo et al. 2025, "Log-Linear Attention", section 3.4).

Level l pairs segments of 2^l chunks. The left one's state S passes through the chunks of the right one, each of which
reads it; what comes out and the right one's own state are the pair's:

    up      o += diag(lambda^(l)) R S      S' = gamma S - K^T e w S          pair = S' + right
    down    dS' = right = pair             dS = gamma dS' - w^T e K dS' + R^T diag(lambda^(l)) dO

A level is one launch, all pairs at once; the sequential steps of all levels sum to the chunks of the row, as those of
the plain rule do. R (log_linear_delta_chunks.py), w, e: per chunk (gated_delta_wy.py). Segments lie on the grid of
absolute positions: where a row begins in a right segment, a bucket that it brings along is the left one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.gated_delta_rows import (
    chunks_of,
    matrix,
    put_matrix,
    row_of,
    tile,
    to_end_of,
    tokens_of,
)


@triton.jit
def first_chunk(start, top, C: tl.constexpr):
    """Of the row, absolute; bits from `top` on are dropped: the chunks of a row differ in one of them at most."""
    return (start // C) & ((1 << top.to(tl.int64)) - 1)


@triton.jit
def lambda_at(level, start, lev, top, C: tl.constexpr, LOG_C: tl.constexpr, LAMBDAS: tl.constexpr):
    """Which lambda level `lev` above chunks has. Level `top` stands for whatever bit changes at the one border of 2^top
    chunks that a row may cross."""
    border = (((start // C) >> top) + 1) << top
    bit = tl.where(lev == top, (tl.log2((border & -border).to(tl.float32)) + 0.5).to(tl.int32), lev)
    return tl.minimum(bit + LOG_C + 1, LAMBDAS - 1)


@triton.jit
def has_left(a0, n, lev, BUCKET: tl.constexpr):
    """Whether the row's n-th chunk reads at level `lev`."""
    at = (a0 + n) >> lev
    return ((at & 1) == 1) & (((at << lev) > a0) | BUCKET)


@triton.jit
def pair_of(i, lev, a0, chunks):
    """Of the row's i-th pair: (left segment, counted from the row's first one; the right one's chunks, counted from
    the row's first; how many segments the row has)."""
    first = a0 >> lev
    pair = (a0 >> (lev + 1)) + i
    begin = ((2 * pair + 1) << lev) - a0
    lo = tl.minimum(tl.maximum(begin, 0), chunks)
    hi = tl.minimum(begin + ((1 + 0 * first) << lev), chunks)
    return 2 * pair - first, lo, hi, ((a0 + chunks - 1) >> lev) - first + 1


@triton.jit(do_not_specialize=["lev", "top", "PAIRS"])
def _up(
    k, w, c, rows, state, parent, bucket, after, end, kept, passed, k_b, k_g, k_t, lev, top, PAIRS,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
    KEEP: tl.constexpr, PASSED: tl.constexpr, BUCKET: tl.constexpr, AFTER: tl.constexpr, PARENT: tl.constexpr,
):  # fmt: skip
    r, i, g, at_v = (
        tl.program_id(0) // PAIRS,
        tl.program_id(0) % PAIRS,
        tl.program_id(1).to(tl.int64),
        tl.program_id(2) * BV,
    )
    batch, bos, length, start, base = row_of(rows, r, WIDTH)
    a0, chunks = first_chunk(start, top, C), chunks_of(length, start, C)
    left, lo, hi, segments = pair_of(i, lev, a0, chunks)
    if left >= segments:
        return
    here = tl.load(rows + r * WIDTH + 4 + lev) + left
    s_VK = tl.zeros([BV, BK], tl.float32)
    if left >= 0:
        s_VK = matrix(state + ((here * G + g) * V + at_v) * K, V - at_v, K, 0, BV, BK)
    elif BUCKET:
        s_VK = tl.trans(matrix(bucket + (r * G + g).to(tl.int64) * K * V, K, V, at_v, BK, BV))
    else:
        hi = lo
    for n in range(lo, hi):
        at = (base + n) * G + g
        t_C, here_C = tokens_of(n, bos, length, start, C)
        k_CK = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
        w_CK = matrix(w + at * C * K, C, K, 0, C, BK)
        to_end_C, total = to_end_of(c, at, C)
        half_VK = s_VK.to(k_CK.dtype)
        if KEEP:
            put_matrix(kept + (at * V + at_v) * K, V - at_v, K, 0, half_VK, BV, BK)
        x_VC = (tl.dot(half_VK, tl.trans(w_CK), input_precision=P) * -to_end_C[None, :]).to(k_CK.dtype)
        if PASSED:
            put_matrix(passed + (at * V + at_v) * C, V - at_v, C, 0, x_VC, BV, C)
        s_VK = tl.dot(x_VC, k_CK, s_VK * total, input_precision=P)
    if AFTER:
        at_end = (a0 + (tl.load(end + r) // C - start // C)) >> lev
        if ((at_end & 1) == 1) & ((at_end >> 1) == (a0 >> (lev + 1)) + i):
            put_matrix(after + (r * G + g).to(tl.int64) * K * V, K, V, at_v, tl.trans(s_VK), BK, BV)
    if PARENT:
        if left + 1 < segments:
            s_VK += matrix(state + (((here + 1) * G + g) * V + at_v) * K, V - at_v, K, 0, BV, BK)
        pair = tl.load(rows + r * WIDTH + 5 + lev) + i
        put_matrix(parent + ((pair * G + g) * V + at_v) * K, V - at_v, K, 0, s_VK, BV, BK)


@triton.jit(do_not_specialize=["lev", "top", "PAIRS"])
def _down(
    k, w, read, do, c, level, rows, dparent, dstate, dbucket, dafter, end, dkept, dpassed,
    k_b, k_g, k_t, do_b, do_g, do_j, do_t, l_b, l_t, l_g, l_j, l_l, lev, top, T, PAIRS, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, LAMBDAS: tl.constexpr,
    BUCKET: tl.constexpr, AFTER: tl.constexpr, PARENT: tl.constexpr,
):  # fmt: skip
    r, i, g, at_v = (
        tl.program_id(0) // PAIRS,
        tl.program_id(0) % PAIRS,
        tl.program_id(1).to(tl.int64),
        tl.program_id(2) * BV,
    )
    batch, bos, length, start, base = row_of(rows, r, WIDTH)
    a0, chunks = first_chunk(start, top, C), chunks_of(length, start, C)
    left, lo, hi, segments = pair_of(i, lev, a0, chunks)
    if left >= segments:
        return
    here = tl.load(rows + r * WIDTH + 4 + lev) + left
    ds_VK = tl.zeros([BV, BK], tl.float32)
    if PARENT:
        pair = tl.load(rows + r * WIDTH + 5 + lev) + i
        ds_VK = matrix(dparent + ((pair * G + g) * V + at_v) * K, V - at_v, K, 0, BV, BK)
    if left + 1 < segments:
        put_matrix(dstate + (((here + 1) * G + g) * V + at_v) * K, V - at_v, K, 0, ds_VK, BV, BK)
    if AFTER:
        at_end = (first_chunk(start, top, C) + (tl.load(end + r) // C - start // C)) >> lev
        if ((at_end & 1) == 1) & ((at_end >> 1) == (a0 >> (lev + 1)) + i):
            ds_VK += tl.trans(matrix(dafter + (r * G + g).to(tl.int64) * K * V, K, V, at_v, BK, BV))
    if (left < 0) & (not BUCKET):
        return
    which = lambda_at(level, start, lev, top, C, LOG_C, LAMBDAS)
    for back in range(hi - lo):
        n = hi - 1 - back
        at = (base + n) * G + g
        t_C, here_C = tokens_of(n, bos, length, start, C)
        k_CK = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
        w_CK = matrix(w + at * C * K, C, K, 0, C, BK)
        to_end_C, total = to_end_of(c, at, C)
        half_VK = ds_VK.to(k_CK.dtype)
        put_matrix(dkept + (at * V + at_v) * K, V - at_v, K, 0, half_VK, BV, BK)
        dx_VC = (tl.dot(half_VK, tl.trans(k_CK), input_precision=P) * -to_end_C[None, :]).to(k_CK.dtype)
        put_matrix(dpassed + (at * V + at_v) * C, V - at_v, C, 0, dx_VC, BV, C)
        ds_VK = tl.dot(dx_VC, w_CK, ds_VK * total, input_precision=P)
        for j in range(J):
            read_CK = matrix(read + (at * J + j) * C * K, C, K, 0, C, BK)
            at_l = level + batch * l_b + t_C * l_t + g * l_g + (0 * g + j) * l_j + which * l_l
            lambda_C = tl.load(at_l, mask=here_C, other=0.0)
            do_CV = tile(do + batch * do_b + g * do_g + (0 * g + j) * do_j, t_C, do_t, here_C, V, at_v, BV)
            do_CV = (do_CV * lambda_C[:, None]).to(k_CK.dtype)
            ds_VK = tl.dot(tl.trans(do_CV), read_CK, ds_VK, input_precision=P)
    if left >= 0:
        put_matrix(dstate + ((here * G + g) * V + at_v) * K, V - at_v, K, 0, ds_VK, BV, BK)
    else:
        put_matrix(dbucket + (r * G + g).to(tl.int64) * K * V, K, V, at_v, tl.trans(ds_VK), BK, BV)
