"""Weight matrices of the targets: slices of fused linears, transposed Conv1D weights, and entries of the checkpoint's
table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surgery.architectures.linears import find_linears
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import read_tensor
from surgery.core.errors import SurgeryError
from surgery.modeling.joined import group_entries
from surgery.planning.plan import fused_sizes
from surgery.planning.targets import FusedSlice, LinearTarget
from surgery.structures import StructureConfig

LARGEST = 1e15  # largest weight: a sum of 1e8 squares is then 1e38, below the float32 maximum of 3e38


def fused_slice_rows(fused_slice: FusedSlice) -> Tensor:
    """Return the indices of the fused linear's output rows that compute this slice, in the order of the slice."""
    if not fused_slice.heads:
        start = sum(fused_slice.sizes[: fused_slice.index])
        return torch.arange(start, start + fused_slice.sizes[fused_slice.index])
    per_head = [size // fused_slice.heads for size in fused_slice.sizes]
    first = sum(per_head[: fused_slice.index])
    heads_H1 = torch.arange(fused_slice.heads)[:, None] * sum(per_head)
    return (heads_H1 + torch.arange(first, first + per_head[fused_slice.index])).flatten()


def select_rows(target: LinearTarget, tensor: Tensor) -> Tensor:
    """Return the target's rows of a fused linear's matrix (O, I), or of a bias or diagonal (O,)."""
    return tensor if target.part is None else tensor[fused_slice_rows(target.part).to(tensor.device)]


def target_gram(target: LinearTarget, grams: Mapping[str, Tensor]) -> Tensor:
    """Return the output Gram matrix (O, O) of a target, or its diagonal (O,), from those of whole linears by path.

    That of joined linears has zeros between them; it is a diagonal if one of theirs is.
    """
    if target.joined:
        linear_grams = [grams[linear.path] for linear in target.joined]
        if all(gram.dim() == 2 for gram in linear_grams):
            blocks: Tensor = torch.block_diag(*linear_grams)
            return blocks
        return torch.cat([gram if gram.dim() == 1 else gram.diagonal() for gram in linear_grams])
    gram = grams[target.linear.path]
    block = select_rows(target, gram)
    return block if gram.dim() == 1 or target.part is None else block[:, fused_slice_rows(target.part).to(gram.device)]


def target_weight(meta_model: MetaModel, target: LinearTarget, device: torch.device) -> Tensor:
    """Return the weight (out, in) of a target in float32: from the module if it is loaded, otherwise from the file.

    Raises SurgeryError if it holds values whose squares would overflow float32.
    """
    weights = []
    for linear in target.linears:
        weight = meta_model.module(linear.path).weight.detach()  # type: ignore[operator]
        if weight.is_meta or weight.device.type != device.type:
            weight = read_tensor(meta_model.tensor_info(f"{linear.path}.weight"), torch.float32, device=device)
        rows = select_rows(target, weight.mT if linear.transposed else weight)
        largest = float(rows.abs().max()) if rows.numel() else 0.0
        if not largest <= LARGEST:
            name = target.name if target.part else linear.path
            raise SurgeryError(
                f"{name} holds values up to {largest:.1e}; sums of their squares overflow float32, so only values up "
                "to "
                f"{LARGEST:.0e} can be fitted. Check the checkpoint, or leave it dense: a rule {{match: {linear.path}, "
                f"structure: dense}}"
            )
        weights.append(rows)
    return (weights[0] if len(weights) == 1 else torch.cat(weights)).contiguous()


def slice_name(role: str) -> str:
    """Return the module name of a fused slice: attention.query -> query."""
    return role.rpartition(".")[2]


def table_entry(target: LinearTarget, config: StructureConfig | None) -> dict[str, Any]:
    """Return the entry of a fitted target (or fused slice) in the checkpoint's table. config None: the matrix stays
    dense.
    """
    structure = config.to_dict() if config is not None else {"structure": "dense"}
    share = {"share": "experts"} if target.basis else {}
    return {**structure, **share, "in_features": target.in_, "out_features": target.out, "bias": target.linear.bias}


def joined_entries(target: LinearTarget, config: StructureConfig) -> dict[str, dict[str, Any]]:
    """Return the table entries of the joined linears of a target by path, sorted by their rows in the joined matrix.

    config: of the joined matrix.
    """
    linears = {linear.path.rpartition(".")[2]: linear for linear in target.joined}
    outs = {name: linear.out for name, linear in linears.items()}
    entries = group_entries(target.in_, outs, config.to_dict())
    return {linear.path: {**entries[name], "bias": linear.bias} for name, linear in linears.items()}


def narrowed_entries(target: LinearTarget, config: Any) -> dict[str, dict[str, Any]]:
    """Return the table entries of the linears of a pruned MLP or attention, or of attention with fewer value dims, by
    path, in the order in which they run. config: of the last one.
    """
    entries = {}
    for linear in target.all_linears:
        is_last = linear is target.linear
        in_, out = linear.in_, linear.out
        if config.name == "value_dims":
            structure = replace(config, side="output" if is_last else "values").to_dict()
        else:
            structure = {"structure": "pruned"}
            in_, out = (config.width, out) if is_last else (in_, out * config.width // target.in_)
        entries[linear.path] = {**structure, "in_features": in_, "out_features": out, "bias": linear.bias}
    return entries


def neuron_rows(columns_K: Tensor, sizes: tuple[int, ...], target: LinearTarget) -> Tensor:
    """Return the output rows of a linear that make the neurons or heads of these columns. sizes: rows of each part of the
    linear: of a fused one those of gate, then of up.
    """
    units_N = columns_K[:: target.unit] // target.unit
    rows, start = [], 0
    for size in sizes:
        per_unit = size * target.unit // target.in_
        rows.append((start + units_N[:, None] * per_unit + torch.arange(per_unit, device=units_N.device)).flatten())
        start += size
    return torch.cat(rows)


def role_weight(meta_model: MetaModel, layer: str, role: str) -> tuple[Tensor, Tensor | None]:
    """Return (weight (out, in), bias (out,) or None) of a role in one layer, sliced out of a fused linear if
    necessary.
    """
    layout = find_linears(meta_model.model)
    linear = next(linear for linear in layout.linears if linear.layer == layer and role in linear.roles)
    fused_slice = None
    if len(linear.roles) > 1:
        sizes, heads = fused_sizes(linear, meta_model.config)
        fused_slice = FusedSlice(role, linear.roles.index(role), sizes, heads)
    target = LinearTarget(linear, linear.out, 1.0, (), fused_slice)
    module: Any = meta_model.module(linear.path)
    device = module.weight.device if not module.weight.is_meta else torch.device("cpu")
    bias = select_rows(target, module.bias.detach()) if linear.bias else None
    return target_weight(meta_model, target, device), bias
