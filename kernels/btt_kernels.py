"""Launches made of btt_products.py: both products at once, and the backward in two.

`ring_kernel` does both products. Its programs are ordered by slabs of tokens, the second product of a slab `lag`
slabs behind the first; z is a ring of `ring` slabs, so it stays in the L2 cache and device memory sees x once and y
once. A program waits only for programs of lower index, which are started first, so the waiting ends.

Backward: `spreads_kernel` computes z and dz, `rest_kernel` the gradients of both cores and of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.btt_products import _gather, _pair, _signal, _spread


@triton.jit(do_not_specialize=["N", "tiles", "slabs", "lag", "ring"])
def ring_kernel(
    x, right, left, bias, y, z, flags, x_n, x_i, y_n, y_o, N, IN, OUT, D, A, S, J, K, C, B,
    r_g, r_d, r_j, l_g, l_k, l_a, tiles_j, tiles_a, slabs, lag, ring, tiles,
    BN: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BA: tl.constexpr, D_ONCE: tl.constexpr,
    K_ONCE: tl.constexpr, EVEN_1: tl.constexpr, EVEN_2: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (slabs + lag) * (C * tiles_j + B * tiles_a). flags: two a slab, of spreads and of gathers done; zeros, and
    zeros again at the end."""
    spreads, gathers = C * tiles_j, B * tiles_a
    step, work = tl.program_id(0) // (spreads + gathers), tl.program_id(0) % (spreads + gathers)
    # Alternating while both last: reading x and writing z goes beside reading z and writing y.
    both = 2 * tl.minimum(spreads, gathers)
    is_spread = tl.where(work < both, work % 2 == 0, spreads > gathers)
    item = tl.where(work < both, work // 2, work - both // 2)
    slab = tl.where(is_spread, step, step - lag)
    if slab >= 0 and slab < slabs:
        first = slab * tiles
        count = tl.minimum(tiles, tl.cdiv(N, BN) - first)
        z += (slab % ring).to(tl.int64) * tiles * (J * C) * BN
        gathered = flags + slabs + slab
        if is_spread:
            # Its place in the ring is free once the slab that was there has been gathered.
            needed = tl.where(slab >= ring, gathers, 0)
            _spread(x, right, z, item // tiles_j, item % tiles_j, first, count, N, IN, D, J, S, C, x_n, x_i, r_g, r_d, r_j,
                    BN, BJ, BD, D_ONCE, EVEN_1, PRECISION, "evict_first",
                    flags + slabs + tl.maximum(slab - ring, 0), needed)  # fmt: skip
            _signal(flags + slab)
        else:
            _gather(z, left, bias, y, item // tiles_a, item % tiles_a, first, count, N, OUT, A, K, B, l_g, l_k, l_a, y_n, y_o,
                    BN, BK, BA, K_ONCE, EVEN_2, BIAS, PRECISION, "evict_first", flags + slab, spreads)  # fmt: skip
            if _signal(gathered) == gathers - 1:  # the slab's last: nobody waits for these any more
                tl.store(flags + slab, 0)
                if slab >= ring:
                    tl.store(gathered - ring, 0)
                if slab + ring >= slabs:
                    tl.store(gathered, 0)


@triton.jit(do_not_specialize=["N", "tiles", "slabs"])
def spreads_kernel(
    x, right, z, dy, left, dz, x_n, x_i, dy_n, dy_o, N, IN, OUT, D, A, S, C, B, slabs, tiles,
    BN: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BA: tl.constexpr, D_ONCE: tl.constexpr,
    A_ONCE: tl.constexpr, EVEN_1: tl.constexpr, EVEN_2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: slabs * (C * tiles of J + B * tiles of K)."""
    J, K = B * S, C * S
    tiles_j, tiles_k = tl.cdiv(J, BJ), tl.cdiv(K, BK)
    of_z = C * tiles_j
    slab, item = tl.program_id(0) // (of_z + B * tiles_k), tl.program_id(0) % (of_z + B * tiles_k)
    first = slab * tiles
    count = tl.minimum(tiles, tl.cdiv(N, BN) - first)
    ahead = first.to(tl.int64) * (J * C) * BN
    if item < of_z:
        _spread(x, right, z + ahead, item // tiles_j, item % tiles_j, first, count, N, IN, D, J, S, C, x_n, x_i,
                D * J, J, 1, BN, BJ, BD, D_ONCE, EVEN_1, PRECISION, "", z, 0)  # fmt: skip
    else:
        item -= of_z
        _spread(dy, left, dz + ahead, item // tiles_k, item % tiles_k, first, count, N, OUT, A, K, S, B, dy_n, dy_o,
                K * A, 1, A, BN, BK, BA, A_ONCE, EVEN_2, PRECISION, "", z, 0)  # fmt: skip


@triton.jit(do_not_specialize=["N", "tiles", "slabs", "left_tiles", "right_tiles"])
def rest_kernel(
    z, dy, dz, x, right, dleft, dright, dx, x_n, x_i, dy_n, dy_o, dx_n, dx_i, N, IN, OUT, D, A, S, C, B, slabs, tiles,
    left_parts, left_tiles, right_parts, right_tiles,
    BN: tl.constexpr, BKL: tl.constexpr, BAL: tl.constexpr, BKR: tl.constexpr, BAR: tl.constexpr, BJ: tl.constexpr,
    BD: tl.constexpr, J_ONCE: tl.constexpr, EVEN_L: tl.constexpr, EVEN_R: tl.constexpr, EVEN_X: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: the programs of dleft, of dright, and of dx (or none of these)."""
    J, K = B * S, C * S
    tiles_k, tiles_a, tiles_j, tiles_d = tl.cdiv(K, BKL), tl.cdiv(A, BAL), tl.cdiv(J, BKR), tl.cdiv(D, BAR)
    of_left, of_right = B * tiles_k * tiles_a * left_parts, C * tiles_j * tiles_d * right_parts
    item, every = tl.program_id(0), tl.cdiv(N, BN)
    if item < of_left:
        part, item = item % left_parts, item // left_parts
        group, tile_k, tile_a = item // (tiles_k * tiles_a), item // tiles_a % tiles_k, item % tiles_a
        first = part * left_tiles
        _pair(z, dy, dleft + part.to(tl.int64) * (B * K * A), group, tile_k, tile_a, first,
              tl.minimum(left_tiles, every - first), N, OUT, A, K, B, dy_n, dy_o, K * A, A, 1,
              BN, BKL, BAL, EVEN_L, PRECISION)  # fmt: skip
    elif item < of_left + of_right:
        item -= of_left
        part, item = item % right_parts, item // right_parts
        group, tile_k, tile_a = item // (tiles_j * tiles_d), item // tiles_d % tiles_j, item % tiles_d
        first = part * right_tiles
        _pair(dz, x, dright + part.to(tl.int64) * (C * D * J), group, tile_k, tile_a, first,
              tl.minimum(right_tiles, every - first), N, IN, D, J, C, x_n, x_i, D * J, 1, J,
              BN, BKR, BAR, EVEN_R, PRECISION)  # fmt: skip
    else:
        item -= of_left + of_right
        across = tl.cdiv(D, BD)
        slab, item = item // (C * across), item % (C * across)
        first = slab * tiles
        _gather(dz + first.to(tl.int64) * (J * C) * BN, right, z, dx, item // across, item % across, first,
                tl.minimum(tiles, every - first), N, IN, D, J, C, D * J, 1, J, dx_n, dx_i,
                BN, BJ, BD, J_ONCE, EVEN_X, False, PRECISION, "", z, 0)  # fmt: skip
