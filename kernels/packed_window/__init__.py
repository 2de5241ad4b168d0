"""Windows of pieces of sequences in a server's cache: all rings and sinks of a layer in one launch for what is read of
them, and one for what is stored.

Copies of rows of numbers: keys, values and written signals of tokens (surgery/mixers/common/window_hybrid.py:
`gather_window`, `store_window`). Tables say which row goes where, and begin with their own sizes, so that a launch has no
argument that changes from step to step. A program copies a tile of rows of one tensor, and looks up each row once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.kernel_tensors import HAS_TUPLE_ARGUMENTS
from surgery.kernels.launch import open_launch
from surgery.mixers.common.packed_pieces import WindowPlan
from surgery.mixers.common.window_hybrid import Tensors, WindowTokens, gather_window, store_window

ELEMENTS, MAX_COLUMNS = 4096, 1024  # elements of a tile, and its columns at most


class Copy(NamedTuple):
    """One tensor of a launch. new: rows of the tokens, of `width` elements, `stride` elements apart. slots: in pages that
    are `page` elements apart, `size` slots in each. out: rows that are gathered. table: `WindowPlan.near_far_T` and its
    like. No field changes from step to step."""

    new: Tensor
    stride: int
    slots: Tensor
    page: int
    size: int
    width: int
    out: Tensor
    table: Tensor


@triton.jit
def find_block(copies, COPIES: tl.constexpr, TILES: tl.constexpr, ELEMENTS: tl.constexpr):
    """Return (tensor of the program, number of its block of rows). TILES: of `tiles_of`. The blocks of all tensors follow
    one another on the grid, as many as their tables say; a program behind them has tensor -1."""
    at = tl.program_id(0).to(tl.int64)
    which, block, before = at * 0 - 1, at * 0, at * 0
    for i in tl.static_range(COPIES):
        blocks = tl.cdiv(tl.load(copies[i].table), ELEMENTS >> ((TILES >> (5 * i)) & 15))
        is_here = (at >= before) & (at < before + blocks)
        which = tl.where(is_here, i, which)
        block = tl.where(is_here, at - before, block)
        before += blocks
    return which, block


@triton.jit
def move_tile(old_R, new_R, to_R, is_old_R, is_new_R, first, width, BW: tl.constexpr, EXACT: tl.constexpr):
    """Copy columns first .. first + BW - 1 of rows, from old_R where is_old_R and from new_R where is_new_R. EXACT: rows
    have so many columns."""
    column_1W = (first + tl.arange(0, BW))[None, :]
    is_old, is_new = is_old_R[:, None], is_new_R[:, None]
    if not EXACT:
        is_old, is_new = is_old & (column_1W < width), is_new & (column_1W < width)
    new_RW = tl.load(new_R[:, None] + column_1W, mask=is_new, other=0.0).to(to_R.dtype.element_ty)
    old_RW = tl.load(old_R[:, None] + column_1W, mask=is_old, other=0.0).to(to_R.dtype.element_ty)
    tl.store(to_R[:, None] + column_1W, tl.where(is_old, old_RW, new_RW), mask=is_old | is_new)


@triton.jit
def gather_rows(copies, pages, COPIES: tl.constexpr, TILES: tl.constexpr, ELEMENTS: tl.constexpr):
    """Gather rows of all tensors: numbers below `old` of a table are slots of the pages, others tokens. Grid: blocks of
    rows of all tensors."""
    which, block = find_block(copies, COPIES, TILES, ELEMENTS)
    for i in tl.static_range(COPIES):
        if which == i:
            copy = copies[i]
            BW: tl.constexpr = 1 << ((TILES >> (5 * i)) & 15)
            R: tl.constexpr = ELEMENTS // BW
            row_R = block * R + tl.arange(0, R)
            here_R = row_R < tl.load(copy.table)
            number_R = tl.load(copy.table + 2 + row_R, mask=here_R, other=0)
            token_R = number_R - tl.load(copy.table + 1)
            is_old_R, is_new_R = here_R & (token_R < 0), here_R & (token_R >= 0)
            at_R = number_R.to(tl.int32)
            page_R = tl.load(pages + at_R // copy.size, mask=is_old_R, other=0).to(tl.int64)
            old_R = copy.slots + page_R * copy.page + (at_R % copy.size).to(tl.int64) * copy.width
            new_R, to_R = copy.new + token_R * copy.stride, copy.out + row_R * copy.width
            if (TILES >> (5 * i)) & 16:
                move_tile(old_R, new_R, to_R, is_old_R, is_new_R, 0, BW, BW, True)
            else:
                for first in range(0, copy.width, BW):
                    move_tile(old_R, new_R, to_R, is_old_R, is_new_R, first, copy.width, BW, False)


@triton.jit
def store_tile(new_R, to_R, here_R, first, width, BW: tl.constexpr, EXACT: tl.constexpr):
    """Copy columns first .. first + BW - 1 of rows where here_R. EXACT: rows have so many columns."""
    column_1W = (first + tl.arange(0, BW))[None, :]
    here = here_R[:, None]
    if not EXACT:
        here = here & (column_1W < width)
    new_RW = tl.load(new_R[:, None] + column_1W, mask=here, other=0.0)
    tl.store(to_R[:, None] + column_1W, new_RW.to(to_R.dtype.element_ty), mask=here)


@triton.jit
def store_rows(copies, pages, COPIES: tl.constexpr, TILES: tl.constexpr, ELEMENTS: tl.constexpr):
    """Store rows of tokens in slots of all tensors. Grid: as `gather_rows`. table: their number W, and tokens, sequences
    and slots (W,) each."""
    which, block = find_block(copies, COPIES, TILES, ELEMENTS)
    for i in tl.static_range(COPIES):
        if which == i:
            copy = copies[i]
            BW: tl.constexpr = 1 << ((TILES >> (5 * i)) & 15)
            R: tl.constexpr = ELEMENTS // BW
            row_R = block * R + tl.arange(0, R)
            rows = tl.load(copy.table)
            here_R = row_R < rows
            places = copy.table + 1
            token_R = tl.load(places + row_R, mask=here_R, other=0)
            page_R = tl.load(pages + tl.load(places + rows + row_R, mask=here_R, other=0), mask=here_R, other=0)
            slot_R = tl.load(places + 2 * rows + row_R, mask=here_R, other=0)
            new_R = copy.new + token_R * copy.stride
            to_R = copy.slots + page_R.to(tl.int64) * copy.page + slot_R * copy.width
            if (TILES >> (5 * i)) & 16:
                store_tile(new_R, to_R, here_R, 0, BW, BW, True)
            else:
                for first in range(0, copy.width, BW):
                    store_tile(new_R, to_R, here_R, first, copy.width, BW, False)


def make_copy(new: Tensor, slots: Tensor, out: Tensor, table: Tensor) -> Copy:
    """Return the copy of tokens (N, ..) and slots (pages, size, ..)."""
    new = new if has_whole_rows(new) else new.contiguous()
    width = prod(new.shape[1:])
    return Copy(new, new.stride(0), slots, slots.stride(0), max(1, slots.shape[1]), width, out, table)


def has_whole_rows(x: Tensor) -> bool:
    """Return whether the elements of each row x[i] lie side by side."""
    width = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:])):
        if size != 1 and stride != width:
            return False
        width *= size
    return True


def columns_of(width: int) -> int:
    """Return the columns of a tile of rows of that width."""
    return min(MAX_COLUMNS, 1 << (width - 1).bit_length())


def tiles_of(widths: Sequence[int]) -> int:
    """Return the tiles of all tensors as one number, five bits each: the logarithm of the columns, and whether they are the
    width. A tuple of constants could not be indexed in every version of Triton."""
    tiles = 0
    for i, width in enumerate(widths):
        columns = columns_of(width)
        tiles |= (columns.bit_length() - 1 + (16 if columns == width else 0)) << (5 * i)
    return tiles


def launch(kernel: Any, copies: Sequence[Copy], rows: Sequence[int], page_R: Tensor) -> None:
    """Run a kernel over copies of so many rows each."""
    blocks = sum(-(-count // (ELEMENTS // columns_of(copy.width))) for count, copy in zip(rows, copies, strict=True))
    if blocks:
        tiles = tiles_of([copy.width for copy in copies])
        options = {"COPIES": len(copies), "TILES": tiles, "ELEMENTS": ELEMENTS, "num_warps": 8}
        open_launch(kernel, options)((blocks,), tuple(copies), page_R)


def accepts(k_NGK: Tensor, new: Tensors, pool: Tensors, *_: Any) -> bool:
    """Return whether the kernels compute this call: rows in pages lie together."""
    names = [*(f"ring.{name}" for name in new), "sink.k", "sink.v"]
    return (
        HAS_TUPLE_ARGUMENTS and len(k_NGK) > 0 and all(name in pool and pool[name][0].is_contiguous() for name in names)
    )


@register_kernel(gather_window, accepts=accepts)
def gather_window_triton(
    k_NGK: Tensor, new: Tensors, pool: Tensors, page_R: Tensor, plan: WindowPlan, far: Sequence[str]
) -> WindowTokens:
    """`gather_window` in one launch."""
    near, written, found, copies, rows = plan.near_XY.numel(), {}, {}, [], []
    for name, t in new.items():
        if name not in far and name not in ("k", "v"):
            continue
        table = plan.near_far_T if name in ("k", "v") else plan.far_T
        out = t.new_empty(len(table) - 2, *t.shape[1:])
        copies.append(make_copy(t, pool[f"ring.{name}"], out, table))
        rows.append(len(out))
        if name in ("k", "v"):
            found[name], out = out[:near].unflatten(0, plan.near_XY.shape), out[near:]
        if name in far:
            written[name] = out.unsqueeze(0)
    sinks = {name: new[name].new_empty(*plan.sink_XK.shape, *new[name].shape[1:]) for name in ("k", "v")}
    if plan.sink_XK.numel():
        copies += [make_copy(new[name], pool[f"sink.{name}"], t, plan.sinks_T) for name, t in sinks.items()]
        rows += [plan.sink_XK.numel()] * 2
    launch(gather_rows, copies, rows, page_R)
    return WindowTokens(found, sinks, written)


@register_kernel(store_window, accepts=accepts)
def store_window_triton(k_NGK: Tensor, new: Tensors, pool: Tensors, page_R: Tensor, plan: WindowPlan) -> None:
    """`store_window` in one launch, of the same tensors in every step."""
    copies, rows = [], []
    for part, places, names in (("ring", plan.to_rings, tuple(new)), ("sink", plan.to_sinks, ("k", "v"))):
        if pool[f"{part}.k"].shape[1]:
            copies += [make_copy(new[n], t := pool[f"{part}.{n}"], t, places.table) for n in names]
            rows += [len(places.token_W)] * len(names)
    if copies:
        launch(store_rows, copies, rows, page_R)
