"""Kernels between tokens and blocks: sums over blocks, and what tokens read of mixed sums and of their own block.

    sum_blocks    X_n = sum of x_t y_t^T over the tokens of block n
    read_blocks   o_t = w_n sum_s (x_t . y_s) z_s + x_t M_n, over s of t's block, s <= t

read_blocks is linear attention and its gradients: (x, y, z, M) = (q, k, v, M) gives o and (do, v, k, M^T) gives dq.
With s >= t and summed over the query heads, (k, q, do, dX) gives dv and (v, do, q, dX^T) gives dk. Where their tiles
fit side by side, read_blocks_backward computes dv and dk together and reads q, do, k, v and dX once:

    dv_s = sum_j w_n sum_t (k_s . q_jt) do_jt + k_s dX_n     dk_s = sum_j w_n sum_t (v_s . do_jt) q_jt + v_s dX_n^T

over t of s's block, t >= s, and the query heads j of a group.

Blocks begin where positions start_b + t are multiples of BLOCK. If V = 16 n + 1 (a normaliser's column of ones beside
the values), the last column is computed by sums instead of products (MORE); a matrix X_n is then F x (V - 1) elements,
followed by F of the last column. F: features, V: values, J: query heads of a group; BT, BF, BV: tiles; OP: the dtype of
products' operands. Arguments x_b, x_g, x_j, x_t are strides of rows, groups, heads and tokens. They stay scalars:
Triton 3.2, the oldest one supported, has no tuples.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tokens(x, t, stride, keep, c, C, OP: tl.constexpr):
    """Return x[t, c], with zeros where t is not kept and from C on."""
    return tl.load(x + t[:, None] * stride + c[None, :], mask=keep[:, None] & (c < C)[None, :], other=0.0).to(OP)


@triton.jit
def load_last(x, t, stride, keep, C):
    """Return the last column, x[t, C], in float32."""
    return tl.load(x + t * stride + C, mask=keep, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "N"])
def sum_blocks(
    x, y, out, start, T, N, G, J, x_b, x_g, x_j, x_t, y_b, y_g, y_j, y_t,
    F: tl.constexpr, V: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
    BV: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out (B, G, J, N, F V (+ F)) of x_BGJTF, y_BGJTV(+ 1). Grid: (N * tiles of F * tiles of V, B * G * J)."""
    f_tiles, v_tiles = tl.cdiv(F, BF), tl.cdiv(V, BV)
    n = tl.program_id(0) // (f_tiles * v_tiles)
    f = tl.program_id(0) // v_tiles % f_tiles * BF + tl.arange(0, BF)
    v_tile = tl.program_id(0) % v_tiles
    v = v_tile * BV + tl.arange(0, BV)
    head = tl.program_id(1).to(tl.int64)
    b, g, j = head // (G * J), head // J % G, head % J
    t0 = n * BLOCK - (tl.load(start + b) % BLOCK).to(tl.int32)
    x += b * x_b + g * x_g + j * x_j + (b * 0 + t0) * x_t
    y += b * y_b + g * y_g + j * y_j + (b * 0 + t0) * y_t
    i = tl.arange(0, BT)
    total = tl.zeros((BF, BV), tl.float32)
    more = tl.zeros((BF,), tl.float32)
    for s in range(0, BLOCK, BT):
        keep = (t0 + s + i >= 0) & (t0 + s + i < T) & (s + i < BLOCK)
        tile = load_tokens(x, s + i, x_t, keep, f, F, OP)
        total = tl.dot(tl.trans(tile), load_tokens(y, s + i, y_t, keep, v, V, OP), total, input_precision=PRECISION)
        if MORE:
            more += tl.sum(tile.to(tl.float32) * load_last(y, s + i, y_t, keep, V)[:, None], 0)
    out += (head * N + n) * F * (V + 1 if MORE else V)
    inside = (f < F)[:, None] & (v < V)[None, :]
    tl.store(out + f[:, None] * V + v[None, :], total.to(out.dtype.element_ty), mask=inside)
    if MORE:  # noqa: SIM102
        if v_tile == 0:
            tl.store(out + F * V + f, more.to(out.dtype.element_ty), mask=f < F)


@triton.jit(do_not_specialize=["T", "N"])
def read_blocks(
    x, y, z, mixed, weight, out, compared, shares, start, T, N, G,
    x_b, x_g, x_j, x_t, y_b, y_g, y_j, y_t, z_b, z_g, z_j, z_t, m_f, m_v, w_g, w_j, w_n, c_b, c_g, c_j, c_t,
    F: tl.constexpr, V: tl.constexpr, J: tl.constexpr, BACK: tl.constexpr, INNER: tl.constexpr, MIXED: tl.constexpr, SHARES: tl.constexpr,
    MORE_F: tl.constexpr, MORE_V: tl.constexpr, BLOCK: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr,
    BV: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out (B, G, H, T, V (+ 1)) of x with F (+ 1) features.

    Grid: (N * tiles of a block * tiles of V, B * G * H).

    BACK: s >= t, H = 1 and a sum over the J heads of y and z; else H = J, and y and z have one head. INNER: with the
    own block, weighted by w_n; MIXED: with M_n. MORE_F, MORE_V: x or the output has a last column. SHARES: store the
    sum over the tile of <compared_t, unweighted part of the own block>.
    """
    H: tl.constexpr = 1 if BACK else J
    SUMMED: tl.constexpr = J if BACK else 1
    TILES: tl.constexpr = (BLOCK + BT - 1) // BT
    v_tiles = tl.cdiv(V, BV)
    v_tile, tile = tl.program_id(0) % v_tiles, tl.program_id(0) // v_tiles % TILES
    n = tl.program_id(0) // (v_tiles * TILES)
    v = v_tile * BV + tl.arange(0, BV)
    head = tl.program_id(1).to(tl.int64)
    b, g, h = head // (G * H), head // H % G, head % H
    t0 = n * BLOCK - (tl.load(start + b) % BLOCK).to(tl.int32)
    if (t0 + tile * BT >= T) | (t0 + tile * BT + BT <= 0):
        return
    x += b * x_b + g * x_g + h * x_j + (b * 0 + t0) * x_t
    y += b * y_b + g * y_g + (b * 0 + t0) * y_t
    z += b * z_b + g * z_g + (b * 0 + t0) * z_t
    weight += g * w_g + h * w_j + (b * 0 + n) * w_n
    i = tl.arange(0, BT)
    t = tile * BT + i
    here = (t0 + t >= 0) & (t0 + t < T) & (t < BLOCK)
    total = tl.zeros((BT, BV), tl.float32)
    last = tl.zeros((BT,), tl.float32)
    x_last = tl.zeros((BT,), tl.float32)
    if MORE_F:
        x_last = load_last(x, t, x_t, here, F)
    if INNER:
        for j in range(SUMMED):
            w = tl.load(weight + (b * 0 + j) * w_j)
            for s0 in range(tile * BT if BACK else 0, BLOCK if BACK else tile * BT + BT, BT):
                s = s0 + i
                there = (t0 + s >= 0) & (t0 + s < T) & (s < BLOCK)
                scores = tl.zeros((BT, BT), tl.float32)
                for f0 in tl.static_range(0, F, BF):
                    f = f0 + tl.arange(0, BF)
                    left = load_tokens(x, t, x_t, here, f, F, OP)
                    right = load_tokens(y + (b * 0 + j) * y_j, s, y_t, there, f, F, OP)
                    scores = tl.dot(left, tl.trans(right), scores, input_precision=PRECISION)
                if MORE_F:
                    scores += x_last[:, None] * load_last(y + (b * 0 + j) * y_j, s, y_t, there, F)[None, :]
                seen = s[None, :] >= t[:, None] if BACK else s[None, :] <= t[:, None]
                scores = tl.where(seen, scores, 0.0)
                if BACK:
                    scores *= w
                values = load_tokens(z + (b * 0 + j) * z_j, s, z_t, there, v, V, OP)
                total = tl.dot(scores.to(OP), values, total, input_precision=PRECISION)
                if MORE_V:
                    last += tl.sum(scores * load_last(z + (b * 0 + j) * z_j, s, z_t, there, V)[None, :], 1)
        if SHARES:
            compared += b * c_b + g * c_g + h * c_j + (b * 0 + t0) * c_t
            share = tl.sum(total * load_tokens(compared, t, c_t, here, v, V, tl.float32), 1)
            tl.store(shares + ((head * N + n) * TILES + tile) * v_tiles + v_tile, tl.sum(share, 0))
        if not BACK:
            w = tl.load(weight)
            total *= w
            last *= w
    if MIXED:
        mixed += (head * N + n) * (F * V + (V if MORE_F else (F if MORE_V else 0)))
        for f0 in tl.static_range(0, F, BF):
            f = f0 + tl.arange(0, BF)
            left = load_tokens(x, t, x_t, here, f, F, OP)
            inside = (f < F)[:, None] & (v < V)[None, :]
            right = tl.load(mixed + f[:, None] * m_f + v[None, :] * m_v, mask=inside, other=0.0).to(OP)
            total = tl.dot(left, right, total, input_precision=PRECISION)
            if MORE_V:
                column = tl.load(mixed + F * V + f, mask=f < F, other=0.0).to(tl.float32)
                last += tl.sum(left.to(tl.float32) * column[None, :], 1)
        if MORE_F:
            total += x_last[:, None] * tl.load(mixed + F * V + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
    out += (head * T + t0) * (V + 1 if MORE_V else V)
    at = out + t[:, None] * (V + 1 if MORE_V else V) + v[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=here[:, None] & (v < V)[None, :])
    if MORE_V:  # noqa: SIM102
        if v_tile == 0:
            tl.store(out + t * (V + 1) + V, last.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["T", "N"])
def read_blocks_backward(
    q, k, v, do, sums, weight, dk, dv, start, T, N, G,
    q_b, q_g, q_j, q_t, k_b, k_g, k_t, v_b, v_g, v_t, o_b, o_g, o_j, o_t, w_g, w_j, w_n,
    F: tl.constexpr, V: tl.constexpr, J: tl.constexpr, INNER: tl.constexpr, MORE: tl.constexpr,
    BLOCK: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, OP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk (B, G, T, F) and dv (B, G, T, V (+ 1)).

    Grid: (N * tiles of a block, B * G). sums: dX (B, G, N, F V (+ F)). INNER: with the own block; MORE: with a last
    column.
    """
    TILES: tl.constexpr = (BLOCK + BT - 1) // BT
    tile, n = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    bg = tl.program_id(1).to(tl.int64)
    b, g = bg // G, bg % G
    t0 = n * BLOCK - (tl.load(start + b) % BLOCK).to(tl.int32)
    if (t0 + tile * BT >= T) | (t0 + tile * BT + BT <= 0):
        return
    first = b * 0 + t0
    q += b * q_b + g * q_g + first * q_t
    do += b * o_b + g * o_g + first * o_t
    k += b * k_b + g * k_g + first * k_t
    v += b * v_b + g * v_g + first * v_t
    weight += g * w_g + (b * 0 + n) * w_n
    sums += (bg * N + n) * F * (V + 1 if MORE else V)
    i, f, c = tl.arange(0, BT), tl.arange(0, BF), tl.arange(0, BV)
    s = tile * BT + i
    here = (t0 + s >= 0) & (t0 + s < T) & (s < BLOCK)
    keys, values = load_tokens(k, s, k_t, here, f, F, OP), load_tokens(v, s, v_t, here, c, V, OP)
    keys_grad = tl.zeros((BT, BF), tl.float32)
    values_grad = tl.zeros((BT, BV), tl.float32)
    last = tl.zeros((BT,), tl.float32)
    v_last = tl.zeros((BT,), tl.float32)
    if MORE:
        v_last = load_last(v, s, v_t, here, V)
    if INNER:
        for j in range(J):
            w = tl.load(weight + (b * 0 + j) * w_j)
            for later in range(tile * BT, BLOCK, BT):
                t = later + i
                there = (t0 + t >= 0) & (t0 + t < T) & (t < BLOCK)
                seen = t[None, :] >= s[:, None]
                queries = load_tokens(q + (b * 0 + j) * q_j, t, q_t, there, f, F, OP)
                dout = load_tokens(do + (b * 0 + j) * o_j, t, o_t, there, c, V, OP)
                scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
                scores = tl.where(seen, scores * w, 0.0)
                values_grad = tl.dot(scores.to(OP), dout, values_grad, input_precision=PRECISION)
                dscores = tl.dot(values, tl.trans(dout), input_precision=PRECISION)
                if MORE:
                    dout_last = load_last(do + (b * 0 + j) * o_j, t, o_t, there, V)
                    last += tl.sum(scores * dout_last[None, :], 1)
                    dscores += v_last[:, None] * dout_last[None, :]
                dscores = tl.where(seen, dscores * w, 0.0)
                keys_grad = tl.dot(dscores.to(OP), queries, keys_grad, input_precision=PRECISION)
    inside = (f < F)[:, None] & (c < V)[None, :]
    mixed = tl.load(sums + f[:, None] * V + c[None, :], mask=inside, other=0.0).to(OP)
    values_grad = tl.dot(keys, mixed, values_grad, input_precision=PRECISION)
    keys_grad = tl.dot(values, tl.trans(mixed), keys_grad, input_precision=PRECISION)
    width = V + 1 if MORE else V
    if MORE:
        column = tl.load(sums + F * V + f, mask=f < F, other=0.0).to(tl.float32)
        last += tl.sum(keys.to(tl.float32) * column[None, :], 1)
        keys_grad += v_last[:, None] * column[None, :]
        tl.store(dv + (bg * T + t0 + s) * width + V, last.to(dv.dtype.element_ty), mask=here)
    dk += (bg * T + t0) * F
    dv += (bg * T + t0) * width
    tl.store(dk + s[:, None] * F + f[None, :], keys_grad.to(dk.dtype.element_ty), mask=here[:, None] & (f < F)[None, :])
    tl.store(
        dv + s[:, None] * width + c[None, :], values_grad.to(dv.dtype.element_ty), mask=here[:, None] & (c < V)[None, :]
    )
