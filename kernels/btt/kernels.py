"""Launches made of kernels/btt/kernels.py: both products at once, and the backward in two.

`ring_kernel` does both products. Its programs are ordered by slabs of tokens, the second product of a slab `lag`
slabs behind the first; z is a ring of `ring` slabs, so it stays in the L2 cache and device memory sees x once and y
once. A program waits only for programs of lower index, which are started first, so the waiting ends.

Backward: `spreads_kernel` computes z and dz, `gradients_kernel` the gradients of both cores and of x.

The two products of BTT and the gradients of its cores, a tile each; kernels/btt/kernels.py makes launches of them.

    spread   z[b, c, s, n] = sum_d x[n, c, d] right[c, d, b, s]        a group: one c, its rows j = (b, s)
    gather   y[n, b, a]    = sum_cs z[b, c, s, n] left[b, c, s, a]     a group: one b, its terms k = (c, s)
    pair     g[k, a]       = sum_n z[b, k, n] y[n, b, a]               a group: one b; gradient of left

Between them z lies transposed, tokens last: spread writes and gather reads whole lines, so neither permutation
costs anything. z is kept in tiles of BN tokens: z[tile][row][BN], row = (b, c, s).

The transposed map has the same form with the cores exchanged, b <-> c and a <-> d: dz and dx are spread and gather,
and the gradient of right is a pair.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
            _set_flag(flags + slab)
        else:
            _gather(z, left, bias, y, item // tiles_a, item % tiles_a, first, count, N, OUT, A, K, B, l_g, l_k, l_a, y_n, y_o,
                    BN, BK, BA, K_ONCE, EVEN_2, BIAS, PRECISION, "evict_first", flags + slab, spreads)  # fmt: skip
            if _set_flag(gathered) == gathers - 1:  # the slab's last: nobody waits for these any more
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
def gradients_kernel(
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
        _core_gradient(z, dy, dleft + part.to(tl.int64) * (B * K * A), group, tile_k, tile_a, first,
              tl.minimum(left_tiles, every - first), N, OUT, A, K, B, dy_n, dy_o, K * A, A, 1,
              BN, BKL, BAL, EVEN_L, PRECISION)  # fmt: skip
    elif item < of_left + of_right:
        item -= of_left
        part, item = item % right_parts, item // right_parts
        group, tile_k, tile_a = item // (tiles_j * tiles_d), item // tiles_d % tiles_j, item % tiles_d
        first = part * right_tiles
        _core_gradient(dz, x, dright + part.to(tl.int64) * (C * D * J), group, tile_k, tile_a, first,
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


@triton.jit
def _wait_flag(flag, needed):
    if needed > 0:
        while tl.atomic_add(flag, 0, sem="acquire") < needed:
            pass


@triton.jit
def _set_flag(flag):
    tl.debug_barrier()  # every thread's reads and writes come before
    return tl.atomic_add(flag, 1, sem="release")


@triton.jit
def _spread(
    x, right, z, group, tile_j, first, count, N, IN, D, J, S, groups, x_n, x_i, r_g, r_d, r_j,
    BN: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr, D_ONCE: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, ONCE: tl.constexpr, flag, needed,
):  # fmt: skip
    """`count` tiles from `first` on, of x (N, IN); z begins at the first of them."""
    j = tile_j * BJ + tl.arange(0, BJ)
    d = tl.arange(0, BD)
    n = tl.arange(0, BN)
    rows = J * groups
    row = (j // S) * (groups * S) + group * S + j % S
    x += first.to(tl.int64) * BN * x_n + group * D * x_i
    right += group * r_g
    left_n = N - first * BN  # tokens from here on
    left_i = IN - group * D
    if D_ONCE:
        r_dj = _load_core(right + d[:, None] * r_d + j[None, :] * r_j, (d[:, None] < D) & (j[None, :] < J), EVEN)
    _wait_flag(flag, needed)  # with the core on its way
    z_nj = tl.zeros([BN, BJ], tl.float32)
    steps = 1 if D_ONCE else tl.cdiv(D, BD)
    for i in tl.range(0, count * steps):  # tokens and d in one loop: loads run ahead across the tiles
        t, k = i // steps, i % steps * BD
        inside_n = n[:, None] < left_n - t * BN
        inside = inside_n & (d[None, :] < D - k) & (d[None, :] < left_i - k)
        x_t = x + tl.cast(t, tl.int64) * BN * x_n
        x_nd = _load_rows(x_t + n[:, None] * x_n + (k + d)[None, :] * x_i, inside, inside_n, EVEN, ONCE)
        if not D_ONCE:
            inside_dj = (d[:, None] < D - k) & (j[None, :] < J)
            r_dj = _load_core(right + (k + d)[:, None] * r_d + j[None, :] * r_j, inside_dj, EVEN)
        at = z + t * rows.to(tl.int64) * BN + row[:, None] * BN + n[None, :]
        if D_ONCE:
            _store_z(at, tl.trans(tl.dot(x_nd, r_dj, input_precision=PRECISION)), j, J, z, EVEN)
        else:
            z_nj = tl.dot(x_nd, r_dj, z_nj, input_precision=PRECISION)
            if k + BD >= D:
                _store_z(at, tl.trans(z_nj), j, J, z, EVEN)
                z_nj = tl.zeros([BN, BJ], tl.float32)


@triton.jit
def _store_z(at, z_jn, j, J, z, EVEN: tl.constexpr):
    if EVEN:
        tl.store(at, z_jn.to(z.dtype.element_ty))
    else:
        tl.store(at, z_jn.to(z.dtype.element_ty), mask=j[:, None] < J)


@triton.jit
def _gather(
    z, left, bias, y, group, tile_a, first, count, N, OUT, A, K, groups, l_g, l_k, l_a, y_n, y_o,
    BN: tl.constexpr, BK: tl.constexpr, BA: tl.constexpr, K_ONCE: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, ONCE: tl.constexpr, flag, needed,
):  # fmt: skip
    """`count` tiles from `first` on, of y (N, OUT); z begins at the first of them."""
    a = tile_a * BA + tl.arange(0, BA)
    k = tl.arange(0, BK)
    n = tl.arange(0, BN)
    rows = K * groups
    z += group * K * BN
    y += first.to(tl.int64) * BN * y_n + group * A * y_o
    left += group * l_g
    left_n = N - first * BN
    inside_a = (a < A) & (a < OUT - group * A)
    if BIAS:
        b_a = tl.load(bias + group * A + a, mask=inside_a, other=0.0).to(tl.float32)
    if K_ONCE:
        l_ka = _load_core(left + k[:, None] * l_k + a[None, :] * l_a, (k[:, None] < K) & (a[None, :] < A), EVEN)
    _wait_flag(flag, needed)
    y_na = tl.zeros([BN, BA], tl.float32)
    steps = 1 if K_ONCE else tl.cdiv(K, BK)
    for i in tl.range(0, count * steps):
        t, first_k = i // steps, i % steps * BK
        z_kn = _load_uncached(
            z + t * rows.to(tl.int64) * BN + (first_k + k)[:, None] * BN + n[None, :], k[:, None] < K - first_k, EVEN
        )
        if not K_ONCE:
            inside_ka = (k[:, None] < K - first_k) & (a[None, :] < A)
            l_ka = _load_core(left + (first_k + k)[:, None] * l_k + a[None, :] * l_a, inside_ka, EVEN)
        at = y + tl.cast(t, tl.int64) * BN * y_n + n[:, None] * y_n + a[None, :] * y_o
        inside_n = n[:, None] < left_n - t * BN
        if K_ONCE:
            y_na = tl.dot(tl.trans(z_kn), l_ka, input_precision=PRECISION)
            if BIAS:
                y_na += b_a[None, :]
            _store_y(at, y_na, inside_n, inside_a, y, EVEN, ONCE)
        else:
            y_na = tl.dot(tl.trans(z_kn), l_ka, y_na, input_precision=PRECISION)
            if first_k + BK >= K:
                if BIAS:
                    y_na += b_a[None, :]
                _store_y(at, y_na, inside_n, inside_a, y, EVEN, ONCE)
                y_na = tl.zeros([BN, BA], tl.float32)


@triton.jit
def _store_y(at, y_na, inside_n, inside_a, y, EVEN: tl.constexpr, ONCE: tl.constexpr):
    if not EVEN:
        inside_n = inside_n & inside_a[None, :]
    tl.store(at, y_na.to(y.dtype.element_ty), mask=inside_n, eviction_policy=ONCE)


@triton.jit
def _load_core(at, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _load_rows(at, inside, inside_n, EVEN: tl.constexpr, ONCE: tl.constexpr):
    if EVEN:
        return tl.load(at, mask=inside_n, other=0.0, eviction_policy=ONCE)
    else:
        return tl.load(at, mask=inside, other=0.0, eviction_policy=ONCE)


@triton.jit
def _load_uncached(at, inside, EVEN: tl.constexpr):
    """Past the L1 cache: other programs of the same launch wrote it."""
    if EVEN:
        return tl.load(at, cache_modifier=".cg")
    else:
        return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _core_gradient(
    z, y, g, group, tile_k, tile_a, first, count, N, OUT, A, K, groups, y_n, y_o, g_g, g_k, g_a,
    BN: tl.constexpr, BK: tl.constexpr, BA: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums `count` tiles from `first` on; z and y begin at the first token of all."""
    k = tile_k * BK + tl.arange(0, BK)
    a = tile_a * BA + tl.arange(0, BA)
    n = tl.arange(0, BN)
    rows = (K * groups).to(tl.int64)
    z += first * rows * BN + group * K * BN
    y += first.to(tl.int64) * BN * y_n + group * A * y_o
    left_n = N - first * BN
    inside_a = (a < A) & (a < OUT - group * A)
    g_ka = tl.zeros([BK, BA], tl.float32)
    for t in tl.range(0, count):
        z_kn = _load_core(z + t * rows * BN + k[:, None] * BN + n[None, :], k[:, None] < K, EVEN)
        inside_n = n[:, None] < left_n - t * BN
        y_t = y + tl.cast(t, tl.int64) * BN * y_n
        y_na = _load_rows(y_t + n[:, None] * y_n + a[None, :] * y_o, inside_n & inside_a[None, :], inside_n, EVEN, "")
        g_ka = tl.dot(z_kn, y_na, g_ka, input_precision=PRECISION)
    at = g + group * g_g + k[:, None] * g_k + a[None, :] * g_a
    tl.store(at, g_ka.to(g.dtype.element_ty), mask=(k[:, None] < K) & (a[None, :] < A))
