"""Kernels of Toeplitz block mixing: one pass over the sums of the blocks, as a state-space scan in chunks.

    tile of BM blocks x BE elements:   mixed = K X + P H,   H' = e^(-lambda BM) H + W X
    K[i, k] = sum_r a_r e^(-lambda_r (i - k)), i > k    P[i, r] = a_r e^(-lambda_r i)    W[r, i] = e^(-lambda_r (BM - i))

X (BM, BE): the sums of the tile's blocks. H (R, BE): the states that enter the tile; H_n + X_n is the state S_n behind
block n. K X, P H and W X are matrix products, so that R adds width but no passes: memory is read once and written once.
A program walks all tiles of its BE elements of one query head. In reverse it starts from the last block. The adjoint
has a_r on its inputs instead of its outputs and sums over the query heads. Letters: M blocks, E = F V elements of a
flat sum, RP: the power of two of R, OP: the dtype of products' operands. Source of the mask:
surgery/mixers/masks/toeplitz_block_mixing.py. Arguments stay scalars: Triton 3.2, the oldest one supported, has no
tuples.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_pointers(x, pos0, count, E, e, REVERSE: tl.constexpr, BM: tl.constexpr):
    """Return (pointers to x[i, e], mask) of blocks pos0 .. pos0 + BM, counted from the last one if REVERSE."""
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
    """Return x (BM, BE) of a tile of blocks, with zeros where there is none."""
    at, keep = tile_pointers(x, pos0, count, E, e, REVERSE, BM)
    return tl.load(at, mask=keep, other=0.0).to(OP)


@triton.jit
def powers(rate, i, G, R, RP: tl.constexpr):
    """Return e^(-lambda_r i) as [i, r], 0 from R on. rate: pointer to lambda_0 of the group."""
    r = tl.arange(0, RP)
    rate_r = tl.load(rate + r * G, mask=r < R, other=0.0)
    return tl.where((r < R)[None, :], tl.exp(-i[:, None] * rate_r[None, :]), 0.0)


@triton.jit
def toeplitz(rate, weight, G, GJ, R: tl.constexpr, DIAGONAL: tl.constexpr, BM: tl.constexpr):
    """Return K[i, k] = sum_r a_r e^(-lambda_r (i - k)), zero above the diagonal, and on it unless DIAGONAL."""
    i, k = tl.arange(0, BM)[:, None], tl.arange(0, BM)[None, :]
    apart = tl.maximum(i - k, 0).to(tl.float32)
    total = tl.zeros((BM, BM), tl.float32)
    for r in tl.static_range(R):
        total += tl.load(weight + r * GJ) * tl.exp(-tl.load(rate + r * G) * apart)
    return tl.where(i >= k if DIAGONAL else i > k, total, 0.0)


@triton.jit
def toeplitz_tables(table, rate, weight, G, J, R: tl.constexpr, DIAGONAL: tl.constexpr, BM: tl.constexpr):
    """Compute table (G, J, BM, BM), K of every query head. Grid: (G * J,)."""
    square = tl.arange(0, BM)[:, None] * BM + tl.arange(0, BM)[None, :]
    near = toeplitz(rate + tl.program_id(0) // J, weight + tl.program_id(0), G, G * J, R, DIAGONAL, BM)
    tl.store(table + tl.program_id(0) * BM * BM + square, near.to(table.dtype.element_ty))


@triton.jit
def state_pointers(state, b, g, G, R, E, e, RP: tl.constexpr):
    """Return (pointers to state_BRGE[b, :, g, e], mask)."""
    r = tl.arange(0, RP)
    return state + ((b * R + r)[:, None] * G + g).to(tl.int64) * E + e[None, :], (r < R)[:, None] & (e < E)[None, :]


@triton.jit
def advance(
    x, size, near, table, weight, GJ, read, write, fade, state, pos0, count, E, e,
    R: tl.constexpr, HEADS: tl.constexpr, REVERSE: tl.constexpr, BM: tl.constexpr, RP: tl.constexpr, OP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (mixed sums of a tile, the state behind it). read = P, write = W, near = K, fade = e^(-lambda BM); with
    one head, write has the factor a_r. HEADS: input heads, `size` elements apart."""
    i, r = tl.arange(0, BM), tl.arange(0, RP)
    mixed = tl.dot(read, state.to(OP), input_precision=PRECISION)
    state = state * fade
    for j in tl.static_range(HEADS):
        tile = load_tile(x + j * size, pos0, count, E, e, REVERSE, BM, OP)
        into = write
        if HEADS > 1:
            into = write * tl.load(weight + r * GJ + j, mask=r < R, other=0.0)[:, None]
            near = tl.load(table + j * BM * BM + i[:, None] * BM + i[None, :])
        mixed = tl.dot(near, tile, mixed, input_precision=PRECISION)
        state = tl.dot(into.to(OP), tile, state, input_precision=PRECISION)
    return mixed, state


@triton.jit
def store_tile(out, mixed, pos0, count, E, e, REVERSE: tl.constexpr, ADD: tl.constexpr, BM: tl.constexpr):
    """Store a tile of mixed sums, added to those there if ADD."""
    at, keep = tile_pointers(out, pos0, count, E, e, REVERSE, BM)
    if ADD:
        mixed += tl.load(at, mask=keep, other=0.0).to(tl.float32)
    tl.store(at, mixed.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["M"])
def scan_tiles(
    x, table, rate, weight, first, out, last, counts, G, M, E,
    R: tl.constexpr, J: tl.constexpr, ADJOINT: tl.constexpr, REVERSE: tl.constexpr, DIAGONAL: tl.constexpr,
    ADD: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, COUNTED: tl.constexpr,
    BM: tl.constexpr, BE: tl.constexpr, RP: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute out (B, G, J, M, E) of x (B, G, M, E), or of x (B, G, J, M, E) out (B, G, M, E) if ADJOINT.

    Grid: (tiles of E * heads of out, B * G).

    first, last (B, R, G, E): states before the first and behind the last block, if INITIAL and FINAL. counts_B: blocks
    of a row, if COUNTED. table: K of every query head, read where several are summed.
    """
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    HEADS: tl.constexpr = J if ADJOINT else 1  # input heads of a program
    OUTS: tl.constexpr = 1 if ADJOINT else J
    j0 = tl.program_id(0) % OUTS
    e = tl.program_id(0) // OUTS * BE + tl.arange(0, BE)
    count = M
    if COUNTED:
        count = tl.load(counts + b).to(tl.int32)
    size = (bg * 0 + M) * E
    x += bg * HEADS * size
    out += (bg * OUTS + j0) * size
    i, r = tl.arange(0, BM), tl.arange(0, RP)
    rate += g
    weight += g * J + j0
    table += g * J * BM * BM
    near = toeplitz(rate, weight, G, G * J, R, DIAGONAL, BM).to(OP)
    ones = tl.full((RP,), 1.0, tl.float32)
    a = tl.load(
        weight + r * G * J, mask=r < R, other=0.0
    )  # a_r of the program's one head; on the input side in the adjoint
    a_in, a_out = a if ADJOINT and HEADS == 1 else ones, ones if ADJOINT else a
    read = (powers(rate, i.to(tl.float32), G, R, RP) * a_out[None, :]).to(OP)
    write = tl.trans(powers(rate, (BM - i).to(tl.float32), G, R, RP)) * a_in[:, None]
    rate_r = tl.load(rate + r * G, mask=r < R, other=0.0)
    fade = tl.exp(-rate_r * BM)[:, None]
    state = tl.zeros((RP, BE), tl.float32)
    if INITIAL:
        at, there = state_pointers(first, b, g, G, R, E, e, RP)
        state = tl.load(at, mask=there, other=0.0).to(tl.float32)
    end = count
    if FINAL:  # the last tile is separate: its state is the one behind the last block
        end = tl.maximum(count - 1, 0) // BM * BM
    for pos0 in tl.range(0, end, BM, num_stages=STAGES):
        mixed, state = advance(
            x, size, near, table, weight, G * J, read, write, fade, state, pos0, count, E, e,
            R, HEADS, REVERSE, BM, RP, OP, PRECISION,
        )  # fmt: skip
        store_tile(out, mixed, pos0, count, E, e, REVERSE, ADD, BM)
    if FINAL:
        gone = tl.maximum(count - 1 - end, 0)
        write = tl.trans(powers(rate, tl.maximum(gone - i, 0).to(tl.float32), G, R, RP)) * a_in[:, None]
        mixed, state = advance(
            x, size, near, table, weight, G * J, read, write, tl.exp(-rate_r * gone)[:, None], state, end, count, E, e,
            R, HEADS, REVERSE, BM, RP, OP, PRECISION,
        )  # fmt: skip
        store_tile(out, mixed, end, count, E, e, REVERSE, ADD, BM)
        at, there = state_pointers(last, b, g, G, R, E, e, RP)
        tl.store(at, state, mask=there)


@triton.jit
def correlate(
    x, grad, later, write, fade, ahead, state, slope, pairs, sum_0, sum_1, pos0, count, E, e,
    REVERSE: tl.constexpr, BM: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (H, T) `ahead` blocks on (state, slope), and the products of dO with X (BM, BM), with H and with T (BM,
    RP).

    The products include one more tile; `parameter_grad_tiles` sums them.
    """
    tile = load_tile(x, pos0, count, E, e, REVERSE, BM, OP)
    wanted = load_tile(grad, pos0, count, E, e, REVERSE, BM, OP)
    pairs = tl.dot(wanted, tl.trans(tile), pairs, input_precision=PRECISION)
    sum_0 = tl.dot(wanted, tl.trans(state.to(OP)), sum_0, input_precision=PRECISION)
    sum_1 = tl.dot(wanted, tl.trans(slope.to(OP)), sum_1, input_precision=PRECISION)
    slope = tl.dot(later, tile, fade * (slope + ahead * state), input_precision=PRECISION)
    state = tl.dot(write, tile, fade * state, input_precision=PRECISION)
    return state, slope, pairs, sum_0, sum_1


@triton.jit(do_not_specialize=["M"])
def parameter_grad_tiles(
    x, grad, rate, weight, first, grad_last, sums, counts, G, M, E,
    R: tl.constexpr, J: tl.constexpr, REVERSE: tl.constexpr, DIAGONAL: tl.constexpr,
    INITIAL: tl.constexpr, FINAL: tl.constexpr, COUNTED: tl.constexpr,
    BM: tl.constexpr, BE: tl.constexpr, RP: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute sums (B, G, J, tiles of E, 2, RP), the partial gradients of a_r and lambda_r.

    Grid: (tiles of E * J, B * G).

        sums[0] = sum_n <dO_n, H_n>    sums[1] = -a_r sum_n <dO_n, T_n> - <dS_last, T_last>,    dO = grad_BGJME

    T = -dH / dlambda follows T_n+1 = e^-lambda (T_n + S_n), so that i blocks into a tile
    T_i = e^(-lambda i) (T_0 + i H_0) + sum_k<i (i - k) e^(-lambda (i - k)) X_k.
    """
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    j, part = tl.program_id(0) % J, tl.program_id(0) // J
    e = part * BE + tl.arange(0, BE)
    count = M
    if COUNTED:
        count = tl.load(counts + b).to(tl.int32)
    size = (bg * 0 + M) * E
    x += bg * size
    grad += (bg * J + j) * size
    rate += g
    i, r = tl.arange(0, BM), tl.arange(0, RP)
    rate_r = tl.load(rate + r * G, mask=r < R, other=0.0)
    left = (BM - i).to(tl.float32)
    write = tl.trans(powers(rate, left, G, R, RP))
    later = (write * left[None, :]).to(OP)
    write = write.to(OP)
    state = tl.zeros((RP, BE), tl.float32)
    if INITIAL:
        at, there = state_pointers(first, b, g, G, R, E, e, RP)
        state = tl.load(at, mask=there, other=0.0).to(tl.float32)
    slope = tl.zeros((RP, BE), tl.float32)
    pairs = tl.zeros((BM, BM), tl.float32)
    sum_0 = tl.zeros((BM, RP), tl.float32)
    sum_1 = tl.zeros((BM, RP), tl.float32)
    end = count
    if FINAL:
        end = tl.maximum(count - 1, 0) // BM * BM
    for pos0 in tl.range(0, end, BM, num_stages=STAGES):
        state, slope, pairs, sum_0, sum_1 = correlate(
            x, grad, later, write, tl.exp(-rate_r * BM)[:, None], BM, state, slope, pairs, sum_0, sum_1,
            pos0, count, E, e, REVERSE, BM, OP, PRECISION,
        )  # fmt: skip
    share = tl.zeros((RP,), tl.float32)
    if FINAL:
        gone = tl.maximum(count - 1 - end, 0)
        left = tl.maximum(gone - i, 0).to(tl.float32)
        write = tl.trans(powers(rate, left, G, R, RP))
        later = (write * left[None, :]).to(OP)
        state, slope, pairs, sum_0, sum_1 = correlate(
            x, grad, later, write.to(OP), tl.exp(-rate_r * gone)[:, None], gone, state, slope, pairs, sum_0, sum_1,
            end, count, E, e, REVERSE, BM, OP, PRECISION,
        )  # fmt: skip
        at, there = state_pointers(grad_last, b, g, G, R, E, e, RP)
        share = tl.sum(slope * tl.load(at, mask=there & (j == 0), other=0.0).to(tl.float32), 1)
    read = powers(rate, i.to(tl.float32), G, R, RP)
    sum_1 = tl.sum(read * (sum_1 + i.to(tl.float32)[:, None] * sum_0), 0)
    sum_0 = tl.sum(read * sum_0, 0)
    apart = i[:, None] - i[None, :]
    far = tl.maximum(apart, 0).to(tl.float32)
    pairs = tl.where(apart >= 0 if DIAGONAL else apart > 0, pairs, 0.0)
    for one in tl.static_range(R):
        term = pairs * tl.exp(-tl.load(rate + one * G) * far)
        sum_0 += tl.where(r == one, tl.sum(tl.sum(term, 1), 0), 0.0)
        sum_1 += tl.where(r == one, tl.sum(tl.sum(term * far, 1), 0), 0.0)
    sums += (((bg * J + j) * (tl.num_programs(0) // J) + part) * 2) * RP + r
    tl.store(sums, sum_0)
    tl.store(sums + RP, -sum_1 * tl.load(weight + (r * G + g) * J + j, mask=r < R, other=0.0) - share)
