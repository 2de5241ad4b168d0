"""Undo a conversion: multiply structured linears out to dense weights, one module at a time, and remove the level
weights of native linear layers that are still 1.

Pruned MLPs and attention get their original sizes again, with zeros for the neurons and heads that were removed, which
add nothing. Dropped MLPs get zeros, and dropped attention (`mixer: none`) becomes softmax attention whose projections are
zero.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from surgery.architectures.attention import output_path
from surgery.architectures.experts import has_split_experts, merge_experts, split_experts
from surgery.architectures.linears import LinearInfo, find_linears
from surgery.checkpoint.meta_model import build_unconverted_model
from surgery.checkpoint.rewrite import rewrite_checkpoint, write_shards
from surgery.checkpoint.safetensors_io import DTYPES, FLOAT_DTYPES, TensorSource, read_tensor
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import has_shims, is_pruned, mixers_of, quantization_table, table_of
from surgery.checkpoint.tensor_names import check_tensors, map_tensor_names, unused_tensors
from surgery.conversion.expert_tensors import merge_expert_tensors
from surgery.conversion.replacement import load_replacement_module
from surgery.core.errors import SurgeryError
from surgery.core.journal import check_free
from surgery.core.progress import Progress
from surgery.mixers import mixer_config
from surgery.modeling.applied import remove_table
from surgery.modeling.attention import detach_mixer
from surgery.modeling.joined import JoinedLinear
from surgery.modeling.live import copy_hooks, has_adapter, is_converted, is_library_model, model_device
from surgery.modeling.modules import (
    REPLACED,
    STORAGE_KEYS,
    GuardedLinear,
    SplitLinear,
    build_module,
    is_joined,
    joined_paths,
    shares_basis,
)
from surgery.modeling.native import has_plain_level_weights, remove_level_weights
from surgery.modeling.quantize import unconverted
from surgery.modeling.quantizer import replace_modules, split_named_experts
from surgery.structures import StructuredLinear
from surgery.structures.call_scope import hold_groups
from surgery.structures.quantized import QuantizedLinear
from surgery.structures.shared_basis import SharedBasis, basis_path


def densify(converted: str, out: str | Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Write a dense checkpoint of the same function to `out`; return {"out", "modules": number of linears multiplied
    out, "native": number of native linear layers without their level weights}.

    Weights keep their stored dtype, so a bfloat16 checkpoint rounds each product once. Mixers are not undone, except
    `none` and level weights that are still 1.
    Raises SurgeryError if `converted` is not a valid converted checkpoint or has mixers only, or if `out` exists.
    """
    progress, out = progress or Progress(), Path(out)
    check_free(out, "checkpoint")
    source = open_converted_checkpoint(converted)
    table, mixers = table_of(source), mixers_of(source)
    if not table and not mixers and "quantization_config" not in source.config:
        raise SurgeryError(
            f"{converted} is an ordinary checkpoint already: its config.json says what the conversion changed (a stock class "
            "with linear attention, MLPs of one smaller width, fewer heads, layers or experts), and no other linears were "
            "replaced. Use it as it is"
        )
    mixers = {path: spec for path, spec in mixers.items() if mixer_config(spec).reads_projections}
    outputs = _output_projections(source, mixers)
    unused = unused_tensors(source.config["quantization_config"])
    model = check_openable(source, converted)
    native = {} if model is None else _plain_level_weights(source, model, mixers)
    mixers = {path: spec for path, spec in mixers.items() if path not in native}
    folded = {path: _folded_entry(spec) for path, spec in table.items() if path in outputs}
    table = {path: spec for path, spec in table.items() if spec.get("structure") != "folded" or "bits" in spec}
    if not table and not native and mixers:
        raise SurgeryError(_only_mixers(converted, mixers))
    config = _plain_config(source, folded, mixers, unused)
    dropped = {name for names in native.values() for name in names}
    tensors = (t for t in _iter_tensors(source, table, set(folded), progress) if t.name not in dropped)
    entries = merge_expert_tensors(source, tensors)
    write = lambda folder: write_shards(entries, folder)  # noqa: E731
    rewrite_checkpoint(source, out, write, config)
    return {"out": str(out), "modules": len(table), "native": len(native)}


def _plain_level_weights(source: CheckpointSource, model: Any, mixers: dict[str, Any]) -> dict[str, list[str]]:
    """Return the names in the files of the level weights that are 1 in every level, by path of their layer. model: the
    converted one on meta."""
    native = mixers.keys() - set(_with_softmax_before(mixers))
    names = map_tensor_names(model, source.tensors, source.name) if native else {}
    stored = {path: [names[f"{path}.mixer.level.{leaf}"] for leaf in ("weight", "bias")] for path in native}
    return {path: both for path, both in stored.items() if not any(read_tensor(source.tensors[n]).any() for n in both)}


@torch.no_grad()
def densify_live(model: Any) -> int:
    """Multiply the structured linears of a model in memory out, in place; return how many. Mixers are not undone,
    except `none` and level weights that are still 1.

    Weights keep their dtype, device and requires_grad. All products are computed before the first module is replaced.
    """
    if not is_converted(model):
        raise SurgeryError(
            f"{type(model).__name__} is not converted: it has no structured linears to multiply out. Give a model that "
            "surgery.apply "
            "or surgery.load returned"
        )
    if has_adapter(model):
        raise SurgeryError(
            f"{type(model).__name__} has a PEFT adapter on its linears. Remove the adapter first: model = "
            "model.unload()"
        )
    model_device(model)
    config = getattr(model, "config", None) if is_library_model(model) else None
    table: dict[str, Any] = dict(config.quantization_config.modules) if config is not None else {}
    mixers: dict[str, Any] = dict(config.quantization_config.mixers) if config is not None else {}
    without_attention = [path for path, spec in mixers.items() if not mixer_config(spec).reads_projections]
    mixers = {path: spec for path, spec in mixers.items() if path not in without_attention}
    outputs = {output_path(model, path) for path in _with_softmax_before(mixers)}
    native = [path for path in mixers if has_plain_level_weights(model.get_submodule(path))]
    inside = tuple(f"{p}." for p, module in model.named_modules() if isinstance(module, (SplitLinear, JoinedLinear)))
    modules = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, REPLACED) and not path.startswith(inside)
    }
    structured = {path: module for path, module in modules.items() if not isinstance(module, SharedBasis)}
    structured = {path: module for path, module in structured.items() if not is_pruned(table.get(path, {}))}
    guarded = {path for path, module in structured.items() if isinstance(module, GuardedLinear)}
    if mixers and not native and structured.keys() <= guarded:
        raise SurgeryError(_only_mixers(type(model).__name__, mixers))
    dense = {
        path: dense_module(module, bool(table.get(path, {}).get("transposed")), folded=path in outputs)
        for path, module in structured.items()
        if not (path in guarded and path in outputs)
    }
    dense |= _padded_modules(model, {path: spec for path, spec in table.items() if is_pruned(spec)})
    for path, module in dense.items():
        model.set_submodule(path, module)
    hold_groups(model)
    for path in (path for path, module in modules.items() if isinstance(module, SharedBasis)):
        parent, _, leaf = path.rpartition(".")
        delattr(model.get_submodule(parent), leaf)
    if config is not None:
        for path in without_attention:
            detach_mixer(model.get_submodule(path))
            del config.quantization_config.mixers[path]
        for path in native:
            remove_level_weights(model.get_submodule(path))
            del config.quantization_config.mixers[path]
        merge_experts(model)
        folded = {path: _folded_entry(spec) for path, spec in table.items() if path in outputs}
        remove_table(model, folded)
    elif hasattr(model, "surgery_report"):
        del model.surgery_report
    return len(dense)


def _padded_modules(model: Any, pruned: dict[str, Any]) -> dict[str, nn.Module]:
    """Return the linears of the pruned MLPs and attention of a model in memory in their original sizes, see
    `_padded_entries`.
    """
    if not pruned:
        return {}
    original = unconverted(model)
    if has_split_experts(model):
        split_experts(original)
    whole = {linear.path: linear for linear in find_linears(original).linears}
    padded: dict[str, nn.Module] = {}
    for path, spec in pruned.items():
        module: Any = model.get_submodule(path)
        weight_OI, bias_O = padded_weights(module, whole[path])
        plain = {key: value for key, value in spec.items() if key not in STORAGE_KEYS}
        linear: Any = build_module({**plain, "in_features": whole[path].in_, "out_features": whole[path].out})
        trains = any(parameter.requires_grad for parameter in module.parameters())
        linear.weight = nn.Parameter((weight_OI.mT if whole[path].transposed else weight_OI).contiguous(), trains)
        linear.bias = None if bias_O is None else nn.Parameter(bias_O, trains)
        copy_hooks(module, linear)
        padded[path] = linear.train(module.training)
    return padded


def _with_softmax_before(mixers: dict[str, Any]) -> list[str]:
    """Return the paths of the mixers that replace softmax attention."""
    return [path for path, spec in mixers.items() if mixer_config(spec).replaces_attention]


def _only_mixers(name: str, mixers: dict[str, Any]) -> str:
    replaced = len(_with_softmax_before(mixers))
    if not replaced:
        return (
            f"{name} has no structured linears to multiply out: only its {len(mixers)} native linear layers have level "
            "weights, and these were trained, so that the layers without them compute something else. Start from the "
            "original checkpoint"
        )
    return (
        f"{name} has no structured linears to multiply out: only the attention of {replaced} layers was replaced, and a "
        "mixer has no dense "
        "weights of the same function. Start from the original checkpoint"
    )


def dense_module(module: Any, transposed: bool, folded: bool) -> nn.Module:
    """Return the dense linear of a structured one: an nn.Linear, a Conv1D (transposed), or a GuardedLinear (folded)."""
    bias = module_bias(module)
    stored = (*module.parameters(), *module.buffers())  # of a quantized linear the scales
    like = next(t for t in stored if t.is_floating_point() and t is not bias)
    if isinstance(module, JoinedLinear):
        like = next(t for t in (*module.matrix.parameters(), *module.matrix.buffers()) if t.is_floating_point())
        weight_OI = copy.deepcopy(module.matrix).float().dense()[module.rows()].to(like.dtype, copy=True)
    else:
        weight_OI = copy.deepcopy(module).float().dense().to(like.dtype)
    linear: Any
    if transposed and not folded:
        conv1d: Any = Conv1D
        linear = conv1d(module.out_features, module.in_features)
        weight_OI, bias = weight_OI.mT, linear.bias if bias is None else bias
    else:
        kind = GuardedLinear if folded else nn.Linear
        linear = kind(module.in_features, module.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter((weight_OI[None] if folded else weight_OI).contiguous(), like.requires_grad)
    if bias is not None and not isinstance(bias, nn.Parameter):  # of a split linear
        bias = nn.Parameter(bias.detach().to(like.dtype), like.requires_grad)
    linear.bias = bias
    copy_hooks(module, linear)
    dense: nn.Module = linear.train(module.training)
    return dense


def module_bias(module: Any) -> Tensor | None:
    """Return the bias (out,) of a structured linear, fused if it is split."""
    bias: Tensor | None = module.fused_bias() if isinstance(module, SplitLinear) else module.bias
    return bias


def check_openable(source: CheckpointSource, name: str) -> Any | None:
    """Return the converted model on meta. Raise SurgeryError unless the table, the tensors and their shapes are exactly
    those of the model of the config.

    A model class that is code of the checkpoint is not checked, and None is returned.
    """
    table, mixers = table_of(source), mixers_of(source)
    if source.config.get("auto_map") and not has_shims(source.config):
        return None
    model = build_unconverted_model(source)
    split_named_experts(model, source.tensors)
    replace_modules(model, table, mixers)
    check_tensors(model, source.tensors, name, unused_tensors(source.config.get("quantization_config", {})))
    state = model.state_dict()
    for parameter, tensor in map_tensor_names(model, source.tensors, name).items():
        stored = source.tensors[tensor].shape
        if parameter in state and tuple(state[parameter].shape) != tuple(stored):
            raise SurgeryError(
                f"{name}: tensor {tensor!r} has shape {list(stored)}, and {type(model).__name__} needs "
                f"{list(state[parameter].shape)}: its config.json and its weights do not belong together. Download or "
                "convert the checkpoint again"
            )
    return model


def _output_projections(source: CheckpointSource, mixers: dict[str, Any]) -> set[str]:
    """Return the output projections of attention modules with a mixer, which stay GuardedLinear like their mixers."""
    paths = _with_softmax_before(mixers)
    if not paths:
        return set()
    model = build_unconverted_model(source)
    return {output_path(model, path) for path in paths}


def _folded_entry(spec: dict[str, Any]) -> dict[str, Any]:
    names = ("in_features", "out_features", "bias", "file_name", "transposed")
    return {"structure": "folded", **{name: spec[name] for name in names if name in spec}}


def _plain_config(
    source: CheckpointSource, folded: dict[str, Any], mixers: dict[str, Any], unused: list[str]
) -> dict[str, Any]:
    """Return the config without the replaced linears; the table stays if there are mixers."""
    config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    if mixers:
        return {**config, "quantization_config": quantization_table(folded, mixers, unused)}
    if has_shims(config):
        del config["auto_map"]
    return config


def _iter_tensors(
    source: CheckpointSource, table: dict[str, Any], folded: set[str], progress: Progress
) -> Iterator[TensorSource]:
    """Yield the unchanged tensors, then the dense weights."""
    pruned = any(map(is_pruned, table.values()))
    whole = {n.path: n for n in find_linears(build_unconverted_model(source)).linears} if pruned else {}
    paths = {entry.get("file_name", path): path for path, entry in table.items()}
    replaced = {f"{base}.{name}" for base, path in paths.items() for name in _stored_tensor_names(table[path])}
    replaced |= {f"{basis_path(base)}.weight" for base, path in paths.items() if shares_basis(table[path])}
    yield from (TensorSource.from_file(name, info) for name, info in source.tensors.items() if name not in replaced)
    with progress.bar("multiplying out", len(table)) as tick:
        for base, path in paths.items():
            if is_pruned(table[path]):
                yield from _padded_entries(source, base, table[path], whole[path])
            elif not is_joined(table[path]):
                yield from dense_entries(source, base, table[path], path in folded)
            elif "matrix" in table[path]:
                yield from joined_entries(source, table, path)
            tick()


def _stored_tensor_names(spec: dict[str, Any]) -> list[str]:
    """Return the names of a module's tensors, without the bias, which is stored as in the source (unless it is split or
    of a pruned MLP or attention).
    """
    return [name for name in build_module(spec).state_dict() if name != "bias" or is_pruned(spec)]


@torch.no_grad()
def _padded_entries(source: CheckpointSource, base: str, spec: dict[str, Any], whole: LinearInfo) -> list[TensorSource]:
    """Return weight and bias of a linear of a pruned MLP or attention with zeros for what was removed. whole: the linear
    of the original.
    """
    module: Any = load_replacement_module(spec, base, source.tensors, torch.device("cpu"))
    stored = DTYPES[
        next(d for n in _stored_tensor_names(spec) if (d := source.tensors[f"{base}.{n}"].dtype) in FLOAT_DTYPES)
    ]
    weight_OI, bias_O = padded_weights(module, whole)
    entries = [TensorSource.from_tensor(f"{base}.weight", (weight_OI.mT if whole.transposed else weight_OI).to(stored))]
    return entries + ([] if bias_O is None else [TensorSource.from_tensor(f"{base}.bias", bias_O.to(stored))])


def padded_weights(module: Any, whole: LinearInfo) -> tuple[Tensor, Tensor | None]:
    """Return (weight (out, in), bias (out,) or None) of a linear of a pruned MLP or attention, see `_padded_entries`.

    The heads that stay become the first ones, in query, key and value alike.
    """
    bias_O: Tensor | None = module.bias
    if isinstance(module, QuantizedLinear):
        weight_OI = module.dense()
    else:
        weight_OI = module.weight.mT if isinstance(module, Conv1D) else module.weight
    weight_OI = F.pad(weight_OI, (0, whole.in_ - weight_OI.shape[1]))
    is_stacked = whole.fused is not None and whole.fused.layout == "stacked"  # rows of gate, then of up
    parts, missing = len(whole.roles) if is_stacked else 1, whole.out - weight_OI.shape[0]
    weight_OI = F.pad(weight_OI.unflatten(0, (parts, -1)), (0, 0, 0, missing // parts)).flatten(0, 1)
    if bias_O is not None:
        bias_O = F.pad(bias_O.unflatten(0, (parts, -1)), (0, missing // parts)).flatten()
    return weight_OI.contiguous(), bias_O


@torch.no_grad()
def joined_entries(source: CheckpointSource, table: dict[str, dict[str, Any]], head: str) -> list[TensorSource]:
    """Return the dense weights of linears that one matrix replaces, under their original names. head: path of the
    first.
    """
    spec, base = table[head]["matrix"], table[head].get("file_name", head)
    (matrix,) = dense_entries(
        source, f"{base}.joined", {**spec, "in_features": table[head]["in_features"], "bias": False}
    )
    assert matrix.tensor is not None
    entries, start = [], 0
    for path in joined_paths(table, head):
        entry = table[path]
        rows_OI = matrix.tensor[start : start + entry["out_features"]]
        rows_OI = (rows_OI.mT if entry.get("transposed") else rows_OI).contiguous()
        entries.append(TensorSource.from_tensor(f"{entry.get('file_name', path)}.weight", rows_OI))
        start += entry["out_features"]
    return entries


@torch.no_grad()
def dense_entries(
    source: CheckpointSource, base: str, spec: dict[str, Any], folded: bool = False
) -> list[TensorSource]:
    """Return the dense weight of one replaced linear, and the bias of a split one, under their original names.

    base: the linear's name in the files. spec: its table entry. folded: store the weight as (1, out, in), see
    GuardedLinear.
    """
    module = load_replacement_module(spec, base, source.tensors, torch.device("cpu"))
    stored = DTYPES[
        next(d for n in _stored_tensor_names(spec) if (d := source.tensors[f"{base}.{n}"].dtype) in FLOAT_DTYPES)
    ]
    assert isinstance(module, (StructuredLinear, SplitLinear, QuantizedLinear))
    weight_OI = module.dense()
    weight = weight_OI[None] if folded else weight_OI.mT if spec.get("transposed") else weight_OI
    entries = [TensorSource.from_tensor(f"{base}.weight", weight.to(stored))]
    bias = module.fused_bias() if isinstance(module, SplitLinear) else None
    if isinstance(bias, Tensor):
        entries.append(TensorSource.from_tensor(f"{base}.bias", bias.to(stored)))
    return entries
