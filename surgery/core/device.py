"""Device selection, process memory, and fast float32 matrix products on the CPU.

On processors with AVX-512, oneDNN multiplies float32 matrices twice as fast as the default library. PyTorch uses oneDNN
only if reduced float32 precision is allowed, although these kernels do not reduce it. A probe detects processors where
precision would drop (bf16 units); there the default stays.
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
from typing import Any

import torch

from surgery.core.errors import SurgeryError


def choose_device(name: str | None) -> torch.device:
    """Return the named device, or by default a GPU if there is one, else the CPU.

    Raises SurgeryError if the device cannot be used.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
        if device.type == "cuda":  # the first call loads torch's GPU solvers, which is not thread-safe
            torch.linalg.eigh(torch.eye(2, device=device))
    except (RuntimeError, AssertionError) as error:
        reason = re.sub(r"^CUDA error: ", "", str(error).splitlines()[0])
        raise SurgeryError(f"--device {name}: {reason}; use cpu, or cuda:0 if there is a GPU") from None
    if device.type == "meta":
        raise SurgeryError("--device meta stores no data; use cpu, or cuda:0 if there is a GPU")
    return device


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run this thread's GPU work on a CUDA stream of its own, synchronized on exit. Does nothing on other devices."""
    if device.type != "cuda":
        yield
        return
    stream_class: Any = torch.cuda.Stream  # its constructor has no types
    stream = stream_class(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def device_name(device: torch.device) -> str:
    """Return a name for reports: the GPU's model, or the device type and machine architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES = -3, 8 * 2**20


def return_freed_memory() -> None:
    """Make glibc return every freed block of at least 8 MB to the operating system at once.

    By default glibc raises this threshold up to 32 MB as blocks are freed. Freed weights and activations below the
    threshold then stay in the heap between small live blocks: converting 36 layers of 20 MB holds 400 MB instead of 100
    MB. Smaller blocks stay in the heap, because requesting them anew costs more time than a small model's arithmetic.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def trim_memory() -> None:
    """Make glibc return unused heap pages to the operating system. Called once per layer."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_rss() -> int | None:
    """Return the peak resident memory of this process in bytes, or None if the system does not report it.

    On Linux, VmHWM counts this program alone; ru_maxrss starts at the parent's memory at the time of the fork.
    """
    status = Path("/proc/self/status")
    if status.is_file() and (match := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(match[1]) * 1024
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
    """Return whether products under reduced-precision settings still have float32 accuracy on this processor."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 512, generator=generator) for _ in range(2))
    errors = []
    for x, y in ((a, b.mT), (a.mT, b), (a.mT.contiguous(), b)):
        exact = x.double() @ y.double()
        errors.append(float((x @ y - exact).norm() / exact.norm()))
    return max(errors) < FLOAT32_ERROR_LIMIT


# Parameters of a layer from which oneDNN saves time. Each of its products takes 20 microseconds to begin, and attention on
# a CPU runs several for each row and head: on rows of 48 tokens it takes ten times as long as with torch's own products.
ONEDNN_LAYER = 2**18


@contextmanager
def fast_float32_matmul(device: torch.device, layer_params: int) -> Iterator[None]:
    """Use oneDNN for float32 products on the CPU while the context is active, if it keeps float32 precision.

    layer_params: parameters of the largest layer. Small models keep torch's own products, which are faster for them.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the caller has set precision per backend
        before = None
    if device.type != "cpu" or before != "highest" or layer_params < ONEDNN_LAYER:
        yield
        return
    torch.set_float32_matmul_precision("medium")
    try:
        if not _reduced_precision_is_exact():
            torch.set_float32_matmul_precision(before)
        yield
    finally:
        torch.set_float32_matmul_precision(before)
