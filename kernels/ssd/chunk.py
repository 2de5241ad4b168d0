"""Device functions that the kernels of gated masks share: where a chunk lies, its gates, its block of the mask.

    M_ts = lambda_t^(level(t, s)) exp(g_s+1 + .. + g_t)   inside a chunk of C tokens, log-gates g <= 0

Sums of log-gates are stored as a coarse part (multiples of 1/1024, whose sums are exact) and a fine rest, so that
differences of sums keep small gates behind large ones. No exp has a positive argument. A log-gate below -60 counts as
-60: its exp is 0 in float32.

The chunks of all sequences lie in one array of M places, one sequence behind the other. Rows of a batch have `count`
places each. For sequences packed into one row (VARLEN, with borders cu_seqlens) `seq_of` is the sequence of each place
and `first_of` the first place of each sequence. Chunks are counted from position 0 of their sequence, so a row that
starts inside a chunk has slots without tokens there.

Suffixes: C tokens of a chunk, K and V a tile of features and values; F, V: how many features and values there are.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class ChunkPointers(NamedTuple):
    """Tables of a `ChunkTable` (kernels/ssd/layout.py) as a kernel argument.

    They are, in this order: the position of each row's first token, the borders of packed sequences, the sequence of
    each place, and the first place of each sequence.
    """

    start: Tensor
    ends: Tensor
    seq_of: Tensor
    first_of: Tensor


class Sequence(NamedTuple):
    """Where a sequence lies.

    The fields are, in this order: its row, the index of its first token in the row, its number of tokens, the number of
    its first chunk, the slot of its first token in that chunk, and the place of that chunk.
    """

    row: tl.tensor
    begin: tl.tensor
    length: tl.tensor
    first: tl.tensor
    off: tl.tensor
    base: tl.tensor


@triton.jit
def load_sequence(seq, table, count, T, C: tl.constexpr, VARLEN: tl.constexpr):
    """Return the `Sequence` of this number. table: `ChunkPointers`."""
    if VARLEN:
        row = seq * 0
        begin = tl.load(table.ends + seq).to(tl.int32)
        length = tl.load(table.ends + seq + 1).to(tl.int32) - begin
        first = row
        off = row
        base = tl.load(table.first_of + seq)
    else:
        row = seq
        begin = seq * 0
        length = begin + T
        position = tl.load(table.start + seq)
        first = (position // C).to(tl.int32)
        off = (position % C).to(tl.int32)
        base = seq * count
    return Sequence(row, begin, length, first, off, base)


@triton.jit
def load_chunk(m, table, count, T, C: tl.constexpr, VARLEN: tl.constexpr):
    """Return (the number of the chunk at place m, the `Sequence` that it belongs to)."""
    if VARLEN:
        seq = tl.load(table.seq_of + m)
    else:
        seq = m // count
    sequence = load_sequence(seq, table, count, T, C, VARLEN)
    return sequence.first + m - sequence.base, sequence


@triton.jit
def first_token(unit, sequence, C: tl.constexpr):
    """Return the token, counted in its sequence, in slot 0 of chunk `unit`: negative if the sequence starts inside the
    chunk.
    """
    return (unit - sequence.first) * C - sequence.off


@triton.jit
def end_chunk(sequence, C: tl.constexpr):
    """Return the number of the first chunk behind the sequence."""
    return sequence.first + (sequence.off + sequence.length + C - 1) // C


@triton.jit(do_not_specialize=["count", "T", "M"])
def sum_gates(gate, sums, table, count, T, M, C: tl.constexpr, VARLEN: tl.constexpr):
    """Store sums (G, M, 2, C): sums of the log-gates from the chunk's start up to each token, coarse part and rest.

    gate: `GroupTensor` (B, G, T). Grid: (M, G).
    """
    m = tl.program_id(0)
    unit, sequence = load_chunk(m, table, count, T, C, VARLEN)
    t0 = first_token(unit, sequence, C)
    g = tl.program_id(1).to(tl.int64)
    x_C = tl.arange(0, C)
    ok_C = (t0 + x_C >= 0) & (t0 + x_C < sequence.length)
    at_C = sequence.row.to(tl.int64) * gate.b + g * gate.g + (sequence.begin + t0 + x_C).to(tl.int64) * gate.t
    gate_C = tl.maximum(tl.load(gate.ptr + at_C, mask=ok_C, other=0.0).to(tl.float32), -60.0)
    coarse_C = tl.floor(gate_C * 1024.0) * (1.0 / 1024.0)
    to = sums + (g * M + m) * 2 * C
    tl.store(to + x_C, tl.cumsum(coarse_C, 0))
    tl.store(to + C + x_C, tl.cumsum(gate_C - coarse_C, 0))


@triton.jit
def load_gate_sums(sums, place, C: tl.constexpr):
    """Return (coarse_C, fine_C): summed log-gates of the chunk at a place, up to each token."""
    at_C = sums + place * 2 * C + tl.arange(0, C)
    return tl.load(at_C), tl.load(at_C + C)


@triton.jit
def load_gate_total(sums, place, C: tl.constexpr):
    """Return (coarse, fine): summed log-gates of the whole chunk at a place."""
    at = sums + place * 2 * C + C - 1
    return tl.load(at), tl.load(at + C)


@triton.jit
def decay_mask(coarse_C, fine_C, C: tl.constexpr):
    """Return exp(g_s+1 + .. + g_t) for s <= t, else 0, as [t, s]."""
    x_C = tl.arange(0, C)
    log_CC = (coarse_C[:, None] - coarse_C[None, :]) + (fine_C[:, None] - fine_C[None, :])
    return tl.where(x_C[:, None] >= x_C[None, :], tl.exp(tl.minimum(log_CC, 0.0)), 0.0)


@triton.jit
def level_matrix(BITS: tl.constexpr, C: tl.constexpr):
    """Return level(t, s) inside a chunk of C = 2^BITS tokens: the bit length of t xor s."""
    x_C = tl.arange(0, C)
    differs_CC = x_C[:, None] ^ x_C[None, :]
    level_CC = tl.zeros([C, C], tl.int32)
    for b in tl.static_range(BITS):
        level_CC += (differs_CC >= (1 << b)).to(tl.int32)
    return level_CC


@triton.jit
def lambda_matrix(lambdas, at_C, ok_C, stride_t, stride_l, LAST: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """Return lambda_t^(level(t, s)) as [t, s]. lambdas: pointer to the head's lambdas; at_C: tokens; levels from LAST
    on share the last lambda."""
    meets_CC = level_matrix(BITS, C)
    out_CC = tl.zeros([C, C], tl.float32)
    for b in tl.static_range(BITS + 1):
        lambda_C = tl.load(lambdas + at_C * stride_t + min(b, LAST) * stride_l, mask=ok_C, other=0.0).to(tl.float32)
        out_CC = tl.where(meets_CC == b, lambda_C[:, None], out_CC)
    return out_CC


@triton.jit
def lowest_bit(x):
    """Return the number of the lowest set bit of x > 0."""
    power = (x & -x).to(tl.float32)
    return (power.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def program_tile(F: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Return the program's tile of a state, from the third axis of the grid: (features_K, values_V, offsets_KV in an
    (F, V) matrix, inside_KV)."""
    tiles: tl.constexpr = (V + BV - 1) // BV
    kk_K = (tl.program_id(2) // tiles) * BK + tl.arange(0, BK)
    vv_V = (tl.program_id(2) % tiles) * BV + tl.arange(0, BV)
    return kk_K, vv_V, kk_K[:, None] * V + vv_V[None, :], (kk_K < F)[:, None] & (vv_V < V)[None, :]


class StateTile(NamedTuple):
    """Where the keys and values of one sequence and group lie, and the tile of a state that a program holds: pointers
    to the first token, strides along tokens, pointer to the gate sums, tokens of the sequence, features_K, values_V."""

    k: tl.tensor
    v: tl.tensor
    k_t: tl.tensor
    v_t: tl.tensor
    sums: tl.tensor
    length: tl.tensor
    kk_K: tl.tensor
    vv_V: tl.tensor


@triton.jit
def chunk_state(
    tile, place, inside, t0, F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return (sum of k v^T over the chunk, decayed to the chunk's end, (K, V); the chunk's summed log-gates).

    Both are zero unless the place is inside. tile: `StateTile`; t0: the token in slot 0.
    """
    x_C = tl.arange(0, C)
    t_C = t0 + x_C
    ok_C = (t_C >= 0) & (t_C < tile.length)
    t_C = t_C.to(tl.int64)
    in_K, in_V = (tile.kk_K < F)[None, :], (tile.vv_V < V)[None, :]
    k_CK = tl.load(tile.k + t_C[:, None] * tile.k_t + tile.kk_K[None, :], mask=ok_C[:, None] & in_K, other=0.0)
    v_CV = tl.load(tile.v + t_C[:, None] * tile.v_t + tile.vv_V[None, :], mask=ok_C[:, None] & in_V, other=0.0)
    at = tile.sums + place * 2 * C
    coarse_C = tl.load(at + x_C, mask=ok_C, other=0.0)
    fine_C = tl.load(at + C + x_C, mask=ok_C, other=0.0)
    coarse = tl.load(at + C - 1, mask=inside, other=0.0)
    fine = tl.load(at + 2 * C - 1, mask=inside, other=0.0)
    weight_C = tl.exp(tl.minimum((coarse - coarse_C) + (fine - fine_C), 0.0))
    v_CV = (v_CV.to(tl.float32) * weight_C[:, None]).to(DOT)
    return tl.dot(tl.trans(k_CK.to(DOT)), v_CV, input_precision=PRECISION), coarse + fine
