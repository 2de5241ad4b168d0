"""Pages and lengths of a server's requests in one launch: replaces `write_request_rows`, which takes a dozen operations
for each group of caches and step."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.launch import open_launch
from surgery.mixers.common.request_rows import NO_TOKEN, write_request_rows

ENTRIES = 256  # of a program


@triton.jit(do_not_specialize=["count", "size", "stride"])
def request_rows(
    lengths, starts, pages, rows, seen, count, size, stride,
    BLOCK: tl.constexpr, NO_PAGE: tl.constexpr, NONE: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Write entries of rows and seen, `count` of them of requests. Grid: blocks of S entries of the buffers.

    pages: rows of `stride` numbers. NONE: `NO_TOKEN`. Others: as in `write_request_rows`.
    """
    i_S = tl.program_id(0) * S + tl.arange(0, S)
    length_S = tl.load(lengths + i_S, mask=i_S < count, other=0)
    is_real_S = length_S > 0
    at_S = i_S.to(tl.int64) * stride
    if BLOCK > 0:
        at_S += tl.maximum(length_S - 1, 0) // BLOCK
    page_S = tl.load(pages + at_S, mask=is_real_S, other=NO_PAGE)
    stop_S = tl.load(starts + i_S + 1, mask=is_real_S, other=0)
    tokens_S = stop_S - tl.load(starts + i_S, mask=is_real_S, other=0)
    tl.store(rows + i_S, page_S, mask=i_S < size)
    tl.store(seen + i_S, tl.where(is_real_S, length_S - tokens_S, NONE), mask=i_S < size)


def accepts(length_R: Tensor, start_R: Tensor, page_RP: Tensor, rows_S: Tensor, seen_S: Tensor, **_: int) -> bool:
    """Return whether the kernel computes this call: integers that lie side by side."""
    return page_RP.stride(1) == 1 and all(t.is_contiguous() for t in (length_R, start_R, rows_S, seen_S))


@register_kernel(write_request_rows, accepts=accepts)
def write_request_rows_triton(
    length_R: Tensor, start_R: Tensor, page_RP: Tensor, rows_S: Tensor, seen_S: Tensor, *, block: int, no_page: int
) -> None:
    """`write_request_rows` in one launch."""
    size = len(rows_S)
    options = {"BLOCK": block, "NO_PAGE": no_page, "NONE": NO_TOKEN, "S": ENTRIES, "num_warps": 4}
    open_launch(request_rows, options)(
        (-(-size // ENTRIES),), length_R, start_R, page_RP, rows_S, seen_S, len(length_R), size, page_RP.stride(0)
    )
