"""A few vectors times a matrix, or times a block-diagonal one: reading the matrix takes nearly all of the time.

    out[n, g, r] = sum_d x[n, g, d] core[g, d, r] + bias

Every program reads its rows of the matrix at once into registers, so that many bytes are in flight, and adds up
products in float32. In a pair of launches (FIRST, SECOND) each kernel starts while the one before it runs (programmatic
dependent launch, on Hopper and later). The second kernel loads its rows and then waits for the first one's output. The
first one waits for all work before it, and reads nothing and lets nothing else start until then, so weights that were
just written are safe.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

HAS_GDC = tl.constexpr(hasattr(cuda, "gdc_wait"))  # programmatic dependent launch


@cache
def supports_early_launch(device: torch.device) -> bool:
    """Return whether the device and Triton support programmatic dependent launch."""
    return HAS_GDC.value and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def load_rows(core, r, d, R, D, c_r, c_d):
    """Return elements (BR, BD) of a matrix of R rows and D columns, in float32."""
    inside = (r < R)[:, None] & (d < D)[None, :]
    return tl.load(core + r[:, None] * c_r + d[None, :] * c_d, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def multiply_rows(c_rd, x, core, r, d, R, D, inputs, x_i, c_r, c_d, BD: tl.constexpr):
    """Return rows r of a matrix times the vector x. c_rd: their first BD columns. inputs: elements of x that are there;
    others are 0.
    """
    x_d = tl.load(x + d * x_i, mask=(d < D) & (d < inputs), other=0.0).to(tl.float32)
    out_r = tl.sum(c_rd * x_d[None, :], 1)
    for first in range(BD, D, BD):
        at = first + d
        x_d = tl.load(x + at * x_i, mask=(at < D) & (at < inputs), other=0.0).to(tl.float32)
        out_r += tl.sum(load_rows(core, r, at, R, D, c_r, c_d) * x_d[None, :], 1)
    return out_r


@triton.jit(do_not_specialize=["N"])
def matvec_kernel(
    x, core, bias, out, N, IN, D, R, S, OUT, x_n, x_i, c_g, c_d, c_r, o_n, o_g, o_s, tiles,
    BD: tl.constexpr, BR: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Compute out[n, g, r] = sum_d x[n, g, d] core[g, d, r] + bias. Grid: (groups * tiles,).

    r = (i, s), which lies in row n of out at g o_g + i o_s + s; rows have OUT elements, those of x IN. FIRST, SECOND:
    the place of the launch in a pair with an early start.
    """
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    r, d = tile * BR + tl.arange(0, BR), tl.arange(0, BD)
    core += group * c_g
    if FIRST:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    c_rd = load_rows(core, r, d, R, D, c_r, c_d)
    if SECOND:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    o = group * o_g + r // S * o_s + r % S
    inside_r = (r < R) & (o < OUT)
    for n in range(N):
        row = x + n * x_n + group * D * x_i
        out_r = multiply_rows(c_rd, row, core, r, d, R, D, IN - group * D, x_i, c_r, c_d, BD)
        if BIAS:
            out_r += tl.load(bias + o, mask=inside_r, other=0.0).to(tl.float32)
        tl.store(out + n * o_n + o, out_r.to(out.dtype.element_ty), mask=inside_r)


@triton.jit(do_not_specialize=["N"])
def grouped_matvec_kernel(
    x, core_0, core_1, core_2, bias_0, bias_1, bias_2, out_0, out_1, out_2, N, x_n, x_i,
    D_0, D_1, D_2, R_0, R_1, R_2, x_0, x_1, x_2, o_0, o_1, o_2, o_n0, o_n1, o_n2, tile_1, tile_2,
    BD: tl.constexpr, BR: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Multiply up to three matrices (R_m, D_m) with parts of the same rows: out_m[n, o_m + r] = sum_d x[n, x_m + d]
    core_m[r, d] + bias_m[r].

    Grid: (tiles of all matrices,); those of matrix 1 begin at tile_1, those of matrix 2 at tile_2. Matrices are
    contiguous.
    """
    tile = tl.program_id(0)
    core, bias, out, D, R, x_at, o_at, o_n = core_0, bias_0, out_0, D_0, R_0, x_0, o_0, o_n0
    if tile >= tile_2:
        core, bias, out, D, R, x_at, o_at, o_n = core_2, bias_2, out_2, D_2, R_2, x_2, o_2, o_n2
        tile -= tile_2
    elif tile >= tile_1:
        core, bias, out, D, R, x_at, o_at, o_n = core_1, bias_1, out_1, D_1, R_1, x_1, o_1, o_n1
        tile -= tile_1
    r, d = tile * BR + tl.arange(0, BR), tl.arange(0, BD)
    if FIRST:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    c_rd = load_rows(core, r, d, R, D, D, 1)
    if SECOND:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    for n in range(N):
        out_r = multiply_rows(c_rd, x + n * x_n + x_at * x_i, core, r, d, R, D, D, x_i, D, 1, BD)
        if BIAS:
            out_r += tl.load(bias + r, mask=r < R, other=0.0).to(tl.float32)
        tl.store(out + n * o_n + o_at + r, out_r.to(out.dtype.element_ty), mask=r < R)
