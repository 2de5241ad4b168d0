"""Outputs of a chunk: its queries read the chunk itself under the mask, and states of the tokens before it.

    o_t = sum_s<=t in the chunk M_ts (q_t . k_s) v_s + sum_e lambda_t^(level of e) exp(gates from e's end to t) q_t X_e

Dao and Gu 2024, "Transformers are SSMs", section 6; Guo et al. 2025, "Log-Linear Attention", section 3.3. Log-linear
masks read the slots X_e of a Fenwick tree (kernels/log_linear/states.py). Gated masks read one state, the one before
the chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.kernel_tensors import HeadTensor, empty_out
from surgery.kernels.ssd.chunk import (
    decay_mask,
    first_token,
    lambda_matrix,
    load_chunk,
    load_gate_sums,
    lowest_bit,
)
from surgery.kernels.ssd.layout import ChunkedPlan, SlotStates, power_of_two


@triton.jit(do_not_specialize=["count", "T", "M"])
def read(
    q, k, v, sums, level, slots, totals, out, table, count, T, M,
    F: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BITS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LAST: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store out_BGJTV of one chunk, query head and tile of values. Grid: (M, G x tiles of values, J).

    q, out: `HeadTensor`; k, v: `GroupTensor`; level: `LevelTensor`; sums (G, M, 2, C), slots (G, M, F, V), totals (G,
    M): the slots' log-gates. LAST: the last level with a lambda of its own, -1 for gated masks.
    """
    m = tl.program_id(0)
    unit, sequence = load_chunk(m, table, count, T, C, VARLEN)
    t0 = first_token(unit, sequence, C)
    if t0 >= sequence.length:
        return
    tiles: tl.constexpr = (V + BV - 1) // BV
    g = (tl.program_id(1) // tiles).to(tl.int64)
    j = tl.program_id(2).to(tl.int64)
    x_C = tl.arange(0, C)
    ok_C = (t0 + x_C >= 0) & (t0 + x_C < sequence.length)
    at_C = (sequence.begin + t0 + x_C).to(tl.int64)
    kk_K = tl.arange(0, BK)
    vv_V = (tl.program_id(1) % tiles) * BV + tl.arange(0, BV)
    ok_CK = ok_C[:, None] & (kk_K < F)[None, :]
    ok_CV = ok_C[:, None] & (vv_V < V)[None, :]
    tile_KV = kk_K[:, None] * V + vv_V[None, :]
    inside_KV = (kk_K < F)[:, None] & (vv_V < V)[None, :]
    row = sequence.row.to(tl.int64)
    q_CK = tl.load(q.ptr + row * q.b + g * q.g + j * q.j + at_C[:, None] * q.t + kk_K[None, :], mask=ok_CK, other=0.0)
    k_CK = tl.load(k.ptr + row * k.b + g * k.g + at_C[:, None] * k.t + kk_K[None, :], mask=ok_CK, other=0.0)
    v_CV = tl.load(v.ptr + row * v.b + g * v.g + at_C[:, None] * v.t + vv_V[None, :], mask=ok_CV, other=0.0)
    q_CK = q_CK.to(DOT)
    qk_CC = tl.dot(q_CK, tl.trans(k_CK.to(DOT)), input_precision=PRECISION)
    coarse_C, fine_C = load_gate_sums(sums, g * M + m, C)
    log_C = coarse_C + fine_C
    qk_CC *= decay_mask(coarse_C, fine_C, C)
    lambdas = level.ptr + (row * level.b + g * level.g + j * level.j)
    if LAST >= 0:
        qk_CC *= lambda_matrix(lambdas, at_C, ok_C, level.t, level.l, LAST, BITS, C)
    acc_CV = tl.dot(qk_CC.to(DOT), v_CV.to(DOT), input_precision=PRECISION)
    if LAST >= 0:
        here = g * M + sequence.base - 1 - sequence.first
        reads = 0
        e = unit
        while e > sequence.first:
            reads += 1
            e = e & (e - 1)
        e = unit
        passed = 0.0
        for _ in tl.range(0, reads, num_stages=STAGES):
            x_KV = tl.load(slots + (here + e) * F * V + tile_KV, mask=inside_KV, other=0.0)
            at = lambdas + at_C * level.t + tl.minimum(lowest_bit(e) + BITS + 1, LAST) * level.l
            weight_C = tl.load(at, mask=ok_C, other=0.0).to(tl.float32) * tl.exp(log_C + passed)
            acc_CV += weight_C[:, None] * tl.dot(q_CK, x_KV, input_precision=PRECISION)
            passed += tl.load(totals + here + e)
            e = e & (e - 1)
    else:
        x_KV = tl.load(slots + (g * M + m) * F * V + tile_KV, mask=inside_KV, other=0.0)
        acc_CV += tl.exp(log_C)[:, None] * tl.dot(q_CK, x_KV, input_precision=PRECISION)
    to = out.ptr + row * out.b + g * out.g + j * out.j + at_C[:, None] * out.t + vv_V[None, :]
    tl.store(to, acc_CV.to(out.ptr.dtype.element_ty), mask=ok_CV)


def launch_read(plan: ChunkedPlan, states: SlotStates) -> Tensor:
    """Return out_BGJTV, laid out as (B, T, G, J, V)."""
    groups, per_group, _, values = plan.sizes
    out = empty_out(plan.q, plan.v)
    block = min(power_of_two(values), 64)
    read[(plan.table.places, groups * triton.cdiv(values, block), per_group)](
        *plan.inputs, states.slots_GMFV, states.totals, HeadTensor.from_tensor(out), plan.table.pointers(),
        *plan.table.sizes, **plan.whole_options(block),
    )  # fmt: skip
    return out
