"""Triton kernels of linear features, see kernels/linear_features/__init__.py.

Axes: M tokens of a tile, N columns of a block of u, F columns of y = W u (half of the features). A program computes
tokens of one head.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_rotated(
    x_M, cos_M, sin_M, ok_M, at_N, is_rotated_N, ok_N, R: tl.constexpr, ROTATED: tl.constexpr
):  # fmt: skip
    """Return columns at_N of x (M, N) in the dtype of x, after RoPE where is_rotated_N, zeros outside of ok_N.

    x_M, cos_M, sin_M: pointers to the tokens' rows. R: rotated dims.
    """
    x_MN = tl.load(x_M[:, None] + at_N[None, :], mask=ok_M[:, None] & ok_N[None, :], other=0.0)
    if ROTATED:
        turns = ok_M[:, None] & (ok_N & is_rotated_N & (at_N < R))[None, :]
        first_N = at_N < R // 2
        pair_N = tl.where(first_N, at_N + R // 2, at_N - R // 2)
        pair_MN = tl.load(x_M[:, None] + pair_N[None, :], mask=turns, other=0.0).to(tl.float32)
        cos_MN = tl.load(cos_M[:, None] + at_N[None, :], mask=turns, other=1.0).to(tl.float32)
        sin_MN = tl.load(sin_M[:, None] + at_N[None, :], mask=turns, other=0.0).to(tl.float32)
        sin_MN = tl.where(first_N[None, :], -sin_MN, sin_MN)
        x_MN = (x_MN.to(tl.float32) * cos_MN + pair_MN * sin_MN).to(x_MN.dtype)
    return x_MN


@triton.jit
def _load_u(x_M, cos_M, sin_M, ok_M, n_N, K: tl.constexpr, U: tl.constexpr, R: tl.constexpr, BOTH: tl.constexpr):
    """Return columns n_N of u (M, N): x, and with BOTH x after RoPE behind it, which cos_M points to if BOTH is 2."""
    if BOTH == 2:
        x_MN = tl.load(x_M[:, None] + n_N[None, :], mask=ok_M[:, None] & (n_N < K)[None, :], other=0.0)
        ok_N = (n_N >= K) & (n_N < U)
        turned_MN = tl.load(cos_M[:, None] + (n_N - K)[None, :], mask=ok_M[:, None] & ok_N[None, :], other=0.0)
        return tl.where((n_N < K)[None, :], x_MN, turned_MN)
    elif BOTH:
        at_N = tl.where(n_N >= K, n_N - K, n_N)
        return _load_rotated(x_M, cos_M, sin_M, ok_M, at_N, n_N >= K, n_N < U, R, True)
    else:
        return _load_rotated(x_M, cos_M, sin_M, ok_M, n_N, n_N < 0, n_N < U, R, False)


@triton.jit
def _load_weight(w, f_F, n_N, ok_N, U: tl.constexpr):
    """Return W (F, N) in float32."""
    mask = (f_F < U)[:, None] & ok_N[None, :]
    return tl.load(w + f_F[:, None] * U + n_N[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _products(
    x_M, cos_M, sin_M, ok_M, w, f_F, K: tl.constexpr, U: tl.constexpr, R: tl.constexpr, BOTH: tl.constexpr,
    M: tl.constexpr, BF: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return W u (M, F). SPLIT: x has 16 bits; W is then the sum of two matrices of 16 bits."""
    y_MF = tl.zeros([M, BF], tl.float32)
    for n in range(0, U, N):
        n_N = n + tl.arange(0, N)
        u_MN = _load_u(x_M, cos_M, sin_M, ok_M, n_N, K, U, R, BOTH)
        w_FN = _load_weight(w, f_F, n_N, n_N < U, U)
        if SPLIT:
            high_FN = w_FN.to(u_MN.dtype)
            low_FN = (w_FN - high_FN.to(tl.float32)).to(u_MN.dtype)
            y_MF = tl.dot(u_MN, tl.trans(high_FN), y_MF)
            y_MF = tl.dot(u_MN, tl.trans(low_FN), y_MF)
        else:
            y_MF = tl.dot(u_MN, tl.trans(w_FN), y_MF, input_precision=PRECISION)
    return y_MF


@triton.jit
def _signed_softmax(y_MF, ok_F):
    """Return softmax(y) and softmax(-y), (M, F) each."""
    up_MF = tl.where(ok_F[None, :], y_MF, float("-inf"))
    up_MF = tl.where(ok_F[None, :], tl.exp(up_MF - tl.max(up_MF, 1)[:, None]), 0.0)
    down_MF = tl.where(ok_F[None, :], -y_MF, float("-inf"))
    down_MF = tl.where(ok_F[None, :], tl.exp(down_MF - tl.max(down_MF, 1)[:, None]), 0.0)
    return up_MF / tl.sum(up_MF, 1)[:, None], down_MF / tl.sum(down_MF, 1)[:, None]


@triton.jit
def _token_rows(x, cos, sin, b, h, t_M, x_b, x_t, x_h, cos_b, cos_t):
    """Return pointers to the rows of x, cos and sin."""
    at_M = b * cos_b + t_M * cos_t
    return x + b * x_b + t_M * x_t + h * x_h, cos + at_M, sin + at_M


@triton.jit(do_not_specialize=["T", "first", "last"])
def features_forward(
    x, cos, sin, w, out, turned, root, T, first, last, H, x_b, x_t, x_h, cos_b, cos_t,
    K: tl.constexpr, U: tl.constexpr, R: tl.constexpr, BOTH: tl.constexpr, TURNED: tl.constexpr, MAP: tl.constexpr,
    NORM: tl.constexpr, M: tl.constexpr, BF: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute features out_BHLF of tokens first .. last - 1 and, if TURNED, x after RoPE (B, T, H, K) of all tokens.

    Grid: B * H times tiles of M tokens, on one axis, as the second has 65,535 programs at most. MAP: whether W is there.
    BOTH: 2 if cos is x after RoPE, with the strides of x.
    """
    tiles = tl.cdiv(T, M)
    lane = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = lane // H, lane % H
    t_M = (tl.program_id(0) % tiles * M + tl.arange(0, M)).to(tl.int64)
    ok_M = t_M < T
    x_M, cos_M, sin_M = _token_rows(x, cos, sin, b, h, t_M, x_b, x_t, x_h, cos_b, cos_t)
    if BOTH == 2:
        cos_M = cos + b * x_b + t_M * x_t + h * x_h
    if TURNED:
        for n in range(0, K, N):
            n_N = n + tl.arange(0, N)
            turned_MN = _load_rotated(x_M, cos_M, sin_M, ok_M, n_N, n_N >= 0, n_N < K, R, True)
            at_MN = turned + ((b * T + t_M) * H + h)[:, None] * K + n_N[None, :]
            tl.store(at_MN, turned_MN, mask=ok_M[:, None] & (n_N < K)[None, :])
    start = tl.program_id(0) % tiles * M
    if (start < last) & (start + M > first):  # else no token of the tile has features
        f_F = tl.arange(0, BF)
        ok_F = f_F < U
        kept = ((t_M >= first) & (t_M < last))[:, None] & ok_F[None, :]
        row_M = lane * (last - first) + t_M - first
        if MAP:
            y_MF = root * _products(
                x_M, cos_M, sin_M, ok_M, w + h * U * U, f_F, K, U, R, BOTH, M, BF, N, SPLIT, PRECISION
            )  # fmt: skip
            up_MF, down_MF = _signed_softmax(y_MF, ok_F)
            if NORM:
                scale_M = tl.rsqrt(tl.sum(up_MF * up_MF + down_MF * down_MF, 1) + 1e-6)
                up_MF, down_MF = up_MF * scale_M[:, None], down_MF * scale_M[:, None]
            at_MF = out + row_M[:, None] * (2 * U) + f_F[None, :]
            tl.store(at_MF, up_MF.to(out.dtype.element_ty), mask=kept)
            tl.store(at_MF + U, down_MF.to(out.dtype.element_ty), mask=kept)
        else:
            u_MF = root * _load_u(x_M, cos_M, sin_M, ok_M, f_F, K, U, R, BOTH).to(tl.float32)
            if NORM:
                u_MF = u_MF * tl.rsqrt(tl.sum(u_MF * u_MF, 1) + 1e-6)[:, None]
            tl.store(out + row_M[:, None] * U + f_F[None, :], u_MF.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _load_halves(w, f_F, k_K, U: tl.constexpr, K: tl.constexpr, dtype: tl.constexpr):
    """Return two matrices of 16 bits (K, F) whose sum is W^T of columns k_K of W. w: pointer to the first column."""
    mask = (k_K < K)[:, None] & (f_F < U)[None, :]
    w_KF = tl.load(w + f_F[None, :] * U + k_K[:, None], mask=mask, other=0.0).to(tl.float32)
    high_KF = w_KF.to(dtype)
    return high_KF, (w_KF - high_KF.to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["T", "first", "last", "tiles"])
def mapped_features_forward(
    x, cos, sin, w, out, turned, root, T, first, last, H, x_b, x_t, x_h, cos_b, cos_t, tiles,
    K: tl.constexpr, U: tl.constexpr, R: tl.constexpr, BOTH: tl.constexpr, TURNED: tl.constexpr, NORM: tl.constexpr,
    M: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`features_forward` with W, for x of 16 bits: a program loads W of its head once, for `tiles` tiles of M tokens.

    Grid: B * H times spans of tiles. Tiles without features compute x after RoPE alone.
    """
    spans = tl.cdiv(T, M * tiles)
    lane = (tl.program_id(0) // spans).to(tl.int64)
    b, h = lane // H, lane % H
    f_F, k_K = tl.arange(0, BF), tl.arange(0, BK)
    ok_F, ok_K = f_F < U, k_K < K
    half = x.dtype.element_ty
    w += h * U * U
    high_KF, low_KF = _load_halves(w, f_F, k_K, U, K, half)
    if BOTH:
        turned_high_KF, turned_low_KF = _load_halves(w + K, f_F, k_K, U, K, half)
    start = tl.program_id(0) % spans * tiles * M
    for at in range(start, tl.minimum(start + tiles * M, T), M):
        t_M = (at + tl.arange(0, M)).to(tl.int64)
        ok_M = t_M < T
        x_M, cos_M, sin_M = _token_rows(x, cos, sin, b, h, t_M, x_b, x_t, x_h, cos_b, cos_t)
        if BOTH == 2:
            known_M = cos + b * x_b + t_M * x_t + h * x_h
            turned_MK = tl.load(known_M[:, None] + k_K[None, :], mask=ok_M[:, None] & ok_K[None, :], other=0.0)
        elif BOTH or TURNED:
            turned_MK = _load_rotated(x_M, cos_M, sin_M, ok_M, k_K, ok_K, ok_K, R, True)
        if TURNED:
            at_MK = turned + ((b * T + t_M) * H + h)[:, None] * K + k_K[None, :]
            tl.store(at_MK, turned_MK, mask=ok_M[:, None] & ok_K[None, :])
        if (at < last) & (at + M > first):  # else no token of the tile has features
            x_MK = tl.load(x_M[:, None] + k_K[None, :], mask=ok_M[:, None] & ok_K[None, :], other=0.0)
            y_MF = tl.dot(x_MK, low_KF, tl.dot(x_MK, high_KF))
            if BOTH:
                y_MF = tl.dot(turned_MK, turned_low_KF, tl.dot(turned_MK, turned_high_KF, y_MF))
            up_MF, down_MF = _signed_softmax(root * y_MF, ok_F)
            if NORM:
                scale_M = tl.rsqrt(tl.sum(up_MF * up_MF + down_MF * down_MF, 1) + 1e-6)
                up_MF, down_MF = up_MF * scale_M[:, None], down_MF * scale_M[:, None]
            kept = ((t_M >= first) & (t_M < last))[:, None] & ok_F[None, :]
            at_MF = out + (lane * (last - first) + t_M - first)[:, None] * (2 * U) + f_F[None, :]
            tl.store(at_MF, up_MF.to(out.dtype.element_ty), mask=kept)
            tl.store(at_MF + U, down_MF.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _column_gradient(
    dy_MF, w, f_F, n_N, ok_N, d_M, x_M, cos_M, sin_M, kept_M, scale_M, along_M, root, K: tl.constexpr, U: tl.constexpr,
    R: tl.constexpr, BOTH: tl.constexpr, MAP: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradient of columns n_N of u (M, N). Without MAP: (d - along u) scale root of the features' gradient
    d."""
    if MAP:
        w_FN = _load_weight(w, f_F, n_N, ok_N, U)
        return root * tl.dot(dy_MF, w_FN.to(dy_MF.dtype), input_precision=PRECISION)
    mask = kept_M[:, None] & ok_N[None, :]
    d_MN = tl.load(d_M[:, None] + n_N[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        u_MN = root * _load_u(x_M, cos_M, sin_M, kept_M, n_N, K, U, R, BOTH).to(tl.float32)
        d_MN = scale_M[:, None] * (d_MN - along_M[:, None] * u_MN)
    return tl.where(mask, root * d_MN, 0.0)


@triton.jit(do_not_specialize=["T", "first", "last"])
def features_backward(
    x, cos, sin, w, d_out, d_turned, dx, dy, root, T, first, last, H, x_b, x_t, x_h, cos_b, cos_t,
    d_b, d_h, d_t, turned_b, turned_t, turned_h,
    K: tl.constexpr, U: tl.constexpr, R: tl.constexpr, BOTH: tl.constexpr, TURNED: tl.constexpr, MAP: tl.constexpr,
    NORM: tl.constexpr, M: tl.constexpr, BF: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx_BTHK, and with MAP the gradient dy_BHLF of root W u, which `weight_gradient` reads. Grid as in the
    forward."""
    tiles = tl.cdiv(T, M)
    lane = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = lane // H, lane % H
    t_M = (tl.program_id(0) % tiles * M + tl.arange(0, M)).to(tl.int64)
    ok_M = t_M < T
    kept_M = (t_M >= first) & (t_M < last)
    x_M, cos_M, sin_M = _token_rows(x, cos, sin, b, h, t_M, x_b, x_t, x_h, cos_b, cos_t)
    f_F = tl.arange(0, BF)
    ok_F = f_F < U
    kept = kept_M[:, None] & ok_F[None, :]
    d_M = d_out + b * d_b + h * d_h + (t_M - first) * d_t
    w += h * U * U
    scale_M = tl.zeros([M], tl.float32)
    along_M = tl.zeros([M], tl.float32)
    if MAP:
        y_MF = root * _products(x_M, cos_M, sin_M, ok_M, w, f_F, K, U, R, BOTH, M, BF, N, SPLIT, PRECISION)
        up_MF, down_MF = _signed_softmax(y_MF, ok_F)
        d_up_MF = tl.load(d_M[:, None] + f_F[None, :], mask=kept, other=0.0).to(tl.float32)
        d_down_MF = tl.load(d_M[:, None] + (f_F + U)[None, :], mask=kept, other=0.0).to(tl.float32)
        if NORM:
            square_M = 1 / (tl.sum(up_MF * up_MF + down_MF * down_MF, 1) + 1e-6)
            scale_M = tl.sqrt(square_M)
            along_M = square_M * tl.sum(up_MF * d_up_MF + down_MF * d_down_MF, 1)
            d_up_MF = scale_M[:, None] * (d_up_MF - along_M[:, None] * up_MF)
            d_down_MF = scale_M[:, None] * (d_down_MF - along_M[:, None] * down_MF)
        d_up_MF = up_MF * (d_up_MF - tl.sum(up_MF * d_up_MF, 1)[:, None])
        d_down_MF = down_MF * (d_down_MF - tl.sum(down_MF * d_down_MF, 1)[:, None])
        dy_MF = (d_up_MF - d_down_MF).to(dy.dtype.element_ty)
        tl.store(dy + (lane * (last - first) + t_M - first)[:, None] * U + f_F[None, :], dy_MF, mask=kept)
    else:
        dy_MF = tl.zeros([M, BF], tl.float32)
        if NORM:
            u_MF = root * _load_u(x_M, cos_M, sin_M, ok_M, f_F, K, U, R, BOTH).to(tl.float32)
            grad_MF = tl.load(d_M[:, None] + f_F[None, :], mask=kept, other=0.0).to(tl.float32)
            square_M = 1 / (tl.sum(u_MF * u_MF, 1) + 1e-6)
            scale_M = tl.sqrt(square_M)
            along_M = square_M * tl.sum(u_MF * grad_MF, 1)
    turned_M = d_turned + b * turned_b + t_M * turned_t + h * turned_h
    for n in range(0, K, N):
        n_N = n + tl.arange(0, N)
        ok_N = n_N < K
        dx_MN = _column_gradient(
            dy_MF, w, f_F, n_N, ok_N, d_M, x_M, cos_M, sin_M, kept_M, scale_M, along_M, root, K, U, R, BOTH, MAP, NORM,
            PRECISION,
        )  # fmt: skip
        if TURNED:
            turns_N = n_N < R
            first_N = n_N < R // 2
            pair_N = tl.where(first_N, n_N + R // 2, n_N - R // 2)
            ok = ok_M[:, None] & ok_N[None, :]
            turns = ok & turns_N[None, :]
            own_MN = tl.load(turned_M[:, None] + n_N[None, :], mask=ok, other=0.0).to(tl.float32)
            pair_MN = tl.load(turned_M[:, None] + pair_N[None, :], mask=turns, other=0.0).to(tl.float32)
            if BOTH:
                own_MN += _column_gradient(
                    dy_MF, w, f_F, n_N + K, ok_N, d_M, x_M, cos_M, sin_M, kept_M, scale_M, along_M, root, K, U, R, BOTH,
                    MAP, NORM, PRECISION,
                )  # fmt: skip
                pair_MN += _column_gradient(
                    dy_MF, w, f_F, pair_N + K, ok_N & turns_N, d_M, x_M, cos_M, sin_M, kept_M, scale_M, along_M, root,
                    K, U, R, BOTH, MAP, NORM, PRECISION,
                )  # fmt: skip
            cos_MN = tl.load(cos_M[:, None] + n_N[None, :], mask=turns, other=1.0).to(tl.float32)
            sin_MN = tl.load(sin_M[:, None] + pair_N[None, :], mask=turns, other=0.0).to(tl.float32)
            dx_MN += own_MN * cos_MN + pair_MN * tl.where(first_N[None, :], sin_MN, -sin_MN)
        at_MN = dx + ((b * T + t_M) * H + h)[:, None] * K + n_N[None, :]
        tl.store(at_MN, dx_MN.to(dx.dtype.element_ty), mask=ok_M[:, None] & ok_N[None, :])


@triton.jit(do_not_specialize=["rows", "L", "first"])
def weight_gradient(
    x, cos, sin, dy, sums, root, rows, L, first, H, x_b, x_t, x_h, cos_b, cos_t,
    K: tl.constexpr, U: tl.constexpr, R: tl.constexpr, BOTH: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute sums (spans, H, U, U): the gradients of W of SPAN rows each, out of B * L rows.

    Grid: spans, H, blocks of D x D of W.
    """
    span, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(U, D)
    f_D = tl.program_id(2) // blocks * D + tl.arange(0, D)
    n_D = tl.program_id(2) % blocks * D + tl.arange(0, D)
    sum_DD = tl.zeros([D, D], tl.float32)
    for at in range(0, SPAN, M):
        row_M = span * SPAN + at + tl.arange(0, M)
        ok_M = row_M < rows
        b_M, t_M = row_M // L, row_M % L
        dy_M = dy + ((b_M * H + h) * L + t_M) * U
        dy_MD = tl.load(dy_M[:, None] + f_D[None, :], mask=ok_M[:, None] & (f_D < U)[None, :], other=0.0)
        t_M += first
        x_M, cos_M, sin_M = _token_rows(x, cos, sin, b_M, h, t_M, x_b, x_t, x_h, cos_b, cos_t)
        u_MD = _load_u(x_M, cos_M, sin_M, ok_M, n_D, K, U, R, BOTH)
        sum_DD = tl.dot(tl.trans(dy_MD), u_MD.to(dy_MD.dtype), sum_DD, input_precision=PRECISION)
    at_DD = sums + ((span * H + h) * U + f_D)[:, None] * U + n_D[None, :]
    tl.store(at_DD, root * sum_DD, mask=(f_D < U)[:, None] & (n_D < U)[None, :])
