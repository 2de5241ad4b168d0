"""Log-linear Gated DeltaNet by the slots of a Fenwick tree, each stored once (terms: kernels/gated_delta/wy.py).

A segment of chunks turns the state S (K, V) before it into Phi S + S_own, with Phi (K, K) the product of its
transitions and S_own what it writes itself. With gamma, the product of its gates, Phi = gamma I + F, and one matrix
X = [S_own | F] (K, V + K) describes the segment. Both parts follow the recursion of one chunk and of a pair of segments:

    chunk     X <- gamma X + K^T e (y - w X)                   y = [u | -gamma_before w]
    pair      X = gamma_r X_l + F_r X_l + [S_r | gamma_l F_r]

A left segment of 2^l chunks ends before a chunk number e whose lowest set bit is l. Slot e - 1 holds its X, as in the
array of a Fenwick tree. Chunk n reads the slots e = n, n & (n - 1), .. > the row's first chunk, from near to far, and
takes its queries R (kernels/log_linear_delta/chunk.py) back through each of them:

    o += diag(lambda^(l)) R S_e      R <- gamma_e R + R F_e

So no state passes through the chunks that read it, as in kernels/log_linear_delta/levels.py: all chunks read in parallel,
and the stored states do not grow with the number of levels. F costs as much as K more values:
`LogLinearDeltaPlan.has_slots` says where that is less.

Matrices are stored as X^T (V + K, K), rows of S^T first.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.gated_delta.layout import (
    count_chunks,
    decay_from_start,
    load_matrix,
    load_row,
    program_chunk,
    program_chunk_index,
    store_matrix,
    store_tile,
)
from surgery.kernels.log_linear_delta.chunk import chunk_output, query_key_products, read_tile
from surgery.kernels.log_linear_delta.levels import (
    first_chunk,
    lambda_of_slot,
    load_passed_chunk,
    program_part,
    segment_pair,
)

LOG_GROUP = 3  # log2 of the chunks that one program of `group_slots` walks through


class Segments(NamedTuple):
    """Per segment X^T (V + K, K) and gamma: x (entries, G, V + K, K), gamma (entries, G) in float32. Entries of slots
    are chunks, and x has the dtype of the inputs; of whole segments it is float32."""

    x: Tensor
    gamma: Tensor


@triton.jit
def block_rows(block, V: tl.constexpr, K: tl.constexpr, BV: tl.constexpr):
    """Return a block of rows of X^T: (whether it is one of F^T, its first row inside S^T or F^T, the rows of that, its
    first row in X^T)."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    in_f = block >= blocks
    first = tl.where(in_f, block - blocks, block) * BV
    return in_f, first, tl.where(in_f, K, V), tl.where(in_f, V, 0) + first


@triton.jit
def store_slot(
    slots, row, e, a0, chunks, g, x_RK, gamma, at_r, rows_R, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Store the program's block of slot e, if a chunk of the row reads it."""
    is_read = (e > a0) & (e < a0 + chunks)
    at = (row.base + tl.where(is_read, e - 1 - a0, 0)) * G + g
    store_matrix(slots.x + (at * (V + K) + at_r) * K, tl.where(is_read, rows_R, 0), K, 0, x_RK, BV, BK)
    tl.store(slots.gamma + at, gamma, mask=is_read & (at_r == 0))


@triton.jit
def store_right(
    rights, row, b, a0, chunks, g, f_RK, gamma, first, G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """Store the program's block of F^T of the right segment that begins with chunk number b, if the row has a chunk on
    either side of that border."""
    is_border = (b > a0) & (b < a0 + chunks)
    at = (row.base + tl.where(is_border, b - a0, 0)) * G + g
    store_matrix(rights.x + (at * K + first) * K, tl.where(is_border, K - first, 0), K, 0, f_RK, BV, BK)
    tl.store(rights.gamma + at, gamma, mask=is_border & (first == 0))


@triton.jit(do_not_specialize=["top", "GROUPS"])
def group_slots(
    k, terms, rows, slots, whole, rights, top, GROUPS,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, LOG_GROUP: tl.constexpr, WHOLE: tl.constexpr,
    RIGHTS: tl.constexpr,
):  # fmt: skip
    """Store the slots of levels below LOG_GROUP of one group of chunks, its slot if it is a left segment, and with
    WHOLE its X^T.

    Grid: (R x GROUPS x blocks of rows of X^T, G).

    k: `GroupTensor`; terms: (w, u, c); slots, whole: `Segments`, of all chunks and of all groups. A run starts at each
    even chunk a of the group, number 0 included, and its first 1, 2, 4, .. chunks are left segments while their number
    is below the largest power of two in a. Run 0 goes through the whole group. With RIGHTS, runs of F^T go on to that
    power of two: then they are right segments of level 1 or more, whose F^T is stored in rights (`Segments` without S).
    """
    w, u, c = terms
    r, i, block = program_part(GROUPS, (V + BV - 1) // BV + (K + BV - 1) // BV)
    g = tl.program_id(1).to(tl.int64)
    in_f, first, size, at_r = block_rows(block, V, K, BV)
    row = load_row(rows, r, WIDTH)
    a0, chunks = first_chunk(row.start, top, C), count_chunks(row, C)
    group = (a0 >> LOG_GROUP) + i
    begin = group << LOG_GROUP
    if begin >= a0 + chunks:
        return
    for run in tl.static_range(1 << (LOG_GROUP - 1)):
        x_RK = tl.zeros([BV, BK], tl.float32)
        gamma = 1.0
        steps = (1 << LOG_GROUP) if run == 0 else (run & -run)
        if RIGHTS and run > 0:
            steps = tl.where(in_f, 2 * steps, steps)
        for step in range(steps):
            n = begin + 2 * run + step - a0
            chunk, at = load_passed_chunk(k, w, c, row, n, chunks, g, G, K, C, BK)
            if in_f:
                w_CR = load_matrix(w + at * C * K, tl.where(chunk.here, C, 0), K, first, C, BV)
                y_RC = tl.trans(w_CR.to(tl.float32)) * -gamma
            else:
                rows_R = tl.where(chunk.here, size - first, 0)
                y_RC = load_matrix(u + (at * V + first) * C, rows_R, C, 0, BV, C).to(tl.float32)
            half_RK = x_RK.to(chunk.k_CK.dtype)
            if step > 0:
                y_RC -= tl.dot(half_RK, tl.trans(chunk.w_CK), input_precision=P)
            y_RC = (y_RC * chunk.to_end_C[None, :]).to(chunk.k_CK.dtype)
            x_RK = tl.dot(y_RC, chunk.k_CK, x_RK * chunk.total, input_precision=P)
            gamma *= chunk.total
            count = step + 1
            e = begin + 2 * run + count
            is_left = ((count & step) == 0) & ((count < (1 << LOG_GROUP)) | ((group & 1) == 0))
            if RIGHTS and run > 0:
                is_left = is_left & (count <= (run & -run))
            if is_left:
                store_slot(slots, row, e, a0, chunks, g, x_RK, gamma, at_r, size - first, G, K, V, BK, BV)
        if RIGHTS and (in_f & ((run > 0) | ((group & 1) == 1))):
            store_right(rights, row, begin + 2 * run, a0, chunks, g, x_RK, gamma, first, G, K, BK, BV)
        if WHOLE and run == 0:
            at = (tl.load(rows + r * WIDTH + 4 + LOG_GROUP) + i) * G + g
            store_matrix(whole.x + (at * (V + K) + at_r) * K, size - first, K, 0, x_RK, BV, BK)
            tl.store(whole.gamma + at, gamma, mask=at_r == 0)


@triton.jit(do_not_specialize=["lev", "top", "PAIRS"])
def join_slots(
    rows, whole, parents, slots, rights, lev, top, PAIRS,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, RIGHTS: tl.constexpr,
):  # fmt: skip
    """Store X^T of one pair of segments of level `lev`, and its slot if it is a left segment; with RIGHTS, F^T if it is
    a right one.

    Grid: (R x PAIRS x blocks of rows of X^T, G).

    whole, parents, slots: `Segments` of levels lev and lev + 1, and of all chunks; rights: as in `group_slots`.
    """
    r, i, block = program_part(PAIRS, (V + BV - 1) // BV + (K + BV - 1) // BV)
    g = tl.program_id(1).to(tl.int64)
    in_f, first, size, at_r = block_rows(block, V, K, BV)
    row = load_row(rows, r, WIDTH)
    a0, chunks = first_chunk(row.start, top, C), count_chunks(row, C)
    left, _, _, segments = segment_pair(i, lev, a0, chunks)
    if left >= segments:
        return
    half = slots.x.dtype.element_ty
    here = ((tl.load(rows + r * WIDTH + 4 + lev) + left) * G + g).to(tl.int64)
    has_left, has_right = left >= 0, left + 1 < segments
    gamma, gamma_r = tl.load(whole.gamma + here, mask=has_left, other=1.0), 1.0
    rows_R = size - first
    x_RK = load_matrix(whole.x + (here * (V + K) + at_r) * K, tl.where(has_left, rows_R, 0), K, 0, BV, BK)
    if has_right:
        right = whole.x + (here + G) * (V + K) * K
        gamma_r = tl.load(whole.gamma + here + G)
        f_KK = load_matrix(right + V * K, K, K, 0, BK, BK).to(half)
        y_RK = load_matrix(right + at_r * K, rows_R, K, 0, BV, BK) * tl.where(in_f, gamma, 1.0)
        x_RK = tl.dot(x_RK.to(half), f_KK, x_RK * gamma_r + y_RK, input_precision=P)
    pair = (a0 >> (lev + 1)) + i
    at = ((tl.load(rows + r * WIDTH + 5 + lev) + i) * G + g).to(tl.int64)
    store_matrix(parents.x + (at * (V + K) + at_r) * K, rows_R, K, 0, x_RK, BV, BK)
    tl.store(parents.gamma + at, gamma * gamma_r, mask=at_r == 0)
    if (pair & 1) == 0:
        e = (pair + 1) << (lev + 1)
        store_slot(slots, row, e, a0, chunks, g, x_RK, gamma * gamma_r, at_r, rows_R, G, K, V, BK, BV)
    elif RIGHTS and in_f:
        store_right(rights, row, pair << (lev + 1), a0, chunks, g, x_RK, gamma * gamma_r, first, G, K, BK, BV)


@triton.jit
def load_slot_lambda(
    at_l, level, here_C, e, start, top, C: tl.constexpr, LOG_C: tl.constexpr, LAMBDAS: tl.constexpr
):  # fmt: skip
    """Return the lambdas (C,) with which a chunk's tokens read slot e."""
    return tl.load(at_l + lambda_of_slot(e, start, top, C, LOG_C, LAMBDAS) * level.l, mask=here_C, other=0.0)


@triton.jit(do_not_specialize=["top", "N"])
def read_slots(
    q, k, v, beta, level, rows, terms, slots, out, top, T, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, LAMBDAS: tl.constexpr,
):  # fmt: skip
    """Store what one chunk and query head reads of the chunk itself and of all slots.

    Grid: (R x N, G x J, blocks of values).

    q: `HeadTensor`; k, v, beta: `GroupTensor`; level: `LevelTensor`; terms: (c, Y, w); slots: `Segments` of all chunks.
    """
    c, y, w = terms
    head, at_v = tl.program_id(1).to(tl.int64), tl.program_id(2) * BV
    g, j = head // J, head % J
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    half = k.ptr.dtype.element_ty
    lane = batch, g, j
    p_CC = query_key_products(q, k, lane, t_C, here_C, c, at, K, C, BK, P)
    out_CV = chunk_output(p_CC, v, beta, level, y, lane, t_C, here_C, at, at_v, V, C, LOG_C, BV, P, LAMBDAS)
    n, start = program_chunk_index(rows, N, WIDTH)
    a0 = first_chunk(start, top, C)
    read_CK = read_tile(q, w, p_CC, decay_from_start(c, at, C), lane, t_C, here_C, at, 0, K, C, BK, P)
    at_l = level.ptr + batch * level.b + g * level.g + j * level.j + t_C * level.t
    e = a0 + n
    reads = 0
    while e > a0:
        reads += 1
        e = e & (e - 1)
    e = a0 + n
    for _ in range(reads - 1):
        here = at - (a0 + n - e + 1) * G
        half_CK, x = read_CK.to(half), slots.x + here * (V + K) * K
        s_VK = load_matrix(x + at_v * K, V - at_v, K, 0, BV, BK)
        f_KK = load_matrix(x + V * K, K, K, 0, BK, BK)
        lambda_C = load_slot_lambda(at_l, level, here_C, e, start, top, C, LOG_C, LAMBDAS)
        out_CV += tl.dot(half_CK, tl.trans(s_VK), input_precision=P) * lambda_C[:, None]
        read_CK = tl.dot(half_CK, tl.trans(f_KK), read_CK * tl.load(slots.gamma + here), input_precision=P)
        e = e & (e - 1)
    if reads > 0:
        here = at - (a0 + n - e + 1) * G
        s_VK = load_matrix(slots.x + (here * (V + K) + at_v) * K, V - at_v, K, 0, BV, BK)
        lambda_C = load_slot_lambda(at_l, level, here_C, e, start, top, C, LOG_C, LAMBDAS)
        out_CV += tl.dot(read_CK.to(half), tl.trans(s_VK), input_precision=P) * lambda_C[:, None]
    store_tile(out + ((batch * G + g) * J + j) * T * V, t_C, V, here_C, V, at_v, out_CV, BV)
