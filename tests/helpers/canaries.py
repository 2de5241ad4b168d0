"""Guard bands around every allocated tensor: they detect writes beside a tensor, also inside torch's memory pool.

    with guarded() as buffers:
        out = kernel(buffers.copy(x))       # new_empty, empty_like, zeros and the like come from guarded memory
    buffers.check()                         # raises Overrun: which tensor, on which side, how far

A buffer is [guard | tensor | guard]. Guards are bytes of 0xFF, which are NaN as floating-point numbers and -1 as
integers, and so is memory that nobody asked to be zeros: a kernel that reads beside a tensor, or reads what it never
wrote, gives NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GUARD = {"cpu": 2**16, "cuda": 2**20}  # bytes on each side, a multiple of every alignment that kernels ask for
PATCHED = [
    *((torch.Tensor, name) for name in ("new_empty", "new_zeros")),
    *((torch, name) for name in ("empty", "zeros", "empty_like", "zeros_like")),
]


class Overrun(AssertionError):
    """Raised if memory beside a tensor was written."""


class GuardedBuffers:
    """Tensors between guard bands; `check` raises Overrun if a guard changed."""

    def __init__(self) -> None:
        self.allocations: list[
            tuple[Tensor, int, int, str]
        ] = []  # bytes, guard, bytes of the tensor, where it was allocated

    def empty_like(self, x: Tensor, zeros: bool = False) -> Tensor:
        """Return an empty tensor of x's shape, strides and dtype between guards."""
        size, guard = x.element_size(), GUARD[x.device.type]
        numbers = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
        inner = -(-numbers * size // 512) * 512  # behind the last number guards begin within 512 bytes: see `check`
        raw = _ORIGINAL[torch, "empty"](inner + 2 * guard, dtype=torch.uint8, device=x.device)
        raw.fill_(0xFF)
        if zeros:
            raw[guard : guard + numbers * size] = 0
        self.allocations.append((raw, guard, numbers * size, _caller()))
        made = _ORIGINAL[torch, "empty"](0, dtype=x.dtype, device=x.device)
        return made.set_(raw.untyped_storage(), guard // size, x.shape, x.stride())

    def copy(self, x: Tensor) -> Tensor:
        """Return a copy of x between guards with the same layout; axes that x is expanded along have stride 0."""
        made = self.empty_like(x)
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())
        made.detach()[once].copy_(x.detach()[once])
        return made

    def check(self) -> None:
        """Raise Overrun for the first guard band that was written."""
        for raw, guard, size, where in self.allocations:
            before, behind = raw[:guard] != 0xFF, raw[guard + size :] != 0xFF
            for side, hit in (("before", before.flip(0)), ("behind", behind)):
                if bool(hit.any()):
                    first, last = (int(i) for i in hit.nonzero().aminmax())
                    raise Overrun(f"{where}: bytes {first} to {last} {side} a tensor of {size} bytes were written")


_ORIGINAL: dict[tuple[Any, str], Callable[..., Tensor]] = {
    (owner, name): getattr(owner, name) for owner, name in PATCHED
}


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).name == "canaries.py":
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@contextmanager
def guard_allocations() -> Iterator[GuardedBuffers]:
    """Guard all allocations inside the context, in every thread, so that gradients are guarded too."""
    buffers = GuardedBuffers()

    def guarded_allocator(original: Callable[..., Tensor], zeros: bool) -> Callable[..., Tensor]:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            made = original(*args, **kwargs)
            plain = type(made) is Tensor and made.layout == torch.strided and not made.requires_grad
            if not plain or made.numel() == 0 or made.device.type not in GUARD:
                return made
            return buffers.empty_like(made, zeros)

        return allocate

    inherited = [(owner, name) for owner, name in PATCHED if name not in vars(owner)]
    for owner, name in PATCHED:
        setattr(owner, name, guarded_allocator(_ORIGINAL[owner, name], "zeros" in name))
    try:
        yield buffers
    finally:
        for owner, name in PATCHED:
            if (owner, name) in inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, _ORIGINAL[owner, name])
