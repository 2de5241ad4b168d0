"""Gradients of MLR attention for queries and for the numbers added to near scores; zones as in kernels/mlr_attention/forward.py.

    dS = scaling P (dO V^T - delta),  delta = sum_v dO O        dQ_l = sum over near pairs of dS K_l        d bias_l = sum dS
Zones are walked from the farthest to the nearest. dS K is made whole, and after each zone the dims of levels that it has
not are set to zero again: nothing of theirs has come yet. Tiles where a level begins come last, each level by itself.

delta from an `out` whose weights and itself were rounded is off by an eps of its query. That is small beside dS of single
pairs, but d bias, whose pairs nearly cancel, is off by eps times their weights: percents in bfloat16. The weights of a row
sum to 1, so eps is the sum of its dS: it is known at the end, and what it gave is taken off again.

Gradients of MLR attention for keys and values: a tile of keys against the queries that see it.

    dV = sum_t P dO        dK_l = sum over near t of dS Q_l
Seen from a key s, a level is near for queries before high_l(s) = s + extent_l (sliding) or the end of the key's block
(nested). Zones of query tiles, farthest first, and then the tiles left, as in kernels/mlr_attention/backward.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.mlr_attention.tiles import (
    add_bias_gradients,
    add_product,
    count_remaining_tiles,
    first_position,
    load_rows,
    mask_dims,
    pick_zone,
    remaining_tile,
    softcap,
    store_rows,
    tile_gradients,
    tile_levels,
    tile_score,
)


@triton.jit
def score_gradients(score, shift, lse, pull, delta, seen, scale, MASKED: tl.constexpr, CAP: tl.constexpr):
    """(weights, gradient of scaled scores before a cap, what the cap takes it times) where `pull` is dO V^T."""
    unit: tl.constexpr = 1.4426950408889634
    if CAP > 0:
        score = softcap((score + shift) * (scale / CAP), CAP)
        weight = tl.exp2(score * unit - lse)
    else:
        weight = tl.exp2(score * (scale * unit) - (lse - shift * (scale * unit)))
    if MASKED:
        weight = tl.where(seen, weight, 0.0)
    bend = 1.0
    if CAP > 0:
        bend = 1 - (score / CAP) * (score / CAP)
    return weight, weight * (pull - delta), bend


@triton.jit
def walk_keys(
    dq_MA, dq_MB, eps_M, q, q_row, q_ok_M, stride_q, do_MV, lse_M, delta_M, k, stride_k, v, stride_v, biases, dbiases,
    masses, T, lead, scale, t_first, t_last, first, window, Z0: tl.constexpr, Z1: tl.constexpr, EXTENTS: tl.constexpr, CUTS: tl.constexpr,
    L: tl.constexpr, NESTED: tl.constexpr, WINDOWED: tl.constexpr, BIASED: tl.constexpr, DBIAS: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, CAP: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Zones Z0 + 1 .. Z1, of at most A + B dims."""
    for zone in tl.range(Z0 + 1, Z1 + 1, num_stages=1):
        start, count, dims = pick_zone(
            zone, t_first, t_last, first, window, Z0, Z1, EXTENTS, CUTS, L, NESTED, WINDOWED, N, 1
        )
        bias = tl.load(biases + zone) if BIASED else 0.0
        q_MA = mask_dims(load_rows(q, q_row, stride_q, q_ok_M, M, A, 0, R, True), 0, dims, 0, A)
        q_MB = mask_dims(load_rows(q, q_row, stride_q, q_ok_M, M, B, A, R, True), 0, dims, A, B) if B > 0 else q_MA
        total_M = tl.zeros([M], tl.float32)
        mass_M = tl.zeros([M], tl.float32)
        for tile in tl.range(start, start + count):
            k_NA = load_rows(k, tile * N + lead, stride_k, q_ok_M, N, A, 0, R, False)
            v_NV = load_rows(v, tile * N + lead, stride_v, q_ok_M, N, DV, 0, V, False)
            k_NB = load_rows(k, tile * N + lead, stride_k, q_ok_M, N, B, A, R, False) if B > 0 else k_NA
            score = add_product(tl.zeros([M, N], tl.float32), q_MA, q_MB, k_NA, k_NB, 0, R, A, B, True, PRECISION)
            pull = tl.dot(do_MV, tl.trans(v_NV), input_precision=PRECISION)
            weight, bare, bend = score_gradients(
                score, bias, lse_M[:, None], pull, delta_M[:, None], None, scale, False, CAP
            )
            if DBIAS:
                total_M += tl.sum(bare * bend, 1)
                mass_M += tl.sum(weight * bend, 1)
                if CAP > 0:
                    eps_M += tl.sum(bare, 1)
            slope = (bare * bend).to(k_NA.dtype)
            dq_MA = tl.dot(slope, k_NA, dq_MA, input_precision=PRECISION)
            if B > 0:
                dq_MB = tl.dot(slope, k_NB, dq_MB, input_precision=PRECISION)
        dq_MA = mask_dims(dq_MA, 0, dims, 0, A)
        if B > 0:
            dq_MB = mask_dims(dq_MB, 0, dims, A, B)
        if DBIAS:
            tl.atomic_add(dbiases + zone, tl.sum(total_M, 0))
            tl.atomic_add(masses + zone * T + q_row + tl.arange(0, M), mass_M, q_ok_M, sem="relaxed")
            if CAP == 0:
                eps_M += total_M
    return dq_MA, dq_MB, eps_M


@triton.jit
def mlr_queries(
    q, k, v, out, dout, lse, delta, dq, ends, biases, dbiases, masses, scale, window, T, S, HEADS, SHARING,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kg, stride_k, stride_vb, stride_vg, stride_v, stride_db, stride_dh,
    stride_d, stride_end,
    EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr, A: tl.constexpr, B: tl.constexpr, L1: tl.constexpr,
    HOLES: tl.constexpr, WINDOWED: tl.constexpr, NESTED: tl.constexpr, BIASED: tl.constexpr, DBIAS: tl.constexpr,
    CAP: tl.constexpr, R: tl.constexpr, V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DV: tl.constexpr,
    PRECISION: tl.constexpr, CROSSING: tl.constexpr,
):  # fmt: skip
    """dq and delta of a tile of queries of one head. Zones up to L1 have at most A dims, the others A + B. masses_ZT: the
    weights of pairs with z levels, zeros at first."""
    batch, head = (tl.program_id(1) // HEADS).to(tl.int64), (tl.program_id(1) % HEADS).to(tl.int64)
    group = head // SHARING
    end = tl.load(ends + batch * stride_end).to(tl.int32) if HOLES else S
    lead = S - end
    first_q = end - T
    first = tl.maximum(-lead, 0)
    t_first = tl.maximum(first_q, 0) // M * M + (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if t_first >= end:
        return
    t_last = tl.minimum(t_first + M, end) - 1
    t_M = t_first + tl.arange(0, M)
    row = t_first - first_q
    row_M = row + tl.arange(0, M)
    ok_M = (t_M < end) & (row_M >= 0)
    at_M = row_M.to(tl.int64) + tl.program_id(1).to(tl.int64) * T
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + group * stride_kg
    v += batch * stride_vb + group * stride_vg
    dout += batch * stride_db + head * stride_dh
    if BIASED:
        biases += head * (L + 1)
    if DBIAS:
        dbiases += (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * (L + 1)
        masses += tl.program_id(1).to(tl.int64) * T * (L + 1)
    do_MV = load_rows(dout, row, stride_d, ok_M, M, DV, 0, V, True)
    out_MV = load_rows(out + tl.program_id(1).to(tl.int64) * T * V, row, V, ok_M, M, DV, 0, V, True)
    delta_M = tl.sum(do_MV.to(tl.float32) * out_MV.to(tl.float32), 1)
    tl.store(delta + at_M, delta_M, mask=ok_M)
    lse_M = tl.load(lse + at_M, mask=ok_M, other=1e30)
    dq_MA = tl.zeros([M, A], tl.float32)
    dq_MB = tl.zeros([M, B], tl.float32) if B > 0 else dq_MA
    eps_M = tl.zeros([M], tl.float32)
    if B > 0 and L1 > 0:
        dq_MA, _, eps_M = walk_keys(
            dq_MA, dq_MA, eps_M, q, row, ok_M, stride_q, do_MV, lse_M, delta_M, k, stride_k, v, stride_v, biases, dbiases,
            masses, T, lead, scale, t_first, t_last, first, window, 0, L1, EXTENTS, CUTS, L, NESTED, WINDOWED, BIASED, DBIAS,
            A, 0, CAP, R, V, M, N, DV, PRECISION)  # fmt: skip
    dq_MA, dq_MB, eps_M = walk_keys(
        dq_MA, dq_MB, eps_M, q, row, ok_M, stride_q, do_MV, lse_M, delta_M, k, stride_k, v, stride_v, biases, dbiases,
        masses, T, lead, scale, t_first, t_last, first, window, L1 if B > 0 else 0, L, EXTENTS, CUTS, L, NESTED, WINDOWED, BIASED, DBIAS,
        A, B, CAP, R, V, M, N, DV, PRECISION)  # fmt: skip
    q_MA = load_rows(q, row, stride_q, ok_M, M, A, 0, R, True)
    q_MB = load_rows(q, row, stride_q, ok_M, M, B, A, R, True) if B > 0 else q_MA
    tile_first = first_position(t_first, first, window, 0, EXTENTS, NESTED, WINDOWED) // N
    left = count_remaining_tiles(
        t_last // N + 1 - tile_first, t_first, t_last, first, window, EXTENTS, L, NESTED, WINDOWED, N, 1
    )
    for at in tl.range(0, left):
        tile = remaining_tile(tile_first + at, t_first, t_last, first, window, EXTENTS, L, NESTED, WINDOWED, N, 1)
        s_N = tile * N + tl.arange(0, N)
        ok_N = (s_N >= first) & (s_N < end)
        k_NA = load_rows(k, tile * N + lead, stride_k, ok_N, N, A, 0, R, True)
        k_NB = load_rows(k, tile * N + lead, stride_k, ok_N, N, B, A, R, True) if B > 0 else k_NA
        v_NV = load_rows(v, tile * N + lead, stride_v, ok_N, N, DV, 0, V, True)
        full, reached, dims = tile_levels(tile * N, t_first, t_last, window, EXTENTS, CUTS, L, NESTED, N)
        score, bias = tile_score(
            q_MA, q_MB, k_NA, k_NB, s_N[None, :], t_M[:, None], full, reached, dims, biases,
            CROSSING, EXTENTS, CUTS, L, NESTED, BIASED, A, B, PRECISION)  # fmt: skip
        pull = tl.dot(do_MV, tl.trans(v_NV), input_precision=PRECISION)
        low_M = first_position(t_M, first, window, 0, EXTENTS, NESTED, WINDOWED)
        seen = (s_N[None, :] <= t_M[:, None]) & (s_N[None, :] >= low_M[:, None])
        weight, bare, bend = score_gradients(
            score, bias, lse_M[:, None], pull, delta_M[:, None], seen, scale, True, CAP
        )
        if DBIAS:
            eps_M += tl.sum(bare, 1)
            add_bias_gradients(
                bare * bend, weight * bend, s_N[None, :], t_M[:, None], full, reached, dbiases, masses + row_M, ok_M, T,
                EXTENTS, CUTS, L, NESTED)  # fmt: skip
        dq_MA, dq_MB = tile_gradients(
            dq_MA, dq_MB, bare * bend, k_NA, k_NB, s_N[None, :], t_M[:, None], full, reached, dims,
            EXTENTS, CUTS, L, NESTED, A, B, PRECISION)  # fmt: skip
    if DBIAS:
        tl.debug_barrier()  # all masses are there
        for z in tl.static_range(1, L + 1):
            mass_M = tl.load(masses + z * T + row_M, mask=ok_M, other=0.0, cache_modifier=".cg")
            tl.atomic_add(dbiases + z, -tl.sum(eps_M * mass_M, 0))
    store_rows(dq, at_M, dq_MA * scale, ok_M, 0, A, R)
    if B > 0:
        store_rows(dq, at_M, dq_MB * scale, ok_M, A, B, R)


@triton.jit
def last_query(
    s, end, window, level: tl.constexpr, EXTENTS: tl.constexpr, NESTED: tl.constexpr, WINDOWED: tl.constexpr
):
    """Behind the last query that has the level with key s; level 0: that sees s."""
    high = s * 0 + end
    if WINDOWED:
        high = tl.minimum(s + window, high)
    if level > 0:
        extent: tl.constexpr = EXTENTS[level]
        high = tl.minimum((s // extent + 1) * extent if NESTED else s + extent, high)
    return high


@triton.jit
def zone_queries(
    zone: tl.constexpr, s_first, s_last, t_least, end, window,
    EXTENTS: tl.constexpr, L: tl.constexpr, NESTED: tl.constexpr, WINDOWED: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """A zone's first query tile, and how many there are."""
    start = s_last if zone == L else last_query(s_last, end, window, zone, EXTENTS, NESTED, WINDOWED)
    start = (tl.maximum(start, t_least) + M - 1) // M
    stop = last_query(s_first, end, window, zone - 1, EXTENTS, NESTED, WINDOWED) // M
    return start, tl.maximum(stop - start, 0)


@triton.jit
def walk_queries(
    dk_NA, dk_NB, dv_NV, k_at, k_row, ok_N, stride_k, v_NV, q, stride_q, dout, stride_d, lse, delta, biases, first_q, scale,
    s_first, s_last, t_least, end, window, Z0: tl.constexpr, Z1: tl.constexpr, EXTENTS: tl.constexpr, CUTS: tl.constexpr,
    L: tl.constexpr, NESTED: tl.constexpr, WINDOWED: tl.constexpr, BIASED: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, CAP: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Zones Z0 + 1 .. Z1, of at most A + B dims."""
    for zone in tl.range(Z0 + 1, Z1 + 1, num_stages=1):
        start, count, dims = 0, 0, 0
        for z in tl.static_range(Z0 + 1, Z1 + 1):
            z_start, z_count = zone_queries(z, s_first, s_last, t_least, end, window, EXTENTS, L, NESTED, WINDOWED, M)
            start = tl.where(zone == z, z_start, start)
            count = tl.where(zone == z, z_count, count)
            dims = tl.where(zone == z, CUTS[z], dims)
        bias = tl.load(biases + zone) if BIASED else 0.0
        k_NA = mask_dims(load_rows(k_at, k_row, stride_k, ok_N, N, A, 0, R, True), 0, dims, 0, A)
        k_NB = mask_dims(load_rows(k_at, k_row, stride_k, ok_N, N, B, A, R, True), 0, dims, A, B) if B > 0 else k_NA
        for tile in tl.range(start, start + count):
            row = tile * M - first_q
            q_MA = load_rows(q, row, stride_q, ok_N, M, A, 0, R, False)
            q_MB = load_rows(q, row, stride_q, ok_N, M, B, A, R, False) if B > 0 else q_MA
            score = add_product(tl.zeros([N, M], tl.float32), k_NA, k_NB, q_MA, q_MB, 0, R, A, B, True, PRECISION)
            do_MV = load_rows(dout, row, stride_d, ok_N, M, DV, 0, V, False)
            lse_M = tl.load(lse + row + tl.arange(0, M))
            delta_M = tl.load(delta + row + tl.arange(0, M))
            pull = tl.dot(v_NV, tl.trans(do_MV), input_precision=PRECISION)
            weight, bare, bend = score_gradients(
                score, bias, lse_M[None, :], pull, delta_M[None, :], None, scale, False, CAP
            )
            dv_NV = tl.dot(weight.to(do_MV.dtype), do_MV, dv_NV, input_precision=PRECISION)
            slope = (bare * bend).to(q_MA.dtype)
            dk_NA = tl.dot(slope, q_MA, dk_NA, input_precision=PRECISION)
            if B > 0:
                dk_NB = tl.dot(slope, q_MB, dk_NB, input_precision=PRECISION)
        dk_NA = mask_dims(dk_NA, 0, dims, 0, A)
        if B > 0:
            dk_NB = mask_dims(dk_NB, 0, dims, A, B)
    return dk_NA, dk_NB, dv_NV


@triton.jit
def mlr_keys(
    q, k, v, dout, lse, delta, dk, dv, ends, biases, scale, window, T, S, HEADS, SHARING,
    stride_qb, stride_qh, stride_q, stride_kb, stride_kg, stride_k, stride_vb, stride_vg, stride_v, stride_db, stride_dh,
    stride_d, stride_end,
    EXTENTS: tl.constexpr, CUTS: tl.constexpr, L: tl.constexpr, A: tl.constexpr, B: tl.constexpr, L1: tl.constexpr,
    HOLES: tl.constexpr, WINDOWED: tl.constexpr, NESTED: tl.constexpr, BIASED: tl.constexpr, CAP: tl.constexpr,
    R: tl.constexpr, V: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
    CROSSING: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys of one query head. Zones up to L1 have at most A dims, the others A + B."""
    batch, head = (tl.program_id(1) // HEADS).to(tl.int64), (tl.program_id(1) % HEADS).to(tl.int64)
    group = head // SHARING
    end = tl.load(ends + batch * stride_end).to(tl.int32) if HOLES else S
    lead = S - end
    first_q = end - T
    t_least = tl.maximum(first_q, 0)
    first = tl.maximum(-lead, 0)
    s_first = first // N * N + tl.program_id(0) * N  # those that most queries see first
    if s_first >= end:
        return
    s_last = tl.minimum(s_first + N, end) - 1
    s_N = s_first + tl.arange(0, N)
    ok_N = (s_N >= first) & (s_N < end)
    heads = tl.program_id(1).to(tl.int64)
    q += batch * stride_qb + head * stride_qh
    k += batch * stride_kb + group * stride_kg
    v += batch * stride_vb + group * stride_vg
    dout += batch * stride_db + head * stride_dh
    lse += heads * T
    delta += heads * T
    if BIASED:
        biases += head * (L + 1)
    v_NV = load_rows(v, s_first + lead, stride_v, ok_N, N, DV, 0, V, True)
    dk_NA = tl.zeros([N, A], tl.float32)
    dk_NB = tl.zeros([N, B], tl.float32) if B > 0 else dk_NA
    dv_NV = tl.zeros([N, DV], tl.float32)
    if B > 0 and L1 > 0:
        dk_NA, _, dv_NV = walk_queries(
            dk_NA, dk_NA, dv_NV, k, s_first + lead, ok_N, stride_k, v_NV, q, stride_q, dout, stride_d, lse, delta, biases,
            first_q, scale, s_first, s_last, t_least, end, window, 0, L1, EXTENTS, CUTS, L, NESTED, WINDOWED, BIASED,
            A, 0, CAP, R, V, M, N, DV, PRECISION)  # fmt: skip
    dk_NA, dk_NB, dv_NV = walk_queries(
        dk_NA, dk_NB, dv_NV, k, s_first + lead, ok_N, stride_k, v_NV, q, stride_q, dout, stride_d, lse, delta, biases,
        first_q, scale, s_first, s_last, t_least, end, window, L1 if B > 0 else 0, L, EXTENTS, CUTS, L, NESTED, WINDOWED,
        BIASED, A, B, CAP, R, V, M, N, DV, PRECISION)  # fmt: skip
    k_NA = load_rows(k, s_first + lead, stride_k, ok_N, N, A, 0, R, True)
    k_NB = load_rows(k, s_first + lead, stride_k, ok_N, N, B, A, R, True) if B > 0 else k_NA
    tile_first = tl.maximum(s_first, t_least) // M
    left = (last_query(s_last, end, window, 0, EXTENTS, NESTED, WINDOWED) + M - 1) // M - tile_first
    for z in tl.static_range(1, L + 1):
        z_start, z_count = zone_queries(z, s_first, s_last, t_least, end, window, EXTENTS, L, NESTED, WINDOWED, M)
        left -= z_count
    for at in tl.range(0, left):
        tile = tile_first + at
        for back in tl.static_range(0, L):
            z_start, z_count = zone_queries(
                L - back, s_first, s_last, t_least, end, window, EXTENTS, L, NESTED, WINDOWED, M
            )
            tile += tl.where(tile >= z_start, z_count, 0)
        t_M = tile * M + tl.arange(0, M)
        ok_M = (t_M >= t_least) & (t_M < end)
        row = tile * M - first_q
        q_MA = load_rows(q, row, stride_q, ok_M, M, A, 0, R, True)
        q_MB = load_rows(q, row, stride_q, ok_M, M, B, A, R, True) if B > 0 else q_MA
        do_MV = load_rows(dout, row, stride_d, ok_M, M, DV, 0, V, True)
        lse_M = tl.load(lse + row + tl.arange(0, M), mask=ok_M, other=1e30)
        delta_M = tl.load(delta + row + tl.arange(0, M), mask=ok_M, other=0.0)
        t_last = tl.minimum((tile + 1) * M, end) - 1
        full, reached, dims = tile_levels(s_first, tile * M, t_last, window, EXTENTS, CUTS, L, NESTED, N)
        score, bias = tile_score(
            k_NA, k_NB, q_MA, q_MB, s_N[:, None], t_M[None, :], full, reached, dims, biases,
            CROSSING, EXTENTS, CUTS, L, NESTED, BIASED, A, B, PRECISION)  # fmt: skip
        pull = tl.dot(v_NV, tl.trans(do_MV), input_precision=PRECISION)
        low_M = first_position(t_M, first, window, 0, EXTENTS, NESTED, WINDOWED)
        seen = (s_N[:, None] <= t_M[None, :]) & (s_N[:, None] >= low_M[None, :])
        weight, bare, bend = score_gradients(
            score, bias, lse_M[None, :], pull, delta_M[None, :], seen, scale, True, CAP
        )
        dv_NV = tl.dot(weight.to(do_MV.dtype), do_MV, dv_NV, input_precision=PRECISION)
        dk_NA, dk_NB = tile_gradients(
            dk_NA, dk_NB, bare * bend, q_MA, q_MB, s_N[:, None], t_M[None, :], full, reached, dims,
            EXTENTS, CUTS, L, NESTED, A, B, PRECISION)  # fmt: skip
    at_N = heads * S + s_N + lead
    store_rows(dk, at_N, dk_NA * scale, ok_N, 0, A, R)
    if B > 0:
        store_rows(dk, at_N, dk_NB * scale, ok_N, A, B, R)
    store_rows(dv, at_N, dv_NV, ok_N, 0, DV, V)
