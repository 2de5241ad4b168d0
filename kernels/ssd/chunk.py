"""What the kernels of gated masks share: where a chunk lies, its gates, its piece of the mask.

    M_ts = lambda_t^(level(t, s)) exp(g_s+1 + .. + g_t)   inside a chunk of C tokens, log-gates g <= 0

Sums of gates are kept as an exact part (multiples of 1/1024) and a small rest, so that their differences keep small
gates behind large ones; no exp of a positive number anywhere. A log-gate below -60 counts as -60: 0 to float32.

Chunks of all sequences lie one behind the other, `count` for each row of a batch, or as `seq_of` (the sequence of a
chunk) and `first_of` (the first chunk of a sequence) say where sequences are packed into one row (cu_seqlens `ends`).
Chunks are counted from position 0, so that a row that starts inside one begins with empty slots.
"""

import triton
import triton.language as tl


@triton.jit
def load_sequence(seq, start, ends, first_of, count, T, C: tl.constexpr, VARLEN: tl.constexpr):
    """Of one sequence: (row, first token, tokens, the number of its first chunk, the slot its first token is in, the
    place of its first chunk)."""
    if VARLEN:
        row = seq * 0
        begin = tl.load(ends + seq).to(tl.int32)
        length = tl.load(ends + seq + 1).to(tl.int32) - begin
        first = row
        off = row
        base = tl.load(first_of + seq)
    else:
        row = seq
        begin = seq * 0
        length = begin + T
        position = tl.load(start + seq)
        first = (position // C).to(tl.int32)
        off = (position % C).to(tl.int32)
        base = seq * count
    return row, begin, length, first, off, base


@triton.jit
def load_chunk(m, start, ends, seq_of, first_of, count, T, C: tl.constexpr, VARLEN: tl.constexpr):
    """Of the chunk at place m: (row, first token, tokens of its sequence, its number, and as above)."""
    if VARLEN:
        seq = tl.load(seq_of + m)
    else:
        seq = m // count
    row, begin, length, first, off, base = load_sequence(seq, start, ends, first_of, count, T, C, VARLEN)
    return row, begin, length, first + m - base, first, off, base


@triton.jit(do_not_specialize=["count", "T", "M"])
def sum_gates(
    gate, sums, start, ends, seq_of, first_of, count, T, M, sgb, sgg, sgt, C: tl.constexpr, VARLEN: tl.constexpr
):  # fmt: skip
    """sums (G, M, 2, C): of the log-gates from the chunk's start up to each token, exact part and rest."""
    m = tl.program_id(0)
    row, begin, length, unit, first, off, _ = load_chunk(m, start, ends, seq_of, first_of, count, T, C, VARLEN)
    t0 = (unit - first) * C - off
    g = tl.program_id(1).to(tl.int64)
    x_C = tl.arange(0, C)
    ok_C = (t0 + x_C >= 0) & (t0 + x_C < length)
    at_C = row.to(tl.int64) * sgb + g * sgg + (begin + t0 + x_C).to(tl.int64) * sgt
    gate_C = tl.maximum(tl.load(gate + at_C, mask=ok_C, other=0.0).to(tl.float32), -60.0)
    coarse_C = tl.floor(gate_C * 1024.0) * (1.0 / 1024.0)
    to = sums + (g * M + m) * 2 * C
    tl.store(to + x_C, tl.cumsum(coarse_C, 0))
    tl.store(to + C + x_C, tl.cumsum(gate_C - coarse_C, 0))


@triton.jit
def load_gate_sums(sums, place, C: tl.constexpr):
    """Of the chunk at a place: (exact part, rest)."""
    at_C = sums + place * 2 * C + tl.arange(0, C)
    return tl.load(at_C), tl.load(at_C + C)


@triton.jit
def load_gate_total(sums, place, C: tl.constexpr):
    """The same over the whole chunk."""
    at = sums + place * 2 * C + C - 1
    return tl.load(at), tl.load(at + C)


@triton.jit
def decay_mask(coarse_C, fine_C, C: tl.constexpr):
    """exp(g_s+1 + .. + g_t) where s <= t, 0 elsewhere, [t, s]."""
    x_C = tl.arange(0, C)
    log_CC = (coarse_C[:, None] - coarse_C[None, :]) + (fine_C[:, None] - fine_C[None, :])
    return tl.where(x_C[:, None] >= x_C[None, :], tl.exp(tl.minimum(log_CC, 0.0)), 0.0)


@triton.jit
def level_matrix(BITS: tl.constexpr, C: tl.constexpr):
    """level(t, s) inside a chunk: the bit length of t xor s."""
    x_C = tl.arange(0, C)
    differs_CC = x_C[:, None] ^ x_C[None, :]
    level_CC = tl.zeros([C, C], tl.int32)
    for b in tl.static_range(BITS):
        level_CC += (differs_CC >= (1 << b)).to(tl.int32)
    return level_CC


@triton.jit
def lambda_matrix(level, at_C, ok_C, stride_t, stride_l, LAST: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """lambda_t^(level(t, s)), [t, s]."""
    meets_CC = level_matrix(BITS, C)
    out_CC = tl.zeros([C, C], tl.float32)
    for b in tl.static_range(BITS + 1):
        lambda_C = tl.load(level + at_C * stride_t + min(b, LAST) * stride_l, mask=ok_C, other=0.0).to(tl.float32)
        out_CC = tl.where(meets_CC == b, lambda_C[:, None], out_CC)
    return out_CC


@triton.jit
def lowest_bit(x):
    """Its number, x > 0."""
    power = (x & -x).to(tl.float32)
    return (power.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def program_tile(F: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Of the program's tile of a state, the third axis of the grid: (features, values, places in (F, V), which are there)."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    kk_K = (tl.program_id(2) // tiles) * BK + tl.arange(0, BK)
    vv_V = (tl.program_id(2) % tiles) * BV + tl.arange(0, BV)
    return kk_K, vv_V, kk_K[:, None] * V + vv_V[None, :], (kk_K < F)[:, None] & (vv_V < V)[None, :]


@triton.jit
def chunk_state(
    k, v, sums, place, inside, t0, length, skt, svt, kk_K, vv_V, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(sum of k v^T as it stands at the chunk's end, [K, V]; its log-gate); zeros unless the place is inside."""
    x_C = tl.arange(0, C)
    t_C = t0 + x_C
    ok_C = (t_C >= 0) & (t_C < length)
    t_C = t_C.to(tl.int64)
    k_CK = tl.load(k + t_C[:, None] * skt + kk_K[None, :], mask=ok_C[:, None] & (kk_K < F)[None, :], other=0.0)
    v_CV = tl.load(v + t_C[:, None] * svt + vv_V[None, :], mask=ok_C[:, None] & (vv_V < V)[None, :], other=0.0)
    at = sums + place * 2 * C
    coarse_C = tl.load(at + x_C, mask=ok_C, other=0.0)
    fine_C = tl.load(at + C + x_C, mask=ok_C, other=0.0)
    coarse = tl.load(at + C - 1, mask=inside, other=0.0)
    fine = tl.load(at + 2 * C - 1, mask=inside, other=0.0)
    weight_C = tl.exp(tl.minimum((coarse - coarse_C) + (fine - fine_C), 0.0))
    v_CV = (v_CV.to(tl.float32) * weight_C[:, None]).to(DOT)
    return tl.dot(tl.trans(k_CK.to(DOT)), v_CV, input_precision=PRECISION), coarse + fine
