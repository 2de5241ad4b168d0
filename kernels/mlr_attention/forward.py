"""out = softmax(scaling (sum_l [s >= low_l(t)] (q_l[t] . k_l[s] + bias_l)), s <= t) V, flash-style, and its base-2 log-sum.

For low_l and zones see kernels/mlr_attention/tiles.py. The walk of a zone multiplies the dims of its levels, the others of q set
to zero, and loads them rounded up to a width of A + B. Tiles left over are walked first: those at the diagonal, of short
zones, and where levels begin; there the product of each level by itself, the finest first, is added where that is near.

A softmax is the same whatever number is taken off its scores, as long as nothing overflows. After the tiles left that is each
query's largest score so far, and zones, where most of the work lies, need no larger ones: float32's exponents, which
bfloat16 shares, hold weights up to 2^100 of it. Where a sum grows beyond that the tile is computed anew.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.mlr_attention.tiles import (
    MIN_SCORE,
    add_product,
    count_remaining_tiles,
    first_position,
    load_rows,
    mask_dims,
    pick_zone,
    remaining_tile,
    softcap,
    store_rows,
    tile_levels,
    tile_score,
)

MAX_SCORE = tl.constexpr(1e30)


@triton.jit
def identity_product(x_MD, D: tl.constexpr):
    """x as it is, made by a product: so it lies in registers as the next product takes it, and is masked there."""
    dim_D = tl.arange(0, D)
    if x_MD.dtype == tl.float32:
        return x_MD
    return tl.dot(x_MD, (dim_D[:, None] == dim_D[None, :]).to(x_MD.dtype)).to(x_MD.dtype)


@triton.jit
def softmax_update(
    score,
    shift,
    seen,
    acc_MV,
    top_M,
    sum_M,
    v_NV,
    scale,
    MASKED: tl.constexpr,
    FIXED: tl.constexpr,
    CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile more of a running softmax, in base 2. FIXED: measured against the top that there is, whatever comes."""
    unit: tl.constexpr = 1.4426950408889634
    if CAP > 0:
        score = softcap((score + shift) * (scale / CAP), CAP)
        factor = unit
        shift = 0.0
    else:
        factor = scale * unit
        shift = shift * factor
    if FIXED:
        weight = tl.exp2(score * factor - (top_M - shift)[:, None])
        acc_MV = tl.dot(weight.to(v_NV.dtype), v_NV, acc_MV, input_precision=PRECISION)
        return acc_MV, top_M, sum_M + tl.sum(weight, 1)
    if MASKED:
        score = tl.where(seen, score, float("-inf"))
    higher_M = tl.maximum(top_M, tl.max(score, 1) * factor + shift)
    weight = tl.exp2(score * factor - (higher_M - shift)[:, None])
    fade_M = tl.exp2(top_M - higher_M)
    sum_M = sum_M * fade_M + tl.sum(weight, 1)
    acc_MV = tl.dot(weight.to(v_NV.dtype), v_NV, acc_MV * fade_M[:, None], input_precision=PRECISION)
    return acc_MV, higher_M, sum_M


@triton.jit
def walk_zones(
    acc_MV, top_M, sum_M, held_MA, held_MB, q, q_row, q_ok_M, stride_q, k, stride_k, v, stride_v, biases, lead, scale,
    t_first, t_last, first, window, Z0: tl.constexpr, Z1: tl.constexpr, EXTENTS: tl.constexpr, CUTS: tl.constexpr,
    L: tl.constexpr, NESTED: tl.constexpr, WINDOWED: tl.constexpr, BIASED: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, HELD: tl.constexpr, FIXED: tl.constexpr, LEAST_RUN: tl.constexpr, CAP: tl.constexpr, R: tl.constexpr,
    V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Zones Z0 + 1 .. Z1, of at most A + B dims."""
    for zone in tl.range(Z0 + 1, Z1 + 1, num_stages=1):
        start, count, dims = pick_zone(
            zone, t_first, t_last, first, window, Z0, Z1, EXTENTS, CUTS, L, NESTED, WINDOWED, N, LEAST_RUN
        )
        bias = tl.load(biases + zone) if BIASED else 0.0
        if HELD:
            q_MA = mask_dims(held_MA, 0, dims, 0, A)
            q_MB = mask_dims(held_MB, 0, dims, A, B) if B > 0 else q_MA
        else:
            q_MA = load_rows(q, q_row, stride_q, q_ok_M, M, A, 0, R, True)
            q_MB = load_rows(q, q_row, stride_q, q_ok_M, M, B, A, R, True) if B > 0 else q_MA
            if Z1 > Z0 + 1 or CUTS[Z1] < A + B:
                q_MA = mask_dims(q_MA, 0, dims, 0, A)
                q_MB = mask_dims(q_MB, 0, dims, A, B) if B > 0 else q_MA
        for tile in tl.range(start, start + count):
            k_NA = load_rows(k, tile * N + lead, stride_k, q_ok_M, N, A, 0, R, False)
            v_NV = load_rows(v, tile * N + lead, stride_v, q_ok_M, N, DV, 0, V, False)
            k_NB = load_rows(k, tile * N + lead, stride_k, q_ok_M, N, B, A, R, False) if B > 0 else k_NA
            score = add_product(tl.zeros([M, N], tl.float32), q_MA, q_MB, k_NA, k_NB, 0, R, A, B, True, PRECISION)
            acc_MV, top_M, sum_M = softmax_update(
                score, bias, None, acc_MV, top_M, sum_M, v_NV, scale, False, FIXED, CAP, PRECISION
            )
    return acc_MV, top_M, sum_M


@triton.jit
def process_tile(
    acc_MV, top_M, sum_M, tile, q_MA, q_MB, k, stride_k, v, stride_v, biases, lead, scale, t_M, t_first, t_last,
    first, window, end, MASKED: tl.constexpr, CROSSING: tl.constexpr, EXTENTS: tl.constexpr, CUTS: tl.constexpr,
    L: tl.constexpr, NESTED: tl.constexpr, WINDOWED: tl.constexpr, BIASED: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, CAP: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of any kind, in which at most CROSSING levels begin; MASKED: where queries may not see all of its keys."""
    s_N = tile * N + tl.arange(0, N)
    ok_N = (s_N >= first) & (s_N < end)
    k_NA = load_rows(k, tile * N + lead, stride_k, ok_N, N, A, 0, R, MASKED)
    k_NB = load_rows(k, tile * N + lead, stride_k, ok_N, N, B, A, R, MASKED) if B > 0 else k_NA
    v_NV = load_rows(v, tile * N + lead, stride_v, ok_N, N, DV, 0, V, MASKED)
    full, reached, dims = tile_levels(tile * N, t_first, t_last, window, EXTENTS, CUTS, L, NESTED, N)
    score, bias = tile_score(
        q_MA, q_MB, k_NA, k_NB, s_N[None, :], t_M[:, None], full, reached, dims, biases,
        CROSSING, EXTENTS, CUTS, L, NESTED, BIASED, A, B, PRECISION)  # fmt: skip
    seen = None
    if MASKED:
        low_M = first_position(t_M, first, window, 0, EXTENTS, NESTED, WINDOWED)
        seen = (s_N[None, :] <= t_M[:, None]) & (s_N[None, :] >= low_M[:, None])
    return softmax_update(score, bias, seen, acc_MV, top_M, sum_M, v_NV, scale, MASKED, False, CAP, PRECISION)


@triton.jit
def mlr_forward(
    q, k, v, out, again, lse, ends, biases, scale, window, T, S, HEADS, SHARING,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kg, stride_k, stride_vb, stride_vg, stride_v, stride_end,
    EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr, A1: tl.constexpr, B1: tl.constexpr, L1: tl.constexpr,
    A2: tl.constexpr, B2: tl.constexpr,
    HOLES: tl.constexpr, WINDOWED: tl.constexpr, NESTED: tl.constexpr, BIASED: tl.constexpr, CAP: tl.constexpr,
    R: tl.constexpr, V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
    CROSSING: tl.constexpr, LEAST_RUN: tl.constexpr, HOLD: tl.constexpr,
    FIXED: tl.constexpr, REDO: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head. Zones up to L1 have at most A1 + B1 dims, the others A2 + B2. FIXED: zones are measured
    against the top of the tiles left; `again` says where that was too low, and only there a second launch, REDO, computes."""
    batch, head = (tl.program_id(1) // HEADS).to(tl.int64), (tl.program_id(1) % HEADS).to(tl.int64)
    group = head // SHARING
    end = tl.load(ends + batch * stride_end).to(tl.int32) if HOLES else S
    lead = S - end  # slot = position + lead
    first_q = end - T
    first = tl.maximum(-lead, 0)
    t_first = tl.maximum(first_q, 0) // M * M + (tl.num_programs(0) - 1 - tl.program_id(0)) * M  # long ones first
    if t_first >= end:
        return
    if FIXED or REDO:
        again += tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    if REDO:  # noqa: SIM102
        if tl.load(again) == 0:
            return
    t_last = tl.minimum(t_first + M, end) - 1
    t_M = t_first + tl.arange(0, M)
    row = t_first - first_q
    row_M = row + tl.arange(0, M)
    ok_M = (t_M < end) & (row_M >= 0)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + group * stride_kg
    v += batch * stride_vb + group * stride_vg
    acc_MV = tl.zeros([M, DV], tl.float32)
    top_M = tl.full([M], MIN_SCORE, tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    if BIASED:
        biases += head * (L + 1)
    q_MA = load_rows(q, row, stride_q, ok_M, M, A2, 0, R, True)
    q_MB = load_rows(q, row, stride_q, ok_M, M, B2, A2, R, True) if B2 > 0 else q_MA
    held_MA = identity_product(q_MA, A2) if HOLD else q_MA
    held_MB = identity_product(q_MB, B2) if HOLD and B2 > 0 else q_MB
    # tiles that no zone has, every query's own among them
    tile_first = first_position(t_first, first, window, 0, EXTENTS, NESTED, WINDOWED) // N
    whole = tl.maximum((t_first + 1) // N, tile_first)
    if L > 1 or HOLES or WINDOWED:
        left = count_remaining_tiles(
            whole - tile_first, t_first, t_last, first, window, EXTENTS, L, NESTED, WINDOWED, N, LEAST_RUN
        )
        for at in tl.range(0, left):
            tile = remaining_tile(
                tile_first + at, t_first, t_last, first, window, EXTENTS, L, NESTED, WINDOWED, N, LEAST_RUN
            )
            acc_MV, top_M, sum_M = process_tile(
                acc_MV, top_M, sum_M, tile, held_MA, held_MB, k, stride_k, v, stride_v, biases, lead, scale, t_M, t_first, t_last,
                first, window, end, HOLES or WINDOWED, CROSSING, EXTENTS, CUTS, L, NESTED, WINDOWED, BIASED, A2, B2, CAP, R, V, M, N, DV,
                PRECISION)  # fmt: skip
    for tile in tl.range(whole, t_last // N + 1):
        acc_MV, top_M, sum_M = process_tile(
            acc_MV, top_M, sum_M, tile, held_MA, held_MB, k, stride_k, v, stride_v, biases, lead, scale, t_M, t_first, t_last,
            first, window, end, True, CROSSING, EXTENTS, CUTS, L, NESTED, WINDOWED, BIASED, A2, B2, CAP, R, V, M, N, DV,
            PRECISION)  # fmt: skip
    if FIXED:
        top_M = tl.where(sum_M > 0, top_M, 0.0)
    acc_MV, top_M, sum_M = walk_zones(
        acc_MV, top_M, sum_M, held_MA, held_MB, q, row, ok_M, stride_q, k, stride_k, v, stride_v, biases, lead, scale,
        t_first, t_last, first, window, L1, L, EXTENTS, CUTS, L, NESTED, WINDOWED, BIASED,
        A2, B2, HOLD, FIXED, LEAST_RUN, CAP, R, V, M, N, DV, PRECISION)  # fmt: skip
    if A1 > 0:
        acc_MV, top_M, sum_M = walk_zones(
            acc_MV, top_M, sum_M, None, None, q, row, ok_M, stride_q, k, stride_k, v, stride_v, biases, lead, scale,
            t_first, t_last, first, window, 0, L1, EXTENTS, CUTS, L, NESTED, WINDOWED, BIASED,
            A1, B1, False, FIXED, LEAST_RUN, CAP, R, V, M, N, DV, PRECISION)  # fmt: skip
    if FIXED:
        large_M = sum_M + tl.sum(tl.abs(acc_MV), 1)  # NaN among them stays NaN
        tl.store(again, tl.sum(tl.where(large_M < MAX_SCORE, 0, 1), 0))
    some_M = sum_M > 0
    row_M = row_M.to(tl.int64) + tl.program_id(1).to(tl.int64) * T
    acc_MV = acc_MV / tl.where(some_M, sum_M, 1.0)[:, None]
    store_rows(out, row_M, acc_MV, ok_M, 0, DV, V)
    tl.store(lse + row_M, tl.where(some_M, top_M + tl.log2(tl.where(some_M, sum_M, 1.0)), -MIN_SCORE), mask=ok_M)
