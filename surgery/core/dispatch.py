"""Functions of the maths that kernels may stand in for.

    @op
    def btt_linear(x, right_cdbs, left_bcsa, bias, out): ...         the reference: the CPU path, and what is right

    @kernel_for(btt_linear, accepts=can, is_faster=does)                  in kernels/, which registers by being imported
    def btt_linear_triton(x, right_cdbs, left_bcsa, bias, out): ...

A call goes to the first kernel that accepts the arguments, and, of kernels left to choose, is known to win there; else to the reference.
Kernels take over gradients as well. The maths never imports them: the folder is scanned when a tensor on a GPU first
comes by, and where Triton is not installed it stays empty.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from surgery.core.import_hooks import run_after_import

P = ParamSpec("P")
R = TypeVar("R")
KernelChoice = Literal["measured", "kernel", "reference"]

PACKAGE = "surgery.kernels"
_choice: KernelChoice = "measured"
_recorded_names: set[str] | None = None


@dataclass(frozen=True)
class RegisteredKernel:
    """`accepts`: whether it is right for these arguments. `is_faster`: whether it is measured to be faster there than the
    reference and than other kernels of the op. `implementation`: what kernels/tuning.json calls it."""

    run: Callable[..., Any]
    accepts: Callable[..., bool]
    is_faster: Callable[..., bool]
    implementation: str = "kernel"


class DispatchedOp:
    """A reference and its kernels; called like the reference."""

    def __init__(self, reference: Callable[..., Any]):
        self.reference = reference
        self.kernels: list[RegisteredKernel] = []
        functools.update_wrapper(self, reference)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kernel = self.select_kernel(*args, **kwargs)
        if kernel is None:
            return self.reference(*args, **kwargs)
        if _recorded_names is not None:
            _recorded_names.add(self.reference.__name__)
        return kernel.run(*args, **kwargs)

    def select_kernel(self, *args: Any, **kwargs: Any) -> RegisteredKernel | None:
        """The kernel that a call with these arguments goes to, None for the reference."""
        if _choice == "reference" or (_choice == "measured" and not _on_gpu(args, kwargs)):
            return None
        load_kernels()
        for kernel in self.kernels:
            if kernel.accepts(*args, **kwargs) and (
                kernel.implementation == "kernel" if _choice == "kernel" else kernel.is_faster(*args, **kwargs)
            ):
                return kernel
        return None


def dispatched(reference: Callable[P, R]) -> Callable[P, R]:
    """Makes a function one that kernels may stand in for."""
    return DispatchedOp(reference)


def register_kernel(
    replaced: Callable[..., Any],
    accepts: Callable[..., bool],
    is_faster: Callable[..., bool] = lambda *_, **__: True,
    implementation: str = "kernel",
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers a function of the same arguments, see `RegisteredKernel`."""
    assert isinstance(replaced, DispatchedOp), f"{replaced} is no op; decorate it with @op"

    def add(kernel: Callable[P, R]) -> Callable[P, R]:
        replaced.kernels.append(RegisteredKernel(kernel, accepts, is_faster, implementation))
        replaced.kernels.sort(key=lambda known: known.implementation != "original")  # which speaks first
        return kernel

    return add


@contextmanager
def use_kernels(choice: KernelChoice) -> Iterator[None]:
    """ "reference": no kernels; "kernel": wherever a kernel of ours accepts, measured to win or not, on a CPU too (Triton's
    interpreter, TRITON_INTERPRET=1); "measured": how it is otherwise."""
    global _choice
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


@contextmanager
def record_dispatch() -> Iterator[set[str]]:
    """Names of the functions that kernels stood in for meanwhile."""
    global _recorded_names
    before, _recorded_names = _recorded_names, set()
    try:
        yield _recorded_names
    finally:
        _recorded_names = before


def load_kernels() -> bool:
    """Whether there are kernels. torch.compile calls this once and takes the answer for a constant."""
    return _import_kernels()


def _mark_constant() -> None:
    import torch._dynamo

    torch._dynamo.assume_constant_result(load_kernels)


run_after_import("torch._dynamo", _mark_constant)  # importing it for the decorator alone would take seconds


@functools.cache
def _import_kernels() -> bool:
    """Imports every kernel, once; none where Triton is not installed or would compile them wrongly."""
    if importlib.util.find_spec("triton") is None or not importlib.import_module(f"{PACKAGE}.ptxas").use_sound_ptxas():
        return False
    for info in pkgutil.walk_packages(importlib.import_module(PACKAGE).__path__, f"{PACKAGE}."):
        importlib.import_module(info.name)
    return True


def _on_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """By the first tensor."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            return arg.is_cuda and torch.version.hip is None
    return False
