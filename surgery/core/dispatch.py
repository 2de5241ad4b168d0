"""Dispatch: reference PyTorch functions marked `@dispatched`, and fused kernels registered to replace them.

    @dispatched
    def btt_linear(x, right_cdbs, left_bcsa, bias, out): ...            the reference: defines the result, runs on the CPU

    @register_kernel(btt_linear, accepts=can, is_faster=does)           in kernels/, registered on import
    def btt_linear_triton(x, right_cdbs, left_bcsa, bias, out): ...

A call with a tensor on a GPU runs the first kernel that accepts the arguments and was measured to be faster for them;
any other call, and every call on a CPU, runs the reference. A kernel runs with the GPU of that tensor as the current one.
Kernels also compute gradients, of first order; under torch.func and torch.autograd.forward_ad the reference runs.

An op with a `call_key` selects once for all calls of one key. The modules with references never import kernels: the
package is scanned at the first call with a GPU tensor, and has no kernels if Triton is not installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from surgery.core.errors import SurgeryError, suggestion
from surgery.core.import_hooks import run_after_import

P = ParamSpec("P")
R = TypeVar("R")
PackageChoice = Literal["flash-qla", "fla", "flashinfer"]  # other packages, whose kernels run inside of ours
KernelChoice = Literal["measured", "kernel", "products", "reference", PackageChoice]
PACKAGE_CHOICES: tuple[PackageChoice, ...] = get_args(PackageChoice)

MAX_CALLS = 4096  # keys for which an op keeps its selection
MAX_SHOWN = 3  # tensors in a message about a call
NO_TRITON = "there are no kernels, because Triton is missing or would compile them incorrectly"
COMPILED = "no kernel takes the tensors of the compiled call"
PACKAGE = "surgery.kernels"
VARIABLE = "SURGERY_KERNELS"  # environment variable: the choice outside of `use_kernels`
_choice: Any = os.environ.get(VARIABLE, "measured")
_packages_allowed = True
_recorded_names: set[str] | None = None
_references: _References | None = None
_previewed: dict[str, str | None] | None = None


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
            if _previewed is not None:
                self._preview(_previewed, args, kwargs)
            return self.reference(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The recorded names are not read here: a graph would be compiled twice, for calls with and without them.
            kernel = self.select_kernel(*args, **kwargs)
            if kernel is None and self._is_refused(args, kwargs):
                note_reference(self.reference.__name__, COMPILED)
            return (self.reference if kernel is None else kernel.run)(*args, **kwargs)
        if self.call_key is not None and _recorded_names is None and not kwargs:
            key = self.call_key(*args)
            if key is not None:
                run = self.calls.get((key, _choice))
                return self._keep_selection((key, _choice), args)(*args) if run is None else run(*args)
        kernel = None if _is_transformed() else self.select_kernel(*args, **kwargs)
        if kernel is None:
            self._note_reference(args, kwargs)
            return self.reference(*args, **kwargs)
        if _recorded_names is not None:
            _recorded_names.add(self.reference.__name__)
        return (kernel.run if _gpus() < 2 else _on_its_gpu(kernel.run))(*args, **kwargs)

    def _keep_selection(self, key: Hashable, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the function that runs all calls of a key, selected for these arguments."""
        kernel = self.select_kernel(*args)
        run = self.reference if kernel is None else kernel.run
        if kernel is None:
            self._note_reference(args, {})
        if kernel is not None and kernel.bind is not None:
            run = kernel.bind(*args) or run
        if kernel is not None and _gpus() > 1:
            run = _on_its_gpu(run)
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
                if forced == "kernel" and not _on_gpu(args, kwargs):
                    _check_interpreter()
                return kernel
        return None

    def _is_refused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call on a GPU runs the reference although this op has kernels, or Triton is missing.

        A kernel that computes the call and was measured to be slower is no refusal.
        """
        if not _on_gpu(args, kwargs) or (load_kernels() and not self.kernels):
            return False
        return not self._is_accepted(args, kwargs)

    def _is_accepted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(kernel.accepts(*args, **kwargs) for kernel in self.kernels)

    def _preview(self, into: dict[str, str | None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add to the dict of `preview_kernels` whether a kernel accepts a call."""
        if load_kernels() and self.kernels and into.get(self.reference.__name__) is None:
            accepted = self._is_accepted(args, kwargs)
            into[self.reference.__name__] = None if accepted else _describe_call(self.reference, args, kwargs)

    def _note_reference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the active `record_references` about a call that runs the reference."""
        name = self.reference.__name__
        if _references is not None and name not in _references.found and self._is_refused(args, kwargs):
            note_reference(name, _describe_call(self.reference, args, kwargs) if load_kernels() else NO_TRITON)

    def _forced_implementation(self) -> str | None:
        """Return the implementation that every call must run, or None if measurements choose it."""
        if _choice not in get_args(KernelChoice):
            raise SurgeryError(
                f"environment variable {VARIABLE}={_choice!r} is not one of {', '.join(get_args(KernelChoice))}"
                f"{suggestion(str(_choice), get_args(KernelChoice))}"
            )
        if _choice in PACKAGE_CHOICES:
            return None
        if _choice == "products" and load_kernels() and all(k.implementation != "products" for k in self.kernels):
            return None
        return str(_choice)


def _check_interpreter() -> None:
    """Raise SurgeryError if Triton cannot run kernels on a CPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SurgeryError(
            f'{VARIABLE}=kernel, or use_kernels("kernel"), runs Triton kernels, and this call is on a CPU. Use a GPU; or '
            "set TRITON_INTERPRET=1 before Python starts, which interprets kernels slowly; or leave the choice out"
        )


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
        "flash-qla", "fla", "flashinfer"
                       this package's kernels where it is installed and correct (kernels/packages/contest.py), with no
                       comparison of times; everything else as with "measured"

    Outside of this context the environment variable SURGERY_KERNELS names the choice.
    """
    global _choice
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


def kernel_choice() -> str:
    """Return the choice of the active `use_kernels` or of SURGERY_KERNELS."""
    return str(_choice)


@contextmanager
def without_timed_choices() -> Iterator[None]:
    """Let no other package's kernel be chosen by its time while the context is active.

    For conversions, whose bytes a seed fixes: times differ from run to run, and each kernel rounds in its own way. A
    package that `use_kernels` or SURGERY_KERNELS names still runs.
    """
    global _packages_allowed
    before, _packages_allowed = _packages_allowed, False
    try:
        yield
    finally:
        _packages_allowed = before


def chooses_by_time() -> bool:
    """Return whether kernels may be chosen by times taken in this process."""
    return _packages_allowed


@contextmanager
def record_dispatch() -> Iterator[set[str]]:
    """Yield a set that collects the names of the functions replaced by kernels while the context is active."""
    global _recorded_names
    before, _recorded_names = _recorded_names, set()
    try:
        yield _recorded_names
    finally:
        _recorded_names = before


@contextmanager
def record_references(say: Callable[[str, str], None] | None = None) -> Iterator[dict[str, str]]:
    """Yield a dict that collects, while the context is active, the functions that run their reference on a GPU because
    no kernel takes the call: name -> reason, of the first such call.

    A reference that was measured to be faster is not collected. say: called with name and reason at the first such call
    of each function. Replays of a CUDA graph make no calls; torch.compile makes them while it traces.
    """
    global _references
    before, _references = _references, _References({}, say)
    try:
        yield _references.found
    finally:
        _references = before


class _References(NamedTuple):
    """Functions on the reference, name -> reason, and who is told about them."""

    found: dict[str, str]
    say: Callable[[str, str], None] | None


def reference_warning(name: str, reason: str) -> str:
    """Return the warning about a function that runs its reference on a GPU. name, reason: of `record_references`."""
    return (
        f"{name} runs its PyTorch reference on the GPU: {reason}. A reference takes 2 to 40 times as long as a kernel "
        "(kernels/tuning.json) and keeps more memory; `surgery inspect` lists which functions have kernels"
    )


def note_reference(name: str, reason: str) -> None:
    """Tell the active `record_references`, if there is one, about a function that runs its reference.

    torch.compile runs this function while it traces, and leaves it out of the graph.
    """
    if _references is not None and name not in _references.found:
        _references.found[name] = reason
        if _references.say is not None:
            _references.say(name, reason)


def _describe_call(reference: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return that no kernel takes a call, with names, dtypes and shapes of its first tensors."""
    shown: list[str] = []

    def collect(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            shown.append(f"{name} {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}")
        elif isinstance(value, (tuple, list)):
            for part in value:
                collect(name, part)

    for name, value in inspect.signature(reference).bind_partial(*args, **kwargs).arguments.items():
        collect(re.sub("_[A-Z0-9]+$", "", name), value)
    return f"no kernel takes {', '.join(shown[:MAX_SHOWN])}{', ..' if len(shown) > MAX_SHOWN else ''}"


@contextmanager
def preview_kernels() -> Iterator[dict[str, str | None]]:
    """Yield a dict of the functions with kernels that are called while the context is active: name -> None if a kernel
    accepts every call, else why none accepts one.

    The calls are on a CPU and run the reference. The dict stays empty if there are no kernels.
    """
    global _previewed
    before, _previewed = _previewed, {}
    try:
        yield _previewed
    finally:
        _previewed = before


def load_kernels() -> bool:
    """Import the kernels and return whether there are any. torch.compile treats the result as a constant."""
    return _import_kernels()


CONSTANT = (load_kernels, note_reference)  # functions whose results torch.compile takes as constants


def _mark_constant() -> None:
    import torch._dynamo

    dynamo: Any = torch._dynamo  # this function has no types
    for function in CONSTANT:
        dynamo.assume_constant_result(function)


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


def _is_transformed() -> bool:
    """Return whether a transform of torch.func, or torch.autograd.forward_ad, is active: kernels read the numbers of a
    tensor by its address, and would leave out its batch or its tangent."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@functools.cache
def _gpus() -> int:
    """Return how many GPUs this process sees."""
    return torch.cuda.device_count()


def _on_its_gpu(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes the GPU of its first tensor argument the current one while it calls `run`.

    Triton launches kernels on the current GPU; the layers of a model with a `device_map` lie on several.
    """

    def run_there(*args: Any, **kwargs: Any) -> Any:
        first = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)), None)
        gpu = first.get_device() if first is not None and first.is_cuda else -1
        if gpu < 0 or gpu == torch.cuda.current_device():
            return run(*args, **kwargs)
        with torch.cuda.device(gpu):
            return run(*args, **kwargs)

    return run_there
