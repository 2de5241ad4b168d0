"""Toeplitz block mixing as one pass over the blocks' sums (masks/block_scan.py says what it computes).

    tile of BM blocks x BE numbers:   mixed = K X + P E      E' = e^(-lambda BM) E + W X
    K[i, k] = sum_r a_r e^(-lambda_r (i - k)), i > k    P[i, r] = a_r e^(-lambda_r i)    W[r, i] = e^(-lambda_r (BM - i))

All three are matrix products over the BM blocks, so R costs nothing but width: memory is read once and written once.
A program walks all tiles of its BE numbers of one query head. The other direction walks from the last block; the
adjoint has a_r on its inputs instead of its outputs and sums over the query heads. E = F V of the math, flat.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(x, pos0, count, E, e, REVERSE: tl.constexpr, BM: tl.constexpr):
    """Pointers to x[i, e] of blocks pos0 .. pos0 + BM, counted from the end if REVERSE, and which are there."""
    i = tl.arange(0, BM)
    keep = (pos0 + i < count)[:, None] & (e < E)[None, :]
    if REVERSE:
        row0 = tl.zeros((), tl.int64) + (count - 1 - pos0)
        at = x + row0 * E - i[:, None] * E + e[None, :]
    else:
        row0 = tl.zeros((), tl.int64) + pos0
        at = x + row0 * E + i[:, None] * E + e[None, :]
    return at, keep


@triton.jit
def load_tile(x, pos0, count, E, e, REVERSE: tl.constexpr, BM: tl.constexpr, OP: tl.constexpr):
    at, keep = tile_at(x, pos0, count, E, e, REVERSE, BM)
    return tl.load(at, mask=keep, other=0.0).to(OP)


@triton.jit
def powers(rate, i, R, RP: tl.constexpr):
    """e^(-lambda_r i) as [i, r] (0 past R); rate points at lambda_0."""
    r = tl.arange(0, RP)
    rate_r = tl.load(rate + r, mask=r < R, other=0.0)
    return tl.where((r < R)[None, :], tl.exp(-i[:, None] * rate_r[None, :]), 0.0)


@triton.jit
def toeplitz_tables(table, rate, weight, G, J, R, DIAGONAL: tl.constexpr, BM: tl.constexpr):
    """table[g, j, i, k] = sum_r a_r e^(-lambda_r (i - k)) below the diagonal (and on it); rate_GR, weight_GJR."""
    g, j = tl.program_id(0) // J, tl.program_id(0) % J
    i, k = tl.arange(0, BM)[:, None], tl.arange(0, BM)[None, :]
    apart = tl.maximum(i - k, 0).to(tl.float32)
    total = tl.zeros((BM, BM), tl.float32)
    for r in range(R):
        total += tl.load(weight + (g * J + j) * R + r) * tl.exp(-tl.load(rate + g * R + r) * apart)
    total = tl.where(i >= k if DIAGONAL else i > k, total, 0.0)
    tl.store(table + tl.program_id(0) * BM * BM + i * BM + k, total.to(table.dtype.element_ty))


@triton.jit
def states_at(state, b, g, G, R, E, e, RP: tl.constexpr):
    """Pointers to state_BRGE[b, :, g, e] and what of them there is."""
    r = tl.arange(0, RP)
    return state + ((b * R + r)[:, None] * G + g).to(tl.int64) * E + e[None, :], (r < R)[:, None] & (e < E)[None, :]


@triton.jit(do_not_specialize=["M"])
def scan_tiles(
    x, table, rate, weight, first, out, last, counts, G, M, E, R,
    J: tl.constexpr, ADJOINT: tl.constexpr, REVERSE: tl.constexpr, ADD: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, COUNTED: tl.constexpr,
    BM: tl.constexpr, BE: tl.constexpr, RP: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """x (B, G, [J,] M, E) -> out (B, G, [J,] M, E): J on the output's side, on the input's if ADJOINT."""
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    HEADS: tl.constexpr = J if ADJOINT else 1  # inputs of this program
    j0 = 0 if ADJOINT else tl.program_id(0) % J
    e = (tl.program_id(0) // (1 if ADJOINT else J)) * BE + tl.arange(0, BE)
    count = M
    if COUNTED:
        count = tl.load(counts + b).to(tl.int32)
    size = (bg * 0 + M) * E
    x += bg * HEADS * size
    out += (bg * (1 if ADJOINT else J) + j0) * size
    i, r = tl.arange(0, BM), tl.arange(0, RP)
    rate += g * R
    weight += (g * J + j0) * R
    table += (g * J + j0) * BM * BM
    a = tl.load(weight + r, mask=r < R, other=0.0)
    read = powers(rate, i.to(tl.float32), R, RP)
    write = powers(rate, (BM - i).to(tl.float32), R, RP)
    read = (read if ADJOINT else read * a[None, :]).to(OP)
    fade = tl.exp(-tl.load(rate + r, mask=r < R, other=0.0) * BM)[:, None]
    at, there = states_at(first, b, g, G, R, E, e, RP)
    state = tl.zeros((RP, BE), tl.float32)
    if INITIAL:
        state = tl.load(at, mask=there, other=0.0).to(tl.float32)
    before = state
    square = i[:, None] * BM + i[None, :]
    near = tl.load(table + square)
    for pos0 in tl.range(0, count, BM, num_stages=STAGES):
        before = state
        mixed = tl.dot(read, state.to(OP), input_precision=PRECISION)
        state = state * fade
        for j in tl.static_range(HEADS):
            tile = load_tile(x + j * size, pos0, count, E, e, REVERSE, BM, OP)
            into = write
            if ADJOINT:
                into = write * tl.load(weight + j * R + r, mask=r < R, other=0.0)[None, :]
            if HEADS > 1:
                near = tl.load(table + j * BM * BM + square)
            mixed = tl.dot(near, tile, mixed, input_precision=PRECISION)
            state = tl.dot(tl.trans(into).to(OP), tile, state, input_precision=PRECISION)
        to, keep = tile_at(out, pos0, count, E, e, REVERSE, BM)
        if ADD:
            mixed += tl.load(to, mask=keep, other=0.0).to(tl.float32)
        tl.store(to, mixed.to(out.dtype.element_ty), mask=keep)
    if FINAL:  # S behind the last block, from the state that its tile began with
        pos0 = tl.maximum(count - 1, 0) // BM * BM
        gone = tl.maximum(count - 1 - pos0, 0)
        behind = before * tl.exp(-tl.load(rate + r, mask=r < R, other=0.0) * gone)[:, None]
        inside = powers(rate, tl.maximum(gone - i, 0).to(tl.float32), R, RP)
        for j in tl.static_range(HEADS):
            tile = load_tile(x + j * size, pos0, count, E, e, REVERSE, BM, OP)
            into = inside
            if ADJOINT:
                into = inside * tl.load(weight + j * R + r, mask=r < R, other=0.0)[None, :]
            behind = tl.dot(tl.trans(into).to(OP), tile, behind, input_precision=PRECISION)
        at, there = states_at(last, b, g, G, R, E, e, RP)
        tl.store(at, behind, mask=there)


@triton.jit(do_not_specialize=["M"])
def weigh_tiles(
    x, grad, rate, first, grad_last, sums, counts, G, M, E, R, J,
    REVERSE: tl.constexpr, DIAGONAL: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, COUNTED: tl.constexpr,
    BM: tl.constexpr, BE: tl.constexpr, RP: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """What gradients of a and lambda are made of, per program, query head and r, dO = grad_BGJME:

    sums[0] = sum_n <dO_n, E_n>    sums[1] = sum_n <dO_n, T_n>    sums[2] = <dS_last, T_last>,    T = -dE / dlambda:
    T_n+1 = e^-lambda (T_n + S_n), so that T_i = e^(-lambda i) (T_0 + i E_0) + sum_k<i (i - k) e^(-lambda (i - k)) X_k.
    """
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    j, part = tl.program_id(0) % J, tl.program_id(0) // J
    e = part * BE + tl.arange(0, BE)
    count = M
    if COUNTED:
        count = tl.load(counts + b).to(tl.int32)
    x += bg * M * E
    grad += (bg * J + j) * M * E
    rate += g * R
    i, r = tl.arange(0, BM), tl.arange(0, RP)
    steps = i.to(tl.float32)[:, None]
    read = powers(rate, i.to(tl.float32), R, RP)
    left = (BM - i).to(tl.float32)
    write = powers(rate, left, R, RP)
    later = tl.trans(write * left[:, None]).to(OP)
    write = tl.trans(write).to(OP)
    rate_r = tl.load(rate + r, mask=r < R, other=0.0)
    fade = tl.exp(-rate_r * BM)[:, None]
    at, there = states_at(first, b, g, G, R, E, e, RP)
    state = tl.zeros((RP, BE), tl.float32)
    if INITIAL:
        state = tl.load(at, mask=there, other=0.0).to(tl.float32)
    slope = tl.zeros((RP, BE), tl.float32)
    before, slope_before = state, slope
    pairs = tl.zeros((BM, BM), tl.float32)
    sum_0 = tl.zeros((BM, RP), tl.float32)
    sum_1 = tl.zeros((BM, RP), tl.float32)
    for pos0 in tl.range(0, count, BM, num_stages=STAGES):
        before, slope_before = state, slope
        tile = load_tile(x, pos0, count, E, e, REVERSE, BM, OP)
        wanted = load_tile(grad, pos0, count, E, e, REVERSE, BM, OP)
        pairs = tl.dot(wanted, tl.trans(tile), pairs, input_precision=PRECISION)
        sum_0 = tl.dot(wanted, tl.trans(state.to(OP)), sum_0, input_precision=PRECISION)
        sum_1 = tl.dot(wanted, tl.trans(slope.to(OP)), sum_1, input_precision=PRECISION)
        slope = tl.dot(later, tile, fade * (slope + BM * state), input_precision=PRECISION)
        state = tl.dot(write, tile, fade * state, input_precision=PRECISION)
    sum_1 = tl.sum(read * (sum_1 + steps * sum_0), 0)
    sum_0 = tl.sum(read * sum_0, 0)
    apart = i[:, None] - i[None, :]
    far = tl.maximum(apart, 0).to(tl.float32)
    pairs = tl.where(apart >= 0 if DIAGONAL else apart > 0, pairs, 0.0)
    for one in range(R):
        term = pairs * tl.exp(-tl.load(rate + one) * far)
        sum_0 += tl.where(r == one, tl.sum(tl.sum(term, 1), 0), 0.0)
        sum_1 += tl.where(r == one, tl.sum(tl.sum(term * far, 1), 0), 0.0)
    sums += (((bg * J + j) * (tl.num_programs(0) // J) + part) * 3) * RP + r
    tl.store(sums, sum_0)
    tl.store(sums + RP, sum_1)
    sum_2 = tl.zeros((RP,), tl.float32)
    if FINAL:  # noqa: SIM102
        if j == 0:
            pos0 = tl.maximum(count - 1, 0) // BM * BM
            gone = tl.maximum(count - 1 - pos0, 0)
            left_i = tl.maximum(gone - i, 0).to(tl.float32)
            inside = tl.trans(powers(rate, left_i, R, RP) * left_i[:, None]).to(OP)
            tile = load_tile(x, pos0, count, E, e, REVERSE, BM, OP)
            behind = tl.exp(-rate_r * gone)[:, None] * (slope_before + gone * before)
            behind = tl.dot(inside, tile, behind, input_precision=PRECISION)
            at, there = states_at(grad_last, b, g, G, R, E, e, RP)
            sum_2 = tl.sum(behind * tl.load(at, mask=there, other=0.0).to(tl.float32), 1)
    tl.store(sums + 2 * RP, sum_2)
