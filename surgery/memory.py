"""What this process holds, and giving back what it no longer needs."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from pathlib import Path

M_MMAP_THRESHOLD, BLOCK = -3, 8 * 2**20


def return_freed_memory() -> None:
    """Have glibc give every freed block of eight megabytes or more back to the system at once. (Smaller ones it
    keeps: asking the system for each of them anew takes longer than a small model's arithmetic.)

    By default the limit grows to 32 MB with the blocks that are freed; weights and activations below it then
    lie between small blocks that stay, and a conversion of 36 layers of 20 MB holds 400 MB where 100 do.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library: it has its own ways
            ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, BLOCK)


def trim() -> None:
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
