"""Matrices out of a checkpoint: parts of fused linears, Conv1D's transposition, and what the table says of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.architectures.linears import find_linears
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import read_tensor
from surgery.core.errors import SurgeryError
from surgery.planning.plan import LinearTarget, FusedSlice, fused_sizes
from surgery.structures import StructureConfig

LARGEST = 1e15  # of a weight: the sum of a hundred million squares is 1e38, and float32 ends at 3e38


def fused_slice_rows(part: FusedSlice) -> Tensor:
    """Which output rows of the fused linear compute this part, in the part's own order."""
    if not part.heads:
        start = sum(part.sizes[: part.place])
        return torch.arange(start, start + part.sizes[part.place])
    per_head = [size // part.heads for size in part.sizes]
    first = sum(per_head[: part.place])
    heads_H1 = torch.arange(part.heads)[:, None] * sum(per_head)
    return (heads_H1 + torch.arange(first, first + per_head[part.place])).flatten()


def select_rows(cut: LinearTarget, tensor: Tensor) -> Tensor:
    """The cut's share of the fused linear's rows: of a matrix (O, I), a bias or diagonal (O,)."""
    return tensor if cut.part is None else tensor[fused_slice_rows(cut.part).to(tensor.device)]


def target_gram(cut: LinearTarget, gram: Tensor) -> Tensor:
    """Its block of the outputs' Gram matrix (O, O), or of the diagonal (O,)."""
    block = select_rows(cut, gram)
    return block if gram.dim() == 1 or cut.part is None else block[:, fused_slice_rows(cut.part).to(gram.device)]


def target_weight(skeleton: MetaModel, cut: LinearTarget, device: torch.device) -> Tensor:
    """W (out, in) of a cut, float32: of the module where it is filled, else read from the file."""
    weight = skeleton.module(cut.linear.path).weight.detach()  # type: ignore[operator]
    if weight.is_meta or weight.device.type != device.type:
        weight = read_tensor(skeleton.info(f"{cut.linear.path}.weight"), torch.float32, device=device)
    weight_OI = select_rows(cut, weight.mT if cut.linear.transposed else weight).contiguous()
    largest = float(weight_OI.abs().max()) if weight_OI.numel() else 0.0
    if not largest <= LARGEST:
        raise SurgeryError(
            f"{cut.name} holds numbers up to {largest:.1e}; sums of their squares overflow float32, so numbers up to "
            f"{LARGEST:.0e} can be fitted. Check the checkpoint, or leave it dense: a rule {{match: {cut.name}, structure: dense}}"
        )
    return weight_OI


def slice_name(role: str) -> str:
    """attention.query -> query: the name of the part's module."""
    return role.rpartition(".")[2]


def table_entry(cut: LinearTarget, config: StructureConfig | None) -> dict[str, Any]:
    """The table's entry for one fitted cut (or part)."""
    structure = config.to_dict() if config is not None else {"structure": "dense"}
    return {**structure, "in_features": cut.in_, "out_features": cut.out, "bias": cut.linear.bias}


def role_weight(skeleton: MetaModel, layer: str, role: str) -> tuple[Tensor, Tensor | None]:
    """(W (out, in), bias (out,) or None) of a role of one layer's attention, of the module where it is filled; a fused
    linear's rows of it."""
    body = find_linears(skeleton.model)
    linear = next(found for found in body.linears if found.layer == layer and role in found.roles)
    part = None
    if len(linear.roles) > 1:
        sizes, heads = fused_sizes(linear, skeleton.config)
        part = FusedSlice(role, linear.roles.index(role), sizes, heads)
    cut = LinearTarget(linear, linear.out, 1.0, (), part)
    module: Any = skeleton.module(linear.path)
    device = module.weight.device if not module.weight.is_meta else torch.device("cpu")
    bias = select_rows(cut, module.bias.detach()) if linear.bias else None
    return target_weight(skeleton, cut, device), bias
