"""Kernels over rows of logits, see surgery/core/logit_rows.py for the formulas.

x: transformed student logits, u: the teacher's, both divided by the temperature where they belong to q and p.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """Return e^x."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def load_logits(ptr, at_V, ok_V, scale, cap, CAPPED: tl.constexpr):
    """Return the transformed logits of a block, in float32."""
    x_V = tl.load(ptr + at_V, mask=ok_V, other=0.0).to(tl.float32) * scale
    if CAPPED:
        x_V = cap * (1 - 2 / (1 + exp(2 * x_V / cap)))
    return x_V


@triton.jit
def add_block(largest, total, x_V, ok_V):
    """Return (largest, factor of earlier sums, total, exp(x - largest)) with a block added to a running sum of
    exponentials.
    """
    x_V = tl.where(ok_V, x_V, float("-inf"))
    now = tl.maximum(largest, tl.max(x_V, 0))
    shrink = exp(largest - now)
    exp_V = exp(x_V - now)
    return now, shrink, total * shrink + tl.sum(exp_V, 0), exp_V


@triton.jit
def stats_kernel(
    logits_ptr, teacher_ptr, out_ptr, stride, teacher_stride, N, V, SIZE, inverse_temperature, scale, cap, teacher_scale,
    teacher_cap, SOFT: tl.constexpr, HARD: tl.constexpr, SHARED: tl.constexpr, TEACHER: tl.constexpr,
    REVERSE: tl.constexpr, CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write (logsumexp of q, of p, divergence, logsumexp of s) of row n to out (4, N)."""
    n = tl.program_id(0).to(tl.int64)
    logits_ptr += n * stride
    teacher_ptr += n * teacher_stride
    low = -1e30
    soft_max, soft_sum, teacher_max, teacher_sum, hard_max, hard_sum, gap = low, 0.0, low, 0.0, low, 0.0, 0.0
    for start in range(0, V, BLOCK):
        at_V = start + tl.arange(0, BLOCK)
        x_V = load_logits(logits_ptr, at_V, at_V < V, scale, cap, CAPPED)
        if SOFT:
            ok_V = at_V < SIZE
            y_V = x_V * inverse_temperature
            soft_max, shrink, soft_sum, exp_V = add_block(soft_max, soft_sum, y_V, ok_V)
            if TEACHER:
                u_V = load_logits(teacher_ptr, at_V, ok_V, teacher_scale, teacher_cap, TEACHER_CAPPED)
                u_V = u_V * inverse_temperature
                teacher_max, teacher_shrink, teacher_sum, teacher_exp_V = add_block(teacher_max, teacher_sum, u_V, ok_V)
                gap_V = tl.where(ok_V, u_V - y_V, 0.0)
                if REVERSE:
                    gap = gap * shrink + tl.sum(exp_V * gap_V, 0)
                else:
                    gap = gap * teacher_shrink + tl.sum(teacher_exp_V * gap_V, 0)
        if HARD and not SHARED:
            hard_max, _shrink, hard_sum, _exp_V = add_block(hard_max, hard_sum, x_V, at_V < V)
    if SOFT:
        tl.store(out_ptr + n, soft_max + tl.log(soft_sum))
        if TEACHER:
            tl.store(out_ptr + N + n, teacher_max + tl.log(teacher_sum))
            difference = (teacher_max - soft_max) + tl.log(teacher_sum / soft_sum)
            if REVERSE:
                tl.store(out_ptr + 2 * N + n, difference - gap / soft_sum)
            else:
                tl.store(out_ptr + 2 * N + n, gap / teacher_sum - difference)
    if HARD:
        if SHARED:
            tl.store(out_ptr + 3 * N + n, soft_max + tl.log(soft_sum))
        else:
            tl.store(out_ptr + 3 * N + n, hard_max + tl.log(hard_sum))


@triton.jit
def gradient_kernel(
    logits_ptr, teacher_ptr, soft_ptr, hard_ptr, soft_sum_ptr, teacher_sum_ptr, kl_ptr, hard_sum_ptr, labels_ptr, stride,
    teacher_stride, N, V, SIZE, inverse_temperature, scale, cap, teacher_scale, teacher_cap, SOFT: tl.constexpr,
    HARD: tl.constexpr, SHARED: tl.constexpr, TEACHER: tl.constexpr, REVERSE: tl.constexpr, CAPPED: tl.constexpr,
    TEACHER_CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite a block of row n by its gradient."""
    n = tl.program_id(0).to(tl.int64)
    logits_ptr += n * stride
    teacher_ptr += n * teacher_stride
    at_V = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_V = load_logits(logits_ptr, at_V, at_V < V, scale, cap, CAPPED)
    grad_V = tl.zeros([BLOCK], tl.float32)
    if SOFT:
        ok_V = at_V < SIZE
        log_q_V = x_V * inverse_temperature - tl.load(soft_sum_ptr + n)
        q_V = exp(log_q_V)
        if TEACHER:
            u_V = load_logits(teacher_ptr, at_V, ok_V, teacher_scale, teacher_cap, TEACHER_CAPPED)
            log_p_V = u_V * inverse_temperature - tl.load(teacher_sum_ptr + n)
            if REVERSE:
                q_V = q_V * (log_q_V - log_p_V - tl.load(kl_ptr + n))
            else:
                q_V = q_V - exp(log_p_V)
        grad_V += tl.where(ok_V, q_V * tl.load(soft_ptr + n), 0.0)
    if HARD:
        label = tl.load(labels_ptr + n)
        s_V = exp(x_V - tl.load(hard_sum_ptr + n)) - tl.where(at_V == label, 1.0, 0.0)
        grad_V += s_V * tl.load(hard_ptr + n)
    if CAPPED:
        grad_V = grad_V * (1 - (x_V / cap) * (x_V / cap))
    tl.store(logits_ptr + at_V, (grad_V * scale).to(logits_ptr.dtype.element_ty), mask=at_V < V)
