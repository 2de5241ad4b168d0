"""Backward kernels of MLR attention; zones and remaining tiles as in kernels/mlr_attention/tiles.py.

    dS = scaling P (dO V^T - delta),  delta = <dO, O>     d bias_l = sum of dS over pairs near in level l
    dQ_l = sum over near keys of dS K_l                   dV = sum_t P dO     dK_l = sum over near queries of dS Q_l

`mlr_queries` walks keys past a tile of queries (dQ and d bias), `mlr_keys` walks queries past a tile of keys (dK and
dV). Seen from a key s, a level is near for queries before high_l(s) = s + extent_l (sliding) or the end of the key's
block (nested).

Zones are processed from the farthest to the nearest. Their products with dS take all dimensions. After each zone,
dimensions of levels that are not near in it are set to zero again, because no nearer zone has contributed to them yet.
The remaining tiles come last, one level at a time.

`out` is rounded, and so are the weights that made it, so that delta is off by an error eps of its query. Beside dS of
single pairs it is small. The pairs of d bias nearly cancel, and eps times their weights would be percents of it in
bfloat16. The weights of a row sum to 1, so that eps is the sum of the row's dS: known at the end, where its
contribution is subtracted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.mlr_attention.tiles import (
    HeadInputs,
    Levels,
    TileSizes,
    Walk,
    add_bias_gradients,
    add_zone_gradients,
    count_remaining_tiles,
    first_position,
    head_position,
    last_query,
    load_rows,
    load_split,
    mask_split,
    pick_zone,
    remaining_tile,
    score_gradients,
    store_rows,
    store_split,
    tile_gradients,
    tile_levels,
    tile_score,
    zone_score,
)


# -- queries ---------------------------------------------------------------------------------------
@triton.jit
def query_zones(
    dq_MA, dq_MB, eps_M, row, ok_M, do_MV, lse_M, delta_M, dbiases, masses, T, inputs, walk,
    Z0: tl.constexpr, Z1: tl.constexpr, levels, sizes, DBIAS: tl.constexpr,
):  # fmt: skip
    """Return (dq, eps) after zones Z0 + 1 .. Z1, whose levels have at most A + B dimensions; dq in two parts."""
    for zone in tl.range(Z0 + 1, Z1 + 1, num_stages=1):
        start, count, dims = pick_zone(zone, walk, levels, Z0, Z1, sizes.N, 1)
        bias = tl.load(inputs.biases + zone) if levels.biased else 0.0
        q_MA, q_MB = load_split(inputs.q, row, inputs.stride_q, ok_M, sizes.M, sizes, True)
        q_MA, q_MB = mask_split(q_MA, q_MB, dims, sizes)
        total_M = tl.zeros([sizes.M], tl.float32)
        mass_M = tl.zeros([sizes.M], tl.float32)
        for tile in tl.range(start, start + count):
            slot = tile * sizes.N + inputs.lead
            k_NA, k_NB = load_split(inputs.k, slot, inputs.stride_k, ok_M, sizes.N, sizes, False)
            v_NV = load_rows(inputs.v, slot, inputs.stride_v, ok_M, sizes.N, sizes.DV, 0, sizes.V, False)
            score = zone_score(q_MA, q_MB, k_NA, k_NB, sizes)
            dweight = tl.dot(do_MV, tl.trans(v_NV), input_precision=sizes.precision)
            weight, dcapped, cap_slope = score_gradients(
                score, bias, lse_M[:, None], dweight, delta_M[:, None], None, inputs.scale, False, levels.cap
            )
            if DBIAS:
                total_M += tl.sum(dcapped * cap_slope, 1)
                mass_M += tl.sum(weight * cap_slope, 1)
                if levels.cap > 0:
                    eps_M += tl.sum(dcapped, 1)
            dscore = (dcapped * cap_slope).to(k_NA.dtype)
            dq_MA, dq_MB = add_zone_gradients(dq_MA, dq_MB, dscore, k_NA, k_NB, sizes)
        dq_MA, dq_MB = mask_split(dq_MA, dq_MB, dims, sizes)
        if DBIAS:
            tl.atomic_add(dbiases + zone, tl.sum(total_M, 0))
            tl.atomic_add(masses + zone * T + row + tl.arange(0, sizes.M), mass_M, ok_M, sem="relaxed")
            if levels.cap == 0:
                eps_M += total_M
    return dq_MA, dq_MB, eps_M


@triton.jit
def query_remaining_tiles(
    dq_MA, dq_MB, eps_M, row, ok_M, t_M, do_MV, lse_M, delta_M, dbiases, masses, T, inputs, walk, CROSSING: tl.constexpr,
    levels, sizes, DBIAS: tl.constexpr,
):  # fmt: skip
    """Return (dq, eps) after the tiles of no zone."""
    row_M = row + tl.arange(0, sizes.M)
    q_MA, q_MB = load_split(inputs.q, row, inputs.stride_q, ok_M, sizes.M, sizes, True)
    first_tile = first_position(walk.first, walk.low, walk.window, 0, levels) // sizes.N
    left = count_remaining_tiles(walk.last // sizes.N + 1 - first_tile, walk, levels, sizes.N, 1)
    for i in tl.range(0, left):
        tile = remaining_tile(first_tile + i, walk, levels, sizes.N, 1)
        s_N = tile * sizes.N + tl.arange(0, sizes.N)
        ok_N = (s_N >= walk.low) & (s_N < walk.end)
        slot = tile * sizes.N + inputs.lead
        k_NA, k_NB = load_split(inputs.k, slot, inputs.stride_k, ok_N, sizes.N, sizes, True)
        v_NV = load_rows(inputs.v, slot, inputs.stride_v, ok_N, sizes.N, sizes.DV, 0, sizes.V, True)
        full, reached, dims = tile_levels(tile * sizes.N, walk.first, walk.last, levels, sizes.N)
        score, bias = tile_score(
            q_MA,
            q_MB,
            k_NA,
            k_NB,
            s_N[None, :],
            t_M[:, None],
            full,
            reached,
            dims,
            inputs.biases,
            CROSSING,
            levels,
            sizes,
        )
        dweight = tl.dot(do_MV, tl.trans(v_NV), input_precision=sizes.precision)
        low_M = first_position(t_M, walk.low, walk.window, 0, levels)
        seen = (s_N[None, :] <= t_M[:, None]) & (s_N[None, :] >= low_M[:, None])
        weight, dcapped, cap_slope = score_gradients(
            score, bias, lse_M[:, None], dweight, delta_M[:, None], seen, inputs.scale, True, levels.cap
        )
        if DBIAS:
            eps_M += tl.sum(dcapped, 1)
            add_bias_gradients(
                dcapped * cap_slope, weight * cap_slope, s_N[None, :], t_M[:, None], full, reached, dbiases, masses + row_M,
                ok_M, T, levels,
            )  # fmt: skip
        dq_MA, dq_MB = tile_gradients(
            dq_MA,
            dq_MB,
            dcapped * cap_slope,
            k_NA,
            k_NB,
            s_N[None, :],
            t_M[:, None],
            full,
            reached,
            dims,
            levels,
            sizes,
        )
    return dq_MA, dq_MB, eps_M


@triton.jit
def query_tile(
    out, lse, delta, dq, dbiases, masses, out_row, row, ok_M, t_M, T, inputs, walk, levels, sizes, narrow_sizes,
    Z1: tl.constexpr, CROSSING: tl.constexpr, DBIAS: tl.constexpr,
):  # fmt: skip
    """Compute and store dq and delta of a tile of queries, and add to dbiases. out_row: the head's first row in `out`,
    `lse`, `delta` and `dq`; row: the tile's first row in the head. sizes, narrow_sizes: of the zones beyond Z1, and of
    those up to Z1.
    """
    row_M = row + tl.arange(0, sizes.M)
    at_M = row_M.to(tl.int64) + out_row
    do_MV = load_rows(inputs.dout, row, inputs.stride_d, ok_M, sizes.M, sizes.DV, 0, sizes.V, True)
    out_MV = load_rows(out + out_row * sizes.V, row, sizes.V, ok_M, sizes.M, sizes.DV, 0, sizes.V, True)
    delta_M = tl.sum(do_MV.to(tl.float32) * out_MV.to(tl.float32), 1)
    tl.store(delta + at_M, delta_M, mask=ok_M)
    lse_M = tl.load(lse + at_M, mask=ok_M, other=1e30)
    dq_MA = tl.zeros([sizes.M, sizes.A], tl.float32)
    dq_MB = tl.zeros([sizes.M, sizes.B], tl.float32) if sizes.B > 0 else dq_MA
    eps_M = tl.zeros([sizes.M], tl.float32)
    if sizes.B > 0 and Z1 > 0:
        dq_MA, _, eps_M = query_zones(
            dq_MA, dq_MA, eps_M, row, ok_M, do_MV, lse_M, delta_M, dbiases, masses, T, inputs, walk, 0, Z1, levels, narrow_sizes, DBIAS
        )  # fmt: skip
    dq_MA, dq_MB, eps_M = query_zones(
        dq_MA, dq_MB, eps_M, row, ok_M, do_MV, lse_M, delta_M, dbiases, masses, T, inputs, walk,
        Z1 if sizes.B > 0 else 0, levels.count, levels, sizes, DBIAS,
    )  # fmt: skip
    dq_MA, dq_MB, eps_M = query_remaining_tiles(
        dq_MA, dq_MB, eps_M, row, ok_M, t_M, do_MV, lse_M, delta_M, dbiases, masses, T, inputs, walk, CROSSING, levels, sizes, DBIAS
    )  # fmt: skip
    if DBIAS:
        tl.debug_barrier()  # every thread's atomic additions to masses come before
        for z in tl.static_range(1, levels.count + 1):
            mass_M = tl.load(masses + z * T + row_M, mask=ok_M, other=0.0, cache_modifier=".cg")
            tl.atomic_add(dbiases + z, -tl.sum(eps_M * mass_M, 0))
    store_split(dq, at_M, dq_MA * inputs.scale, dq_MB * inputs.scale, ok_M, sizes)


@triton.jit
def mlr_queries(
    q, k, v, out, dout, lse, delta, dq, ends, biases, dbiases, masses, scale, window, T, S, heads_per_row, heads_per_group,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kg, stride_k, stride_vb, stride_vg, stride_v, stride_db, stride_dh,
    stride_d, stride_end,
    EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr, A: tl.constexpr, B: tl.constexpr, L1: tl.constexpr,
    HOLES: tl.constexpr, WINDOWED: tl.constexpr, NESTED: tl.constexpr, BIASED: tl.constexpr, DBIAS: tl.constexpr,
    CAP: tl.constexpr, R: tl.constexpr, V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr, CROSSING: tl.constexpr,
):  # fmt: skip
    """Compute dq_BHTR, delta_BHT and, per query tile i, dbiases_BHiZ.

    Grid: (query tiles, B * H); a program computes one tile of queries.

    Zones up to L1 have at most A dimensions, the others A + B. masses_BHZT: the weights of pairs near in z levels;
    zeros before the launch.
    """
    batch, head, group, end, lead, first_q, first = head_position(
        ends, stride_end, T, S, heads_per_row, heads_per_group, HOLES
    )
    t_first = tl.maximum(first_q, 0) // M * M + (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if t_first >= end:
        return
    t_M = t_first + tl.arange(0, M)
    row = t_first - first_q
    ok_M = (t_M < end) & (row + tl.arange(0, M) >= 0)
    lane = tl.program_id(1).to(tl.int64)
    if BIASED:
        biases += head * (L + 1)
    if DBIAS:
        dbiases += (lane * tl.num_programs(0) + tl.program_id(0)) * (L + 1)
        masses += lane * T * (L + 1)
    query_tile(
        out, lse, delta, dq, dbiases, masses, lane * T, row, ok_M, t_M, T,
        HeadInputs(
            q + (batch * stride_qb + head * stride_qh), stride_q, k + (batch * stride_kb + group * stride_kg), stride_k,
            v + (batch * stride_vb + group * stride_vg), stride_v, dout + (batch * stride_db + head * stride_dh), stride_d,
            biases, scale, lead,
        ),
        Walk(t_first, tl.minimum(t_first + M, end) - 1, first, end, window, True),
        Levels(EXTENTS, CUTS, L, NESTED, WINDOWED, BIASED, CAP),
        TileSizes(M, N, A, B, R, DV, V, PRECISION), TileSizes(M, N, A, 0, R, DV, V, PRECISION), L1, CROSSING, DBIAS,
    )  # fmt: skip


# -- keys ------------------------------------------------------------------------------------------
@triton.jit
def key_zones(
    dk_NA, dk_NB, dv_NV, slot, ok_N, v_NV, lse, delta, first_q, inputs, walk, Z0: tl.constexpr, Z1: tl.constexpr, levels, sizes
):  # fmt: skip
    """Return (dk, dv) after zones Z0 + 1 .. Z1, whose levels have at most A + B dimensions; dk in two parts."""
    for zone in tl.range(Z0 + 1, Z1 + 1, num_stages=1):
        start, count, dims = pick_zone(zone, walk, levels, Z0, Z1, sizes.M, 1)
        bias = tl.load(inputs.biases + zone) if levels.biased else 0.0
        k_NA, k_NB = load_split(inputs.k, slot, inputs.stride_k, ok_N, sizes.N, sizes, True)
        k_NA, k_NB = mask_split(k_NA, k_NB, dims, sizes)
        for tile in tl.range(start, start + count):
            row = tile * sizes.M - first_q
            q_MA, q_MB = load_split(inputs.q, row, inputs.stride_q, ok_N, sizes.M, sizes, False)
            score = zone_score(k_NA, k_NB, q_MA, q_MB, sizes)
            do_MV = load_rows(inputs.dout, row, inputs.stride_d, ok_N, sizes.M, sizes.DV, 0, sizes.V, False)
            lse_M = tl.load(lse + row + tl.arange(0, sizes.M))
            delta_M = tl.load(delta + row + tl.arange(0, sizes.M))
            dweight = tl.dot(v_NV, tl.trans(do_MV), input_precision=sizes.precision)
            weight, dcapped, cap_slope = score_gradients(
                score, bias, lse_M[None, :], dweight, delta_M[None, :], None, inputs.scale, False, levels.cap
            )
            dv_NV = tl.dot(weight.to(do_MV.dtype), do_MV, dv_NV, input_precision=sizes.precision)
            dscore = (dcapped * cap_slope).to(q_MA.dtype)
            dk_NA, dk_NB = add_zone_gradients(dk_NA, dk_NB, dscore, q_MA, q_MB, sizes)
        dk_NA, dk_NB = mask_split(dk_NA, dk_NB, dims, sizes)
    return dk_NA, dk_NB, dv_NV


@triton.jit
def key_remaining_tiles(
    dk_NA, dk_NB, dv_NV, slot, ok_N, s_N, v_NV, lse, delta, first_q, first, inputs, walk, CROSSING: tl.constexpr, levels, sizes
):  # fmt: skip
    """Return (dk, dv) after the tiles of no zone. first: the first position that holds a key."""
    k_NA, k_NB = load_split(inputs.k, slot, inputs.stride_k, ok_N, sizes.N, sizes, True)
    first_tile = tl.maximum(walk.first, walk.low) // sizes.M
    tiles = (last_query(walk.last, walk.end, walk.window, 0, levels) + sizes.M - 1) // sizes.M - first_tile
    left = count_remaining_tiles(tiles, walk, levels, sizes.M, 1)
    for i in tl.range(0, left):
        tile = remaining_tile(first_tile + i, walk, levels, sizes.M, 1)
        t_M = tile * sizes.M + tl.arange(0, sizes.M)
        ok_M = (t_M >= walk.low) & (t_M < walk.end)
        row = tile * sizes.M - first_q
        q_MA, q_MB = load_split(inputs.q, row, inputs.stride_q, ok_M, sizes.M, sizes, True)
        do_MV = load_rows(inputs.dout, row, inputs.stride_d, ok_M, sizes.M, sizes.DV, 0, sizes.V, True)
        lse_M = tl.load(lse + row + tl.arange(0, sizes.M), mask=ok_M, other=1e30)
        delta_M = tl.load(delta + row + tl.arange(0, sizes.M), mask=ok_M, other=0.0)
        t_last = tl.minimum((tile + 1) * sizes.M, walk.end) - 1
        full, reached, dims = tile_levels(walk.first, tile * sizes.M, t_last, levels, sizes.N)
        score, bias = tile_score(
            k_NA,
            k_NB,
            q_MA,
            q_MB,
            s_N[:, None],
            t_M[None, :],
            full,
            reached,
            dims,
            inputs.biases,
            CROSSING,
            levels,
            sizes,
        )
        dweight = tl.dot(v_NV, tl.trans(do_MV), input_precision=sizes.precision)
        low_M = first_position(t_M, first, walk.window, 0, levels)
        seen = (s_N[:, None] <= t_M[None, :]) & (s_N[:, None] >= low_M[None, :])
        weight, dcapped, cap_slope = score_gradients(
            score, bias, lse_M[None, :], dweight, delta_M[None, :], seen, inputs.scale, True, levels.cap
        )
        dv_NV = tl.dot(weight.to(do_MV.dtype), do_MV, dv_NV, input_precision=sizes.precision)
        dk_NA, dk_NB = tile_gradients(
            dk_NA,
            dk_NB,
            dcapped * cap_slope,
            q_MA,
            q_MB,
            s_N[:, None],
            t_M[None, :],
            full,
            reached,
            dims,
            levels,
            sizes,
        )
    return dk_NA, dk_NB, dv_NV


@triton.jit
def key_tile(
    lse, delta, dk, dv, out_slot, slot, ok_N, s_N, first_q, first, inputs, walk, levels, sizes, narrow_sizes,
    Z1: tl.constexpr, CROSSING: tl.constexpr,
):  # fmt: skip
    """Compute and store dk and dv of a tile of keys. out_slot: the head's first slot in `dk` and `dv`; slot: the tile's
    first slot in the head. sizes, narrow_sizes: of the zones beyond Z1, and of those up to Z1."""
    v_NV = load_rows(inputs.v, slot, inputs.stride_v, ok_N, sizes.N, sizes.DV, 0, sizes.V, True)
    dk_NA = tl.zeros([sizes.N, sizes.A], tl.float32)
    dk_NB = tl.zeros([sizes.N, sizes.B], tl.float32) if sizes.B > 0 else dk_NA
    dv_NV = tl.zeros([sizes.N, sizes.DV], tl.float32)
    if sizes.B > 0 and Z1 > 0:
        dk_NA, _, dv_NV = key_zones(
            dk_NA, dk_NA, dv_NV, slot, ok_N, v_NV, lse, delta, first_q, inputs, walk, 0, Z1, levels, narrow_sizes
        )
    dk_NA, dk_NB, dv_NV = key_zones(
        dk_NA, dk_NB, dv_NV, slot, ok_N, v_NV, lse, delta, first_q, inputs, walk,
        Z1 if sizes.B > 0 else 0, levels.count, levels, sizes,
    )  # fmt: skip
    dk_NA, dk_NB, dv_NV = key_remaining_tiles(
        dk_NA, dk_NB, dv_NV, slot, ok_N, s_N, v_NV, lse, delta, first_q, first, inputs, walk, CROSSING, levels, sizes
    )
    at_N = out_slot + s_N + inputs.lead
    store_split(dk, at_N, dk_NA * inputs.scale, dk_NB * inputs.scale, ok_N, sizes)
    store_rows(dv, at_N, dv_NV, ok_N, 0, sizes.DV, sizes.V)


@triton.jit
def mlr_keys(
    q, k, v, dout, lse, delta, dk, dv, ends, biases, scale, window, T, S, heads_per_row, heads_per_group,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kg, stride_k, stride_vb, stride_vg, stride_v, stride_db, stride_dh,
    stride_d, stride_end,
    EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr, A: tl.constexpr, B: tl.constexpr, L1: tl.constexpr,
    HOLES: tl.constexpr, WINDOWED: tl.constexpr, NESTED: tl.constexpr, BIASED: tl.constexpr, CAP: tl.constexpr,
    R: tl.constexpr, V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
    CROSSING: tl.constexpr,
):  # fmt: skip
    """Compute dk_BHSR and dv_BHSV, per query head.

    Grid: (key tiles, B * H); a program computes one tile of keys for one query head. Zones up to L1 have at most A
    dimensions, the others A + B.
    """
    batch, head, group, end, lead, first_q, first = head_position(
        ends, stride_end, T, S, heads_per_row, heads_per_group, HOLES
    )
    s_first = first // N * N + tl.program_id(0) * N  # the first keys, which most queries see, start first
    if s_first >= end:
        return
    s_N = s_first + tl.arange(0, N)
    ok_N = (s_N >= first) & (s_N < end)
    lane = tl.program_id(1).to(tl.int64)
    if BIASED:
        biases += head * (L + 1)
    key_tile(
        lse + lane * T, delta + lane * T, dk, dv, lane * S, s_first + lead, ok_N, s_N, first_q, first,
        HeadInputs(
            q + (batch * stride_qb + head * stride_qh), stride_q, k + (batch * stride_kb + group * stride_kg), stride_k,
            v + (batch * stride_vb + group * stride_vg), stride_v, dout + (batch * stride_db + head * stride_dh), stride_d,
            biases, scale, lead,
        ),
        Walk(s_first, tl.minimum(s_first + N, end) - 1, tl.maximum(first_q, 0), end, window, False),
        Levels(EXTENTS, CUTS, L, NESTED, WINDOWED, BIASED, CAP),
        TileSizes(M, N, A, B, R, DV, V, PRECISION), TileSizes(M, N, A, 0, R, DV, V, PRECISION), L1, CROSSING,
    )  # fmt: skip
