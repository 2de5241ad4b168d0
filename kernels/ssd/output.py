"""What the queries of a chunk read: the chunk itself under its mask, and states of what came before it.

    o_t = sum_s<=t in the chunk M_ts (q_t . k_s) v_s + sum_e lambda_t^(level of e) exp(gates from e's end to t) q_t X_e

Log-linear masks read the slots X_e of a Fenwick tree (kernels/log_linear/states.py), masks of gates one state, that before the
chunk.
"""

import triton
import triton.language as tl

from surgery.kernels.ssd.chunk import decay_mask, lambda_matrix, load_chunk, load_gate_sums, lowest_bit


@triton.jit(do_not_specialize=["count", "T", "M"])
def read(
    q, k, v, sums, level, slots, totals, out, start, ends, seq_of, first_of,
    count, T, M, sqb, sqg, sqj, sqt, skb, skg, skt, svb, svg, svt, slb, slg, slj, slt, sll,
    sob, sog, soj, sot, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, LAST: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """slots (G, M, F, V), totals (G, M): their log-gates. LAST: the last level that has a lambda of its own, -1 for
    masks of gates."""
    m = tl.program_id(0)
    row, begin, length, unit, first, off, base = load_chunk(m, start, ends, seq_of, first_of, count, T, C, VARLEN)
    t0 = (unit - first) * C - off
    if t0 >= length:
        return
    tiles: tl.constexpr = (V + BV - 1) // BV
    g = (tl.program_id(1) // tiles).to(tl.int64)
    j = tl.program_id(2).to(tl.int64)
    x_C = tl.arange(0, C)
    ok_C = (t0 + x_C >= 0) & (t0 + x_C < length)
    at_C = (begin + t0 + x_C).to(tl.int64)
    kk_K = tl.arange(0, BK)
    vv_V = (tl.program_id(1) % tiles) * BV + tl.arange(0, BV)
    ok_CK = ok_C[:, None] & (kk_K < F)[None, :]
    ok_CV = ok_C[:, None] & (vv_V < V)[None, :]
    tile_KV = kk_K[:, None] * V + vv_V[None, :]
    inside_KV = (kk_K < F)[:, None] & (vv_V < V)[None, :]
    row = row.to(tl.int64)
    q_CK = tl.load(q + row * sqb + g * sqg + j * sqj + at_C[:, None] * sqt + kk_K[None, :], mask=ok_CK, other=0.0)
    k_CK = tl.load(k + row * skb + g * skg + at_C[:, None] * skt + kk_K[None, :], mask=ok_CK, other=0.0)
    v_CV = tl.load(v + row * svb + g * svg + at_C[:, None] * svt + vv_V[None, :], mask=ok_CV, other=0.0)
    q_CK = q_CK.to(DOT)
    qk_CC = tl.dot(q_CK, tl.trans(k_CK.to(DOT)), input_precision=PRECISION)
    coarse_C, fine_C = load_gate_sums(sums, g * M + m, C)
    log_C = coarse_C + fine_C
    qk_CC *= decay_mask(coarse_C, fine_C, C)
    level += row * slb + g * slg + j * slj
    if LAST >= 0:
        qk_CC *= lambda_matrix(level, at_C, ok_C, slt, sll, LAST, BITS, C)
    acc_CV = tl.dot(qk_CC.to(DOT), v_CV.to(DOT), input_precision=PRECISION)
    if LAST >= 0:
        here = g * M + base - 1 - first
        reads = 0
        e = unit
        while e > first:
            reads += 1
            e = e & (e - 1)
        e = unit
        passed = 0.0
        for _ in tl.range(0, reads, num_stages=STAGES):
            x_KV = tl.load(slots + (here + e) * F * V + tile_KV, mask=inside_KV, other=0.0)
            at = level + at_C * slt + tl.minimum(lowest_bit(e) + BITS + 1, LAST) * sll
            weight_C = tl.load(at, mask=ok_C, other=0.0).to(tl.float32) * tl.exp(log_C + passed)
            acc_CV += weight_C[:, None] * tl.dot(q_CK, x_KV, input_precision=PRECISION)
            passed += tl.load(totals + here + e)
            e = e & (e - 1)
    else:
        x_KV = tl.load(slots + (g * M + m) * F * V + tile_KV, mask=inside_KV, other=0.0)
        acc_CV += tl.exp(log_C)[:, None] * tl.dot(q_CK, x_KV, input_precision=PRECISION)
    to = out + row * sob + g * sog + j * soj + at_C[:, None] * sot + vv_V[None, :]
    tl.store(to, acc_CV.to(out.dtype.element_ty), mask=ok_CV)
