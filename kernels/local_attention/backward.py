"""Backward kernels of local attention, without atomic additions, so that gradients are the same in every run.

    P_ts = exp(score_ts - lse_t)     dS_ts = P_ts (dO_t . v_s - delta_t) + [s is the largest of t] d largest_t
    delta_t = <dO_t, O_t> - d lse_t
    dQ_t = scaling sum_s dS_ts k_s     dK_s = scaling sum_t dS_ts q_t     dV_s = sum_t P_ts dO_t

Dao 2023, FlashAttention-2, algorithm 2, with the gradient of the log-sum-exp. `local_queries` walks the sinks and the
band of keys past a tile of queries (dQ and delta), `local_keys` walks queries past a tile of recent keys or past the
sinks (dK and dV, of all heads of the group). Rows and visible keys: kernels/local_attention/tiles.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.local_attention.tiles import (
    EDGES,
    LOG2_E,
    SINKS,
    WHOLE,
    band_of,
    base2_score,
    load_keys,
    load_queries,
    query_rows,
    softcap_slope,
    store_rows,
    tile_range,
)


@triton.jit
def score_gradients(
    score, lse, dweight, delta, visible, is_largest, dlargest, CAP: tl.constexpr, MASKED: tl.constexpr, LARGEST: tl.constexpr
):  # fmt: skip
    """Return (weights, gradients of the scaled scores before the soft cap). score, lse: in base 2; dweight = dO V^T."""
    weight = tl.exp2(score - lse)
    if MASKED:
        weight = tl.where(visible, weight, 0.0)
    dscore = weight * (dweight - delta)
    if LARGEST:
        dscore += tl.where(is_largest, dlargest, 0.0)
    if CAP > 0:
        dscore *= softcap_slope(score, CAP)
    return weight, dscore


@triton.jit
def add_query_gradients(
    dq_MK, q_MK, do_MV, lse_M, delta_M, place_M, dlargest_M, low_M, high_M, k, v, b, g, band, kind: tl.constexpr, scale,
    S: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CAP: tl.constexpr, LARGEST: tl.constexpr, N: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dq + dS K of all tiles of a kind (`tile_range`). Rows see keys low < s <= high."""
    start, stop, gap, shift, end = tile_range(band, kind, S, N)
    for at in tl.range(start, stop, N):
        s_N = at + tl.where(at >= gap, shift, 0) + tl.arange(0, N)
        k_NK = load_keys(k, b, g, s_N, s_N < end, K, BK)
        v_NV = load_keys(v, b, g, s_N, s_N < end, V, BV)
        visible = (s_N[None, :] > low_M[:, None]) & (s_N[None, :] <= high_M[:, None])
        score = base2_score(tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION), scale, CAP)
        dweight = tl.dot(do_MV, tl.trans(v_NV), input_precision=PRECISION)
        is_largest = (place_M - (0 if kind == SINKS else S))[:, None] == s_N[None, :]
        if kind == SINKS:  # behind the last sink, numbers are those of recent slots
            is_largest = is_largest & visible
        _weight, dscore = score_gradients(
            score, lse_M[:, None], dweight, delta_M[:, None], visible, is_largest, dlargest_M[:, None], CAP,
            kind != WHOLE, LARGEST,
        )  # fmt: skip
        dq_MK = tl.dot(dscore.to(k_NK.dtype), k_NK, dq_MK, input_precision=PRECISION)
    return dq_MK


@triton.jit(do_not_specialize=["T", "count"])
def local_queries(
    q, k, v, sink_k, sink_v, seen, out, dout, stats, dstats, place, delta, dq, scale, window, T, G, count,
    J: tl.constexpr, S: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CAP: tl.constexpr, LARGEST: tl.constexpr,
    M: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    N: tl.constexpr, BS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute dq and delta_BGJT. Grid: B * G * query tiles; a program computes one tile of queries.

    q, dout, dq: `HeadTensor`; k, v and sinks: `GroupTensor`. Other arguments as in `local_forward`.
    """
    tiles = tl.cdiv(T * J, M)
    lane = (tl.program_id(0) // tiles).to(tl.int64)
    b, g = lane // G, lane % G
    start = tl.program_id(0) % tiles * M
    j_M, t_M, ok_M = query_rows(start, T, J, M)
    at_M = (lane * J + j_M) * T + t_M
    q_MK = load_queries(q, b, g, j_M, t_M, ok_M, K, BK)
    # Rounded as in the products below: the errors of both terms of dS then cancel in each row's sum.
    do_MV = load_queries(dout, b, g, j_M, t_M, ok_M, V, BV).to(q_MK.dtype)
    out_MV = tl.load(
        out + at_M[:, None] * V + tl.arange(0, BV)[None, :],
        mask=ok_M[:, None] & (tl.arange(0, BV) < V)[None, :],
        other=0.0,
    )
    delta_M = tl.sum(do_MV.to(tl.float32) * out_MV, 1) - tl.load(dstats + at_M, mask=ok_M, other=0.0)
    tl.store(delta + at_M, delta_M, mask=ok_M)
    lse_M = tl.load(stats + at_M, mask=ok_M, other=1e30) * LOG2_E
    place_M = tl.full([M], -1, tl.int32)
    dlargest_M = tl.zeros([M], tl.float32)
    if LARGEST:
        place_M = tl.load(place + at_M, mask=ok_M, other=-1)
        dlargest_M = tl.load(dstats + count + at_M, mask=ok_M, other=0.0)
    before = tl.load(seen + b).to(tl.int32)
    dq_MK = tl.zeros([M, BK], tl.float32)
    band = band_of(start // J, tl.minimum((start + M - 1) // J, T - 1), before, window, S, N, SPLIT)
    if S > 0:
        dq_MK = add_query_gradients(
            dq_MK, q_MK, do_MV, lse_M, delta_M, place_M, dlargest_M, t_M * 0 - 1, tl.minimum(before + t_M, S - 1),
            sink_k, sink_v, b, g, band, SINKS, scale, S, K, V, CAP, LARGEST, BS, BK, BV, PRECISION,
        )  # fmt: skip
    dq_MK = add_query_gradients(
        dq_MK, q_MK, do_MV, lse_M, delta_M, place_M, dlargest_M, t_M, t_M + window, k, v, b, g, band, EDGES, scale,
        S, K, V, CAP, LARGEST, N, BK, BV, PRECISION,
    )  # fmt: skip
    if SPLIT:
        dq_MK = add_query_gradients(
            dq_MK, q_MK, do_MV, lse_M, delta_M, place_M, dlargest_M, t_M, t_M + window, k, v, b, g, band, WHOLE, scale,
            S, K, V, CAP, LARGEST, N, BK, BV, PRECISION,
        )  # fmt: skip
    store_rows(dq.ptr + b * dq.b + g * dq.g, j_M * dq.j + t_M.to(tl.int64) * dq.t, dq_MK * scale, ok_M, K, BK)


@triton.jit(do_not_specialize=["T", "count"])
def local_keys(
    q, k, v, seen, dout, stats, dstats, place, delta, dk, dv, scale, window, T, G, count, span,
    J: tl.constexpr, S: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CAP: tl.constexpr, LARGEST: tl.constexpr,
    M: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    N: tl.constexpr, OF_SINKS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv, summed over the J heads of the group.

    Recent keys: k, v (B, G, window + T, .); grid: B * G * key tiles; a program computes one tile of keys from all
    queries that see it. OF_SINKS: k, v (B, G, S, .); grid: B * G * spans * sink tiles; a program sums over `span`
    queries, for dk and dv (B, G, spans * S, .). q, dout: `HeadTensor`; k, v, dk, dv: `GroupTensor`. Other arguments as
    in `local_queries`.
    """
    if OF_SINKS:
        parts = tl.cdiv(T, span) * tl.cdiv(S, N)
    else:
        parts = tl.cdiv(T + window, N)
    lane = (tl.program_id(0) // parts).to(tl.int64)
    b, g = lane // G, lane % G
    part = tl.program_id(0) % parts
    before = tl.load(seen + b).to(tl.int32)
    if OF_SINKS:
        s_N = part % tl.cdiv(S, N) * N + tl.arange(0, N)
        ok_N = s_N < S
        slot_N = tl.where(ok_N, s_N, -2)
        part = part // tl.cdiv(S, N)
        store_N = part * S + s_N
        t_start = part * span
        t_stop = tl.minimum(t_start + span, T)
    else:
        first = part * N
        s_N = first + tl.arange(0, N)
        ok_N = s_N < T + window
        slot_N = S + s_N
        store_N = s_N
        t_start = tl.maximum(first - window, 0)
        t_stop = tl.minimum(first + N - 1, T)
        t_stop = tl.where(first + N > S + window - before, t_stop, t_start)  # keys that only sinks hold are not seen
    k_NK = load_keys(k, b, g, s_N, ok_N, K, BK)
    v_NV = load_keys(v, b, g, s_N, ok_N, V, BV)
    dk_NK = tl.zeros([N, BK], tl.float32)
    dv_NV = tl.zeros([N, BV], tl.float32)
    for start in tl.range(t_start * J, t_stop * J, M):
        j_M, t_M, _ok = query_rows(start, T, J, M)
        ok_M = t_M < t_stop
        at_M = (lane * J + j_M) * T + t_M
        q_MK = load_queries(q, b, g, j_M, t_M, ok_M, K, BK)
        do_MV = load_queries(dout, b, g, j_M, t_M, ok_M, V, BV).to(q_MK.dtype)
        lse_M = tl.load(stats + at_M, mask=ok_M, other=1e30) * LOG2_E
        delta_M = tl.load(delta + at_M, mask=ok_M, other=0.0)
        is_largest = False
        dlargest_M = delta_M
        if LARGEST:
            is_largest = slot_N[:, None] == tl.load(place + at_M, mask=ok_M, other=-1)[None, :]
            dlargest_M = tl.load(dstats + count + at_M, mask=ok_M, other=0.0)
        if OF_SINKS:
            visible = ok_N[:, None] & (s_N[:, None] <= before + t_M[None, :])
        else:
            visible = (s_N[:, None] > t_M[None, :]) & (s_N[:, None] <= t_M[None, :] + window)
            visible = visible & (s_N >= S + window - before)[:, None]
        score = base2_score(tl.dot(k_NK, tl.trans(q_MK), input_precision=PRECISION), scale, CAP)
        dweight = tl.dot(v_NV, tl.trans(do_MV), input_precision=PRECISION)
        weight, dscore = score_gradients(
            score,
            lse_M[None, :],
            dweight,
            delta_M[None, :],
            visible,
            is_largest,
            dlargest_M[None, :],
            CAP,
            True,
            LARGEST,
        )
        dv_NV = tl.dot(weight.to(do_MV.dtype), do_MV, dv_NV, input_precision=PRECISION)
        dk_NK = tl.dot(dscore.to(q_MK.dtype), q_MK, dk_NK, input_precision=PRECISION)
    at_N = store_N.to(tl.int64)
    store_rows(dk.ptr + b * dk.b + g * dk.g, at_N * dk.t, dk_NK * scale, ok_N, K, BK)
    store_rows(dv.ptr + b * dv.b + g * dv.g, at_N * dv.t, dv_NV, ok_N, V, BV)
