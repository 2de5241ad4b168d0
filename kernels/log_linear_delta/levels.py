"""Levels of log-linear Gated DeltaNet above chunks (Guo et al. 2025, "Log-Linear Attention", section 3.4).

Level l pairs segments of 2^l chunks. The left one's state S passes through the chunks of the right one, each of which
reads it; what comes out and the right one's own state are the pair's:

    up      o += diag(lambda^(l)) R S      S' = gamma S - K^T e w S          pair = S' + right
    down    dS' = right = pair             dS = gamma dS' - w^T e K dS' + R^T diag(lambda^(l)) dO

A level is one launch, all pairs at once; the sequential steps of all levels sum to the chunks of the row, as those of
the plain rule do. R (kernels/log_linear_delta/chunk.py), w, e: per chunk (kernels/gated_delta/wy.py). Segments lie on the grid of
absolute positions: where a row begins in a right segment, a bucket that it brings along is the left one.

The two lowest levels above chunks in one launch, four chunks 0 .. 3 of a segment at a time.

What a segment writes by itself is the plain gated delta rule's state, run through it from zero: A over 0, 1, which 2 and
3 then read and pass on, and B over 2, 3. All of it stays in registers; the segment's state is A + B.

What the levels of log-linear Gated DeltaNet send back to each chunk (kernels/log_linear_delta/levels.py), given, of every
level at which it reads, S at its start and dS' at its end, x = -e w S and y = -e K dS':

    dK = e u dS_own^T + sum_l x_l dS'_l^T      dw = sum_l y_l S_l^T      du = e K dS_own      gamma sum_l <S_l, dS'_l>
    dR_j = sum_l diag(lambda_j^(l)) dO_j S_l^T                dlambda_j^(l) = rows of R_j . dO_j S_l^T, summed

A program has a block of features; what is summed over features, dc and dlambda, comes in parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.gated_delta.layout import (
    chunk_tokens,
    count_chunks,
    decay_to_end,
    load_matrix,
    load_row,
    load_tile,
    program_chunk,
    program_chunk_index,
    store_matrix,
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
def segment_pair(i, lev, a0, chunks):
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
    batch, bos, length, start, base = load_row(rows, r, WIDTH)
    a0, chunks = first_chunk(start, top, C), count_chunks(length, start, C)
    left, lo, hi, segments = segment_pair(i, lev, a0, chunks)
    if left >= segments:
        return
    here = tl.load(rows + r * WIDTH + 4 + lev) + left
    s_VK = tl.zeros([BV, BK], tl.float32)
    if left >= 0:
        s_VK = load_matrix(state + ((here * G + g) * V + at_v) * K, V - at_v, K, 0, BV, BK)
    elif BUCKET:
        s_VK = tl.trans(load_matrix(bucket + (r * G + g).to(tl.int64) * K * V, K, V, at_v, BK, BV))
    else:
        hi = lo
    for n in range(lo, hi):
        at = (base + n) * G + g
        t_C, here_C = chunk_tokens(n, bos, length, start, C)
        k_CK = load_tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
        w_CK = load_matrix(w + at * C * K, C, K, 0, C, BK)
        to_end_C, total = decay_to_end(c, at, C)
        half_VK = s_VK.to(k_CK.dtype)
        if KEEP:
            store_matrix(kept + (at * V + at_v) * K, V - at_v, K, 0, half_VK, BV, BK)
        x_VC = (tl.dot(half_VK, tl.trans(w_CK), input_precision=P) * -to_end_C[None, :]).to(k_CK.dtype)
        if PASSED:
            store_matrix(passed + (at * V + at_v) * C, V - at_v, C, 0, x_VC, BV, C)
        s_VK = tl.dot(x_VC, k_CK, s_VK * total, input_precision=P)
    if AFTER:
        at_end = (a0 + (tl.load(end + r) // C - start // C)) >> lev
        if ((at_end & 1) == 1) & ((at_end >> 1) == (a0 >> (lev + 1)) + i):
            store_matrix(after + (r * G + g).to(tl.int64) * K * V, K, V, at_v, tl.trans(s_VK), BK, BV)
    if PARENT:
        if left + 1 < segments:
            s_VK += load_matrix(state + (((here + 1) * G + g) * V + at_v) * K, V - at_v, K, 0, BV, BK)
        pair = tl.load(rows + r * WIDTH + 5 + lev) + i
        store_matrix(parent + ((pair * G + g) * V + at_v) * K, V - at_v, K, 0, s_VK, BV, BK)


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
    batch, bos, length, start, base = load_row(rows, r, WIDTH)
    a0, chunks = first_chunk(start, top, C), count_chunks(length, start, C)
    left, lo, hi, segments = segment_pair(i, lev, a0, chunks)
    if left >= segments:
        return
    here = tl.load(rows + r * WIDTH + 4 + lev) + left
    ds_VK = tl.zeros([BV, BK], tl.float32)
    if PARENT:
        pair = tl.load(rows + r * WIDTH + 5 + lev) + i
        ds_VK = load_matrix(dparent + ((pair * G + g) * V + at_v) * K, V - at_v, K, 0, BV, BK)
    if left + 1 < segments:
        store_matrix(dstate + (((here + 1) * G + g) * V + at_v) * K, V - at_v, K, 0, ds_VK, BV, BK)
    if AFTER:
        at_end = (first_chunk(start, top, C) + (tl.load(end + r) // C - start // C)) >> lev
        if ((at_end & 1) == 1) & ((at_end >> 1) == (a0 >> (lev + 1)) + i):
            ds_VK += tl.trans(load_matrix(dafter + (r * G + g).to(tl.int64) * K * V, K, V, at_v, BK, BV))
    if (left < 0) & (not BUCKET):
        return
    which = lambda_at(level, start, lev, top, C, LOG_C, LAMBDAS)
    for back in range(hi - lo):
        n = hi - 1 - back
        at = (base + n) * G + g
        t_C, here_C = chunk_tokens(n, bos, length, start, C)
        k_CK = load_tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
        w_CK = load_matrix(w + at * C * K, C, K, 0, C, BK)
        to_end_C, total = decay_to_end(c, at, C)
        half_VK = ds_VK.to(k_CK.dtype)
        store_matrix(dkept + (at * V + at_v) * K, V - at_v, K, 0, half_VK, BV, BK)
        dx_VC = (tl.dot(half_VK, tl.trans(k_CK), input_precision=P) * -to_end_C[None, :]).to(k_CK.dtype)
        store_matrix(dpassed + (at * V + at_v) * C, V - at_v, C, 0, dx_VC, BV, C)
        ds_VK = tl.dot(dx_VC, w_CK, ds_VK * total, input_precision=P)
        for j in range(J):
            read_CK = load_matrix(read + (at * J + j) * C * K, C, K, 0, C, BK)
            at_l = level + batch * l_b + t_C * l_t + g * l_g + (0 * g + j) * l_j + which * l_l
            lambda_C = tl.load(at_l, mask=here_C, other=0.0)
            do_CV = load_tile(do + batch * do_b + g * do_g + (0 * g + j) * do_j, t_C, do_t, here_C, V, at_v, BV)
            do_CV = (do_CV * lambda_C[:, None]).to(k_CK.dtype)
            ds_VK = tl.dot(tl.trans(do_CV), read_CK, ds_VK, input_precision=P)
    if left >= 0:
        store_matrix(dstate + ((here * G + g) * V + at_v) * K, V - at_v, K, 0, ds_VK, BV, BK)
    else:
        store_matrix(dbucket + (r * G + g).to(tl.int64) * K * V, K, V, at_v, tl.trans(ds_VK), BK, BV)


@triton.jit
def _pass_chunk(s_VK, w_CK, k_CK, u_VC, to_end_C, total, kept, passed, rows_V, PASSED: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """gamma S + K^T e (u - w S), of which S and -e w S are kept. u: the chunk's own or zeros."""
    half_VK = s_VK.to(k_CK.dtype)
    store_matrix(kept, rows_V, K, 0, half_VK, BV, BK)
    x_VC = tl.dot(half_VK, tl.trans(w_CK), input_precision=P) * -to_end_C[None, :]
    if PASSED:
        store_matrix(passed, rows_V, C, 0, x_VC, BV, C)
    x_VC += u_VC * to_end_C[None, :]
    return tl.dot(x_VC.to(k_CK.dtype), k_CK, s_VK * total, input_precision=P)


@triton.jit(do_not_specialize=["top", "GROUPS"])
def _lowest_levels(
    k, w, u, c, rows, state, kept0, kept1, passed0, passed1, k_b, k_g, k_t, top, GROUPS,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    r, i, g, at_v = (
        tl.program_id(0) // GROUPS,
        tl.program_id(0) % GROUPS,
        tl.program_id(1).to(tl.int64),
        tl.program_id(2) * BV,
    )
    batch, bos, length, start, base = load_row(rows, r, WIDTH)
    a0, chunks = first_chunk(start, top, C), count_chunks(length, start, C)
    first = (((a0 >> 2) + i) << 2) - a0
    if first >= chunks:
        return
    at_C = tl.arange(0, C)
    a_VK = tl.zeros([BV, BK], tl.float32)
    b_VK = tl.zeros([BV, BK], tl.float32)
    for step in tl.static_range(4):
        n = first + step
        here = (n >= 0) & (n < chunks)
        at = (base + tl.where(here, n, 0)) * G + g
        t_C, here_C = chunk_tokens(n, bos, length, start, C)
        k_CK = load_tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
        rows_V = tl.where(here, V - at_v, 0)
        at_s, at_x = (at * V + at_v) * K, (at * V + at_v) * C
        w_CK = load_matrix(w + at * C * K, tl.where(here, C, 0), K, 0, C, BK)
        u_VC = load_matrix(u + (at * V + at_v) * C, rows_V, C, 0, BV, C).to(tl.float32)
        hi, lo = c + at * 2 * C, c + at * 2 * C + C
        end_hi, end_lo = tl.load(hi + C - 1, mask=here, other=0.0), tl.load(lo + C - 1, mask=here, other=0.0)
        log_C = (end_hi - tl.load(hi + at_C, mask=here_C, other=0.0)) + (
            end_lo - tl.load(lo + at_C, mask=here_C, other=0.0)
        )
        to_end_C, total = tl.exp(tl.minimum(log_C, 0.0)), tl.exp(end_hi + end_lo)
        if step == 0:
            a_VK = tl.dot((u_VC * to_end_C[None, :]).to(k_CK.dtype), k_CK, input_precision=P)
        if step == 1:
            a_VK = _pass_chunk(
                a_VK, w_CK, k_CK, u_VC, to_end_C, total, kept0 + at_s, passed0 + at_x, rows_V, PASSED, K, C, BK, BV, P
            )
        if step >= 2:
            none_VC = tl.zeros([BV, C], tl.float32)
            a_VK = _pass_chunk(
                a_VK,
                w_CK,
                k_CK,
                none_VC,
                to_end_C,
                total,
                kept1 + at_s,
                passed1 + at_x,
                rows_V,
                PASSED,
                K,
                C,
                BK,
                BV,
                P,
            )
        if step == 2:
            b_VK = tl.dot((u_VC * to_end_C[None, :]).to(k_CK.dtype), k_CK, input_precision=P)
        if step == 3:
            b_VK = _pass_chunk(
                b_VK, w_CK, k_CK, u_VC, to_end_C, total, kept0 + at_s, passed0 + at_x, rows_V, PASSED, K, C, BK, BV, P
            )
    segment = tl.load(rows + r * WIDTH + 6) + i
    store_matrix(state + ((segment * G + g) * V + at_v) * K, V - at_v, K, 0, a_VK + b_VK, BV, BK)


@triton.jit(do_not_specialize=["low", "high", "top", "N", "MOST"])
def _gather_gradients(
    k, do, level, rows, c, u, read, kept, passed, dkept, dpassed, down, dk, dw, du, dread, dlevel, dc,
    k_b, k_g, k_t, do_b, do_g, do_j, do_t, l_b, l_t, l_g, l_j, l_l, low, high, top, T, N, J, MOST,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, LAMBDAS: tl.constexpr,
    BUCKET: tl.constexpr, ADD: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    g, first = tl.program_id(1).to(tl.int64), tl.program_id(2) * BX
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    n, start = program_chunk_index(rows, N, WIDTH)
    a0 = first_chunk(start, top, C)
    at_C = tl.arange(0, C)
    to_end_C, total = decay_to_end(c, at, C)
    half = k.dtype.element_ty
    dk_CX = tl.zeros([C, BX], tl.float32)
    dw_CX = tl.zeros([C, BX], tl.float32)
    both = 0.0
    if OWN:
        for at_v in range(0, V, BV):
            u_VC = load_matrix(u + (at * V + at_v) * C, V - at_v, C, 0, BV, C)
            ds_VX = load_matrix(down + (at * V + at_v) * K, V - at_v, K, first, BV, BX).to(half)
            dk_CX = tl.dot(tl.trans((u_VC * to_end_C[None, :]).to(half)), ds_VX, dk_CX, input_precision=P)
    for lev in range(low, high):
        if has_left(a0, n, lev, BUCKET):
            for at_v in range(0, V, BV):
                here = ((lev - low) * MOST.to(tl.int64) * G + at) * V + at_v
                s_VX = load_matrix(kept + here * K, V - at_v, K, first, BV, BX)
                ds_VX = load_matrix(dkept + here * K, V - at_v, K, first, BV, BX)
                x_VC = load_matrix(passed + here * C, V - at_v, C, 0, BV, C)
                y_VC = load_matrix(dpassed + here * C, V - at_v, C, 0, BV, C)
                dk_CX = tl.dot(tl.trans(x_VC), ds_VX, dk_CX, input_precision=P)
                dw_CX = tl.dot(tl.trans(y_VC), s_VX, dw_CX, input_precision=P)
                both += tl.sum(s_VX.to(tl.float32) * ds_VX)
    k_CX = load_tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, first, BX)
    z_C = tl.sum(dk_CX * k_CX, 1)
    dc_C = tl.where(at_C == C - 1, total * both + tl.sum(z_C), 0.0) - z_C
    part = dc + (at * PARTS + tl.program_id(2)) * C + at_C
    if ADD:
        dk_CX += load_matrix(dk + at * C * K, C, K, first, C, BX)
        dw_CX += load_matrix(dw + at * C * K, C, K, first, C, BX)
        dc_C += tl.load(part)
    store_matrix(dk + at * C * K, C, K, first, dk_CX, C, BX)
    store_matrix(dw + at * C * K, C, K, first, dw_CX, C, BX)
    tl.store(part, dc_C)
    for j in range(J):
        at_j = (at * J + j) * C * K
        read_CX = load_matrix(read + at_j, C, K, first, C, BX)
        dread_CX = tl.zeros([C, BX], tl.float32)
        if ADD:
            dread_CX += load_matrix(dread + at_j, C, K, first, C, BX)
        dlambda = dlevel + ((batch * T + t_C) * G + g) * J * LAMBDAS + j * LAMBDAS
        for lev in range(low, high):
            if has_left(a0, n, lev, BUCKET):
                here = ((lev - low) * MOST.to(tl.int64) * G + at) * V
                seen_CX = tl.zeros([C, BX], tl.float32)
                for at_v in range(0, V, BV):
                    do_CV = load_tile(do + batch * do_b + g * do_g + (0 * g + j) * do_j, t_C, do_t, here_C, V, at_v, BV)
                    s_VX = load_matrix(kept + (here + at_v) * K, V - at_v, K, first, BV, BX)
                    seen_CX = tl.dot(do_CV, s_VX, seen_CX, input_precision=P)
                which = lambda_at(level, start, lev, top, C, LOG_C, LAMBDAS)
                at_l = level + batch * l_b + t_C * l_t + g * l_g + (0 * g + j) * l_j + which * l_l
                dread_CX += seen_CX * tl.load(at_l, mask=here_C, other=0.0)[:, None]
                tl.atomic_add(dlambda + which, tl.sum(seen_CX * read_CX, 1), mask=here_C, sem="relaxed")
        store_matrix(dread + at_j, C, K, first, dread_CX, C, BX)
    if OWN & (first == 0):
        for at_v in range(0, V, BV):
            du_VC = tl.zeros([BV, C], tl.float32)
            for at_k in range(0, K, BX):
                k_CX = load_tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, at_k, BX)
                ds_VX = load_matrix(down + (at * V + at_v) * K, V - at_v, K, at_k, BV, BX).to(half)
                du_VC = tl.dot(ds_VX, tl.trans(k_CX), du_VC, input_precision=P)
            store_matrix(du + (at * V + at_v) * C, V - at_v, C, 0, du_VC * to_end_C[None, :], BV, C)
