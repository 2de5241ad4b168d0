"""Compile the Triton kernels of a computation side by side, before it runs.

    compile_kernels(lambda: loss(model, batch).backward(), device)

Triton compiles a kernel when it is first launched, so that a training step on a new machine compiles its kernels one
after the other: about 40 of them, and 44 s, for a step with log-linear attention. Here the computation runs once with
every launch skipped; the kernels that it asks for are compiled in threads, most of which time is spent outside of
Python. The results of that run are meaningless and must be dropped. It keeps no activations: its backward pass reads
memory that was never written.

Compiled kernels are kept on disk by Triton itself, in `cache_folder()`, so that later processes load them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MAX_THREADS = 32
ALIGNMENT = 16  # bytes: Triton compiles a kernel for addresses that are multiples of it, and another for others


def compile_kernels(run: Callable[[], Any], device: torch.device) -> int:
    """Run `run` with the launches of Triton kernels skipped, and compile those kernels in parallel.

    Return the number of kernels that were compiled or loaded from disk. Returns 0 without running `run` if the device
    is no NVIDIA GPU or this version of Triton cannot compile in parallel (before 3.4), and 0 if `run` fails: the real
    computation will say why. The state of the random number generators is kept.
    """
    mode_type, kernel_type = _triton_types()
    if device.type != "cuda" or torch.version.hip is not None or mode_type is None or kernel_type is None:
        return 0
    with torch.random.fork_rng([device]):
        try:
            return _compile(run, mode_type, kernel_type)
        except Exception:
            return 0


def _compile(run: Callable[[], Any], mode_type: Any, kernel_type: Any) -> int:
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "compile") as pool, mode_type(pool) as mode:
        # Backward functions run in this thread: the mode is a context variable, which autograd's threads do not see.
        with torch.autograd.set_multithreading_enabled(False), _skipped_launches(kernel_type), _dropped_activations():
            run()
        return len(mode.raw_futures)


def cache_folder() -> str:
    """Return the folder in which Triton keeps compiled kernels, or "" without Triton."""
    try:
        from triton import knobs
    except ImportError:
        return ""
    return str(knobs.cache.dir)


def _dropped_activations() -> Any:
    """Return a context in which autograd saves the layouts of floating-point tensors, and allocates such tensors,
    uninitialized, in the backward pass. Parameters and integers are saved as they are.
    """
    return torch.autograd.graph.saved_tensors_hooks(_describe, _allocate)


def _describe(t: Tensor) -> Any:
    if isinstance(t, nn.Parameter) or type(t) is not Tensor or not t.is_floating_point():
        return t
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % ALIGNMENT // t.element_size()


def _allocate(saved: Any) -> Tensor:
    """Return the saved tensor, or one of the saved layout and alignment."""
    if isinstance(saved, Tensor):
        return saved
    shape, strides, dtype, device, offset = saved
    last = sum((size - 1) * stride for size, stride in zip(shape, strides))
    elements = offset + max(0, last + 1)
    return torch.empty(elements, dtype=dtype, device=device).as_strided(shape, strides, offset)


@contextmanager
def _skipped_launches(kernel_type: Any) -> Iterator[None]:
    """Let every launch compile its kernel, and no more."""
    run = kernel_type.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **kwargs)

    kernel_type.run = compile_only
    try:
        yield
    finally:
        kernel_type.run = run


def _triton_types() -> tuple[Any, Any]:
    """Return (triton.AsyncCompileMode, triton.JITFunction), or None for each that this Triton does not have."""
    try:
        import triton
    except ImportError:
        return None, None
    return getattr(triton, "AsyncCompileMode", None), getattr(triton, "JITFunction", None)
