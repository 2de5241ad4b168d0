"""What the levels of log-linear Gated DeltaNet send back to each chunk (log_linear_delta_levels.py), given the states S
at its start and the gradients dS' at its end, of every level at which it reads:

    X = sum_l S_l dS'_l^T     dK = e (u dS_own^T - w X)     dw = -e K X^T     du = e K dS_own     gamma tr X
    dR_j = sum_l diag(lambda_j^(l)) dO_j S_l^T              dlambda_j^(l) = rows of R_j . dO_j S_l^T, summed
"""

from __future__ import annotations

import triton
import triton.language as tl

from surgery.kernels.gated_delta_rows import chunks_of, matrix, put_matrix, row_of, tile, to_end_of, tokens_of
from surgery.kernels.log_linear_delta_levels import first_chunk, has_left, lambda_at


@triton.jit(do_not_specialize=["low", "high", "top", "N", "MOST"])
def _gather(
    k, do, level, rows, c, w, u, read, kept, dkept, down, dk, dw, du, dread, dlevel, dc,
    k_b, k_g, k_t, do_b, do_g, do_j, do_t, l_b, l_t, l_g, l_j, l_l, low, high, top, T, N, J, MOST,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, LOG_C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BX: tl.constexpr, P: tl.constexpr, LAMBDAS: tl.constexpr,
    BUCKET: tl.constexpr, ADD: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    r, n, g = tl.program_id(0) // N, tl.program_id(0) % N, tl.program_id(1)
    batch, bos, length, start, base = row_of(rows, r, WIDTH)
    if n >= chunks_of(length, start, C):
        return
    a0 = first_chunk(start, top, C)
    at = (base + n) * G + g
    t_C, here_C = tokens_of(n, bos, length, start, C)
    at_C = tl.arange(0, C)
    to_end_C, total = to_end_of(c, at, C)
    own = at * K * V
    half = k.dtype.element_ty
    dw_CK = tl.zeros([C, BK], tl.float32)
    z_C = tl.zeros([C], tl.float32)
    both = 0.0
    for at_x in range(0, K, BX):
        k_CX = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, at_x, BX)
        x_KX = tl.zeros([BK, BX], tl.float32)
        for lev in range(low, high):
            if has_left(a0, n, lev, BUCKET):
                here = own + (lev - low) * MOST.to(tl.int64) * (G * K * V)
                for at_v in range(0, V, BV):
                    s_VK = matrix(kept + here + at_v * K, V - at_v, K, 0, BV, BK)
                    ds_VX = matrix(dkept + here + at_v * K, V - at_v, K, at_x, BV, BX)
                    x_KX = tl.dot(tl.trans(s_VK), ds_VX, x_KX, input_precision=P)
        both += tl.sum(tl.where(tl.arange(0, BK)[:, None] == at_x + tl.arange(0, BX)[None, :], x_KX, 0.0))
        half_KX = x_KX.to(half)
        w_CK = matrix(w + at * C * K, C, K, 0, C, BK)
        dk_CX = -tl.dot(w_CK, half_KX, input_precision=P)
        if OWN:
            for at_v in range(0, V, BV):
                u_VC = matrix(u + (at * V + at_v) * C, V - at_v, C, 0, BV, C)
                ds_VX = matrix(down + own + at_v * K, V - at_v, K, at_x, BV, BX).to(half)
                dk_CX = tl.dot(tl.trans(u_VC), ds_VX, dk_CX, input_precision=P)
        dk_CX *= to_end_C[:, None]
        z_C += tl.sum(dk_CX * k_CX, 1)
        if ADD:
            dk_CX += matrix(dk + at * C * K, C, K, at_x, C, BX)
        put_matrix(dk + at * C * K, C, K, at_x, dk_CX, C, BX)
        dw_CK -= tl.dot((k_CX * to_end_C[:, None]).to(half), tl.trans(half_KX), input_precision=P)
    dc_C = tl.where(at_C == C - 1, total * both + tl.sum(z_C), 0.0) - z_C
    if ADD:
        dw_CK += matrix(dw + at * C * K, C, K, 0, C, BK)
        dc_C += tl.load(dc + at * C + at_C)
    if OWN:
        k_CK = tile(k + batch * k_b + g * k_g, t_C, k_t, here_C, K, 0, BK)
        for at_v in range(0, V, BV):
            ds_VK = matrix(down + own + at_v * K, V - at_v, K, 0, BV, BK).to(half)
            du_VC = tl.dot(ds_VK, tl.trans(k_CK), input_precision=P) * to_end_C[None, :]
            put_matrix(du + (at * V + at_v) * C, V - at_v, C, 0, du_VC, BV, C)
    put_matrix(dw + at * C * K, C, K, 0, dw_CK, C, BK)
    tl.store(dc + at * C + at_C, dc_C)
    for j in range(J):
        at_j = (at * J + j) * C * K
        read_CK = matrix(read + at_j, C, K, 0, C, BK)
        dread_CK = tl.zeros([C, BK], tl.float32)
        last_C = tl.zeros([C], tl.float32)
        if ADD:
            dread_CK += matrix(dread + at_j, C, K, 0, C, BK)
        dlambda = dlevel + ((batch * T + t_C) * G + g) * J * LAMBDAS + j * LAMBDAS
        for lev in range(low, high):
            if has_left(a0, n, lev, BUCKET):
                here = own + (lev - low) * MOST.to(tl.int64) * (G * K * V)
                seen_CK = tl.zeros([C, BK], tl.float32)
                for at_v in range(0, V, BV):
                    do_CV = tile(do + batch * do_b + g * do_g + j * do_j, t_C, do_t, here_C, V, at_v, BV)
                    s_VK = matrix(kept + here + at_v * K, V - at_v, K, 0, BV, BK)
                    seen_CK = tl.dot(do_CV, s_VK, seen_CK, input_precision=P)
                which = lambda_at(level, start, lev, top, C, LOG_C, LAMBDAS)
                at_l = level + batch * l_b + t_C * l_t + g * l_g + j * l_j + which * l_l
                dread_CK += seen_CK * tl.load(at_l, mask=here_C, other=0.0)[:, None]
                dlambda_C = tl.sum(seen_CK * read_CK, 1)
                tl.store(dlambda + which, dlambda_C, mask=here_C & (which < LAMBDAS - 1))
                last_C += tl.where(which < LAMBDAS - 1, 0.0, dlambda_C)
        put_matrix(dread + at_j, C, K, 0, dread_CK, C, BK)
        last_C += tl.load(dlambda + LAMBDAS - 1, mask=here_C, other=0.0)
        tl.store(dlambda + LAMBDAS - 1, last_C, mask=here_C)
