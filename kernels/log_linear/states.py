"""States of a Fenwick tree over chunks (Guo et al. 2025, "Log-Linear Attention", section 3.3), each stored once.

A left segment of 2^l chunks ends before a chunk e whose lowest set bit is l. Slot e - 1 therefore holds the state of
the segment that ends with chunk e - 1, as in the array of a Fenwick tree, and chunk n reads the slots e = n, n & (n -
1),
.. > the first chunk of its sequence. A launch joins eight segments at a time in registers, so that every state is read
and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.kernel_tensors import GroupTensor, HeadTensor, LevelTensor
from surgery.kernels.ssd.chunk import (
    StateTile,
    chunk_state,
    end_chunk,
    load_chunk,
    load_gate_sums,
    load_gate_total,
    load_sequence,
    lowest_bit,
    program_tile,
)
from surgery.kernels.ssd.layout import ChunkedPlan, SlotStates

# Tiles of `build_slots` (BLOCK) and of `slot_gradients` (READ), and pipelining: the fastest on one H200, 2026-11-21, B
# = 2, 48 heads, K = 128, V = 64, T = 8192.
BLOCK_K, BLOCK_V, READ_K, READ_V, STAGES = 64, 64, 128, 64, 3


@triton.jit
def tops_of(seq, base, count, VARLEN: tl.constexpr):
    """Return the first place of a sequence in `tops` and `gates` of `build_slots`, which have `ChunkTable.units(3)`
    places.

    A row of a batch has count // 8 + 2 places, also if 8 does not divide count. A packed sequence of n chunks has at
    least n // 8 + 1 places.
    """
    if VARLEN:
        return (base >> 3) + seq
    else:
        return seq * ((count >> 3) + 2)


@triton.jit(do_not_specialize=["count", "T", "M", "U", "shift", "levels"])
def build_slots(
    k, v, sums, slots, totals, rights, tops, gates, final, closing_S, table, count, T, M, U, shift, levels, G,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEAVES: tl.constexpr,
    FINAL: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Join eight segments of 2^shift chunks and store their states. Grid: (segments of 2^(shift + 3) chunks, G, tiles).

    k, v: `GroupTensor`; sums (G, M, 2, C). slots (G, M, F, V): the tree. totals, rights (G, M): log-gates of a slot's
    segment and of its right sibling. tops (G, U, F, V), float32: states of whole segments of 8 * 2^shift chunks, at the
    place of their last eight chunks. gates (G, U): log-gates of those segments; the previous launch's lie G * U before.
    final (seqs, levels, G, F, V), float32: the slots that a token at chunk closing_S would read (FINAL). LEAVES: the
    segments are chunks.
    """
    m = tl.program_id(0)
    if VARLEN:
        seq = tl.load(table.seq_of + m)
    else:
        seq = m // ((count >> (shift + 3)) + 2)
    sequence = load_sequence(seq, table, count, T, C, VARLEN)
    first, base = sequence.first, sequence.base
    if VARLEN:
        unit = m - (base >> (shift + 3)) - seq
    else:
        unit = (first >> (shift + 3)) + m % ((count >> (shift + 3)) + 2)
    chunks = (sequence.off + sequence.length + C - 1) // C
    if ((unit << (shift + 3)) >= first + chunks) or (chunks <= 0):
        return
    g = tl.program_id(1).to(tl.int64)
    kk_K, vv_V, tile_KV, inside_KV = program_tile(F, V, BK, BV)
    row, at = sequence.row.to(tl.int64), sequence.begin.to(tl.int64)
    k_row = k.ptr + (row * k.b + g * k.g + at * k.t)
    v_row = v.ptr + (row * v.b + g * v.g + at * v.t)
    tile = StateTile(k_row, v_row, k.t, v.t, sums, sequence.length, kk_K, vv_V)
    here = base + g * M - 1 - first  # slots are counted by the chunk behind them, from position 0
    top = g * U + tops_of(seq, base, count, VARLEN) - (first >> 3) - 1
    if FINAL:
        closing = tl.load(closing_S + seq).to(tl.int32)
    # Left siblings of 1, 2 and 4 segments, replaced before they are read.
    a_KV, b_KV, c_KV = inside_KV, inside_KV, inside_KV
    a, b, c = 0.0, 0.0, 0.0
    for i in tl.static_range(8):
        e = (unit * 8 + i + 1) << shift
        inside = (e > first) & (e <= first + chunks)
        if LEAVES:
            t0 = (e - 1 - first) * C - sequence.off
            x_KV, total = chunk_state(tile, here + e, inside, t0, F, V, C, DOT, PRECISION)
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
                bit = lowest_bit(e)  # may belong to a later launch, which then writes the whole segment here
                closes = inside & (((closing >> bit) << bit) == e) & (bit < levels)
                to = final + ((seq * levels + bit) * G + g) * F * V
                tl.store(to + tile_KV, x_KV, mask=inside_KV & closes)


@triton.jit(do_not_specialize=["count", "T", "M", "order", "levels"])
def slot_gradients(
    q, sums, level, d_out, d_final, d_slots, closing_S, table, count, T, M, order, levels, G, J,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAST: tl.constexpr, FINAL: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Store d_slots (G, M, F, V): the gradient of each slot from the chunks that read it, those of its right sibling,
    and with FINAL from d_final (seqs, levels, G, F, V). Grid: (M, or seqs << order; G; tiles).

    q, d_out: `HeadTensor`; level: `LevelTensor`. Slots with many readers come first, to balance the load: a row's slots
    in the order of their number's `order` bits reversed.
    """
    m = tl.program_id(0)
    if not VARLEN:
        place = m * 0
        for b in tl.static_range(24):
            place = place * 2 + ((m >> b) & 1)
        place = place >> (24 - order)
        m = (m >> order) * count + place
        if place >= count:
            return
    unit, sequence = load_chunk(m, table, count, T, C, VARLEN)
    last = end_chunk(sequence, C)
    e = unit + 1
    bit = lowest_bit(e)
    readers = tl.minimum(last - e, 1 << bit)
    g = tl.program_id(1).to(tl.int64)
    x_C = tl.arange(0, C)
    kk_K, vv_V, tile_KV, inside_KV = program_tile(F, V, BK, BV)
    acc_KV = tl.zeros([BK, BV], tl.float32)
    if FINAL:
        seq = tl.load(table.seq_of + m) if VARLEN else sequence.row
        closing = tl.load(closing_S + seq).to(tl.int32)
        closes = (((closing >> bit) << bit) == e) & (bit < levels)
        acc_KV += tl.load(
            d_final + ((seq * levels + bit) * G + g) * F * V + tile_KV, mask=inside_KV & closes, other=0.0
        )
    row, at = sequence.row.to(tl.int64), sequence.begin.to(tl.int64)
    q_row = q.ptr + (row * q.b + g * q.g + at * q.t)
    do_row = d_out.ptr + (row * d_out.b + g * d_out.g + at * d_out.t)
    of_slot = row * level.b + g * level.g + at * level.t + tl.minimum(bit + BITS + 1, LAST) * level.l
    level_row = level.ptr + of_slot
    here = g * M + sequence.base + e - sequence.first
    passed = 0.0
    for n in tl.range(0, readers * J, num_stages=STAGES):
        j = (n % J).to(tl.int64)
        t_C = ((e - sequence.first + n // J) * C - sequence.off + x_C).to(tl.int64)
        ok_C = t_C < sequence.length
        q_CK = tl.load(
            q_row + j * q.j + t_C[:, None] * q.t + kk_K[None, :], mask=ok_C[:, None] & (kk_K < F)[None, :], other=0.0
        )
        do_CV = tl.load(
            do_row + j * d_out.j + t_C[:, None] * d_out.t + vv_V[None, :],
            mask=ok_C[:, None] & (vv_V < V)[None, :],
            other=0.0,
        )
        coarse_C, fine_C = load_gate_sums(sums, here + n // J, C)
        lambda_C = tl.load(level_row + j * level.j + t_C * level.t, mask=ok_C, other=0.0).to(tl.float32)
        weight_C = lambda_C * tl.exp(coarse_C + fine_C + passed)
        do_CV = (do_CV.to(tl.float32) * weight_C[:, None]).to(DOT)
        acc_KV += tl.dot(tl.trans(q_CK.to(DOT)), do_CV, input_precision=PRECISION)
        coarse, fine = load_gate_total(sums, here + n // J, C)
        passed += tl.where(n % J == J - 1, coarse + fine, 0.0)
    if e <= last:
        tl.store(d_slots + (g * M + m) * F * V + tile_KV, acc_KV.to(d_slots.dtype.element_ty), mask=inside_KV)


def launch_build_slots(plan: ChunkedPlan, closing_S: Tensor, levels: int) -> tuple[SlotStates, Tensor]:
    """Return (the tree, final_SLGFV: the `levels` slots that a token at chunk closing_S of each sequence would
    read).
    """
    table, (groups, _, features, values) = plan.table, plan.sizes
    slots = plan.empty_slots()
    totals, rights = (plan.sums.new_empty(groups, table.places) for _ in range(2))
    tops = plan.sums.new_empty(groups, table.units(3), features, values)
    final = plan.sums.new_zeros(table.seqs, levels, groups, features, values)
    block_k, block_v, tiles = plan.state_tiles(BLOCK_K, BLOCK_V)
    launches = -(-max(table.most - 1, 1).bit_length() // 3)
    # One buffer for each launch: programs of other tiles may still read what the launch before wrote.
    gates = plan.sums.new_empty(launches, groups, table.units(3))
    shift = 0
    while shift == 0 or table.most > 1 << shift:
        build_slots[(table.units(shift + 3), groups, tiles)](
            GroupTensor.from_tensor(plan.k), GroupTensor.from_tensor(plan.v), plan.sums, slots, totals, rights, tops,
            gates[shift // 3], final, closing_S, table.pointers(shift + 3), *table.sizes, table.units(3), shift, levels,
            groups, LEAVES=shift == 0, FINAL=levels > 0, **plan.options(block_k, block_v), num_warps=4,
        )  # fmt: skip
        shift += 3
    return SlotStates(slots, totals, rights), final


def launch_slot_gradients(plan: ChunkedPlan, d_out: Tensor, d_final: Tensor, closing_S: Tensor) -> Tensor:
    """Return d_slots_GMFV (`slot_gradients`). The plan must have lambdas."""
    assert plan.level is not None
    table, (groups, per_group, _, _) = plan.table, plan.sizes
    d_slots, levels = plan.empty_slots(), d_final.shape[1]
    block_k, block_v, tiles = plan.state_tiles(READ_K, READ_V)
    order = max(table.count - 1, 0).bit_length()
    slot_gradients[(table.places if table.varlen else table.seqs << order, groups, tiles)](
        HeadTensor.from_tensor(plan.q), plan.sums, LevelTensor.from_tensor(plan.level), HeadTensor.from_tensor(d_out),
        d_final, d_slots, closing_S, table.pointers(), *table.sizes, order, levels, groups, per_group, BITS=table.bits,
        LAST=plan.last, FINAL=levels > 0, **plan.options(block_k, block_v), STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return d_slots
