"""Gradients of kernels/ssd/output.py, one chunk per program.

`read_grad`: gradients of queries and lambdas. `write_grad`: gradients of keys, values and log-gates. The gradient of a
log-gate is the sum of out * d_out over all pairs of tokens that the gate lies between. It has three parts: pairs inside
the chunk, what the chunk's tokens read of earlier chunks (`pull`) and write for later ones, and pairs whose decay
passes the whole chunk (`passing`, `shares`). The parts are summed separately, so that no sum is the small difference of
large ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.kernel_tensors import GroupTensor, HeadTensor, LevelTensor
from surgery.kernels.ssd.chunk import (
    decay_mask,
    end_chunk,
    first_token,
    lambda_matrix,
    level_matrix,
    load_chunk,
    load_gate_sums,
    load_gate_total,
    lowest_bit,
)
from surgery.kernels.ssd.layout import ChunkedPlan, SlotStates


@triton.jit(do_not_specialize=["count", "T", "M", "levels"])
def read_grad(
    q, k, v, sums, level, slots, totals, d_out, d_q, d_level, pull, shares, table, count, T, M, levels,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAST: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store d_q, d_level, pull and shares of one chunk and query head. Grid: (M, G, J).

    d_out, d_q (B, G, J, T, ..), pull (B, G, J, T): `HeadTensor`; d_level: `LevelTensor`. pull: sum of out * d_out over
    what each token reads of earlier chunks. shares (G, J, levels, M): the same for each chunk and the level of the
    slot. Other arguments as in `read`.
    """
    m = tl.program_id(0)
    unit, sequence = load_chunk(m, table, count, T, C, VARLEN)
    t0 = first_token(unit, sequence, C)
    if t0 >= sequence.length:
        return
    j = tl.program_id(2).to(tl.int64)
    x_C = tl.arange(0, C)
    ok_C = (t0 + x_C >= 0) & (t0 + x_C < sequence.length)
    at_C = (sequence.begin + t0 + x_C).to(tl.int64)
    kk_K = tl.arange(0, BK)
    vv_V = tl.arange(0, BV)
    ok_CK = ok_C[:, None] & (kk_K < F)[None, :]
    ok_CV = ok_C[:, None] & (vv_V < V)[None, :]
    tile_KV = kk_K[:, None] * V + vv_V[None, :]
    inside_KV = (kk_K < F)[:, None] & (vv_V < V)[None, :]
    row = sequence.row.to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    q_CK = tl.load(q.ptr + row * q.b + g * q.g + j * q.j + at_C[:, None] * q.t + kk_K[None, :], mask=ok_CK, other=0.0)
    k_CK = tl.load(k.ptr + row * k.b + g * k.g + at_C[:, None] * k.t + kk_K[None, :], mask=ok_CK, other=0.0)
    q_CK, k_CK = q_CK.to(DOT), k_CK.to(DOT)
    reads = 0
    e = unit
    while e > sequence.first:
        reads += 1
        e = e & (e - 1)
    to = d_out.ptr + row * d_out.b + g * d_out.g + j * d_out.j + at_C[:, None] * d_out.t + vv_V[None, :]
    do_CV = tl.load(to, mask=ok_CV, other=0.0).to(DOT)
    v_CV = tl.load(v.ptr + row * v.b + g * v.g + at_C[:, None] * v.t + vv_V[None, :], mask=ok_CV, other=0.0).to(DOT)
    coarse_C, fine_C = load_gate_sums(sums, g * M + m, C)
    log_C = coarse_C + fine_C
    ds_CC = tl.dot(do_CV, tl.trans(v_CV), input_precision=PRECISION) * decay_mask(coarse_C, fine_C, C)
    pull_C = tl.zeros([C], tl.float32)
    if LAST >= 0:
        of = level.ptr + row * level.b + g * level.g + j * level.j
        to_C = d_level.ptr + row * d_level.b + g * d_level.g + j * d_level.j + at_C * d_level.t
        rest_C = tl.zeros([C], tl.float32)
        meets_CC = level_matrix(BITS, C)
        each_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION) * ds_CC
        for b in tl.static_range(BITS + 1):
            one_C = tl.sum(tl.where(meets_CC == b, each_CC, 0.0), 1)
            if b < LAST:
                tl.store(to_C + b * d_level.l, one_C, mask=ok_C)
            else:
                rest_C += one_C
        ds_CC *= lambda_matrix(of, at_C, ok_C, level.t, level.l, LAST, BITS, C)
        dq_CK = tl.dot(ds_CC.to(DOT), k_CK, input_precision=PRECISION)
        here = g * M + sequence.base - 1 - sequence.first
        e = unit
        passed = 0.0
        for _ in tl.range(0, reads, num_stages=STAGES):
            x_KV = tl.load(slots + (here + e) * F * V + tile_KV, mask=inside_KV, other=0.0)
            bit = lowest_bit(e)
            at_level = bit + BITS + 1
            at = of + at_C * level.t + tl.minimum(at_level, LAST) * level.l
            fade_C = tl.exp(log_C + passed)
            weight_C = tl.load(at, mask=ok_C, other=0.0).to(tl.float32)
            y_CK = tl.dot(do_CV, tl.trans(x_KV), input_precision=PRECISION)
            one_C = fade_C * tl.sum(q_CK.to(tl.float32) * y_CK, 1)
            dq_CK += (weight_C * fade_C)[:, None] * y_CK
            tl.store(to_C + at_level * d_level.l, one_C, mask=ok_C & (at_level < LAST))
            rest_C += tl.where(at_level < LAST, 0.0, one_C)
            one_C *= weight_C
            pull_C += one_C
            share = ((g * tl.num_programs(2) + j) * levels + tl.minimum(bit, levels - 1)) * M + m
            tl.store(shares + share, tl.sum(one_C, 0))
            passed += tl.load(totals + here + e)
            e = e & (e - 1)
        tl.store(to_C + LAST * d_level.l, rest_C, mask=ok_C)
    else:
        dq_CK = tl.dot(ds_CC.to(DOT), k_CK, input_precision=PRECISION)
        x_KV = tl.load(slots + (g * M + m) * F * V + tile_KV, mask=inside_KV, other=0.0)
        y_CK = tl.exp(log_C)[:, None] * tl.dot(do_CV, tl.trans(x_KV), input_precision=PRECISION)
        dq_CK += y_CK
        pull_C += tl.sum(q_CK.to(tl.float32) * y_CK, 1)
    tl.store(pull.ptr + row * pull.b + g * pull.g + j * pull.j + at_C * pull.t, pull_C, mask=ok_C)
    to = d_q.ptr + row * d_q.b + g * d_q.g + j * d_q.j + at_C[:, None] * d_q.t + kk_K[None, :]
    tl.store(to, dq_CK.to(d_q.ptr.dtype.element_ty), mask=ok_CK)


@triton.jit(do_not_specialize=["count", "T", "M"])
def write_grad(
    q, k, v, sums, level, slots, d_slots, rights, d_out, pull, d_k, d_v, d_gate, passing, table, count, T, M, J,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAST: tl.constexpr, FINAL: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Store d_k, d_v, d_gate and passing of one chunk, summed over its query heads. Grid: (M, G).

    d_slots (G, M, F, V): for log-linear masks the gradient of each slot from the chunks that read it; for gated masks
    the gradient of the state behind each chunk. rights (G, M): log-gates of a slot's right sibling. passing (G, M): sum
    of slot * gradient over what passes beyond the right sibling. d_k, d_v, d_gate: `GroupTensor`. FINAL: slots that end
    with the last chunk are read too. Other arguments as in `read_grad`.
    """
    m = tl.program_id(0)
    unit, sequence = load_chunk(m, table, count, T, C, VARLEN)
    t0 = first_token(unit, sequence, C)
    if t0 >= sequence.length:
        return
    x_C = tl.arange(0, C)
    ok_C = (t0 + x_C >= 0) & (t0 + x_C < sequence.length)
    at_C = (sequence.begin + t0 + x_C).to(tl.int64)
    kk_K = tl.arange(0, BK)
    vv_V = tl.arange(0, BV)
    ok_CK = ok_C[:, None] & (kk_K < F)[None, :]
    ok_CV = ok_C[:, None] & (vv_V < V)[None, :]
    tile_KV = kk_K[:, None] * V + vv_V[None, :]
    inside_KV = (kk_K < F)[:, None] & (vv_V < V)[None, :]
    row = sequence.row.to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    k_CK = tl.load(k.ptr + row * k.b + g * k.g + at_C[:, None] * k.t + kk_K[None, :], mask=ok_CK, other=0.0).to(DOT)
    last = end_chunk(sequence, C)
    if not FINAL:
        last -= 1  # no chunk reads a slot that ends with the last chunk
    writes = 0
    e = unit + 1
    while e <= last:
        writes += 1
        e = e + (e & -e)
    v_CV = tl.load(v.ptr + row * v.b + g * v.g + at_C[:, None] * v.t + vv_V[None, :], mask=ok_CV, other=0.0).to(DOT)
    coarse_C, fine_C = load_gate_sums(sums, g * M + m, C)
    coarse, fine = load_gate_total(sums, g * M + m, C)
    weight_C = tl.exp(tl.minimum((coarse - coarse_C) + (fine - fine_C), 0.0))
    if LAST >= 0:
        here = g * M + sequence.base - 1 - sequence.first
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
    for j in tl.range(0, J, num_stages=1):  # more stages do not fit into shared memory
        at = q.ptr + row * q.b + g * q.g + (0 * g + j) * q.j + at_C[:, None] * q.t + kk_K[None, :]
        q_CK = tl.load(at, mask=ok_CK, other=0.0).to(DOT)
        at = d_out.ptr + row * d_out.b + g * d_out.g + (0 * g + j) * d_out.j + at_C[:, None] * d_out.t + vv_V[None, :]
        do_CV = tl.load(at, mask=ok_CV, other=0.0).to(DOT)
        mask_CC = decay_mask(coarse_C, fine_C, C)
        if LAST >= 0:
            of = level.ptr + row * level.b + g * level.g + (0 * g + j) * level.j
            mask_CC *= lambda_matrix(of, at_C, ok_C, level.t, level.l, LAST, BITS, C)
        ds_CC = tl.dot(do_CV, tl.trans(v_CV), input_precision=PRECISION) * mask_CC
        dk_CK += tl.dot(tl.trans(ds_CC.to(DOT)), q_CK, input_precision=PRECISION)
        qk_CC = tl.dot(q_CK, tl.trans(k_CK), input_precision=PRECISION)
        each_CC = qk_CC * ds_CC
        dv_CV += tl.dot(tl.trans((qk_CC * mask_CC).to(DOT)), do_CV, input_precision=PRECISION)
        read_C += tl.sum(each_CC, 1) - tl.sum(each_CC, 0)
        read_C += tl.load(
            pull.ptr + row * pull.b + g * pull.g + (0 * g + j) * pull.j + at_C * pull.t, mask=ok_C, other=0.0
        )
    # A gate lies between the reads of its own and later tokens and the writes of earlier ones.
    both_C = write_C - read_C
    d_gate_C = tl.cumsum(both_C, 0) - both_C + tl.sum(read_C, 0) + through
    tl.store(d_gate.ptr + row * d_gate.b + g * d_gate.g + at_C * d_gate.t, d_gate_C, mask=ok_C)
    to = d_v.ptr + row * d_v.b + g * d_v.g + at_C[:, None] * d_v.t + vv_V[None, :]
    tl.store(to, dv_CV.to(d_v.ptr.dtype.element_ty), mask=ok_CV)
    to = d_k.ptr + row * d_k.b + g * d_k.g + at_C[:, None] * d_k.t + kk_K[None, :]
    tl.store(to, dk_CK.to(d_k.ptr.dtype.element_ty), mask=ok_CK)


@triton.jit(do_not_specialize=["count", "T", "M", "levels"])
def add_passing_gradients(
    shares, passing, d_gate, table, count, T, M, levels, J, C: tl.constexpr, VARLEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add to d_gate of one chunk the pairs whose decay passes the whole chunk. Grid: (M, G).

    They belong to the chunk's left sibling at each level of the tree: its part that goes beyond the right sibling
    (passing), and what chunks behind this one in the right sibling read of it (shares).
    """
    m = tl.program_id(0)
    unit, sequence = load_chunk(m, table, count, T, C, VARLEN)
    t0 = first_token(unit, sequence, C)
    if t0 >= sequence.length:
        return
    g = tl.program_id(1).to(tl.int64)
    last = end_chunk(sequence, C)
    x_N = tl.arange(0, BLOCK)
    acc_N = tl.zeros([BLOCK], tl.float32)
    total = 0.0
    e = unit
    while e > sequence.first:
        bit = lowest_bit(e)
        total += tl.load(passing + g * M + sequence.base - 1 - sequence.first + e)
        end = tl.minimum(e + (1 << bit), last)
        for j in range(J):
            at = shares + ((g * J + j) * levels + tl.minimum(bit, levels - 1)) * M + sequence.base - sequence.first
            for n in range(unit + 1, end, BLOCK):
                acc_N += tl.load(at + n + x_N, mask=n + x_N < end, other=0.0)
        e = e & (e - 1)
    x_C = tl.arange(0, C)
    ok_C = (t0 + x_C >= 0) & (t0 + x_C < sequence.length)
    to = (
        d_gate.ptr
        + sequence.row.to(tl.int64) * d_gate.b
        + g * d_gate.g
        + (sequence.begin + t0 + x_C).to(tl.int64) * d_gate.t
    )
    tl.store(to, tl.load(to, mask=ok_C, other=0.0) + total + tl.sum(acc_N, 0), mask=ok_C)


class ReadGradients(NamedTuple):
    """Results of `read_grad`: d_q of every head, d_level (any tensor for gated masks), pull and shares."""

    d_q_BGJTF: Tensor
    d_level_BTGJL: Tensor
    pull_BGJT: Tensor
    shares_GJLM: Tensor


class WriteGradients(NamedTuple):
    """Results of `write_grad`: d_k of every head, d_v, d_gates and passing."""

    d_k_BGTF: Tensor
    d_v_BGTV: Tensor
    d_gates_BGT: Tensor
    passing_GM: Tensor


def launch_read_grad(plan: ChunkedPlan, states: SlotStates, d_out: Tensor) -> ReadGradients:
    """Run `read_grad` on all chunks."""
    table, (groups, per_group, features, _) = plan.table, plan.sizes
    d_q = plan.q.new_empty(len(plan.v), table.length, groups, per_group, features).permute(0, 2, 3, 1, 4)
    q, k, v, sums, level = plan.inputs
    pull = sums.new_empty(len(plan.v), groups, per_group, table.length)
    levels = table.most.bit_length() + 1
    shares = sums.new_empty(groups, per_group, 1 if plan.level is None else levels, table.places)
    d_level = level if plan.level is None else LevelTensor.from_tensor(torch.zeros_like(plan.level))
    outputs = HeadTensor.from_tensor(d_q), d_level, HeadTensor.from_tensor(pull), shares
    read_grad[(table.places, groups, per_group)](
        q, k, v, sums, level, states.slots_GMFV, states.totals, HeadTensor.from_tensor(d_out), *outputs,
        table.pointers(), *table.sizes, levels, **plan.whole_options(),
    )  # fmt: skip
    return ReadGradients(d_q, d_level.ptr, pull, shares)


def launch_write_grad(
    plan: ChunkedPlan, states: SlotStates, d_slots: Tensor, d_out: Tensor, pull: Tensor, *, final: bool
) -> WriteGradients:
    """Run `write_grad` on all chunks. final: whether slots that end with a sequence's last chunk are read."""
    table, (groups, per_group, features, values) = plan.table, plan.sizes
    batch = len(plan.v)
    d_k = plan.k.new_empty(batch, table.length, groups, features).transpose(1, 2)
    d_v = plan.v.new_empty(batch, table.length, groups, values).transpose(1, 2)
    d_gates = plan.sums.new_empty(batch, groups, table.length)
    passing = plan.sums.new_empty(groups, table.places)
    read_by = states.slots_GMFV, d_slots, states.rights, HeadTensor.from_tensor(d_out), HeadTensor.from_tensor(pull)
    outputs = (GroupTensor.from_tensor(x) for x in (d_k, d_v, d_gates))
    write_grad[(table.places, groups)](
        *plan.inputs, *read_by, *outputs, passing, table.pointers(), *table.sizes, per_group, FINAL=final,
        **plan.whole_options(),
    )  # fmt: skip
    return WriteGradients(d_k, d_v, d_gates, passing)


def launch_add_passing_gradients(plan: ChunkedPlan, read: ReadGradients, write: WriteGradients) -> None:
    """Run `add_passing_gradients` on all chunks: adds to `write.d_gates_BGT`."""
    table, (groups, per_group, levels, _) = plan.table, read.shares_GJLM.shape
    add_passing_gradients[(table.places, groups)](
        read.shares_GJLM, write.passing_GM, GroupTensor.from_tensor(write.d_gates_BGT), table.pointers(), *table.sizes,
        levels, per_group, C=table.chunk, VARLEN=table.varlen, BLOCK=128, num_warps=1,
    )  # fmt: skip
