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
    """Copy an unsharded tensor into a possibly sharded one, in place.

    FSDP2's shards are cut from the values of the first process.
    """
    if hasattr(tensor, "ds_tensor"):
        local_shard(tensor).copy_(_zero3_shard(tensor, values))
        return
    if not hasattr(tensor, "device_mesh"):
        tensor.copy_(values)
        return
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = tensor
    tensor.copy_(distribute_tensor(values.to(tensor.device), sharded.device_mesh, sharded.placements))


def allocate_meta_tensors(model: torch.nn.Module) -> None:
    """Replace parameters and buffers on the meta device by ones on the CPU whose values are undefined.

    The operating system gives them no memory until a value is written. Tied parameters stay tied.
    """
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for tensors in tables:
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    empty = torch.empty_like(tensor, device="cpu")
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    made[tensor] = torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                tensors[name] = made[tensor]


@torch.no_grad()
def scatter_values(model: torch.nn.Module, values: dict[str, Tensor]) -> None:
    """Give every process its shards of the first process's parameters, and copies of its buffers.

    values: the parameters before they were sharded, by name. Only shape and dtype are read in the other processes.
    """
    is_first = torch.distributed.get_rank() == 0
    for name, parameter in model.named_parameters():
        full = values[name]
        if not is_first:
            full = torch.empty(full.shape, dtype=full.dtype, device=parameter.device)
        copy_full_(parameter, full)
    for buffer in model.buffers():
        whole = buffer.contiguous()
        torch.distributed.broadcast(whole, 0)
        buffer.copy_(whole)


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
