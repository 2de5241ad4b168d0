"""Forward kernel of MLR attention, flash-style (Dao 2023, FlashAttention-2), and the base-2 log-sum-exp of its rows.

    out[t] = sum_s softmax_s(scaling sum_l [s >= low_l(t)] (q_l[t] . k_l[s] + bias_l)) v[s],    s <= t

kernels/mlr_attention/tiles.py defines low_l, zones and remaining tiles. In a zone, the dimensions of levels that are
not near are zeros of q, and products have a width of A + B that covers the dimensions of the zone's levels. The
remaining tiles and those at the diagonal are processed first.

A softmax does not depend on the number subtracted from its scores, as long as nothing overflows. After the remaining
tiles this is each query's largest score so far. Zones, which hold most of the work, keep it: exponents of float32 and
bfloat16 hold weights up to 2^100. A tile whose sums grow beyond MAX_SUM is computed again, with the largest score of
every tile. float16 has too small a range for it.

Eight levels are not faster than one, although they have fewer products: with 64 dimensions of score and of value, a
pair of tokens takes products of 64 + 64 dimensions; sliding extents T / 2, T / 4, .. need 42.4 + 64 on average and
nested ones 38.5 + 64, so products alone would be 1.20 and 1.25 times as fast. But the exponential of a pair takes as
long as a product of 64 dimensions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.mlr_attention.tiles import (
    MIN_SCORE,
    HeadInputs,
    Levels,
    TileSizes,
    Walk,
    count_remaining_tiles,
    first_position,
    head_position,
    load_rows,
    load_split,
    mask_split,
    pick_zone,
    remaining_tile,
    softcap,
    store_rows,
    tile_levels,
    tile_score,
    zone_score,
)

MAX_SUM = tl.constexpr(1e30)


@triton.jit
def identity_product(x_MD, D: tl.constexpr):
    """Return x times the identity: x in the register layout of a product's operand, where masking it needs no
    conversion.
    """
    dim_D = tl.arange(0, D)
    if x_MD.dtype == tl.float32:
        return x_MD
    return tl.dot(x_MD, (dim_D[:, None] == dim_D[None, :]).to(x_MD.dtype)).to(x_MD.dtype)


@triton.jit
def softmax_update(
    acc_MV, top_M, sum_M, score, bias, seen, v_NV, scale, MASKED: tl.constexpr, FIXED: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (acc, top, sum) of a running softmax in base 2 after one more tile: sum of weighted values (M, V), number
    subtracted from scores, sum of weights. FIXED: keep `top`, without a look at the tile's largest score."""
    log2_e: tl.constexpr = 1.4426950408889634
    if CAP > 0:
        score = softcap((score + bias) * (scale / CAP), CAP)
        factor = log2_e
        shift = 0.0
    else:
        factor = scale * log2_e
        shift = bias * factor
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
def process_zones(
    acc_MV, top_M, sum_M, held_MA, held_MB, row, ok_M, inputs, walk, Z0: tl.constexpr, Z1: tl.constexpr, levels, sizes,
    HELD: tl.constexpr, FIXED: tl.constexpr, MIN_RUN: tl.constexpr,
):  # fmt: skip
    """Return (acc, top, sum) after zones Z0 + 1 ..

    Z1, whose levels have at most A + B dimensions. HELD: q is in registers, else it is loaded in each zone.
    """
    for zone in tl.range(Z0 + 1, Z1 + 1, num_stages=1):
        start, count, dims = pick_zone(zone, walk, levels, Z0, Z1, sizes.N, MIN_RUN)
        bias = tl.load(inputs.biases + zone) if levels.biased else 0.0
        if HELD:
            q_MA, q_MB = mask_split(held_MA, held_MB, dims, sizes)
        else:
            q_MA, q_MB = load_split(inputs.q, row, inputs.stride_q, ok_M, sizes.M, sizes, True)
            if Z1 > Z0 + 1 or levels.cuts[Z1] < sizes.A + sizes.B:
                q_MA, q_MB = mask_split(q_MA, q_MB, dims, sizes)
        for tile in tl.range(start, start + count):
            slot = tile * sizes.N + inputs.lead
            k_NA, k_NB = load_split(inputs.k, slot, inputs.stride_k, ok_M, sizes.N, sizes, False)
            v_NV = load_rows(inputs.v, slot, inputs.stride_v, ok_M, sizes.N, sizes.DV, 0, sizes.V, False)
            score = zone_score(q_MA, q_MB, k_NA, k_NB, sizes)
            acc_MV, top_M, sum_M = softmax_update(
                acc_MV, top_M, sum_M, score, bias, None, v_NV, inputs.scale, False, FIXED, levels.cap, sizes.precision
            )
    return acc_MV, top_M, sum_M


@triton.jit
def process_tile(
    acc_MV, top_M, sum_M, tile, q_MA, q_MB, t_M, inputs, walk, MASKED: tl.constexpr, CROSSING: tl.constexpr, levels, sizes
):  # fmt: skip
    """Return (acc, top, sum) after a tile of any kind. MASKED: some query may not see some of the keys. CROSSING: as in
    `tile_score`."""
    s_N = tile * sizes.N + tl.arange(0, sizes.N)
    ok_N = (s_N >= walk.low) & (s_N < walk.end)
    slot = tile * sizes.N + inputs.lead
    k_NA, k_NB = load_split(inputs.k, slot, inputs.stride_k, ok_N, sizes.N, sizes, MASKED)
    v_NV = load_rows(inputs.v, slot, inputs.stride_v, ok_N, sizes.N, sizes.DV, 0, sizes.V, MASKED)
    full, reached, dims = tile_levels(tile * sizes.N, walk.first, walk.last, levels, sizes.N)
    score, bias = tile_score(
        q_MA, q_MB, k_NA, k_NB, s_N[None, :], t_M[:, None], full, reached, dims, inputs.biases, CROSSING, levels, sizes
    )
    seen = None
    if MASKED:
        low_M = first_position(t_M, walk.low, walk.window, 0, levels)
        seen = (s_N[None, :] <= t_M[:, None]) & (s_N[None, :] >= low_M[:, None])
    return softmax_update(
        acc_MV, top_M, sum_M, score, bias, seen, v_NV, inputs.scale, MASKED, False, levels.cap, sizes.precision
    )


@triton.jit
def forward_tile(
    out, again, lse, out_row, row, ok_M, t_M, inputs, walk, levels, sizes, far_sizes, Z1: tl.constexpr, MASKED: tl.constexpr,
    CROSSING: tl.constexpr, MIN_RUN: tl.constexpr, HOLD: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Compute and store a tile of queries. out_row: the head's first row in `out` and `lse`; row: the tile's first row
    in the head. sizes, far_sizes: of the zones beyond Z1, and of those up to Z1. The other arguments: as in
    `mlr_forward` and `process_tile`.
    """
    acc_MV = tl.zeros([sizes.M, sizes.DV], tl.float32)
    top_M = tl.full([sizes.M], MIN_SCORE, tl.float32)
    sum_M = tl.zeros([sizes.M], tl.float32)
    q_MA, q_MB = load_split(inputs.q, row, inputs.stride_q, ok_M, sizes.M, sizes, True)
    held_MA = identity_product(q_MA, sizes.A) if HOLD else q_MA
    held_MB = identity_product(q_MB, sizes.B) if HOLD and sizes.B > 0 else q_MB
    first_tile = first_position(walk.first, walk.low, walk.window, 0, levels) // sizes.N
    whole = tl.maximum(
        (walk.first + 1) // sizes.N, first_tile
    )  # the tiles before it are whole: all queries see all their keys
    if levels.count > 1 or MASKED:
        left = count_remaining_tiles(whole - first_tile, walk, levels, sizes.N, MIN_RUN)
        for i in tl.range(0, left):
            tile = remaining_tile(first_tile + i, walk, levels, sizes.N, MIN_RUN)
            acc_MV, top_M, sum_M = process_tile(
                acc_MV, top_M, sum_M, tile, held_MA, held_MB, t_M, inputs, walk, MASKED, CROSSING, levels, sizes
            )
    for tile in tl.range(whole, walk.last // sizes.N + 1):
        acc_MV, top_M, sum_M = process_tile(
            acc_MV, top_M, sum_M, tile, held_MA, held_MB, t_M, inputs, walk, True, CROSSING, levels, sizes
        )
    if FIXED:
        top_M = tl.where(sum_M > 0, top_M, 0.0)
    acc_MV, top_M, sum_M = process_zones(
        acc_MV, top_M, sum_M, held_MA, held_MB, row, ok_M, inputs, walk, Z1, levels.count, levels, sizes,
        HOLD, FIXED, MIN_RUN,
    )  # fmt: skip
    if far_sizes.A > 0:
        acc_MV, top_M, sum_M = process_zones(
            acc_MV, top_M, sum_M, None, None, row, ok_M, inputs, walk, 0, Z1, levels, far_sizes, False, FIXED, MIN_RUN
        )
    if FIXED:
        large_M = sum_M + tl.sum(tl.abs(acc_MV), 1)  # a NaN among them stays, and compares false
        tl.store(again, tl.sum(tl.where(large_M < MAX_SUM, 0, 1), 0))
    some_M = sum_M > 0
    at_M = (row + tl.arange(0, sizes.M)).to(tl.int64) + out_row
    acc_MV = acc_MV / tl.where(some_M, sum_M, 1.0)[:, None]
    store_rows(out, at_M, acc_MV, ok_M, 0, sizes.DV, sizes.V)
    tl.store(lse + at_M, tl.where(some_M, top_M + tl.log2(tl.where(some_M, sum_M, 1.0)), -MIN_SCORE), mask=ok_M)


@triton.jit
def mlr_forward(
    q, k, v, out, again, lse, ends, biases, scale, window, T, S, heads_per_row, heads_per_group,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kg, stride_k, stride_vb, stride_vg, stride_v, stride_end,
    EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr, A1: tl.constexpr, B1: tl.constexpr, L1: tl.constexpr,
    A2: tl.constexpr, B2: tl.constexpr,
    HOLES: tl.constexpr, WINDOWED: tl.constexpr, NESTED: tl.constexpr, BIASED: tl.constexpr, CAP: tl.constexpr,
    R: tl.constexpr, V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
    CROSSING: tl.constexpr, MIN_RUN: tl.constexpr, HOLD: tl.constexpr,
    FIXED: tl.constexpr, REDO: tl.constexpr,
):  # fmt: skip
    """Compute out_BHTV and lse_BHT of q_BHTR, k_BGSR, v_BGSV.

    Grid: (query tiles, B * H); a program computes one tile of queries.

    Zones up to L1 have at most A1 + B1 dimensions, the others A2 + B2. HOLES: rows end at ends_B. FIXED: zones keep the
    number that the other tiles subtracted, and `again` (B * H, tiles) tells where it was too small; a second launch,
    REDO, computes those tiles alone.
    """
    batch, head, group, end, lead, first_q, first = head_position(
        ends, stride_end, T, S, heads_per_row, heads_per_group, HOLES
    )
    # The last tiles see the most keys: they start first.
    t_first = tl.maximum(first_q, 0) // M * M + (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if t_first >= end:
        return
    lane = tl.program_id(1).to(tl.int64)
    if FIXED or REDO:
        again += lane * tl.num_programs(0) + tl.program_id(0)
    if REDO:  # noqa: SIM102  the outer condition is a compile-time constant
        if tl.load(again) == 0:
            return
    t_M = t_first + tl.arange(0, M)
    row = t_first - first_q
    ok_M = (t_M < end) & (row + tl.arange(0, M) >= 0)
    if BIASED:
        biases += head * (L + 1)
    forward_tile(
        out, again, lse, lane * T, row, ok_M, t_M,
        HeadInputs(
            q + (batch * stride_qb + head * stride_qh), stride_q, k + (batch * stride_kb + group * stride_kg), stride_k,
            v + (batch * stride_vb + group * stride_vg), stride_v, None, None, biases, scale, lead,
        ),
        Walk(t_first, tl.minimum(t_first + M, end) - 1, first, end, window, True),
        Levels(EXTENTS, CUTS, L, NESTED, WINDOWED, BIASED, CAP),
        TileSizes(M, N, A2, B2, R, DV, V, PRECISION), TileSizes(M, N, A1, B1, R, DV, V, PRECISION),
        L1, HOLES or WINDOWED, CROSSING, MIN_RUN, HOLD, FIXED,
    )  # fmt: skip
