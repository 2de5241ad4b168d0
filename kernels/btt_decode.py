"""BTT for a few tokens: one pass over the cores, one launch.

    z[b, c, s] = sum_d x[c, d] right[c, d, b, s]        y[b, a] = sum_cs z[b, c, s] left[b, c, s, a] + bias

A program owns one b and some tokens: it reads right[:, :, b] and left[b] once, z stays inside. Plain sums, no matrix
units: what takes the time is reading the cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 16
HELD = 16384  # numbers of a core that a program holds at a time
PROGRAMS = 128


@triton.jit(do_not_specialize=["N"])
def decode_kernel(
    x, right, left, bias, y, N, IN, OUT, C, D, B, S, A, x_n, x_i, y_n,
    BN: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Grid: (B, tokens / BN)."""
    b = tl.program_id(0)
    first = tl.program_id(1) * BN
    k = tl.arange(0, BC * BS)
    d = tl.arange(0, BD)
    a = tl.arange(0, BA)
    n = tl.arange(0, BN)
    J = B * S
    y_na = tl.zeros([BN, BA], tl.float32)
    for c0 in tl.range(0, C, BC):
        c, s = c0 + k // BS, k % BS
        inside = (c < C) & (s < S)
        at_r = right + (c * D * J + b * S + s)[:, None] + d[None, :] * J
        r_kd = tl.load(at_r, mask=inside[:, None] & (d[None, :] < D), other=0.0).to(tl.float32)
        at_l = left + b * C * S * A + (c * S + s)[:, None] * A + a[None, :]
        l_ka = tl.load(at_l, mask=inside[:, None] & (a[None, :] < A), other=0.0).to(tl.float32)
        i = c[:, None] * D + d[None, :]
        inside_x = inside[:, None] & (d[None, :] < D) & (i < IN)
        for m in tl.static_range(BN):
            x_kd = tl.load(x + (first + m) * x_n + i * x_i, mask=inside_x & (first + m < N), other=0.0)
            z_k = tl.sum(r_kd * x_kd.to(tl.float32), 1)
            z_k = z_k.to(x.dtype.element_ty).to(tl.float32)  # rounded as where it passes through memory
            y_a = tl.sum(z_k[:, None] * l_ka, 0)
            y_na += tl.where((n == m)[:, None], y_a[None, :], 0.0)
    o = b * A + a
    inside_a = (a < A) & (o < OUT)
    if BIAS:
        y_na += tl.load(bias + o, mask=inside_a, other=0.0).to(tl.float32)[None, :]
    inside = (first + n < N)[:, None] & inside_a[None, :]
    tl.store(y + (first + n)[:, None] * y_n + o[None, :], y_na.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N"])
def few_kernel(
    x, core, bias, out, N, IN, D, R, S, OUT, x_n, x_i, c_g, o_n, o_g, o_s, tiles,
    BN: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[n, g, r] = sum_d x[n, g, d] core[g, d, r], one of the two products. Grid: (groups * tiles, tokens / BN)."""
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tile * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    out_nr = tl.zeros([BN, BR], tl.float32)
    for first in tl.range(0, D, BD):
        i = group * D + first + d
        inside = (n[:, None] < N) & (first + d < D)[None, :] & (i < IN)[None, :]
        x_nd = tl.load(x + n[:, None] * x_n + i[None, :] * x_i, mask=inside, other=0.0)
        at = core + group * c_g + (first + d)[:, None] * R + r[None, :]
        c_dr = tl.load(at, mask=(first + d < D)[:, None] & (r < R)[None, :], other=0.0)
        out_nr = tl.dot(x_nd, c_dr, out_nr, input_precision=PRECISION)
    o = group * o_g + r // S * o_s + r % S
    inside_r = (r < R) & (o < OUT)
    if BIAS:
        out_nr += tl.load(bias + o, mask=inside_r, other=0.0).to(tl.float32)[None, :]
    at = out + n[:, None] * o_n + o[None, :]
    tl.store(at, out_nr.to(out.dtype.element_ty), mask=(n[:, None] < N) & inside_r[None, :])


def one_launch(right_cdbs: Tensor, left_bcsa: Tensor) -> bool:
    """Enough rows of blocks to share the reading among."""
    (_, d, b, s), a = right_cdbs.shape, left_bcsa.shape[3]
    return b >= 16 and triton.next_power_of_2(s) * max(a, d) <= HELD


def decode(x_NI: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, y_NO: Tensor) -> None:
    (c, d, b, s), a, (N, IN) = right_cdbs.shape, left_bcsa.shape[3], x_NI.shape
    BS, BD, BA = (triton.next_power_of_2(n) for n in (s, d, a))
    BC = min(triton.next_power_of_2(c), max(1, HELD // (BS * max(BD, BA))))
    BN = triton.next_power_of_2(max(1, N * b // PROGRAMS))
    decode_kernel[(b, triton.cdiv(N, BN))](
        x_NI, right_cdbs, left_bcsa, y_NO if bias is None else bias, y_NO, N, IN, y_NO.shape[1], c, d, b, s, a,
        *x_NI.stride(), y_NO.stride(0), BN=BN, BC=BC, BS=BS, BD=BD, BA=BA, BIAS=bias is not None,
        num_warps=min(16, max(4, BC * BS * max(BD, BA) // 1024)), num_stages=1,
    )  # fmt: skip


def few(x_NI: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, y_NO: Tensor) -> None:
    """One launch for each product, z between them as the second reads it."""
    (c, d, b, s), a = right_cdbs.shape, left_bcsa.shape[3]
    z_NK = x_NI.new_empty(len(x_NI), b * c * s)
    _few(x_NI, right_cdbs, None, z_NK, c, d, b * s, s, (s, c * s))
    _few(z_NK, left_bcsa, bias, y_NO, b, c * s, a, a, (a, a))


def _few(
    x_NI: Tensor,
    core: Tensor,
    bias: Tensor | None,
    out: Tensor,
    groups: int,
    d: int,
    rows: int,
    s: int,
    steps: tuple[int, int],
) -> None:
    BD, BR = min(128, max(16, triton.next_power_of_2(d))), 32
    tiles = triton.cdiv(rows, BR)
    few_kernel[(groups * tiles, triton.cdiv(len(x_NI), 16))](
        x_NI, core, out if bias is None else bias, out, len(x_NI), x_NI.shape[1], d, rows, s, out.shape[1],
        *x_NI.stride(), d * rows, out.stride(0), *steps, tiles,
        BN=16, BD=BD, BR=BR, BIAS=bias is not None, PRECISION="tf32x3" if x_NI.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=4,
    )  # fmt: skip
