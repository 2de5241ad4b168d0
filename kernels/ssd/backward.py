"""Gradients of kernels/ssd/output.py, a chunk at a time.

`read_grad`: of the queries and the lambdas. `write_grad`: of the keys and values. A log-gate gets, of every pair of
tokens that it lies between, the pair's share of sum(out * its gradient): of pairs inside the chunk, of what its tokens
read of earlier chunks (`pull`) and write for later ones, and of what passes the whole chunk (`spans`). These are summed
apart, so that what differs by rounding never cancels.
"""

import triton
import triton.language as tl

from surgery.kernels.ssd.chunk import (
    decay_mask,
    lambda_matrix,
    level_matrix,
    load_chunk,
    load_gate_sums,
    load_gate_total,
    lowest_bit,
)


@triton.jit(do_not_specialize=["count", "T", "M", "levels"])
def read_grad(
    q, k, v, sums, level, slots, totals, d_out, d_q, d_level, pull, shares, start, ends, seq_of, first_of,
    count, T, M, levels, sqb, sqg, sqj, sqt, skb, skg, skt, svb, svg, svt, slb, slg, slj, slt, sll,
    sob, sog, soj, sot, sdb, sdg, sdj, sdt, smb, smg, smj, smt, sml, spb, spg, spj, spt,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAST: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """shares (G, J, levels, M): what a chunk reads of its slot of a level, times the gradient."""
    m = tl.program_id(0)
    row, begin, length, unit, first, off, base = load_chunk(m, start, ends, seq_of, first_of, count, T, C, VARLEN)
    t0 = (unit - first) * C - off
    if t0 >= length:
        return
    j = tl.program_id(2).to(tl.int64)
    x_C = tl.arange(0, C)
    ok_C = (t0 + x_C >= 0) & (t0 + x_C < length)
    at_C = (begin + t0 + x_C).to(tl.int64)
    kk_K = tl.arange(0, BK)
    vv_V = tl.arange(0, BV)
    ok_CK = ok_C[:, None] & (kk_K < F)[None, :]
    ok_CV = ok_C[:, None] & (vv_V < V)[None, :]
    tile_KV = kk_K[:, None] * V + vv_V[None, :]
    inside_KV = (kk_K < F)[:, None] & (vv_V < V)[None, :]
    row = row.to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    q_CK = tl.load(q + row * sqb + g * sqg + j * sqj + at_C[:, None] * sqt + kk_K[None, :], mask=ok_CK, other=0.0)
    k_CK = tl.load(k + row * skb + g * skg + at_C[:, None] * skt + kk_K[None, :], mask=ok_CK, other=0.0)
    q_CK, k_CK = q_CK.to(DOT), k_CK.to(DOT)
    reads = 0
    e = unit
    while e > first:
        reads += 1
        e = e & (e - 1)
    to = d_out + row * sob + g * sog + j * soj + at_C[:, None] * sot + vv_V[None, :]
    do_CV = tl.load(to, mask=ok_CV, other=0.0).to(DOT)
    v_CV = tl.load(v + row * svb + g * svg + at_C[:, None] * svt + vv_V[None, :], mask=ok_CV, other=0.0).to(DOT)
    coarse_C, fine_C = load_gate_sums(sums, g * M + m, C)
    log_C = coarse_C + fine_C
    ds_CC = tl.dot(do_CV, tl.trans(v_CV), input_precision=PRECISION) * decay_mask(coarse_C, fine_C, C)
    pull_C = tl.zeros([C], tl.float32)
    if LAST >= 0:
        of = level + row * slb + g * slg + j * slj
        to_C = d_level + row * smb + g * smg + j * smj + at_C * smt
        rest_C = tl.zeros([C], tl.float32)
        meets_CC = level_matrix(BITS, C)
        each_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION) * ds_CC
        for b in tl.static_range(BITS + 1):
            one_C = tl.sum(tl.where(meets_CC == b, each_CC, 0.0), 1)
            if b < LAST:
                tl.store(to_C + b * sml, one_C, mask=ok_C)
            else:
                rest_C += one_C
        ds_CC *= lambda_matrix(of, at_C, ok_C, slt, sll, LAST, BITS, C)
        dq_CK = tl.dot(ds_CC.to(DOT), k_CK, input_precision=PRECISION)
        here = g * M + base - 1 - first
        e = unit
        passed = 0.0
        for _ in tl.range(0, reads, num_stages=STAGES):
            x_KV = tl.load(slots + (here + e) * F * V + tile_KV, mask=inside_KV, other=0.0)
            bit = lowest_bit(e)
            at_level = bit + BITS + 1
            at = of + at_C * slt + tl.minimum(at_level, LAST) * sll
            fade_C = tl.exp(log_C + passed)
            weight_C = tl.load(at, mask=ok_C, other=0.0).to(tl.float32)
            y_CK = tl.dot(do_CV, tl.trans(x_KV), input_precision=PRECISION)
            one_C = fade_C * tl.sum(q_CK.to(tl.float32) * y_CK, 1)
            dq_CK += (weight_C * fade_C)[:, None] * y_CK
            tl.store(to_C + at_level * sml, one_C, mask=ok_C & (at_level < LAST))
            rest_C += tl.where(at_level < LAST, 0.0, one_C)
            one_C *= weight_C
            pull_C += one_C
            share = ((g * tl.num_programs(2) + j) * levels + tl.minimum(bit, levels - 1)) * M + m
            tl.store(shares + share, tl.sum(one_C, 0))
            passed += tl.load(totals + here + e)
            e = e & (e - 1)
        tl.store(to_C + LAST * sml, rest_C, mask=ok_C)
    else:
        dq_CK = tl.dot(ds_CC.to(DOT), k_CK, input_precision=PRECISION)
        x_KV = tl.load(slots + (g * M + m) * F * V + tile_KV, mask=inside_KV, other=0.0)
        y_CK = tl.exp(log_C)[:, None] * tl.dot(do_CV, tl.trans(x_KV), input_precision=PRECISION)
        dq_CK += y_CK
        pull_C += tl.sum(q_CK.to(tl.float32) * y_CK, 1)
    tl.store(pull + row * spb + g * spg + j * spj + at_C * spt, pull_C, mask=ok_C)
    to = d_q + row * sdb + g * sdg + j * sdj + at_C[:, None] * sdt + kk_K[None, :]
    tl.store(to, dq_CK.to(d_q.dtype.element_ty), mask=ok_CK)


@triton.jit(do_not_specialize=["count", "T", "M"])
def write_grad(
    q, k, v, sums, level, slots, d_slots, rights, d_out, pull, d_k, d_v, d_gate, passing, start, ends, seq_of, first_of,
    count, T, M, J, sqb, sqg, sqj, sqt, skb, skg, skt, svb, svg, svt, slb, slg, slj, slt, sll,
    sob, sog, soj, sot, spb, spg, spj, spt, sdb, sdg, sdt, seb, seg, se_t, sfb, sfg, sft,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAST: tl.constexpr, FINAL: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d_slots (G, M, F, V): log-linear: of the slots by those that read them; else of the states behind chunks.
    rights (G, M): log-gates of a slot's right sibling. passing (G, M): the slot's share beyond its right sibling."""
    m = tl.program_id(0)
    row, begin, length, unit, first, off, base = load_chunk(m, start, ends, seq_of, first_of, count, T, C, VARLEN)
    t0 = (unit - first) * C - off
    if t0 >= length:
        return
    x_C = tl.arange(0, C)
    ok_C = (t0 + x_C >= 0) & (t0 + x_C < length)
    at_C = (begin + t0 + x_C).to(tl.int64)
    kk_K = tl.arange(0, BK)
    vv_V = tl.arange(0, BV)
    ok_CK = ok_C[:, None] & (kk_K < F)[None, :]
    ok_CV = ok_C[:, None] & (vv_V < V)[None, :]
    tile_KV = kk_K[:, None] * V + vv_V[None, :]
    inside_KV = (kk_K < F)[:, None] & (vv_V < V)[None, :]
    row = row.to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    k_CK = tl.load(k + row * skb + g * skg + at_C[:, None] * skt + kk_K[None, :], mask=ok_CK, other=0.0).to(DOT)
    last = first + (off + length + C - 1) // C
    if not FINAL:
        last -= 1  # nobody reads what ends with the last chunk
    writes = 0
    e = unit + 1
    while e <= last:
        writes += 1
        e = e + (e & -e)
    v_CV = tl.load(v + row * svb + g * svg + at_C[:, None] * svt + vv_V[None, :], mask=ok_CV, other=0.0).to(DOT)
    coarse_C, fine_C = load_gate_sums(sums, g * M + m, C)
    coarse, fine = load_gate_total(sums, g * M + m, C)
    weight_C = tl.exp(tl.minimum((coarse - coarse_C) + (fine - fine_C), 0.0))
    if LAST >= 0:
        here = g * M + base - 1 - first
        e = unit + 1
        there = inside_KV & (writes > 0)
        own_KV = tl.load(d_slots + (here + e) * F * V + tile_KV, mask=there, other=0.0).to(tl.float32)
        passed = 0.0
        dz_KV = tl.zeros([BK, BV], tl.float32)
        for _ in tl.range(1, writes, num_stages=STAGES):
            passed += tl.load(rights + here + e)
            e = e + (e & -e)
            x_KV = tl.load(d_slots + (here + e) * F * V + tile_KV, mask=inside_KV, other=0.0)
            dz_KV += tl.exp(passed) * x_KV.to(tl.float32)
        x_KV = tl.load(slots + (g * M + m) * F * V + tile_KV, mask=there, other=0.0).to(tl.float32)
        tl.store(passing + g * M + m, tl.sum(tl.sum(dz_KV * x_KV, 1), 0))
        through = 0.0
        dz_KV = (dz_KV + own_KV).to(DOT)
    else:
        dz_KV = tl.load(d_slots + (g * M + m) * F * V + tile_KV, mask=inside_KV, other=0.0)
        x_KV = tl.load(slots + (g * M + m) * F * V + tile_KV, mask=inside_KV, other=0.0).to(tl.float32)
        through = tl.exp(coarse + fine) * tl.sum(tl.sum(dz_KV.to(tl.float32) * x_KV, 1), 0)
    dv_CV = weight_C[:, None] * tl.dot(k_CK, dz_KV, input_precision=PRECISION)
    write_C = tl.sum(v_CV.to(tl.float32) * dv_CV, 1)
    dk_CK = tl.dot((v_CV.to(tl.float32) * weight_C[:, None]).to(DOT), tl.trans(dz_KV), input_precision=PRECISION)
    read_C = tl.zeros([C], tl.float32)
    for j in tl.range(0, J, num_stages=1):  # more would not fit into shared memory
        at = q + row * sqb + g * sqg + (0 * g + j) * sqj + at_C[:, None] * sqt + kk_K[None, :]
        q_CK = tl.load(at, mask=ok_CK, other=0.0).to(DOT)
        at = d_out + row * sob + g * sog + (0 * g + j) * soj + at_C[:, None] * sot + vv_V[None, :]
        do_CV = tl.load(at, mask=ok_CV, other=0.0).to(DOT)
        mask_CC = decay_mask(coarse_C, fine_C, C)
        if LAST >= 0:
            of = level + row * slb + g * slg + (0 * g + j) * slj
            mask_CC *= lambda_matrix(of, at_C, ok_C, slt, sll, LAST, BITS, C)
        ds_CC = tl.dot(do_CV, tl.trans(v_CV), input_precision=PRECISION) * mask_CC
        dk_CK += tl.dot(tl.trans(ds_CC.to(DOT)), q_CK, input_precision=PRECISION)
        qk_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION)
        each_CC = qk_CC * ds_CC
        dv_CV += tl.dot(tl.trans((qk_CC * mask_CC).to(DOT)), do_CV, input_precision=PRECISION)
        read_C += tl.sum(each_CC, 1) - tl.sum(each_CC, 0)
        read_C += tl.load(pull + row * spb + g * spg + (0 * g + j) * spj + at_C * spt, mask=ok_C, other=0.0)
    # sum_u>=t of what is read and sum_s<t of what is written
    both_C = write_C - read_C
    d_gate_C = tl.cumsum(both_C, 0) - both_C + tl.sum(read_C, 0) + through
    tl.store(d_gate + row * sfb + g * sfg + at_C * sft, d_gate_C, mask=ok_C)
    to = d_v + row * seb + g * seg + at_C[:, None] * se_t + vv_V[None, :]
    tl.store(to, dv_CV.to(d_v.dtype.element_ty), mask=ok_CV)
    to = d_k + row * sdb + g * sdg + at_C[:, None] * sdt + kk_K[None, :]
    tl.store(to, dk_CK.to(d_k.dtype.element_ty), mask=ok_CK)


@triton.jit(do_not_specialize=["count", "T", "M", "levels"])
def add_passing_gradients(
    shares, passing, d_gate, start, ends, seq_of, first_of, count, T, M, levels, J, sfb, sfg, sft,
    C: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds to a chunk's log-gates what passes it: of its left sibling at every level, what goes beyond the right one,
    and what chunks behind this one in the right one read of it."""
    m = tl.program_id(0)
    row, begin, length, unit, first, off, base = load_chunk(m, start, ends, seq_of, first_of, count, T, C, VARLEN)
    t0 = (unit - first) * C - off
    if t0 >= length:
        return
    g = tl.program_id(1).to(tl.int64)
    last = first + (off + length + C - 1) // C
    x_N = tl.arange(0, BLOCK)
    acc_N = tl.zeros([BLOCK], tl.float32)
    total = 0.0
    e = unit
    while e > first:
        bit = lowest_bit(e)
        total += tl.load(passing + g * M + base - 1 - first + e)
        end = tl.minimum(e + (1 << bit), last)
        for j in range(J):
            at = shares + ((g * J + j) * levels + tl.minimum(bit, levels - 1)) * M + base - first
            for n in range(unit + 1, end, BLOCK):
                acc_N += tl.load(at + n + x_N, mask=n + x_N < end, other=0.0)
        e = e & (e - 1)
    x_C = tl.arange(0, C)
    ok_C = (t0 + x_C >= 0) & (t0 + x_C < length)
    to = d_gate + row.to(tl.int64) * sfb + g * sfg + (begin + t0 + x_C).to(tl.int64) * sft
    tl.store(to, tl.load(to, mask=ok_C, other=0.0) + total + tl.sum(acc_N, 0), mask=ok_C)
