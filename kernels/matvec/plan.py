"""Tiles of `matvec_kernel`, measured on one H200 in bfloat16 on 2026-11-24, with matrices from 512 x 192 to 8,192 x
8,192.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from surgery.kernels.launch import CachedLaunch
from surgery.kernels.matvec.kernel import grouped_matvec_kernel, matvec_kernel


class MatvecSizes(NamedTuple):
    """Sizes of one launch, named as the arguments of `matvec_kernel`."""

    N: int
    IN: int
    D: int
    R: int
    S: int
    OUT: int
    x_n: int
    x_i: int
    c_g: int
    c_d: int
    c_r: int
    o_n: int
    o_g: int
    o_s: int


class MatvecTiles(NamedTuple):
    """BD: columns that a program reads at once. BR: rows of the matrix in a program."""

    BD: int
    BR: int
    warps: int


def matvec_tiles(sizes: MatvecSizes) -> MatvecTiles:
    """Return the tiles of a launch. Neighbors in memory lie in a row of the matrix if c_d is 1, else in a column."""
    widest = 1 << max(4, (sizes.D - 1).bit_length())
    if sizes.c_d != 1:
        return MatvecTiles(min(widest, 512), 32, 4)
    if sizes.R > 2 * sizes.D:  # many short rows
        columns = min(widest, 1024)
        return MatvecTiles(columns, 8 if columns <= 256 else 4, 1)
    columns = min(widest, 4096 if sizes.R < 1024 or (sizes.R == 1024 and sizes.D > 4096) else 2048)
    rows = 8 if columns <= 256 else 4 if sizes.R >= 2048 or columns < 2048 else 2
    return MatvecTiles(columns, rows, 4 if columns >= 2048 else 2)


def matvec_programs(sizes: MatvecSizes, groups: int) -> int:
    """Return the number of programs of a launch."""
    return groups * -(-sizes.R // matvec_tiles(sizes).BR)


def launch_options(tiles: MatvecTiles, bias: bool, first: bool, second: bool, fused: bool = False) -> dict[str, Any]:
    """Return the compile-time options of a launch. fused: whether products and sums may be fused.

    A lane with a single product of a row must not fuse it with the first sum: lanes that add each other's products
    would round differently, and all of them write the row's sum. Rows that lie along memory are not faster with fused
    ones; in the other layout, every lane has several products of a row.
    """
    columns, rows, warps = tiles
    options = {"BD": columns, "BR": rows, "BIAS": bias, "FIRST": first, "SECOND": second, "num_warps": warps}
    return options | {"enable_fp_fusion": fused} | ({"launch_pdl": True} if first or second else {})


def matvec_launch(
    sizes: MatvecSizes, groups: int, *, bias: bool = False, first: bool = False, second: bool = False
) -> CachedLaunch:
    """Return the launch of a product of `groups` groups. first, second: its place in a pair with an early start."""
    columns, rows, warps = matvec_tiles(sizes)
    tiles = -(-sizes.R // rows)
    options = launch_options(MatvecTiles(columns, rows, warps), bias, first, second, fused=sizes.c_d != 1)
    return CachedLaunch(matvec_kernel, (groups * tiles,), (*sizes, tiles), options)


class GroupedSizes(NamedTuple):
    """Sizes of a launch of `grouped_matvec_kernel`, each for every matrix: columns D, rows R, first elements of the
    rows of x and out, and the distance of out's rows."""

    columns: tuple[int, ...]
    rows: tuple[int, ...]
    x_at: tuple[int, ...]
    out_at: tuple[int, ...]
    o_n: tuple[int, ...]


def grouped_launch(
    tokens: int,
    strides: tuple[int, int],
    sizes: GroupedSizes,
    *,
    bias: bool = False,
    first: bool = False,
    second: bool = False,
) -> CachedLaunch:
    """Return the launch of products with two or three matrices. strides: of both axes of x. first, second: as in
    `matvec_launch`.
    """
    largest = MatvecSizes(tokens, 0, max(sizes.columns), sum(sizes.rows), 1, 0, 0, 0, 0, 1, 0, 0, 0, 0)
    columns, rows, warps = matvec_tiles(largest)
    ends = [-(-R // rows) for R in sizes.rows]
    total, starts = sum(ends), [sum(ends[:n]) for n in (1, 2)]  # with two matrices no tile begins the third
    padded = [value for values in sizes for value in (*values, values[-1])[:3]]
    options = launch_options(MatvecTiles(columns, rows, warps), bias, first, second)
    return CachedLaunch(grouped_matvec_kernel, (total,), (tokens, *strides, *padded, *starts), options)
