"""Launching the kernels of btt_products.py: which tiles, how many programs, where z lies.

A core is seen from the side of the tokens that it meets, as groups of matrices (inner, rows):

    right (c, d, b, s)   groups c, inner d, rows j = (b, s)        meets x
    left (b, c, s, a)    groups b, inner a, rows k = (c, s)        meets y
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from surgery.kernels import btt_products as products


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
    flip: tuple[bool, bool] = (False, False)
    once: str = ""  # the cache's policy for x and y


# Cores' tiles: inner up to INNER is one step; z of a slab and of the ring, in bytes of the cache.
INNER, SLAB, RING = 128, 2**22, 2**25


def pow2(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def cdiv(n: int, m: int) -> int:
    """triton.cdiv, and its next_power_of_2, take longer than a launch when called from outside of a kernel."""
    return -(-n // m)


def tiles_for(N: int, near: Side, far: Side) -> Tiles:
    single = near.core.dtype == torch.float32
    inner = [pow2(side.inner) if side.inner <= (64 if single else INNER) else 64 for side in (near, far)]
    BN, near_rows = min(64 if single else 128, pow2(N)), min(64 if single else 128, pow2(near.rows))
    z = BN * near.groups * near.rows * near.core.element_size()
    count = max(1, min(2, SLAB // z))
    lag = max(2, min(4, RING // (count * z) - 2))
    warps, stages = (8, 2) if single else (4, 3) if near_rows <= 64 else (8, 3)
    return Tiles(BN, (inner[0], near_rows), (inner[1], 64), count, lag, 2 * lag, warps, stages)


def precision(x: Tensor) -> str:
    """float32 inputs are multiplied to float32's accuracy."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def even(x: Tensor, side: Side, tile: tuple[int, int]) -> bool:
    """Whether only tokens need a mask."""
    whole = side.inner % tile[0] == 0 and side.rows % tile[1] == 0
    return whole and x.shape[1] == side.groups * side.inner


def room_for_z(x: Tensor, side: Side, tiles: int, BN: int) -> Tensor:
    return torch.empty(tiles * side.groups * side.rows * BN, dtype=x.dtype, device=x.device)


def spread(x_NI: Tensor, side: Side, rank: int, t: Tiles) -> Tensor:
    """All of z."""
    N, (BD, BJ) = len(x_NI), t.near
    total, tiles_j = cdiv(N, t.BN), cdiv(side.rows, BJ)
    z = room_for_z(x_NI, side, total, t.BN)
    products.spread_kernel[(side.groups * tiles_j, cdiv(total, t.count))](
        x_NI, side.core, z, N, x_NI.shape[1], side.inner, side.rows, rank, side.groups, *x_NI.stride(),
        side.step_group, side.step_inner, side.step_row, tiles_j, t.count,
        BN=t.BN, BJ=BJ, BD=BD, D_ONCE=side.inner <= BD, EVEN=even(x_NI, side, t.near), FLIP=t.flip[0],
        PRECISION=precision(x_NI), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return z


def gather(z: Tensor, side: Side, bias: Tensor | None, y_NO: Tensor, t: Tiles) -> None:
    """From all of z."""
    N, (BA, BK) = len(y_NO), t.far
    total, tiles_a = cdiv(N, t.BN), cdiv(side.inner, BA)
    products.gather_kernel[(side.groups * tiles_a, cdiv(total, t.count))](
        z, side.core, z if bias is None else bias, y_NO, N, y_NO.shape[1], side.inner, side.rows, side.groups,
        side.step_group, side.step_row, side.step_inner, *y_NO.stride(), tiles_a, t.count,
        BN=t.BN, BK=BK, BA=BA, K_ONCE=side.rows <= BK, EVEN=even(y_NO, side, t.far), FLIP=t.flip[1],
        BIAS=bias is not None, PRECISION=precision(y_NO), num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


def ring(x_NI: Tensor, near: Side, far: Side, rank: int, bias: Tensor | None, y_NO: Tensor, t: Tiles) -> None:
    """Both products, one launch."""
    N, (BD, BJ), (BA, BK) = len(x_NI), t.near, t.far
    tiles_j, tiles_a = cdiv(near.rows, BJ), cdiv(far.inner, BA)
    slabs = cdiv(N, t.BN * t.count)
    z = room_for_z(x_NI, near, min(t.ring, slabs) * t.count, t.BN)
    flags = torch.zeros(2 * slabs, dtype=torch.int32, device=x_NI.device)
    products.ring_kernel[((slabs + t.lag) * (near.groups * tiles_j + far.groups * tiles_a),)](
        x_NI, near.core, far.core, z if bias is None else bias, y_NO, z, flags, N, x_NI.shape[1], y_NO.shape[1],
        near.inner, far.inner, rank, near.rows, far.rows, near.groups, far.groups, *x_NI.stride(),
        near.step_group, near.step_inner, near.step_row, far.step_group, far.step_row, far.step_inner,
        *y_NO.stride(), tiles_j, tiles_a, slabs, t.lag, t.ring, t.count,
        BN=t.BN, BJ=BJ, BD=BD, BK=BK, BA=BA,
        D_ONCE=near.inner <= BD, K_ONCE=far.rows <= BK, EVEN_1=even(x_NI, near, t.near), EVEN_2=even(y_NO, far, t.far),
        FLIP_1=t.flip[0], FLIP_2=t.flip[1], BIAS=bias is not None, PRECISION=precision(x_NI),
        ONCE=t.once, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


# Programs that fill a card, and the most that a sum of partial gradients may hold.
PROGRAMS = 528


def pair(z: Tensor, y_NO: Tensor, side: Side, BN: int) -> Tensor:
    """The gradient of the side's core, float32: sums over parts of the tokens, then over the parts."""
    single = z.dtype == torch.float32
    N, BK, BA = len(y_NO), min(64 if single else 128, pow2(side.rows)), min(64, pow2(side.inner))
    tiles_k, tiles_a, total = cdiv(side.rows, BK), cdiv(side.inner, BA), cdiv(N, BN)
    programs = side.groups * tiles_k * tiles_a
    count = cdiv(total, max(1, min(PROGRAMS // programs, total // 4)))
    g = torch.empty(cdiv(total, count), *side.core.shape, dtype=torch.float32, device=z.device)
    products.pair_kernel[(programs, len(g))](
        z, y_NO, g, N, y_NO.shape[1], side.inner, side.rows, side.groups, *y_NO.stride(),
        g[0].numel(), side.step_group, side.step_row, side.step_inner, tiles_k, tiles_a, count,
        BN=BN, BK=BK, BA=BA, EVEN=even(y_NO, side, (BA, BK)), PRECISION=precision(z),
        num_warps=4, num_stages=2 if single else 3,
    )  # fmt: skip
    return g[0] if len(g) == 1 else g.sum(0)
