"""Which ptxas turns kernels into machine code, so that what they compute on a Hopper GPU is right.

ptxas 12.8, which Triton 3.4, 3.5 and 3.6 bring for Hopper, moves the address of a product's operand out of a loop and before
the instruction that it starts from: a uniform register is read that nothing has written, and all but the first 16 rows of
a tile come from elsewhere in shared memory. It happens where two products of different widths share an address, at any
optimisation level; not with ptxas 12.4, 12.9 and 13.0. Triton 3.6 has 12.9 as well, for Blackwell: here it makes Hopper's
code too. With 3.4 and 3.5 the machine's own CUDA is asked.
tests/kernels/test_kernel_machine_code.py looks for such reads in what kernels become.
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
    """Whether kernels may run: their machine code is right here. Takes a sound ptxas for the whole process where Triton's
    own is not and the user has not named one (TRITON_PTXAS_PATH)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return True
    nvidia = nvidia_knobs()
    if nvidia is None or nvidia.ptxas.version != BROKEN_VERSION:
        return True
    found = None if os.environ.get("TRITON_PTXAS_PATH") else next(sound_ptxas_paths(nvidia), None)
    if found is None:
        warnings.warn(
            f"surgery's kernels are off: {nvidia.ptxas.path} is ptxas {BROKEN_VERSION}, which compiles them wrongly for Hopper; the plain "
            "torch reference runs instead. Upgrade Triton (pip install 'triton>=3.6'), or name another ptxas: "
            "TRITON_PTXAS_PATH=/usr/local/cuda-12.9/bin/ptxas",
            stacklevel=2,
        )
        return False
    set_ptxas(nvidia, found)
    return True


def nvidia_knobs() -> Any:
    """Triton's settings for NVIDIA, None before 3.4, which brought them together with ptxas 12.8."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.nvidia


def sound_ptxas_paths(nvidia: Any) -> Iterator[str]:
    """Paths of others that are right, Triton's own first; none newer than the CUDA that torch was built for, whose driver
    might not load what it makes."""
    places = [getattr(nvidia, "ptxas_blackwell", None)]
    tool = type(nvidia.ptxas)
    homes = [Path(home) / "bin" / "ptxas" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    places += [tool.from_path(str(path)) for path in (shutil.which("ptxas"), *homes) if path]
    newest = parse_version(torch.version.cuda or "12.9")[0]
    for place in places:
        if (
            place is not None
            and parse_version(BROKEN_VERSION) < parse_version(place.version)
            and parse_version(place.version)[0] <= max(newest, 12)
        ):
            yield place.path


def parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def set_ptxas(nvidia: Any, path: str) -> None:
    """Sets Triton's ptxas, and forgets the version of the one before, which names entries of its cache."""
    from triton.backends.nvidia import compiler

    nvidia.ptxas = path
    for remembered in (getattr(compiler, "get_ptxas_version", None), compiler.CUDABackend.hash):
        if hasattr(remembered, "cache_clear"):
            remembered.cache_clear()
