"""Windows of pieces of sequences in a server's cache: all rings and sinks of a layer in one launch for what is read of
them, and one for what is stored.

Copies of rows of numbers: keys, values and written signals of tokens (surgery/mixers/common/window_hybrid.py:
`gather_window`, `store_window`). Tables say which row goes where, and begin with their own sizes, so that a launch has no
argument that changes from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.kernel_tensors import HAS_TUPLE_ARGUMENTS
from surgery.mixers.common.packed_pieces import WindowPlan
from surgery.mixers.common.window_hybrid import Tensors, WindowTokens, gather_window, store_window

BLOCK = 2048  # elements that a program copies


class Copy(NamedTuple):
    """One tensor of a launch. new: rows of the tokens, of `width` elements, `stride` elements apart. slots: in pages that
    are `page` elements apart, `size` slots in each. out: rows that are gathered. table: `WindowPlan.near_far_T` and its
    like."""

    new: Tensor
    stride: int
    slots: Tensor
    page: int
    size: int
    width: int
    out: Tensor
    table: Tensor


@triton.jit
def block_rows(width, BLOCK: tl.constexpr):
    """Return (row, place in it, number) of the elements of the program's block. Divides 32-bit integers only."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    here_B = (first % width).to(tl.int32) + tl.arange(0, BLOCK)
    return first // width + here_B // width, here_B % width, first + tl.arange(0, BLOCK)


@triton.jit
def gather_rows(copies, pages, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """Gather rows of all tensors: numbers below `old` of a table are slots of the pages, others tokens. Grid: (blocks of
    the largest, COPIES)."""
    for i in tl.static_range(COPIES):
        if tl.program_id(1) == i:
            copy = copies[i]
            row_B, in_row_B, at_B = block_rows(copy.width, BLOCK)
            here_B = row_B < tl.load(copy.table)
            number_B = tl.load(copy.table + 2 + row_B, mask=here_B, other=0)
            token_B = number_B - tl.load(copy.table + 1)
            is_old_B = here_B & (token_B < 0)
            page_B = tl.load(pages + number_B // copy.size, mask=is_old_B, other=0).to(tl.int64)
            at_old_B = page_B * copy.page + (number_B % copy.size) * copy.width + in_row_B
            x_B = tl.load(copy.slots + at_old_B, mask=is_old_B, other=0.0).to(copy.out.dtype.element_ty)
            new_B = tl.load(copy.new + token_B * copy.stride + in_row_B, mask=here_B & (token_B >= 0), other=0.0)
            tl.store(copy.out + at_B, tl.where(is_old_B, x_B, new_B.to(copy.out.dtype.element_ty)), mask=here_B)


@triton.jit
def store_rows(copies, pages, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows of tokens in slots of all tensors. Grid: as `gather_rows`. table: their number W, and tokens, sequences
    and slots (W,) each."""
    for i in tl.static_range(COPIES):
        if tl.program_id(1) == i:
            copy = copies[i]
            row_B, in_row_B, _at_B = block_rows(copy.width, BLOCK)
            rows = tl.load(copy.table)
            here_B = row_B < rows
            places = copy.table + 1
            token_B = tl.load(places + row_B, mask=here_B, other=0)
            page_B = tl.load(pages + tl.load(places + rows + row_B, mask=here_B, other=0), mask=here_B, other=0)
            slot_B = tl.load(places + 2 * rows + row_B, mask=here_B, other=0)
            x_B = tl.load(copy.new + token_B * copy.stride + in_row_B, mask=here_B, other=0.0)
            to_B = copy.slots + page_B.to(tl.int64) * copy.page + slot_B * copy.width + in_row_B
            tl.store(to_B, x_B.to(copy.slots.dtype.element_ty), mask=here_B)


def make_copy(new: Tensor, slots: Tensor, out: Tensor, table: Tensor) -> Copy:
    """Return the copy of tokens (N, ..) and slots (pages, size, ..)."""
    new = new if new[0].is_contiguous() else new.contiguous()
    return Copy(new, new.stride(0), slots, slots.stride(0), max(1, slots.shape[1]), new[0].numel(), out, table)


def launch(kernel: Any, copies: Sequence[Copy], rows: Sequence[int], page_R: Tensor) -> None:
    """Run a kernel over copies of so many rows each."""
    most = max(count * copy.width for count, copy in zip(rows, copies, strict=True))
    if most:
        grid = (triton.cdiv(most, BLOCK), len(copies))
        kernel[grid](tuple(copies), page_R, COPIES=len(copies), BLOCK=BLOCK, num_warps=8)


def accepts(k_NGK: Tensor, new: Tensors, pool: Tensors, *_: Any) -> bool:
    """Return whether the kernels compute this call: rows in pages lie together."""
    names = [*(f"ring.{name}" for name in new), "sink.k", "sink.v"]
    return (
        HAS_TUPLE_ARGUMENTS and len(k_NGK) > 0 and all(name in pool and pool[name][0].is_contiguous() for name in names)
    )


@register_kernel(gather_window, accepts=accepts)
@torch.no_grad()
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
@torch.no_grad()
def store_window_triton(k_NGK: Tensor, new: Tensors, pool: Tensors, page_R: Tensor, plan: WindowPlan) -> None:
    """`store_window` in one launch."""
    copies, rows = [], []
    for part, places, names in (("ring", plan.to_rings, tuple(new)), ("sink", plan.to_sinks, ("k", "v"))):
        if len(places.token_W):
            copies += [make_copy(new[n], t := pool[f"{part}.{n}"], t, places.table) for n in names]
            rows += [len(places.token_W)] * len(names)
    if copies:
        launch(store_rows, copies, rows, page_R)
