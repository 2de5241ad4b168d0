"""One decoding step of a linear mixer: states, softmax over window and sinks, their sum, in one launch.

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

In a server's cache (PAGED) a row's rings, sinks and states lie in one page, whose number is on the device, and are
updated in place. A page holds what another sequence left until it is written: a state is read from the first token
that entered it on, a bucket while it is alive, a slot once a token lies in it. Nothing else is read, written or zeroed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.local_attention.forward import softmax_update
from surgery.kernels.local_attention.tiles import MIN_SCORE, load_rows
from surgery.kernels.ssd.recurrent import advance_levels


@triton.jit
def window_softmax(
    q_MK, k, v, ring_k, ring_v, sink_k, sink_v, kv, vv_V, p, there, scale,
    KV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, S: tl.constexpr, CAP: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (sum of exp(score - largest) v, (M, BV); sum of exp(score - largest), (M,)) of the token at position p
    over itself, the W - 1 tokens before it and the sinks. k, v: pointers to the token's key and value; ring_k .. sink_v:
    to those of the row, which may be of a wider dtype than the token's. N, BS: recent tokens and sinks of a tile.
    """
    acc_MV = tl.zeros([M, BV], tl.float32)
    top_M = tl.full([M], MIN_SCORE, tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    for first in range(0, W, N):
        age_N = first + tl.arange(0, N)
        is_new_N = (age_N == 0) & there
        is_old_N = (age_N > 0) & (age_N < W) & (p - age_N >= S) & there
        at_N = (p - age_N) % (W + 1) * KV + kv
        k_NK = load_rows(ring_k, at_N * K, is_old_N, K, BK).to(k.dtype.element_ty)
        k_NK = tl.where(is_new_N[:, None], load_rows(k, at_N * 0, is_new_N, K, BK), k_NK)
        v_NV = load_tile(ring_v, at_N * V, is_old_N, vv_V, V).to(v.dtype.element_ty)
        v_NV = tl.where(is_new_N[:, None], load_tile(v, at_N * 0, is_new_N, vv_V, V), v_NV)
        visible_1N = (is_new_N | is_old_N)[None, :]
        acc_MV, top_M, sum_M, _ = softmax_update(
            acc_MV, top_M, sum_M, top_M, q_MK, k_NK, v_NV, visible_1N, age_N, scale, CAP, True, False, PRECISION
        )
    if S > 0:
        slot_N = tl.arange(0, BS)
        is_sink_N = (slot_N < S) & (slot_N < p) & there
        at_N = slot_N.to(tl.int64) * KV + kv
        k_NK = load_rows(sink_k, at_N * K, is_sink_N, K, BK).to(k.dtype.element_ty)
        v_NV = load_tile(sink_v, at_N * V, is_sink_N, vv_V, V).to(v.dtype.element_ty)
        acc_MV, top_M, sum_M, _ = softmax_update(
            acc_MV, top_M, sum_M, top_M, q_MK, k_NK, v_NV, is_sink_N[None, :], slot_N, scale, CAP, True, False, PRECISION
        )  # fmt: skip
    return acc_MV, sum_M


@triton.jit
def load_tile(base, at_N, ok_N, vv_V, V: tl.constexpr):
    """Return columns vv_V of the rows that begin at offsets at_N; zeros where not ok and from V on."""
    return tl.load(base + at_N[:, None] + vv_V[None, :], mask=ok_N[:, None] & (vv_V < V)[None, :], other=0.0)


@triton.jit
def advance_alive(
    q, level, states, k_F, write_F, v_V, vv_V, fade, at, leaves, before, sqj, left_level,
    F: tl.constexpr, V: tl.constexpr, J: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, DELTA: tl.constexpr,
    MORE: tl.constexpr, SUMS: tl.constexpr, BF: tl.constexpr, BV: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Update the states of one row and group in place, and return what the token reads of them: sum_l lambda^(l) q S_l
    of each head, (M, BV), and the same of the column of ones, (M,).

    As `advance_levels` (kernels/ssd/recurrent.py), but states that hold nothing are neither read nor written: one state
    without levels (LEVELS = 0) at position 0, and the dead buckets of log-linear masks. With n = at >> BITS, bucket i of
    BITS = 0 is alive if bit i of n is set. Otherwise bucket 0 is the running block, alive if at % 2^BITS > 0, and bucket
    1 + i that of bit i. leaves: whether a token enters the states; if not, they are empty. before: allocated states.
    left_level: numbers between them. SUMS: the column of ones is stored, by the last program that reads it.
    """
    VS: tl.constexpr = V + 1 if MORE else V
    FIRST: tl.constexpr = 1 if BITS > 0 else 0  # bucket of bit 0
    ff_F = tl.arange(0, BF)
    j_M = tl.arange(0, M)
    tile_FV = ff_F[:, None] * VS + vv_V[None, :]
    inside_FV = (ff_F < F)[:, None] & (vv_V < V)[None, :]
    total_FV = write_F[:, None] * v_V[None, :]
    total_F = write_F
    out_MV = tl.zeros([M, BV], tl.float32)
    more_M = tl.zeros([M], tl.float32)
    n = at >> BITS
    top = FIRST
    into = at * 0
    if LEVELS > 0:
        while (n >> (top - FIRST)) > 0:
            top += 1
        bit = 0
        while ((n >> bit) & 1) > 0:  # the lowest zero bit of the blocks, into which a block that ends merges
            bit += 1
        into += bit
        if BITS > 0:
            into = tl.where((at + 1) % (1 << BITS) == 0, bit + 1, 0)
        # The token itself.
        for j in tl.static_range(J):
            q_F = tl.load(q + j * sqj + ff_F, mask=(ff_F < F) & leaves, other=0.0).to(tl.float32)
            of_level = tl.load(level + j * LEVELS).to(tl.float32) * tl.sum(q_F * write_F, 0)
            out_MV += tl.where((j_M == j)[:, None], (of_level * v_V)[None, :], 0.0)
            if MORE:
                more_M += tl.where(j_M == j, of_level, 0.0)
    else:
        top = 1
    top = tl.where(leaves, tl.minimum(top, before), 0)
    for i in range(top):
        alive = at > 0
        if LEVELS > 0:
            alive = ((n >> tl.maximum(i - FIRST, 0)) & 1) > 0
            if BITS > 0:
                alive = ((i > 0) & alive) | ((i == 0) & (at % (1 << BITS) > 0))
        visited = alive
        if LEVELS == 0:
            visited = at >= 0  # one state takes the token, whether it holds any or not
        if visited:
            at_state = states + (at * 0 + i) * left_level
            s_FV = tl.load(at_state + tile_FV, mask=inside_FV & alive, other=0.0).to(tl.float32)
            if DELTA:
                s_FV -= write_F[:, None] * tl.sum(k_F[:, None] * s_FV, 0)[None, :]
            s_FV *= fade
            s_F = write_F
            if MORE:
                s_F = fade * tl.load(at_state + ff_F * VS + V, mask=(ff_F < F) & alive, other=0.0).to(tl.float32)
            if LEVELS == 0:
                s_FV += total_FV
                s_F += write_F
            for j in tl.static_range(J):
                q_F = tl.load(q + j * sqj + ff_F, mask=ff_F < F, other=0.0).to(tl.float32)
                of_level = 1.0
                if LEVELS > 0:
                    of_level = tl.load(level + j * LEVELS + tl.minimum(i + 1 - FIRST, LEVELS - 1)).to(tl.float32)
                seen_V = of_level * tl.sum(q_F[:, None] * s_FV, 0)
                out_MV += tl.where((j_M == j)[:, None], seen_V[None, :], 0.0)
                if MORE:
                    more_M += tl.where(j_M == j, of_level * tl.sum(q_F * s_F, 0), 0.0)
            merges = i <= into
            if LEVELS == 0:
                merges = at < 0
            tl.store(at_state + tile_FV, s_FV, mask=inside_FV & (merges == 0))
            total_FV += tl.where(merges, s_FV, 0.0)
            if SUMS:
                tl.debug_barrier()  # every thread has read the sums
                tl.store(at_state + ff_F * VS + V, s_F, mask=(ff_F < F) & (merges == 0))
            total_F += tl.where(merges, s_F, 0.0)
    if LEVELS > 0:
        at_state = states + into * left_level
        stored = leaves & (into < before)
        tl.store(at_state + tile_FV, total_FV, mask=inside_FV & stored)
        if SUMS:
            tl.debug_barrier()
            tl.store(at_state + ff_F * VS + V, total_F, mask=(ff_F < F) & stored)
    return out_MV, more_M


@triton.jit(do_not_specialize=["before", "after"])
def window_step(
    q, far_k, level, buckets, left, near_q, k, v, new_far_k, gate, beta, ring_k, ring_v, ring_far, ring_gate, ring_beta,
    sink_k, sink_v, out, seen, seen_after, count, far_weight, near_weight, pages, output_gate,
    before, after, page, sqb, sqh, sfb, sfs, sfg, snb, snh, skb, skg, svb, svg, sxb, sxg, scb,
    ROOT: tl.constexpr, SCALE: tl.constexpr, FLOOR: tl.constexpr, G: tl.constexpr, COPIES: tl.constexpr,
    FAR_COPIES: tl.constexpr, J: tl.constexpr, F: tl.constexpr, V: tl.constexpr, K: tl.constexpr, FAR: tl.constexpr,
    W: tl.constexpr, S: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, DELTA: tl.constexpr, UNIT: tl.constexpr,
    MORE: tl.constexpr, RING_GATE: tl.constexpr, IN_RING: tl.constexpr, COUNT: tl.constexpr, FAR_WEIGHT: tl.constexpr,
    GATES: tl.constexpr, PAGED: tl.constexpr, TILES: tl.constexpr, CAP: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, BF: tl.constexpr,
    BK: tl.constexpr, BX: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store out (B, G, J, V), left (B, after, G, F, V (+ 1)), the states behind the token, the token in its slots of
    rings and sinks, and seen_after = seen + count. Grid: (B x G, tiles of values / TILES).

    q (B, G x J, F), far_k: queries and the key that leaves the window as the states take them; ROOT is a factor on
    both, UNIT normalizes them after it. far_k has a stride along slots (sfs), 0 if it was taken out of its ring
    already; FAR_COPIES groups share one of its keys. near_q (B, G x J, K), k (B, KV, K), v (B, KV, V): the softmax's,
    and what rings keep. new_far_k (B, KV, FAR): the key in the states' form, kept in ring_far, if FAR > 0. gate, beta
    (B, G): of the token; RING_GATE: gates are kept in a ring, else they are constant. level (B, G, J, LEVELS): lambdas;
    LEVELS = 0 for one state without levels, BITS: log2 of the mask's block. count: 0 in rows without a token (COUNT). s
    and two letters is a stride of q, far_k (f), near_q (n), k, v, new_far_k (x) or count (c) along rows (b), heads (h),
    groups (g). All other tensors are contiguous.

    PAGED: row b of rings, sinks and buckets lies pages[b] x page numbers behind their pointers; left is buckets, and
    seen_after is not stored. Rows with seen < 0 or pages < 0 have no token, and get zeros. IN_RING: far_k is a ring. W =
    0: without softmax; the token itself enters the states. FAR_WEIGHT: the output of the states has a weight. output_gate
    (B, G, J, GATES): logits of the output gate, GATES = 1 of a head and V of each value, 0 without a gate. TILES: of
    values that a program computes in turn, all of them where it updates a column of ones in place.
    """
    KV: tl.constexpr = G // COPIES
    VS: tl.constexpr = V + 1 if MORE else V
    b = (tl.program_id(0) // G).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    kv = g // COPIES
    ff_F = tl.arange(0, BF)
    j_M = tl.arange(0, M)
    p = tl.load(seen + b).to(tl.int64)
    there = p >= 0
    row = b
    if PAGED:
        row = tl.load(pages + b).to(tl.int64)
        there = there & (row >= 0)
    if COUNT:
        there = there & (tl.load(count + b * scb).to(tl.int64) > 0)
    new, old = p % (W + 1), (p + 1) % (W + 1)
    ring_k += row * page if PAGED else b * ((W + 1) * KV * K)
    ring_v += row * page if PAGED else b * ((W + 1) * KV * V)
    ring_far += row * page if PAGED else b * ((W + 1) * KV * FAR)
    ring_gate += row * page if PAGED else b * ((W + 1) * G)
    ring_beta += row * page if PAGED else b * ((W + 1) * G)
    sink_k += row * page if PAGED else b * (S * KV * K)
    sink_v += row * page if PAGED else b * (S * KV * V)
    buckets += (row * page if PAGED else b * before * G * F * VS) + g * F * VS
    left += (row * page if PAGED else b * after * G * F * VS) + g * F * VS

    at_head = g * J + j_M
    at_k, at_v = k + b * skb + kv * skg, v + b * svb + kv * svg
    leaves = there & (p >= W + S)
    at = tl.maximum(p - W - S, 0)  # the token of that position enters the states
    at_query = q + b * sqb + g * J * sqh
    gate_now = tl.load(gate + b * G + g).to(tl.float32)
    for turn in tl.static_range(TILES):
        tile = tl.program_id(1) + turn
        vv_V = tile * BV + tl.arange(0, BV)
        # The softmax branch, before any store, so that its loads need not wait.
        if W > 0:
            q_MK = load_rows(near_q, b * snb + at_head * snh, (j_M < J) & there, K, BK)
            near_MV, sum_M = window_softmax(
                q_MK, at_k, at_v, ring_k, ring_v, sink_k, sink_v, kv, vv_V, p, there, SCALE, KV, K, V, W, S, CAP, M, N, BS,
                BK, BV, PRECISION,
            )  # fmt: skip
            sum_M = tl.where(sum_M > 0, sum_M, 1.0)  # rows of M behind the last head, and rows without a token

        # The token that leaves the window enters the states, unless it is a sink.
        at_key = far_k + (row if IN_RING else b) * sfb + old * sfs + (g // FAR_COPIES) * sfg
        k_F = ROOT * tl.load(at_key + ff_F, mask=(ff_F < F) & leaves, other=0.0).to(tl.float32)
        if W > 0:
            v_V = tl.load(ring_v + (old * KV + kv) * V + vv_V, mask=(vv_V < V) & leaves, other=0.0).to(tl.float32)
        else:
            v_V = tl.load(at_v + vv_V, mask=(vv_V < V) & leaves, other=0.0).to(tl.float32)
        gate_old = tl.load(ring_gate + old * G + g, mask=leaves, other=0.0) if RING_GATE else gate_now
        fade = tl.where(leaves, tl.exp(gate_old), 1.0)
        if UNIT:
            k_F *= 1 / tl.sqrt(tl.sum(k_F * k_F, 0) + 1e-6)
        write_F = k_F
        if DELTA:
            at_beta = ring_beta + old * G + g if W > 0 else beta + b * G + g
            write_F = k_F * tl.load(at_beta, mask=leaves, other=0.0).to(tl.float32)
        if PAGED:
            out_MV, more_M = advance_alive(
                at_query, level + (b * G + g) * J * LEVELS, buckets, k_F, write_F, v_V, vv_V, fade, at, leaves, before, b * 0 + sqh,
                (b * 0 + G) * F * VS, F, V, J, LEVELS, BITS, DELTA, MORE, MORE and turn == TILES - 1, BF, BV, M,
            )  # fmt: skip
        else:
            out_MV, more_M = advance_levels(
                at_query, level + (b * G + g) * J * LEVELS, buckets, left, k_F, write_F, v_V, vv_V, fade, at, leaves.to(tl.int64),
                before, after, sqh, LEVELS, 1, (b * 0 + G) * F * VS, (b * 0 + G) * F * VS, F, V, J, LEVELS - 1, BITS, DELTA,
                MORE, BF, BV, M,
            )  # fmt: skip
        far_M = tl.full([M], 1.0, tl.float32) * ROOT
        if UNIT:
            q_MF = load_rows(at_query, j_M * (b * 0 + sqh), j_M < J, F, BF).to(tl.float32) * ROOT
            far_M *= 1 / tl.sqrt(tl.sum(q_MF * q_MF, 1) + 1e-6)
        if FAR_WEIGHT:
            far_w_M = tl.load(far_weight + at_head, mask=j_M < J, other=0.0).to(tl.float32)
            far_M *= tl.maximum(far_w_M, 0.0) if MORE else far_w_M

        # Their sum.
        sum_MV = far_M[:, None] * out_MV
        total_M = far_M * more_M
        if W > 0:
            near_w_M = tl.load(near_weight + at_head, mask=j_M < J, other=0.0).to(tl.float32)
            near_w_M = tl.maximum(near_w_M, 0.0) if MORE else near_w_M / sum_M
            sum_MV += near_w_M[:, None] * near_MV
            total_M += near_w_M * sum_M
        if MORE:
            sum_MV /= tl.maximum(total_M, FLOOR)[:, None]
        at_MV = (b * G * J + at_head)[:, None] * V + vv_V[None, :]
        inside_MV = (j_M < J)[:, None] & (vv_V < V)[None, :]
        if GATES == 1:
            logit_M = tl.load(output_gate + b * G * J + at_head, mask=j_M < J, other=0.0).to(tl.float32)
            sum_MV *= 2 * tl.sigmoid(logit_M)[:, None]
        elif GATES > 1:
            sum_MV *= 2 * tl.sigmoid(tl.load(output_gate + at_MV, mask=inside_MV, other=0.0).to(tl.float32))
        sum_MV = tl.where(there, sum_MV, 0.0)
        tl.store(out + at_MV, sum_MV.to(out.dtype.element_ty), mask=inside_MV)

        # The token's slots. Groups that share a key/value head leave its slot to the first of them, tiles leave the keys
        # to the first.
        if W > 0:
            first = tile == 0
            owns = there & (g % COPIES == 0)
            new_V = tl.load(at_v + vv_V, mask=(vv_V < V) & owns, other=0.0)
            to_slot = new * KV + kv
            tl.store(ring_v + to_slot * V + vv_V, new_V, mask=(vv_V < V) & owns)
            kk_K = tl.arange(0, BK)
            new_K = tl.load(at_k + kk_K, mask=(kk_K < K) & owns & first, other=0.0)
            tl.store(ring_k + to_slot * K + kk_K, new_K, mask=(kk_K < K) & owns & first)
            if FAR > 0:
                xx_X = tl.arange(0, BX)
                new_X = tl.load(new_far_k + b * sxb + kv * sxg + xx_X, mask=(xx_X < FAR) & owns & first, other=0.0)
                tl.store(ring_far + to_slot * FAR + xx_X, new_X, mask=(xx_X < FAR) & owns & first)
            if RING_GATE:
                tl.store(ring_gate + new * G + g, gate_now, mask=there & first)
            if DELTA:
                tl.store(ring_beta + new * G + g, tl.load(beta + b * G + g).to(tl.float32), mask=there & first)
            if S > 0:
                sink = owns & (p < S)
                tl.store(sink_v + (p * KV + kv) * V + vv_V, new_V, mask=(vv_V < V) & sink)
                tl.store(sink_k + (p * KV + kv) * K + kk_K, new_K, mask=(kk_K < K) & sink & first)
    if not PAGED:
        tl.store(seen_after + b, p + there.to(tl.int64), mask=(g == 0) & (tl.program_id(1) == 0))
