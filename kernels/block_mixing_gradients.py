"""Gradients of keys and values together, where their tiles fit side by side: what `read_blocks` gives in two passes.

    dv_s = sum_j w_n sum_t (k_s . q_jt) do_jt + k_s dX_n     dk_s = sum_j w_n sum_t (v_s . do_jt) q_jt + v_s dX_n^T

t of s's block, t >= s; j the query heads of a group. q, do, k, v and dX are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.block_mixing_tokens import load_last, load_tokens


@triton.jit(do_not_specialize=["T", "N"])
def read_back(
    q, k, v, do, sums, weight, dk, dv, start, T, N, G,
    q_b, q_g, q_j, q_t, k_b, k_g, k_t, v_b, v_g, v_t, o_b, o_g, o_j, o_t, w_g, w_j, w_n,
    F: tl.constexpr, V: tl.constexpr, J: tl.constexpr, INNER: tl.constexpr, MORE: tl.constexpr,
    BLOCK: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, OP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk (B, G, T, F), dv (B, G, T, V (+ 1)); sums: dX (B, G, N, F V (+ F)). A program: BT tokens of a block."""
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
                wanted = load_tokens(do + (b * 0 + j) * o_j, t, o_t, there, c, V, OP)
                scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
                scores = tl.where(seen, scores * w, 0.0)
                values_grad = tl.dot(scores.to(OP), wanted, values_grad, input_precision=PRECISION)
                asked = tl.dot(values, tl.trans(wanted), input_precision=PRECISION)
                if MORE:
                    wanted_last = load_last(do + (b * 0 + j) * o_j, t, o_t, there, V)
                    last += tl.sum(scores * wanted_last[None, :], 1)
                    asked += v_last[:, None] * wanted_last[None, :]
                asked = tl.where(seen, asked * w, 0.0)
                keys_grad = tl.dot(asked.to(OP), queries, keys_grad, input_precision=PRECISION)
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
