"""Plans and launches of kernels/btt/kernels.py. A plan (tiles, grid, buffers) follows from sizes alone and is cached.

A core is seen from the side of the tokens that it multiplies, as groups of matrices (inner, rows):

    right (c, d, b, s)   groups c, inner d, rows j = (b, s)        multiplies x
    left (b, c, s, a)    groups b, inner a, rows k = (c, s)        multiplies dy, and its transpose gives y
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgery.kernels.btt import kernels
from surgery.kernels.launch import CachedLaunch

Strides = tuple[int, ...]


class CoreSide(NamedTuple):
    """A core as `groups` matrices (inner, rows), and the strides of its groups, inner dimension and rows."""

    groups: int
    inner: int
    rows: int
    step_group: int
    step_inner: int
    step_row: int


class CoreSides(NamedTuple):
    """The core of the first product, that of the second one, and the rank s."""

    near: CoreSide
    far: CoreSide
    rank: int

    def transposed(self) -> CoreSides:
        """Return the sides of the transposed map, which exchanges the cores."""
        return CoreSides(self.far, self.near, self.rank)


def core_sides(right_shape: torch.Size, left_shape: torch.Size) -> CoreSides:
    """Return both cores, contiguous ones of these shapes."""
    (c, d, b, s), a = right_shape, left_shape[3]
    return CoreSides(CoreSide(c, d, b * s, d * b * s, b * s, 1), CoreSide(b, a, c * s, c * s * a, 1, a), s)


@dataclass(frozen=True)
class BTTTiles:
    """Tiles of the two products.

    BN: tokens of a tile. near, far: (inner, rows) tiles of the core of the first and of the second product. count:
    token tiles of a slab. lag, ring: slabs between the products, and of the ring buffer.
    """

    BN: int
    near: tuple[int, int]
    far: tuple[int, int]
    count: int
    lag: int
    ring: int
    warps: int
    stages: int


# Bytes of z in one slab, and between the first and the second product, with which the ring stays in the L2 cache; bytes
# of x and z that make a program long enough; programs that make the second product late enough. Measured on one H200,
# bfloat16, 2026-11-21.
SLAB_BYTES, LAG_BYTES, PROGRAM_BYTES, LAG_PROGRAMS = 2**22, 2**24, 2**15, 1300

MAX_TILE_TOKENS = 64


def pow2(n: int) -> int:
    """Return the power of two that holds n, 16 or more: a side that a matrix product takes."""
    return max(16, 1 << (n - 1).bit_length())


def cdiv(n: int, m: int) -> int:
    """Return n / m, rounded up.

    Called from the host, triton.cdiv and triton.next_power_of_2 take longer than a launch.
    """
    return -(-n // m)


def choose_tiles(tokens: int, near: CoreSide, far: CoreSide, itemsize: int) -> BTTTiles:
    """Return the tiles for elements of `itemsize` bytes."""
    widest = 64 if itemsize == 4 else 128
    inner = [pow2(side.inner) if side.inner <= widest else 64 for side in (near, far)]
    if far.rows > 64:  # z is read in steps, which leave no room for wide tiles of the core
        inner[1] = min(inner[1], 64)
    BN, near_rows = min(MAX_TILE_TOKENS, pow2(tokens)), min(widest, pow2(near.rows))
    z = BN * near.groups * near.rows * itemsize
    count = max(
        1, min(8, max(2, PROGRAM_BYTES // (BN * (min(near.inner, 128) + near_rows) * itemsize)), SLAB_BYTES // z)
    )
    if any((side.rows if side.step_row == 1 else side.inner) % 16 for side in (near, far)):
        # Lines of a core that do not begin at a multiple of 32 bytes are loaded one element at a time: load them less
        # often.
        count = max(4, count)
    programs = near.groups * cdiv(near.rows, near_rows) + far.groups * cdiv(far.inner, inner[1])
    lag = max(2, min(LAG_PROGRAMS // programs, LAG_BYTES // (count * z), cdiv(tokens, BN * count)))
    warps, stages = (8, 2) if itemsize == 4 else (4, 3)
    ring = lag + max(min(lag, 4), lag * 2 // 3)
    return BTTTiles(BN, (inner[0], near_rows), (inner[1], 64), count, lag, ring, warps, stages)


def divides_evenly(width: int, side: CoreSide, tile: tuple[int, int]) -> bool:
    """Return whether tiles cover the core and the `width` columns of x or y exactly, so that only tokens need masks."""
    return side.inner % tile[0] == 0 and side.rows % tile[1] == 0 and width == side.groups * side.inner


def common_options(t: BTTTiles, itemsize: int) -> dict[str, Any]:
    """Return the options that all kernels share; float32 is multiplied to float32's accuracy."""
    precision = "tf32x3" if itemsize == 4 else "tf32"
    return {"BN": t.BN, "PRECISION": precision, "num_warps": t.warps, "num_stages": t.stages}


_flags: dict[tuple[torch.device, int], Tensor] = {}


def zero_flags(count: int, device: torch.device) -> Tensor:
    """Return `count` zeros (int32).

    A launch leaves its flags zero, so that all launches of a stream share them. A CUDA graph gets flags of its own,
    because it may be replayed on any stream.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    flags = _flags.get(key)
    if flags is None or flags.numel() < count:
        flags = _flags[key] = torch.zeros(max(count, 2**14), dtype=torch.int32, device=device)
    return flags


class RingShape(NamedTuple):
    """What a ring plan depends on. strides: of x and of y. bias: whether there is one."""

    tokens: int
    inputs: int
    outputs: int
    sides: CoreSides
    itemsize: int
    strides: Strides
    bias: bool


@dataclass(frozen=True)
class RingPlan:
    """Launch of `ring_kernel`, the elements of its buffer z, and its number of flags."""

    launch: CachedLaunch
    z: int
    flags: int


@lru_cache(maxsize=4096)
def ring_plan(shape: RingShape, tiles: BTTTiles | None = None) -> RingPlan:
    """Return the plan of both products. tiles: None for `choose_tiles`."""
    (near, far, rank), N = shape.sides, shape.tokens
    t = tiles or choose_tiles(N, near, far, shape.itemsize)
    (BD, BJ), (BA, BK) = t.near, t.far
    tiles_j, tiles_a, slabs = cdiv(near.rows, BJ), cdiv(far.inner, BA), cdiv(N, t.BN * t.count)
    sizes = (
        *shape.strides, N, shape.inputs, shape.outputs, near.inner, far.inner, rank, near.rows, far.rows, near.groups, far.groups,
        near.step_group, near.step_inner, near.step_row, far.step_group, far.step_row, far.step_inner,
        tiles_j, tiles_a, slabs, t.lag, t.ring, t.count,
    )  # fmt: skip
    options = {
        "BJ": BJ, "BD": BD, "BK": BK, "BA": BA, "D_ONCE": near.inner <= BD, "K_ONCE": far.rows <= BK, "BIAS": shape.bias,
        "EVEN_1": divides_evenly(shape.inputs, near, t.near), "EVEN_2": divides_evenly(shape.outputs, far, t.far),
        **common_options(t, shape.itemsize),
    }  # fmt: skip
    grid = ((slabs + t.lag) * (near.groups * tiles_j + far.groups * tiles_a),)
    z = min(t.ring, slabs) * t.count * near.groups * near.rows * t.BN
    return RingPlan(CachedLaunch(kernels.ring_kernel, grid, sizes, options), z, 2 * slabs)


def launch_ring(
    x_NI: Tensor,
    near_core: Tensor,
    far_core: Tensor,
    bias: Tensor | None,
    y_NO: Tensor,
    sides: CoreSides,
    *,
    tiles: BTTTiles | None = None,
) -> None:
    """Compute y_NO, both products in one launch. near_core multiplies x, far_core the result."""
    (N, in_), out = x_NI.shape, y_NO.shape[1]
    strides = *x_NI.stride(), *y_NO.stride()
    plan = ring_plan(RingShape(N, in_, out, sides, x_NI.element_size(), strides, bias is not None), tiles)
    z = x_NI.new_empty(plan.z)
    plan.launch(x_NI, near_core, far_core, z if bias is None else bias, y_NO, z, zero_flags(plan.flags, x_NI.device))


class CoreGradientTiles(NamedTuple):
    """Tiles (BK, BA) of a core's gradient. parts: partial sums over tokens, more than one where the core has few tiles;
    tiles: token tiles of a part."""

    BK: int
    BA: int
    parts: int
    tiles: int
    programs: int


MIN_PROGRAMS = 128


def core_gradient_tiles(side: CoreSide, every: int, itemsize: int) -> CoreGradientTiles:
    """Return the tiles of a core's gradient, summed over `every` token tiles."""
    BK, BA = min(64 if itemsize == 4 else 128, pow2(side.rows)), min(64, pow2(side.inner))
    programs = side.groups * cdiv(side.rows, BK) * cdiv(side.inner, BA)
    if programs < MIN_PROGRAMS and BA == 64:
        BA, programs = 32, side.groups * cdiv(side.rows, BK) * cdiv(side.inner, 32)
    tiles = cdiv(every, max(1, min(MIN_PROGRAMS // programs, every // 4)))
    return CoreGradientTiles(BK, BA, cdiv(every, tiles), tiles, programs * cdiv(every, tiles))


class GradientShape(NamedTuple):
    """What a gradient plan depends on. strides: of x and of dy. dx_strides: of dx, None where it is not computed."""

    tokens: int
    inputs: int
    outputs: int
    sides: CoreSides
    itemsize: int
    strides: Strides
    dx_strides: Strides | None


@dataclass(frozen=True)
class GradientPlan:
    """Launches of `first_products_kernel` and `gradients_kernel`, the elements of z and of dz, and the parts of dright
    and of dleft.
    """

    z: int
    parts: tuple[int, int]
    first_products: CachedLaunch
    gradients: CachedLaunch


@lru_cache(maxsize=4096)
def gradient_plan(shape: GradientShape, tiles: BTTTiles | None = None) -> GradientPlan:
    """Return the plan of the backward pass. tiles: None for `choose_tiles`."""
    (of_x, of_y, rank), N, size = shape.sides, shape.tokens, shape.itemsize
    in_, out, dx, strides = shape.inputs, shape.outputs, shape.dx_strides, shape.strides
    t, back = tiles or choose_tiles(N, of_x, of_y, size), choose_tiles(N, of_y, of_x, size)
    (BD, BJ), (BA, BK), every, count = t.near, back.near, cdiv(N, t.BN), max(4, t.count)
    slabs, BX, BR = cdiv(every, count), min(64, back.far[0]), back.far[1]
    pl, pr = core_gradient_tiles(of_y, every, size), core_gradient_tiles(of_x, every, size)
    dx_programs = slabs * of_x.groups * cdiv(of_x.inner, BX) if dx is not None else 0
    sizes = N, in_, out, of_x.inner, of_y.inner, rank, of_x.groups, of_y.groups, slabs, count
    first_options = {
        "BJ": BJ, "BD": BD, "BK": BK, "BA": BA, "D_ONCE": of_x.inner <= BD, "A_ONCE": of_y.inner <= BA,
        "EVEN_1": divides_evenly(in_, of_x, t.near), "EVEN_2": divides_evenly(out, of_y, back.near), **common_options(t, size),
    }  # fmt: skip
    gradient_options = {
        "BKL": pl.BK, "BAL": pl.BA, "BKR": pr.BK, "BAR": pr.BA, "BJ": BR, "BD": BX, "J_ONCE": of_x.rows <= BR,
        "EVEN_L": divides_evenly(out, of_y, (pl.BA, pl.BK)), "EVEN_R": divides_evenly(in_, of_x, (pr.BA, pr.BK)),
        "EVEN_X": divides_evenly(in_, of_x, (BX, BR)), **common_options(t, size),
    }  # fmt: skip
    programs = slabs * (of_x.groups * cdiv(of_x.rows, BJ) + of_y.groups * cdiv(of_y.rows, BK))
    gradient_grid = (pl.programs + pr.programs + dx_programs,)
    gradient_sizes = (*strides, *(dx or strides[:2]), *sizes, pl.parts, pl.tiles, pr.parts, pr.tiles)
    return GradientPlan(
        every * t.BN * of_x.groups * of_x.rows, (pr.parts, pl.parts),
        CachedLaunch(kernels.first_products_kernel, (programs,), (*strides, *sizes), first_options),
        CachedLaunch(kernels.gradients_kernel, gradient_grid, gradient_sizes, gradient_options),
    )  # fmt: skip


def launch_gradients(
    x_NI: Tensor,
    right: Tensor,
    left: Tensor,
    dy_NO: Tensor,
    dx_NI: Tensor | None,
    *,
    exact: bool,
    tiles: BTTTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (dright, dleft), in float32 if `exact`, and write dx if it is given: two launches."""
    (N, in_), out, itemsize = x_NI.shape, dy_NO.shape[1], x_NI.element_size()
    strides, dx_strides = (*x_NI.stride(), *dy_NO.stride()), None if dx_NI is None else dx_NI.stride()
    shape = GradientShape(N, in_, out, core_sides(right.shape, left.shape), itemsize, strides, dx_strides)
    plan = gradient_plan(shape, tiles)
    z, dz = x_NI.new_empty(plan.z), x_NI.new_empty(plan.z)
    plan.first_products(x_NI, right, z, dy_NO, left, dz)
    dright, dleft = (
        core.new_empty((parts, *core.shape), dtype=torch.float32 if exact or parts > 1 else core.dtype)
        for core, parts in zip((right, left), plan.parts)
    )
    plan.gradients(z, dy_NO, dz, x_NI, right, dleft, dright, x_NI if dx_NI is None else dx_NI)
    dright, dleft = (g[0] if parts == 1 else g.sum(0) for g, parts in zip((dright, dleft), plan.parts))
    return dright, dleft
