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
def level_of(level, EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr):
    """(first dim, dim after the last, extent) of a level."""
    low, high, extent = 0, 0, 1
    for z in tl.static_range(1, L):
        low = tl.where(level == z, CUTS[z], low)
        high = tl.where(level == z, CUTS[z + 1], high)
        extent = tl.where(level == z, EXTENTS[z], extent)
    return low, high, extent


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
def capped(score, CAP: tl.constexpr):
    """cap tanh(score / cap) for score / cap given."""
    return CAP * (1 - 2 / (1 + tl.exp2(2.8853900817779268 * score)))


@triton.jit
def put(x, at_N, x_ND, ok_N, first: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr):
    """Dims first .. first + D of rows that lie one behind the other."""
    dim_D = first + tl.arange(0, D)
    at = x + at_N[:, None] * DIMS + dim_D[None, :]
    tl.store(at, x_ND.to(x.dtype.element_ty), mask=ok_N[:, None] & (dim_D < DIMS)[None, :])
