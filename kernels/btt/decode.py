"""BTT for a few tokens: one small launch for each product. Reading the core takes most of the time of each.

    z[n, b, c, s] = sum_d x[n, c, d] right[c, d, b, s]        y[n, b, a] = sum_cs z[n, b, c, s] left[b, c, s, a] + bias

The first product writes z in the order in which the second one reads it. Where the device supports it (programmatic
dependent launch), the second kernel starts while the first one runs, loads its core, and then waits for z.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from surgery.kernels.launch import CachedLaunch
from surgery.kernels.matvec.kernel import supports_early_launch
from surgery.kernels.matvec.plan import MatvecSizes, matvec_launch

TOKENS_PER_PROGRAM, ROWS_PER_PROGRAM = 16, 64

# Programs of both launches up to which an early start of the second one is faster: more do not run at a time. One H200,
# 2026-11-21.
MAX_EARLY_PROGRAMS = 330

# Tokens up to which, and rows of a core's blocks from which, `matvec_kernel` is faster. One H200, 2026-11-23.
MAX_MATVEC_TOKENS, MIN_MATVEC_INNER = 2, 256


@triton.jit(do_not_specialize=["N"])
def decode_kernel(
    x, core, bias, out, N, IN, D, R, S, OUT, x_n, x_i, c_g, o_n, o_g, o_s, tiles,
    BN: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Compute out[n, g, r] = sum_d x[n, g, d] core[g, d, r] + bias. Grid: (groups * tiles, tokens / BN).

    r = (i, s), which lies in row n of out at g o_g + i o_s + s; rows have OUT elements, those of x IN. FIRST, SECOND:
    the place of the launch in a pair with an early start.
    """
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


class DecodeShape(NamedTuple):
    """What a plan depends on. right, left: shapes of the cores. strides: of both axes of x, and of the rows of y.
    early: whether the device supports an early launch."""

    tokens: int
    inputs: int
    outputs: int
    right: torch.Size
    left: torch.Size
    strides: tuple[int, int, int]
    dtype: torch.dtype
    bias: bool
    early: bool


class Product(NamedTuple):
    """Sizes of one launch of `decode_kernel`, named as its arguments."""

    N: int
    IN: int
    D: int
    R: int
    S: int
    OUT: int
    x_n: int
    x_i: int
    c_g: int
    o_n: int
    o_g: int
    o_s: int


@dataclass(frozen=True)
class DecodePlan:
    """Both launches, and the elements of z per token."""

    z: int
    first: CachedLaunch
    second: CachedLaunch


@lru_cache(maxsize=4096)
def decode_plan(shape: DecodeShape) -> DecodePlan:
    """Return the plan of both products."""
    (c, d, b, s), a, N = shape.right, shape.left[3], shape.tokens
    programs = c * -(-b * s // ROWS_PER_PROGRAM) + b * -(-a // ROWS_PER_PROGRAM)
    early = shape.early and programs <= MAX_EARLY_PROGRAMS and b * s % 16 == 0 and a % 16 == 0
    options = {"launch_pdl": True} if early else {}
    z, wide, (x_n, x_i, y_n) = b * c * s, shape.dtype == torch.float32, shape.strides
    one = Product(N, shape.inputs, d, b * s, s, z, x_n, x_i, d * b * s, z, s, c * s)
    two = Product(N, z, c * s, a, a, shape.outputs, z, 1, c * s * a, y_n, a, a)
    if N <= MAX_MATVEC_TOKENS and min(d, c * s) >= MIN_MATVEC_INNER:
        near, far = (MatvecSizes(*p[:9], c_d=p.R, c_r=1, o_n=p.o_n, o_g=p.o_g, o_s=p.o_s) for p in (one, two))
        early = shape.early
        first, second = matvec_launch(near, c, first=early), matvec_launch(far, b, bias=shape.bias, second=early)
        return DecodePlan(z, first, second)
    first = _launch(one, c, wide, BIAS=False, FIRST=early, SECOND=False)
    second = _launch(two, b, wide, BIAS=shape.bias, FIRST=False, SECOND=early, **options)
    return DecodePlan(z, first, second)


def _launch(product: Product, groups: int, wide: bool, **options: bool) -> CachedLaunch:
    """Return the launch of a product of `groups` groups. wide: float32."""
    tiles = -(-product.R // ROWS_PER_PROGRAM)
    constants = {
        "BN": TOKENS_PER_PROGRAM, "BD": min(128, max(16, 1 << (product.D - 1).bit_length())), "BR": ROWS_PER_PROGRAM,
        "PRECISION": "tf32x3" if wide else "tf32", "num_warps": 4, "num_stages": 3,
    }  # fmt: skip
    grid = groups * tiles, -(-product.N // TOKENS_PER_PROGRAM)
    return CachedLaunch(decode_kernel, grid, (*product, tiles), {**constants, **options})


def _plan(x_NI: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, y_NO: Tensor) -> DecodePlan:
    strides = x_NI.stride(0), x_NI.stride(1), y_NO.stride(0)
    shape = DecodeShape(
        x_NI.shape[0], x_NI.shape[1], y_NO.shape[1], right_cdbs.shape, left_bcsa.shape, strides, x_NI.dtype,
        bias is not None, supports_early_launch(x_NI.device),
    )  # fmt: skip
    return decode_plan(shape)


def decode_btt(x_NI: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, y_NO: Tensor) -> None:
    """Write y_NO, whose rows are contiguous, in two launches."""
    plan = _plan(x_NI, right_cdbs, left_bcsa, bias, y_NO)
    z_NK = x_NI.new_empty(x_NI.shape[0], plan.z)
    plan.first(x_NI, right_cdbs, z_NK, z_NK)
    plan.second(z_NK, left_bcsa, y_NO if bias is None else bias, y_NO)


def bind_decode(
    x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int
) -> Callable[..., Tensor]:
    """Return a function of x (.., in), right, left, bias and out that returns y (.., out) as `decode_btt` writes it,
    for tensors with the shapes, strides, dtypes and device of these. The rows of x must lie at one distance."""
    x_NI, y_size = x.view(-1, x.shape[-1]), (*x.shape[:-1], out)
    N, y_NO = x_NI.shape[0], x_NI.new_empty(x_NI.shape[0], out)
    plan = _plan(x_NI, right_cdbs, left_bcsa, bias, y_NO)
    z_size = N, plan.z
    first, second = (
        plan.first.bind(x, right_cdbs, x, x),
        plan.second.bind(x, left_bcsa, y_NO if bias is None else bias, y_NO),
    )

    def run(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, _: int) -> Tensor:
        z_NK, y = x.new_empty(z_size), x.new_empty(y_size)
        first(x, right_cdbs, z_NK, z_NK)
        second(z_NK, left_bcsa, y if bias is None else bias, y)
        return y

    return run
