"""Replacement modules of a layer: build them from fits, swap them in, and load them from a layer shard.

Distribute fits over processes and broadcast the results, so that all processes continue with identical weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from surgery.architectures.linears import LinearInfo
from surgery.checkpoint.meta_model import MetaModel, set_module_tensor
from surgery.checkpoint.safetensors_io import DTYPES, TensorInfo, TensorSource, read_tensor
from surgery.checkpoint.table import is_pruned
from surgery.conversion.fit import FitRecord, FitResult
from surgery.conversion.mixer_init import InitializedMixer
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, Mixer, mixer_config
from surgery.modeling.joined import JoinedLinear, connect_joined
from surgery.modeling.modules import GuardedLinear, SplitLinear, build_module, shares_basis
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.targets import LinearTarget, Plan
from surgery.planning.weights import (
    joined_entries,
    narrowed_entries,
    neuron_rows,
    select_rows,
    slice_name,
    table_entry,
    target_weight,
)
from surgery.structures import STRUCTURES, StructureConfig, StructuredLinear
from surgery.structures.call_scope import hold_groups
from surgery.structures.quantized import QuantizedLinear
from surgery.structures.shared_basis import SharedBasis, SharedLowRankLinear, basis_path, first_expert

if TYPE_CHECKING:
    from surgery.planning.native import NativeTarget


@dataclass
class LayerReplacement:
    """The replacement of one layer.

    modules, mixers: replacement modules and mixers by path. entries: tensors of the layer shard. table, mixer_table:
    entries of the checkpoint's quantization_config. records, mixer_records: entries of the report. structured: the
    modules with structured weights as they are stored, where they will be trained (`modules` may hold dense linears
    with the same weights). tuned: the report's entry of the layer's tuning. originals: trained norms and biases of
    modules that stay, in float32, by parameter.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    entries: list[TensorSource] = field(default_factory=list)
    table: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    mixers: dict[str, Mixer] = field(default_factory=dict)
    mixer_table: dict[str, dict[str, Any]] = field(default_factory=dict)
    mixer_records: list[dict[str, Any]] = field(default_factory=list)
    structured: dict[str, nn.Module] = field(default_factory=dict)
    tuned: dict[str, Any] | None = None
    originals: dict[str, Tensor] = field(default_factory=dict)

    def set_tensors(self, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
        """Give entries other tensors, by name, and add those that are missing. dtypes: in the files, by name."""
        new = {name: TensorSource.from_tensor(name, tensor.to(dtypes[name])) for name, tensor in tensors.items()}
        self.entries = [new.pop(entry.name, entry) for entry in self.entries] + list(new.values())

    def outside(self, parameters: Mapping[str, str]) -> dict[str, str]:
        """Return those parameters of the original, parameter -> name in the files, whose modules are not replaced."""
        return {p: name for p, name in parameters.items() if p.rpartition(".")[0] not in self.modules}

    def find_structured(self) -> None:
        """Set `structured` to the modules with structured weights, the linears of pruned MLPs and attention, and the
        bases that experts share.
        """
        for path, module in self.modules.items():
            if isinstance(module, (StructuredLinear, SplitLinear, JoinedLinear)) or is_pruned(self.table.get(path, {})):
                self.structured[path] = module
            if isinstance(module, SharedLowRankLinear):
                self.structured[basis_path(path)] = module.basis

    def trained_modules(self) -> dict[str, nn.Module]:
        """Return the modules of `structured` that replace a linear; a shared basis is called by those of the
        experts.
        """
        return {path: module for path, module in self.structured.items() if not isinstance(module, SharedBasis)}


def densify_module(module: nn.Module) -> nn.Module:
    """Return a dense linear with the same weight and bias as a structured, split, joined or guarded one; others
    unchanged.

    All calibration samples run through the module several times, and one dense product is much faster than many blocks.
    """
    if isinstance(module, SplitLinear):
        return dense_linear(module.dense(), module.fused_bias())
    if isinstance(module, (StructuredLinear, JoinedLinear, GuardedLinear)):
        return dense_linear(module.dense(), module.bias)
    return module


def dense_linear(weight_OI: Tensor, bias_O: Tensor | None) -> nn.Linear:
    """Return a frozen linear that shares the memory of the weight (out, in) and the bias (out,)."""
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
    joined = any(isinstance(module, JoinedLinear) for module in modules.values())
    if joined:
        hold_groups(layer)
    try:
        yield
    finally:
        for path, module in before.items():
            layer.set_submodule(path[len(prefix) + 1 :], module)
        if joined:
            hold_groups(layer)


def stored_dtype(meta_model: MetaModel, target: LinearTarget) -> torch.dtype:
    """Return the dtype in which the target's parameters are stored: that of the weight they replace."""
    return DTYPES[meta_model.tensor_info(f"{target.linear.path}.weight").dtype]


def stored_module_name(meta_model: MetaModel, path: str) -> str:
    """Return the module's name in the checkpoint files, which may differ from its path."""
    expert = first_expert(path)
    if f"{expert}.weight" in meta_model.keys:  # the basis of experts is stored beside them
        return basis_path(stored_module_name(meta_model, expert))
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
    if targets[0].joined:
        _add_joined(meta_model, targets[0], fitted[0], device, replacement)
        return
    if targets[0].neurons and fitted[0].linear is not None:
        _add_narrowed(meta_model, targets[0], fitted[0], device, replacement)
        return
    bias = _read_bias(meta_model, linear, device)
    if bias is not None and fitted[0].bias_change_O is not None:
        bias_dtype = DTYPES[meta_model.tensor_info(f"{linear.path}.bias").dtype]
        bias = (bias + fitted[0].bias_change_O).to(bias_dtype).float()
    modules = [_with_bias(f, None if bias is None else select_rows(t, bias)) for t, f in zip(targets, fitted)]
    base, dtype = stored_module_name(meta_model, linear.path), stored_dtype(meta_model, targets[0])
    replacement.records += [f.record.to_dict() for f in fitted]
    if targets[0].part is None and fitted[0].linear is None:  # a refitted dense matrix, which has no table entry
        replacement.modules[linear.path] = modules[0]
        dense = fitted[0].dense_OI
        if bias is not None and fitted[0].bias_change_O is not None:
            replacement.entries.append(TensorSource.from_tensor(f"{base}.bias", bias.to(bias_dtype)))
        assert dense is not None
        replacement.entries.append(
            TensorSource.from_tensor(f"{base}.weight", (dense.mT if linear.transposed else dense).to(dtype))
        )
        return
    specs = [table_entry(t, f.linear.config if f.linear is not None else None) for t, f in zip(targets, fitted)]
    if targets[0].part is None:
        module, spec = modules[0], specs[0]
    else:
        parts = {slice_name(t.part.role): m for t, m in zip(targets, modules) if t.part}
        heads = targets[0].part.heads
        module = SplitLinear(linear.in_, parts, targets[0].part.sizes, heads)
        spec = {"structure": "split", "parts": dict(zip(parts, specs)), "order": list(parts), "heads": heads}
    replacement.modules[linear.path] = module
    replacement.table[linear.path] = {**spec, **_storage_options(base, linear)}
    for name, tensor in module.state_dict().items():
        if name == "bias":
            continue  # copied from the source unchanged
        stored = tensor.to(dtype) if tensor.is_floating_point() else tensor
        stored_name = f"{base}.{name}"
        if targets[0].basis and name == "right":
            if not targets[0].stores_basis:
                continue  # stored once for the experts of the layer
            stored_name, stored = f"{basis_path(base)}.weight", stored[None]
        replacement.entries.append(TensorSource.from_tensor(stored_name, stored))


def _add_joined(
    meta_model: MetaModel,
    target: LinearTarget,
    fitted: FitResult,
    device: torch.device,
    replacement: LayerReplacement,
) -> None:
    """Add the replacements of linears that one matrix replaces. If it stays dense, each gets its refitted rows."""
    replacement.records.append(fitted.record.to_dict())
    matrix, start = fitted.linear, 0
    entries = {} if matrix is None else joined_entries(target, matrix.config)
    for linear in target.joined:
        base, bias = stored_module_name(meta_model, linear.path), _read_bias(meta_model, linear, device)
        if matrix is None:
            assert fitted.dense_OI is not None
            rows_OI = fitted.dense_OI[start : start + linear.out].clone()
            replacement.modules[linear.path] = dense_linear(rows_OI, bias)
            stored = {"weight": (rows_OI.mT if linear.transposed else rows_OI).contiguous()}
        else:
            spec = entries[linear.path]
            joined = None if start else matrix
            module = JoinedLinear(
                linear.in_, linear.out, start, joined, spec.get("first", ""), bias=False, device=device
            )
            stored = module.state_dict()
            module.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
            replacement.modules[linear.path] = module
            replacement.table[linear.path] = {**spec, **_storage_options(base, linear)}
        for name, tensor in stored.items():
            tensor = tensor.to(stored_dtype(meta_model, target)) if tensor.is_floating_point() else tensor
            replacement.entries.append(TensorSource.from_tensor(f"{base}.{name}", tensor))
        start += linear.out
    connect_joined({linear.path: replacement.modules[linear.path] for linear in target.joined})


def _add_narrowed(
    meta_model: MetaModel,
    target: LinearTarget,
    fitted: FitResult,
    device: torch.device,
    replacement: LayerReplacement,
) -> None:
    """Add the linears of a pruned MLP or attention: the rows of the neurons or heads that stay, and the last linear as
    it was fitted to them. With fewer value dims, the rows are those of the values in their bases.
    """
    replacement.records.append(fitted.record.to_dict())
    last: Any = fitted.linear
    has_value_dims = last.config.name == "value_dims"
    entries = narrowed_entries(target, last.config)
    for linear, sizes in zip(target.all_linears, (*target.sizes, ())):
        base, bias_O = stored_module_name(meta_model, linear.path), _read_bias(meta_model, linear, device)
        if linear is target.linear:
            weight_OI = last.weight[0].detach()
            if bias_O is not None and fitted.bias_change_O is not None:
                bias_O = bias_O + fitted.bias_change_O
        else:
            weight_OI = target_weight(meta_model, LinearTarget(linear, linear.out, 1.0, ()), device)
            if has_value_dims:
                weight_OI = last.turn_values(weight_OI)
                bias_O = None if bias_O is None else last.padded_values(last.turn_values(bias_O[:, None]))[:, 0]
            else:
                rows = neuron_rows(last.columns.long(), sizes, target)
                weight_OI, bias_O = weight_OI[rows], None if bias_O is None else bias_O[rows]
        spec = {**entries[linear.path], **_storage_options(base, linear)}
        module = build_module(spec)
        if has_value_dims:
            stored = {"weight": weight_OI[None].contiguous()}
        else:
            stored = {"weight": (weight_OI.mT if linear.transposed else weight_OI).contiguous()}
        stored |= {} if bias_O is None else {"bias": bias_O}
        for name, tensor in stored.items():
            dtype = DTYPES[meta_model.tensor_info(f"{linear.path}.{name}").dtype]
            set_module_tensor(module, name, tensor.to(dtype).float())
            replacement.entries.append(TensorSource.from_tensor(f"{base}.{name}", tensor.to(dtype)))
        replacement.modules[linear.path], replacement.table[linear.path] = module, spec


def _read_bias(meta_model: MetaModel, linear: LinearInfo, device: torch.device) -> Tensor | None:
    """Return the bias (out,) of a linear of the original in float32, or None."""
    if not linear.bias:
        return None
    return read_tensor(meta_model.tensor_info(f"{linear.path}.bias"), torch.float32).to(device)


def _storage_options(base: str, linear: LinearInfo) -> dict[str, Any]:
    """Return the options of a table entry that `densify` needs: the name in the files if it is not the path, and
    whether the source stores the weight as (in, out), as Conv1D does."""
    name = {"file_name": base} if base != linear.path else {}
    return {**name, **({"transposed": True} if linear.transposed else {})}


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
    """Add a mixer to `replacement`, with its values rounded to the dtype of the weights around it.

    If the output projection stays dense, `fold_output` stores it as a GuardedLinear.
    """
    info = meta_model.tensor_info(f"{attention_target.output}.weight")
    stored, mixer = DTYPES[info.dtype], initialized.mixer.eval().requires_grad_(False)
    saved = mixer.state_dict().keys()
    for name, tensor in (*mixer.named_parameters(), *mixer.named_buffers()):
        if name in saved and tensor.is_floating_point():
            tensor.data = tensor.data.to(stored).float()
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


def add_level_weights(meta_model: MetaModel, target: NativeTarget, replacement: LayerReplacement) -> None:
    """Add the level weights of a native linear layer, 1 in every level, to the files of `replacement`.

    The layer computes the same with them, so that calibration runs it without.
    """
    inside = [meta_model.tensor_info(name) for name in meta_model.keys if name.startswith(f"{target.path}.")]
    stored = DTYPES[max(inside, key=lambda info: info.numel).dtype]
    state = MIXERS[target.config](target.config, target.shape).to(stored).state_dict()
    replacement.mixer_table[target.path] = target.config.to_dict()
    replacement.entries += [TensorSource.from_tensor(f"{target.path}.mixer.{name}", t) for name, t in state.items()]
    params = sum(t.numel() for t in state.values())
    replacement.mixer_records.append({"name": target.path, "errors": {}, "params": params})


def fold_output(
    meta_model: MetaModel,
    plan: Plan,
    attention_target: AttentionTarget,
    device: torch.device,
    replacement: LayerReplacement,
) -> None:
    """Store the dense output projection of a mixer as a GuardedLinear, (1, out, in). A structured one stays as it is.

    Called after all other replacements of the layer, which may have refitted the projection.
    """
    path = attention_target.output
    if path in replacement.table:
        return
    linear = next(linear for linear in plan.layout.linears if linear.path == path)
    info, base = meta_model.tensor_info(f"{path}.weight"), stored_module_name(meta_model, path)
    if path not in replacement.modules:
        bias = _read_bias(meta_model, linear, device)
        weight = read_tensor(info, torch.float32).to(device)
        replacement.modules[path] = dense_linear(weight.mT if linear.transposed else weight, bias)
    weight_OI = replacement.modules[path].get_parameter("weight").detach()
    replacement.entries = [entry for entry in replacement.entries if entry.name != f"{base}.weight"]
    replacement.entries.append(TensorSource.from_tensor(f"{base}.weight", weight_OI[None].to(DTYPES[info.dtype])))
    spec = {"structure": "folded", "in_features": linear.in_, "out_features": linear.out, "bias": linear.bias}
    replacement.table[path] = {**spec, **_storage_options(base, linear)}


def entry_of_tuning(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a layer's journal entry says of its tuning; version 0.2 called it `refined`."""
    tuned: dict[str, Any] | None = entry.get("tuned", entry.get("refined"))
    return tuned


def load_replacement(
    meta_model: MetaModel,
    plan: Plan,
    entry: dict[str, Any],
    tensors: dict[str, TensorInfo],
    device: torch.device,
    original_names: Mapping[str, str] | None = None,
) -> LayerReplacement:
    """Return the replacement of a finished layer, from its journal entry and the tensors of its layer shard.

    original_names: norms and biases of the original that are trained, parameter -> name in the files.
    """
    replacement = LayerReplacement(table=entry["table"], records=entry["records"], tuned=entry_of_tuning(entry))
    bases: dict[str, SharedBasis] = {}
    linears = {linear.path: linear for linear in plan.layout.linears}
    for path in plan.replaced_linears(entry["piece"]):
        linear = linears[path]
        spec = entry["table"].get(path) or {
            "structure": "dense", "in_features": linear.in_, "out_features": linear.out, "bias": linear.bias,
            "transposed": linear.transposed,
        }  # fmt: skip
        module = load_replacement_module(spec, stored_module_name(meta_model, path), tensors, device)
        if isinstance(module, SharedLowRankLinear):  # one module for the experts of the layer
            module.connect(bases.setdefault(basis_path(path), module.basis))
        replacement.modules[path] = module
    connect_joined(replacement.modules)
    replacement.mixer_table, replacement.mixer_records = entry.get("mixers", {}), entry.get("mixer_records", [])
    attention_target = plan.attention_targets.get(entry["piece"])
    if attention_target is not None and (spec := replacement.mixer_table.get(attention_target.path)):
        replacement.mixers[attention_target.path] = load_mixer(spec, attention_target, tensors, device)
    for parameter, name in replacement.outside(original_names or {}).items():
        replacement.originals[parameter] = read_tensor(tensors[name], torch.float32, device=device)
    return replacement


def load_mixer(
    spec: dict[str, Any], attention_target: AttentionTarget, tensors: dict[str, TensorInfo], device: torch.device
) -> Mixer:
    """Return the frozen mixer of a mixer_table entry, in float32, with its tensors from a layer shard."""
    config = mixer_config(spec)
    with torch.device(device):
        mixer = MIXERS[config](config, attention_target.shape).float()
    state = {
        name: read_tensor(tensors[f"{attention_target.path}.mixer.{name}"]).to(device) for name in mixer.state_dict()
    }
    mixer.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in state.items()})
    return mixer.eval().requires_grad_(False)


def load_replacement_module(
    spec: dict[str, Any], base: str, tensors: dict[str, TensorInfo], device: torch.device
) -> nn.Module:
    """Return the module of a table entry with its tensors, in float32. base: its name in the files.

    Raises SurgeryError if a tensor is missing or has another shape.
    """
    module: Any = build_module(spec).float()
    if shares_basis(spec):
        basis = SharedBasis(module.in_features, module.config.rank, device="meta")
        _load_tensors(basis, {}, basis_path(base), tensors, device)
        module.connect(basis)
    _load_tensors(module, spec, base, tensors, device)
    for submodule in module.modules():
        if isinstance(submodule, (StructuredLinear, QuantizedLinear)):
            submodule.check_loaded()
    loaded: nn.Module = module
    return loaded


def _load_tensors(
    module: nn.Module, spec: dict[str, Any], base: str, tensors: dict[str, TensorInfo], device: torch.device
) -> None:
    for name, tensor in module.state_dict().items():
        info = tensors.get(f"{base}.{name}")
        if info is None:
            raise SurgeryError(f"the checkpoint lacks tensor {base}.{name}, which its table needs")
        loaded = read_tensor(info)
        if spec.get("structure") == "dense" and spec.get("transposed") and name == "weight" and "bits" not in spec:
            loaded = loaded.mT.contiguous()
        if loaded.shape != tensor.shape:
            raise SurgeryError(
                f"tensor {info.name} has shape {list(loaded.shape)}, the table says {list(tensor.shape)}"
            )
        widens = loaded.is_floating_point() and tensor.dtype == torch.float32  # weights in FP8 stay as they are
        set_module_tensor(module, name, (loaded.float() if widens else loaded).to(device))


K = TypeVar("K")


def broadcast_fits(
    dist: DistContext, jobs: Mapping[K, tuple[LinearTarget, Callable[[], FitResult]]], device: torch.device
) -> dict[K, FitResult]:
    """Run the fits on all processes, largest first, and return every result in every process.

    jobs: key -> (the target that is fitted, a function that fits it).
    """
    if dist.count == 1:
        return {name: fit() for name, (_, fit) in jobs.items()}
    names = list(jobs)
    owners = dist.assign_jobs([jobs[name][0].numel for name in names])
    local_fits = dist.together_or_raise(
        lambda: {name: jobs[name][1]() for name, owner in zip(names, owners) if owner == dist.index}
    )
    per_rank = dist.gather({name: (f.record, f.linear.config if f.linear else None) for name, f in local_fits.items()})
    return {
        name: _broadcast_fit(dist, owner, jobs[name][0], local_fits.get(name), *per_rank[owner][name], device=device)
        for name, owner in zip(names, owners)
    }


def broadcast_shared_fits(
    dist: DistContext,
    jobs: Sequence[tuple[Sequence[LinearTarget], Callable[[], dict[str, FitResult]]]],
    device: torch.device,
) -> dict[str, FitResult]:
    """Run joint fits of several targets each on all processes, and return the results by name in every process."""
    if dist.count == 1:
        return {name: result for _, fit in jobs for name, result in fit().items()}
    owners = dist.assign_jobs([sum(target.numel for target in targets) for targets, _ in jobs])
    local_fits = dist.together_or_raise(
        lambda: {n: r for (_, fit), owner in zip(jobs, owners) if owner == dist.index for n, r in fit().items()}
    )
    per_rank = dist.gather({name: (f.record, f.linear.config if f.linear else None) for name, f in local_fits.items()})
    return {
        target.name: _broadcast_fit(
            dist, owner, target, local_fits.get(target.name), *per_rank[owner][target.name], device=device
        )
        for (targets, _), owner in zip(jobs, owners)
        for target in targets
    }


def _broadcast_fit(
    dist: DistContext,
    owner: int,
    target: LinearTarget,
    local_fit: FitResult | None,
    record: FitRecord,
    config: StructureConfig | None,
    *,
    device: torch.device,
) -> FitResult:
    """Broadcast a fit from process `owner`, where it is `local_fit`; the others know only its record and config."""
    if config is None:
        dense_OI = torch.empty(target.out, target.in_, device=device) if local_fit is None else local_fit.dense_OI
        assert dense_OI is not None
        return FitResult(record, None, dist.broadcast_(dense_OI, owner))
    linear = (
        local_fit.linear
        if local_fit is not None
        else STRUCTURES[config](target.in_, target.out, config, bias=False, device="meta")
    )
    assert linear is not None
    for name, tensor in sorted(linear.state_dict().items()):
        received = dist.broadcast_(tensor if local_fit is not None else torch.empty_like(tensor, device=device), owner)
        if local_fit is None:
            set_module_tensor(linear, name, received)
    return local_fit or FitResult(record, linear)


def broadcast_mixer(
    dist: DistContext,
    owner: int,
    attention_target: AttentionTarget,
    initialize: Callable[[], InitializedMixer],
    device: torch.device,
) -> InitializedMixer:
    """Initialize a mixer in the process `owner` and broadcast it to all."""
    if dist.count == 1:
        return initialize()
    initialized = dist.together_or_raise(lambda: initialize() if dist.index == owner else None)
    settings = None if initialized is None else (initialized.mixer.config, initialized.errors)
    config, errors = dist.gather(settings)[owner]  # type: ignore[misc]
    if initialized is None:
        with torch.device(device):
            initialized = InitializedMixer(MIXERS[config](config, attention_target.shape).float(), errors)
    state = initialized.mixer.state_dict()
    for name in sorted(state):
        tensor: Tensor = state[name].contiguous()
        state[name].copy_(dist.broadcast_(tensor, owner))
    return initialized
