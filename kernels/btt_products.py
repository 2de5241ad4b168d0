"""The two products of BTT and the gradients of its cores, a tile each; btt_kernels.py makes launches of them.

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


@triton.jit
def _await(flag, needed):
    if needed > 0:
        while tl.atomic_add(flag, 0, sem="acquire") < needed:
            pass


@triton.jit
def _signal(flag):
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
        r_dj = _core(right + d[:, None] * r_d + j[None, :] * r_j, (d[:, None] < D) & (j[None, :] < J), EVEN)
    _await(flag, needed)  # with the core on its way
    z_nj = tl.zeros([BN, BJ], tl.float32)
    steps = 1 if D_ONCE else tl.cdiv(D, BD)
    for i in tl.range(0, count * steps):  # tokens and d in one loop: loads run ahead across the tiles
        t, k = i // steps, i % steps * BD
        inside_n = n[:, None] < left_n - t * BN
        inside = inside_n & (d[None, :] < D - k) & (d[None, :] < left_i - k)
        x_t = x + tl.cast(t, tl.int64) * BN * x_n
        x_nd = _rows(x_t + n[:, None] * x_n + (k + d)[None, :] * x_i, inside, inside_n, EVEN, ONCE)
        if not D_ONCE:
            inside_dj = (d[:, None] < D - k) & (j[None, :] < J)
            r_dj = _core(right + (k + d)[:, None] * r_d + j[None, :] * r_j, inside_dj, EVEN)
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
        l_ka = _core(left + k[:, None] * l_k + a[None, :] * l_a, (k[:, None] < K) & (a[None, :] < A), EVEN)
    _await(flag, needed)
    y_na = tl.zeros([BN, BA], tl.float32)
    steps = 1 if K_ONCE else tl.cdiv(K, BK)
    for i in tl.range(0, count * steps):
        t, first_k = i // steps, i % steps * BK
        z_kn = _fresh(
            z + t * rows.to(tl.int64) * BN + (first_k + k)[:, None] * BN + n[None, :], k[:, None] < K - first_k, EVEN
        )
        if not K_ONCE:
            inside_ka = (k[:, None] < K - first_k) & (a[None, :] < A)
            l_ka = _core(left + (first_k + k)[:, None] * l_k + a[None, :] * l_a, inside_ka, EVEN)
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
def _core(at, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _rows(at, inside, inside_n, EVEN: tl.constexpr, ONCE: tl.constexpr):
    if EVEN:
        return tl.load(at, mask=inside_n, other=0.0, eviction_policy=ONCE)
    else:
        return tl.load(at, mask=inside, other=0.0, eviction_policy=ONCE)


@triton.jit
def _fresh(at, inside, EVEN: tl.constexpr):
    """Past the L1 cache: other programs of the same launch wrote it."""
    if EVEN:
        return tl.load(at, cache_modifier=".cg")
    else:
        return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _pair(
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
        z_kn = _core(z + t * rows * BN + k[:, None] * BN + n[None, :], k[:, None] < K, EVEN)
        inside_n = n[:, None] < left_n - t * BN
        y_t = y + tl.cast(t, tl.int64) * BN * y_n
        y_na = _rows(y_t + n[:, None] * y_n + a[None, :] * y_o, inside_n & inside_a[None, :], inside_n, EVEN, "")
        g_ka = tl.dot(z_kn, y_na, g_ka, input_precision=PRECISION)
    at = g + group * g_g + k[:, None] * g_k + a[None, :] * g_a
    tl.store(at, g_ka.to(g.dtype.element_ty), mask=(k[:, None] < K) & (a[None, :] < A))
