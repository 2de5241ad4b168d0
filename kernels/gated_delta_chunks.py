"""What every chunk of the gated delta rule reads, given the state S at its start (terms: gated_delta_states.py).

    O_j = D Q_j S + P_j x        P_j = tril(Q_j K^T . M)

Backwards, with dS' of the state at its end, and Z_j = (dO_j x^T . M) . Q_j K^T for the gates:
    dQ_j = D dO_j S^T + (dO_j x^T . M) K      dK = e x dS'^T + sum_j (dO_j x^T . M)^T Q_j      dw = -dx S^T
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.gated_delta_rows import (
    Sizes,
    chunks_of,
    fade_of,
    mask_of,
    matrix,
    put,
    put_matrix,
    row_of,
    tile,
    to_end_of,
    tokens_of,
)


@triton.jit
def _forward(
    q, k, rows, c, states, x, out, q_b, q_g, q_j, q_t, k_b, k_g, k_t, T, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    r, n, at_v = tl.program_id(0) // N, tl.program_id(0) % N, tl.program_id(2) * BV
    g, j = tl.program_id(1) // J, tl.program_id(1) % J
    batch, bos, length, start, base = row_of(rows, r, WIDTH)
    if n >= chunks_of(length, start, C):
        return
    at = (base + n) * G + g
    t_C, here_C = tokens_of(n, bos, length, start, C)
    k_CK = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
    q_CK = tile(q + batch * q_b + g * q_g + j * q_j, t_C, q_t, here_C, K, 0, BK)
    s_KV = matrix(states + at * K * V, K, V, at_v, BK, BV)
    x_CV = matrix(x + at * C * V, C, V, at_v, C, BV)
    p_CC = (tl.dot(q_CK, tl.trans(k_CK), input_precision=P) * mask_of(c, at, C)).to(k_CK.dtype)
    out_CV = tl.dot(q_CK, s_KV, input_precision=P) * fade_of(c, at, C)[:, None]
    out_CV = tl.dot(p_CC, x_CV, out_CV, input_precision=P)
    put(out + ((batch * G + g) * J + j) * T * V, t_C, V, here_C, V, at_v, out_CV, BV)


def forward(q: Tensor, k: Tensor, c: Tensor, states: Tensor, x: Tensor, s: Sizes) -> Tensor:
    out = torch.empty(*q.shape[:4], s.V, dtype=s.dtype, device=q.device)
    strides = (*q.stride()[:4], *k.stride()[:3], q.shape[3])
    grid = (s.R * s.N, s.G * s.J, s.blocks)
    _forward[grid](q, k, s.table, c, states, x, out, *strides, s.N, s.J, **s.kernel, num_warps=s.warps(16384))
    return out


@triton.jit
def _backward(
    q, k, do, rows, c, states, x, dstates, dx, dq, dk, dw, dc,
    q_b, q_g, q_j, q_t, k_b, k_g, k_t, do_b, do_g, do_j, do_t, T, N, J,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    r, n, g = tl.program_id(0) // N, tl.program_id(0) % N, tl.program_id(1)
    batch, bos, length, start, base = row_of(rows, r, WIDTH)
    if n >= chunks_of(length, start, C):
        return
    at = (base + n) * G + g
    t_C, here_C = tokens_of(n, bos, length, start, C)
    at_C = tl.arange(0, C)
    k_CK = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
    to_end_C, total = to_end_of(c, at, C)
    fade_C = fade_of(c, at, C)
    dw_CK = tl.zeros([C, BK], tl.float32)
    dk_CK = tl.zeros([C, BK], tl.float32)
    both = 0.0
    for at_v in range(0, V, BV):
        s_KV = matrix(states + at * K * V, K, V, at_v, BK, BV)
        ds_KV = matrix(dstates + at * K * V, K, V, at_v, BK, BV)
        both += tl.sum(s_KV.to(tl.float32) * ds_KV)
        dx_CV = matrix(dx + at * C * V, C, V, at_v, C, BV)
        dw_CK -= tl.dot(dx_CV, tl.trans(s_KV), input_precision=P)
        x_CV = matrix(x + at * C * V, C, V, at_v, C, BV)
        dk_CK = tl.dot(x_CV, tl.trans(ds_KV), dk_CK, input_precision=P)
    put_matrix(dw + at * C * K, C, K, 0, dw_CK, C, BK)
    dk_CK *= to_end_C[:, None]
    z_C = tl.sum(dk_CK * k_CK, 1)
    dc_C = tl.where(at_C == C - 1, total * both + tl.sum(z_C), 0.0) - z_C
    mask_CC = mask_of(c, at, C)
    for j in range(J):
        q_CK = tile(q + batch * q_b + g * q_g + j * q_j, t_C, q_t, here_C, K, 0, BK)
        dp_CC = tl.zeros([C, C], tl.float32)
        dq_CK = tl.zeros([C, BK], tl.float32)
        for at_v in range(0, V, BV):
            do_CV = tile(do + batch * do_b + g * do_g + j * do_j, t_C, do_t, here_C, V, at_v, BV)
            x_CV = matrix(x + at * C * V, C, V, at_v, C, BV)
            s_KV = matrix(states + at * K * V, K, V, at_v, BK, BV)
            dp_CC = tl.dot(do_CV, tl.trans(x_CV), dp_CC, input_precision=P)
            dq_CK = tl.dot(do_CV, tl.trans(s_KV), dq_CK, input_precision=P)
        dq_CK *= fade_C[:, None]
        dp_CC *= mask_CC
        z_CC = dp_CC * tl.dot(q_CK, tl.trans(k_CK), input_precision=P)
        dc_C += tl.sum(dq_CK * q_CK, 1) + tl.sum(z_CC, 1) - tl.sum(z_CC, 0)
        dp_CC = dp_CC.to(k_CK.dtype)
        dq_CK = tl.dot(dp_CC, k_CK, dq_CK, input_precision=P)
        dk_CK = tl.dot(tl.trans(dp_CC), q_CK, dk_CK, input_precision=P)
        put(dq + ((batch * G + g) * J + j) * T * K, t_C, K, here_C, K, 0, dq_CK, BK)
    put_matrix(dk + at * C * K, C, K, 0, dk_CK, C, BK)
    tl.store(dc + at * C + at_C, dc_C)


def backward(
    q: Tensor, k: Tensor, do: Tensor, c: Tensor, states: Tensor, x: Tensor, dstates: Tensor, dx: Tensor, s: Sizes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk of the chunks in float32, dw, dc)."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dc = s.buffer(s.C, s.K, dtype=torch.float32), s.buffer(s.C, dtype=torch.float32)
    dw = s.buffer(s.C, s.K)
    strides = (*q.stride()[:4], *k.stride()[:3], *do.stride()[:4], q.shape[3], s.N, s.J)
    grid = (s.R * s.N, s.G)
    _backward[grid](
        q, k, do, s.table, c, states, x, dstates, dx, dq, dk, dw, dc, *strides, **s.kernel, num_warps=8, num_stages=1
    )
    return dq, dk, dw, dc
