"""What the levels of log-linear Gated DeltaNet send back to each chunk (log_linear_delta_levels.py), given, of every
level at which it reads, S at its start and dS' at its end, x = -e w S and y = -e K dS':

    dK = e u dS_own^T + sum_l x_l dS'_l^T      dw = sum_l y_l S_l^T      du = e K dS_own      gamma sum_l <S_l, dS'_l>
    dR_j = sum_l diag(lambda_j^(l)) dO_j S_l^T                dlambda_j^(l) = rows of R_j . dO_j S_l^T, summed

A program has a block of features; what is summed over features, dc and dlambda, comes in parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.gated_delta_rows import chunk_here, matrix, number_here, put_matrix, tile, to_end_of
from surgery.kernels.log_linear_delta_levels import first_chunk, has_left, lambda_at


@triton.jit(do_not_specialize=["low", "high", "top", "N", "MOST"])
def _gather(
    k, do, level, rows, c, u, read, kept, passed, dkept, dpassed, down, dk, dw, du, dread, dlevel, dc,
    k_b, k_g, k_t, do_b, do_g, do_j, do_t, l_b, l_t, l_g, l_j, l_l, low, high, top, T, N, J, MOST,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, LAMBDAS: tl.constexpr,
    BUCKET: tl.constexpr, ADD: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    g, first = tl.program_id(1).to(tl.int64), tl.program_id(2) * BX
    batch, at, t_C, here_C, there = chunk_here(rows, N, g, G, WIDTH, C)
    if not there:
        return
    n, start = number_here(rows, N, WIDTH)
    a0 = first_chunk(start, top, C)
    at_C = tl.arange(0, C)
    to_end_C, total = to_end_of(c, at, C)
    half = k.dtype.element_ty
    dk_CX = tl.zeros([C, BX], tl.float32)
    dw_CX = tl.zeros([C, BX], tl.float32)
    both = 0.0
    if OWN:
        for at_v in range(0, V, BV):
            u_VC = matrix(u + (at * V + at_v) * C, V - at_v, C, 0, BV, C)
            ds_VX = matrix(down + (at * V + at_v) * K, V - at_v, K, first, BV, BX).to(half)
            dk_CX = tl.dot(tl.trans((u_VC * to_end_C[None, :]).to(half)), ds_VX, dk_CX, input_precision=P)
    for lev in range(low, high):
        if has_left(a0, n, lev, BUCKET):
            for at_v in range(0, V, BV):
                here = ((lev - low) * MOST.to(tl.int64) * G + at) * V + at_v
                s_VX = matrix(kept + here * K, V - at_v, K, first, BV, BX)
                ds_VX = matrix(dkept + here * K, V - at_v, K, first, BV, BX)
                x_VC = matrix(passed + here * C, V - at_v, C, 0, BV, C)
                y_VC = matrix(dpassed + here * C, V - at_v, C, 0, BV, C)
                dk_CX = tl.dot(tl.trans(x_VC), ds_VX, dk_CX, input_precision=P)
                dw_CX = tl.dot(tl.trans(y_VC), s_VX, dw_CX, input_precision=P)
                both += tl.sum(s_VX.to(tl.float32) * ds_VX)
    k_CX = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, first, BX)
    z_C = tl.sum(dk_CX * k_CX, 1)
    dc_C = tl.where(at_C == C - 1, total * both + tl.sum(z_C), 0.0) - z_C
    part = dc + (at * PARTS + tl.program_id(2)) * C + at_C
    if ADD:
        dk_CX += matrix(dk + at * C * K, C, K, first, C, BX)
        dw_CX += matrix(dw + at * C * K, C, K, first, C, BX)
        dc_C += tl.load(part)
    put_matrix(dk + at * C * K, C, K, first, dk_CX, C, BX)
    put_matrix(dw + at * C * K, C, K, first, dw_CX, C, BX)
    tl.store(part, dc_C)
    for j in range(J):
        at_j = (at * J + j) * C * K
        read_CX = matrix(read + at_j, C, K, first, C, BX)
        dread_CX = tl.zeros([C, BX], tl.float32)
        if ADD:
            dread_CX += matrix(dread + at_j, C, K, first, C, BX)
        dlambda = dlevel + ((batch * T + t_C) * G + g) * J * LAMBDAS + j * LAMBDAS
        for lev in range(low, high):
            if has_left(a0, n, lev, BUCKET):
                here = ((lev - low) * MOST.to(tl.int64) * G + at) * V
                seen_CX = tl.zeros([C, BX], tl.float32)
                for at_v in range(0, V, BV):
                    do_CV = tile(do + batch * do_b + g * do_g + (0 * g + j) * do_j, t_C, do_t, here_C, V, at_v, BV)
                    s_VX = matrix(kept + (here + at_v) * K, V - at_v, K, first, BV, BX)
                    seen_CX = tl.dot(do_CV, s_VX, seen_CX, input_precision=P)
                which = lambda_at(level, start, lev, top, C, LOG_C, LAMBDAS)
                at_l = level + batch * l_b + t_C * l_t + g * l_g + (0 * g + j) * l_j + which * l_l
                dread_CX += seen_CX * tl.load(at_l, mask=here_C, other=0.0)[:, None]
                tl.atomic_add(dlambda + which, tl.sum(seen_CX * read_CX, 1), mask=here_C, sem="relaxed")
        put_matrix(dread + at_j, C, K, first, dread_CX, C, BX)
    if OWN & (first == 0):
        for at_v in range(0, V, BV):
            du_VC = tl.zeros([BV, C], tl.float32)
            for at_k in range(0, K, BX):
                k_CX = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, at_k, BX)
                ds_VX = matrix(down + (at * V + at_v) * K, V - at_v, K, at_k, BV, BX).to(half)
                du_VC = tl.dot(ds_VX, tl.trans(k_CX), du_VC, input_precision=P)
            put_matrix(du + (at * V + at_v) * C, V - at_v, C, 0, du_VC * to_end_C[None, :], BV, C)
