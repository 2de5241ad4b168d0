"""The gated delta rule inside chunks of C tokens, in WY form (Yang et al. 2025, "Gated Delta Networks", section 3.3).

    A = tril(diag(beta) (K K^T . M), -1)     Y = (I + A)^-1     w = Y (beta D K)     u = Y (beta V)

M, D: gates between two tokens and from the chunk's start (gated_delta_rows.py). With the state S at the chunk's start,
u - w S is what the chunk's tokens write: S' = gamma S + K^T e (u - w S).

Backwards from dw, du (and dT, of T = Y diag(beta) where it was read by itself), as matrices, Z = dA . A:
    dY = dw (beta D K)^T + du (beta V)^T + dT diag(beta)       dA = -tril(Y^T dY Y^T, -1)
"""

from __future__ import annotations

from typing import Any

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
    tokens_of,
)


@triton.jit
def inverse(a_CC, C: tl.constexpr, LOG_C: tl.constexpr, P: tl.constexpr):
    """(I + A)^-1 of a strictly lower A: of diagonal blocks, twice as large at each step. Where L holds what joins the
    two halves of the blocks and X inverts the halves, X - X L X inverts the blocks: no powers of A, which may grow."""
    i_C1, j_1C = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    differ_CC = tl.where(i_C1 > j_1C, i_C1 ^ j_1C, 0)
    x_CC = tl.where(i_C1 == j_1C, 1.0, 0.0) - tl.where(differ_CC == 1, a_CC, 0.0)
    for log_size in tl.static_range(1, LOG_C):
        right_CC = tl.dot(tl.where((differ_CC >> log_size) == 1, a_CC, 0.0), x_CC, input_precision=P)
        x_CC -= tl.dot(x_CC, right_CC, input_precision=P)
    return x_CC


@triton.jit
def _forward(
    k, v, beta, gates, rows, c, y, w, u, own,
    k_b, k_g, k_t, v_b, v_g, v_t, beta_b, beta_g, beta_t, gates_b, gates_g, gates_t, N,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    LOG_C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    r, n, g = tl.program_id(0) // N, tl.program_id(0) % N, tl.program_id(1)
    batch, bos, length, start, base = row_of(rows, r, WIDTH)
    if n >= chunks_of(length, start, C):
        return
    at = (base + n) * G + g
    t_C, here_C = tokens_of(n, bos, length, start, C)
    at_C = tl.arange(0, C)
    gate_C = tl.load(gates + batch * gates_b + g * gates_g + t_C * gates_t, mask=here_C, other=0.0).to(tl.float32)
    gate_C = tl.maximum(gate_C, -60.0)
    steps_C = tl.floor(gate_C * 256.0) * 0.00390625
    hi_C, lo_C = tl.cumsum(steps_C, 0), tl.cumsum(gate_C - steps_C, 0)
    tl.store(c + at * 2 * C + at_C, hi_C)
    tl.store(c + at * 2 * C + C + at_C, lo_C)
    beta_C = tl.load(beta + batch * beta_b + g * beta_g + t_C * beta_t, mask=here_C, other=0.0).to(tl.float32)
    half = k.dtype.element_ty
    kk_CC = tl.zeros([C, C], tl.float32)
    for first in range(0, K, BX):
        k_CX = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, first, BX)
        kk_CC = tl.dot(k_CX, tl.trans(k_CX), kk_CC, input_precision=P)
    log_CC = (hi_C[:, None] - hi_C[None, :]) + (lo_C[:, None] - lo_C[None, :])
    log_CC = tl.where(at_C[:, None] > at_C[None, :], log_CC, float("-inf"))
    y_CC = inverse(kk_CC * beta_C[:, None] * tl.exp(log_CC), C, LOG_C, P).to(half)
    put_matrix(y + at * C * C, C, C, 0, y_CC, C, C)
    scale_C = beta_C * tl.exp(hi_C + lo_C)
    for first in range(0, K, BX):
        k_CX = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, first, BX)
        w_CX = tl.dot(y_CC, (k_CX * scale_C[:, None]).to(half), input_precision=P)
        put_matrix(w + at * C * K, C, K, first, w_CX, C, BX)
    end_hi, end_lo = tl.sum(steps_C, 0), tl.sum(gate_C - steps_C, 0)
    to_end_C = tl.exp((end_hi - hi_C) + (end_lo - lo_C))
    for at_v in range(0, V, BV):
        v_CV = tile(v + batch * v_b + g * v_g, t_C, v_t, here_C, V, at_v, BV)
        u_CV = tl.dot(y_CC, (v_CV * beta_C[:, None]).to(half), input_precision=P)
        put_matrix(u + (at * V + at_v) * C, V - at_v, C, 0, tl.trans(u_CV), BV, C)
        if OWN:
            u_CV = (u_CV * to_end_C[:, None]).to(half)
            for first in range(0, K, BX):
                k_CX = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, first, BX)
                added_VX = tl.dot(tl.trans(u_CV), k_CX, input_precision=P)
                put_matrix(own + (at * V + at_v) * K, V - at_v, K, first, added_VX, BV, BX)


def forward(
    k: Tensor, v: Tensor, beta: Tensor, gates: Tensor, s: Sizes, own: Tensor | None = None
) -> tuple[Tensor, ...]:
    """(c, Y, w, u^T) of every chunk; `own`: is filled with what the chunk writes by itself, (K^T e u)^T."""
    c = s.buffer(2, s.C, dtype=torch.float32)
    y, w, u = s.buffer(s.C, s.C), s.buffer(s.C, s.K), s.buffer(s.V, s.C)
    strides = (*k.stride()[:3], *v.stride()[:3], *beta.stride(), *gates.stride(), s.N)
    options: dict[str, Any] = {**s.kernel, "LOG_C": s.C.bit_length() - 1, "BX": s.features, "OWN": own is not None}
    buffers = (c, y, w, u, c if own is None else own)
    _forward[(s.R * s.N, s.G)](k, v, beta, gates, s.table, *buffers, *strides, **options, num_warps=4)
    return c, y, w, u


@triton.jit
def _backward(
    k, v, beta, rows, c, y, dw, du, dt, dk_in, dc_in, dk, dv, dbeta, dgates,
    k_b, k_g, k_t, v_b, v_g, v_t, beta_b, beta_g, beta_t, T, N,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    r, n, g = tl.program_id(0) // N, tl.program_id(0) % N, tl.program_id(1)
    batch, bos, length, start, base = row_of(rows, r, WIDTH)
    if n >= chunks_of(length, start, C):
        return
    at = (base + n) * G + g
    t_C, here_C = tokens_of(n, bos, length, start, C)
    at_C = tl.arange(0, C)
    out = (batch * G + g) * T
    beta_C = tl.load(beta + batch * beta_b + g * beta_g + t_C * beta_t, mask=here_C, other=0.0).to(tl.float32)
    half = k.dtype.element_ty
    y_CC = matrix(y + at * C * C, C, C, 0, C, C)
    fade_C = fade_of(c, at, C)
    scale_C = beta_C * fade_C
    dy_CC = tl.zeros([C, C], tl.float32)
    kk_CC = tl.zeros([C, C], tl.float32)
    dbeta_C = tl.zeros([C], tl.float32)
    for first in range(0, V, BV):
        v_CV = tile(v + batch * v_b + g * v_g, t_C, v_t, here_C, V, first, BV)
        du_CV = tl.trans(matrix(du + (at * V + first) * C, V - first, C, 0, BV, C).to(half))
        dy_CC = tl.dot(du_CV, tl.trans((v_CV * beta_C[:, None]).to(half)), dy_CC, input_precision=P)
        dvb_CV = tl.dot(tl.trans(y_CC), du_CV, input_precision=P)
        dbeta_C += tl.sum(dvb_CV * v_CV, 1)
        dvb_CV *= beta_C[:, None]
        if INNER:
            dvb_CV += tile(dv + out * V, t_C, V, here_C, V, first, BV)
        put(dv + out * V, t_C, V, here_C, V, first, dvb_CV, BV)
    for first in range(0, K, BX):
        k_CX = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, first, BX)
        dw_CX = matrix(dw + at * C * K, C, K, first, C, BX).to(half)
        dy_CC = tl.dot(dw_CX, tl.trans((k_CX * scale_C[:, None]).to(half)), dy_CC, input_precision=P)
        kk_CC = tl.dot(k_CX, tl.trans(k_CX), kk_CC, input_precision=P)
    if INNER:
        dt_CC = matrix(dt + at * C * C, C, C, 0, C, C)
        dbeta_C += tl.sum(y_CC * dt_CC, 0)
        dy_CC += dt_CC * beta_C[None, :]
    da_CC = tl.dot(tl.trans(y_CC), dy_CC.to(half), input_precision=P)
    da_CC = tl.dot(da_CC.to(half), tl.trans(y_CC), input_precision=P)
    da_CC = tl.where(at_C[:, None] > at_C[None, :], -da_CC, 0.0) * mask_of(c, at, C)
    z_CC = da_CC * kk_CC
    dbeta_C += tl.sum(z_CC, 1)
    z_CC *= beta_C[:, None]
    dc_C = tl.load(dc_in + at * C + at_C) + tl.sum(z_CC, 1) - tl.sum(z_CC, 0)
    dkk_CC = (da_CC * beta_C[:, None]).to(half)
    for first in range(0, K, BX):
        k_CX = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, first, BX)
        dw_CX = matrix(dw + at * C * K, C, K, first, C, BX).to(half)
        dk_CX = tl.dot(tl.trans(y_CC), dw_CX, input_precision=P)
        dscale_C = tl.sum(dk_CX * k_CX, 1)
        dbeta_C += dscale_C * fade_C
        dc_C += dscale_C * scale_C
        dk_CX = dk_CX * scale_C[:, None] + matrix(dk_in + at * C * K, C, K, first, C, BX)
        dk_CX = tl.dot(dkk_CC, k_CX, dk_CX, input_precision=P)
        dk_CX = tl.dot(tl.trans(dkk_CC), k_CX, dk_CX, input_precision=P)
        put(dk + out * K, t_C, K, here_C, K, first, dk_CX, BX)
    tl.store(dbeta + out + t_C, dbeta_C, mask=here_C)
    tl.store(dgates + out + t_C, tl.cumsum(dc_C, 0, reverse=True), mask=here_C)


def backward(
    k: Tensor, v: Tensor, beta: Tensor, c: Tensor, y: Tensor, dw: Tensor, du: Tensor, dt: Tensor | None,
    dk_in: Tensor, dc_in: Tensor, dv: Tensor | None, s: Sizes,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dk, dv, dbeta, dgates), the last two float32; du lies as u^T. dk_in, dc_in: what is there of K's and c's gradients; where dt
    is given, `dv` has its part too."""
    batch, G, T, _ = k.shape
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device) if dv is None else dv
    dbeta, dgates = torch.empty(2, batch, G, T, dtype=torch.float32, device=k.device).unbind(0)
    strides = (*k.stride()[:3], *v.stride()[:3], *beta.stride(), T, s.N)
    _backward[(s.R * s.N, s.G)](
        k, v, beta, s.table, c, y, dw, du, y if dt is None else dt, dk_in, dc_in, dk, dv, dbeta, dgates, *strides,
        **s.kernel, BX=s.features, INNER=dt is not None, num_warps=4,
    )  # fmt: skip
    return dk, dv, dbeta, dgates
