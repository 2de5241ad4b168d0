"""Backward of log-linear Gated DeltaNet through the slots of a Fenwick tree (terms: kernels/log_linear_delta/slots.py).

With Phi = gamma I + F, the transition of a segment, four kernels follow the forward backwards.

`read_backward`, all chunks in parallel. Query rows R_0 = R read slots e_1, e_2, .. from near to far, R_i = R_i-1 Phi_i:

    dlambda_i = row sums of R_i-1 . dO S_i^T      dR_i-1 = diag(lambda_i) dO S_i^T + dR_i Phi_i^T

`slot_gradients`, all slots in parallel, sums over the chunks that read the slot:

    dX = [dS | dPhi] = sum of R_i-1^T [diag(lambda_i) dO | dR_i]

`split_gradients`, one launch for each level from the highest down: a pair's dX goes to its left segment, whose slot has
a gradient of its own, and to its right one. As dgamma is the trace of dPhi, gamma needs no gradient of its own:

    dX_l += Phi_r^T dX      dS_r = dS      dPhi_r = dX X_l^T + gamma_l dPhi

`chunk_gradients`, all chunks in parallel, does the same at level 0 and ends in a chunk's X = K^T e [u | -w]. What the
chunk's queries send back is added there (kernels/log_linear_delta/chunk.py):

    dK = e [u | -w] dX^T      du = e K dS      dw = -e K dPhi      dgamma = trace dPhi

Border n of a row, 0 < n < its chunks, lies before its n-th chunk: chunk number e = a0 + n. The lowest set bit of e is
the size of the segments on both sides, so a border stands for its pair: the left segment is slot e, and the chunks that
read it are those of the right one. dS is stored for left segments only, because a right one has that of its pair.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.gated_delta.layout import (
    chunk_tokens,
    count_chunks,
    decay_from_start,
    decay_to_end,
    load_matrix,
    load_row,
    load_tile,
    program_chunk,
    program_chunk_index,
    store_matrix,
    store_tile,
)
from surgery.kernels.log_linear_delta.chunk import query_key_products, read_tile
from surgery.kernels.log_linear_delta.levels import first_chunk, lambda_of_slot, load_passed_chunk, program_part
from surgery.kernels.log_linear_delta.slots import block_rows


class SegmentGradients(NamedTuple):
    """By borders, dS^T (borders, G, V, K) of left segments and dPhi^T (2, borders, G, K, K) of left and right ones, in
    the inputs' dtype. Border n of a row has the entry of its n-th chunk."""

    s: Tensor
    phi: Tensor


@triton.jit
def slot_read_backward(
    do, do_CV, level, dlevel, x, r_CK, lane, t_C, here_C, which, T, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    P: tl.constexpr, LAMBDAS: tl.constexpr,
):  # fmt: skip
    """Return diag(lambda) dO S^T (C, K) of one slot, and add to dlambda. x: X^T of the slot; do_CV: the first block of
    values of dO; r_CK: the query rows that read the slot."""
    batch, g, j = lane
    seen_CK = tl.zeros([C, BK], tl.float32)
    for block in tl.static_range((V + BV - 1) // BV):
        if block > 0:
            do_CV = load_tile(do.ptr + batch * do.b + g * do.g + j * do.j, t_C, do.t, here_C, V, block * BV, BV)
        s_VK = load_matrix(x + block * BV * K, V - block * BV, K, 0, BV, BK)
        seen_CK = tl.dot(do_CV, s_VK, seen_CK, input_precision=P)
    at_l = level.ptr + batch * level.b + g * level.g + j * level.j + t_C * level.t + which * level.l
    lambda_C = tl.load(at_l, mask=here_C, other=0.0)
    dlambda = dlevel + (((batch * T + t_C) * G + g) * J + j) * LAMBDAS + which
    tl.atomic_add(dlambda, tl.sum(seen_CK * r_CK, 1), mask=here_C, sem="relaxed")
    return seen_CK * lambda_C[:, None]


@triton.jit(do_not_specialize=["top", "N"])
def read_backward(
    q, k, do, level, rows, terms, slots, firsts, reads, dreads, dread, dlevel, top, T, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, LAMBDAS: tl.constexpr,
):  # fmt: skip
    """Store dR_0 of one chunk and query head, and R_i-1 and dR_i of all slots that it reads; add to dlambda.

    Grid: (R x N, G x J).

    q, do: `HeadTensor`; k: `GroupTensor`; level: `LevelTensor`; terms: (c, w); slots: `Segments` of all chunks. firsts
    (R, N): where the reads of each border's slot begin in reads and dreads (reads, G, J, C, K), one chunk after the
    other. dread: dR_0 (chunks, G, J, C, K); dlevel (B, T, G, J, L): float32. dR_i is not stored at the farthest slot,
    behind which nothing is read.
    """
    c, w = terms
    head = tl.program_id(1).to(tl.int64)
    g, j = head // J, head % J
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    half = k.ptr.dtype.element_ty
    lane = batch, g, j
    p_CC = query_key_products(q, k, lane, t_C, here_C, c, at, K, C, BK, P)
    read_CK = read_tile(q, w, p_CC, decay_from_start(c, at, C), lane, t_C, here_C, at, 0, K, C, BK, P)
    do_CV = load_tile(do.ptr + batch * do.b + g * do.g + j * do.j, t_C, do.t, here_C, V, 0, BV)
    n, start = program_chunk_index(rows, N, WIDTH)
    a0 = first_chunk(start, top, C)
    a = a0 + n
    firsts_row = firsts + tl.program_id(0) // N * N - a0
    count = 0
    e = a
    while e > a0:
        count += 1
        e = e & (e - 1)
    e = a
    for _ in range(count - 1):
        here = ((tl.load(firsts_row + e) + a - e) * G * J + head) * C * K
        half_CK = read_CK.to(half)
        store_matrix(reads + here, C, K, 0, half_CK, C, BK)
        slot = at - (a - e + 1) * G
        f_KK = load_matrix(slots.x + (slot * (V + K) + V) * K, K, K, 0, BK, BK)
        read_CK = tl.dot(half_CK, tl.trans(f_KK), read_CK * tl.load(slots.gamma + slot), input_precision=P)
        e = e & (e - 1)
    dread_CK = tl.zeros([C, BK], tl.float32)
    if count > 0:
        store_matrix(
            reads + ((tl.load(firsts_row + e) + a - e) * G * J + head) * C * K, C, K, 0, read_CK.to(half), C, BK
        )
        slot = at - (a - e + 1) * G
        dread_CK = slot_read_backward(
            do, do_CV, level, dlevel, slots.x + slot * (V + K) * K, read_CK, lane, t_C, here_C,
            lambda_of_slot(e, start, top, C, LOG_C, LAMBDAS), T, J, G, K, V, C, BK, BV, P, LAMBDAS,
        )  # fmt: skip
    tl.debug_barrier()  # R_i were stored by other threads
    for i in range(count - 1):
        e = a
        for _ in range(count - 2 - i):
            e = e & (e - 1)
        here = ((tl.load(firsts_row + e) + a - e) * G * J + head) * C * K
        half_CK = dread_CK.to(half)
        store_matrix(dreads + here, C, K, 0, half_CK, C, BK)
        slot = at - (a - e + 1) * G
        x = slots.x + slot * (V + K) * K
        f_KK = load_matrix(x + V * K, K, K, 0, BK, BK)
        dread_CK = tl.dot(half_CK, f_KK, dread_CK * tl.load(slots.gamma + slot), input_precision=P)
        r_CK = load_matrix(reads + here, C, K, 0, C, BK)
        dread_CK += slot_read_backward(
            do, do_CV, level, dlevel, x, r_CK, lane, t_C, here_C, lambda_of_slot(e, start, top, C, LOG_C, LAMBDAS), T, J,
            G, K, V, C, BK, BV, P, LAMBDAS,
        )  # fmt: skip
    store_matrix(dread + (at * J + j) * C * K, C, K, 0, dread_CK, C, BK)


@triton.jit(do_not_specialize=["top", "N"])
def slot_gradients(
    do, level, rows, firsts, reads, dreads, grads, top, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, LAMBDAS: tl.constexpr,
):  # fmt: skip
    """Store a block of rows of dX^T of one slot, summed over all that read it.

    Grid: (R x N x blocks of rows of X^T, G).

    do: `HeadTensor`; level: `LevelTensor`; firsts, reads, dreads: as in `read_backward`; grads: `SegmentGradients`, of
    which the left segments are stored.
    """
    r, n, block = program_part(N, (V + BV - 1) // BV + (K + BV - 1) // BV)
    g = tl.program_id(1).to(tl.int64)
    in_f, first, _, _ = block_rows(block, V, K, BV)
    row = load_row(rows, r, WIDTH)
    a0, chunks = first_chunk(row.start, top, C), count_chunks(row, C)
    if (n == 0) | (n >= chunks):
        return
    e = a0 + n
    half = reads.dtype.element_ty
    count = tl.minimum(e & -e, chunks - n) * J
    at, at_read = (row.base + n) * G + g, (tl.load(firsts + r * N + n) * G + g) * J
    dx_RK = tl.zeros([BV, BK], tl.float32)
    if in_f:
        for i in range(tl.where((e & (e - 1)) > a0, count, 0)):
            here = (at_read + (i // J) * G * J + i % J) * C * K
            r_CK = load_matrix(reads + here, C, K, 0, C, BK)
            dr_CR = load_matrix(dreads + here, C, K, first, C, BV)
            dx_RK = tl.dot(tl.trans(dr_CR), r_CK, dx_RK, input_precision=P)
        store_matrix(grads.phi + (at * K + first) * K, K - first, K, 0, dx_RK, BV, BK)
    else:
        which = lambda_of_slot(e, row.start, top, C, LOG_C, LAMBDAS)
        do_here = do.ptr + row.batch * do.b + g * do.g
        at_l = level.ptr + row.batch * level.b + g * level.g + which * level.l
        for i in range(count):
            m, j = i // J, i % J
            t_C, here_C = chunk_tokens(n + m, row, C)
            r_CK = load_matrix(reads + (at_read + m * G * J + j) * C * K, C, K, 0, C, BK)
            do_CR = load_tile(do_here + j * do.j, t_C, do.t, here_C, V, first, BV)
            lambda_C = tl.load(at_l + j * level.j + t_C * level.t, mask=here_C, other=0.0)
            do_CR = (do_CR * lambda_C[:, None]).to(half)
            dx_RK = tl.dot(tl.trans(do_CR), r_CK, dx_RK, input_precision=P)
        store_matrix(grads.s + (at * V + first) * K, V - first, K, 0, dx_RK, BV, BK)


@triton.jit
def enclosing_border(segment, lev, levels, a0, chunks, LEFT: tl.constexpr):
    """Return (the border of the smallest segment around `segment` of level `lev`, itself included, that has a sibling
    in the row; whether it is the right one; whether there is one). LEFT: only left segments count.

    Segments without a sibling have the same chunks of the row as their parent, and so the same gradient. Nothing reads
    a segment without a parent.
    """
    border, is_right = a0 * 0, a0 * 0
    for up in range(lev, levels):
        here = segment >> (up - lev)
        e = (here | 1) << up
        is_first = (e > a0) & (e < a0 + chunks) & (border == 0)
        if LEFT:
            is_first = is_first & ((here & 1) == 0)
        border = tl.where(is_first, e - a0, border)
        is_right = tl.where(is_first, here & 1, is_right)
    return border, is_right, border > 0


class PairGradient(NamedTuple):
    """Pointers to dS^T (V, K) and dPhi^T (K, K) of a pair of segments, and the rows that these have: 0 instead of V and
    K if nothing reads the pair."""

    s: tl.tensor
    phi: tl.tensor
    rows_s: tl.tensor
    rows_phi: tl.tensor


@triton.jit
def pair_gradient(
    pair, lev, levels, a0, chunks, base, g, grads, MOST, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    """Return the `PairGradient` of segment `pair` of level `lev`."""
    border, _, is_read = enclosing_border(pair, lev, levels, a0, chunks, True)
    s, rows_s = grads.s + ((base + border) * G + g) * V * K, tl.where(is_read, V, 0)
    border, is_right, is_read = enclosing_border(pair, lev, levels, a0, chunks, False)
    phi = grads.phi + ((base + border + is_right * MOST) * G + g) * K * K
    return PairGradient(s, phi, rows_s, tl.where(is_read, K, 0))


@triton.jit
def right_transition_gradient(
    dx, x, here, gamma, first, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Return rows `first` and on of dPhi_r^T = (dX X_l^T)^T + gamma_l dPhi^T. dx: `PairGradient`; x: X_l^T, zeros
    unless `here`."""
    dphi_RK = load_matrix(dx.phi + first * K, dx.rows_phi - first, K, 0, BV, BK) * gamma
    rows_s, rows_f = tl.where(here, V, 0), tl.where(here, K, 0)
    for row in range(0, V, BV):
        s_VR = load_matrix(x + row * K, rows_s - row, K, first, BV, BV)
        ds_VK = load_matrix(dx.s + row * K, dx.rows_s - row, K, 0, BV, BK)
        dphi_RK = tl.dot(tl.trans(s_VR), ds_VK, dphi_RK, input_precision=P)
    for row in range(0, K, BV):
        f_KR = load_matrix(x + (V + row) * K, rows_f - row, K, first, BV, BV)
        dphi_KK = load_matrix(dx.phi + row * K, dx.rows_phi - row, K, 0, BV, BK)
        dphi_RK = tl.dot(tl.trans(f_KR), dphi_KK, dphi_RK, input_precision=P)
    return dphi_RK


@triton.jit
def add_left_gradient(
    left, dx_RK, f_KK, gamma, rows_R, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Add a block of rows of (Phi_r^T dX)^T to those of the left segment. f_KK: F_r^T; gamma: gamma_r."""
    left_RK = load_matrix(left, rows_R, K, 0, BV, BK) + dx_RK * gamma
    left_RK = tl.dot(dx_RK, tl.trans(f_KK), left_RK, input_precision=P)
    store_matrix(left, rows_R, K, 0, left_RK, BV, BK)


@triton.jit(do_not_specialize=["lev", "levels", "top", "PAIRS", "MOST"])
def split_gradients(
    rows, slots, rights, grads, lev, levels, top, PAIRS, MOST,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Split the gradient of one pair of segments of level `lev`: add to the left segment's and store the right one's.

    Grid: (R x PAIRS x (blocks of rows of X^T, then those of Phi^T), G).

    slots: `Segments` of all chunks; rights: F^T of right segments by borders (`Segments` without S); grads:
    `SegmentGradients`; MOST: borders.
    """
    lefts: tl.constexpr = (V + BV - 1) // BV + (K + BV - 1) // BV
    r, i, block = program_part(PAIRS, lefts + (K + BV - 1) // BV)
    g = tl.program_id(1).to(tl.int64)
    row = load_row(rows, r, WIDTH)
    a0, chunks = first_chunk(row.start, top, C), count_chunks(row, C)
    pair = (a0 >> (lev + 1)) + i
    n = ((2 * pair + 1) << lev) - a0
    if (n <= 0) | (n >= chunks):
        return
    most = MOST.to(tl.int64)
    dx = pair_gradient(pair, lev + 1, levels, a0, chunks, row.base, g, grads, most, G, K, V)
    at = (row.base + n) * G + g
    if block < lefts:
        in_f, first, _, _ = block_rows(block, V, K, BV)
        f_KK = load_matrix(rights.x + at * K * K, K, K, 0, BK, BK)
        gamma = tl.load(rights.gamma + at)
        if in_f:
            dx_RK = load_matrix(dx.phi + first * K, dx.rows_phi - first, K, 0, BV, BK)
            add_left_gradient(grads.phi + (at * K + first) * K, dx_RK, f_KK, gamma, K - first, K, BK, BV, P)
        else:
            dx_RK = load_matrix(dx.s + first * K, dx.rows_s - first, K, 0, BV, BK)
            add_left_gradient(grads.s + (at * V + first) * K, dx_RK, f_KK, gamma, V - first, K, BK, BV, P)
    else:
        first = (block - lefts) * BV
        gamma = tl.load(slots.gamma + at - G)
        x = slots.x + (at - G) * (V + K) * K
        dphi_RK = right_transition_gradient(dx, x, n > 0, gamma, first, K, V, BK, BV, P)
        store_matrix(grads.phi + ((at + most * G) * K + first) * K, K - first, K, 0, dphi_RK, BV, BK)


@triton.jit
def left_gradient(
    dx_RK, left, rows_R, right, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Return a block of rows of the left chunk's dX^T from that of its pair. left: the block of the slot's own
    gradient; right: the right chunk (`PassedChunk`)."""
    y_RC = tl.dot(dx_RK, tl.trans(right.k_CK), input_precision=P) * -right.to_end_C[None, :]
    sum_RK = load_matrix(left, rows_R, K, 0, BV, BK) + dx_RK * right.total
    return tl.dot(y_RC.to(dx_RK.dtype), right.w_CK, sum_RK, input_precision=P).to(dx_RK.dtype)


@triton.jit
def one_chunk_gradients(
    n, row, chunks, g, dx, q, k, terms, slots, grads, reads, sums, T, J, G: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Store the gradients of the row's n-th chunk, which is the left one of its pair or with RIGHT the right one. dx:
    `PairGradient`; others as in `chunk_gradients`."""
    w, u, c = terms
    ps, dps, dread = reads
    dq, dk, dw, du, dc = sums
    at = (row.base + n) * G + g
    t_C, here_C = chunk_tokens(n, row, C)
    half = k.ptr.dtype.element_ty
    at_C = tl.arange(0, C)
    to_end_C, total = decay_to_end(c, at, C)
    k_here = k.ptr + row.batch * k.b + g * k.g
    k_CK = load_tile(k_here, t_C, k.t, here_C, K, 0, BK)
    has_sibling = (n > 0) if RIGHT else (n + 1 < chunks)
    if RIGHT:
        gamma = tl.load(slots.gamma + at - G, mask=has_sibling, other=1.0)
        x = slots.x + (at - G) * (V + K) * K
    else:
        right, at_right = load_passed_chunk(k, w, c, row, n + 1, chunks, g, G, K, C, BK)
        rows_s, rows_phi = tl.where(has_sibling, V, 0), tl.where(has_sibling, K, 0)
    dk_CK = tl.zeros([C, BK], tl.float32)
    for at_v in range(0, V, BV):
        dx_RK = load_matrix(dx.s + at_v * K, dx.rows_s - at_v, K, 0, BV, BK)
        if not RIGHT:
            dx_RK = left_gradient(dx_RK, grads.s + (at_right * V + at_v) * K, rows_s - at_v, right, K, BK, BV, P)
        du_RC = tl.dot(dx_RK, tl.trans(k_CK), input_precision=P) * to_end_C[None, :]
        store_matrix(du + (at * V + at_v) * C, V - at_v, C, 0, du_RC, BV, C)
        u_RC = load_matrix(u + (at * V + at_v) * C, V - at_v, C, 0, BV, C)
        dk_CK = tl.dot(tl.trans((u_RC * to_end_C[None, :]).to(half)), dx_RK, dk_CK, input_precision=P)
    trace = 0.0
    for first in range(0, K, BV):
        if RIGHT:
            dx_RK = right_transition_gradient(dx, x, has_sibling, gamma, first, K, V, BK, BV, P).to(half)
        else:
            dx_RK = load_matrix(dx.phi + first * K, dx.rows_phi - first, K, 0, BV, BK)
            dx_RK = left_gradient(dx_RK, grads.phi + (at_right * K + first) * K, rows_phi - first, right, K, BK, BV, P)
        on_diagonal_RK = (first + tl.arange(0, BV))[:, None] == tl.arange(0, BK)[None, :]
        trace += tl.sum(tl.where(on_diagonal_RK, dx_RK.to(tl.float32), 0.0))
        w_CR = load_matrix(w + at * C * K, C, K, first, C, BV)
        dk_CK = tl.dot((w_CR * -to_end_C[:, None]).to(half), dx_RK, dk_CK, input_precision=P)
        dw_CR = tl.dot(k_CK, tl.trans(dx_RK), input_precision=P) * -to_end_C[:, None]
        for j in range(J):
            p_CC = load_matrix(ps + (at * J + j) * C * C, C, C, 0, C, C)
            dread_CR = load_matrix(dread + (at * J + j) * C * K, C, K, first, C, BV)
            dw_CR -= tl.dot(tl.trans(p_CC), dread_CR, input_precision=P)
        store_matrix(dw + at * C * K, C, K, first, dw_CR, C, BV)
    k_CK = load_tile(k_here, t_C, k.t, here_C, K, 0, BK)  # again: it takes no registers before
    z_C = tl.sum(dk_CK * k_CK, 1)
    dc_C = tl.where(at_C == C - 1, total * trace + tl.sum(z_C), 0.0) - z_C
    fade_C = decay_from_start(c, at, C)
    for j in range(J):
        q_CK = load_tile(q.ptr + row.batch * q.b + g * q.g + (0 * g + j) * q.j, t_C, q.t, here_C, K, 0, BK)
        dp_CC = load_matrix(dps + (at * J + j) * C * C, C, C, 0, C, C)
        dk_CK = tl.dot(tl.trans(dp_CC), q_CK, dk_CK, input_precision=P)
        dq_CK = load_matrix(dread + (at * J + j) * C * K, C, K, 0, C, BK) * fade_C[:, None]
        dc_C += tl.sum(dq_CK * q_CK, 1)
        dq_CK = tl.dot(dp_CC, k_CK, dq_CK, input_precision=P)
        store_tile(dq + ((row.batch * G + g) * J + j) * T * K, t_C, K, here_C, K, 0, dq_CK, BK)
    tl.store(dc + at * 2 * C + at_C, dc_C)
    store_matrix(dk + at * C * K, C, K, 0, dk_CK, C, BK)


@triton.jit(do_not_specialize=["levels", "top", "PAIRS", "MOST"])
def chunk_gradients(
    q, k, rows, terms, slots, grads, reads, sums, levels, top, T, PAIRS, J, MOST,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store dq, dk, dw, du^T and the first part of dc of two chunks, from the gradients of the segments of level 1 and
    from what the chunks' queries read.

    Grid: (R x PAIRS, G).

    q: `HeadTensor`; k: `GroupTensor`; terms: (w, u, c); slots: `Segments` of all chunks; grads: `SegmentGradients` of
    MOST borders; reads: (P, dP . M, dR_0) of `chunk_backward` and `read_backward`; sums: (dq (B, G, J, T, K), dk, dw,
    du, dc with two parts) as in `GatheredGradients`.
    """
    r, i, g = tl.program_id(0) // PAIRS, tl.program_id(0) % PAIRS, tl.program_id(1).to(tl.int64)
    row = load_row(rows, r, WIDTH)
    a0, chunks = first_chunk(row.start, top, C), count_chunks(row, C)
    pair = (a0 >> 1) + i
    dx = pair_gradient(pair, 1, levels, a0, chunks, row.base, g, grads, MOST.to(tl.int64), G, K, V)
    for right in tl.static_range(2):
        n = 2 * pair + right - a0
        if (n >= 0) & (n < chunks):
            one_chunk_gradients(
                n, row, chunks, g, dx, q, k, terms, slots, grads, reads, sums, T, J, G, K, V, C, BK, BV, P, right == 1
            )
