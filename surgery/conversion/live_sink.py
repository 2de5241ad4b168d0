"""The result of a conversion in the modules of a model in memory.

Fits and mixers are computed from copies, as for a checkpoint. The model changes only after everything was computed and
built; an error before or while modules are swapped leaves it as it was.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from surgery.architectures.experts import RoutedExperts, keep_experts_split, merge_experts, split_experts
from surgery.calibration.data import CalibrationSet
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import TensorInfo, TensorSource
from surgery.checkpoint.table import is_narrowed
from surgery.checkpoint.writer import converted_config
from surgery.conversion.context import ConversionContext
from surgery.conversion.live_source import path_prefix
from surgery.conversion.norms import layer_norms_and_biases, outer_norms
from surgery.conversion.replacement import stored_module_name
from surgery.conversion.sinks import JournalEntry, merged_tables
from surgery.conversion.whole_module import PREFIX
from surgery.core.errors import SurgeryError
from surgery.core.files import explain_disk_errors
from surgery.core.journal import Journal
from surgery.mixers import mixer_config
from surgery.modeling.applied import original_folder, set_applied_class
from surgery.modeling.joined import JoinedLinear, connect_joined
from surgery.modeling.live import copy_hooks, is_library_model
from surgery.modeling.modules import build_module, connect_bases, shares_basis
from surgery.modeling.quantization_config import SurgeryConfig
from surgery.modeling.quantizer import put_mixer, untie
from surgery.planning.targets import LinearTarget, Plan
from surgery.structures.call_scope import hold_groups
from surgery.structures.shared_basis import SharedBasis, basis_path

AGAIN = "free some space, or choose another folder for temporary files (scratch=), and call surgery.apply again"


class LiveSink:
    """A model in memory, whose modules are replaced when everything is computed. It cannot be resumed.

    tokenizer: saved with the model. scratch: folder of temporary files; None: the system's. Attributes: tensors: name
    -> new tensor on the CPU; table, mixers: of the quantization_config, by path in the copy on the meta device.
    """

    def __init__(self, model: Any, tokenizer: Any = None, scratch: Path | None = None):
        self.model, self.tokenizer, self.scratch = model, tokenizer, scratch
        self.tensors: dict[str, Tensor] = {}
        self.stored: list[TensorSource] = []
        self.fitted: dict[str, list[TensorSource]] = {}  # tensors of each layer before the whole model is trained
        self.table: dict[str, Any] = {}
        self.mixers: dict[str, Any] = {}

    def live_path(self, path: str) -> str:
        """Return the path in the model of a module of the copy on the meta device."""
        return path.removeprefix(path_prefix(self.model))

    def check(self) -> None:
        """Raise SurgeryError if there is no folder for temporary files."""
        if self.scratch is not None and not self.scratch.is_dir():
            raise SurgeryError(f"scratch={str(self.scratch)!r} is not a folder. Make it first, or leave it out")

    def check_plan(self, model: MetaModel, plan: Plan) -> None:
        """Raise SurgeryError if a linear to be replaced is the module itself, or shares its weight with another
        parameter.
        """
        if is_library_model(self.model):
            return
        shared = {name for pair in model.tied.items() for name in pair}
        for path in plan.replaced_linears():
            if path == PREFIX.rstrip("."):
                raise SurgeryError(
                    f"the model is a single {type(self.model).__name__}, which cannot be replaced in place. Give a "
                    "module that contains it"
                )
            if f"{path}.weight" in shared:
                raise SurgeryError(
                    f"{self.live_path(path)} shares its weight with another parameter, which replacing it would untie. "
                    "Leave it dense: "
                    f"rules=[{{'match': '{self.live_path(path)}', 'structure': 'dense'}}]"
                )

    def notes(self, model: MetaModel) -> list[str]:
        """Return []: no files are written."""
        return []

    def closing_notes(self, model: MetaModel) -> list[str]:
        """Return []: no files are written."""
        return []

    @contextmanager
    def open(self, model: MetaModel, plan: Plan, samples: CalibrationSet | None) -> Iterator[Journal]:
        """Make a folder of temporary files, which is removed at the end. See `Sink.open`."""
        with (
            explain_disk_errors(self.scratch or Path(tempfile.gettempdir()), AGAIN),
            tempfile.TemporaryDirectory(prefix="surgery-", dir=self.scratch) as folder,
            Journal(Path(folder) / "work", {"source": model.source.name}, resume=False) as journal,
        ):
            yield journal

    def usable_entries(self, ctx: ConversionContext, entries: list[JournalEntry]) -> list[JournalEntry]:
        """Return `entries`: nothing was interrupted."""
        return entries

    def write_layer(self, ctx: ConversionContext, step: str, layer: str, tensors: list[TensorSource]) -> str:
        """Keep the new tensors of a layer in memory. See `Sink.write_layer`."""
        if step == "fitted":
            self.fitted[layer] = tensors
        else:
            self.stored += [replace(tensor, tensor=None) for tensor in tensors]
            self.tensors |= {tensor.name: tensor.tensor for tensor in tensors if tensor.tensor is not None}
        return ""

    def read_layer(self, ctx: ConversionContext, step: str, layer: str) -> list[TensorSource]:
        """Return the tensors of a fitted layer, once: they are no longer kept here."""
        return self.fitted.pop(layer)

    def write_model(self, ctx: ConversionContext, entries: list[JournalEntry]) -> Sequence[TensorInfo | TensorSource]:
        """Return the names and shapes of the result's tensors. The model is not changed yet."""
        self.table, self.mixers = merged_tables(entries)
        return self.stored

    def write_report(self, ctx: ConversionContext, report: dict[str, Any]) -> None:
        """Put the replacements into the model, with the report. An error on the way undoes what was done."""
        model, meta_model = self.model, ctx.model
        refits = {
            linear.path: self.tensors[f"{stored_module_name(meta_model, linear.path)}.weight"]
            for target in _refitted(ctx.plan)
            for linear in target.linears
            if linear.path not in self.table
        }
        names = {path: f"{stored_module_name(meta_model, path)}.bias" for path in refits}
        biases = {path: self.tensors[name] for path, name in names.items() if name in self.tensors}
        with _undone_on_error(model) as undo:
            if _splits_experts(meta_model, ctx.plan):
                split_experts(model)
                keep_experts_split(model)
            for parameter, tensor in self._tuned_originals(ctx).items():
                path, _, leaf = parameter.rpartition(".")
                _set_parameter(model.get_submodule(self.live_path(path)), leaf, tensor, undo)
            built = {path: _build(self, meta_model, path, spec) for path, spec in self.table.items()}
            connect_joined(built)
            _train_joined(self, built)
            undo.append(lambda: hold_groups(model))  # after the modules are back: steps are undone from the last
            for path, module in built.items():
                _swap(model, self.live_path(path), module, undo)
            hold_groups(model)
            sharing = [path for path, spec in self.table.items() if shares_basis(spec)]
            connect_bases(model, sharing, {basis_path(path): _basis(self, meta_model, path) for path in sharing})
            for path, weight in refits.items():
                _set_parameter(model.get_submodule(self.live_path(path)), "weight", weight, undo)
            for path, bias in biases.items():
                _set_parameter(model.get_submodule(self.live_path(path)), "bias", bias, undo)
            if not is_library_model(model):
                model.surgery_report = report
                return
            set_applied_class(model, bool(self.mixers))
            for path, spec in self.mixers.items():
                _set_mixer(model, path, spec, self.tensors)
            for path in built:
                untie(model, path)
            _set_config(self, meta_model, undo)
            if not hasattr(
                model.config, "quantization_config"
            ):  # an ordinary model, with files as transformers writes them
                merge_experts(model)
            model.surgery_report = report
            model.surgery_companions = (self.tokenizer, original_folder(model))

    def _tuned_originals(self, ctx: ConversionContext) -> dict[str, Tensor]:
        """Return the norms and biases of the original that were tuned, by parameter."""
        if ctx.data is None or not ctx.recipe.epochs.norms:
            return {}
        names = dict(outer_norms(ctx.model, ctx.plan.layout))
        for layer in ctx.plan.layout.layers:
            names |= layer_norms_and_biases(ctx.model, layer)
        return {parameter: self.tensors[name] for parameter, name in names.items() if name in self.tensors}


def _splits_experts(meta_model: MetaModel, plan: Plan) -> bool:
    """Return whether the live model's experts become linears: some are converted, or only so its files are those of the
    command.

    Where transformers' rules store experts one by one, the files have the same tensors without that.
    """
    routed = [module for module in meta_model.model.modules() if isinstance(module, RoutedExperts)]
    converted = any(target.linear.experts for target in _refitted(plan))
    return converted or any(module.layout.stored_merged for module in routed)


def _refitted(plan: Plan) -> list[LinearTarget]:
    return [target for targets in plan.targets.values() for target in targets if target.part is None]


def _build(sink: LiveSink, meta_model: MetaModel, path: str, spec: dict[str, Any]) -> nn.Module:
    """Build the module of a table entry with its tensors, on the device of the linear that it replaces, whose bias it
    shares.
    """
    linear: Any = sink.model.get_submodule(sink.live_path(path))
    weight, base = linear.weight, stored_module_name(meta_model, path)
    module: Any = build_module(spec, device=weight.device, dtype=weight.dtype)
    has_bias = is_narrowed(spec)  # which has fewer outputs, or is tuned with them
    state = {name: sink.tensors[f"{base}.{name}"] for name in module.state_dict() if has_bias or name != "bias"}
    module.load_state_dict(state, strict=False)
    if spec["structure"] != "split" and linear.bias is not None and not has_bias:
        module.bias = linear.bias
    for parameter in module.parameters():
        if parameter is not linear.bias:
            parameter.requires_grad_(weight.requires_grad)
    copy_hooks(linear, module)
    built: nn.Module = module.train(linear.training)
    return built


def _train_joined(sink: LiveSink, built: dict[str, nn.Module]) -> None:
    """Let the matrix of joined linears be trained if one of the linears that it replaces is."""
    trained: dict[nn.Module, bool] = {}
    for path, module in built.items():
        if isinstance(module, JoinedLinear):
            weight: Any = sink.model.get_submodule(sink.live_path(path)).weight
            trained[module.matrix] = trained.get(module.matrix, False) or bool(weight.requires_grad)
    for matrix, requires_grad in trained.items():
        matrix.requires_grad_(requires_grad)


def _basis(sink: LiveSink, meta_model: MetaModel, path: str) -> SharedBasis:
    """Build the basis that the expert's linear at `path` shares, on its device."""
    linear: Any = sink.model.get_submodule(path)
    weight, name = linear.weight, f"{stored_module_name(meta_model, basis_path(path))}.weight"
    basis = SharedBasis(linear.in_features, linear.config.rank, device=weight.device, dtype=weight.dtype)
    basis.load_state_dict({"weight": sink.tensors[name]})
    return basis.requires_grad_(weight.requires_grad).train(linear.training)


Undo = list[Callable[[], None]]


@contextmanager
def _undone_on_error(model: Any) -> Iterator[Undo]:
    """Yield a list of functions that undo changes; on an error, also classes, attributes and the config are
    restored.
    """
    undo: Undo = []
    states = [(m, type(m), dict(vars(m)), dict(m._modules), dict(m._parameters)) for m in model.modules()]
    config = getattr(model, "config", None)
    settings = dict(vars(config)) if config is not None and is_library_model(model) else None
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    try:
        yield undo
    except BaseException:
        for step in reversed(undo):
            step()
        for module, kind, attributes, modules, parameters in states:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for saved, now in ((modules, module._modules), (parameters, module._parameters)):
                now.clear()
                now.update(saved)
        if settings is not None:
            vars(config).clear()
            vars(config).update(settings)
            model.all_tied_weights_keys.clear()
            model.all_tied_weights_keys.update(tied)
        raise


def _swap(model: Any, path: str, module: nn.Module, undo: Undo) -> None:
    before = model.get_submodule(path)
    undo.append(lambda: model.set_submodule(path, before))
    model.set_submodule(path, module)


def _set_parameter(module: Any, leaf: str, tensor: Tensor, undo: Undo) -> None:
    """Give a module another parameter; the tensor that it had is not overwritten."""
    before = getattr(module, leaf)
    undo.append(lambda: setattr(module, leaf, before))
    setattr(module, leaf, nn.Parameter(tensor.to(before.device, before.dtype), requires_grad=before.requires_grad))


def _set_mixer(model: Any, path: str, spec: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    put_mixer(model, path, mixer_config(spec))
    attention = model.get_submodule(path)
    names = attention.mixer.state_dict()
    attention.mixer.load_state_dict({name: tensors[f"{path}.mixer.{name}"] for name in names})
    frozen = not any(p.requires_grad for n, p in attention.named_parameters() if not n.startswith("mixer."))
    attention.mixer.requires_grad_(not frozen)


def _set_config(sink: LiveSink, meta_model: MetaModel, undo: Undo) -> None:
    """Record the table in the model's config, or the width of pruned MLPs; a replaced head or embedding is no longer
    tied.
    """
    source, config = meta_model.source, sink.model.config
    new = converted_config(source, meta_model, sink.table, sink.mixers)
    table = new.pop("quantization_config", None)
    for key, value in new.items():
        before = source.config.get(key)
        if value == before:
            continue
        if isinstance(value, dict) and isinstance(before, dict):  # the config of a tower
            for name in value.keys() - {n for n in before if before[n] == value.get(n)}:
                _set_option(getattr(config, key), name, value[name], undo)
        else:
            setattr(config, key, copy.deepcopy(value))
    if table is not None:
        config.quantization_config = SurgeryConfig(table["modules"], sink.mixers)


def _set_option(config: Any, name: str, value: Any, undo: Undo) -> None:
    before = getattr(config, name, None)
    undo.append(lambda: setattr(config, name, before))
    setattr(config, name, copy.deepcopy(value))
