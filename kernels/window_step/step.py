"""One decoding step of a linear mixer with a window: states, softmax over window and sinks, their sum, in one launch.

    near_t = sum_s exp(score_ts - largest_t) v_s    over the last `window` tokens and the first `sinks` ones
    out_t = far_weight o_t + near_weight near_t / sum_s exp(score_ts - largest_t)

o_t is what the query reads of the states (kernels/ssd/recurrent.py), after the token at position p - window was written
to them. Normalised mixers have one denominator: out_t = (far_weight o_t + near_weight near_t) / (the same sums of
ones).

A program has one row, one group of states and a tile of values. Programs of a launch run in any order, and the rings
are updated in place: the new token is written to slot p mod C of C = window + 1, and no program reads that slot,
because the token that leaves the window lies in slot p - window = p + 1 mod C. The new token itself is read from the
projections.

Shapes: B rows, G groups of states with J query heads each, KV = G / COPIES key/value heads, rings (B, C, KV, ..), sinks
(B, S, KV, ..), states (B, L, G, F, V), with a column of ones (MORE) if the mixer is normalised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.local_attention.forward import softmax_update
from surgery.kernels.local_attention.tiles import MIN_SCORE, load_rows
from surgery.kernels.ssd.recurrent import advance_levels


@triton.jit
def window_softmax(
    q_MK, k, v, ring_k, ring_v, sink_k, sink_v, b, kv, vv_V, p, there, scale,
    KV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, S: tl.constexpr, CAP: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (sum of exp(score - largest) v, (M, BV); sum of exp(score - largest), (M,)) of the token at position p
    over itself, the W - 1 tokens before it and the sinks. k, v: pointers to the token's key and value. N, BS: recent
    tokens and sinks of a tile.
    """
    acc_MV = tl.zeros([M, BV], tl.float32)
    top_M = tl.full([M], MIN_SCORE, tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    for first in range(0, W, N):
        age_N = first + tl.arange(0, N)
        is_new_N = (age_N == 0) & there
        is_old_N = (age_N > 0) & (age_N < W) & (p - age_N >= S) & there
        at_N = (b * (W + 1) + (p - age_N) % (W + 1)) * KV + kv
        k_NK = load_rows(ring_k, at_N * K, is_old_N, K, BK)
        k_NK = tl.where(is_new_N[:, None], load_rows(k, at_N * 0, is_new_N, K, BK), k_NK)
        v_NV = load_tile(ring_v, at_N * V, is_old_N, vv_V, V)
        v_NV = tl.where(is_new_N[:, None], load_tile(v, at_N * 0, is_new_N, vv_V, V), v_NV)
        visible_1N = (is_new_N | is_old_N)[None, :]
        acc_MV, top_M, sum_M, _ = softmax_update(
            acc_MV, top_M, sum_M, top_M, q_MK, k_NK, v_NV, visible_1N, age_N, scale, CAP, True, False, PRECISION
        )
    if S > 0:
        slot_N = tl.arange(0, BS)
        is_sink_N = (slot_N < S) & (slot_N < p) & there
        at_N = (b * S + slot_N) * KV + kv
        k_NK, v_NV = load_rows(sink_k, at_N * K, is_sink_N, K, BK), load_tile(sink_v, at_N * V, is_sink_N, vv_V, V)
        acc_MV, top_M, sum_M, _ = softmax_update(
            acc_MV,
            top_M,
            sum_M,
            top_M,
            q_MK,
            k_NK,
            v_NV,
            is_sink_N[None, :],
            slot_N,
            scale,
            CAP,
            True,
            False,
            PRECISION,
        )
    return acc_MV, sum_M


@triton.jit
def load_tile(base, at_N, ok_N, vv_V, V: tl.constexpr):
    """Return columns vv_V of the rows that begin at offsets at_N; zeros where not ok and from V on."""
    return tl.load(base + at_N[:, None] + vv_V[None, :], mask=ok_N[:, None] & (vv_V < V)[None, :], other=0.0)


@triton.jit(do_not_specialize=["before", "after"])
def window_step(
    q, far_k, level, buckets, left, near_q, k, v, new_far_k, gate, beta, ring_k, ring_v, ring_far, ring_gate, ring_beta,
    sink_k, sink_v, out, seen, seen_after, count, far_weight, near_weight,
    before, after, sqb, sqh, sfb, sfs, sfg, snb, snh, skb, skg, svb, svg, sxb, sxg, scb,
    ROOT: tl.constexpr, SCALE: tl.constexpr, FLOOR: tl.constexpr, G: tl.constexpr, COPIES: tl.constexpr,
    FAR_COPIES: tl.constexpr, J: tl.constexpr, F: tl.constexpr, V: tl.constexpr, K: tl.constexpr, FAR: tl.constexpr,
    W: tl.constexpr, S: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, DELTA: tl.constexpr, UNIT: tl.constexpr,
    MORE: tl.constexpr, RING_GATE: tl.constexpr, COUNT: tl.constexpr, CAP: tl.constexpr, N: tl.constexpr, BS: tl.constexpr,
    BF: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store out (B, G, J, V), left (B, after, G, F, V (+ 1)), the states behind the token, the token in its slots of
    rings and sinks, and seen_after = seen + count. Grid: (B x G, tiles of values).

    q (B, G x J, F), far_k: queries and the key that leaves the window as the states take them; ROOT is a factor on
    both, UNIT normalizes them after it. far_k has a stride along slots (sfs), 0 if it was taken out of its ring
    already; FAR_COPIES groups share one of its keys. near_q (B, G x J, K), k (B, KV, K), v (B, KV, V): the softmax's,
    and what rings keep. new_far_k (B, KV, FAR): the key in the states' form, kept in ring_far, if FAR > 0. gate, beta
    (B, G): of the token; RING_GATE: gates are kept in a ring, else they are constant. level (B, G, J, LEVELS): lambdas;
    LEVELS = 0 for one state without levels, BITS: log2 of the mask's block. count: 0 in rows without a token (COUNT). s
    and two letters is a stride of q, far_k (f), near_q (n), k, v, new_far_k (x) or count (c) along rows (b), heads (h),
    groups (g). All other tensors are contiguous.
    """
    KV: tl.constexpr = G // COPIES
    b = (tl.program_id(0) // G).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    kv = g // COPIES
    tile = tl.program_id(1)
    ff_F = tl.arange(0, BF)
    vv_V = tile * BV + tl.arange(0, BV)
    j_M = tl.arange(0, M)
    p = tl.load(seen + b)
    there = p >= 0
    if COUNT:
        there = there & (tl.load(count + b * scb).to(tl.int64) > 0)
    new, old = p % (W + 1), (p + 1) % (W + 1)

    at_head = g * J + j_M
    # The softmax branch, before any store, so that its loads need not wait.
    q_MK = load_rows(near_q, b * snb + at_head * snh, (j_M < J) & there, K, BK)
    at_k, at_v = k + b * skb + kv * skg, v + b * svb + kv * svg
    near_MV, sum_M = window_softmax(
        q_MK, at_k, at_v, ring_k, ring_v, sink_k, sink_v, b, kv, vv_V, p, there, SCALE, KV, K, V, W, S, CAP, M, N, BS, BK,
        BV, PRECISION,
    )  # fmt: skip
    sum_M = tl.where(sum_M > 0, sum_M, 1.0)  # rows of M behind the last head, and rows without a token

    # The token that leaves the window enters the states, unless it is a sink.
    leaves = there & (p >= W + S)
    at_key = far_k + b * sfb + old * sfs + (g // FAR_COPIES) * sfg
    k_F = ROOT * tl.load(at_key + ff_F, mask=(ff_F < F) & leaves, other=0.0).to(tl.float32)
    at_value = ring_v + ((b * (W + 1) + old) * KV + kv) * V
    v_V = tl.load(at_value + vv_V, mask=(vv_V < V) & leaves, other=0.0).to(tl.float32)
    at_old, at_new = (b * (W + 1) + old) * G + g, (b * (W + 1) + new) * G + g
    gate_now = tl.load(gate + b * G + g).to(tl.float32)
    fade = tl.where(leaves, tl.exp(tl.load(ring_gate + at_old) if RING_GATE else gate_now), 1.0)
    if UNIT:
        k_F *= 1 / tl.sqrt(tl.sum(k_F * k_F, 0) + 1e-6)
    write_F = k_F
    if DELTA:
        write_F = k_F * tl.load(ring_beta + at_old)
    at = tl.maximum(p - W - S, 0)
    at_query = q + b * sqb + g * J * sqh
    VS: tl.constexpr = V + 1 if MORE else V
    out_MV, more_M = advance_levels(
        at_query, level + (b * G + g) * J * LEVELS, buckets + (b * before * G + g) * F * VS, left + (b * after * G + g) * F * VS,
        k_F, write_F, v_V, vv_V, fade, at, leaves.to(tl.int64), before, after, sqh, LEVELS, 1, (b * 0 + G) * F * VS,
        (b * 0 + G) * F * VS, F, V, J, LEVELS - 1, BITS, DELTA, MORE, BF, BV, M,
    )  # fmt: skip
    far_M = tl.full([M], 1.0, tl.float32) * ROOT
    if UNIT:
        q_MF = load_rows(at_query, j_M * (b * 0 + sqh), j_M < J, F, BF).to(tl.float32) * ROOT
        far_M *= 1 / tl.sqrt(tl.sum(q_MF * q_MF, 1) + 1e-6)

    # Their sum.
    far_w_M = tl.load(far_weight + at_head, mask=j_M < J, other=0.0).to(tl.float32)
    near_w_M = tl.load(near_weight + at_head, mask=j_M < J, other=0.0).to(tl.float32)
    if MORE:
        far_w_M, near_w_M = tl.maximum(far_w_M, 0.0), tl.maximum(near_w_M, 0.0)
        total_M = far_w_M * far_M * more_M + near_w_M * sum_M
        sum_MV = (far_w_M * far_M)[:, None] * out_MV + near_w_M[:, None] * near_MV
        sum_MV /= tl.maximum(total_M, FLOOR)[:, None]
    else:
        sum_MV = (far_w_M * far_M)[:, None] * out_MV + (near_w_M / sum_M)[:, None] * near_MV
    to_MV = out + (b * G * J + at_head)[:, None] * V + vv_V[None, :]
    sum_MV = tl.where(there, sum_MV, 0.0)
    tl.store(to_MV, sum_MV.to(out.dtype.element_ty), mask=(j_M < J)[:, None] & (vv_V < V)[None, :])

    # The token's slots. Groups that share a key/value head leave its slot to the first of them, tiles leave the keys to
    # the first.
    first = tile == 0
    owns = there & (g % COPIES == 0)
    new_V = tl.load(at_v + vv_V, mask=(vv_V < V) & owns, other=0.0)
    to_slot = (b * (W + 1) + new) * KV + kv
    tl.store(ring_v + to_slot * V + vv_V, new_V, mask=(vv_V < V) & owns)
    kk_K = tl.arange(0, BK)
    new_K = tl.load(at_k + kk_K, mask=(kk_K < K) & owns & first, other=0.0)
    tl.store(ring_k + to_slot * K + kk_K, new_K, mask=(kk_K < K) & owns & first)
    if FAR > 0:
        xx_X = tl.arange(0, BX)
        new_X = tl.load(new_far_k + b * sxb + kv * sxg + xx_X, mask=(xx_X < FAR) & owns & first, other=0.0)
        tl.store(ring_far + to_slot * FAR + xx_X, new_X, mask=(xx_X < FAR) & owns & first)
    if RING_GATE:
        tl.store(ring_gate + at_new, gate_now, mask=there & first)
    if DELTA:
        tl.store(ring_beta + at_new, tl.load(beta + b * G + g).to(tl.float32), mask=there & first)
    if S > 0:
        sink = owns & (p < S)
        to_sink = (b * S + p) * KV + kv
        tl.store(sink_v + to_sink * V + vv_V, new_V, mask=(vv_V < V) & sink)
        tl.store(sink_k + to_sink * K + kk_K, new_K, mask=(kk_K < K) & sink & first)
    tl.store(seen_after + b, p + there.to(tl.int64), mask=(g == 0) & first)
