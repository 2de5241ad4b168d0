"""Where a conversion or a measurement runs."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from surgery.errors import SurgeryError


def choose_device(name: str | None) -> torch.device:
    """The one asked for, else a GPU where there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
        if device.type == "cuda":  # torch loads its GPU solvers at their first call, which threads must not race for
            torch.linalg.eigh(torch.eye(2, device=device))
    except (RuntimeError, AssertionError) as error:
        said = re.sub(r"^CUDA error: ", "", str(error).splitlines()[0])
        raise SurgeryError(f"--device {name}: {said}; use cpu, or cuda:0 where there is a GPU") from None
    if device.type == "meta":
        raise SurgeryError("--device meta holds no numbers; use cpu, or cuda:0 where there is a GPU")
    return device


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
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
