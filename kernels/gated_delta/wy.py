"""The gated delta rule inside chunks of C tokens, in WY form (Yang et al. 2025, "Gated Delta Networks", section 3.3).

    A = tril(diag(beta) (K K^T . M), -1)     Y = (I + A)^-1     w = Y (beta D K)     u = Y (beta V)

M, D: gates between two tokens and from the chunk's start (kernels/gated_delta/layout.py). e: gates from a token to the
chunk's end, gamma: of the whole chunk. With the state S (K, V) at the chunk's start, u - w S is what the chunk's tokens
write: S' = gamma S + K^T e (u - w S).

Backward, from the gradients dw, du, and dT of T = Y diag(beta) if T was read by itself, with Z = dA . A for the gates:
    dY = dw (beta D K)^T + du (beta V)^T + dT diag(beta)       dA = -tril(Y^T dY Y^T, -1)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.gated_delta.layout import (
    DeltaPlan,
    count_chunks,
    decay_from_start,
    decay_mask,
    load_matrix,
    load_row,
    load_tile,
    program_chunk,
    store_matrix,
    store_tile,
)
from surgery.kernels.kernel_tensors import GroupTensor
from surgery.kernels.launch import open_launch


class WYTerms(NamedTuple):
    """Results of `wy_forward` for every chunk: c (2, C) (summed log-gates), y (C, C), w (C, K), u^T (V, C)."""

    c: Tensor
    y: Tensor
    w: Tensor
    u: Tensor


class WYOutputGradients(NamedTuple):
    """Gradients that `wy_backward` starts from. dw (C, K), du^T (V, C) per chunk; dk (C, K) and dc (parts, C): parts of
    the gradients of k and c from other kernels, float32; dt (C, C) and dv (B, G, T, V): gradient of T and part of v's,
    None if T was not read by itself."""

    dw: Tensor
    du: Tensor
    dk: Tensor
    dc: Tensor
    dt: Tensor | None = None
    dv: Tensor | None = None


class WYInputGradients(NamedTuple):
    """Results of `wy_backward`; dbeta and dgates are float32."""

    dk: Tensor
    dv: Tensor
    dbeta: Tensor
    dgates: Tensor


@triton.jit
def unit_lower_inverse(a_HH, H: tl.constexpr, P: tl.constexpr):
    """Return (I + A)^-1 of a strictly lower A (H, H), by blocks on the diagonal that double in each step.

    If X inverts the halves of the blocks and L is the part of A that couples the halves, X - X L X inverts the blocks.
    No powers of A, which may grow.
    """
    i_H1, j_1H = tl.arange(0, H)[:, None], tl.arange(0, H)[None, :]
    differ_HH = tl.where(i_H1 > j_1H, i_H1 ^ j_1H, 0)
    x_HH = tl.where(i_H1 == j_1H, 1.0, 0.0) - tl.where(differ_HH == 1, a_HH, 0.0)
    for log_size in tl.static_range(1, 5):
        if (1 << log_size) < H:
            right_HH = tl.dot(tl.where((differ_HH >> log_size) == 1, a_HH, 0.0), x_HH, input_precision=P)
            x_HH -= tl.dot(x_HH, right_HH, input_precision=P)
    return x_HH


@triton.jit
def load_half(x, t_H, stride, here_H):
    """Return x at the tokens of half a chunk, in float32."""
    return tl.load(x + t_H * stride, mask=here_H, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["N"])
def wy_forward(
    k, v, beta, gates, rows, terms, own, N,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Store the `WYTerms` of one chunk, and with OWN the state that it writes from zero, (K^T e u)^T (V, K).

    Grid: (R x N, G).

    k, v, beta, gates: `GroupTensor`. The chunk is taken in two halves of H tokens, 1 and 2: Y consists of their
    inverses and one block below.
    """
    r, n, g = tl.program_id(0) // N, tl.program_id(0) % N, tl.program_id(1).to(tl.int64)
    row = load_row(rows, r, WIDTH)
    batch, length = row.batch, row.length
    if n >= count_chunks(row, C):
        return
    at = (row.base + n) * G + g
    half = k.ptr.dtype.element_ty
    at_H, all_H = tl.arange(0, H), tl.arange(0, H) >= 0
    t1_H = n * C + at_H - row.start % C
    t2_H = t1_H + H
    here1_H, here2_H = (t1_H >= 0) & (t1_H < length), (t2_H >= 0) & (t2_H < length)
    t1_H, t2_H = t1_H + row.bos, t2_H + row.bos
    k_row, v_row = k.ptr + batch * k.b + g * k.g, v.ptr + batch * v.b + g * v.g
    beta_row, gates_row = beta.ptr + batch * beta.b + g * beta.g, gates.ptr + batch * gates.b + g * gates.g
    beta1_H, beta2_H = load_half(beta_row, t1_H, beta.t, here1_H), load_half(beta_row, t2_H, beta.t, here2_H)
    gate1_H = tl.maximum(load_half(gates_row, t1_H, gates.t, here1_H), -60.0)
    gate2_H = tl.maximum(load_half(gates_row, t2_H, gates.t, here2_H), -60.0)
    step1_H, step2_H = tl.floor(gate1_H * 256.0) * 0.00390625, tl.floor(gate2_H * 256.0) * 0.00390625
    mid_hi, mid_lo = tl.sum(step1_H, 0), tl.sum(gate1_H - step1_H, 0)
    hi1_H, lo1_H = tl.cumsum(step1_H, 0), tl.cumsum(gate1_H - step1_H, 0)
    hi2_H, lo2_H = tl.cumsum(step2_H, 0) + mid_hi, tl.cumsum(gate2_H - step2_H, 0) + mid_lo
    tl.store(terms.c + at * 2 * C + at_H, hi1_H)
    tl.store(terms.c + at * 2 * C + H + at_H, hi2_H)
    tl.store(terms.c + at * 2 * C + C + at_H, lo1_H)
    tl.store(terms.c + at * 2 * C + C + H + at_H, lo2_H)
    a1_HH = tl.zeros([H, H], tl.float32)
    a2_HH = tl.zeros([H, H], tl.float32)
    a21_HH = tl.zeros([H, H], tl.float32)
    for first in range(0, K, BX):
        k1_HX = load_tile(k_row, t1_H, k.t, here1_H, K, first, BX)
        k2_HX = load_tile(k_row, t2_H, k.t, here2_H, K, first, BX)
        a1_HH = tl.dot(k1_HX, tl.trans(k1_HX), a1_HH, input_precision=P)
        a2_HH = tl.dot(k2_HX, tl.trans(k2_HX), a2_HH, input_precision=P)
        a21_HH = tl.dot(k2_HX, tl.trans(k1_HX), a21_HH, input_precision=P)
    later_HH = at_H[:, None] > at_H[None, :]
    log_HH = (hi1_H[:, None] - hi1_H[None, :]) + (lo1_H[:, None] - lo1_H[None, :])
    a1_HH *= beta1_H[:, None] * tl.exp(tl.where(later_HH, log_HH, float("-inf")))
    log_HH = (hi2_H[:, None] - hi2_H[None, :]) + (lo2_H[:, None] - lo2_H[None, :])
    a2_HH *= beta2_H[:, None] * tl.exp(tl.where(later_HH, log_HH, float("-inf")))
    a21_HH *= beta2_H[:, None] * tl.exp((hi2_H[:, None] - hi1_H[None, :]) + (lo2_H[:, None] - lo1_H[None, :]))
    y1_HH, y2_HH = unit_lower_inverse(a1_HH, H, P), unit_lower_inverse(a2_HH, H, P)
    y21_HH = tl.dot(y2_HH, tl.dot(a21_HH, y1_HH, input_precision=P), input_precision=P)
    y1_HH, y2_HH, y21_HH = y1_HH.to(half), y2_HH.to(half), (-y21_HH).to(half)
    y = terms.y + at * C * C
    store_tile(y, at_H, C, all_H, C, 0, y1_HH, H)
    store_tile(y, at_H, C, all_H, C, H, tl.zeros([H, H], tl.float32), H)
    store_tile(y, at_H + H, C, all_H, C, 0, y21_HH, H)
    store_tile(y, at_H + H, C, all_H, C, H, y2_HH, H)
    scale1_H, scale2_H = beta1_H * tl.exp(hi1_H + lo1_H), beta2_H * tl.exp(hi2_H + lo2_H)
    for first in range(0, K, BX):
        k1_HX = (load_tile(k_row, t1_H, k.t, here1_H, K, first, BX) * scale1_H[:, None]).to(half)
        k2_HX = (load_tile(k_row, t2_H, k.t, here2_H, K, first, BX) * scale2_H[:, None]).to(half)
        store_tile(terms.w + at * C * K, at_H, K, all_H, K, first, tl.dot(y1_HH, k1_HX, input_precision=P), BX)
        w2_HX = tl.dot(y2_HH, k2_HX, tl.dot(y21_HH, k1_HX, input_precision=P), input_precision=P)
        store_tile(terms.w + at * C * K, at_H + H, K, all_H, K, first, w2_HX, BX)
    end_hi, end_lo = mid_hi + tl.sum(step2_H, 0), mid_lo + tl.sum(gate2_H - step2_H, 0)
    to_end1_H = tl.exp((end_hi - hi1_H) + (end_lo - lo1_H))
    to_end2_H = tl.exp((end_hi - hi2_H) + (end_lo - lo2_H))
    for at_v in range(0, V, BV):
        v1_HV = (load_tile(v_row, t1_H, v.t, here1_H, V, at_v, BV) * beta1_H[:, None]).to(half)
        v2_HV = (load_tile(v_row, t2_H, v.t, here2_H, V, at_v, BV) * beta2_H[:, None]).to(half)
        u1_HV = tl.dot(y1_HH, v1_HV, input_precision=P)
        u2_HV = tl.dot(y2_HH, v2_HV, tl.dot(y21_HH, v1_HV, input_precision=P), input_precision=P)
        at_V = tl.arange(0, BV)
        u_here = terms.u + (at * V + at_v) * C
        store_tile(u_here, at_V, C, at_V < V - at_v, C, 0, tl.trans(u1_HV), H)
        store_tile(u_here, at_V, C, at_V < V - at_v, C, H, tl.trans(u2_HV), H)
        if OWN:
            u1_VH = tl.trans((u1_HV * to_end1_H[:, None]).to(half))
            u2_VH = tl.trans((u2_HV * to_end2_H[:, None]).to(half))
            for first in range(0, K, BX):
                added_VX = tl.dot(u1_VH, load_tile(k_row, t1_H, k.t, here1_H, K, first, BX), input_precision=P)
                k2_HX = load_tile(k_row, t2_H, k.t, here2_H, K, first, BX)
                added_VX = tl.dot(u2_VH, k2_HX, added_VX, input_precision=P)
                store_matrix(own + (at * V + at_v) * K, V - at_v, K, first, added_VX, BV, BX)


def launch_wy_forward(plan: DeltaPlan, chunk_states: Tensor | None = None) -> WYTerms:
    """Run `wy_forward` on all chunks.

    chunk_states (chunks, G, V, K), float32: is filled with the states that chunks write from zero.
    """
    s = plan.sizes
    c = s.buffer(2, s.C, dtype=torch.float32)
    terms = WYTerms(c, s.buffer(s.C, s.C), s.buffer(s.C, s.K), s.buffer(s.V, s.C))
    inputs = (GroupTensor.from_tensor(x) for x in (plan.k, plan.v, plan.beta, plan.gates))
    options: dict[str, Any] = {**s.wide_kernel, "H": s.C // 2, "BX": s.features, "OWN": chunk_states is not None}
    options["num_warps"] = 2 if s.dtype != torch.float32 else 4
    own = c if chunk_states is None else chunk_states
    open_launch(wy_forward, options)((s.R * s.N, s.G), *inputs, s.table, terms, own, s.N)
    return terms


@triton.jit
def wy_backward(
    k, v, beta, rows, c, y, dw, du, dt, dk_in, dc_in, grads, T, N,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, PARTS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Store the `WYInputGradients` of one chunk. Grid: (R x N, G).

    k, v, beta: `GroupTensor`; grads: `WYInputGradients`; others as in `WYOutputGradients`. INNER: there is a dt, and
    grads.dv already has the part that belongs to it. PARTS: parts of dc_in.
    """
    g = tl.program_id(1).to(tl.int64)
    batch, at, t_C, here_C, there = program_chunk(rows, N, g, G, WIDTH, C)
    if not there:
        return
    at_C = tl.arange(0, C)
    out = (batch * G + g) * T
    beta_C = tl.load(beta.ptr + batch * beta.b + g * beta.g + t_C * beta.t, mask=here_C, other=0.0).to(tl.float32)
    half = k.ptr.dtype.element_ty
    y_CC = load_matrix(y + at * C * C, C, C, 0, C, C)
    fade_C = decay_from_start(c, at, C)
    scale_C = beta_C * fade_C
    dy_CC = tl.zeros([C, C], tl.float32)
    kk_CC = tl.zeros([C, C], tl.float32)
    dbeta_C = tl.zeros([C], tl.float32)
    for first in range(0, V, BV):
        v_CV = load_tile(v.ptr + batch * v.b + g * v.g, t_C, v.t, here_C, V, first, BV)
        du_CV = tl.trans(load_matrix(du + (at * V + first) * C, V - first, C, 0, BV, C).to(half))
        dy_CC = tl.dot(du_CV, tl.trans((v_CV * beta_C[:, None]).to(half)), dy_CC, input_precision=P)
        dvb_CV = tl.dot(tl.trans(y_CC), du_CV, input_precision=P)
        dbeta_C += tl.sum(dvb_CV * v_CV, 1)
        dvb_CV *= beta_C[:, None]
        if INNER:
            dvb_CV += load_tile(grads.dv + out * V, t_C, V, here_C, V, first, BV)
        store_tile(grads.dv + out * V, t_C, V, here_C, V, first, dvb_CV, BV)
    for first in range(0, K, BX):
        k_CX = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, first, BX)
        dw_CX = load_matrix(dw + at * C * K, C, K, first, C, BX).to(half)
        dy_CC = tl.dot(dw_CX, tl.trans((k_CX * scale_C[:, None]).to(half)), dy_CC, input_precision=P)
        kk_CC = tl.dot(k_CX, tl.trans(k_CX), kk_CC, input_precision=P)
    if INNER:
        dt_CC = load_matrix(dt + at * C * C, C, C, 0, C, C)
        dbeta_C += tl.sum(y_CC * dt_CC, 0)
        dy_CC += dt_CC * beta_C[None, :]
    da_CC = tl.dot(tl.trans(y_CC), dy_CC.to(half), input_precision=P)
    da_CC = tl.dot(da_CC.to(half), tl.trans(y_CC), input_precision=P)
    da_CC = tl.where(at_C[:, None] > at_C[None, :], -da_CC, 0.0) * decay_mask(c, at, C)
    z_CC = da_CC * kk_CC
    dbeta_C += tl.sum(z_CC, 1)
    z_CC *= beta_C[:, None]
    dc_C = tl.sum(z_CC, 1) - tl.sum(z_CC, 0)
    for part in range(PARTS):
        dc_C += tl.load(dc_in + (at * PARTS + part) * C + at_C)
    dkk_CC = (da_CC * beta_C[:, None]).to(half)
    for first in range(0, K, BX):
        k_CX = load_tile(k.ptr + batch * k.b + g * k.g, t_C, k.t, here_C, K, first, BX)
        dw_CX = load_matrix(dw + at * C * K, C, K, first, C, BX).to(half)
        dk_CX = tl.dot(tl.trans(y_CC), dw_CX, input_precision=P)
        dscale_C = tl.sum(dk_CX * k_CX, 1)
        dbeta_C += dscale_C * fade_C
        dc_C += dscale_C * scale_C
        dk_CX = dk_CX * scale_C[:, None] + load_matrix(dk_in + at * C * K, C, K, first, C, BX)
        dk_CX = tl.dot(dkk_CC, k_CX, dk_CX, input_precision=P)
        dk_CX = tl.dot(tl.trans(dkk_CC), k_CX, dk_CX, input_precision=P)
        store_tile(grads.dk + out * K, t_C, K, here_C, K, first, dk_CX, BX)
    tl.store(grads.dbeta + out + t_C, dbeta_C, mask=here_C)
    tl.store(grads.dgates + out + t_C, tl.cumsum(dc_C, 0, reverse=True), mask=here_C)


def launch_wy_backward(plan: DeltaPlan, terms: WYTerms, d_terms: WYOutputGradients) -> WYInputGradients:
    """Run `wy_backward` on all chunks."""
    s, k, v = plan.sizes, plan.k, plan.v
    batch, G, T, _ = k.shape
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device) if d_terms.dv is None else d_terms.dv
    dbeta, dgates = (torch.empty(batch, G, T, dtype=torch.float32, device=k.device) for _ in range(2))
    grads = WYInputGradients(dk, dv, dbeta, dgates)
    wy_backward[(s.R * s.N, s.G)](
        GroupTensor.from_tensor(k), *plan.values_beta, s.table, terms.c, terms.y, d_terms.dw, d_terms.du,
        terms.y if d_terms.dt is None else d_terms.dt, d_terms.dk, d_terms.dc, grads, T, s.N, **s.wide_kernel, BX=s.features,
        PARTS=d_terms.dc.shape[2], INNER=d_terms.dt is not None, num_warps=4, num_stages=1, maxnreg=s.max_registers,
    )  # fmt: skip
    return grads
