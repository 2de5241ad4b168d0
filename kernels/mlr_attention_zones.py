"""Zones: where in the keys of a query tile which levels of MLR attention are near.

low_l(t) = t - extent_l + 1 (sliding) or t // extent_l * extent_l (nested): what level l sees is an interval of keys that
ends at the query, and the intervals lie in one another. In zone z every pair of the tile has the levels below z and none
has another one. Between zones lie tiles in which a level begins.
Positions are counted over a row's real tokens: key slot = position + lead. M queries, N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-1e30)
FAR = tl.constexpr(-(1 << 30))


@triton.jit
def low_of(t, first, window, level: tl.constexpr, EXTENTS: tl.constexpr, NESTED: tl.constexpr, WINDOWED: tl.constexpr):
    """The first position that a level reaches from t; level 0: that any does."""
    low = t * 0 + first
    if WINDOWED:
        low = tl.maximum(t - window + 1, low)
    if level > 0:
        extent: tl.constexpr = EXTENTS[level]
        low = tl.maximum(t // extent * extent if NESTED else t - extent + 1, low)
    return low


@triton.jit
def zone_of(
    zone: tl.constexpr, t_first, t_last, first, window,
    EXTENTS: tl.constexpr, L: tl.constexpr, NESTED: tl.constexpr, WINDOWED: tl.constexpr, N: tl.constexpr,
    LEAST_RUN: tl.constexpr,
):  # fmt: skip
    """Its first key tile, and how many there are; none where they are too few for a walk of their own."""
    start = (low_of(t_last, first, window, zone - 1, EXTENTS, NESTED, WINDOWED) + N - 1) // N
    if zone < L:
        stop = low_of(t_first, first, window, zone, EXTENTS, NESTED, WINDOWED) // N
    else:
        stop = (t_first + 1) // N
    return start, tl.where(stop - start < (LEAST_RUN if L > 1 else 1), 0, stop - start)


@triton.jit
def zone_picked(
    zone, t_first, t_last, first, window, Z0: tl.constexpr, Z1: tl.constexpr, EXTENTS: tl.constexpr, CUTS: tl.constexpr,
    L: tl.constexpr, NESTED: tl.constexpr, WINDOWED: tl.constexpr, N: tl.constexpr, LEAST_RUN: tl.constexpr,
):  # fmt: skip
    """(first key tile, how many, dims) of one of the zones Z0 + 1 .. Z1, known only as it runs."""
    start, count, dims = 0, 0, 0
    for z in tl.static_range(Z0 + 1, Z1 + 1):
        z_start, z_count = zone_of(z, t_first, t_last, first, window, EXTENTS, L, NESTED, WINDOWED, N, LEAST_RUN)
        start = tl.where(zone == z, z_start, start)
        count = tl.where(zone == z, z_count, count)
        dims = tl.where(zone == z, CUTS[z], dims)
    return start, count, dims


@triton.jit
def tiles_left(
    tiles, t_first, t_last, first, window, EXTENTS: tl.constexpr, L: tl.constexpr, NESTED: tl.constexpr,
    WINDOWED: tl.constexpr, N: tl.constexpr, LEAST_RUN: tl.constexpr,
):  # fmt: skip
    """How many of them no zone has."""
    for z in tl.static_range(1, L + 1):
        _start, z_count = zone_of(z, t_first, t_last, first, window, EXTENTS, L, NESTED, WINDOWED, N, LEAST_RUN)
        tiles -= z_count
    return tiles


@triton.jit
def tile_left(
    tile, t_first, t_last, first, window, EXTENTS: tl.constexpr, L: tl.constexpr, NESTED: tl.constexpr,
    WINDOWED: tl.constexpr, N: tl.constexpr, LEAST_RUN: tl.constexpr,
):  # fmt: skip
    """The key tile of that number, where those that a zone has are not counted."""
    for z in tl.static_range(1, L + 1):
        z_start, z_count = zone_of(z, t_first, t_last, first, window, EXTENTS, L, NESTED, WINDOWED, N, LEAST_RUN)
        tile += tl.where(tile >= z_start, z_count, 0)
    return tile


@triton.jit
def levels_of(
    s_first, t_first, t_last, window, EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr, NESTED: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Of queries t_first .. t_last and N keys: (levels that all pairs have, levels that some have, dims of the former)."""
    full, reached, dims = 1, 1, CUTS[1]
    for z in tl.static_range(1, L):
        has = low_of(t_last, FAR, window, z, EXTENTS, NESTED, False) <= s_first
        full += has.to(tl.int32)
        dims = tl.where(has, CUTS[z + 1], dims)
        some = low_of(t_first, FAR, window, z, EXTENTS, NESTED, False) < s_first + N
        reached += some.to(tl.int32)
    return full, reached, dims


@triton.jit
def level_of(level, EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr):
    """(first dim, dim after the last, extent) of a level."""
    low, high, extent = 0, 0, 1
    for z in tl.static_range(1, L):
        low = tl.where(level == z, CUTS[z], low)
        high = tl.where(level == z, CUTS[z + 1], high)
        extent = tl.where(level == z, EXTENTS[z], extent)
    return low, high, extent


@triton.jit
def near(s, t, extent, NESTED: tl.constexpr):
    """Whether a level of that extent is seen, for keys s along one axis and queries t along the other."""
    low = t // extent * extent if NESTED else t - extent + 1
    return s >= low


@triton.jit
def rows(
    x, start, stride, ok_N, N: tl.constexpr, D: tl.constexpr, first: tl.constexpr, DIMS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """x_ND: dims first .. first + D of rows start .. start + N; zeros where a row or a dim is none."""
    dim_D = first + tl.arange(0, D)
    at = x + tl.cast(start, tl.int64) * stride + (tl.arange(0, N) * stride)[:, None] + dim_D[None, :]
    if MASKED:
        return tl.load(at, mask=ok_N[:, None] & (dim_D < DIMS)[None, :], other=0.0)
    if first + D > DIMS:
        return tl.load(at, mask=(dim_D < DIMS)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def between(x_MD, low, high, first: tl.constexpr, D: tl.constexpr):
    """Zeros where a dim is not low .. high."""
    dim_D = (first + tl.arange(0, D))[None, :]
    return tl.where((dim_D >= low) & (dim_D < high), x_MD, 0.0)


@triton.jit
def product(
    score, x_XA, x_XB, y_YA, y_YB, low, high, A: tl.constexpr, B: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """score_XY + x y^T over dims low .. high of A + B, over all of them if ALL."""
    score = tl.dot(x_XA if ALL else between(x_XA, low, high, 0, A), tl.trans(y_YA), score, input_precision=PRECISION)
    if B > 0:
        score = tl.dot(
            x_XB if ALL else between(x_XB, low, high, A, B), tl.trans(y_YB), score, input_precision=PRECISION
        )
    return score


@triton.jit
def capped(score, CAP: tl.constexpr):
    """cap tanh(score / cap) for score / cap given."""
    return CAP * (1 - 2 / (1 + tl.exp2(2.8853900817779268 * score)))


@triton.jit
def put(x, at_N, x_ND, ok_N, first: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr):
    """Dims first .. first + D of rows that lie one behind the other."""
    dim_D = first + tl.arange(0, D)
    at = x + at_N[:, None] * DIMS + dim_D[None, :]
    tl.store(at, x_ND.to(x.dtype.element_ty), mask=ok_N[:, None] & (dim_D < DIMS)[None, :])
