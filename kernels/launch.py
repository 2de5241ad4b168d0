"""Repeated launches of one compiled kernel, without the 20 microseconds in which Triton looks it up at each call.

    product = CachedLaunch(product_kernel, grid, sizes, options)        # all arguments but the tensors; kept in a plan
    product(x, core, z)

Triton compiles a kernel for the dtype of each pointer, for whether it is aligned to 16 bytes, and for properties of the integers. The
first two are the key of the lookup here; the integers belong to the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CachedLaunch:
    """A kernel with its grid and all arguments but the tensors, which come first. sizes: the integers behind the tensors. options:
    compile-time constants by name, num_warps and the like."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], sizes: tuple[int, ...], options: dict[str, Any]):
        self.kernel, self.grid, self.sizes, self.options = kernel, (*grid, 1, 1)[:3], sizes, options
        constants = [options[name] for name in kernel.arg_names if name in options]
        self.rest = (*sizes, *constants)
        self.launchers: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel."""
        if torch.compiler.is_compiling():  # traced tensors have no address
            self._launch_by_triton(tensors)
            return None
        key = (tensors[0].get_device(), *[(t.dtype, t.data_ptr() & 15 == 0) for t in tensors])
        launcher = self.launchers.get(key)
        if launcher is not None:
            try:
                return launcher(*tensors, *self.rest)
            except TypeError:  # raised before the launch by a Triton version whose launchers take other arguments
                self.launchers[key] = lambda *args: self._launch_by_triton(args[: len(tensors)])
                return self._launch_by_triton(tensors)
        compiled = self._launch_by_triton(tensors)
        if compiled is not None:  # the interpreter compiles nothing
            self.launchers[key] = compiled[self.grid]
        return None

    def _launch_by_triton(self, tensors: tuple[Tensor, ...]) -> Any:
        """Launch through Triton's own lookup and return the compiled kernel."""
        return self.kernel[self.grid](*tensors, *self.sizes, **self.options)
