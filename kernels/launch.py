"""Launches of one compiled kernel again and again: what Triton does at each call to find it, some 20 microseconds, once.

    spread = Launch(spread_kernel, grid, sizes, options)        # all but the tensors, kept in a plan
    spread(x, core, z)

Triton compiles for each pointer's dtype and whether it is aligned to 16 bytes, and for what it sees in integers: the
former two make the key here, the integers belong to the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CachedLaunch:
    """sizes: integers that follow the tensors. options: constants by name, and num_warps and the like."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], sizes: tuple[int, ...], options: dict[str, Any]):
        self.kernel, self.grid, self.sizes, self.options = kernel, (*grid, 1, 1)[:3], sizes, options
        constants = [options[name] for name in kernel.arg_names if name in options]
        self.rest = (*sizes, *constants)
        self.known: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        if torch.compiler.is_compiling():  # traced, tensors have no address
            self._slow(tensors)
            return None
        key = (tensors[0].get_device(), *[(t.dtype, t.data_ptr() & 15 == 0) for t in tensors])
        known = self.known.get(key)
        if known is not None:
            try:
                return known(*tensors, *self.rest)
            except TypeError:  # another Triton hands arguments over in another way, and says so before it launches
                self.known[key] = lambda *args: self._slow(args[: len(tensors)])
                return self._slow(tensors)
        compiled = self._slow(tensors)
        if compiled is not None:  # the interpreter compiles nothing
            self.known[key] = compiled[self.grid]
        return None

    def _slow(self, tensors: tuple[Tensor, ...]) -> Any:
        return self.kernel[self.grid](*tensors, *self.sizes, **self.options)
