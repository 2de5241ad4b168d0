"""Tiles of MLR attention's kernels: which levels are near in a tile, its scores, and their gradients for queries or
keys.

Level l adds q_l . k_l to the score of query t and key s where s >= low_l(t):

    low_l(t) = t - extent_l + 1 (sliding)  or  t // extent_l * extent_l (nested)

The keys near in a level form an interval that ends at the query, and the interval of a level lies in that of the level
before it. A zone z is a run of tiles in which every pair is near in exactly the first z levels (level 0, which every
pair has, among them). The tiles between zones, in which a level begins, are called remaining tiles: their levels are
multiplied one by one, the finest first, and masked.

Positions count the real tokens of a row: key slot = position + lead. Letters: M queries and N keys of a tile, A + B
score dimensions in two powers of two, R score dimensions of all levels. V: value dimensions, DV: their power of two. X
and Y stand for M and N in either order.

Kernels pass their arguments on in the named tuples below. The kernels themselves take numbers and pointers one by one,
because torch.compile, which traces their launches, takes no tuples of tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

MIN_SCORE = tl.constexpr(-1e30)
FAR_POSITION = tl.constexpr(-(1 << 30))


class Levels(NamedTuple):
    """Compile-time constants of the levels.

    extents, cuts: per level, its extent and its first score dimension (and, last, the number of dimensions). count:
    levels. nested: the form of the extents. windowed: whether a window bounds all levels. biased: whether near scores
    have biases. cap: the soft cap of scaled scores, 0 for none.
    """

    extents: Any
    cuts: Any
    count: Any
    nested: Any
    windowed: Any
    biased: Any
    cap: Any


class TileSizes(NamedTuple):
    """Compile-time sizes of a tile, and the precision of its products; letters as in the module's docstring."""

    M: Any
    N: Any
    A: Any
    B: Any
    R: Any
    DV: Any
    V: Any
    precision: Any


class HeadInputs(NamedTuple):
    """Inputs of one head: pointers to its first row and strides of rows, the biases of its levels, the scale of scores,
    and the lead of key slots over positions. dout and stride_d: the output's gradient, None in the forward."""

    q: Any
    stride_q: Any
    k: Any
    stride_k: Any
    v: Any
    stride_v: Any
    dout: Any
    stride_d: Any
    biases: Any
    scale: Any
    lead: Any


class Walk(NamedTuple):
    """Positions of a tile that stays in registers, and of the rows that are walked past it.

    first, last: positions of the tile's first and last row. low: the first position that is walked. end: behind the
    last position of all. window: keys that a query sees. over_keys: whether keys are walked past queries, or queries
    past keys.
    """

    first: Any
    last: Any
    low: Any
    end: Any
    window: Any
    over_keys: Any


# -- positions -------------------------------------------------------------------------------------
@triton.jit
def head_position(ends, stride_end, T, S, heads_per_row, heads_per_group, HOLES: tl.constexpr):
    """Return (row of the batch, query head, key head, end, lead, first query, first key) of this program.

    end: number of positions in the row. lead: slots before position 0. first query, first key: positions of the first
    of each.
    """
    batch = (tl.program_id(1) // heads_per_row).to(tl.int64)
    head = (tl.program_id(1) % heads_per_row).to(tl.int64)
    end = tl.load(ends + batch * stride_end).to(tl.int32) if HOLES else S
    lead = S - end
    return batch, head, head // heads_per_group, end, lead, end - T, tl.maximum(-lead, 0)


@triton.jit
def level_start(t, low, level: tl.constexpr, levels):
    """Return the first position that is near query t in a level, `low` or later; level 0 begins at `low`."""
    if level > 0:
        extent: tl.constexpr = levels.extents[level]
        low = tl.maximum(t // extent * extent if levels.nested else t - extent + 1, low)
    return low


@triton.jit
def first_position(t, low, window, level: tl.constexpr, levels):
    """Return the first position, `low` or later, that query t sees in a level; level 0: that it sees at all."""
    low = t * 0 + low
    if levels.windowed:
        low = tl.maximum(t - window + 1, low)
    return level_start(t, low, level, levels)


@triton.jit
def last_query(s, end, window, level: tl.constexpr, levels):
    """Return the position behind the last query that is near key s in a level; level 0: that sees it at all."""
    high = s * 0 + end
    if levels.windowed:
        high = tl.minimum(s + window, high)
    if level > 0:
        extent: tl.constexpr = levels.extents[level]
        high = tl.minimum((s // extent + 1) * extent if levels.nested else s + extent, high)
    return high


# -- zones -----------------------------------------------------------------------------------------
@triton.jit
def zone_tiles(zone: tl.constexpr, walk, levels, SIZE: tl.constexpr, MIN_RUN: tl.constexpr):
    """Return (first tile, number of tiles) of a zone among the walked tiles of SIZE rows.

    A zone of fewer than MIN_RUN tiles has none: they are remaining tiles.
    """
    if walk.over_keys:
        start = (first_position(walk.last, walk.low, walk.window, zone - 1, levels) + SIZE - 1) // SIZE
        if zone < levels.count:
            stop = first_position(walk.first, walk.low, walk.window, zone, levels) // SIZE
        else:
            stop = (walk.first + 1) // SIZE
        count = tl.where(stop - start < (MIN_RUN if levels.count > 1 else 1), 0, stop - start)
    else:
        start = walk.last if zone == levels.count else last_query(walk.last, walk.end, walk.window, zone, levels)
        start = (tl.maximum(start, walk.low) + SIZE - 1) // SIZE
        stop = last_query(walk.first, walk.end, walk.window, zone - 1, levels) // SIZE
        count = tl.maximum(stop - start, 0)
    return start, count


@triton.jit
def pick_zone(zone, walk, levels, Z0: tl.constexpr, Z1: tl.constexpr, SIZE: tl.constexpr, MIN_RUN: tl.constexpr):
    """Return (first tile, number of tiles, score dimensions) of one of the zones Z0 + 1 .. Z1, chosen at run time."""
    start, count, dims = 0, 0, 0
    for z in tl.static_range(Z0 + 1, Z1 + 1):
        z_start, z_count = zone_tiles(z, walk, levels, SIZE, MIN_RUN)
        start = tl.where(zone == z, z_start, start)
        count = tl.where(zone == z, z_count, count)
        dims = tl.where(zone == z, levels.cuts[z], dims)
    return start, count, dims


@triton.jit
def count_remaining_tiles(tiles, walk, levels, SIZE: tl.constexpr, MIN_RUN: tl.constexpr):
    """Return how many of the walked tiles belong to no zone."""
    for z in tl.static_range(1, levels.count + 1):
        _start, z_count = zone_tiles(z, walk, levels, SIZE, MIN_RUN)
        tiles -= z_count
    return tiles


@triton.jit
def remaining_tile(tile, walk, levels, SIZE: tl.constexpr, MIN_RUN: tl.constexpr):
    """Return the index of a remaining tile, from its index among the remaining tiles plus the first tile's."""
    for i in tl.static_range(0, levels.count):  # zones in the order of their tiles
        z_start, z_count = zone_tiles(i + 1 if walk.over_keys else levels.count - i, walk, levels, SIZE, MIN_RUN)
        tile += tl.where(tile >= z_start, z_count, 0)
    return tile


@triton.jit
def tile_levels(s_first, t_first, t_last, levels, N: tl.constexpr):
    """Return (levels near in all pairs, levels near in some pair, score dimensions of the former) of queries t_first ..
    t_last and the N keys from s_first on."""
    full, reached, dims = 1, 1, levels.cuts[1]
    for z in tl.static_range(1, levels.count):
        has = level_start(t_last, t_last * 0 + FAR_POSITION, z, levels) <= s_first
        full += has.to(tl.int32)
        dims = tl.where(has, levels.cuts[z + 1], dims)
        some = level_start(t_first, t_first * 0 + FAR_POSITION, z, levels) < s_first + N
        reached += some.to(tl.int32)
    return full, reached, dims


@triton.jit
def level_bounds(level, levels):
    """Return (first dimension, dimension behind the last, extent) of a level chosen at run time."""
    low, high, extent = 0, 0, 1
    for z in tl.static_range(1, levels.count):
        low = tl.where(level == z, levels.cuts[z], low)
        high = tl.where(level == z, levels.cuts[z + 1], high)
        extent = tl.where(level == z, levels.extents[z], extent)
    return low, high, extent


@triton.jit
def is_within(s, t, extent, NESTED: tl.constexpr):
    """Return whether pairs are near in a level of that extent: keys s along one axis, queries t along the other."""
    low = t // extent * extent if NESTED else t - extent + 1
    return s >= low


# -- loads and stores ------------------------------------------------------------------------------
@triton.jit
def load_rows(
    x, start, stride, ok_N, N: tl.constexpr, D: tl.constexpr, first: tl.constexpr, DIMS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Return x_ND, dimensions first .. first + D of rows start .. start + N; zeros where MASKED and not ok, and from
    DIMS on.
    """
    dim_D = first + tl.arange(0, D)
    at = x + tl.cast(start, tl.int64) * stride + (tl.arange(0, N) * stride)[:, None] + dim_D[None, :]
    if MASKED:
        return tl.load(at, mask=ok_N[:, None] & (dim_D < DIMS)[None, :], other=0.0)
    if first + D > DIMS:
        return tl.load(at, mask=(dim_D < DIMS)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def load_split(x, start, stride, ok_N, N: tl.constexpr, sizes, MASKED: tl.constexpr):
    """Return (x_NA, x_NB), the score dimensions of rows in two parts; the first part twice where there is no second."""
    x_NA = load_rows(x, start, stride, ok_N, N, sizes.A, 0, sizes.R, MASKED)
    x_NB = load_rows(x, start, stride, ok_N, N, sizes.B, sizes.A, sizes.R, MASKED) if sizes.B > 0 else x_NA
    return x_NA, x_NB


@triton.jit
def store_rows(x, at_N, x_ND, ok_N, first: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr):
    """Store dimensions first .. first + D of rows at_N of a contiguous matrix with DIMS columns."""
    dim_D = first + tl.arange(0, D)
    at = x + at_N[:, None] * DIMS + dim_D[None, :]
    tl.store(at, x_ND.to(x.dtype.element_ty), mask=ok_N[:, None] & (dim_D < DIMS)[None, :])


@triton.jit
def store_split(x, at_N, x_NA, x_NB, ok_N, sizes):
    """Store the score dimensions of rows, given in two parts."""
    store_rows(x, at_N, x_NA, ok_N, 0, sizes.A, sizes.R)
    if sizes.B > 0:
        store_rows(x, at_N, x_NB, ok_N, sizes.A, sizes.B, sizes.R)


@triton.jit
def mask_dims(x_MD, low, high, first: tl.constexpr, D: tl.constexpr):
    """Return x_MD, which holds dimensions from `first` on, with zeros outside of dimensions low .. high."""
    dim_D = (first + tl.arange(0, D))[None, :]
    return tl.where((dim_D >= low) & (dim_D < high), x_MD, 0.0)


@triton.jit
def mask_split(x_MA, x_MB, dims, sizes):
    """Return both parts of x with zeros from dimension `dims` on."""
    x_MA = mask_dims(x_MA, 0, dims, 0, sizes.A)
    if sizes.B > 0:
        x_MB = mask_dims(x_MB, 0, dims, sizes.A, sizes.B)
    return x_MA, x_MB


# -- scores ----------------------------------------------------------------------------------------
@triton.jit
def add_product(score, x_XA, x_XB, y_YA, y_YB, low, high, sizes, ALL: tl.constexpr):
    """Return score_XY + x y^T over dimensions low .. high, over all of them if ALL."""
    score = tl.dot(
        x_XA if ALL else mask_dims(x_XA, low, high, 0, sizes.A), tl.trans(y_YA), score, input_precision=sizes.precision
    )
    if sizes.B > 0:
        score = tl.dot(
            x_XB if ALL else mask_dims(x_XB, low, high, sizes.A, sizes.B),
            tl.trans(y_YB),
            score,
            input_precision=sizes.precision,
        )
    return score


@triton.jit
def zone_score(x_XA, x_XB, y_YA, y_YB, sizes):
    """Return score_XY of a tile in a zone: x holds zeros in the dimensions of levels that are not near in it."""
    zero = tl.zeros([x_XA.shape[0], y_YA.shape[0]], tl.float32)
    return add_product(zero, x_XA, x_XB, y_YA, y_YB, 0, sizes.R, sizes, True)


@triton.jit
def softcap(score, CAP: tl.constexpr):
    """Return CAP tanh(score), by exp2; `score` is the scaled score / CAP."""
    return CAP * (1 - 2 / (1 + tl.exp2(2.8853900817779268 * score)))


@triton.jit
def add_level_score(score, level, s, t, x_XA, x_XB, y_YA, y_YB, biases, levels, sizes):
    """Return score plus that of a level, where the level is near, and zero elsewhere."""
    low, high, extent = level_bounds(level, levels)
    score = add_product(score, x_XA, x_XB, y_YA, y_YB, low, high, sizes, False)
    if levels.biased:
        score += tl.load(biases + level + 1) - tl.load(biases + level)
    return tl.where(is_within(s, t, extent, levels.nested), score, 0.0)


@triton.jit
def tile_score(
    x_XA, x_XB, y_YA, y_YB, s, t, full, reached, dims, biases, CROSSING: tl.constexpr, levels, sizes
):  # fmt: skip
    """Return (score_XY, the bias of all its pairs) of any tile.

    x are queries and y keys or the other way round; s and t: positions of keys and queries, broadcast along the score's
    axes. full, reached, dims: from `tile_levels`. CROSSING: levels that may begin in one tile, at most.
    """
    score = tl.zeros([x_XA.shape[0], y_YA.shape[0]], tl.float32)
    if CROSSING == 1:  # noqa: SIM102  the outer condition is a compile-time constant
        if full < reached:
            score = add_level_score(score, full, s, t, x_XA, x_XB, y_YA, y_YB, biases, levels, sizes)
    if CROSSING > 1:
        for i in tl.range(full, reached, num_stages=1):
            score = add_level_score(score, reached - 1 - i + full, s, t, x_XA, x_XB, y_YA, y_YB, biases, levels, sizes)
    bias = tl.load(biases + full) if levels.biased else 0.0
    return add_product(score, x_XA, x_XB, y_YA, y_YB, 0, dims, sizes, levels.count == 1), bias


# -- gradients -------------------------------------------------------------------------------------
@triton.jit
def score_gradients(score, bias, lse, dweight, delta, seen, scale, MASKED: tl.constexpr, CAP: tl.constexpr):
    """Return (weights, gradient of scaled scores behind the soft cap, derivative of the soft cap).

    lse: base-2 log-sum-exp. dweight = dO V^T, delta = <dO, O>. seen: the mask of visible pairs, if MASKED.
    """
    log2_e: tl.constexpr = 1.4426950408889634
    if CAP > 0:
        score = softcap((score + bias) * (scale / CAP), CAP)
        weight = tl.exp2(score * log2_e - lse)
    else:
        weight = tl.exp2(score * (scale * log2_e) - (lse - bias * (scale * log2_e)))
    if MASKED:
        weight = tl.where(seen, weight, 0.0)
    cap_slope = 1.0
    if CAP > 0:
        cap_slope = 1 - (score / CAP) * (score / CAP)
    return weight, weight * (dweight - delta), cap_slope


@triton.jit
def add_zone_gradients(dx_XA, dx_XB, dscore_XY, y_YA, y_YB, sizes):
    """Return dx + dscore y in all dimensions; those of levels that are not near in the zone are set to zero after
    it.
    """
    dx_XA = tl.dot(dscore_XY, y_YA, dx_XA, input_precision=sizes.precision)
    if sizes.B > 0:
        dx_XB = tl.dot(dscore_XY, y_YB, dx_XB, input_precision=sizes.precision)
    return dx_XA, dx_XB


@triton.jit
def add_gradients(dx_XA, dx_XB, dscore_XY, y_YA, y_YB, low, high, sizes):
    """Return dx + dscore y in dimensions low .. high."""
    part = dscore_XY.to(y_YA.dtype)
    dx_XA += mask_dims(tl.dot(part, y_YA, input_precision=sizes.precision), low, high, 0, sizes.A)
    if sizes.B > 0:
        dx_XB += mask_dims(tl.dot(part, y_YB, input_precision=sizes.precision), low, high, sizes.A, sizes.B)
    return dx_XA, dx_XB


@triton.jit
def tile_gradients(dx_XA, dx_XB, dscore_XY, y_YA, y_YB, s, t, full, reached, dims, levels, sizes):
    """Return dx + dscore y of any tile, each level where it is near; arguments as in `tile_score`."""
    dx_XA, dx_XB = add_gradients(dx_XA, dx_XB, dscore_XY, y_YA, y_YB, 0, dims, sizes)
    for level in tl.range(full, reached, num_stages=1):
        low, high, extent = level_bounds(level, levels)
        dscore_XY = tl.where(is_within(s, t, extent, levels.nested), dscore_XY, 0.0)
        dx_XA, dx_XB = add_gradients(dx_XA, dx_XB, dscore_XY, y_YA, y_YB, low, high, sizes)
    return dx_XA, dx_XB


@triton.jit
def add_bias_gradients(dscore_MN, weight_MN, s, t, full, reached, dbiases, masses_M, ok_M, stride, levels):
    """Add to dbiases[z] the score gradients of the tile's pairs that are near in z levels, and to masses[z] their
    weights, per query. stride: between masses of one z and the next."""
    total, mass_M = tl.sum(tl.sum(dscore_MN, 1), 0), tl.sum(weight_MN, 1)
    tl.atomic_add(dbiases + full, total)
    tl.atomic_add(masses_M + full * stride, mass_M, ok_M, sem="relaxed")
    for level in tl.range(full, reached, num_stages=1):
        _low, _high, extent = level_bounds(level, levels)
        near = is_within(s, t, extent, levels.nested)
        dscore_MN, weight_MN = tl.where(near, dscore_MN, 0.0), tl.where(near, weight_MN, 0.0)
        total, mass_M = tl.sum(tl.sum(dscore_MN, 1), 0), tl.sum(weight_MN, 1)
        tl.atomic_add(dbiases + level, -total)
        tl.atomic_add(dbiases + level + 1, total)
        tl.atomic_add(masses_M + level * stride, -mass_M, ok_M, sem="relaxed")
        tl.atomic_add(masses_M + (level + 1) * stride, mass_M, ok_M, sem="relaxed")
