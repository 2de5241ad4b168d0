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
updated in place: states by a launch before, with a program for each bucket (`bucket_step`). A page holds what another
sequence left until it is written: a state is read from the first token that entered it on, a bucket while it is alive, a
slot once a token lies in it. Nothing else is read, written or zeroed.
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
def is_alive(i, at, LEVELS: tl.constexpr, BITS: tl.constexpr):
    """Return whether a state, or bucket i of a log-linear mask, holds any of the tokens before position `at`.

    With n = at >> BITS, bucket i of BITS = 0 is alive if bit i of n is set. Otherwise bucket 0 is the running block, alive
    if at % 2^BITS > 0, and bucket 1 + i that of bit i.
    """
    alive = at > 0
    if LEVELS > 0:
        n = at >> BITS
        if BITS > 0:
            alive = tl.where(i == 0, at % (1 << BITS) > 0, ((n >> tl.maximum(i - 1, 0)) & 1) > 0)
        else:
            alive = ((n >> i) & 1) > 0
    return alive


@triton.jit
def leaving_token(
    far_k, at_v, ring_v, ring_gate, ring_beta, gate, beta, b, row, g, kv, p, vv_V, leaves, sfb, sfs, sfg,
    ROOT: tl.constexpr, G: tl.constexpr, KV: tl.constexpr, FAR_COPIES: tl.constexpr, F: tl.constexpr, V: tl.constexpr,
    W: tl.constexpr, DELTA: tl.constexpr, UNIT: tl.constexpr, RING_GATE: tl.constexpr, IN_RING: tl.constexpr,
    BF: tl.constexpr,
):  # fmt: skip
    """Return (key, beta times key, value, fade) of the token that enters the states: the one that leaves the window, or
    without a window (W = 0) the new one. Zeros, and 1, if none does."""
    ff_F = tl.arange(0, BF)
    old = (p + 1) % (W + 1)
    at_key = far_k + (row if IN_RING else b) * sfb + old * sfs + (g // FAR_COPIES) * sfg
    k_F = ROOT * tl.load(at_key + ff_F, mask=(ff_F < F) & leaves, other=0.0).to(tl.float32)
    from_v = ring_v + (old * KV + kv) * V if W > 0 else at_v
    v_V = tl.load(from_v + vv_V, mask=(vv_V < V) & leaves, other=0.0).to(tl.float32)
    if RING_GATE:
        gate_old = tl.load(ring_gate + old * G + g, mask=leaves, other=0.0)
    else:
        gate_old = tl.load(gate + b * G + g).to(tl.float32)
    fade = tl.where(leaves, tl.exp(gate_old), 1.0)
    if UNIT:
        k_F *= 1 / tl.sqrt(tl.sum(k_F * k_F, 0) + 1e-6)
    write_F = k_F
    if DELTA:
        at_beta = ring_beta + old * G + g if W > 0 else beta + b * G + g
        write_F = k_F * tl.load(at_beta, mask=leaves, other=0.0).to(tl.float32)
    return k_F, write_F, v_V, fade


@triton.jit
def pass_token(at_state, tile_FV, inside_FV, k_F, write_F, fade, DELTA: tl.constexpr):
    """Return the state at that address, (F, V), after its fade and what the delta rule takes out of it."""
    s_FV = tl.load(at_state + tile_FV, mask=inside_FV, other=0.0).to(tl.float32)
    if DELTA:
        s_FV -= write_F[:, None] * tl.sum(k_F[:, None] * s_FV, 0)[None, :]
    return s_FV * fade


@triton.jit(do_not_specialize=["before"])
def bucket_step(
    q, far_k, level, buckets, v, gate, beta, ring_v, ring_gate, ring_beta, parts, more_parts, seen, pages,
    before, page, sqb, sqh, sfb, sfs, sfg, svb, svg,
    ROOT: tl.constexpr, G: tl.constexpr, COPIES: tl.constexpr, FAR_COPIES: tl.constexpr, J: tl.constexpr, F: tl.constexpr,
    V: tl.constexpr, W: tl.constexpr, S: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, DELTA: tl.constexpr,
    UNIT: tl.constexpr, MORE: tl.constexpr, RING_GATE: tl.constexpr, IN_RING: tl.constexpr, TILES: tl.constexpr,
    BF: tl.constexpr, BV: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Update one state, or one bucket of a log-linear mask, in its row's page, and store what the row's queries read of
    it: parts (before, B, G, J, V), lambda q S, and of the column of ones (MORE) more_parts (before, B, G, J). Grid: (B x
    G, tiles of values / TILES, buckets).

    Arguments as in `window_step`; before: buckets of a page. A part is stored for bucket 0, which has what the queries
    read of the token itself, and for those that `is_alive`. Others are neither read nor written, but for the one, `into`,
    that gets the sum of the buckets below it and the token: with n = at >> BITS, that of the lowest zero bit of n if a
    block ends, else the running block. Buckets below it are alive, and no other program writes them.
    """
    KV: tl.constexpr = G // COPIES
    VS: tl.constexpr = V + 1 if MORE else V
    b = (tl.program_id(0) // G).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    i = tl.program_id(2)
    kv = g // COPIES
    p, row = tl.load(seen + b).to(tl.int64), tl.load(pages + b).to(tl.int64)
    at = tl.maximum(p - W - S, 0)  # the token of that position enters the states
    if (p < W + S) | (row < 0):
        return
    into = i * 0
    if LEVELS > 0:
        n = at >> BITS
        while ((n >> into) & 1) > 0:
            into += 1
        if BITS > 0:
            into = tl.where((at + 1) % (1 << BITS) == 0, into + 1, 0)
    alive = is_alive(i, at, LEVELS, BITS)
    if (alive | (i == into) | (i == 0)) == 0:
        return
    ff_F = tl.arange(0, BF)
    j_M = tl.arange(0, M)
    states = buckets + row * page + g * F * VS
    left_level = (b * 0 + G) * F * VS
    at_state = states + i.to(tl.int64) * left_level
    at_query = q + b * sqb + g * J * sqh
    at_level = level + (b * G + g) * J * LEVELS
    at_part = ((i.to(tl.int64) * (tl.num_programs(0) // G) + b) * G + g) * J
    for turn in tl.static_range(TILES):
        vv_V = (tl.program_id(1) + turn) * BV + tl.arange(0, BV)
        k_F, write_F, v_V, fade = leaving_token(
            far_k, v + b * svb + kv * svg, ring_v + row * page, ring_gate + row * page, ring_beta + row * page, gate, beta, b,
            row, g, kv, p, vv_V, p >= 0, sfb, sfs, sfg, ROOT, G, KV, FAR_COPIES, F, V, W, DELTA, UNIT, RING_GATE, IN_RING, BF,
        )  # fmt: skip
        tile_FV = ff_F[:, None] * VS + vv_V[None, :]
        inside_FV = (ff_F < F)[:, None] & (vv_V < V)[None, :]
        s_FV = pass_token(at_state, tile_FV, inside_FV & alive, k_F, write_F, fade, DELTA)
        s_F = write_F
        if MORE:
            s_F = fade * tl.load(at_state + ff_F * VS + V, mask=(ff_F < F) & alive, other=0.0).to(tl.float32)
        if LEVELS == 0:
            s_FV += write_F[:, None] * v_V[None, :]
            if MORE:
                s_F += write_F
        # What the queries read.
        out_MV = tl.zeros([M, BV], tl.float32)
        more_M = tl.zeros([M], tl.float32)
        for j in tl.static_range(J):
            q_F = tl.load(at_query + j * sqh + ff_F, mask=ff_F < F, other=0.0).to(tl.float32)
            seen_V, more = tl.sum(q_F[:, None] * s_FV, 0), tl.sum(q_F * s_F, 0)
            if LEVELS > 0:
                which = tl.minimum(i + (0 if BITS > 0 else 1), LEVELS - 1)
                of_level = tl.load(at_level + j * LEVELS + which).to(tl.float32)
                own = tl.sum(q_F * write_F, 0) * tl.load(at_level + j * LEVELS).to(tl.float32)
                own = tl.where(i == 0, own, 0.0)
                seen_V, more = of_level * seen_V + own * v_V, tl.where(alive, of_level * more, 0.0) + own
            out_MV += tl.where((j_M == j)[:, None], seen_V[None, :], 0.0)
            more_M += tl.where(j_M == j, more, 0.0)
        to_MV = (at_part + j_M)[:, None] * V + vv_V[None, :]
        has_part = alive | (i == 0)
        tl.store(parts + to_MV, out_MV, mask=((j_M < J) & has_part)[:, None] & (vv_V < V)[None, :])
        # What the bucket holds from now on.
        stored = i >= into
        if (i == into) & (LEVELS > 0):
            s_FV += write_F[:, None] * v_V[None, :]
            if MORE:
                s_F = tl.where(alive, s_F, 0.0) + write_F
            for below in range(into):
                from_state = states + (b * 0 + below) * left_level
                s_FV += pass_token(from_state, tile_FV, inside_FV, k_F, write_F, fade, DELTA)
                if MORE:
                    s_F += fade * tl.load(from_state + ff_F * VS + V, mask=ff_F < F, other=0.0).to(tl.float32)
        tl.store(at_state + tile_FV, s_FV, mask=inside_FV & stored)
        if MORE and turn == TILES - 1:
            tl.store(more_parts + at_part + j_M, more_M, mask=(j_M < J) & has_part)
            tl.debug_barrier()  # every thread has read the sums
            tl.store(at_state + ff_F * VS + V, s_F, mask=(ff_F < F) & stored)


@triton.jit(do_not_specialize=["before", "after"])
def window_step(
    q, far_k, level, buckets, left, near_q, k, v, new_far_k, gate, beta, ring_k, ring_v, ring_far, ring_gate, ring_beta,
    sink_k, sink_v, out, seen, seen_after, count, far_weight, near_weight, pages, output_gate, parts, more_parts,
    before, after, page, sqb, sqh, sfb, sfs, sfg, snb, snh, skb, skg, svb, svg, sxb, sxg, scb,
    ROOT: tl.constexpr, SCALE: tl.constexpr, FLOOR: tl.constexpr, G: tl.constexpr, COPIES: tl.constexpr,
    FAR_COPIES: tl.constexpr, J: tl.constexpr, F: tl.constexpr, V: tl.constexpr, K: tl.constexpr, FAR: tl.constexpr,
    W: tl.constexpr, S: tl.constexpr, LEVELS: tl.constexpr, BITS: tl.constexpr, DELTA: tl.constexpr, UNIT: tl.constexpr,
    MORE: tl.constexpr, RING_GATE: tl.constexpr, IN_RING: tl.constexpr, COUNT: tl.constexpr, FAR_WEIGHT: tl.constexpr,
    GATES: tl.constexpr, PAGED: tl.constexpr, CAP: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, BF: tl.constexpr,
    BK: tl.constexpr, BX: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr,
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

    IN_RING: far_k is a ring. W = 0: without softmax; the token itself enters the states. FAR_WEIGHT: the output of the
    states has a weight. output_gate (B, G, J, GATES): logits of the output gate, GATES = 1 of a head and V of each value,
    0 without a gate.

    PAGED: row b of rings and sinks lies pages[b] x page numbers behind their pointers; rows with seen < 0 or pages < 0
    have no token, and get zeros. `bucket_step` has updated the states and stored parts and more_parts; left and
    seen_after are not stored.
    """
    KV: tl.constexpr = G // COPIES
    VS: tl.constexpr = V + 1 if MORE else V
    b = (tl.program_id(0) // G).to(tl.int64)
    g = (tl.program_id(0) % G).to(tl.int64)
    kv = g // COPIES
    j_M = tl.arange(0, M)
    p = tl.load(seen + b).to(tl.int64)
    there = p >= 0
    row = b
    if PAGED:
        row = tl.load(pages + b).to(tl.int64)
        there = there & (row >= 0)
    if COUNT:
        there = there & (tl.load(count + b * scb).to(tl.int64) > 0)
    ring_k += row * page if PAGED else b * ((W + 1) * KV * K)
    ring_v += row * page if PAGED else b * ((W + 1) * KV * V)
    ring_far += row * page if PAGED else b * ((W + 1) * KV * FAR)
    ring_gate += row * page if PAGED else b * ((W + 1) * G)
    ring_beta += row * page if PAGED else b * ((W + 1) * G)
    sink_k += row * page if PAGED else b * (S * KV * K)
    sink_v += row * page if PAGED else b * (S * KV * V)
    buckets += b * before * G * F * VS + g * F * VS
    left += b * after * G * F * VS + g * F * VS

    at_head = g * J + j_M
    at_k, at_v = k + b * skb + kv * skg, v + b * svb + kv * svg
    leaves = there & (p >= W + S)
    at = tl.maximum(p - W - S, 0)  # the token of that position enters the states
    at_query = q + b * sqb + g * J * sqh
    tile = tl.program_id(1)
    vv_V = tile * BV + tl.arange(0, BV)
    inside_MV = (j_M < J)[:, None] & (vv_V < V)[None, :]
    # The softmax branch, before any store, so that its loads need not wait.
    if W > 0:
        q_MK = load_rows(near_q, b * snb + at_head * snh, (j_M < J) & there, K, BK)
        near_MV, sum_M = window_softmax(
            q_MK, at_k, at_v, ring_k, ring_v, sink_k, sink_v, kv, vv_V, p, there, SCALE, KV, K, V, W, S, CAP, M, N, BS,
            BK, BV, PRECISION,
        )  # fmt: skip
        sum_M = tl.where(sum_M > 0, sum_M, 1.0)  # rows of M behind the last head, and rows without a token

    # What the queries read of the states behind the token.
    if PAGED:
        i_P = tl.arange(0, BP)
        read_P = (i_P < before) & (is_alive(i_P, at, LEVELS, BITS) | (i_P == 0)) & leaves
        at_PM = ((i_P.to(tl.int64) * (tl.num_programs(0) // G) + b) * G + g)[:, None] * J + j_M[None, :]
        read_PM = read_P[:, None] & (j_M < J)[None, :]
        at_PMV = at_PM[:, :, None] * V + vv_V[None, None, :]
        read_PMV = read_PM[:, :, None] & (vv_V < V)[None, None, :]
        out_MV = tl.sum(tl.load(parts + at_PMV, mask=read_PMV, other=0.0), 0)
        more_M = tl.zeros([M], tl.float32)
        if MORE:
            more_M = tl.sum(tl.load(more_parts + at_PM, mask=read_PM, other=0.0), 0)
    else:
        k_F, write_F, v_V, fade = leaving_token(
            far_k, at_v, ring_v, ring_gate, ring_beta, gate, beta, b, row, g, kv, p, vv_V, leaves, sfb, sfs, sfg, ROOT, G, KV,
            FAR_COPIES, F, V, W, DELTA, UNIT, RING_GATE, IN_RING, BF,
        )  # fmt: skip
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
    if GATES == 1:
        logit_M = tl.load(output_gate + b * G * J + at_head, mask=j_M < J, other=0.0).to(tl.float32)
        sum_MV *= 2 * tl.sigmoid(logit_M)[:, None]
    elif GATES > 1:
        sum_MV *= 2 * tl.sigmoid(tl.load(output_gate + at_MV, mask=inside_MV, other=0.0).to(tl.float32))
    sum_MV = tl.where(there, sum_MV, 0.0)
    tl.store(out + at_MV, sum_MV.to(out.dtype.element_ty), mask=inside_MV)

    # The token's slots. Groups that share a key/value head leave its slot to the first of them, tiles leave the keys to
    # the first.
    if W > 0:
        first = tile == 0
        owns = there & (g % COPIES == 0)
        new = p % (W + 1)
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
            gate_now = tl.load(gate + b * G + g).to(tl.float32)
            tl.store(ring_gate + new * G + g, gate_now, mask=there & first)
        if DELTA:
            tl.store(ring_beta + new * G + g, tl.load(beta + b * G + g).to(tl.float32), mask=there & first)
        if S > 0:
            sink = owns & (p < S)
            tl.store(sink_v + (p * KV + kv) * V + vv_V, new_V, mask=(vv_V < V) & sink)
            tl.store(sink_k + (p * KV + kv) * K + kk_K, new_K, mask=(kk_K < K) & sink & first)
    if not PAGED:
        tl.store(seen_after + b, p + there.to(tl.int64), mask=(g == 0) & (tile == 0))
