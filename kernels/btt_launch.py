"""Launching btt_kernels.py: which tiles, how many programs, where z lies.

A core is seen from the side of the tokens that it meets, as groups of matrices (inner, rows):

    right (c, d, b, s)   groups c, inner d, rows j = (b, s)        meets x
    left (b, c, s, a)    groups b, inner a, rows k = (c, s)        meets y
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from surgery.kernels import btt_kernels as kernels


class Side(NamedTuple):
    core: Tensor
    groups: int
    inner: int
    rows: int
    step_group: int
    step_inner: int
    step_row: int


def right_side(right_cdbs: Tensor) -> Side:
    c, d, b, s = right_cdbs.shape
    return Side(right_cdbs, c, d, b * s, d * b * s, b * s, 1)


def left_side(left_bcsa: Tensor) -> Side:
    b, c, s, a = left_bcsa.shape
    return Side(left_bcsa, b, a, c * s, c * s * a, 1, a)


class Tiles(NamedTuple):
    """BN tokens at a time; `near` and `far`: (inner, rows) tiles of the core of the first and the second product."""

    BN: int
    near: tuple[int, int]
    far: tuple[int, int]
    count: int  # token tiles of a program
    lag: int
    ring: int
    warps: int
    stages: int


# Bytes of z, of one slab and between the first and the second product: the ring stays in the cache. Programs of so many
# bytes of x and z are long enough, and so many of them far enough behind. One H200, 2026-11-21.
SLAB, BEHIND, PROGRAM, AFTER = 2**22, 2**24, 2**15, 1500


def pow2(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def cdiv(n: int, m: int) -> int:
    """triton.cdiv, and its next_power_of_2, take longer than a launch when called from outside of a kernel."""
    return -(-n // m)


def tiles_for(N: int, near: Side, far: Side) -> Tiles:
    size = near.core.element_size()
    widest = 64 if size == 4 else 128
    inner = [pow2(side.inner) if side.inner <= widest else 64 for side in (near, far)]
    BN, near_rows = min(64, pow2(N)), min(widest, pow2(near.rows))
    z = BN * near.groups * near.rows * size
    count = max(1, min(8, PROGRAM // (BN * (min(near.inner, 128) + near_rows) * size), SLAB // z))
    programs = near.groups * cdiv(near.rows, near_rows) + far.groups * cdiv(far.inner, inner[1])
    lag = max(2, min(AFTER // programs, BEHIND // (count * z), cdiv(N, BN * count)))
    warps, stages = (8, 2) if size == 4 else (4, 3)
    return Tiles(BN, (inner[0], near_rows), (inner[1], 64), count, lag, lag + max(2, lag * 2 // 3), warps, stages)


def precision(x: Tensor) -> str:
    """float32 inputs are multiplied to float32's accuracy."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def even(x: Tensor, side: Side, tile: tuple[int, int]) -> bool:
    """Whether only tokens need a mask."""
    whole = side.inner % tile[0] == 0 and side.rows % tile[1] == 0
    return whole and x.shape[1] == side.groups * side.inner


def room_for_z(x: Tensor, side: Side, tiles: int, BN: int) -> Tensor:
    return x.new_empty(tiles * side.groups * side.rows * BN)


_flags: dict[tuple[torch.device, int], Tensor] = {}


def zeros(count: int, device: torch.device) -> Tensor:
    """Flags that a launch leaves as it finds them, so launches in one stream share them; in a graph, which may be
    replayed beside anything, they are its own."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    flags = _flags.get(key)
    if flags is None or len(flags) < count:
        flags = _flags[key] = torch.zeros(max(count, 2**14), dtype=torch.int32, device=device)
    return flags


def ring(x_NI: Tensor, near: Side, far: Side, rank: int, bias: Tensor | None, y_NO: Tensor, t: Tiles) -> None:
    """Both products, one launch."""
    (N, in_), (BD, BJ), (BA, BK) = x_NI.shape, t.near, t.far
    tiles_j, tiles_a, slabs = cdiv(near.rows, BJ), cdiv(far.inner, BA), cdiv(N, t.BN * t.count)
    z = room_for_z(x_NI, near, min(t.ring, slabs) * t.count, t.BN)
    kernels.ring_kernel[((slabs + t.lag) * (near.groups * tiles_j + far.groups * tiles_a),)](
        x_NI, near.core, far.core, z if bias is None else bias, y_NO, z, zeros(2 * slabs, x_NI.device),
        N, in_, y_NO.shape[1], near.inner, far.inner, rank, near.rows, far.rows, near.groups, far.groups,
        *x_NI.stride(), near.step_group, near.step_inner, near.step_row, far.step_group, far.step_row, far.step_inner,
        *y_NO.stride(), tiles_j, tiles_a, slabs, t.lag, t.ring, t.count,
        BN=t.BN, BJ=BJ, BD=BD, BK=BK, BA=BA, D_ONCE=near.inner <= BD, K_ONCE=far.rows <= BK,
        EVEN_1=even(x_NI, near, t.near), EVEN_2=even(y_NO, far, t.far), BIAS=bias is not None,
        PRECISION=precision(x_NI), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


class Pair(NamedTuple):
    """Tiles of a core's gradient; parts of the tokens are summed apart where the core has too few tiles."""

    BK: int
    BA: int
    parts: int
    tiles: int  # of tokens, in a part


PROGRAMS = 128


def pair_for(side: Side, every: int) -> tuple[Pair, int]:
    """And how many programs."""
    BK, BA = min(64 if side.core.element_size() == 4 else 128, pow2(side.rows)), min(64, pow2(side.inner))
    programs = side.groups * cdiv(side.rows, BK) * cdiv(side.inner, BA)
    if programs < PROGRAMS and BA == 64:
        BA, programs = 32, side.groups * cdiv(side.rows, BK) * cdiv(side.inner, 32)
    tiles = cdiv(every, max(1, min(PROGRAMS // programs, every // 4)))
    parts = cdiv(every, tiles)
    return Pair(BK, BA, parts, tiles), programs * parts


def gradients(
    x_NI: Tensor, right: Tensor, left: Tensor, dy_NO: Tensor, dx_NI: Tensor | None, exact: bool
) -> tuple[Tensor, Tensor]:
    """Those of right and left, in float32 if `exact`, and dx where it has room: two launches."""
    of_x, of_y, (N, in_), out, rank = right_side(right), left_side(left), x_NI.shape, dy_NO.shape[1], right.shape[3]
    t, back = tiles_for(N, of_x, of_y), tiles_for(N, of_y, of_x)
    (BD, BJ), (BA, BK), BN, every = t.near, back.near, t.BN, cdiv(N, t.BN)
    slabs = cdiv(every, t.count)
    common = {
        "BN": BN, "PRECISION": precision(x_NI), "num_warps": t.warps, "num_stages": t.stages,
    }  # fmt: skip
    z, dz = room_for_z(x_NI, of_x, every, BN), room_for_z(x_NI, of_x, every, BN)
    sizes = N, in_, out, of_x.inner, of_y.inner, rank, of_x.groups, of_y.groups, *x_NI.stride(), *dy_NO.stride()
    kernels.spreads_kernel[(slabs * (of_x.groups * cdiv(of_x.rows, BJ) + of_y.groups * cdiv(of_y.rows, BK)),)](
        x_NI, right, z, dy_NO, left, dz, *sizes, slabs, t.count, BJ=BJ, BD=BD, BK=BK, BA=BA,
        D_ONCE=of_x.inner <= BD, A_ONCE=of_y.inner <= BA, EVEN_1=even(x_NI, of_x, t.near),
        EVEN_2=even(dy_NO, of_y, back.near), **common,
    )  # fmt: skip
    (pl, left_programs), (pr, right_programs) = pair_for(of_y, every), pair_for(of_x, every)
    dleft, dright = (
        torch.empty(
            p.parts, *core.shape, dtype=torch.float32 if exact or p.parts > 1 else core.dtype, device=core.device
        )
        for p, core in ((pl, left), (pr, right))
    )
    BX, BR = min(64, back.far[0]), back.far[1]
    gathers = 0 if dx_NI is None else slabs * of_x.groups * cdiv(of_x.inner, BX)
    dx = x_NI if dx_NI is None else dx_NI
    kernels.rest_kernel[(left_programs + right_programs + gathers,)](
        z, dy_NO, dz, x_NI, right, dleft, dright, dx, *sizes, *dx.stride(), slabs, t.count,
        pl.parts, pl.tiles, pr.parts, pr.tiles, BKL=pl.BK, BAL=pl.BA, BKR=pr.BK, BAR=pr.BA, BJ=BR, BD=BX,
        J_ONCE=of_x.rows <= BR, EVEN_L=even(dy_NO, of_y, (pl.BA, pl.BK)), EVEN_R=even(x_NI, of_x, (pr.BA, pr.BK)),
        EVEN_X=even(dx, of_x, (BX, BR)), **common,
    )  # fmt: skip
    return tuple(g[0] if len(g) == 1 else g.sum(0) for g in (dright, dleft))  # type: ignore[return-value]
