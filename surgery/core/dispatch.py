"""Functions of the maths that kernels may stand in for.

    @op
    def btt_linear(x, right_cdbs, left_bcsa, bias, out): ...         the reference: the CPU path, and what is right

    @kernel_for(btt_linear, accepts=can, wins=does)                  in kernels/, which registers by being imported
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

from surgery.core.import_hooks import after_import

P = ParamSpec("P")
R = TypeVar("R")
Choice = Literal["measured", "kernel", "reference"]

PACKAGE = "surgery.kernels"
_choice: Choice = "measured"
_watched: set[str] | None = None


@dataclass(frozen=True)
class Kernel:
    """`accepts`: whether it is right for these arguments. `wins`: whether it is measured to be faster there than the
    reference and than other kernels of the op. `way`: what kernels/tuning.json calls it."""

    run: Callable[..., Any]
    accepts: Callable[..., bool]
    wins: Callable[..., bool]
    way: str = "kernel"


class Op:
    """A reference and its kernels; called like the reference."""

    def __init__(self, reference: Callable[..., Any]):
        self.reference = reference
        self.kernels: list[Kernel] = []
        functools.update_wrapper(self, reference)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kernel = self.stand_in(*args, **kwargs)
        if kernel is None:
            return self.reference(*args, **kwargs)
        if _watched is not None:
            _watched.add(self.reference.__name__)
        return kernel.run(*args, **kwargs)

    def stand_in(self, *args: Any, **kwargs: Any) -> Kernel | None:
        """The kernel that a call with these arguments goes to, None for the reference."""
        if _choice == "reference" or (_choice == "measured" and not _on_gpu(args, kwargs)):
            return None
        found()
        for kernel in self.kernels:
            if kernel.accepts(*args, **kwargs) and (
                kernel.way == "kernel" if _choice == "kernel" else kernel.wins(*args, **kwargs)
            ):
                return kernel
        return None


def op(reference: Callable[P, R]) -> Callable[P, R]:
    """Makes a function one that kernels may stand in for."""
    return Op(reference)


def kernel_for(
    replaced: Callable[..., Any],
    accepts: Callable[..., bool],
    wins: Callable[..., bool] = lambda *_, **__: True,
    way: str = "kernel",
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers a function of the same arguments, see `Kernel`."""
    assert isinstance(replaced, Op), f"{replaced} is no op; decorate it with @op"

    def add(kernel: Callable[P, R]) -> Callable[P, R]:
        replaced.kernels.append(Kernel(kernel, accepts, wins, way))
        replaced.kernels.sort(key=lambda known: known.way != "original")  # which speaks first
        return kernel

    return add


@contextmanager
def choose(choice: Choice) -> Iterator[None]:
    """ "reference": no kernels; "kernel": wherever a kernel of ours accepts, measured to win or not, on a CPU too (Triton's
    interpreter, TRITON_INTERPRET=1); "measured": how it is otherwise."""
    global _choice
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


@contextmanager
def watched() -> Iterator[set[str]]:
    """Names of the functions that kernels stood in for meanwhile."""
    global _watched
    before, _watched = _watched, set()
    try:
        yield _watched
    finally:
        _watched = before


def found() -> bool:
    """Whether there are kernels. torch.compile calls this once and takes the answer for a constant."""
    return _found()


def _mark_constant() -> None:
    import torch._dynamo

    torch._dynamo.assume_constant_result(found)


after_import("torch._dynamo", _mark_constant)  # importing it for the decorator alone would take seconds


@functools.cache
def _found() -> bool:
    """Imports every kernel, once; none where Triton is not installed or would compile them wrongly."""
    if importlib.util.find_spec("triton") is None or not importlib.import_module(f"{PACKAGE}.ptxas").settled():
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
