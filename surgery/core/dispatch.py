"""Dispatch: reference PyTorch functions marked `@dispatched`, and fused kernels registered to replace them.

    @dispatched
    def btt_linear(x, right_cdbs, left_bcsa, bias, out): ...            the reference: defines the result, runs on the CPU

    @register_kernel(btt_linear, accepts=can, is_faster=does)           in kernels/, registered on import
    def btt_linear_triton(x, right_cdbs, left_bcsa, bias, out): ...

A call with a tensor on a GPU runs the first kernel that accepts the arguments and was measured to be faster for them;
any other call, and every call on a CPU, runs the reference. Kernels also compute gradients. An op with a `call_key`
selects once for all calls of one key. The modules with references never import kernels: the package is scanned at the
first call with a GPU tensor, and has no kernels if Triton is not installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError, suggestion
from surgery.core.import_hooks import run_after_import

P = ParamSpec("P")
R = TypeVar("R")
KernelChoice = Literal["measured", "kernel", "products", "reference"]

MAX_CALLS = 4096  # keys for which an op keeps its selection
PACKAGE = "surgery.kernels"
VARIABLE = "SURGERY_KERNELS"  # environment variable: the choice outside of `use_kernels`
_choice: Any = os.environ.get(VARIABLE, "measured")
_recorded_names: set[str] | None = None


@dataclass(frozen=True)
class RegisteredKernel:
    """A kernel and the conditions of its use.

    accepts: returns whether the kernel is correct for the arguments. is_faster: returns whether it was measured to be
    faster for them than the reference and the op's other kernels. implementation: its name in kernels/tuning.json.
    bind: returns a function that computes what `run` does for all calls with the `call_key` of its arguments, with less
    work at each call; None where it is `run`.
    """

    run: Callable[..., Any]
    accepts: Callable[..., bool]
    is_faster: Callable[..., bool]
    implementation: str = "kernel"
    bind: Callable[..., Callable[..., Any] | None] | None = None


class DispatchedOp:
    """A reference function and the kernels that may replace it. Called like the reference.

    call_key: returns what the selection for a call depends on, or None for a call whose selection is not kept. The keys
    and what is kept hold no tensors.
    """

    def __init__(self, reference: Callable[..., Any], call_key: Callable[..., Hashable | None] | None = None):
        self.reference, self.call_key = reference, call_key
        self.kernels: list[RegisteredKernel] = []
        self.calls: dict[Hashable, Callable[..., Any]] = {}  # (key, choice) -> what runs calls of this key
        functools.update_wrapper(self, reference)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the selected kernel, or the reference."""
        if _choice == "reference" or (_choice == "measured" and not _on_gpu(args, kwargs)):
            return self.reference(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The recorded names are not read here: a graph would be compiled twice, for calls with and without them.
            kernel = self.select_kernel(*args, **kwargs)
            return (self.reference if kernel is None else kernel.run)(*args, **kwargs)
        if self.call_key is not None and _recorded_names is None and not kwargs:
            key = self.call_key(*args)
            if key is not None:
                run = self.calls.get((key, _choice))
                return self._keep_selection((key, _choice), args)(*args) if run is None else run(*args)
        kernel = self.select_kernel(*args, **kwargs)
        if kernel is None:
            return self.reference(*args, **kwargs)
        if _recorded_names is not None:
            _recorded_names.add(self.reference.__name__)
        return kernel.run(*args, **kwargs)

    def _keep_selection(self, key: Hashable, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the function that runs all calls of a key, selected for these arguments."""
        kernel = self.select_kernel(*args)
        run = self.reference if kernel is None else kernel.run
        if kernel is not None and kernel.bind is not None:
            run = kernel.bind(*args) or run
        if len(self.calls) >= MAX_CALLS:
            self.calls.clear()
        self.calls[key] = run
        return run

    def select_kernel(self, *args: Any, **kwargs: Any) -> RegisteredKernel | None:
        """Return the kernel that a call with these arguments runs, or None for the reference."""
        forced = None if _choice == "measured" else self._forced_implementation()
        if forced == "reference" or (forced is None and not _on_gpu(args, kwargs)):
            return None
        load_kernels()
        for kernel in self.kernels:
            if kernel.accepts(*args, **kwargs) and (
                kernel.is_faster(*args, **kwargs) if forced is None else kernel.implementation == forced
            ):
                return kernel
        return None

    def _forced_implementation(self) -> str | None:
        """Return the implementation that every call must run, or None if measurements choose it."""
        if _choice not in get_args(KernelChoice):
            raise SurgeryError(
                f"environment variable {VARIABLE}={_choice!r} is not one of {', '.join(get_args(KernelChoice))}"
                f"{suggestion(str(_choice), get_args(KernelChoice))}"
            )
        if _choice == "products" and load_kernels() and all(k.implementation != "products" for k in self.kernels):
            return None
        return str(_choice)


def dispatched(reference: Callable[P, R]) -> Callable[P, R]:
    """Mark a reference function as replaceable by kernels (decorator)."""
    return DispatchedOp(reference)


def dispatched_by(call_key: Callable[..., Hashable | None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a reference function as replaceable by kernels that are selected once for each key (decorator).

    See `DispatchedOp`.
    """
    return lambda reference: DispatchedOp(reference, call_key)


def register_kernel(
    replaced: Callable[..., Any],
    accepts: Callable[..., bool],
    is_faster: Callable[..., bool] = lambda *_, **__: True,
    implementation: str = "kernel",
    bind: Callable[..., Callable[..., Any] | None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a kernel with the same signature as the reference `replaced` (decorator). See `RegisteredKernel`."""
    assert isinstance(replaced, DispatchedOp), f"{replaced} is not a dispatched function; decorate it with @dispatched"

    def add(kernel: Callable[P, R]) -> Callable[P, R]:
        replaced.calls.clear()
        replaced.kernels.append(RegisteredKernel(kernel, accepts, is_faster, implementation, bind))
        replaced.kernels.sort(
            key=lambda known: known.implementation != "original"
        )  # implementations named "original" are tried first
        return kernel

    return add


@contextmanager
def use_kernels(choice: KernelChoice) -> Iterator[None]:
    """Choose implementations while the context is active.

    choice:
        "measured"     the fastest implementation according to the measurements; the default
        "kernel"       this project's kernel wherever it accepts the arguments, also on the CPU (with TRITON_INTERPRET=1)
        "products"     PyTorch's batched products for BTT and Monarch linears; other functions as with "measured"
        "reference"    no kernels

    Outside of this context the environment variable SURGERY_KERNELS names the choice.
    """
    global _choice
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


@contextmanager
def record_dispatch() -> Iterator[set[str]]:
    """Yield a set that collects the names of the functions replaced by kernels while the context is active."""
    global _recorded_names
    before, _recorded_names = _recorded_names, set()
    try:
        yield _recorded_names
    finally:
        _recorded_names = before


def load_kernels() -> bool:
    """Import the kernels and return whether there are any. torch.compile treats the result as a constant."""
    return _import_kernels()


def _mark_constant() -> None:
    import torch._dynamo

    dynamo: Any = torch._dynamo  # this function has no types
    dynamo.assume_constant_result(load_kernels)


run_after_import("torch._dynamo", _mark_constant)  # torch._dynamo takes seconds to import


@functools.cache
def _import_kernels() -> bool:
    """Import all kernels once. Return False if Triton is missing or would compile them incorrectly."""
    if importlib.util.find_spec("triton") is None or not importlib.import_module(f"{PACKAGE}.ptxas").use_sound_ptxas():
        return False
    for info in pkgutil.walk_packages(importlib.import_module(PACKAGE).__path__, f"{PACKAGE}."):
        importlib.import_module(info.name)
    return True


def _on_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the first tensor argument is on an NVIDIA GPU."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            return arg.is_cuda and torch.version.hip is None
    return False
