"""Which implementation a BTT call on a GPU runs: the one measured to be fastest, and a rule for sizes that were not
measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.kernels.btt.decode import TOKENS_PER_PROGRAM
from surgery.kernels.btt.to_dense import MAX_BLOCK
from surgery.kernels.tuning import (
    IMPLEMENTATIONS,
    Implementation,
    TuningQuery,
    choose_implementation,
    is_measured,
    named_sizes,
    remember,
    three_tensor_key,
    training_pass,
)

# Rules for sizes that were not measured, from one H200, bfloat16, 2026-11-21, dimensions 1,024 to 11,008, ranks 1 to
# 16. A multiplication of the kernel takes KERNEL_SLOWDOWN times as long as one of a dense product; building the dense
# matrix takes as long as the dense product of DENSE_BUILD_ROWS rows. With large blocks the library's batched products
# are faster up to LARGE_BLOCK_ROWS rows, and blocks smaller than MIN_BLOCK cost as much as those of that size.
KERNEL_SLOWDOWN, DENSE_BUILD_ROWS, LARGE_BLOCK_ROWS, MIN_BLOCK = 5.6, 500, 4096, 32
TOO_LARGE_BLOCK = 512  # with larger blocks the reference is faster at any number of rows

# Where the library's products are expected to be fastest. This rule is arithmetic and was not measured: one tile of
# cuBLAS's products is 128 wide, so that both products fill their tiles, and the kernels are for small ranks.
PRODUCTS_MIN_SIDE, PRODUCTS_MIN_ROWS, PRODUCTS_MIN_RANK = 128, 64, 16


def tuning_query(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> TuningQuery:
    """Return the sizes of the call under which kernels/tuning.json lists its timings."""
    (c, d, b, s), in_ = right_cdbs.shape, x.shape[-1]
    at = named_sizes(tokens=x.numel() // in_, inputs=in_, outputs=out, rank=s, rows=b, columns=c)
    implementations: tuple[Implementation, ...] = (
        IMPLEMENTATIONS if max(d, left_bcsa.shape[3]) <= MAX_BLOCK else ("kernel", "reference", "products")
    )
    return TuningQuery(training_pass(x, right_cdbs, left_bcsa), at, x, implementations)


def is_faster_by_rule(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, out: int) -> bool:
    """Return whether the kernel is expected to be faster where nothing was measured: faster than the dense matrix, or
    than the reference where blocks are too large for building the dense matrix."""
    (c, d, b, s), a, in_ = right_cdbs.shape, left_bcsa.shape[3], x.shape[-1]
    rows, dense = x.numel() // in_, in_ * out
    if rows <= TOKENS_PER_PROGRAM:
        return True
    if max(a, d) > MAX_BLOCK:
        return rows >= LARGE_BLOCK_ROWS and min(a, d) >= MIN_BLOCK and max(a, d) <= TOO_LARGE_BLOCK
    return (
        rows * (KERNEL_SLOWDOWN * b * c * s * (max(a, MIN_BLOCK) + max(d, MIN_BLOCK)) - dense)
        < DENSE_BUILD_ROWS * dense
    )


def are_large_products(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor) -> bool:
    """Return whether both products are large: (rows, d) times (d, b s), and (rows, c s) times (c s, a)."""
    (c, d, b, s), a = right_cdbs.shape, left_bcsa.shape[3]
    sides_are_large = min(d, b * s, c * s, a) >= PRODUCTS_MIN_SIDE and s >= PRODUCTS_MIN_RANK
    return sides_are_large and x.numel() // x.shape[-1] >= PRODUCTS_MIN_ROWS


def _decide(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Implementation:
    query = tuning_query(x, right_cdbs, left_bcsa, bias, out)
    if are_large_products(x, right_cdbs, left_bcsa) and not is_measured("btt", query, "products"):
        return "products"
    if fastest := choose_implementation("btt", query):
        return fastest
    if is_faster_by_rule(x, right_cdbs, left_bcsa, out):
        return "kernel"
    return "dense" if "dense" in query.implementations else "reference"


remembered_choice = remember(three_tensor_key, _decide)


def is_chosen(implementation: Implementation) -> Any:
    """Return the `is_faster` of an implementation of BTT: whether it is the chosen one.

    torch.compile always takes the kernel, which stands there for an operator that chooses at each call.
    """

    def is_faster(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> bool:
        if torch.compiler.is_compiling():
            return implementation == "kernel"
        return remembered_choice(x, right_cdbs, left_bcsa, bias, out) == implementation

    return is_faster
