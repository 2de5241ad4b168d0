"""Repeated launches of one compiled kernel, without the Python in which Triton looks it up and calls its hooks at each
call.

    product = CachedLaunch(product_kernel, grid, sizes, options)        # all arguments but the tensors; kept in a plan
    product(x, core, z)

Triton compiles a kernel for the dtype of each pointer, for whether it is aligned to 16 bytes, and for properties of the
integers. The first two are the key of the lookup here; the integers belong to the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor


class CachedLaunch:
    """A kernel with its grid and all arguments but the tensors, which come first. sizes: the integers behind the
    tensors. options: compile-time constants by name, num_warps and the like."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], sizes: tuple[int, ...], options: dict[str, Any]):
        self.kernel, self.grid, self.sizes, self.options = kernel, (*grid, 1, 1)[:3], sizes, options
        constants = [options[name] for name in kernel.arg_names if name in options]
        self.rest = (*sizes, *constants)
        self.launchers: dict[tuple[Any, ...], Callable[..., None]] = {}
        self.are_refused = False  # by a Triton version whose launchers take other arguments

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel."""
        if self.are_refused or torch.compiler.is_compiling():  # traced tensors have no address
            self._launch_by_triton(tensors)
            return None
        addresses, dtypes = 0, []
        for tensor in tensors:
            addresses |= tensor.data_ptr()
            dtypes.append(tensor.dtype)
        key: tuple[Any, ...] = (tensors[0].get_device(), *dtypes)
        if addresses & 15:
            key = (*key, *[tensor.data_ptr() & 15 == 0 for tensor in tensors])
        launcher = self.launchers.get(key)
        if launcher is not None:
            try:
                return launcher(*tensors, *self.rest)
            except TypeError:  # raised before the launch
                self.are_refused = True
                self.launchers.clear()
                return self._launch_by_triton(tensors)
        compiled = self._launch_by_triton(tensors)
        if compiled is not None:  # the interpreter compiles nothing
            self.launchers[key] = bind_launcher(compiled, self.grid)
        return None

    def bind(self, *tensors: Tensor) -> Callable[..., None]:
        """Return the launch for all tensors with the dtypes of these, on their device, outside of torch.compile.

        It looks at the addresses alone and hands them to Triton's launcher, which asks the driver about every tensor
        but takes an integer as it is.
        """
        key = (tensors[0].get_device(), *[tensor.dtype for tensor in tensors])
        find, rest = self.launchers.get, self.rest

        def launch(*tensors: Tensor) -> None:
            addresses, together = [], 0
            for tensor in tensors:
                address = tensor.data_ptr()
                addresses.append(address)
                together |= address
            launcher = None if together & 15 else find(key)
            if launcher is None:
                return self(*tensors)
            try:
                return launcher(*addresses, *rest)
            except TypeError:  # raised before the launch; `__call__` finds out whether its launcher takes tensors
                return self(*tensors)

        return launch

    def _launch_by_triton(self, tensors: tuple[Tensor, ...]) -> Any:
        """Launch through Triton's own lookup and return the compiled kernel."""
        return self.kernel[self.grid](*tensors, *self.sizes, **self.options)


def bind_launcher(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return a function of the kernel's arguments that launches a compiled kernel as `compiled[grid]` does.

    While no launch hook is registered (profilers register some), it passes no hooks and builds no metadata for them,
    which Triton 3.4 and later do at each launch. Other versions launch through `compiled[grid]`.
    """
    by_triton: Callable[..., None] = compiled[grid]
    runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
    run, function, packed = (getattr(compiled, name, None) for name in ("run", "function", "packed_metadata"))
    if not _has_hook_chains(runtime) or run is None or function is None or packed is None:
        return by_triton
    x, y, z = grid

    def launch(*args: Any) -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            return by_triton(*args)
        run(x, y, z, current_stream(), function, packed, None, None, None, *args)
        return None

    return launch if _takes_stream() else by_triton


def _has_hook_chains(runtime: Any) -> bool:
    """Return whether Triton's launch hooks are lists of functions, as from Triton 3.4 on."""
    return all(
        isinstance(getattr(getattr(runtime, name, None), "calls", None), list)
        for name in ("launch_enter_hook", "launch_exit_hook")
    )


def _takes_stream() -> bool:
    return all(hasattr(torch._C, name) for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"))


def current_stream() -> int:
    """Return the handle of the current device's current stream."""
    core: Any = torch._C  # these functions have no types in builds without CUDA
    stream: int = core._cuda_getCurrentRawStream(core._cuda_getDevice())
    return stream
