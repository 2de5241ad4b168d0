"""States of a Fenwick tree over chunks (Guo et al. 2025, section 3.3), each held once.

A left segment of 2^l chunks ends before a chunk e whose lowest set bit is l: so slot e - 1 holds the state of the
segment that ends with chunk e - 1, as the array of a Fenwick tree does, and chunk n reads the slots e = n, n & (n - 1),
.. > its sequence's first chunk. Eight segments become one in registers; every state is read and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.ssd.chunk import (
    chunk_state,
    load_chunk,
    load_gate_sums,
    load_gate_total,
    load_sequence,
    lowest_bit,
    program_tile,
)
from surgery.kernels.ssd.layout import (
    ChunkTable,
    TokenTensors,
    level_strides,
    power_of_two,
    product_options,
    state_dtype,
)

# Tiles of `grow` and of `slot_gradients`, and pipelining: the fastest on one H200, 2026-11-21, B = 2, 48 heads, K = 128,
# V = 64, T = 8192.
BLOCK_K, BLOCK_V, READ_K, READ_V, STAGES = 64, 64, 128, 64, 3


@triton.jit
def tops_of(seq, base, count, VARLEN: tl.constexpr):
    """The first place of a sequence in `tops` and `block_log_gates`, as `Lay.units(3)` counts them: a row of a batch has
    count // 8 + 2 places, also where 8 does not divide count, and a packed sequence of n chunks has n // 8 + 1 or more."""
    if VARLEN:
        return (base >> 3) + seq
    else:
        return seq * ((count >> 3) + 2)


@triton.jit(do_not_specialize=["count", "T", "M", "U", "shift", "levels"])
def build_slots(
    k, v, sums, slots, totals, rights, tops, gates, final, closing_S, start, ends, seq_of, first_of,
    count, T, M, U, shift, levels, G, skb, skg, skt, svb, svg, svt,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEAVES: tl.constexpr,
    FINAL: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Eight segments of 2^shift chunks. slots (G, M, F, V): as above; totals, rights (G, M): log-gates of a slot's
    segment and of its right sibling; tops (G, U, F, V) float32: states of whole segments of 8 2^shift chunks, at their
    last eight chunks; gates (G, U): their log-gates, those of the launch before lie before; final (seqs, levels, G, F,
    V) float32: the slots that a token behind the last one would read."""
    m = tl.program_id(0)
    if VARLEN:
        seq = tl.load(seq_of + m)
    else:
        seq = m // ((count >> (shift + 3)) + 2)
    row, begin, length, first, off, base = load_sequence(seq, start, ends, first_of, count, T, C, VARLEN)
    if VARLEN:
        unit = m - (base >> (shift + 3)) - seq
    else:
        unit = (first >> (shift + 3)) + m % ((count >> (shift + 3)) + 2)
    chunks = (off + length + C - 1) // C
    if ((unit << (shift + 3)) >= first + chunks) or (chunks <= 0):
        return
    g = tl.program_id(1).to(tl.int64)
    kk_K, vv_V, tile_KV, inside_KV = program_tile(F, V, BK, BV)
    wide, at = row.to(tl.int64), begin.to(tl.int64)
    k += wide * skb + g * skg + at * skt
    v += wide * svb + g * svg + at * svt
    here = base + g * M - 1 - first  # slots are counted by the chunk behind them, from position 0
    top = g * U + tops_of(seq, base, count, VARLEN) - (first >> 3) - 1
    if FINAL:
        closing = tl.load(closing_S + seq).to(tl.int32)
    a_KV, b_KV, c_KV = inside_KV, inside_KV, inside_KV  # left siblings of 1, 2, 4 segments
    a, b, c = 0.0, 0.0, 0.0
    for i in tl.static_range(8):
        e = (unit * 8 + i + 1) << shift
        inside = (e > first) & (e <= first + chunks)
        if LEAVES:
            t0 = (e - 1 - first) * C - off
            x_KV, total = chunk_state(
                k, v, sums, (here + e), inside, t0, length, skt, svt, kk_K, vv_V, F, V, C, DOT, PRECISION
            )  # fmt: skip
        else:
            x_KV = tl.load(tops + (top + (e >> 3)) * F * V + tile_KV, mask=inside_KV & inside, other=0.0)
            total = tl.load(gates - G * U + top + (e >> 3), mask=inside, other=0.0)
        if i % 2 == 1:
            tl.store(rights + here + e - (1 << shift), total, mask=inside & (e - (1 << shift) > first))
            x_KV += tl.exp(total) * a_KV
            total += a
        if i % 4 == 3:
            tl.store(rights + here + e - (2 << shift), total, mask=inside & (e - (2 << shift) > first))
            x_KV += tl.exp(total) * b_KV
            total += b
        if i == 7:
            tl.store(rights + here + e - (4 << shift), total, mask=inside & (e - (4 << shift) > first))
            x_KV += tl.exp(total) * c_KV
            total += c
            tl.store(tops + (top + (e >> 3)) * F * V + tile_KV, x_KV, mask=inside_KV & inside)
            tl.store(gates + top + (e >> 3), total, mask=inside)
        elif i % 4 == 3:
            c_KV, c = x_KV, total
        elif i % 2 == 1:
            b_KV, b = x_KV, total
        else:
            a_KV, a = x_KV, total
        if LEAVES or (i % 2 == 1):
            tl.store(slots + (here + e) * F * V + tile_KV, x_KV.to(slots.dtype.element_ty), mask=inside_KV & inside)
            tl.store(totals + here + e, total, mask=inside)
            if FINAL:
                bit = lowest_bit(e)  # of whole units it may be higher than here: later launches write again
                closes = inside & (((closing >> bit) << bit) == e) & (bit < levels)
                to = final + ((seq * levels + bit) * G + g) * F * V
                tl.store(to + tile_KV, x_KV, mask=inside_KV & closes)


@triton.jit(do_not_specialize=["count", "T", "M", "order", "levels"])
def slot_gradients(
    q, sums, level, d_out, d_final, d_slots, closing_S, start, ends, seq_of, first_of,
    count, T, M, order, levels, G, J, sqb, sqg, sqj, sqt, slb, slg, slj, slt, sll, sob, sog, soj, sot,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAST: tl.constexpr, FINAL: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """d_slots (G, M, F, V): gradients of the slots by the chunks that read them, those of its right sibling, and where
    FINAL by d_final. Slots that many read come first: a row's slots in the order of their number's bits reversed,
    of which there are `order`."""
    m = tl.program_id(0)
    if not VARLEN:
        place = m * 0
        for b in tl.static_range(24):
            place = place * 2 + ((m >> b) & 1)
        place = place >> (24 - order)
        m = (m >> order) * count + place
        if place >= count:
            return
    row, begin, length, unit, first, off, base = load_chunk(m, start, ends, seq_of, first_of, count, T, C, VARLEN)
    last = first + (off + length + C - 1) // C
    e = unit + 1
    bit = lowest_bit(e)
    readers = tl.minimum(last - e, 1 << bit)
    g = tl.program_id(1).to(tl.int64)
    x_C = tl.arange(0, C)
    kk_K, vv_V, tile_KV, inside_KV = program_tile(F, V, BK, BV)
    acc_KV = tl.zeros([BK, BV], tl.float32)
    if FINAL:
        seq = tl.load(seq_of + m) if VARLEN else row
        closing = tl.load(closing_S + seq).to(tl.int32)
        closes = (((closing >> bit) << bit) == e) & (bit < levels)
        acc_KV += tl.load(
            d_final + ((seq * levels + bit) * G + g) * F * V + tile_KV, mask=inside_KV & closes, other=0.0
        )
    wide, at = row.to(tl.int64), begin.to(tl.int64)
    q += wide * sqb + g * sqg + at * sqt
    d_out += wide * sob + g * sog + at * sot
    level += wide * slb + g * slg + at * slt + tl.minimum(bit + BITS + 1, LAST) * sll
    here = g * M + base + e - first
    passed = 0.0
    for n in tl.range(0, readers * J, num_stages=STAGES):
        j = (n % J).to(tl.int64)
        t_C = ((e - first + n // J) * C - off + x_C).to(tl.int64)
        ok_C = t_C < length
        q_CK = tl.load(
            q + j * sqj + t_C[:, None] * sqt + kk_K[None, :], mask=ok_C[:, None] & (kk_K < F)[None, :], other=0.0
        )
        do_CV = tl.load(
            d_out + j * soj + t_C[:, None] * sot + vv_V[None, :], mask=ok_C[:, None] & (vv_V < V)[None, :], other=0.0
        )
        coarse_C, fine_C = load_gate_sums(sums, here + n // J, C)
        lambda_C = tl.load(level + j * slj + t_C * slt, mask=ok_C, other=0.0).to(tl.float32)
        weight_C = lambda_C * tl.exp(coarse_C + fine_C + passed)
        do_CV = (do_CV.to(tl.float32) * weight_C[:, None]).to(DOT)
        acc_KV += tl.dot(tl.trans(q_CK.to(DOT)), do_CV, input_precision=PRECISION)
        coarse, fine = load_gate_total(sums, here + n // J, C)
        passed += tl.where(n % J == J - 1, coarse + fine, 0.0)
    if e <= last:
        tl.store(d_slots + (g * M + m) * F * V + tile_KV, acc_KV.to(d_slots.dtype.element_ty), mask=inside_KV)


def launch_build_slots(
    table: ChunkTable, tokens: TokenTensors, closing_S: Tensor, levels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(slots_GMFV, totals_GM, rights_GM, final_SLGFV), see `grow`: final for chunks closing_S, `levels` of them."""
    groups, _, features, values = tokens.sizes
    slots = tokens.v.new_empty(groups, table.places, features, values, dtype=state_dtype(tokens.v.dtype))
    totals, rights = (tokens.sums.new_empty(groups, table.places) for _ in range(2))
    tops = tokens.sums.new_empty(groups, table.units(3), features, values)
    final = tokens.sums.new_zeros(table.seqs, levels, groups, features, values)
    block_k, block_v = min(power_of_two(features), BLOCK_K), min(power_of_two(values), BLOCK_V)
    tiles, shift = triton.cdiv(features, block_k) * triton.cdiv(values, block_v), 0
    launches = -(-max(table.most - 1, 1).bit_length() // 3)
    gates = tokens.sums.new_empty(
        launches, groups, table.units(3)
    )  # apart: programs of other tiles still read the last one's
    while shift == 0 or table.most > 1 << shift:
        build_slots[(table.units(shift + 3), groups, tiles)](
            tokens.k, tokens.v, tokens.sums, slots, totals, rights, tops, gates[shift // 3], final, closing_S,
            *table.tables(shift + 3), table.count, table.length, table.places, table.units(3), shift, levels, groups,
            *tokens.k.stride()[:3], *tokens.v.stride()[:3], F=features, V=values, C=table.chunk, BK=block_k,
            BV=block_v, LEAVES=shift == 0, FINAL=levels > 0, VARLEN=table.varlen, **product_options(tokens.v.dtype),
            num_warps=4,
        )  # fmt: skip
        shift += 3
    return slots, totals, rights, final


def launch_slot_gradients(
    table: ChunkTable, tokens: TokenTensors, d_out: Tensor, d_final: Tensor, closing_S: Tensor
) -> Tensor:
    """d_slots_GMFV, see `slot_gradients`."""
    assert tokens.level is not None
    groups, per_group, features, values = tokens.sizes
    d_slots = tokens.v.new_empty(groups, table.places, features, values, dtype=state_dtype(tokens.v.dtype))
    block_k, block_v = min(power_of_two(features), READ_K), min(power_of_two(values), READ_V)
    tiles = triton.cdiv(features, block_k) * triton.cdiv(values, block_v)
    order = max(table.count - 1, 0).bit_length()
    slot_gradients[(table.places if table.varlen else table.seqs << order, groups, tiles)](
        tokens.q, tokens.sums, tokens.level, d_out, d_final, d_slots, closing_S, *table.tables(), table.count, table.length, table.places,
        order, d_final.shape[1], groups, per_group, *tokens.q.stride()[:4], *level_strides(tokens.level), *d_out.stride()[:4],
        F=features, V=values, C=table.chunk, BITS=table.bits, BK=block_k, BV=block_v, LAST=tokens.last,
        FINAL=d_final.shape[1] > 0, VARLEN=table.varlen, **product_options(tokens.v.dtype), STAGES=STAGES,
        num_warps=4,
    )  # fmt: skip
    return d_slots
