"""Tensors that may be spread over devices (FSDP2's DTensors, ZeRO-3's parameters), whole and back. Every process must
take part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MaybeSharded = Tensor | Callable[[], Tensor]  # the second: gathered when it is asked for


def full_tensor(tensor: MaybeSharded) -> Tensor:
    if not isinstance(tensor, Tensor):
        return tensor()
    if hasattr(tensor, "ds_tensor"):
        return _zero3_full_tensor(tensor)
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def copy_full_(tensor: Tensor, values: Tensor) -> None:
    """In place, from the whole."""
    if hasattr(tensor, "ds_tensor"):
        local_shard(tensor).copy_(_zero3_shard(tensor, values))
        return
    if not hasattr(tensor, "device_mesh"):
        tensor.copy_(values)
        return
    from torch.distributed.tensor import distribute_tensor

    place: Any = tensor
    tensor.copy_(distribute_tensor(values.to(tensor.device), place.device_mesh, place.placements))


def local_shard(tensor: Tensor) -> Tensor:
    """The numbers that lie here: this process's part where ZeRO-3 spreads them."""
    return tensor.ds_tensor.detach() if hasattr(tensor, "ds_tensor") else tensor.detach()


def clone_sharded(tensor: Tensor) -> Tensor:
    """A copy, spread in the same way."""
    if not hasattr(tensor, "ds_tensor"):
        return tensor.detach().clone()
    copy: Any = torch.empty(0, device=tensor.device)
    copy.ds_tensor = local_shard(tensor).clone()
    for name in ("ds_shape", "ds_numel", "ds_process_group"):
        setattr(copy, name, getattr(tensor, name))
    return copy


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    return any(hasattr(t, "device_mesh") for t in tensors)


def reshard_modules(model: torch.nn.Module) -> None:
    """After a forward FSDP2 may still hold whole weights in the spread ones' place; back to the spread ones."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()


# -- ZeRO-3: equal parts of the flat numbers, the last one padded -----------------------------------------
def _zero3_full_tensor(tensor: Any) -> Tensor:
    """In the precision that it is kept in, whatever it is gathered in for a forward."""
    from torch import distributed

    part, group = local_shard(tensor).contiguous(), tensor.ds_process_group
    parts = part.new_empty(part.numel() * distributed.get_world_size(group))
    distributed.all_gather_into_tensor(parts, part, group=group)
    return parts.narrow(0, 0, tensor.ds_numel).view(tensor.ds_shape)


def _zero3_shard(tensor: Any, values: Tensor) -> Tensor:
    from torch import distributed

    part, rank = local_shard(tensor), distributed.get_rank(tensor.ds_process_group)
    flat = values.reshape(-1)[rank * part.numel() : (rank + 1) * part.numel()]
    return torch.nn.functional.pad(flat, (0, part.numel() - flat.numel()))
