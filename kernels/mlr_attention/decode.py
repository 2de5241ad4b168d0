"""A few queries against a cache whose levels keep only the slots that are near: flash decoding.

The slots are cut into spans, each walked by a program of its own for all query heads that share keys; a second kernel
puts the spans together. Of a slot, what is read are its value and the keys of those levels that still hold it: far ones
the first level's alone. The last n_l of S slots are those of level l.
R rows: T queries of J heads, N slots of a tile, P dims of a level padded to 16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.mlr_attention.tiles import MIN_SCORE, softcap

MAX_LEVELS = 8  # at most
TILE_SLOTS = 64  # slots
TARGET_PROGRAMS = 1056  # that fill a GPU several times over


@triton.jit
def load_query_rows(
    q, ok_R, R: tl.constexpr, DIMS: tl.constexpr, CUTS: tl.constexpr, level: tl.constexpr, P: tl.constexpr
):
    """q of one level."""
    dim_P = tl.arange(0, P)
    at = q + tl.arange(0, R)[:, None] * DIMS + CUTS[level] + dim_P[None, :]
    return tl.load(at, mask=ok_R[:, None] & (dim_P < CUTS[level + 1] - CUTS[level])[None, :], other=0.0)


@triton.jit
def load_key_rows(k, s_N, missing, S, CUTS: tl.constexpr, level: tl.constexpr, P: tl.constexpr):
    """Keys of one level at those slots, zeros or what was kept before where it has none."""
    dim_P = tl.arange(0, P)
    rank: tl.constexpr = CUTS[level + 1] - CUTS[level]
    at = k + (s_N - missing).to(tl.int64)[:, None] * rank + dim_P[None, :]
    return tl.load(at, mask=((s_N >= missing) & (s_N < S))[:, None] & (dim_P < rank)[None, :], other=0.0)


@triton.jit
def add_level(
    score, q_RP, k, biases_R, s_N, t_R, lead, S, missing, level: tl.constexpr, P: tl.constexpr, CUTS: tl.constexpr,
    EXTENTS: tl.constexpr, NESTED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """score with a level where it is near."""
    k_NP = load_key_rows(k, s_N, missing, S, CUTS, level, P)
    part = tl.dot(q_RP, tl.trans(k_NP), input_precision=PRECISION)
    if BIASED:
        part += tl.load(biases_R + level - 1).to(tl.float32)[:, None]
    extent: tl.constexpr = EXTENTS[level]
    low_R = t_R // extent * extent if NESTED else t_R - extent + 1
    return score + tl.where((s_N - lead)[None, :] >= low_R[:, None], part, 0.0)


@triton.jit
def walk_tiles(
    acc_RV, top_R, sum_R, start, stop, q, ok_R, t_R, keys, missing, v, mv, biases_R, lead, first, window, S, scale,
    SEEN: tl.constexpr, EXTENTS: tl.constexpr, CUTS: tl.constexpr, WINDOWED: tl.constexpr, NESTED: tl.constexpr,
    BIASED: tl.constexpr, CAP: tl.constexpr, DIMS: tl.constexpr, V: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    P0: tl.constexpr, P: tl.constexpr, DV: tl.constexpr, STAGES: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles whose slots hold the first SEEN levels."""
    q0 = load_query_rows(q, ok_R, R, DIMS, CUTS, 0, P0)
    q1 = load_query_rows(q, ok_R, R, DIMS, CUTS, 1, P) if SEEN > 1 else q0
    q2 = load_query_rows(q, ok_R, R, DIMS, CUTS, 2, P) if SEEN > 2 else q0
    q3 = load_query_rows(q, ok_R, R, DIMS, CUTS, 3, P) if SEEN > 3 else q0
    q4 = load_query_rows(q, ok_R, R, DIMS, CUTS, 4, P) if SEEN > 4 else q0
    q5 = load_query_rows(q, ok_R, R, DIMS, CUTS, 5, P) if SEEN > 5 else q0
    q6 = load_query_rows(q, ok_R, R, DIMS, CUTS, 6, P) if SEEN > 6 else q0
    q7 = load_query_rows(q, ok_R, R, DIMS, CUTS, 7, P) if SEEN > 7 else q0
    queries = (q0, q1, q2, q3, q4, q5, q6, q7)
    dim_V = tl.arange(0, DV)
    unit: tl.constexpr = 1.4426950408889634
    for tile in tl.range(start, stop, num_stages=STAGES if SEEN < 3 else NEAR):
        s_N = tile * N + tl.arange(0, N)
        k_NP = load_key_rows(keys[0], s_N, missing[0], S, CUTS, 0, P0)
        value = v + (s_N - mv).to(tl.int64)[:, None] * V + dim_V[None, :]
        v_NV = tl.load(value, mask=(s_N < S)[:, None] & (dim_V < V)[None, :], other=0.0)
        score = tl.dot(q0, tl.trans(k_NP), input_precision=PRECISION)
        for level in tl.static_range(1, SEEN):
            score = add_level(
                score, queries[level], keys[level], biases_R, s_N, t_R, lead, S, missing[level],
                level, P, CUTS, EXTENTS, NESTED, BIASED, PRECISION)  # fmt: skip
        if CAP > 0:
            score = softcap(score * (scale / CAP), CAP) * unit
        else:
            score = score * (scale * unit)
        at_N = s_N - lead
        seen = (at_N[None, :] <= t_R[:, None]) & (at_N >= first)[None, :]
        if WINDOWED:
            seen &= at_N[None, :] > t_R[:, None] - window
        score = tl.where(seen, score, float("-inf"))
        higher_R = tl.maximum(top_R, tl.max(score, 1))
        weight = tl.exp2(score - higher_R[:, None])
        fade_R = tl.exp2(top_R - higher_R)
        sum_R = sum_R * fade_R + tl.sum(weight, 1)
        acc_RV = tl.dot(weight.to(v_NV.dtype), v_NV, acc_RV * fade_R[:, None], input_precision=PRECISION)
        top_R = higher_R
    return acc_RV, top_R, sum_R


@triton.jit(
    do_not_specialize=["S", "span", "mv", "m0", "m1", "m2", "m3", "m4", "m5", "m6", "m7"]
)  # they change with every token
def mlr_decode(
    q, k0, k1, k2, k3, k4, k5, k6, k7, v, part, ends, biases, scale, window, T, S, G, J,
    mv, m0, m1, m2, m3, m4, m5, m6, m7, g0, g1, g2, g3, g4, g5, g6, g7, gv, stride_end, span,
    EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr, WINDOWED: tl.constexpr, NESTED: tl.constexpr,
    BIASED: tl.constexpr, CAP: tl.constexpr, DIMS: tl.constexpr, V: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
    P0: tl.constexpr, P: tl.constexpr, DV: tl.constexpr, STAGES: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One span of slots for a group of heads; part: (.., spans, J T, V + 2): sums, the largest score and the divisor."""
    at = tl.program_id(0).to(tl.int64)
    place = tl.num_programs(1) - 1 - tl.program_id(1)  # near spans first: they have the most to do
    end = tl.load(ends + at // G * stride_end).to(tl.int32)
    lead = S - end
    first = tl.maximum(-lead, 0)
    row_R = tl.arange(0, R)
    ok_R = row_R < J * T
    t_R = end - T + row_R % T
    q += at * J * T * DIMS
    v += at * gv
    k0 += at * g0
    k1 = k1 + at * g1 if L > 1 else k0
    k2 = k2 + at * g2 if L > 2 else k0
    k3 = k3 + at * g3 if L > 3 else k0
    k4 = k4 + at * g4 if L > 4 else k0
    k5 = k5 + at * g5 if L > 5 else k0
    k6 = k6 + at * g6 if L > 6 else k0
    k7 = k7 + at * g7 if L > 7 else k0
    keys, missing = (k0, k1, k2, k3, k4, k5, k6, k7), (m0, m1, m2, m3, m4, m5, m6, m7)
    biases_R = biases + (at % G * J + tl.minimum(row_R // T, J - 1)) * (L - 1) if BIASED else row_R
    acc_RV = tl.zeros([R, DV], tl.float32)
    top_R = tl.full([R], MIN_SCORE, tl.float32)
    sum_R = tl.zeros([R], tl.float32)
    tile = place * span
    last = tl.minimum(tile + span, (S + N - 1) // N)
    for seen in tl.static_range(1, L + 1):  # beyond the fourth level tiles are few: one walk has them
        if seen < 5 or seen == L:
            stop = last
            if seen < L:
                stop = tl.maximum(tl.minimum(missing[seen] // N, last), tile)
            acc_RV, top_R, sum_R = walk_tiles(
                acc_RV, top_R, sum_R, tile, stop, q, ok_R, t_R, keys, missing, v, mv, biases_R, lead, first, window, S,
                scale, seen, EXTENTS, CUTS, WINDOWED, NESTED, BIASED, CAP, DIMS, V, R, N, P0, P, DV, STAGES, NEAR,
                PRECISION)  # fmt: skip
            tile = stop
    part += ((at * tl.num_programs(1) + place) * J * T + row_R) * (V + 2)
    dim_V = tl.arange(0, DV)
    tl.store(part[:, None] + dim_V[None, :], acc_RV, mask=ok_R[:, None] & (dim_V < V)[None, :])
    tl.store(part + V, top_R, mask=ok_R)
    tl.store(part + V + 1, sum_R, mask=ok_R)


@triton.jit
def mlr_combine(part, out, ROWS, SPANS, V: tl.constexpr, DV: tl.constexpr, SP: tl.constexpr):
    """One row of the output from its spans."""
    at, row = tl.program_id(0).to(tl.int64) // ROWS, tl.program_id(0) % ROWS
    span_S, dim_V = tl.arange(0, SP), tl.arange(0, DV)
    ok_S = span_S < SPANS
    part_S = part + ((at * SPANS + span_S) * ROWS + row) * (V + 2)
    top_S = tl.load(part_S + V, mask=ok_S, other=MIN_SCORE)
    sum_S = tl.load(part_S + V + 1, mask=ok_S, other=0.0)
    share_S = tl.exp2(top_S - tl.max(top_S, 0))
    total = tl.sum(sum_S * share_S, 0)
    acc_SV = tl.load(part_S[:, None] + dim_V[None, :], mask=ok_S[:, None] & (dim_V < V)[None, :], other=0.0)
    value = tl.sum(acc_SV * share_S[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + tl.program_id(0).to(tl.int64) * V + dim_V, value.to(out.dtype.element_ty), mask=dim_V < V)


def count_spans(programs: int, tiles: int, wanted: int) -> int:
    """Spans a group's slots are cut into, so that there are about `wanted` programs."""
    return max(1, min(tiles, 64, triton.cdiv(wanted, programs)))


def launch_decode(
    q_BGJTR: Tensor, keys: list[Tensor], v: Tensor, biases: Tensor | None, ends: Tensor, plan: Any,
    tile: int = 0, warps: int = 4, stages: int = 3, wanted: int = 0, near: int = 2,
) -> Tensor:  # fmt: skip
    """out_BHTV. keys: of each level its slots, the last ones, side by side in memory. biases_HZ: what each of levels 2 .. L
    adds to near scores."""
    B, G, J, T, dims = q_BGJTR.shape
    S, V = v.shape[2:]
    held = [k.shape[2] for k in keys]
    q, (v, v_before) = q_BGJTR.contiguous(), align_slots(v)
    keys, befores = map(list, zip(*(align_slots(k) for k in keys)))
    tile = tile or (TILE_SLOTS if len(keys) > 1 else 2 * TILE_SLOTS)
    tiles = triton.cdiv(S, tile)
    spans = count_spans(B * G, tiles, wanted or TARGET_PROGRAMS)
    span = triton.cdiv(tiles, spans)
    spans = triton.cdiv(tiles, span)
    part = torch.empty(B * G, spans, J * T, V + 2, dtype=torch.float32, device=q.device)
    out = torch.empty(B, G * J, T, V, dtype=v.dtype, device=q.device)
    padding = [None] * (MAX_LEVELS - len(keys))
    missing = [S - slots - before for slots, before in zip(held, befores)] + [0] * len(padding)
    strides = [k.stride(1) for k in keys] + [0] * len(padding)
    DV = max(16, triton.next_power_of_2(V))
    mlr_decode[B * G, spans](
        q, *keys, *padding, v, part, ends, biases, plan.scaling, plan.window or 0, T, S, G, J,
        -v_before, *missing, *strides, v.stride(1), 0 if ends.shape[0] == 1 else 1, span,
        EXTENTS=(0, *plan.extents), CUTS=plan.cuts, L=len(keys), WINDOWED=plan.window is not None, NESTED=plan.nested,
        BIASED=biases is not None, CAP=plan.softcap or 0.0, DIMS=dims, V=V, R=max(16, triton.next_power_of_2(J * T)), N=tile,
        P0=max(16, triton.next_power_of_2(plan.ranks[0])),
        P=max([16, *(triton.next_power_of_2(rank) for rank in plan.ranks[1:])]), DV=DV, STAGES=stages, NEAR=near,
        PRECISION="tf32x3" if v.dtype == torch.float32 else None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    mlr_combine[(B * G * J * T,)](part, out, J * T, spans, V, DV, triton.next_power_of_2(spans), num_warps=1)
    return out


def align_slots(x_BGSX: Tensor) -> tuple[Tensor, int]:
    """x with its slots one behind the other and (b, g) at equal distances, and how many it was begun earlier: at a
    multiple of 16 in the room it has, so that copies of 16 bytes fit and every step runs the same kernel."""
    B, G, slots, X = x_BGSX.shape
    fits = x_BGSX.stride(3) == 1 and x_BGSX.stride(2) == X and (B == 1 or x_BGSX.stride(0) == G * x_BGSX.stride(1))
    if not fits:
        return x_BGSX.contiguous(), 0
    before = x_BGSX.storage_offset() // X % 16
    if before == 0 or x_BGSX.storage_offset() % X:
        return x_BGSX, 0
    size = (B, G, slots + before, X)
    return x_BGSX.as_strided(size, x_BGSX.stride(), x_BGSX.storage_offset() - before * X), before
