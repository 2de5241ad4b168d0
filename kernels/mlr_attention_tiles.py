"""Tiles of MLR attention in which levels begin: their scores, and what gradients of scores give to queries or keys.

Each level is multiplied by itself, the finest first, and kept where it is near; x are queries and y keys, or the other way
round: positions s of keys and t of queries come along the axes that they have in the score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.mlr_attention_zones import between, level_of, near, product


@triton.jit
def with_level(
    score, level, s, t, x_XA, x_XB, y_YA, y_YB, biases, EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr,
    NESTED: tl.constexpr, BIASED: tl.constexpr, A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """score and a level, where that is near; zero elsewhere."""
    low, high, extent = level_of(level, EXTENTS, CUTS, L)
    score = product(score, x_XA, x_XB, y_YA, y_YB, low, high, A, B, False, PRECISION)
    if BIASED:
        score += tl.load(biases + level + 1) - tl.load(biases + level)
    return tl.where(near(s, t, extent, NESTED), score, 0.0)


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
            score = with_level(
                score, full, s, t, x_XA, x_XB, y_YA, y_YB, biases, EXTENTS, CUTS, L, NESTED, BIASED, A, B, PRECISION
            )
    if CROSSING > 1:
        for back in tl.range(full, reached, num_stages=1):
            score = with_level(
                score, reached - 1 - back + full, s, t, x_XA, x_XB, y_YA, y_YB, biases,
                EXTENTS, CUTS, L, NESTED, BIASED, A, B, PRECISION)  # fmt: skip
    bias = tl.load(biases + full) if BIASED else 0.0
    return product(score, x_XA, x_XB, y_YA, y_YB, 0, dims, A, B, L == 1, PRECISION), bias


@triton.jit
def add_gradients(
    dx_XA, dx_XB, slope_XY, y_YA, y_YB, low, high, A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """dx + slope y in dims low .. high."""
    part = slope_XY.to(y_YA.dtype)
    dx_XA += between(tl.dot(part, y_YA, input_precision=PRECISION), low, high, 0, A)
    if B > 0:
        dx_XB += between(tl.dot(part, y_YB, input_precision=PRECISION), low, high, A, B)
    return dx_XA, dx_XB


@triton.jit
def tile_gradients(
    dx_XA, dx_XB, slope_XY, y_YA, y_YB, s, t, full, reached, dims, EXTENTS: tl.constexpr, CUTS: tl.constexpr,
    L: tl.constexpr, NESTED: tl.constexpr, A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx plus what the tile's slopes give it, each level where it is near."""
    dx_XA, dx_XB = add_gradients(dx_XA, dx_XB, slope_XY, y_YA, y_YB, 0, dims, A, B, PRECISION)
    for level in tl.range(full, reached, num_stages=1):
        low, high, extent = level_of(level, EXTENTS, CUTS, L)
        slope_XY = tl.where(near(s, t, extent, NESTED), slope_XY, 0.0)
        dx_XA, dx_XB = add_gradients(dx_XA, dx_XB, slope_XY, y_YA, y_YB, low, high, A, B, PRECISION)
    return dx_XA, dx_XB


@triton.jit
def add_biases(
    slope_MN, weight_MN, s, t, full, reached, dbiases, masses_M, ok_M, stride, EXTENTS: tl.constexpr, CUTS: tl.constexpr,
    L: tl.constexpr, NESTED: tl.constexpr,
):  # fmt: skip
    """To dbiases[z] a tile's slopes of pairs with z levels, to masses[z] their weights, of each query."""
    total, mass_M = tl.sum(tl.sum(slope_MN, 1), 0), tl.sum(weight_MN, 1)
    tl.atomic_add(dbiases + full, total)
    tl.atomic_add(masses_M + full * stride, mass_M, ok_M, sem="relaxed")
    for level in tl.range(full, reached, num_stages=1):
        _low, _high, extent = level_of(level, EXTENTS, CUTS, L)
        seen = near(s, t, extent, NESTED)
        slope_MN, weight_MN = tl.where(seen, slope_MN, 0.0), tl.where(seen, weight_MN, 0.0)
        total, mass_M = tl.sum(tl.sum(slope_MN, 1), 0), tl.sum(weight_MN, 1)
        tl.atomic_add(dbiases + level, -total)
        tl.atomic_add(dbiases + level + 1, total)
        tl.atomic_add(masses_M + level * stride, -mass_M, ok_M, sem="relaxed")
        tl.atomic_add(masses_M + (level + 1) * stride, mass_M, ok_M, sem="relaxed")
