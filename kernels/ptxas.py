"""Choose the ptxas that assembles the kernels, because ptxas 12.8 compiles some of them wrongly for Hopper GPUs.

ptxas 12.8, which Triton 3.4, 3.5 and 3.6 use for Hopper, moves the computation of an operand's address out of a loop,
to a place before the instruction that it starts from. The kernel then reads a uniform register that nothing has
written, and all rows of a tile but the first 16 come from elsewhere in shared memory. It happens at any optimization
level where two products of different widths share an address, and not with ptxas 12.4, 12.9 and 13.0. Triton 3.6 has
ptxas 12.9 for Blackwell, which assembles Hopper's code here, too. With Triton 3.4 and 3.5, the CUDA installation of the
machine is searched. tests/kernels/test_kernel_machine_code.py looks for such reads in the kernels' machine code.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HOPPER = (9, 0)
BROKEN_VERSION = "12.8"


def use_sound_ptxas() -> bool:
    """Return whether kernels are compiled correctly here, after a sound ptxas was set for the whole process if Triton's
    own is broken and the user has not named one (TRITON_PTXAS_PATH). Warn if there is none."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return True
    nvidia = nvidia_knobs()
    if nvidia is None or nvidia.ptxas.version != BROKEN_VERSION:
        return True
    path = None if os.environ.get("TRITON_PTXAS_PATH") else next(sound_ptxas_paths(nvidia), None)
    if path is None:
        warnings.warn(
            f"surgery's kernels are disabled: {nvidia.ptxas.path} is ptxas {BROKEN_VERSION}, which compiles them "
            "wrongly for Hopper GPUs. "
            "The PyTorch reference runs instead, which is slower. Upgrade Triton (pip install 'triton>=3.6'), or set "
            "another ptxas: "
            "TRITON_PTXAS_PATH=/usr/local/cuda-12.9/bin/ptxas",
            stacklevel=2,
        )
        return False
    set_ptxas(nvidia, path)
    return True


def nvidia_knobs() -> Any:
    """Return Triton's settings for NVIDIA, or None before Triton 3.4, which introduced them and ptxas 12.8."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.nvidia


def sound_ptxas_paths(nvidia: Any) -> Iterator[str]:
    """Yield paths of sound versions, Triton's own first.

    None is newer than the CUDA release that PyTorch was built for: the driver might not load its output.
    """
    tools = [getattr(nvidia, "ptxas_blackwell", None)]
    tool_type = type(nvidia.ptxas)
    homes = [Path(home) / "bin" / "ptxas" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    tools += [tool_type.from_path(str(path)) for path in (shutil.which("ptxas"), *homes) if path]
    newest = parse_version(torch.version.cuda or "12.9")[0]
    for tool in tools:
        if (
            tool is not None
            and parse_version(BROKEN_VERSION) < parse_version(tool.version)
            and parse_version(tool.version)[0] <= max(newest, 12)
        ):
            yield tool.path


def parse_version(version: str) -> tuple[int, ...]:
    """Return (major, minor) of a version such as "12.8"."""
    return tuple(int(number) for number in version.split(".")[:2])


def set_ptxas(nvidia: Any, path: str) -> None:
    """Set Triton's ptxas and clear the cached version of the previous one, which is part of the keys of Triton's kernel
    cache.
    """
    from triton.backends.nvidia import compiler

    nvidia.ptxas = path
    for cached in (getattr(compiler, "get_ptxas_version", None), compiler.CUDABackend.hash):
        clear = getattr(cached, "cache_clear", None)
        if clear is not None:
            clear()
