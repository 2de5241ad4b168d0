"""Gather and scatter tensors that may be sharded (FSDP2's DTensors, ZeRO-3's parameters).

Every process must take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MaybeSharded = Tensor | Callable[[], Tensor]  # the callable gathers the tensor


def full_tensor(tensor: MaybeSharded) -> Tensor:
    """Return the unsharded tensor, detached."""
    if not isinstance(tensor, Tensor):
        return tensor()
    if hasattr(tensor, "ds_tensor"):
        return _zero3_full_tensor(tensor)
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def copy_full_(tensor: Tensor, values: Tensor) -> None:
    """Copy an unsharded tensor into a possibly sharded one, in place."""
    if hasattr(tensor, "ds_tensor"):
        local_shard(tensor).copy_(_zero3_shard(tensor, values))
        return
    if not hasattr(tensor, "device_mesh"):
        tensor.copy_(values)
        return
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = tensor
    tensor.copy_(distribute_tensor(values.to(tensor.device), sharded.device_mesh, sharded.placements))


def local_shard(tensor: Tensor) -> Tensor:
    """Return the part of the tensor that this process stores, detached."""
    return tensor.ds_tensor.detach() if hasattr(tensor, "ds_tensor") else tensor.detach()


def clone_sharded(tensor: Tensor) -> Tensor:
    """Return a copy that is sharded in the same way."""
    if not hasattr(tensor, "ds_tensor"):
        return tensor.detach().clone()
    copy: Any = torch.empty(0, device=tensor.device)
    copy.ds_tensor = local_shard(tensor).clone()
    for name in ("ds_shape", "ds_numel", "ds_process_group"):
        setattr(copy, name, getattr(tensor, name))
    return copy


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether any tensor is an FSDP2 DTensor."""
    return any(hasattr(t, "device_mesh") for t in tensors)


def reshard_modules(model: torch.nn.Module) -> None:
    """Return FSDP2 modules to sharded weights: after a forward they may still hold the full ones."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()


# -- ZeRO-3: equal parts of the flattened tensor, the last one padded -----------------------------------------
def _zero3_full_tensor(tensor: Any) -> Tensor:
    """Gather in the stored precision, which may differ from that of the forward."""
    from torch import distributed

    shard, group = local_shard(tensor).contiguous(), tensor.ds_process_group
    parts = shard.new_empty(shard.numel() * distributed.get_world_size(group))
    distributed.all_gather_into_tensor(parts, shard, group=group)
    return parts.narrow(0, 0, tensor.ds_numel).view(tensor.ds_shape)


def _zero3_shard(tensor: Any, values: Tensor) -> Tensor:
    from torch import distributed

    shard, rank = local_shard(tensor), distributed.get_rank(tensor.ds_process_group)
    flat = values.reshape(-1)[rank * shard.numel() : (rank + 1) * shard.numel()]
    return torch.nn.functional.pad(flat, (0, shard.numel() - flat.numel()))
