"""States of gated masks between chunks, and their gradients (Dao and Gu 2024, "Transformers are SSMs", section 6).

    S_n+1 = exp(gates of chunk n) S_n + sum of k v^T over chunk n, decayed to the chunk's end      S (F, V)

One program walks through all chunks of a sequence and holds its tile of the state in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.kernel_tensors import GroupTensor, HeadTensor
from surgery.kernels.ssd.chunk import (
    StateTile,
    chunk_state,
    load_gate_sums,
    load_gate_total,
    load_sequence,
    program_tile,
)
from surgery.kernels.ssd.layout import ChunkedPlan, SlotStates

# Tiles and pipelining: the fastest on one H200, 2026-11-21, B = 2, 48 heads, K = 128, V = 64, T = 8192.
BLOCK_K, BLOCK_V, STAGES = 64, 32, 3


@triton.jit(do_not_specialize=["count", "T", "M"])
def pass_forward(
    k, v, sums, slots, first_state, last_state, table, count, T, M, G,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FIRST: tl.constexpr,
    VARLEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store slots (G, M, F, V), the state before each chunk, and last_state (seqs, G, F, V) in float32.

    Grid: (seqs, G, tiles).

    k, v: `GroupTensor`; sums (G, M, 2, C). FIRST: sequences start from first_state (seqs, G, F, V), float32, else from
    0.
    """
    seq = tl.program_id(0)
    sequence = load_sequence(seq, table, count, T, C, VARLEN)
    g = tl.program_id(1).to(tl.int64)
    kk_K, vv_V, tile_KV, inside_KV = program_tile(F, V, BK, BV)
    row, at = sequence.row.to(tl.int64), sequence.begin.to(tl.int64)
    k_row = k.ptr + (row * k.b + g * k.g + at * k.t)
    v_row = v.ptr + (row * v.b + g * v.g + at * v.t)
    tile = StateTile(k_row, v_row, k.t, v.t, sums, sequence.length, kk_K, vv_V)
    here = g * M + sequence.base
    state_KV = tl.zeros([BK, BV], tl.float32)
    if FIRST:
        state_KV += tl.load(first_state + (seq * G + g) * F * V + tile_KV, mask=inside_KV, other=0.0)
    for n in tl.range(0, (sequence.length + C - 1) // C, num_stages=STAGES):
        tl.store(slots + (here + n) * F * V + tile_KV, state_KV.to(slots.dtype.element_ty), mask=inside_KV)
        x_KV, total = chunk_state(tile, here + n, True, n * C, F, V, C, DOT, PRECISION)
        state_KV = tl.exp(total) * state_KV + x_KV
    tl.store(last_state + (seq * G + g) * F * V + tile_KV, state_KV, mask=inside_KV)


@triton.jit(do_not_specialize=["count", "T", "M"])
def pass_backward(
    q, sums, d_out, d_slots, d_first, d_last, table, count, T, M, G, J,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    VARLEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store d_slots (G, M, F, V), the gradient of the state behind each chunk, and d_first. Grid: (seqs, G, tiles).

    q, d_out: `HeadTensor`; d_first, d_last (seqs, G, F, V): gradients of the first and last state, float32.
    """
    seq = tl.program_id(0)
    sequence = load_sequence(seq, table, count, T, C, VARLEN)
    g = tl.program_id(1).to(tl.int64)
    x_C = tl.arange(0, C)
    kk_K, vv_V, tile_KV, inside_KV = program_tile(F, V, BK, BV)
    row, at = sequence.row.to(tl.int64), sequence.begin.to(tl.int64)
    q_row = q.ptr + (row * q.b + g * q.g + at * q.t)
    do_row = d_out.ptr + (row * d_out.b + g * d_out.g + at * d_out.t)
    here = g * M + sequence.base
    state_KV = tl.load(d_last + (seq * G + g) * F * V + tile_KV, mask=inside_KV, other=0.0)
    chunks = (sequence.length + C - 1) // C
    for i in tl.range(0, chunks * J, num_stages=STAGES):
        n = chunks - 1 - i // J
        j = (i % J).to(tl.int64)
        t_C = (n * C + x_C).to(tl.int64)
        ok_C = t_C < sequence.length
        q_CK = tl.load(
            q_row + j * q.j + t_C[:, None] * q.t + kk_K[None, :], mask=ok_C[:, None] & (kk_K < F)[None, :], other=0.0
        )
        do_CV = tl.load(
            do_row + j * d_out.j + t_C[:, None] * d_out.t + vv_V[None, :],
            mask=ok_C[:, None] & (vv_V < V)[None, :],
            other=0.0,
        )
        coarse_C, fine_C = load_gate_sums(sums, here + n, C)
        if i % J == 0:
            tl.store(d_slots + (here + n) * F * V + tile_KV, state_KV.to(d_slots.dtype.element_ty), mask=inside_KV)
            coarse, fine = load_gate_total(sums, here + n, C)
            state_KV = tl.exp(coarse + fine) * state_KV
        do_CV = (do_CV.to(tl.float32) * tl.exp(coarse_C + fine_C)[:, None]).to(DOT)
        state_KV += tl.dot(tl.trans(q_CK.to(DOT)), do_CV, input_precision=PRECISION)
    tl.store(d_first + (seq * G + g) * F * V + tile_KV, state_KV, mask=inside_KV)


def launch_pass_forward(plan: ChunkedPlan, first_SGFV: Tensor | None) -> tuple[SlotStates, Tensor]:
    """Return (the state before each chunk, last_SGFV)."""
    table, (groups, _, features, values) = plan.table, plan.sizes
    slots = plan.empty_slots()
    last = plan.sums.new_empty(table.seqs, groups, features, values)
    block_k, block_v, tiles = plan.state_tiles(BLOCK_K, BLOCK_V)
    pass_forward[(table.seqs, groups, tiles)](
        GroupTensor.from_tensor(plan.k), GroupTensor.from_tensor(plan.v), plan.sums, slots,
        last if first_SGFV is None else first_SGFV, last, table.pointers(), *table.sizes, groups,
        FIRST=first_SGFV is not None, **plan.options(block_k, block_v), STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return SlotStates(slots), last


def launch_pass_backward(plan: ChunkedPlan, d_out: Tensor, d_last: Tensor) -> tuple[Tensor, Tensor]:
    """Return (d_slots_GMFV: the gradient of the state behind each chunk, d_first_SGFV)."""
    table, (groups, per_group, _, _) = plan.table, plan.sizes
    d_slots, d_first = plan.empty_slots(), torch.empty_like(d_last)
    block_k, block_v, tiles = plan.state_tiles(BLOCK_K, BLOCK_V)
    pass_backward[(table.seqs, groups, tiles)](
        HeadTensor.from_tensor(plan.q), plan.sums, HeadTensor.from_tensor(d_out), d_slots, d_first, d_last,
        table.pointers(), *table.sizes, groups, per_group, **plan.options(block_k, block_v), STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return d_slots, d_first
