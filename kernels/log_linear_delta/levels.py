"""Levels of log-linear Gated DeltaNet above chunks (Guo et al. 2025, "Log-Linear Attention", section 3.4).

Level l pairs segments of 2^l chunks. The state S of the left segment passes through the chunks of the right one, each
of which reads it. What comes out, plus the right segment's own state, is the state of the pair:

    up      o += diag(lambda^(l)) R S      S' = gamma S - K^T e w S          pair = S' + right
    down    dS' = right = pair             dS = gamma dS' - w^T e K dS' + R^T diag(lambda^(l)) dO

A level is one launch with all pairs in parallel. The sequential steps of all levels sum to the chunks of the row, as in
the plain rule. R: see kernels/log_linear_delta/chunk.py; w, e, gamma: see kernels/gated_delta/wy.py. Segments lie on a
grid of absolute positions: if a row begins in a right segment, a bucket that it resumes from is the left one.

`lowest_levels` takes levels 0 and 1 in one launch, four chunks 0 .. 3 of a segment at a time. What a segment writes is
the state of the plain rule, run through it from zero: A over chunks 0 and 1, which 2 and 3 then read and pass on, and B
over 2 and 3. Both stay in registers; the segment's state is A + B.

`gather_gradients` collects what the levels send back to each chunk. With S at the chunk's start, dS' at its end, x = -e
w S and y = -e K dS' of every level at which the chunk reads:

    dK = e u dS_own^T + sum_l x_l dS'_l^T      dw = sum_l y_l S_l^T      du = e K dS_own      gamma sum_l <S_l, dS'_l>
    dR_j = sum_l diag(lambda_j^(l)) dO_j S_l^T                dlambda_j^(l) = row sums of R_j . dO_j S_l^T

A program has a block of features; sums over features, of dc and dlambda, are stored in parts, so that the order of the
programs changes no bit.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.gated_delta.layout import (
    chunk_tokens,
    count_chunks,
    decay_to_end,
    load_matrix,
    load_row,
    load_tile,
    program_chunk,
    program_chunk_index,
    state_product,
    store_matrix,
)


class LevelStates(NamedTuple):
    """Per level and chunk that reads at it: S^T at the chunk's start (V, K) and x^T (V, C), and their gradients dS'^T
    at the chunk's end and y^T. Each (levels, chunks, G, ..)."""

    kept: Tensor
    passed: Tensor
    dkept: Tensor
    dpassed: Tensor


class GatheredGradients(NamedTuple):
    """Sums of `gather_gradients` over levels.

    Per chunk: dk and dw (C, K), du^T (V, C), dread (J, C, K), dc (parts, C). Per token: dlevel (B, T, G, J, blocks of
    features, L). dk, dlevel and dc are float32.
    """

    dk: Tensor
    dw: Tensor
    du: Tensor
    dread: Tensor
    dlevel: Tensor
    dc: Tensor


class PairEnds(NamedTuple):
    """Buffers at the ends of a pair, or their gradients.

    state, parent (entries, G, V, K): states of this level's segments and of their parents. bucket, after (R, G, K, V):
    buckets that rows resume from, and those behind the rows. end (R,): positions behind the rows.
    """

    state: Tensor
    parent: Tensor
    bucket: Tensor
    after: Tensor
    end: Tensor


@triton.jit
def program_part(PARTS, BLOCKS: tl.constexpr):
    """Return (row, part of the row, block) of the program, from the first axis of the grid (rows x PARTS x BLOCKS).

    Blocks of one part read the same k and w. Side by side in the grid they run together and find them in the L2 cache.
    """
    part = tl.program_id(0) // BLOCKS
    return part // PARTS, part % PARTS, tl.program_id(0) % BLOCKS


@triton.jit
def first_chunk(start, top, C: tl.constexpr):
    """Return the absolute number of the row's first chunk without the bits from `top` on, of which at most one changes
    within a row.
    """
    return (start // C) & ((1 << top.to(tl.int64)) - 1)


@triton.jit
def lowest_bit(n):
    """Return the place of the lowest set bit of a number."""
    return (tl.log2((n & -n).to(tl.float32)) + 0.5).to(tl.int32)


@triton.jit
def lambda_at(start, lev, top, C: tl.constexpr, LOG_C: tl.constexpr, LAMBDAS: tl.constexpr):
    """Return the index of the lambda of level `lev` above chunks.

    Level `top` stands for the bit that changes at the one border of 2^top chunks that a row may cross.
    """
    border = (((start // C) >> top) + 1) << top
    bit = tl.where(lev == top, lowest_bit(border), lev)
    return tl.minimum(bit + LOG_C + 1, LAMBDAS - 1)


@triton.jit
def lambda_of_slot(e, start, top, C: tl.constexpr, LOG_C: tl.constexpr, LAMBDAS: tl.constexpr):
    """Return the index of the lambda with which chunks read slot e (kernels/log_linear_delta/slots.py)."""
    return lambda_at(start, lowest_bit(e), top, C, LOG_C, LAMBDAS)


@triton.jit
def has_left(a0, n, lev, BUCKET: tl.constexpr):
    """Return whether the row's n-th chunk reads at level `lev`."""
    at = (a0 + n) >> lev
    return ((at & 1) == 1) & (((at << lev) > a0) | BUCKET)


@triton.jit
def segment_pair(i, lev, a0, chunks):
    """Return (left segment of the row's i-th pair, first chunk of the right segment, the chunk behind it, segments of
    the row), all counted from the row's first one."""
    first = a0 >> lev
    pair = (a0 >> (lev + 1)) + i
    begin = ((2 * pair + 1) << lev) - a0
    lo = tl.minimum(tl.maximum(begin, 0), chunks)
    hi = tl.minimum(begin + ((1 + 0 * first) << lev), chunks)
    return 2 * pair - first, lo, hi, ((a0 + chunks - 1) >> lev) - first + 1


@triton.jit(do_not_specialize=["lev", "top", "PAIRS"])
def level_up(
    k, w, c, rows, ends, kept, passed, lev, top, PAIRS,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr,
    PASSED: tl.constexpr, BUCKET: tl.constexpr, AFTER: tl.constexpr, PARENT: tl.constexpr,
):  # fmt: skip
    """Pass the left state of one pair of level `lev` through the right segment. Grid: (R x PAIRS x blocks of values, G).

    k: `GroupTensor`; ends: `PairEnds`. Stores S^T and, if PASSED, x^T of each chunk. BUCKET: rows resume from buckets.
    AFTER: store the bucket of this level behind the row. PARENT: store the pair's state.
    """
    r, i, block = program_part(PAIRS, (V + BV - 1) // BV)
    g, at_v = tl.program_id(1).to(tl.int64), block * BV
    row = load_row(rows, r, WIDTH)
    batch, start = row.batch, row.start
    a0, chunks = first_chunk(start, top, C), count_chunks(row, C)
    left, lo, hi, segments = segment_pair(i, lev, a0, chunks)
    if left >= segments:
        return
    here = tl.load(rows + r * WIDTH + 4 + lev) + left
    s_VK = tl.zeros([BV, BK], tl.float32)
    if left >= 0:
        s_VK = load_matrix(ends.state + ((here * G + g) * V + at_v) * K, V - at_v, K, 0, BV, BK)
    elif BUCKET:
        s_VK = tl.trans(load_matrix(ends.bucket + (r * G + g).to(tl.int64) * K * V, K, V, at_v, BK, BV))
    else:
        hi = lo
    at_C = tl.arange(0, C)
    for n in range(lo, hi):
        at = (row.base + n) * G + g
        t_C, here_C = chunk_tokens(n, row, C)
        k_CK = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, 0, BK)
        to_end_C, total = decay_to_end(c, at, C)
        half_VK = s_VK.to(k_CK.dtype)
        kept_here = kept + (at * V + at_v) * K
        store_matrix(kept_here, V - at_v, K, 0, half_VK, BV, BK)
        x_VC = state_product(half_VK, kept_here, V - at_v, w + at * C * K, at_C, K, at_C >= 0, K, C, BK, BV, BX, P)
        x_VC = (x_VC * -to_end_C[None, :]).to(k_CK.dtype)
        if PASSED:
            store_matrix(passed + (at * V + at_v) * C, V - at_v, C, 0, x_VC, BV, C)
        s_VK = tl.dot(x_VC, k_CK, s_VK * total, input_precision=P)
    if AFTER:
        at_end = (a0 + (tl.load(ends.end + r) // C - start // C)) >> lev
        if ((at_end & 1) == 1) & ((at_end >> 1) == (a0 >> (lev + 1)) + i):
            store_matrix(ends.after + (r * G + g).to(tl.int64) * K * V, K, V, at_v, tl.trans(s_VK), BK, BV)
    if PARENT:
        if left + 1 < segments:
            s_VK += load_matrix(ends.state + (((here + 1) * G + g) * V + at_v) * K, V - at_v, K, 0, BV, BK)
        pair = tl.load(rows + r * WIDTH + 5 + lev) + i
        store_matrix(ends.parent + ((pair * G + g) * V + at_v) * K, V - at_v, K, 0, s_VK, BV, BK)


@triton.jit(do_not_specialize=["lev", "top", "PAIRS"])
def level_down(
    k, w, read, do, c, level, rows, grads, dkept, dpassed, lev, top, T, PAIRS, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, LAMBDAS: tl.constexpr,
    BUCKET: tl.constexpr, AFTER: tl.constexpr, PARENT: tl.constexpr,
):  # fmt: skip
    """The backward of `level_up` for one pair: from the gradient of the pair's state to those of its segments.

    Same grid.

    k: `GroupTensor`; do: `HeadTensor`; level: `LevelTensor`; read: R of every chunk; grads: gradients of `PairEnds`.
    """
    r, i, block = program_part(PAIRS, (V + BV - 1) // BV)
    g, at_v = tl.program_id(1).to(tl.int64), block * BV
    row = load_row(rows, r, WIDTH)
    batch, start = row.batch, row.start
    a0, chunks = first_chunk(start, top, C), count_chunks(row, C)
    left, lo, hi, segments = segment_pair(i, lev, a0, chunks)
    if left >= segments:
        return
    here = tl.load(rows + r * WIDTH + 4 + lev) + left
    ds_VK = tl.zeros([BV, BK], tl.float32)
    if PARENT:
        pair = tl.load(rows + r * WIDTH + 5 + lev) + i
        ds_VK = load_matrix(grads.parent + ((pair * G + g) * V + at_v) * K, V - at_v, K, 0, BV, BK)
    if left + 1 < segments:
        store_matrix(grads.state + (((here + 1) * G + g) * V + at_v) * K, V - at_v, K, 0, ds_VK, BV, BK)
    if AFTER:
        at_end = (a0 + (tl.load(grads.end + r) // C - start // C)) >> lev
        if ((at_end & 1) == 1) & ((at_end >> 1) == (a0 >> (lev + 1)) + i):
            ds_VK += tl.trans(load_matrix(grads.after + (r * G + g).to(tl.int64) * K * V, K, V, at_v, BK, BV))
    if (left < 0) & (not BUCKET):
        return
    which = lambda_at(start, lev, top, C, LOG_C, LAMBDAS)
    half = k.ptr.dtype.element_ty
    for back in range(hi - lo):
        n = hi - 1 - back
        at = (row.base + n) * G + g
        t_C, here_C = chunk_tokens(n, row, C)
        w_CK = load_matrix(w + at * C * K, C, K, 0, C, BK)
        to_end_C, total = decay_to_end(c, at, C)
        half_VK = ds_VK.to(half)
        kept_here = dkept + (at * V + at_v) * K
        store_matrix(kept_here, V - at_v, K, 0, half_VK, BV, BK)
        k_here = k.ptr + batch * k.b + g * k.g
        dx_VC = state_product(half_VK, kept_here, V - at_v, k_here, t_C, k.t, here_C, K, C, BK, BV, BX, P)
        dx_VC = (dx_VC * -to_end_C[None, :]).to(half)
        store_matrix(dpassed + (at * V + at_v) * C, V - at_v, C, 0, dx_VC, BV, C)
        ds_VK = tl.dot(dx_VC, w_CK, ds_VK * total, input_precision=P)
        for j in range(J):
            read_CK = load_matrix(read + (at * J + j) * C * K, C, K, 0, C, BK)
            at_l = level.ptr + batch * level.b + t_C * level.t + g * level.g + (0 * g + j) * level.j + which * level.l
            lambda_C = tl.load(at_l, mask=here_C, other=0.0)
            do_CV = load_tile(do.ptr + batch * do.b + g * do.g + (0 * g + j) * do.j, t_C, do.t, here_C, V, at_v, BV)
            do_CV = (do_CV * lambda_C[:, None]).to(half)
            ds_VK = tl.dot(tl.trans(do_CV), read_CK, ds_VK, input_precision=P)
    if left >= 0:
        store_matrix(grads.state + ((here * G + g) * V + at_v) * K, V - at_v, K, 0, ds_VK, BV, BK)
    else:
        store_matrix(grads.bucket + (r * G + g).to(tl.int64) * K * V, K, V, at_v, tl.trans(ds_VK), BK, BV)


class PassedChunk(NamedTuple):
    """A chunk that states pass through: k and w (C, K), gates behind each token and of the whole chunk; here: whether
    the row has such a chunk."""

    k_CK: tl.tensor
    w_CK: tl.tensor
    to_end_C: tl.tensor
    total: tl.tensor
    here: tl.tensor


@triton.jit
def load_passed_chunk(
    k, w, c, row, n, chunks, g, G: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Return (the row's n-th chunk, its place in the buffers). A chunk that the row does not have leaves states as they
    are.
    """
    at_C = tl.arange(0, C)
    here = (n >= 0) & (n < chunks)
    at = (row.base + tl.where(here, n, 0)) * G + g
    t_C, here_C = chunk_tokens(n, row, C)
    k_CK = load_tile(k.ptr + row.batch * k.b + g * k.g, t_C, k.t, here_C, K, 0, BK)
    w_CK = load_matrix(w + at * C * K, tl.where(here, C, 0), K, 0, C, BK)
    hi, lo = c + at * 2 * C, c + at * 2 * C + C
    end_hi, end_lo = tl.load(hi + C - 1, mask=here, other=0.0), tl.load(lo + C - 1, mask=here, other=0.0)
    log_C = (end_hi - tl.load(hi + at_C, mask=here_C, other=0.0)) + (
        end_lo - tl.load(lo + at_C, mask=here_C, other=0.0)
    )
    return PassedChunk(k_CK, w_CK, tl.exp(tl.minimum(log_C, 0.0)), tl.exp(end_hi + end_lo), here), at


@triton.jit
def pass_chunk(
    s_VK, u_VC, chunk, rows_V, kept, passed, PASSED: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Return gamma S + K^T e (u - w S), and store S^T and, if PASSED, (-e w S)^T. u: the chunk's own or zeros. rows_V:
    values in the block, 0 if the row has no such chunk.
    """
    half_VK = s_VK.to(chunk.k_CK.dtype)
    store_matrix(kept, rows_V, K, 0, half_VK, BV, BK)
    x_VC = tl.dot(half_VK, tl.trans(chunk.w_CK), input_precision=P) * -chunk.to_end_C[None, :]
    if PASSED:
        store_matrix(passed, rows_V, C, 0, x_VC, BV, C)
    x_VC += u_VC * chunk.to_end_C[None, :]
    return tl.dot(x_VC.to(chunk.k_CK.dtype), chunk.k_CK, s_VK * chunk.total, input_precision=P)


@triton.jit(do_not_specialize=["top", "GROUPS"])
def lowest_levels(
    k, terms, rows, state, kept, passed, top, GROUPS,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    """Store the state of one segment of four chunks, and S^T and x^T of levels 0 and 1.

    Grid: (R x GROUPS x blocks of values, G).

    k: `GroupTensor`; terms: (w, u, c); kept, passed: pairs of buffers, of levels 0 and 1. Only for rows without
    buckets.
    """
    w, u, c = terms
    r, i, block = program_part(GROUPS, (V + BV - 1) // BV)
    g, at_v = tl.program_id(1).to(tl.int64), block * BV
    row = load_row(rows, r, WIDTH)
    a0, chunks = first_chunk(row.start, top, C), count_chunks(row, C)
    first = (((a0 >> 2) + i) << 2) - a0
    if first >= chunks:
        return
    a_VK = tl.zeros([BV, BK], tl.float32)
    b_VK = tl.zeros([BV, BK], tl.float32)
    for step in tl.static_range(4):
        chunk, at = load_passed_chunk(k, w, c, row, first + step, chunks, g, G, K, C, BK)
        rows_V = tl.where(chunk.here, V - at_v, 0)
        at_s, at_x = (at * V + at_v) * K, (at * V + at_v) * C
        u_VC = load_matrix(u + (at * V + at_v) * C, rows_V, C, 0, BV, C).to(tl.float32)
        if step == 0:
            a_VK = tl.dot((u_VC * chunk.to_end_C[None, :]).to(chunk.k_CK.dtype), chunk.k_CK, input_precision=P)
        if step == 1:
            a_VK = pass_chunk(a_VK, u_VC, chunk, rows_V, kept[0] + at_s, passed[0] + at_x, PASSED, K, C, BK, BV, P)
        if step >= 2:
            none_VC = tl.zeros([BV, C], tl.float32)
            a_VK = pass_chunk(a_VK, none_VC, chunk, rows_V, kept[1] + at_s, passed[1] + at_x, PASSED, K, C, BK, BV, P)
        if step == 2:
            b_VK = tl.dot((u_VC * chunk.to_end_C[None, :]).to(chunk.k_CK.dtype), chunk.k_CK, input_precision=P)
        if step == 3:
            b_VK = pass_chunk(b_VK, u_VC, chunk, rows_V, kept[0] + at_s, passed[0] + at_x, PASSED, K, C, BK, BV, P)
    segment = tl.load(rows + r * WIDTH + 6) + i
    store_matrix(state + ((segment * G + g) * V + at_v) * K, V - at_v, K, 0, a_VK + b_VK, BV, BK)


@triton.jit(do_not_specialize=["low", "high", "top", "N", "MOST"])
def gather_gradients(
    k, do, level, rows, c, u, read, states, sums, down, low, high, top, T, N, J, MOST,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, LAMBDAS: tl.constexpr,
    BUCKET: tl.constexpr, ADD: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store the sums over levels low .. high - 1 of one chunk and block of features; with ADD, add them to what is
    there. OWN: the chunk's own state is included. Grid: (R x N, G, blocks of features).

    k: `GroupTensor`; do: `HeadTensor`; level: `LevelTensor`; states: `LevelStates`; sums: `GatheredGradients`; down:
    dS_own^T (chunks, G, V, K); MOST: chunks in the buffers.
    """
    g, first = tl.program_id(1).to(tl.int64), tl.program_id(2) * BX
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    n, start = program_chunk_index(rows, N, WIDTH)
    a0 = first_chunk(start, top, C)
    at_C = tl.arange(0, C)
    to_end_C, total = decay_to_end(c, at, C)
    half = k.ptr.dtype.element_ty
    dk_CX = tl.zeros([C, BX], tl.float32)
    dw_CX = tl.zeros([C, BX], tl.float32)
    both = 0.0
    if OWN:
        for at_v in range(0, V, BV):
            u_VC = load_matrix(u + (at * V + at_v) * C, V - at_v, C, 0, BV, C)
            ds_VX = load_matrix(down + (at * V + at_v) * K, V - at_v, K, first, BV, BX).to(half)
            dk_CX = tl.dot(tl.trans((u_VC * to_end_C[None, :]).to(half)), ds_VX, dk_CX, input_precision=P)
    for j in range(J):
        at_j = (at * J + j) * C * K
        read_CX = load_matrix(read + at_j, C, K, first, C, BX)
        dread_CX = tl.zeros([C, BX], tl.float32)
        if ADD:
            dread_CX += load_matrix(sums.dread + at_j, C, K, first, C, BX)
        do_here = do.ptr + batch * do.b + g * do.g + (0 * g + j) * do.j
        at_l = level.ptr + batch * level.b + t_C * level.t + g * level.g + (0 * g + j) * level.j
        token_C = ((batch * T + t_C) * G + g) * J + j
        dlambda = sums.dlevel + (token_C * ((K + BX - 1) // BX) + tl.program_id(2)) * LAMBDAS
        for lev in range(low, high):
            if has_left(a0, n, lev, BUCKET):
                seen_CX = tl.zeros([C, BX], tl.float32)
                for at_v in range(0, V, BV):
                    here = ((lev - low) * MOST.to(tl.int64) * G + at) * V + at_v
                    s_VX = load_matrix(states.kept + here * K, V - at_v, K, first, BV, BX)
                    do_CV = load_tile(do_here, t_C, do.t, here_C, V, at_v, BV)
                    seen_CX = tl.dot(do_CV, s_VX, seen_CX, input_precision=P)
                    if j == 0:
                        ds_VX = load_matrix(states.dkept + here * K, V - at_v, K, first, BV, BX)
                        x_VC = load_matrix(states.passed + here * C, V - at_v, C, 0, BV, C)
                        y_VC = load_matrix(states.dpassed + here * C, V - at_v, C, 0, BV, C)
                        dk_CX = tl.dot(tl.trans(x_VC), ds_VX, dk_CX, input_precision=P)
                        dw_CX = tl.dot(tl.trans(y_VC), s_VX, dw_CX, input_precision=P)
                        both += tl.sum(s_VX.to(tl.float32) * ds_VX)
                which = lambda_at(start, lev, top, C, LOG_C, LAMBDAS)
                dread_CX += seen_CX * tl.load(at_l + which * level.l, mask=here_C, other=0.0)[:, None]
                tl.atomic_add(dlambda + which, tl.sum(seen_CX * read_CX, 1), mask=here_C, sem="relaxed")
        store_matrix(sums.dread + at_j, C, K, first, dread_CX, C, BX)
    k_CX = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, first, BX)
    z_C = tl.sum(dk_CX * k_CX, 1)
    dc_C = tl.where(at_C == C - 1, total * both + tl.sum(z_C), 0.0) - z_C
    part = sums.dc + (at * PARTS + tl.program_id(2)) * C + at_C
    if ADD:
        dk_CX += load_matrix(sums.dk + at * C * K, C, K, first, C, BX)
        dw_CX += load_matrix(sums.dw + at * C * K, C, K, first, C, BX)
        dc_C += tl.load(part)
    store_matrix(sums.dk + at * C * K, C, K, first, dk_CX, C, BX)
    store_matrix(sums.dw + at * C * K, C, K, first, dw_CX, C, BX)
    tl.store(part, dc_C)
    if OWN & (first == 0):
        for at_v in range(0, V, BV):
            du_VC = tl.zeros([BV, C], tl.float32)
            for at_k in range(0, K, BX):
                k_CX = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, at_k, BX)
                ds_VX = load_matrix(down + (at * V + at_v) * K, V - at_v, K, at_k, BV, BX).to(half)
                du_VC = tl.dot(ds_VX, tl.trans(k_CX), du_VC, input_precision=P)
            store_matrix(sums.du + (at * V + at_v) * C, V - at_v, C, 0, du_VC * to_end_C[None, :], BV, C)
