"""Tensors that may be spread over devices (FSDP2's DTensors), whole and back. Every process must take part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor) -> None:
    """In place, from the whole."""
    if not hasattr(tensor, "device_mesh"):
        tensor.copy_(values)
        return
    from torch.distributed.tensor import distribute_tensor

    place: Any = tensor
    tensor.copy_(distribute_tensor(values.to(tensor.device), place.device_mesh, place.placements))


def sharded(tensors: Iterable[Tensor]) -> bool:
    return any(hasattr(t, "device_mesh") for t in tensors)


def rest(model: torch.nn.Module) -> None:
    """After a forward FSDP2 may still hold whole weights in the spread ones' place; back to the spread ones."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()
