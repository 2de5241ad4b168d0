"""Append a step's keys and values to the buffers of a cache (surgery/mixers/common/kv_layout.py), all in one launch.

The levels of MLR attention have a buffer each, and a copy into each of them would be a launch of its own.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.mixers.common.kv_layout import write_slots

MAX_TENSORS = 9  # buffers of a launch
MAX_TOKENS = 16  # new slots per buffer; PyTorch copies more of them as fast


@triton.jit
def write_slot(new, buffer, at_BG, token, start, size, first: tl.constexpr, X: tl.constexpr, P: tl.constexpr):
    """Copy X elements of `new`, from `first` on, into slot start + token of a buffer (B * G, size, X).

    P: the power of two of X.
    """
    dim_P = tl.arange(0, P)
    x_P = tl.load(new + first + dim_P, mask=dim_P < X)
    tl.store(buffer + (at_BG * size + start + token) * X + dim_P, x_P, mask=dim_P < X)


# Not specialized: start slots, which grow with every token.
@triton.jit(do_not_specialize=["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8"])
def write_all_slots(
    keys, values, b0, b1, b2, b3, b4, b5, b6, b7, b8, s0, s1, s2, s3, s4, s5, s6, s7, s8,
    n0, n1, n2, n3, n4, n5, n6, n7, n8, G, T, kb, kg, kt, vb, vg, vt,
    CUTS: tl.constexpr, WIDTHS: tl.constexpr, L: tl.constexpr, V: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Append one token of one row and head group. Grid: (B * G * T,).

    keys hold L levels side by side, level l from CUTS[l] on; values go to buffer L. b0 .. b8: buffers; s0 .. s8: their
    first new slots; n0 .. n8: their slots. k* and v*: strides of rows, groups and tokens of keys and values.
    """
    at_BG, token = (tl.program_id(0) // T).to(tl.int64), (tl.program_id(0) % T).to(tl.int64)
    keys += at_BG // G * kb + at_BG % G * kg + token * kt
    values += at_BG // G * vb + at_BG % G * vg + token * vt
    buffers, starts = (b0, b1, b2, b3, b4, b5, b6, b7, b8), (s0, s1, s2, s3, s4, s5, s6, s7, s8)
    sizes = (n0, n1, n2, n3, n4, n5, n6, n7, n8)
    for part in tl.static_range(0, L):
        write_slot(
            keys,
            buffers[part],
            at_BG,
            token,
            starts[part],
            sizes[part],
            CUTS[part],
            CUTS[part + 1] - CUTS[part],
            WIDTHS[part],
        )
    write_slot(values, buffers[L], at_BG, token, starts[L], sizes[L], 0, V, DV)


def part_offsets(parts: list[Tensor]) -> tuple[int, ...]:
    """Return the first dimension of each of several parts that lie side by side, and their number of dimensions."""
    offsets = [0]
    for keys in parts:
        offsets.append(offsets[-1] + keys.shape[-1])
    return tuple(offsets)


def accepts(new_BGTX: Tensor, buffers: list[Tensor], starts: list[int], news: list[Tensor]) -> bool:
    """Return whether the new keys are views side by side into one tensor, as mixers make them, with values behind
    them.
    """
    keys = news[:-1]
    beside = all(
        level_keys.untyped_storage().data_ptr() == new_BGTX.untyped_storage().data_ptr()
        and level_keys.stride() == new_BGTX.stride()
        and level_keys.storage_offset() == new_BGTX.storage_offset() + cut
        for level_keys, cut in zip(keys, part_offsets(keys))
    )
    return (
        1 < len(news) <= MAX_TENSORS
        and beside
        and new_BGTX.shape[2] <= MAX_TOKENS
        and all(x.stride(-1) == 1 and x.shape[:3] == new_BGTX.shape[:3] for x in news)
        and all(buffer.is_contiguous() for buffer in buffers)
    )


@register_kernel(write_slots, accepts=accepts)
def write_slots_triton(new_BGTX: Tensor, buffers: list[Tensor], starts: list[int], news: list[Tensor]) -> None:
    """Write news[i] into buffers[i] from slot starts[i] on; arguments as in `write_slots`."""
    *keys, values = news
    B, G, T = new_BGTX.shape[:3]
    missing: list[Any] = [None] * (MAX_TENSORS - len(buffers))
    zeros = [0] * len(missing)
    widths = tuple(triton.next_power_of_2(key.shape[-1]) for key in keys)
    write_all_slots[(B * G * T,)](
        new_BGTX, values, *buffers, *missing, *starts, *zeros, *(buffer.shape[2] for buffer in buffers), *zeros,
        G, T, *new_BGTX.stride()[:3], *values.stride()[:3],
        CUTS=part_offsets(keys), WIDTHS=widths, L=len(keys), V=values.shape[-1], DV=triton.next_power_of_2(values.shape[-1]),
        num_warps=1,
    )  # fmt: skip
