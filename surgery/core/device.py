"""Where a conversion or a measurement runs.

What this process holds, and giving back what it no longer needs.

Faster float32 products on the CPU, where they cost no precision.

On processors with AVX-512 oneDNN multiplies float32 matrices twice as fast as the default library; torch
takes it when less precision is allowed, though it then uses none of that leave. Where it would (bf16 units),
a probe sees it, and everything stays as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from surgery.core.errors import SurgeryError


def choose_device(name: str | None) -> torch.device:
    """The one asked for, else a GPU where there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
        if device.type == "cuda":  # torch loads its GPU solvers at their first call, which threads must not race for
            torch.linalg.eigh(torch.eye(2, device=device))
    except (RuntimeError, AssertionError) as error:
        reason = re.sub(r"^CUDA error: ", "", str(error).splitlines()[0])
        raise SurgeryError(f"--device {name}: {reason}; use cpu, or cuda:0 where there is a GPU") from None
    if device.type == "meta":
        raise SurgeryError("--device meta holds no numbers; use cpu, or cuda:0 where there is a GPU")
    return device


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, work of this thread that does not wait for that of other threads; done when the context ends."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES = -3, 8 * 2**20


def return_freed_memory() -> None:
    """Have glibc give every freed block of eight megabytes or more back to the system at once. (Smaller ones it
    keeps: asking the system for each of them anew takes longer than a small model's arithmetic.)

    By default the limit grows to 32 MB with the blocks that are freed; weights and activations below it then
    lie between small blocks that stay, and a conversion of 36 layers of 20 MB holds 400 MB where 100 do.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library: it has its own ways
            ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def trim_memory() -> None:
    """Have glibc give back the pages between blocks still held: once a layer, so that what smaller blocks leave
    behind does not add up."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_rss() -> int | None:
    """Bytes of memory this process held at most; None where the system does not say.

    Linux keeps it for this program alone; ru_maxrss there starts at what the parent held when it forked.
    """
    status = Path("/proc/self/status")
    if status.is_file() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# Relative error of a float32 product of depth 512; rounding alone gives about 3e-7, bf16 inputs 3e-3.
FLOAT32_ERROR_LIMIT = 3e-6


@cache
def _reduced_precision_is_exact() -> bool:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 512, generator=generator) for _ in range(2))
    errors = []
    for x, y in ((a, b.mT), (a.mT, b), (a.mT.contiguous(), b)):
        exact = x.double() @ y.double()
        errors.append(float((x @ y - exact).norm() / exact.norm()))
    return max(errors) < FLOAT32_ERROR_LIMIT


@contextmanager
def fast_float32_matmul(device: torch.device) -> Iterator[None]:
    """Inside, float32 products on the CPU are as fast as float32 allows; elsewhere nothing changes."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller has set precision per backend
        before = None
    if device.type != "cpu" or before != "highest":
        yield
        return
    torch.set_float32_matmul_precision("medium")
    try:
        if not _reduced_precision_is_exact():
            torch.set_float32_matmul_precision(before)
        yield
    finally:
        torch.set_float32_matmul_precision(before)
