"""Rows in e4m3 with one scale each: the inputs of products in FP8 (surgery/structures/fp8.py) in one pass.

The reference reads and writes all values four times: the largest value of a row, the quotients in 32 bits, their
limits, and their rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_rows_kernel(x, rounded, scale, K, x_n, x_k, BK: tl.constexpr, SINGLE: tl.constexpr):
    """Store row n of x (N, K) as e4m3 of x[n, k] / s_n, and s_n = max |x[n]| / 448, 1 for a row of zeros. Grid: (N,).

    s_n is NaN where the row has a NaN, as `max` has it in PyTorch and not here. SINGLE: BK columns hold a whole row, which
    is then read once.
    """
    n = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BK)
    x += n * x_n
    rounded += n * K
    if SINGLE:
        x_K = tl.load(x + column * x_k, mask=column < K, other=0.0).to(tl.float32)
        largest, nans = tl.max(tl.abs(x_K), 0), tl.max((x_K != x_K).to(tl.int32), 0)
    else:
        largest, nans = tl.zeros([], tl.float32), tl.zeros([], tl.int32)
        for first in range(0, K, BK):
            x_K = tl.load(x + (first + column) * x_k, mask=first + column < K, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(x_K), 0))
            nans = tl.maximum(nans, tl.max((x_K != x_K).to(tl.int32), 0))
    s = largest / 448.0
    s = tl.where(nans > 0, float("nan"), tl.where(s == 0.0, 1.0, s))
    tl.store(scale + n, s)
    if SINGLE:
        y_K = tl.minimum(tl.maximum(tl.math.div_rn(x_K, s), -448.0), 448.0)
        tl.store(rounded + column, y_K.to(tl.float8e4nv), mask=column < K)
    else:
        for first in range(0, K, BK):
            x_K = tl.load(x + (first + column) * x_k, mask=first + column < K, other=0.0).to(tl.float32)
            y_K = tl.minimum(tl.maximum(tl.math.div_rn(x_K, s), -448.0), 448.0)
            tl.store(rounded + first + column, y_K.to(tl.float8e4nv), mask=first + column < K)
