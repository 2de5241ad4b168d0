"""Launching kernels/btt/kernels.py. A plan, which tiles and how many programs, follows from sizes alone and is kept.

A core is seen from the side of the tokens that it meets, as groups of matrices (inner, rows):

    right (c, d, b, s)   groups c, inner d, rows j = (b, s)        meets x
    left (b, c, s, a)    groups b, inner a, rows k = (c, s)        meets y
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgery.kernels.btt import kernels
from surgery.kernels.launch import CachedLaunch


class CoreSide(NamedTuple):
    groups: int
    inner: int
    rows: int
    step_group: int
    step_inner: int
    step_row: int


def core_sides(right_shape: torch.Size, left_shape: torch.Size) -> tuple[CoreSide, CoreSide]:
    (c, d, b, s), a = right_shape, left_shape[3]
    return CoreSide(c, d, b * s, d * b * s, b * s, 1), CoreSide(b, a, c * s, c * s * a, 1, a)


class BTTTiles(NamedTuple):
    """BN tokens at a time; `near` and `far`: (inner, rows) tiles of the core of the first and the second product."""

    BN: int
    near: tuple[int, int]
    far: tuple[int, int]
    count: int  # type: ignore[assignment]  # token tiles of a program
    lag: int
    ring: int
    warps: int
    stages: int


# Bytes of z, of one slab and between the first and the second product: the ring stays in the cache. Programs of so many
# bytes of x and z are long enough, and so many of them far enough behind. One H200, bf16, 2026-11-21.
SLAB_BYTES, LAG_BYTES, PROGRAM_BYTES, LAG_PROGRAMS = 2**22, 2**24, 2**15, 1300

MOST_TOKENS = 64  # of a tile


def pow2(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def cdiv(n: int, m: int) -> int:
    """triton.cdiv, and its next_power_of_2, take longer than a launch when called from outside of a kernel."""
    return -(-n // m)


def choose_tiles(N: int, near: CoreSide, far: CoreSide, size: int) -> BTTTiles:
    """For numbers of `size` bytes."""
    widest = 64 if size == 4 else 128
    inner = [pow2(side.inner) if side.inner <= widest else 64 for side in (near, far)]
    if far.rows > 64:  # z's terms in steps: no room for wide ones
        inner[1] = min(inner[1], 64)
    BN, near_rows = min(MOST_TOKENS, pow2(N)), min(widest, pow2(near.rows))
    z = BN * near.groups * near.rows * size
    count = max(1, min(8, max(2, PROGRAM_BYTES // (BN * (min(near.inner, 128) + near_rows) * size)), SLAB_BYTES // z))
    if any((side.rows if side.step_row == 1 else side.inner) % 16 for side in (near, far)):
        # Lines of a core that do not begin at a multiple of 32 bytes are read number by number: so less often.
        count = max(4, count)
    programs = near.groups * cdiv(near.rows, near_rows) + far.groups * cdiv(far.inner, inner[1])
    lag = max(2, min(LAG_PROGRAMS // programs, LAG_BYTES // (count * z), cdiv(N, BN * count)))
    warps, stages = (8, 2) if size == 4 else (4, 3)
    ring = lag + max(min(lag, 4), lag * 2 // 3)
    return BTTTiles(BN, (inner[0], near_rows), (inner[1], 64), count, lag, ring, warps, stages)


def divides_evenly(width: int, side: CoreSide, tile: tuple[int, int]) -> bool:
    """Whether only tokens need a mask."""
    return side.inner % tile[0] == 0 and side.rows % tile[1] == 0 and width == side.groups * side.inner


def common_options(t: BTTTiles, size: int) -> dict[str, Any]:
    """float32 inputs are multiplied to float32's accuracy."""
    precision = "tf32x3" if size == 4 else "tf32"
    return {"BN": t.BN, "PRECISION": precision, "num_warps": t.warps, "num_stages": t.stages}


_flags: dict[tuple[torch.device, int], Tensor] = {}


def zero_flags(count: int, device: torch.device) -> Tensor:
    """Flags that a launch leaves as it finds them, so launches in one stream share them; in a graph, which may be
    replayed beside anything, they are its own."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    flags = _flags.get(key)
    if flags is None or flags.numel() < count:
        flags = _flags[key] = torch.zeros(max(count, 2**14), dtype=torch.int32, device=device)
    return flags


class RingPlan(NamedTuple):
    launch: CachedLaunch
    z: int  # numbers
    flags: int


Strides = tuple[int, ...]


@lru_cache(maxsize=4096)
def ring_plan(
    N: int, in_: int, out: int, near: CoreSide, far: CoreSide, rank: int, size: int, bias: bool, strides: Strides,
    t: BTTTiles | None = None,
) -> RingPlan:  # fmt: skip
    t = t or choose_tiles(N, near, far, size)
    (BD, BJ), (BA, BK) = t.near, t.far
    tiles_j, tiles_a, slabs = cdiv(near.rows, BJ), cdiv(far.inner, BA), cdiv(N, t.BN * t.count)
    sizes = (
        *strides, N, in_, out, near.inner, far.inner, rank, near.rows, far.rows, near.groups, far.groups,
        near.step_group, near.step_inner, near.step_row, far.step_group, far.step_row, far.step_inner,
        tiles_j, tiles_a, slabs, t.lag, t.ring, t.count,
    )  # fmt: skip
    options = {
        "BJ": BJ, "BD": BD, "BK": BK, "BA": BA, "D_ONCE": near.inner <= BD, "K_ONCE": far.rows <= BK, "BIAS": bias,
        "EVEN_1": divides_evenly(in_, near, t.near), "EVEN_2": divides_evenly(out, far, t.far), **common_options(t, size),
    }  # fmt: skip
    grid = ((slabs + t.lag) * (near.groups * tiles_j + far.groups * tiles_a),)
    z = min(t.ring, slabs) * t.count * near.groups * near.rows * t.BN
    return RingPlan(CachedLaunch(kernels.ring_kernel, grid, sizes, options), z, 2 * slabs)


def launch_ring(
    x_NI: Tensor,
    core: Tensor,
    far_core: Tensor,
    near: CoreSide,
    far: CoreSide,
    rank: int,
    bias: Tensor | None,
    y_NO: Tensor,
    t: BTTTiles | None = None,
) -> None:
    """Both products, one launch."""
    (N, in_), out = x_NI.shape, y_NO.shape[1]
    strides = *x_NI.stride(), *y_NO.stride()
    plan = ring_plan(N, in_, out, near, far, rank, x_NI.element_size(), bias is not None, strides, t)
    z = x_NI.new_empty(plan.z)
    plan.launch(x_NI, core, far_core, z if bias is None else bias, y_NO, z, zero_flags(plan.flags, x_NI.device))


class CoreGradientTiles(NamedTuple):
    """Tiles of a core's gradient; parts of the tokens are summed apart where the core has too few tiles."""

    BK: int
    BA: int
    parts: int
    tiles: int  # of tokens, in a part
    programs: int


MIN_PROGRAMS = 128


def core_gradient_tiles(side: CoreSide, every: int, size: int) -> CoreGradientTiles:
    BK, BA = min(64 if size == 4 else 128, pow2(side.rows)), min(64, pow2(side.inner))
    programs = side.groups * cdiv(side.rows, BK) * cdiv(side.inner, BA)
    if programs < MIN_PROGRAMS and BA == 64:
        BA, programs = 32, side.groups * cdiv(side.rows, BK) * cdiv(side.inner, 32)
    tiles = cdiv(every, max(1, min(MIN_PROGRAMS // programs, every // 4)))
    return CoreGradientTiles(BK, BA, cdiv(every, tiles), tiles, programs * cdiv(every, tiles))


class GradientPlan(NamedTuple):
    z: int  # numbers, also of dz
    parts: tuple[int, int]  # of dright, of dleft
    spreads: CachedLaunch
    rest: CachedLaunch


@lru_cache(maxsize=4096)
def gradient_plan(
    N: int, in_: int, out: int, of_x: CoreSide, of_y: CoreSide, rank: int, size: int, strides: Strides, dx: Strides | None,
    t: BTTTiles | None = None,
) -> GradientPlan:  # fmt: skip
    t, back = t or choose_tiles(N, of_x, of_y, size), choose_tiles(N, of_y, of_x, size)
    (BD, BJ), (BA, BK), every, count = t.near, back.near, cdiv(N, t.BN), max(4, t.count)
    slabs, BX, BR = cdiv(every, count), min(64, back.far[0]), back.far[1]
    pl, pr = core_gradient_tiles(of_y, every, size), core_gradient_tiles(of_x, every, size)
    gathers = slabs * of_x.groups * cdiv(of_x.inner, BX) if dx is not None else 0
    sizes = N, in_, out, of_x.inner, of_y.inner, rank, of_x.groups, of_y.groups, slabs, count
    spread_options = {
        "BJ": BJ, "BD": BD, "BK": BK, "BA": BA, "D_ONCE": of_x.inner <= BD, "A_ONCE": of_y.inner <= BA,
        "EVEN_1": divides_evenly(in_, of_x, t.near), "EVEN_2": divides_evenly(out, of_y, back.near), **common_options(t, size),
    }  # fmt: skip
    rest_options = {
        "BKL": pl.BK, "BAL": pl.BA, "BKR": pr.BK, "BAR": pr.BA, "BJ": BR, "BD": BX, "J_ONCE": of_x.rows <= BR,
        "EVEN_L": divides_evenly(out, of_y, (pl.BA, pl.BK)), "EVEN_R": divides_evenly(in_, of_x, (pr.BA, pr.BK)),
        "EVEN_X": divides_evenly(in_, of_x, (BX, BR)), **common_options(t, size),
    }  # fmt: skip
    spreads = slabs * (of_x.groups * cdiv(of_x.rows, BJ) + of_y.groups * cdiv(of_y.rows, BK))
    rest_grid = (pl.programs + pr.programs + gathers,)
    rest_sizes = (*strides, *(dx or strides[:2]), *sizes, pl.parts, pl.tiles, pr.parts, pr.tiles)
    return GradientPlan(
        every * t.BN * of_x.groups * of_x.rows, (pr.parts, pl.parts),
        CachedLaunch(kernels.spreads_kernel, (spreads,), (*strides, *sizes), spread_options),
        CachedLaunch(kernels.gradients_kernel, rest_grid, rest_sizes, rest_options),
    )  # fmt: skip


def launch_gradients(
    x_NI: Tensor,
    right: Tensor,
    left: Tensor,
    dy_NO: Tensor,
    dx_NI: Tensor | None,
    exact: bool,
    t: BTTTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Those of right and left, in float32 if `exact`, and dx where it has room: two launches."""
    of_x, of_y = core_sides(right.shape, left.shape)
    (N, in_), out, size = x_NI.shape, dy_NO.shape[1], x_NI.element_size()
    strides, of_dx = (*x_NI.stride(), *dy_NO.stride()), None if dx_NI is None else dx_NI.stride()
    plan = gradient_plan(N, in_, out, of_x, of_y, right.shape[3], size, strides, of_dx, t)
    z, dz = x_NI.new_empty(plan.z), x_NI.new_empty(plan.z)
    plan.spreads(x_NI, right, z, dy_NO, left, dz)
    dright, dleft = (
        core.new_empty((parts, *core.shape), dtype=torch.float32 if exact or parts > 1 else core.dtype)
        for core, parts in zip((right, left), plan.parts)
    )
    plan.rest(z, dy_NO, dz, x_NI, right, dleft, dright, x_NI if dx_NI is None else dx_NI)
    dright, dleft = (g[0] if parts == 1 else g.sum(0) for g, parts in zip((dright, dleft), plan.parts))
    return dright, dleft
