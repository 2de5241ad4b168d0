"""BTT for a few tokens: one small launch for each product, both of which do little but read their core.

    z[n, b, c, s] = sum_d x[n, c, d] right[c, d, b, s]        y[n, b, a] = sum_cs z[n, b, c, s] left[b, c, s, a] + bias

z lies as the second product reads it. Where the device can, the second launch begins while the first runs, and waits
for z with its core already read.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from surgery.kernels.launch import CachedLaunch

TOKENS_PER_PROGRAM, ROWS_PER_PROGRAM = 16, 64  # of a program

# Programs of both launches for which the early start pays: more do not fit beside each other. One H200, 2026-11-21.
MAX_EARLY_PROGRAMS = 330
HAS_GDC = tl.constexpr(hasattr(cuda, "gdc_wait"))  # programmatic dependent launch


@triton.jit(do_not_specialize=["N"])
def decode_kernel(
    x, core, bias, out, N, IN, D, R, S, OUT, x_n, x_i, c_g, o_n, o_g, o_s, tiles,
    BN: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """out[n, g, r] = sum_d x[n, g, d] core[g, d, r]. Grid: (groups * tiles, tokens / BN)."""
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tile * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    core += group * c_g
    if FIRST:
        cuda.gdc_launch_dependents()
    c_dr = tl.load(core + d[:, None] * R + r[None, :], mask=(d < D)[:, None] & (r < R)[None, :], other=0.0)
    if SECOND:
        cuda.gdc_wait()
    i = group * D + d
    inside = (n[:, None] < N) & ((d < D) & (i < IN))[None, :]
    x_nd = tl.load(x + n[:, None] * x_n + i[None, :] * x_i, mask=inside, other=0.0)
    out_nr = tl.dot(x_nd, c_dr, input_precision=PRECISION)
    for first in tl.range(BD, D, BD):
        i = group * D + first + d
        inside = (n[:, None] < N) & ((first + d < D) & (i < IN))[None, :]
        x_nd = tl.load(x + n[:, None] * x_n + i[None, :] * x_i, mask=inside, other=0.0)
        at = core + (first + d)[:, None] * R + r[None, :]
        c_dr = tl.load(at, mask=(first + d < D)[:, None] & (r < R)[None, :], other=0.0)
        out_nr = tl.dot(x_nd, c_dr, out_nr, input_precision=PRECISION)
    o = group * o_g + r // S * o_s + r % S
    inside_r = (r < R) & (o < OUT)
    if BIAS:
        out_nr += tl.load(bias + o, mask=inside_r, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + n[:, None] * o_n + o[None, :], out_nr.to(out.dtype.element_ty), mask=(n[:, None] < N) & inside_r[None, :]
    )


@cache
def supports_early_launch(device: torch.device) -> bool:
    return HAS_GDC.value and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


class DecodePlan(NamedTuple):
    z: int  # numbers of a token
    first: CachedLaunch
    second: CachedLaunch


@lru_cache(maxsize=4096)
def decode_plan(
    N: int, in_: int, out: int, right: torch.Size, left: torch.Size, steps: tuple[int, ...], bias: bool, wide: bool,
    ready: bool,
) -> DecodePlan:  # fmt: skip
    """steps: of x's axes and of y's rows. ready: whether the device starts launches early."""
    (c, d, b, s), a = right, left[3]
    programs = c * -(-b * s // ROWS_PER_PROGRAM) + b * -(-a // ROWS_PER_PROGRAM)
    soon = ready and programs <= MAX_EARLY_PROGRAMS and b * s % 16 == 0 and a % 16 == 0
    options = {"launch_pdl": True} if soon else {}
    z, (x_n, x_i, y_n) = b * c * s, steps
    first = _launch(N, in_, z, c, d, b * s, s, (x_n, x_i, z, s, c * s), False, wide, FIRST=soon, SECOND=False)
    second = _launch(N, z, out, b, c * s, a, a, (z, 1, y_n, a, a), bias, wide, FIRST=False, SECOND=soon, **options)
    return DecodePlan(z, first, second)


def _launch(
    N: int, in_: int, out: int, groups: int, d: int, rows: int, s: int, steps: tuple[int, ...], bias: bool, wide: bool,
    **options: bool,
) -> CachedLaunch:  # fmt: skip
    """steps: of x's axes, and of out's tokens, groups and s."""
    x_n, x_i, o_n, o_g, o_s = steps
    tiles = -(-rows // ROWS_PER_PROGRAM)
    sizes = N, in_, d, rows, s, out, x_n, x_i, d * rows, o_n, o_g, o_s, tiles
    constants = {
        "BN": 16, "BD": min(128, max(16, 1 << (d - 1).bit_length())), "BR": ROWS_PER_PROGRAM, "BIAS": bias,
        "PRECISION": "tf32x3" if wide else "tf32", "num_warps": 4, "num_stages": 3,
    }  # fmt: skip
    return CachedLaunch(decode_kernel, (groups * tiles, -(-N // 16)), sizes, {**constants, **options})


def decode_btt(x_NI: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, y_NO: Tensor) -> None:
    (N, in_), wide = x_NI.shape, x_NI.dtype == torch.float32
    steps = *x_NI.stride(), y_NO.stride(0)
    ready = supports_early_launch(x_NI.device)
    plan = decode_plan(N, in_, y_NO.shape[1], right_cdbs.shape, left_bcsa.shape, steps, bias is not None, wide, ready)
    z_NK = x_NI.new_empty(N, plan.z)
    plan.first(x_NI, right_cdbs, z_NK, z_NK)
    plan.second(z_NK, left_bcsa, y_NO if bias is None else bias, y_NO)
