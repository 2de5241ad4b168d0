"""Faster float32 products on the CPU, where they cost no precision.

On processors with AVX-512 oneDNN multiplies float32 matrices twice as fast as the default library; torch
takes it when less precision is allowed, though it then uses none of that leave. Where it would (bf16 units),
a probe sees it, and everything stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

# Relative error of a float32 product of depth 512; rounding alone gives about 3e-7, bf16 inputs 3e-3.
FLOAT32 = 3e-6


@cache
def _allowed_is_exact() -> bool:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 512, generator=generator) for _ in range(2))
    errors = []
    for x, y in ((a, b.mT), (a.mT, b), (a.mT.contiguous(), b)):
        exact = x.double() @ y.double()
        errors.append(float((x @ y - exact).norm() / exact.norm()))
    return max(errors) < FLOAT32


@contextmanager
def float32_products(device: torch.device) -> Iterator[None]:
    """Inside, float32 products on the CPU are as fast as float32 allows; elsewhere nothing changes."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller has set precision per backend
        before = None
    if device.type != "cpu" or before != "highest":
        yield
        return
    torch.set_float32_matmul_precision("medium")
    try:
        if not _allowed_is_exact():
            torch.set_float32_matmul_precision(before)
        yield
    finally:
        torch.set_float32_matmul_precision(before)
