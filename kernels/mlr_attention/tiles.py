"""Zones: where in the keys of a query tile which levels of MLR attention are near.

low_l(t) = t - extent_l + 1 (sliding) or t // extent_l * extent_l (nested): what level l sees is an interval of keys that
ends at the query, and the intervals lie in one another. In zone z every pair of the tile has the levels below z and none
has another one. Between zones lie tiles in which a level begins.
Positions are counted over a row's real tokens: key slot = position + lead. M queries, N keys of a tile.

Tiles of MLR attention in which levels begin: their scores, and what gradients of scores give to queries or keys.

Each level is multiplied by itself, the finest first, and kept where it is near; x are queries and y keys, or the other way
round: positions s of keys and t of queries come along the axes that they have in the score.
"""

from __future__ import annotations

import triton
import triton.language as tl

MIN_SCORE = tl.constexpr(-1e30)
FAR_POSITION = tl.constexpr(-(1 << 30))


@triton.jit
def first_position(
    t, first, window, level: tl.constexpr, EXTENTS: tl.constexpr, NESTED: tl.constexpr, WINDOWED: tl.constexpr
):
    """The first position that a level reaches from t; level 0: that any does."""
    low = t * 0 + first
    if WINDOWED:
        low = tl.maximum(t - window + 1, low)
    if level > 0:
        extent: tl.constexpr = EXTENTS[level]
        low = tl.maximum(t // extent * extent if NESTED else t - extent + 1, low)
    return low


@triton.jit
def zone_tiles(
    zone: tl.constexpr, t_first, t_last, first, window,
    EXTENTS: tl.constexpr, L: tl.constexpr, NESTED: tl.constexpr, WINDOWED: tl.constexpr, N: tl.constexpr,
    LEAST_RUN: tl.constexpr,
):  # fmt: skip
    """Its first key tile, and how many there are; none where they are too few for a walk of their own."""
    start = (first_position(t_last, first, window, zone - 1, EXTENTS, NESTED, WINDOWED) + N - 1) // N
    if zone < L:
        stop = first_position(t_first, first, window, zone, EXTENTS, NESTED, WINDOWED) // N
    else:
        stop = (t_first + 1) // N
    return start, tl.where(stop - start < (LEAST_RUN if L > 1 else 1), 0, stop - start)


@triton.jit
def pick_zone(
    zone, t_first, t_last, first, window, Z0: tl.constexpr, Z1: tl.constexpr, EXTENTS: tl.constexpr, CUTS: tl.constexpr,
    L: tl.constexpr, NESTED: tl.constexpr, WINDOWED: tl.constexpr, N: tl.constexpr, LEAST_RUN: tl.constexpr,
):  # fmt: skip
    """(first key tile, how many, dims) of one of the zones Z0 + 1 .. Z1, known only as it runs."""
    start, count, dims = 0, 0, 0
    for z in tl.static_range(Z0 + 1, Z1 + 1):
        z_start, z_count = zone_tiles(z, t_first, t_last, first, window, EXTENTS, L, NESTED, WINDOWED, N, LEAST_RUN)
        start = tl.where(zone == z, z_start, start)
        count = tl.where(zone == z, z_count, count)
        dims = tl.where(zone == z, CUTS[z], dims)
    return start, count, dims


@triton.jit
def count_remaining_tiles(
    tiles, t_first, t_last, first, window, EXTENTS: tl.constexpr, L: tl.constexpr, NESTED: tl.constexpr,
    WINDOWED: tl.constexpr, N: tl.constexpr, LEAST_RUN: tl.constexpr,
):  # fmt: skip
    """How many of them no zone has."""
    for z in tl.static_range(1, L + 1):
        _start, z_count = zone_tiles(z, t_first, t_last, first, window, EXTENTS, L, NESTED, WINDOWED, N, LEAST_RUN)
        tiles -= z_count
    return tiles


@triton.jit
def remaining_tile(
    tile, t_first, t_last, first, window, EXTENTS: tl.constexpr, L: tl.constexpr, NESTED: tl.constexpr,
    WINDOWED: tl.constexpr, N: tl.constexpr, LEAST_RUN: tl.constexpr,
):  # fmt: skip
    """The key tile of that number, where those that a zone has are not counted."""
    for z in tl.static_range(1, L + 1):
        z_start, z_count = zone_tiles(z, t_first, t_last, first, window, EXTENTS, L, NESTED, WINDOWED, N, LEAST_RUN)
        tile += tl.where(tile >= z_start, z_count, 0)
    return tile


@triton.jit
def tile_levels(
    s_first, t_first, t_last, window, EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr, NESTED: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Of queries t_first .. t_last and N keys: (levels that all pairs have, levels that some have, dims of the former)."""
    full, reached, dims = 1, 1, CUTS[1]
    for z in tl.static_range(1, L):
        has = first_position(t_last, FAR_POSITION, window, z, EXTENTS, NESTED, False) <= s_first
        full += has.to(tl.int32)
        dims = tl.where(has, CUTS[z + 1], dims)
        some = first_position(t_first, FAR_POSITION, window, z, EXTENTS, NESTED, False) < s_first + N
        reached += some.to(tl.int32)
    return full, reached, dims


@triton.jit
def level_bounds(level, EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr):
    """(first dim, dim after the last, extent) of a level."""
    low, high, extent = 0, 0, 1
    for z in tl.static_range(1, L):
        low = tl.where(level == z, CUTS[z], low)
        high = tl.where(level == z, CUTS[z + 1], high)
        extent = tl.where(level == z, EXTENTS[z], extent)
    return low, high, extent


@triton.jit
def is_within(s, t, extent, NESTED: tl.constexpr):
    """Whether a level of that extent is seen, for keys s along one axis and queries t along the other."""
    low = t // extent * extent if NESTED else t - extent + 1
    return s >= low


@triton.jit
def load_rows(
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
def mask_dims(x_MD, low, high, first: tl.constexpr, D: tl.constexpr):
    """Zeros where a dim is not low .. high."""
    dim_D = (first + tl.arange(0, D))[None, :]
    return tl.where((dim_D >= low) & (dim_D < high), x_MD, 0.0)


@triton.jit
def add_product(
    score, x_XA, x_XB, y_YA, y_YB, low, high, A: tl.constexpr, B: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """score_XY + x y^T over dims low .. high of A + B, over all of them if ALL."""
    score = tl.dot(x_XA if ALL else mask_dims(x_XA, low, high, 0, A), tl.trans(y_YA), score, input_precision=PRECISION)
    if B > 0:
        score = tl.dot(
            x_XB if ALL else mask_dims(x_XB, low, high, A, B), tl.trans(y_YB), score, input_precision=PRECISION
        )
    return score


@triton.jit
def softcap(score, CAP: tl.constexpr):
    """cap tanh(score / cap) for score / cap given."""
    return CAP * (1 - 2 / (1 + tl.exp2(2.8853900817779268 * score)))


@triton.jit
def store_rows(x, at_N, x_ND, ok_N, first: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr):
    """Dims first .. first + D of rows that lie one behind the other."""
    dim_D = first + tl.arange(0, D)
    at = x + at_N[:, None] * DIMS + dim_D[None, :]
    tl.store(at, x_ND.to(x.dtype.element_ty), mask=ok_N[:, None] & (dim_D < DIMS)[None, :])


@triton.jit
def add_level_score(
    score, level, s, t, x_XA, x_XB, y_YA, y_YB, biases, EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr,
    NESTED: tl.constexpr, BIASED: tl.constexpr, A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """score and a level, where that is near; zero elsewhere."""
    low, high, extent = level_bounds(level, EXTENTS, CUTS, L)
    score = add_product(score, x_XA, x_XB, y_YA, y_YB, low, high, A, B, False, PRECISION)
    if BIASED:
        score += tl.load(biases + level + 1) - tl.load(biases + level)
    return tl.where(is_within(s, t, extent, NESTED), score, 0.0)


@triton.jit
def tile_score(
    x_XA, x_XB, y_YA, y_YB, s, t, full, reached, dims, biases, CROSSING: tl.constexpr, EXTENTS: tl.constexpr,
    CUTS: tl.constexpr, L: tl.constexpr, NESTED: tl.constexpr, BIASED: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(score_XY, what biases add to all of it) of a tile whose pairs all have `full` levels, some up to `reached`; at most
    CROSSING of them begin in it."""
    score = tl.zeros([x_XA.shape[0], y_YA.shape[0]], tl.float32)
    if CROSSING == 1:  # noqa: SIM102  the one is known as it is compiled
        if full < reached:
            score = add_level_score(
                score, full, s, t, x_XA, x_XB, y_YA, y_YB, biases, EXTENTS, CUTS, L, NESTED, BIASED, A, B, PRECISION
            )
    if CROSSING > 1:
        for back in tl.range(full, reached, num_stages=1):
            score = add_level_score(
                score, reached - 1 - back + full, s, t, x_XA, x_XB, y_YA, y_YB, biases,
                EXTENTS, CUTS, L, NESTED, BIASED, A, B, PRECISION)  # fmt: skip
    bias = tl.load(biases + full) if BIASED else 0.0
    return add_product(score, x_XA, x_XB, y_YA, y_YB, 0, dims, A, B, L == 1, PRECISION), bias


@triton.jit
def add_gradients(
    dx_XA, dx_XB, slope_XY, y_YA, y_YB, low, high, A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """dx + slope y in dims low .. high."""
    part = slope_XY.to(y_YA.dtype)
    dx_XA += mask_dims(tl.dot(part, y_YA, input_precision=PRECISION), low, high, 0, A)
    if B > 0:
        dx_XB += mask_dims(tl.dot(part, y_YB, input_precision=PRECISION), low, high, A, B)
    return dx_XA, dx_XB


@triton.jit
def tile_gradients(
    dx_XA, dx_XB, slope_XY, y_YA, y_YB, s, t, full, reached, dims, EXTENTS: tl.constexpr, CUTS: tl.constexpr,
    L: tl.constexpr, NESTED: tl.constexpr, A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx plus what the tile's slopes give it, each level where it is near."""
    dx_XA, dx_XB = add_gradients(dx_XA, dx_XB, slope_XY, y_YA, y_YB, 0, dims, A, B, PRECISION)
    for level in tl.range(full, reached, num_stages=1):
        low, high, extent = level_bounds(level, EXTENTS, CUTS, L)
        slope_XY = tl.where(is_within(s, t, extent, NESTED), slope_XY, 0.0)
        dx_XA, dx_XB = add_gradients(dx_XA, dx_XB, slope_XY, y_YA, y_YB, low, high, A, B, PRECISION)
    return dx_XA, dx_XB


@triton.jit
def add_bias_gradients(
    slope_MN, weight_MN, s, t, full, reached, dbiases, masses_M, ok_M, stride, EXTENTS: tl.constexpr, CUTS: tl.constexpr,
    L: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    """To dbiases[z] a tile's slopes of pairs with z levels, to masses[z] their weights, of each query."""
    total, mass_M = tl.sum(tl.sum(slope_MN, 1), 0), tl.sum(weight_MN, 1)
    tl.atomic_add(dbiases + full, total)
    tl.atomic_add(masses_M + full * stride, mass_M, ok_M, sem="relaxed")
    for level in tl.range(full, reached, num_stages=1):
        _low, _high, extent = level_bounds(level, EXTENTS, CUTS, L)
        seen = is_within(s, t, extent, NESTED)
        slope_MN, weight_MN = tl.where(seen, slope_MN, 0.0), tl.where(seen, weight_MN, 0.0)
        total, mass_M = tl.sum(tl.sum(slope_MN, 1), 0), tl.sum(weight_MN, 1)
        tl.atomic_add(dbiases + level, -total)
        tl.atomic_add(dbiases + level + 1, total)
        tl.atomic_add(masses_M + level * stride, -mass_M, ok_M, sem="relaxed")
        tl.atomic_add(masses_M + (level + 1) * stride, mass_M, ok_M, sem="relaxed")
