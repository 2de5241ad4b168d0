"""Decoding: a few queries against a cache in which each level keeps only the slots that are near (flash decoding, Dao
et al. 2023).

The slots are cut into spans. A program processes one span for all query heads that share keys, and a second kernel
combines the spans. Of each slot it reads the value and the keys of the levels that still hold it; the first level alone
holds distant slots. Level l holds the last n_l of S slots.

Letters: R rows (T queries of J heads), N slots of a tile, P dimensions of a level padded to 16 (P0: of the first
level), V value dimensions and DV their power of two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.mlr_attention.plan import MLRPlan
from surgery.kernels.mlr_attention.tiles import MIN_SCORE, Levels, softcap

MAX_LEVELS = 8
TILE_SLOTS = 64  # of a tile with several levels; twice as many with one level
TARGET_PROGRAMS = 1056  # enough to fill a GPU several times over


class DecodeTiles(NamedTuple):
    """Slots of a tile, warps, and stages of the loads' pipeline; near_stages: where three levels or more are read."""

    slots: int
    warps: int = 4
    stages: int = 3
    near_stages: int = 2


class DecodeSizes(NamedTuple):
    """Compile-time sizes (letters as in the module's docstring; `dims`: score dimensions of all levels), stages and
    precision.
    """

    R: Any
    N: Any
    P0: Any
    P: Any
    DV: Any
    V: Any
    dims: Any
    stages: Any
    near_stages: Any
    precision: Any


class CacheSlots(NamedTuple):
    """The cache of one head group.

    v: pointer to the values; v_missing: slots before the first one stored (negative: slots stored before the first).
    biases_R: pointers to each row's biases. slot = position + lead; first: the first position with a token; slots: S.
    """

    v: Any
    v_missing: Any
    biases_R: Any
    lead: Any
    first: Any
    window: Any
    slots: Any
    scale: Any


@triton.jit
def load_query_rows(q, ok_R, level: tl.constexpr, P: tl.constexpr, levels, sizes):
    """Return q_RP of one level."""
    dim_P = tl.arange(0, P)
    at = q + tl.arange(0, sizes.R)[:, None] * sizes.dims + levels.cuts[level] + dim_P[None, :]
    return tl.load(at, mask=ok_R[:, None] & (dim_P < levels.cuts[level + 1] - levels.cuts[level])[None, :], other=0.0)


@triton.jit
def load_key_rows(k, s_N, missing, S, level: tl.constexpr, P: tl.constexpr, levels):
    """Return k_NP of one level; zeros, or the keys of a slot before, where the level does not hold a slot."""
    dim_P = tl.arange(0, P)
    rank: tl.constexpr = levels.cuts[level + 1] - levels.cuts[level]
    at = k + (s_N - missing).to(tl.int64)[:, None] * rank + dim_P[None, :]
    return tl.load(at, mask=((s_N >= missing) & (s_N < S))[:, None] & (dim_P < rank)[None, :], other=0.0)


@triton.jit
def add_level(score, q_RP, k, missing, s_N, t_R, level: tl.constexpr, cache, levels, sizes):
    """Return score_RN plus that of a level where it is near."""
    k_NP = load_key_rows(k, s_N, missing, cache.slots, level, sizes.P, levels)
    part = tl.dot(q_RP, tl.trans(k_NP), input_precision=sizes.precision)
    if levels.biased:
        part += tl.load(cache.biases_R + level - 1).to(tl.float32)[:, None]
    extent: tl.constexpr = levels.extents[level]
    low_R = t_R // extent * extent if levels.nested else t_R - extent + 1
    return score + tl.where((s_N - cache.lead)[None, :] >= low_R[:, None], part, 0.0)


@triton.jit
def process_tiles(
    acc_RV, top_R, sum_R, start, stop, q, ok_R, t_R, keys, missing, cache, SEEN: tl.constexpr, levels, sizes
):  # fmt: skip
    """Return (acc, top, sum) of a running softmax in base 2 after tiles start .. stop, whose slots hold the first SEEN
    levels.
    """
    q0 = load_query_rows(q, ok_R, 0, sizes.P0, levels, sizes)
    q1 = load_query_rows(q, ok_R, 1, sizes.P, levels, sizes) if SEEN > 1 else q0
    q2 = load_query_rows(q, ok_R, 2, sizes.P, levels, sizes) if SEEN > 2 else q0
    q3 = load_query_rows(q, ok_R, 3, sizes.P, levels, sizes) if SEEN > 3 else q0
    q4 = load_query_rows(q, ok_R, 4, sizes.P, levels, sizes) if SEEN > 4 else q0
    q5 = load_query_rows(q, ok_R, 5, sizes.P, levels, sizes) if SEEN > 5 else q0
    q6 = load_query_rows(q, ok_R, 6, sizes.P, levels, sizes) if SEEN > 6 else q0
    q7 = load_query_rows(q, ok_R, 7, sizes.P, levels, sizes) if SEEN > 7 else q0
    queries = (q0, q1, q2, q3, q4, q5, q6, q7)
    dim_V = tl.arange(0, sizes.DV)
    log2_e: tl.constexpr = 1.4426950408889634
    for tile in tl.range(start, stop, num_stages=sizes.stages if SEEN < 3 else sizes.near_stages):
        s_N = tile * sizes.N + tl.arange(0, sizes.N)
        k_NP = load_key_rows(keys[0], s_N, missing[0], cache.slots, 0, sizes.P0, levels)
        value = cache.v + (s_N - cache.v_missing).to(tl.int64)[:, None] * sizes.V + dim_V[None, :]
        v_NV = tl.load(value, mask=(s_N < cache.slots)[:, None] & (dim_V < sizes.V)[None, :], other=0.0)
        score = tl.dot(q0, tl.trans(k_NP), input_precision=sizes.precision)
        for level in tl.static_range(1, SEEN):
            score = add_level(score, queries[level], keys[level], missing[level], s_N, t_R, level, cache, levels, sizes)
        if levels.cap > 0:
            score = softcap(score * (cache.scale / levels.cap), levels.cap) * log2_e
        else:
            score = score * (cache.scale * log2_e)
        at_N = s_N - cache.lead
        seen = (at_N[None, :] <= t_R[:, None]) & (at_N >= cache.first)[None, :]
        if levels.windowed:
            seen &= at_N[None, :] > t_R[:, None] - cache.window
        score = tl.where(seen, score, float("-inf"))
        higher_R = tl.maximum(top_R, tl.max(score, 1))
        weight = tl.exp2(score - higher_R[:, None])
        fade_R = tl.exp2(top_R - higher_R)
        sum_R = sum_R * fade_R + tl.sum(weight, 1)
        acc_RV = tl.dot(weight.to(v_NV.dtype), v_NV, acc_RV * fade_R[:, None], input_precision=sizes.precision)
        top_R = higher_R
    return acc_RV, top_R, sum_R


@triton.jit
def decode_span(part_R, place, span, q, ok_R, t_R, keys, missing, cache, levels, sizes):
    """Process one span of slots and store its weighted values, top and sum at part_R."""
    acc_RV = tl.zeros([sizes.R, sizes.DV], tl.float32)
    top_R = tl.full([sizes.R], MIN_SCORE, tl.float32)
    sum_R = tl.zeros([sizes.R], tl.float32)
    tile = place * span
    last = tl.minimum(tile + span, (cache.slots + sizes.N - 1) // sizes.N)
    for seen in tl.static_range(
        1, levels.count + 1
    ):  # beyond the fourth level tiles are few: one loop processes them all
        if seen < 5 or seen == levels.count:
            stop = last
            if seen < levels.count:
                stop = tl.maximum(tl.minimum(missing[seen] // sizes.N, last), tile)
            acc_RV, top_R, sum_R = process_tiles(
                acc_RV, top_R, sum_R, tile, stop, q, ok_R, t_R, keys, missing, cache, seen, levels, sizes
            )
            tile = stop
    dim_V = tl.arange(0, sizes.DV)
    tl.store(part_R[:, None] + dim_V[None, :], acc_RV, mask=ok_R[:, None] & (dim_V < sizes.V)[None, :])
    tl.store(part_R + sizes.V, top_R, mask=ok_R)
    tl.store(part_R + sizes.V + 1, sum_R, mask=ok_R)


# Not specialized: integers that change with every token.
@triton.jit(do_not_specialize=["S", "span", "mv", "m0", "m1", "m2", "m3", "m4", "m5", "m6", "m7"])
def mlr_decode(
    q, k0, k1, k2, k3, k4, k5, k6, k7, v, part, ends, biases, scale, window, T, S, G, J,
    mv, m0, m1, m2, m3, m4, m5, m6, m7, g0, g1, g2, g3, g4, g5, g6, g7, gv, stride_end, span,
    EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr, WINDOWED: tl.constexpr, NESTED: tl.constexpr,
    BIASED: tl.constexpr, CAP: tl.constexpr, DIMS: tl.constexpr, V: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    P0: tl.constexpr, P: tl.constexpr, DV: tl.constexpr, STAGES: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute part (B * G, spans, J * T, V + 2): weighted values, top score and sum of weights of each span.

    Grid: (B * G, spans).

    k0 .. k7: keys per level; m0 .. m7: slots that a level lacks; g0 .. g7: strides of head groups. span: tiles of a
    span.
    """
    at = tl.program_id(0).to(tl.int64)
    place = tl.num_programs(1) - 1 - tl.program_id(1)  # the last spans hold the most levels: they start first
    end = tl.load(ends + at // G * stride_end).to(tl.int32)
    lead = S - end
    row_R = tl.arange(0, R)
    ok_R = row_R < J * T
    t_R = end - T + row_R % T
    k0 += at * g0
    k1 = k1 + at * g1 if L > 1 else k0
    k2 = k2 + at * g2 if L > 2 else k0
    k3 = k3 + at * g3 if L > 3 else k0
    k4 = k4 + at * g4 if L > 4 else k0
    k5 = k5 + at * g5 if L > 5 else k0
    k6 = k6 + at * g6 if L > 6 else k0
    k7 = k7 + at * g7 if L > 7 else k0
    biases_R = biases + (at % G * J + tl.minimum(row_R // T, J - 1)) * (L - 1) if BIASED else row_R
    decode_span(
        part + ((at * tl.num_programs(1) + place) * J * T + row_R) * (V + 2), place, span, q + at * J * T * DIMS, ok_R, t_R,
        (k0, k1, k2, k3, k4, k5, k6, k7), (m0, m1, m2, m3, m4, m5, m6, m7),
        CacheSlots(v + at * gv, mv, biases_R, lead, tl.maximum(-lead, 0), window, S, scale),
        Levels(EXTENTS, CUTS, L, NESTED, WINDOWED, BIASED, CAP),
        DecodeSizes(R, N, P0, P, DV, V, DIMS, STAGES, NEAR, PRECISION),
    )  # fmt: skip


@triton.jit
def mlr_combine(part, out, rows, spans, V: tl.constexpr, DV: tl.constexpr, SP: tl.constexpr):
    """Combine the spans of one row of the output.

    Grid: (B * G * rows,), rows = J * T. SP: the power of two of spans.
    """
    at, row = tl.program_id(0).to(tl.int64) // rows, tl.program_id(0) % rows
    span_S, dim_V = tl.arange(0, SP), tl.arange(0, DV)
    ok_S = span_S < spans
    part_S = part + ((at * spans + span_S) * rows + row) * (V + 2)
    top_S = tl.load(part_S + V, mask=ok_S, other=MIN_SCORE)
    sum_S = tl.load(part_S + V + 1, mask=ok_S, other=0.0)
    share_S = tl.exp2(top_S - tl.max(top_S, 0))
    total = tl.sum(sum_S * share_S, 0)
    acc_SV = tl.load(part_S[:, None] + dim_V[None, :], mask=ok_S[:, None] & (dim_V < V)[None, :], other=0.0)
    value = tl.sum(acc_SV * share_S[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + tl.program_id(0).to(tl.int64) * V + dim_V, value.to(out.dtype.element_ty), mask=dim_V < V)


def count_spans(programs: int, tiles: int, target: int) -> int:
    """Return the number of spans (at most 64) that makes about `target` programs of `programs` head groups."""
    return max(1, min(tiles, 64, triton.cdiv(target, programs)))


def launch_decode(
    q_BGJTR: Tensor,
    keys: list[Tensor],
    v: Tensor,
    biases: Tensor | None,
    ends: Tensor,
    plan: MLRPlan,
    *,
    tiles: DecodeTiles | None = None,
    target: int | None = None,
) -> Tensor:
    """Return out_BHTV.

    keys: k_BGSR of each level, its last slots. v_BGSV. biases_HZ: per head the bias of each of levels 2 .. L. ends:
    positions in each row, (B,) or (1,). tiles: None for the default. target: programs to aim at, None for
    TARGET_PROGRAMS.
    """
    B, G, J, T, dims = q_BGJTR.shape
    S, V = v.shape[2:]
    held = [k.shape[2] for k in keys]
    q, (v, v_before) = q_BGJTR.contiguous(), align_slots(v)
    keys, befores = map(list, zip(*(align_slots(k) for k in keys)))
    tiles = tiles or DecodeTiles(TILE_SLOTS if len(keys) > 1 else 2 * TILE_SLOTS)
    count = triton.cdiv(S, tiles.slots)
    span = triton.cdiv(count, count_spans(B * G, count, target or TARGET_PROGRAMS))
    spans = triton.cdiv(count, span)
    partials = torch.empty(B * G, spans, J * T, V + 2, dtype=torch.float32, device=q.device)
    out = torch.empty(B, G * J, T, V, dtype=v.dtype, device=q.device)
    padding: list[Any] = [None] * (MAX_LEVELS - len(keys))
    missing = [S - slots - before for slots, before in zip(held, befores)] + [0] * len(padding)
    strides = [k.stride(1) for k in keys] + [0] * len(padding)
    DV = max(16, triton.next_power_of_2(V))
    mlr_decode[B * G, spans](
        q, *keys, *padding, v, partials, ends, biases, plan.scaling, plan.window or 0, T, S, G, J,
        -v_before, *missing, *strides, v.stride(1), 0 if ends.shape[0] == 1 else 1, span,
        EXTENTS=(0, *plan.extents), CUTS=plan.cuts, L=len(keys), WINDOWED=plan.window is not None, NESTED=plan.nested,
        BIASED=biases is not None, CAP=plan.softcap or 0.0, DIMS=dims, V=V, R=max(16, triton.next_power_of_2(J * T)), N=tiles.slots,
        P0=max(16, triton.next_power_of_2(plan.ranks[0])),
        P=max([16, *(triton.next_power_of_2(rank) for rank in plan.ranks[1:])]), DV=DV, STAGES=tiles.stages, NEAR=tiles.near_stages,
        PRECISION="tf32x3" if v.dtype == torch.float32 else None, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    mlr_combine[(B * G * J * T,)](partials, out, J * T, spans, V, DV, triton.next_power_of_2(spans), num_warps=1)
    return out


def align_slots(x_BGSX: Tensor) -> tuple[Tensor, int]:
    """Return x with contiguous slots and one stride over (b, g), and how many slots before its first one the result
    begins.

    It begins at a slot whose index in the buffer is a multiple of 16, so that copies of 16 bytes are aligned and every
    step runs the same compiled kernel.
    """
    B, G, slots, X = x_BGSX.shape
    fits = x_BGSX.stride(3) == 1 and x_BGSX.stride(2) == X and (B == 1 or x_BGSX.stride(0) == G * x_BGSX.stride(1))
    if not fits:
        return x_BGSX.contiguous(), 0
    before = x_BGSX.storage_offset() // X % 16
    if before == 0 or x_BGSX.storage_offset() % X:
        return x_BGSX, 0
    size = (B, G, slots + before, X)
    return x_BGSX.as_strided(size, x_BGSX.stride(), x_BGSX.storage_offset() - before * X), before
