"""The two lowest levels above chunks in one launch, four chunks 0 .. 3 of a segment at a time.

What a segment writes by itself is the plain gated delta rule's state, run through it from zero: A over 0, 1, which 2 and
3 then read and pass on, and B over 2, 3. All of it stays in registers; the segment's state is A + B.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.gated_delta_rows import chunks_of, matrix, put_matrix, row_of, tile, tokens_of
from surgery.kernels.log_linear_delta_levels import first_chunk


@triton.jit
def _pass(s_VK, w_CK, k_CK, u_VC, to_end_C, total, kept, passed, rows_V, PASSED: tl.constexpr, K: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """gamma S + K^T e (u - w S), of which S and -e w S are kept. u: the chunk's own or zeros."""
    half_VK = s_VK.to(k_CK.dtype)
    put_matrix(kept, rows_V, K, 0, half_VK, BV, BK)
    x_VC = tl.dot(half_VK, tl.trans(w_CK), input_precision=P) * -to_end_C[None, :]
    if PASSED:
        put_matrix(passed, rows_V, C, 0, x_VC, BV, C)
    x_VC += u_VC * to_end_C[None, :]
    return tl.dot(x_VC.to(k_CK.dtype), k_CK, s_VK * total, input_precision=P)


@triton.jit(do_not_specialize=["top", "GROUPS"])
def _low(
    k, w, u, c, rows, state, kept0, kept1, passed0, passed1, k_b, k_g, k_t, top, GROUPS,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr, PASSED: tl.constexpr,
):  # fmt: skip
    r, i, g, at_v = (
        tl.program_id(0) // GROUPS,
        tl.program_id(0) % GROUPS,
        tl.program_id(1).to(tl.int64),
        tl.program_id(2) * BV,
    )
    batch, bos, length, start, base = row_of(rows, r, WIDTH)
    a0, chunks = first_chunk(start, top, C), chunks_of(length, start, C)
    first = (((a0 >> 2) + i) << 2) - a0
    if first >= chunks:
        return
    at_C = tl.arange(0, C)
    a_VK = tl.zeros([BV, BK], tl.float32)
    b_VK = tl.zeros([BV, BK], tl.float32)
    for step in tl.static_range(4):
        n = first + step
        here = (n >= 0) & (n < chunks)
        at = (base + tl.where(here, n, 0)) * G + g
        t_C, here_C = tokens_of(n, bos, length, start, C)
        k_CK = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
        rows_V = tl.where(here, V - at_v, 0)
        at_s, at_x = (at * V + at_v) * K, (at * V + at_v) * C
        w_CK = matrix(w + at * C * K, tl.where(here, C, 0), K, 0, C, BK)
        u_VC = matrix(u + (at * V + at_v) * C, rows_V, C, 0, BV, C).to(tl.float32)
        hi, lo = c + at * 2 * C, c + at * 2 * C + C
        end_hi, end_lo = tl.load(hi + C - 1, mask=here, other=0.0), tl.load(lo + C - 1, mask=here, other=0.0)
        log_C = (end_hi - tl.load(hi + at_C, mask=here_C, other=0.0)) + (
            end_lo - tl.load(lo + at_C, mask=here_C, other=0.0)
        )
        to_end_C, total = tl.exp(tl.minimum(log_C, 0.0)), tl.exp(end_hi + end_lo)
        if step == 0:
            a_VK = tl.dot((u_VC * to_end_C[None, :]).to(k_CK.dtype), k_CK, input_precision=P)
        if step == 1:
            a_VK = _pass(
                a_VK, w_CK, k_CK, u_VC, to_end_C, total, kept0 + at_s, passed0 + at_x, rows_V, PASSED, K, C, BK, BV, P
            )
        if step >= 2:
            none_VC = tl.zeros([BV, C], tl.float32)
            a_VK = _pass(
                a_VK,
                w_CK,
                k_CK,
                none_VC,
                to_end_C,
                total,
                kept1 + at_s,
                passed1 + at_x,
                rows_V,
                PASSED,
                K,
                C,
                BK,
                BV,
                P,
            )
        if step == 2:
            b_VK = tl.dot((u_VC * to_end_C[None, :]).to(k_CK.dtype), k_CK, input_precision=P)
        if step == 3:
            b_VK = _pass(
                b_VK, w_CK, k_CK, u_VC, to_end_C, total, kept0 + at_s, passed0 + at_x, rows_V, PASSED, K, C, BK, BV, P
            )
    segment = tl.load(rows + r * WIDTH + 6) + i
    put_matrix(state + ((segment * G + g) * V + at_v) * K, V - at_v, K, 0, a_VK + b_VK, BV, BK)
