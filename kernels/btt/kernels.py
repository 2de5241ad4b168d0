"""BTT's kernels: both products in one launch, and the backward pass in two.

    first product    z[b, c, s, n] = sum_d x[n, c, d] right[c, d, b, s]       a group: one c, with rows j = (b, s)
    second product   y[n, b, a]    = sum_cs z[b, c, s, n] left[b, c, s, a]    a group: one b, with terms k = (c, s)
    core gradient    g[k, a]       = sum_n z[b, k, n] y[n, b, a]              a group: one b; the gradient of left

`ring_kernel` computes both products. Its programs are ordered by slabs of tokens, and the second product of a slab
comes `lag` slabs behind the first. z is a ring buffer of `ring` slabs, which stays in the L2 cache: device memory reads
x once and writes y once. A program waits only for programs of a lower index, which start earlier, so no program waits
forever.

Backward: `first_products_kernel` computes z and dz, `gradients_kernel` the gradients of both cores and of x. The
transposed map has the same form with the cores exchanged (b <-> c, a <-> d): dz is a first product, dx a second one,
and the gradient of right a core gradient.

z lies transposed, tokens last, in tiles of BN tokens: z[tile][row][BN], row = (b, c, s). The first product writes whole
lines of it and the second one reads whole lines, so that neither permutation costs anything. Arguments x_n, x_i, .. are
strides; r_g, r_d, r_j those of a core's groups, inner dimension and rows. Arguments stay scalars: Triton 3.2, the
oldest one supported, has no tuples.
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
    """Compute y_NO of x_NI, right and left. Grid: ((slabs + lag) * (C * tiles_j + B * tiles_a),).

    flags (2, slabs): programs done of each slab's first and second product; zeros before and after the launch. tiles:
    token tiles of a slab.
    """
    firsts, seconds = C * tiles_j, B * tiles_a
    step, work = tl.program_id(0) // (firsts + seconds), tl.program_id(0) % (firsts + seconds)
    # The two products alternate, so that reads of x and writes of z overlap with reads of z and writes of y.
    both = 2 * tl.minimum(firsts, seconds)
    is_first = tl.where(work < both, work % 2 == 0, firsts > seconds)
    item = tl.where(work < both, work // 2, work - both // 2)
    slab = tl.where(is_first, step, step - lag)
    if slab >= 0 and slab < slabs:
        first = slab * tiles
        count = tl.minimum(tiles, tl.cdiv(N, BN) - first)
        z += (slab % ring).to(tl.int64) * tiles * (J * C) * BN
        second_done = flags + slabs + slab
        if is_first:
            # Its place in the ring is free once the second product of the slab there is done.
            needed = tl.where(slab >= ring, seconds, 0)
            _first_product(x, right, z, item // tiles_j, item % tiles_j, first, count, N, IN, D, J, S, C, x_n, x_i, r_g, r_d, r_j,
                    BN, BJ, BD, D_ONCE, EVEN_1, PRECISION, "evict_first",
                    flags + slabs + tl.maximum(slab - ring, 0), needed)  # fmt: skip
            _set_flag(flags + slab)
        else:
            _second_product(z, left, bias, y, item // tiles_a, item % tiles_a, first, count, N, OUT, A, K, B, l_g, l_k, l_a, y_n, y_o,
                    BN, BK, BA, K_ONCE, EVEN_2, BIAS, PRECISION, "evict_first", flags + slab, firsts)  # fmt: skip
            if (
                _set_flag(second_done) == seconds - 1
            ):  # the slab's last program: no program waits for these flags any more
                tl.store(flags + slab, 0)
                if slab >= ring:
                    tl.store(second_done - ring, 0)
                if slab + ring >= slabs:
                    tl.store(second_done, 0)


@triton.jit(do_not_specialize=["N", "tiles", "slabs"])
def first_products_kernel(
    x, right, z, dy, left, dz, x_n, x_i, dy_n, dy_o, N, IN, OUT, D, A, S, C, B, slabs, tiles,
    BN: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BA: tl.constexpr, D_ONCE: tl.constexpr,
    A_ONCE: tl.constexpr, EVEN_1: tl.constexpr, EVEN_2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute z of x and right, and dz of dy and left. Grid: (slabs * (C * tiles of J + B * tiles of K),)."""
    J, K = B * S, C * S
    tiles_j, tiles_k = tl.cdiv(J, BJ), tl.cdiv(K, BK)
    z_programs = C * tiles_j
    slab, item = tl.program_id(0) // (z_programs + B * tiles_k), tl.program_id(0) % (z_programs + B * tiles_k)
    first = slab * tiles
    count = tl.minimum(tiles, tl.cdiv(N, BN) - first)
    ahead = first.to(tl.int64) * (J * C) * BN
    if item < z_programs:
        _first_product(x, right, z + ahead, item // tiles_j, item % tiles_j, first, count, N, IN, D, J, S, C, x_n, x_i,
                D * J, J, 1, BN, BJ, BD, D_ONCE, EVEN_1, PRECISION, "", z, 0)  # fmt: skip
    else:
        item -= z_programs
        _first_product(dy, left, dz + ahead, item // tiles_k, item % tiles_k, first, count, N, OUT, A, K, S, B, dy_n, dy_o,
                K * A, 1, A, BN, BK, BA, A_ONCE, EVEN_2, PRECISION, "", z, 0)  # fmt: skip


@triton.jit(do_not_specialize=["N", "tiles", "slabs", "left_tiles", "right_tiles"])
def gradients_kernel(
    z, dy, dz, x, right, dleft, dright, dx, x_n, x_i, dy_n, dy_o, dx_n, dx_i, N, IN, OUT, D, A, S, C, B, slabs, tiles,
    left_parts, left_tiles, right_parts, right_tiles,
    BN: tl.constexpr, BKL: tl.constexpr, BAL: tl.constexpr, BKR: tl.constexpr, BAR: tl.constexpr, BJ: tl.constexpr,
    BD: tl.constexpr, J_ONCE: tl.constexpr, EVEN_L: tl.constexpr, EVEN_R: tl.constexpr, EVEN_X: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dleft and dright, one partial sum for each of *_parts parts of the tokens, and dx of dz and right.

    Grid: the programs of dleft, then those of dright, then those of dx, which may be absent.
    """
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
        _second_product(dz + first.to(tl.int64) * (J * C) * BN, right, z, dx, item // across, item % across, first,
                tl.minimum(tiles, every - first), N, IN, D, J, C, D * J, 1, J, dx_n, dx_i,
                BN, BJ, BD, J_ONCE, EVEN_X, False, PRECISION, "", z, 0)  # fmt: skip


@triton.jit
def _wait_flag(flag, needed):
    """Wait until the flag has counted to `needed`."""
    if needed > 0:
        while tl.atomic_add(flag, 0, sem="acquire") < needed:
            pass


@triton.jit
def _set_flag(flag):
    """Add 1 to the flag and return its value before, once all reads and writes of this program are done."""
    tl.debug_barrier()
    return tl.atomic_add(flag, 1, sem="release")


@triton.jit
def _first_product(
    x, right, z, group, tile_j, first, count, N, IN, D, J, S, groups, x_n, x_i, r_g, r_d, r_j,
    BN: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr, D_ONCE: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, ONCE: tl.constexpr, flag, needed,
):  # fmt: skip
    """Compute rows tile_j of one group of z for `count` token tiles from `first` on, once `flag` has counted to
    `needed`.

    x (N, IN). z: pointer to the first of these tiles. D_ONCE: one tile holds all of D. EVEN: only tokens need masks.
    ONCE: the eviction policy of loads of x.
    """
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
    _wait_flag(flag, needed)  # after the load of the core was issued
    z_nj = tl.zeros([BN, BJ], tl.float32)
    steps = 1 if D_ONCE else tl.cdiv(D, BD)
    for i in tl.range(0, count * steps):  # one loop over tokens and d, so that loads are pipelined across tiles
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
    """Store a tile of z, rows j < J."""
    if EVEN:
        tl.store(at, z_jn.to(z.dtype.element_ty))
    else:
        tl.store(at, z_jn.to(z.dtype.element_ty), mask=j[:, None] < J)


@triton.jit
def _second_product(
    z, left, bias, y, group, tile_a, first, count, N, OUT, A, K, groups, l_g, l_k, l_a, y_n, y_o,
    BN: tl.constexpr, BK: tl.constexpr, BA: tl.constexpr, K_ONCE: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, ONCE: tl.constexpr, flag, needed,
):  # fmt: skip
    """Compute columns tile_a of one group of y for `count` token tiles from `first` on, once `flag` has counted to
    `needed`.

    y (N, OUT). z: pointer to the first of these tiles. K_ONCE: one tile holds all of K. EVEN: only tokens need masks.
    ONCE: the eviction policy of stores to y.
    """
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
    """Store a tile of y."""
    if not EVEN:
        inside_n = inside_n & inside_a[None, :]
    tl.store(at, y_na.to(y.dtype.element_ty), mask=inside_n, eviction_policy=ONCE)


@triton.jit
def _load_core(at, inside, EVEN: tl.constexpr):
    """Load a tile of a core, or of z."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _load_rows(at, inside, inside_n, EVEN: tl.constexpr, ONCE: tl.constexpr):
    """Load a tile of tokens."""
    if EVEN:
        return tl.load(at, mask=inside_n, other=0.0, eviction_policy=ONCE)
    else:
        return tl.load(at, mask=inside, other=0.0, eviction_policy=ONCE)


@triton.jit
def _load_uncached(at, inside, EVEN: tl.constexpr):
    """Load from the L2 cache: other programs of the same launch wrote the values, and the L1 cache may hold older
    ones.
    """
    if EVEN:
        return tl.load(at, cache_modifier=".cg")
    else:
        return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _core_gradient(
    z, y, g, group, tile_k, tile_a, first, count, N, OUT, A, K, groups, y_n, y_o, g_g, g_k, g_a,
    BN: tl.constexpr, BK: tl.constexpr, BA: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a (BK, BA) tile of one group of a core's gradient, summed over `count` token tiles from `first` on. z, y:
    pointers to the first token of all."""
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
