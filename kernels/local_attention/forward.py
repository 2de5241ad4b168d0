"""Forward kernel of local attention, flash-style (Dao 2023, FlashAttention-2), over the sinks and the band of recent
keys.

    out_t = sum_s exp(score_ts - lse_t) v_s      lse_t = log sum_s exp(score_ts)      s: keys that query t sees

Rows and visible keys: kernels/local_attention/tiles.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.local_attention.tiles import (
    EDGES,
    LN_2,
    MIN_SCORE,
    SINKS,
    WHOLE,
    band_of,
    base2_score,
    load_keys,
    load_queries,
    query_rows,
    store_rows,
    tile_range,
)


@triton.jit
def softmax_update(
    acc_MV, top_M, sum_M, place_M, q_MK, k_NK, v_NV, visible, slot_N, scale, CAP: tl.constexpr, MASKED: tl.constexpr,
    LARGEST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (acc, top, sum, place) of a running softmax in base 2 after one more tile: sum of weighted values (M, V),
    largest score, sum of weights, slot of the largest score."""
    score = base2_score(tl.dot(q_MK, tl.trans(k_NK), input_precision=PRECISION), scale, CAP)
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    best_M = tl.max(score, 1)
    if LARGEST:
        at_M = tl.max(tl.where(score == best_M[:, None], slot_N[None, :], -1), 1)
        place_M = tl.where(best_M > top_M, at_M, place_M)
    higher_M = tl.maximum(top_M, best_M)
    weight = tl.exp2(score - higher_M[:, None])
    fade_M = tl.exp2(top_M - higher_M)
    sum_M = sum_M * fade_M + tl.sum(weight, 1)
    acc_MV = tl.dot(weight.to(v_NV.dtype), v_NV, acc_MV * fade_M[:, None], input_precision=PRECISION)
    return acc_MV, higher_M, sum_M, place_M


@triton.jit
def add_keys(
    acc_MV, top_M, sum_M, place_M, q_MK, low_M, high_M, k, v, b, g, band, kind: tl.constexpr, scale, S: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, CAP: tl.constexpr, LARGEST: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the running softmax after all tiles of a kind (`tile_range`). Rows see keys low < s <= high."""
    start, stop, gap, shift, end = tile_range(band, kind, S, N)
    for at in tl.range(start, stop, N):
        s_N = at + tl.where(at >= gap, shift, 0) + tl.arange(0, N)
        k_NK = load_keys(k, b, g, s_N, s_N < end, K, BK)
        v_NV = load_keys(v, b, g, s_N, s_N < end, V, BV)
        visible = (s_N[None, :] > low_M[:, None]) & (s_N[None, :] <= high_M[:, None])
        acc_MV, top_M, sum_M, place_M = softmax_update(
            acc_MV, top_M, sum_M, place_M, q_MK, k_NK, v_NV, visible, s_N if kind == SINKS else S + s_N, scale, CAP,
            kind != WHOLE, LARGEST, PRECISION,
        )  # fmt: skip
    return acc_MV, top_M, sum_M, place_M


@triton.jit(do_not_specialize=["T", "count"])
def local_forward(
    q, k, v, sink_k, sink_v, seen, out, stats, place, scale, window, T, G, count,
    J: tl.constexpr, S: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CAP: tl.constexpr, LARGEST: tl.constexpr,
    M: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    N: tl.constexpr, BS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Compute out_BGJTV and stats (lse_BGJT and, if LARGEST, the largest scores behind it; `count` numbers each), and
    if LARGEST the slots place_BGJT of the largest scores. Grid: B * G * query tiles; a program computes one tile of
    queries.

    q: `HeadTensor`; k, v and sinks: `GroupTensor`. BS: sinks of a tile. SPLIT: as in `band_of`.
    """
    tiles = tl.cdiv(T * J, M)
    lane = (tl.program_id(0) // tiles).to(tl.int64)
    b, g = lane // G, lane % G
    start = tl.program_id(0) % tiles * M
    j_M, t_M, ok_M = query_rows(start, T, J, M)
    q_MK = load_queries(q, b, g, j_M, t_M, ok_M, K, BK)
    before = tl.load(seen + b).to(tl.int32)
    acc_MV = tl.zeros([M, BV], tl.float32)
    top_M = tl.full([M], MIN_SCORE, tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    place_M = tl.full([M], -1, tl.int32)
    band = band_of(start // J, tl.minimum((start + M - 1) // J, T - 1), before, window, S, N, SPLIT)
    if S > 0:
        acc_MV, top_M, sum_M, place_M = add_keys(
            acc_MV, top_M, sum_M, place_M, q_MK, t_M * 0 - 1, tl.minimum(before + t_M, S - 1), sink_k, sink_v, b, g, band,
            SINKS, scale, S, K, V, CAP, LARGEST, BS, BK, BV, PRECISION,
        )  # fmt: skip
    acc_MV, top_M, sum_M, place_M = add_keys(
        acc_MV, top_M, sum_M, place_M, q_MK, t_M, t_M + window, k, v, b, g, band, EDGES, scale,
        S, K, V, CAP, LARGEST, N, BK, BV, PRECISION,
    )  # fmt: skip
    if SPLIT:
        acc_MV, top_M, sum_M, place_M = add_keys(
            acc_MV, top_M, sum_M, place_M, q_MK, t_M, t_M + window, k, v, b, g, band, WHOLE, scale,
            S, K, V, CAP, LARGEST, N, BK, BV, PRECISION,
        )  # fmt: skip
    sum_M = tl.where(sum_M > 0, sum_M, 1.0)  # rows behind the last query may see nothing
    at_M = (lane * J + j_M) * T + t_M
    store_rows(out, at_M * V, acc_MV / sum_M[:, None], ok_M, V, BV)
    tl.store(stats + at_M, (top_M + tl.log2(sum_M)) * LN_2, mask=ok_M)
    if LARGEST:
        tl.store(stats + count + at_M, top_M * LN_2, mask=ok_M)
        tl.store(place + at_M, place_M, mask=ok_M)
