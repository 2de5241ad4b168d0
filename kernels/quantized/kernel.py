"""A few vectors times matrices of integers with scales: integers are unpacked inside the product.

    out[n, g, r] = sum_k x[n, g, k] w[g, r, k]        w[g, r, k] = scale[g, r, k // GROUP] * integer[g, r, k]

w is rounded to the dtype of the scales, as the reference rounds it (surgery/structures/quantized.py), so that only the
order of the sum differs. Reading the integers takes the time: of 8 bits half of the bytes of bfloat16, of 4 bits a
quarter, and scales.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expand_scales(scale, r_R, first, R, GROUPS, BR: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return the scales of columns first .. first + COLUMNS of rows r, (BR, COLUMNS / GROUP, 1). GROUP 0: one scale for
    each row."""
    if GROUP == 0:
        s_RS = tl.load(scale + r_R * GROUPS, mask=r_R < R, other=0.0)[:, None]
    else:
        at_S = first // GROUP + tl.arange(0, COLUMNS // GROUP)
        inside = (r_R < R)[:, None] & (at_S < GROUPS)[None, :]
        s_RS = tl.load(scale + r_R[:, None] * GROUPS + at_S[None, :], mask=inside, other=0.0)
    return s_RS[:, :, None]


@triton.jit
def scale_integers(q_RX, s_RS1, BR: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr):
    """Return scale * integer (BR, WIDTH) in the dtype of the scales. SHARED: integers of a row under one scale."""
    q_RSX = tl.reshape(q_RX.to(tl.float32), (BR, WIDTH // SHARED, SHARED))
    return tl.reshape((q_RSX * s_RS1.to(tl.float32)).to(s_RS1.dtype), (BR, WIDTH))


@triton.jit
def partial_products(w_RX, x, n_N, column_X, N, K, x_n, x_k, SINGLE: tl.constexpr, P: tl.constexpr):
    """Return sum_k x[n, k] w[r, k] over the given columns: (1, BR) if SINGLE, else (BN, BR)."""
    if SINGLE:
        x_X = tl.load(x + column_X * x_k, mask=column_X < K, other=0.0).to(tl.float32)
        sum_NR = tl.sum(w_RX.to(tl.float32) * x_X[None, :], 1)[None, :]
    else:
        inside = (n_N < N)[:, None] & (column_X < K)[None, :]
        x_NX = tl.load(x + n_N[:, None] * x_n + column_X[None, :] * x_k, mask=inside, other=0.0)
        sum_NR = tl.dot(x_NX, tl.trans(w_RX), input_precision=P)
    return sum_NR


@triton.jit(do_not_specialize=["N"])
def quantized_matvec_kernel(
    x, integers, scale, out, N, K, R, WIDTH, GROUPS, x_n, x_g, x_k, tiles, G,
    BITS: tl.constexpr, GROUP: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Store out (N, G, R). Grid: (G * tiles,): BR rows of one matrix; at most BN vectors, 1 or 16.

    integers (G, R, WIDTH): int8, or uint8 with columns 2 i and 2 i + 1 in the low and the high bits of byte i, 8 added.
    scale (G, R, GROUPS). GROUP: columns that share a scale, 0 for all of a row.
    """
    g, r_R = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * BR + tl.arange(0, BR)
    n_N = tl.arange(0, BN)
    x += g * x_g
    integers += g * R * WIDTH
    scale += g * R * GROUPS
    PER_BYTE: tl.constexpr = 8 // BITS
    BYTES: tl.constexpr = BK // PER_BYTE
    SHARED: tl.constexpr = BYTES if GROUP == 0 else GROUP // PER_BYTE
    sum_NR = tl.zeros([BN, BR], tl.float32)
    byte_X = tl.arange(0, BYTES)
    rows_R1 = r_R[:, None].to(tl.int64) * WIDTH
    for first in range(0, K, BK):
        at_X = first // PER_BYTE + byte_X
        inside = (r_R < R)[:, None] & (at_X < WIDTH)[None, :]
        q_RX = tl.load(integers + rows_R1 + at_X[None, :], mask=inside, other=0)
        s_RS1 = expand_scales(scale, r_R, first, R, GROUPS, BR, BK, GROUP)
        if BITS == 8:
            w_RX = scale_integers(q_RX, s_RS1, BR, BYTES, SHARED)
            sum_NR += partial_products(w_RX, x, n_N, at_X, N, K, x_n, x_k, BN == 1, P)
        else:
            low_RX = scale_integers((q_RX & 15).to(tl.int8) - 8, s_RS1, BR, BYTES, SHARED)
            high_RX = scale_integers((q_RX >> 4).to(tl.int8) - 8, s_RS1, BR, BYTES, SHARED)
            sum_NR += partial_products(low_RX, x, n_N, 2 * at_X, N, K, x_n, x_k, BN == 1, P)
            sum_NR += partial_products(high_RX, x, n_N, 2 * at_X + 1, N, K, x_n, x_k, BN == 1, P)
    inside = (n_N < N)[:, None] & (r_R < R)[None, :]
    at = out + (n_N[:, None].to(tl.int64) * G + g) * R + r_R[None, :]
    tl.store(at, sum_NR.to(out.dtype.element_ty), mask=inside)
