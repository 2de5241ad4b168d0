"""Replacement modules of a layer: build them from fits, swap them in, and load them from a layer shard.

Distribute fits over processes and broadcast the results, so that all processes continue with identical weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from surgery.checkpoint.meta_model import MetaModel, set_module_tensor
from surgery.checkpoint.safetensors_io import DTYPES, TensorInfo, TensorSource, read_tensor
from surgery.conversion.fit import FitResult
from surgery.conversion.mixer_init import InitializedMixer
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, Mixer, mixer_config
from surgery.modeling.modules import GuardedLinear, SplitLinear, build_module
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.plan import LinearTarget, Plan
from surgery.planning.weights import select_rows, slice_name, table_entry
from surgery.structures import STRUCTURES, StructuredLinear


@dataclass
class LayerReplacement:
    """The replacement of one layer.

    modules, mixers: replacement modules and mixers by path. entries: tensors of the layer shard. table, mixer_table:
    entries of the checkpoint's quantization_config. records, mixer_records: entries of the report.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    entries: list[TensorSource] = field(default_factory=list)
    table: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    mixers: dict[str, Mixer] = field(default_factory=dict)
    mixer_table: dict[str, dict[str, Any]] = field(default_factory=dict)
    mixer_records: list[dict[str, Any]] = field(default_factory=list)


def densify_module(module: nn.Module) -> nn.Module:
    """The same function as one dense product: all calibration tokens go through it several times, and small
    blocks or many terms would take far longer."""
    if isinstance(module, SplitLinear):
        return dense_linear(module.dense(), module.fused_bias())
    if isinstance(module, (StructuredLinear, GuardedLinear)):
        return dense_linear(module.dense(), module.bias)
    return module


def dense_linear(weight_OI: Tensor, bias_O: Tensor | None) -> nn.Linear:
    """Frozen, holding these very tensors."""
    dense = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, device="meta")
    dense.weight = nn.Parameter(weight_OI, requires_grad=False)
    if bias_O is not None:
        dense.bias = nn.Parameter(bias_O.detach(), requires_grad=False)
    return dense


@contextmanager
def swapped_modules(layer: nn.Module, prefix: str, modules: dict[str, nn.Module]) -> Iterator[None]:
    """Swap replacement modules into `layer` inside the context. modules: by path; prefix: the layer's path."""
    before = {path: layer.get_submodule(path[len(prefix) + 1 :]) for path in modules}
    for path, module in modules.items():
        layer.set_submodule(path[len(prefix) + 1 :], module)
    try:
        yield
    finally:
        for path, module in before.items():
            layer.set_submodule(path[len(prefix) + 1 :], module)


def stored_dtype(meta_model: MetaModel, target: LinearTarget) -> torch.dtype:
    """Return the dtype in which the target's parameters are stored: that of the weight they replace."""
    return DTYPES[meta_model.tensor_info(f"{target.linear.path}.weight").dtype]


def stored_module_name(meta_model: MetaModel, path: str) -> str:
    """Return the module's name in the checkpoint files, which may differ from its path."""
    key = meta_model.keys.get(f"{path}.weight", f"{path}.weight")
    return key.removesuffix(".weight")


def add_linear(
    meta_model: MetaModel,
    targets: list[LinearTarget],
    fitted: list[FitResult],
    device: torch.device,
    replacement: LayerReplacement,
) -> None:
    """Add the replacement of one linear to `replacement`; several targets are the slices of a fused linear."""
    linear = targets[0].linear
    bias = read_tensor(meta_model.tensor_info(f"{linear.path}.bias"), torch.float32).to(device) if linear.bias else None
    modules = [_with_bias(f, None if bias is None else select_rows(c, bias)) for c, f in zip(targets, fitted)]
    base, dtypes = stored_module_name(meta_model, linear.path), stored_dtype(meta_model, targets[0])
    replacement.records += [f.record.to_dict() for f in fitted]
    if targets[0].part is None and fitted[0].linear is None:  # a dense matrix, its numbers moved
        replacement.modules[linear.path] = modules[0]
        dense = fitted[0].dense_OI
        assert dense is not None
        replacement.entries.append(
            TensorSource.from_tensor(f"{base}.weight", (dense.mT if linear.transposed else dense).to(dtypes))
        )
        return
    specs = [table_entry(c, f.linear.config if f.linear is not None else None) for c, f in zip(targets, fitted)]
    if targets[0].part is None:
        module, spec = modules[0], specs[0]
    else:
        parts = {slice_name(c.part.role): m for c, m in zip(targets, modules) if c.part}
        heads = targets[0].part.heads
        module = SplitLinear(linear.in_, parts, targets[0].part.sizes, heads)
        spec = {"structure": "split", "parts": dict(zip(parts, specs)), "heads": heads}
    # What undoing it needs: the name in the file where it differs, and Conv1D's order of axes.
    spec = {
        **spec,
        **({"file_name": base} if base != linear.path else {}),
        **({"transposed": True} if linear.transposed else {}),
    }
    replacement.modules[linear.path], replacement.table[linear.path] = module, spec
    for name, tensor in module.state_dict().items():
        if name == "bias":
            continue  # copied as it is stored
        stored = tensor.to(dtypes) if tensor.is_floating_point() else tensor
        replacement.entries.append(TensorSource.from_tensor(f"{base}.{name}", stored))


def _with_bias(fitted: FitResult, bias: Tensor | None) -> nn.Module:
    if fitted.linear is not None:
        fitted.linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return fitted.linear
    assert fitted.dense_OI is not None
    return dense_linear(fitted.dense_OI, bias)


def add_mixer(
    meta_model: MetaModel,
    attention_target: AttentionTarget,
    initialized: InitializedMixer,
    replacement: LayerReplacement,
) -> None:
    """Add a mixer to `replacement`, its numbers rounded to the dtype of the weights around it. The output projection,
    where it stays dense, is stored folded: see FoldedLinear."""
    info = meta_model.tensor_info(f"{attention_target.output}.weight")
    stored, mixer = DTYPES[info.dtype], initialized.mixer.eval().requires_grad_(False)
    for parameter in mixer.parameters():
        parameter.data = parameter.data.to(stored).float()
    replacement.mixers[attention_target.path] = mixer
    replacement.mixer_table[attention_target.path] = mixer.config.to_dict()
    for name, tensor in mixer.state_dict().items():
        tensor = tensor.to(stored) if tensor.is_floating_point() else tensor
        replacement.entries.append(TensorSource.from_tensor(f"{attention_target.path}.mixer.{name}", tensor))
    replacement.mixer_records.append(
        {
            "name": attention_target.path,
            "errors": initialized.errors,
            "params": sum(t.numel() for t in mixer.state_dict().values()),
        }
    )


def fold_output(
    meta_model: MetaModel,
    plan: Plan,
    attention_target: AttentionTarget,
    device: torch.device,
    replacement: LayerReplacement,
) -> None:
    """After everything else of the layer: the output projection of a mixer, unless a structure has taken its place."""
    if attention_target.output in replacement.table:
        return
    linear = next(linear for linear in plan.layout.linears if linear.path == attention_target.output)
    info, base = (
        meta_model.tensor_info(f"{attention_target.output}.weight"),
        stored_module_name(meta_model, attention_target.output),
    )
    if attention_target.output not in replacement.modules:
        bias = (
            read_tensor(meta_model.tensor_info(f"{attention_target.output}.bias"), torch.float32).to(device)
            if linear.bias
            else None
        )
        weight = read_tensor(info, torch.float32).to(device)
        replacement.modules[attention_target.output] = dense_linear(weight.mT if linear.transposed else weight, bias)
    weight_OI: Any = replacement.modules[attention_target.output].weight.detach()  # type: ignore[operator]
    replacement.entries = [entry for entry in replacement.entries if entry.name != f"{base}.weight"]
    replacement.entries.append(TensorSource.from_tensor(f"{base}.weight", weight_OI[None].to(DTYPES[info.dtype])))
    spec = {"structure": "folded", "in_features": linear.in_, "out_features": linear.out, "bias": linear.bias}
    replacement.table[attention_target.output] = {
        **spec,
        **({"file_name": base} if base != attention_target.output else {}),
        **({"transposed": True} if linear.transposed else {}),
    }


def load_replacement(
    meta_model: MetaModel, plan: Plan, done: dict[str, Any], shard: dict[str, TensorInfo], device: torch.device
) -> LayerReplacement:
    """Return the replacement of a finished layer, from its journal entry and its layer shard."""
    replacement = LayerReplacement(table=done["table"], records=done["records"])
    for path, targets in plan.targets_in_layer(done["piece"]).items():
        linear = targets[0].linear
        spec = done["table"].get(path) or {**table_entry(targets[0], None), "transposed": linear.transposed}
        replacement.modules[path] = load_replacement_module(spec, stored_module_name(meta_model, path), shard, device)
    replacement.mixer_table, replacement.mixer_records = done.get("mixers", {}), done.get("mixer_records", [])
    for path, spec in replacement.mixer_table.items():
        attention_target = plan.attention_targets[done["piece"]]
        replacement.mixers[path] = load_mixer(spec, attention_target, shard, device)
    return replacement


def load_mixer(
    spec: dict[str, Any], attention_target: AttentionTarget, shard: dict[str, TensorInfo], device: torch.device
) -> Mixer:
    config = mixer_config(spec)
    with torch.device(device):
        mixer = MIXERS[config](config, attention_target.shape).float()
    state = {
        name: read_tensor(shard[f"{attention_target.path}.mixer.{name}"]).to(device) for name in mixer.state_dict()
    }
    mixer.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in state.items()})
    return mixer.eval().requires_grad_(False)


def load_replacement_module(
    spec: dict[str, Any], base: str, tensors: dict[str, TensorInfo], device: torch.device
) -> nn.Module:
    """Return the module of a table entry with its tensors, in float32."""
    module = build_module(spec).float()
    for name, tensor in module.state_dict().items():
        info = tensors.get(f"{base}.{name}")
        if info is None:
            raise SurgeryError(f"the checkpoint lacks tensor {base}.{name}, which its table names")
        loaded = read_tensor(info)
        if spec["structure"] == "dense" and spec.get("transposed") and name == "weight":
            loaded = loaded.mT.contiguous()
        if loaded.shape != tensor.shape:
            raise SurgeryError(
                f"tensor {info.name} has shape {list(loaded.shape)}, the table says {list(tensor.shape)}"
            )
        set_module_tensor(module, name, (loaded.float() if loaded.is_floating_point() else loaded).to(device))
    for part in module.modules():
        if isinstance(part, StructuredLinear):
            part.check_loaded()
    return module


K = TypeVar("K")


def broadcast_fits(
    ranks: DistContext, jobs: Mapping[K, tuple[LinearTarget, Callable[[], FitResult]]], device: torch.device
) -> dict[K, FitResult]:
    """Run the jobs on all processes, largest first, and return every job's result in every process."""
    if ranks.count == 1:
        return {name: fit() for name, (_, fit) in jobs.items()}
    names = list(jobs)
    owners = ranks.assign_jobs([jobs[name][0].numel for name in names])
    own = ranks.together_or_raise(
        lambda: {name: jobs[name][1]() for name, owner in zip(names, owners) if owner == ranks.index}
    )
    per_rank = ranks.gather({name: (f.record, f.linear.config if f.linear else None) for name, f in own.items()})
    return {
        name: _broadcast_fit(ranks, owner, jobs[name][0], own.get(name), *per_rank[owner][name], device=device)
        for name, owner in zip(names, owners)
    }


def _broadcast_fit(
    ranks: DistContext,
    owner: int,
    target: LinearTarget,
    own: FitResult | None,
    record: Any,
    config: Any,
    *,
    device: torch.device,
) -> FitResult:
    if config is None:
        dense_OI = torch.empty(target.out, target.in_, device=device) if own is None else own.dense_OI
        assert dense_OI is not None
        return FitResult(record, None, ranks.broadcast_(dense_OI, owner))
    linear = (
        own.linear if own is not None else STRUCTURES[config](target.in_, target.out, config, bias=False, device="meta")
    )
    assert linear is not None
    for name, tensor in sorted(linear.state_dict().items()):
        passed = ranks.broadcast_(tensor if own is not None else torch.empty_like(tensor, device=device), owner)
        if own is None:
            set_module_tensor(linear, name, passed)
    return own or FitResult(record, linear)


def broadcast_mixer(
    ranks: DistContext,
    owner: int,
    attention_target: AttentionTarget,
    start: Callable[[], InitializedMixer],
    device: torch.device,
) -> InitializedMixer:
    """Initialize a mixer in the process `owner` and broadcast it to all."""
    if ranks.count == 1:
        return start()
    own = ranks.together_or_raise(lambda: start() if ranks.index == owner else None)
    config, errors = ranks.gather(None if own is None else (own.mixer.config, own.errors))[owner]  # type: ignore[misc]
    if own is None:
        with torch.device(device):
            own = InitializedMixer(MIXERS[config](config, attention_target.shape).float(), errors)
    state = own.mixer.state_dict()
    for name in sorted(state):
        tensor: Tensor = state[name].contiguous()
        state[name].copy_(ranks.broadcast_(tensor, owner))
    return own
