"""Weight-only quantization of a converted model: all linears of its layers, structured and dense, stored in 8 or 4
bits.

The head, embeddings, norms, routers and the parameters of mixers keep their dtype. See surgery.structures.quantized,
and surgery.conversion.quantize_checkpoint for checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from surgery.architectures.linears import find_linears
from surgery.checkpoint.table import is_dropped, is_quantized
from surgery.core.errors import SurgeryError
from surgery.modeling.joined import JoinedLinear, connect_joined
from surgery.modeling.live import copy_hooks, has_adapter, is_converted, model_device
from surgery.modeling.modules import (
    GuardedLinear,
    SplitLinear,
    is_joined,
    quantized_entry,
    shares_basis,
)
from surgery.modeling.quantization_config import SurgeryConfig
from surgery.modeling.quantizer import ModuleFinder, split_named_experts
from surgery.structures.call_scope import hold_groups
from surgery.structures.quantized import Format, QuantizedLinear, Storage

DEFAULT_GROUPS = {8: None, 4: 64}


def make_storage(bits: int, group: int | None = None, format: Format = "int") -> Storage:
    """Return the storage of `bits`; the default group is one scale per output with 8 bits, and 64 inputs with 4."""
    return Storage(bits, DEFAULT_GROUPS.get(bits) if group is None else group, format=format)


# -- a model in memory ---------------------------------------------------------------------------------
@torch.no_grad()
def quantize_live(model: Any, bits: int = 8, group: int | None = None, format: Format = "int") -> dict[str, Any]:
    """Quantize the linears of a converted model in memory, in place; return {"linears", "bits", "group",
    "bytes_before", "bytes_after"}.

    `model.save_pretrained` writes the integers. Raises SurgeryError, with the model unchanged, if it is not a converted
    transformers model, is quantized already or has an adapter, or if weights are not finite.
    """
    storage, kind = make_storage(bits, group, format), type(model).__name__
    table = getattr(getattr(model, "config", None), "quantization_config", None)
    if not isinstance(model, PreTrainedModel) or not is_converted(model) or not isinstance(table, SurgeryConfig):
        raise SurgeryError(
            f"{kind} is not a converted transformers model. Convert it first (surgery.apply, or surgery.load of a "
            "converted folder); of "
            "such a model give the whole, not a part"
        )
    if has_adapter(model):
        raise SurgeryError(
            f"{kind} has a PEFT adapter. Remove it first (model = model.unload()), quantize, and add it again"
        )
    if is_quantized(table.modules):
        raise SurgeryError(f"{kind} is quantized already. Load the checkpoint that it was made from")
    model_device(model)
    skeleton = unconverted(model)
    split_named_experts(skeleton, table.modules)
    before, find = stored_bytes(model), ModuleFinder(model)
    dense = {path: entry for path, entry in dense_linears(skeleton, table.modules).items() if find(path) is not None}
    whole = {path: entry for path, entry in {**table.modules, **dense}.items() if not is_dropped(entry)}
    storages = dict.fromkeys(whole, storage)
    modules = quantized_table(whole, storages)
    places = {path: name for path in whole if (name := find(path)) is not None}
    replaced = {name: quantize_named(name, copy.copy(model.get_submodule(name)), storage) for name in places.values()}
    for name, quantized in replaced.items():
        copy_hooks(model.get_submodule(name), quantized)
        model.set_submodule(name, quantized)
    connect_joined(replaced)
    hold_groups(model)
    table.modules = {**table.modules, **modules}
    summary = {**storage_summary(storages), "bytes_before": before, "bytes_after": stored_bytes(model)}
    if isinstance(report := getattr(model, "surgery_report", None), dict):
        report["storage"] = summary
        report["totals"]["bytes_after"] = summary["bytes_after"]
    return summary


def unconverted(model: Any) -> Any:
    """Return the model as it was before the conversion, on meta."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    cls = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("surgery."))
    with torch.device("meta"):
        return cls(config)


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's tensors, as a checkpoint stores them; shared tensors count once."""
    tensors = {t.data_ptr(): t for t in model.state_dict(keep_vars=True).values()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


# -- tables and modules --------------------------------------------------------------------------------
def dense_linears(model: Any, table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return entries of the linears in the layers of an unconverted model that a table does not list.

    Routers are left out.
    """
    return {
        linear.path: {
            "structure": "dense",
            "in_features": linear.in_,
            "out_features": linear.out,
            "bias": linear.bias,
            **({"transposed": True} if linear.transposed else {}),
        }
        for linear in find_linears(model).linears
        if linear.index is not None and not linear.router and linear.path not in table
    }


def quantized_table(table: dict[str, Any], storages: Mapping[str, Storage]) -> dict[str, Any]:
    """Return a table with the storage of its path in each entry.

    Raises SurgeryError, with the path, for experts that share a basis.
    """
    for path, entry in table.items():
        if shares_basis(entry):
            raise SurgeryError(
                f"{path} shares its basis with the other experts of its layer, and such linears are not stored as "
                "integers. Convert with "
                "share: none, or multiply the structures out first: surgery densify"
            )
    return {path: _with_storage(entry, storages[path]) for path, entry in table.items()}


def _with_storage(entry: dict[str, Any], storage: Storage) -> dict[str, Any]:
    if entry["structure"] == "split":
        return {**entry, "parts": {name: _with_storage(inner, storage) for name, inner in entry["parts"].items()}}
    if is_joined(entry):
        return {**entry, "matrix": _with_storage(entry["matrix"], storage)} if "matrix" in entry else entry
    return quantized_entry(entry, storage)


def quantize_named(path: str, module: Any, storage: Storage) -> nn.Module:
    """Return `quantize_module` of a linear. Raises SurgeryError, with its path, if it cannot be stored so."""
    try:
        return quantize_module(module, storage)
    except SurgeryError as error:
        raise SurgeryError(f"{path} cannot be stored in {storage.label}: {error}") from None


def quantize_module(module: Any, storage: Storage) -> nn.Module:
    """Return a linear with integer weights: a structured, split, joined, guarded or dense one, or transformers' Conv1D.

    A joined one is not connected: see `connect_joined`.
    """
    if isinstance(module, SplitLinear):
        parts = {name: quantize_module(inner, storage) for name, inner in module.parts.items()}
        split = SplitLinear(module.in_features, parts, module.sizes, module.heads)
        split._buffers["weight"] = module._buffers["weight"]
        return split.train(module.training)
    if isinstance(module, JoinedLinear):
        matrix = module._modules.get("joined")
        joined = None if matrix is None else quantize_module(matrix, storage)
        other = JoinedLinear(module.in_features, module.out_features, module.start, joined, module.first, bias=False)
        other._buffers["weight"], other.bias, other.members = module._buffers["weight"], module.bias, module.members
        return other.train(module.training)
    if isinstance(module, nn.Linear) and not isinstance(module, GuardedLinear):
        module = GuardedLinear.from_weight(module.weight, module.bias).train(module.training)
    elif type(module).__name__ == "Conv1D":
        module = GuardedLinear.from_weight(module.weight.mT, module.bias).train(module.training)
    return QuantizedLinear(module, storage)


MIXED_BITS = "4 or 8"  # in a summary of linears of both kinds


def storage_summary(storages: Mapping[str, Storage]) -> dict[str, Any]:
    """Return the number of linears and how they are stored. storages: of the linears, by path. "group" is None if they
    have several.
    """
    bits, groups = {storage.bits for storage in storages.values()}, {storage.group for storage in storages.values()}
    formats = {storage.format for storage in storages.values()}
    return {
        "linears": len(storages),
        "bits": next(iter(bits)) if len(bits) == 1 else MIXED_BITS,
        "group": next(iter(groups)) if len(groups) == 1 else None,
        **({"format": "fp8"} if formats == {"fp8"} else {}),
    }
