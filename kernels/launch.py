"""Repeated launches of one compiled kernel, without the Python in which Triton looks it up and calls its hooks at each
call.

    product = CachedLaunch(product_kernel, grid, sizes, options)        # all arguments but the tensors; kept in a plan
    product(x, core, z)

Triton compiles a kernel for the dtype of each pointer, for whether it is aligned to 16 bytes, and for properties of the
integers. The first two are the key of the lookup here; the integers belong to the launch.

    sums = open_launch(level_kernel, {"C": 64, "num_warps": 4})         # compile-time constants; kept for these
    sums((rows, groups), GroupTensor.from_tensor(k), states, level)     # a grid, and arguments in the kernel's order

is for kernels whose grid and integers change from call to call: what Triton compiles for is read from the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
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


class OpenLaunch:
    """A kernel with its compile-time constants and launch options, by name. Grid and arguments are those of each call:
    tensors, integers, floats, and tuples of them, in the kernel's order before its constants.

    launchers: by what Triton compiles for (`describe_arguments`).
    """

    def __init__(self, kernel: Any, options: dict[str, Any]):
        self.kernel, self.options = kernel, options
        names = list(getattr(kernel, "arg_names", ()))
        self.constants = tuple(options[name] for name in names if name in options)
        fixed = getattr(kernel, "do_not_specialize", None) or ()  # the interpreter's kernels have none
        self.unread = frozenset(names.index(x) if isinstance(x, str) else x for x in fixed)
        self.launchers: dict[Hashable, Callable[..., None]] = {}
        self.are_refused = False  # by a Triton version whose launchers take other arguments

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch the kernel on a grid of one to three axes."""
        if self.are_refused or torch.compiler.is_compiling():  # traced tensors have no address
            self.kernel[grid](*arguments, **self.options)
            return
        key: list[Hashable] = []
        addressed = describe_arguments(arguments, key, self.unread)
        launcher = self.launchers.get(tuple(key))
        if launcher is None:
            compiled = self.kernel[grid](*arguments, **self.options)
            if compiled is not None:  # the interpreter compiles nothing
                self.launchers[tuple(key)] = open_launcher(compiled)
            return
        try:
            launcher((*grid, 1, 1)[:3], *addressed, *self.constants)
        except TypeError:  # raised before the launch
            self.are_refused = True
            self.kernel[grid](*arguments, **self.options)


@lru_cache(maxsize=1024)
def _open_launch(kernel: Any, names: tuple[str, ...], values: tuple[Hashable, ...]) -> OpenLaunch:
    return OpenLaunch(kernel, dict(zip(names, values)))


def open_launch(kernel: Any, options: dict[str, Any]) -> OpenLaunch:
    """Return the launch of a kernel with these constants and options, the same one for equal ones."""
    return _open_launch(kernel, tuple(options), tuple(options.values()))


NOTHING: frozenset[int] = frozenset()


def describe_arguments(arguments: tuple[Any, ...], key: list[Hashable], unread: frozenset[int]) -> list[Any]:
    """Append to the key what Triton compiles for of each argument, and return the arguments with addresses in place of
    tensors, which its launcher takes as they are.

    That is the dtype of a tensor and whether 16 divides its address; of an integer how many bits it takes, and whether it
    is 1 or 16 divides it, unless its place is among `unread` (`do_not_specialize`); and the device of the first tensor,
    which the kernel's first argument is or holds. A tensor on a CPU is refused by Triton at the first launch only.
    """
    addressed: list[Any] = []
    for i, x in enumerate(arguments):
        if isinstance(x, Tensor):
            if not key:
                key.append(x.get_device())
            address = x.data_ptr()
            key.append((x.dtype, address & 15 == 0))
            addressed.append(address)
        elif isinstance(x, tuple):
            addressed.append(tuple(describe_arguments(x, key, NOTHING)))
        else:
            kind: Any = type(x)
            if kind is not int:
                key.append(kind)
            else:
                size = 0 if -(2**31) <= x < 2**31 else 2 if x < 2**63 else 4
                key.append(size if i in unread else size + 1 if x & 15 == 0 else -1 if x == 1 else size)
            addressed.append(x)
    return addressed


def open_launcher(compiled: Any) -> Callable[..., None]:
    """Return a function of a grid of three axes and the kernel's arguments that launches a compiled kernel as
    `compiled[grid]` does.

    While no launch hook is registered (profilers register some), it passes no hooks and builds no metadata for them,
    which Triton 3.4 and later do at each launch. Other versions launch through `compiled[grid]`.
    """
    if not _launches_directly(compiled):
        return lambda grid, *args: compiled[grid](*args)
    runtime: Any = triton.knobs.runtime
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

    def launch(grid: tuple[int, int, int], *args: Any) -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            compiled[grid](*args)
        else:
            run(*grid, current_stream(), function, packed, None, None, None, *args)

    return launch


def bind_launcher(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return `open_launcher`'s function for this grid."""
    return partial(open_launcher(compiled), grid)


def _launches_directly(compiled: Any) -> bool:
    """Return whether this version of Triton has what a launch without its own one takes."""
    runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
    parts = (getattr(compiled, name, None) for name in ("run", "function", "packed_metadata"))
    return _has_hook_chains(runtime) and all(part is not None for part in parts) and _takes_stream()


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
