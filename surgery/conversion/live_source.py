"""A model in memory as the source of a conversion: its tensors stay where they are, and are read like those of a
checkpoint.

A transformers model is built once more on the meta device from its config, as `surgery convert` builds it from
config.json, so that equal weights give equal bits. Any other module, and a transformers model that was changed after it
was built, is copied to the meta device. A module that is no transformers model becomes one layer
(surgery/conversion/whole_module.py).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.experts import split_experts
from surgery.architectures.positions import longest_input
from surgery.calibration.data import CalibrationSet, align_left, check_model_inputs, read_labels
from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.meta_model import MetaModel, config_object, split_stored_experts
from surgery.checkpoint.model_classes import build_on_meta
from surgery.checkpoint.safetensors_io import TensorInfo
from surgery.checkpoint.source import CheckpointSource
from surgery.conversion.generated import check_can_generate
from surgery.conversion.live_inputs import live_inputs
from surgery.conversion.preflight import check_far_context, check_needs_no_calibration
from surgery.conversion.reached import keep_reached
from surgery.conversion.sources import CalibrationInputs, read_texts
from surgery.conversion.whole_module import PREFIX, PlainConfig, PlainModel
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.modeling.live import HOOKS, has_adapter, is_converted, is_library_model, model_device
from surgery.planning.plan import make_plan
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.targets import Plan

PASS_CALIBRATION = "Pass the argument calibration, for example calibration=[text]"


@dataclass(frozen=True)
class LiveTensors(CheckpointSource):
    """The tensors of a model in memory, in the place of a checkpoint's files. It has no companion files."""

    def companions(self) -> list[Path]:
        """Return []: there are no files beside a live model's weights."""
        return []


class LiveSource:
    """A model in memory. Reading its tensors copies them; the model itself is not changed.

    calibration: any form that `live_inputs` reads, None for the recipe's. tokenizer: for texts. Attributes: meta_model:
    the copy on the meta device, set by `open`, whose tensors have the names of the parameters; prefix: what its paths
    have before those of the model, "" for models of transformers.
    """

    calibration_hint = PASS_CALIBRATION
    meta_model: MetaModel

    def __init__(self, model: Any, calibration: Any = None, tokenizer: Any = None):
        self.model, self.samples, self.tokenizer = model, calibration, tokenizer
        self.prefix = path_prefix(model)
        self._tensors: dict[str, Tensor] = {}

    def open(self, progress: Progress | None = None) -> MetaModel:
        """Build the copy on the meta device. See `Source.open`."""
        model, prefix = self.model, self.prefix
        check_replaceable(model)
        state = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
        built: Any
        settings: Any
        if is_library_model(model):
            config = saved_config(model)
            settings = config_object(type(model.config), config)
            built = _library_copy(model, settings, state)
            split_experts(built)
            pairs = dict(getattr(model, "all_tied_weights_keys", None) or {})
            tied = {name: twin for name, twin in pairs.items() if _share_memory(state, name, twin)}
            label = model.config.name_or_path or type(model).__name__
        else:
            label = type(model).__name__
            config, settings = {"model_type": label}, PlainConfig(label)
            built = PlainModel(_empty_copy(model), settings)
            tied = {f"{prefix}{name}": f"{prefix}{twin}" for name, twin in _shared_names(state).items()}
        tensors = {
            f"{prefix}{name}": TensorInfo.in_memory(f"{prefix}{name}", tensor, type(model).__name__)
            for name, tensor in state.items()
            if f"{prefix}{name}" not in tied
        }
        stored: CheckpointSource = LiveTensors(label, Path(), config, tensors)
        if is_library_model(model):
            stored = split_stored_experts(stored, built)
        self.meta_model = MetaModel.of_built(built, settings, stored, tied)
        return self.meta_model

    def plan(self, recipe: ConversionRecipe) -> Plan:
        """Return the plan of a recipe.

        For a module that is not of transformers, rules match the paths that the module has.
        """
        removal = "depth removes layers" if recipe.depth else "experts removes experts" if recipe.experts else ""
        if removal:
            raise SurgeryError(
                f"{removal} of a checkpoint, not of a model in memory (got a {type(self.model).__name__}). "
                "Save it (save_pretrained), and give its folder to surgery.convert"
            )
        recipe, skipped = self._without_tuning(recipe)
        with self.naming_modules():
            plan = make_plan(self.meta_model, _prefixed_rules(recipe, self.prefix))
        if not self.prefix:
            return plan
        kind = type(self.model).__name__
        note = f"{kind} is no transformers model: its linears are matched by path, and rules cannot use roles"
        return replace(plan, notes=(note, *skipped, *plan.notes[1:]))

    def _without_tuning(self, recipe: ConversionRecipe) -> tuple[ConversionRecipe, list[str]]:
        """Return (the recipe, notes).

        For a module that is not of transformers, `tune` is left out: it runs the layers of one.
        """
        if not self.prefix or not recipe.epochs.is_on:
            return recipe, []
        kind = type(self.model).__name__
        note = f"nothing is tuned: tune needs the layers of a transformers model (got a {kind})"
        return recipe.model_copy(update={"tune": None}), [note]

    def calibration(self, recipe: ConversionRecipe) -> CalibrationInputs | None:
        """Read the samples that were given, else those that the recipe names. See `Source.calibration`."""
        samples = recipe.calibration if self.samples is None else self.samples
        if samples is None:
            check_needs_no_calibration(recipe, PASS_CALIBRATION)
            return None
        model, config = self.meta_model.model, self.meta_model.config
        length = min(recipe.length, longest_input(model) or recipe.length)
        recipe = recipe.model_copy(update={"length": length})

        def read(samples: Any, tokens: int) -> CalibrationInputs:
            return live_inputs(
                self.model, samples, recipe.model_copy(update={"tokens": tokens}), config, self.tokenizer
            )

        inputs = read_texts(recipe, read) if self.samples is None else read(samples, recipe.tokens)
        if is_library_model(self.model):
            inputs.tensors = align_left(read_labels(inputs.tensors, model))
        check_model_inputs(inputs.tensors, model)
        check_far_context(inputs.tensors, recipe)
        check_can_generate(inputs.tensors, self.meta_model, recipe)
        self._tensors = inputs.tensors
        return inputs

    def keep_reached(self, plan: Plan, runner: LayerRunner, samples: CalibrationSet) -> tuple[Plan, LayerRunner]:
        """See `Source.keep_reached`.

        Of a module that is not of transformers, linears that do not run are left dense.
        """
        if not self.prefix:
            return keep_reached(plan, runner, samples)
        reached = self._reached_modules()
        lost = [self.public_path(path) for path in plan.targets if path not in reached]
        if len(lost) == len(plan.targets):
            raise SurgeryError(
                f"the calibration inputs reach no linear of the plan ({', '.join(lost[:3])}, ..); give inputs that use "
                "them"
            )
        note = f"left dense, because the calibration inputs do not reach them: {', '.join(lost)}"
        return plan.keep_targets(reached, notes=(*plan.notes, *([note] if lost else []))), runner

    def _reached_modules(self) -> set[str]:
        """Run two rows through a module that is not of transformers; return the paths of the submodules that ran."""
        plain, tensors = self.meta_model.model, self._tensors
        self.meta_model.load_module("", torch.device("cpu"))
        try:
            reached: set[str] = plain.probe(tensors)
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
            shapes = {name: list(x.shape) for name, x in tensors.items()}
            raise SurgeryError(
                f"{type(self.model).__name__} does not run on its calibration inputs {shapes} ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}). Give inputs that its forward takes"
            ) from None
        finally:
            self.meta_model.unload_module("")
        return reached

    @contextmanager
    def original(self, device: torch.device) -> Iterator[Any]:
        """Move the model itself to the device, and back. See `Source.original`."""
        model, home = self.model, model_device(self.model)
        trained = [module for module in model.modules() if module.training]
        try:
            yield model.to(device).eval()
        finally:
            model.to(home)
            for module in trained:
                module.training = True

    def public_path(self, path: str) -> str:
        """Return the path in the model of a module of the copy."""
        return path.removeprefix(self.prefix)

    @contextmanager
    def naming_modules(self) -> Iterator[None]:
        """Name modules in errors as the model does."""
        try:
            yield
        except SurgeryError as error:
            if not self.prefix or self.prefix not in str(error):
                raise
            raise type(error)(str(error).replace(self.prefix, "")) from None


def path_prefix(model: Any) -> str:
    """Return what the paths of a model's copy have before those of the model, "" for models of transformers."""
    return "" if is_library_model(model) else PREFIX


def _prefixed_rules(recipe: ConversionRecipe, prefix: str) -> ConversionRecipe:
    """Return the recipe with the prefix before the pattern of every rule, which then match paths of the meta copy."""
    if not prefix:
        return recipe
    rules = tuple(rule.model_copy(update={"match": f"{prefix}{rule.match}"}) for rule in recipe.rules)
    return recipe.model_copy(update={"rules": rules})


def _library_copy(model: Any, config: Any, state: dict[str, Tensor]) -> Any:
    """Build the model from its config; copy it if the live model has other parameters than its config makes."""
    built = build_on_meta(type(model), copy.deepcopy(config), type(model).__name__)
    expected = {name: tensor.shape for name, tensor in built.state_dict().items()}
    return built if expected == {name: tensor.shape for name, tensor in state.items()} else _empty_copy(model)


def saved_config(model: Any) -> dict[str, Any]:
    """Return the config.json that the model's save_pretrained writes."""
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], str(model.dtype).removeprefix("torch.")
    loaded: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    return loaded


def _share_memory(state: dict[str, Tensor], name: str, twin: str) -> bool:
    return (
        name in state and twin in state and (state[name] is state[twin] or _place(state[name]) == _place(state[twin]))
    )


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.shape) if not tensor.is_meta else (id(tensor),)


def _shared_names(state: dict[str, Tensor]) -> dict[str, str]:
    """Return name -> first name of the same tensor, for parameters that a module has under several names."""
    first: dict[Any, str] = {}
    aliases = {}
    for name, tensor in state.items():
        twin = first.setdefault(id(tensor), name)
        if twin != name:
            aliases[name] = twin
    return aliases


def _empty_copy(model: nn.Module) -> Any:
    """Return a copy with parameters on meta, buffers on the CPU, in evaluation mode and without hooks."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer if buffer.is_meta else buffer.detach().to("cpu", copy=True)
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:  # a module may hold anything: locks, files, streams
        raise SurgeryError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {' '.join(str(error).split())[:200]}), "
            "which "
            "its calibration needs. Remove the attribute that cannot be copied, or apply surgery to the submodule with "
            "the linears"
        ) from None
    for module in copied.modules():
        for hooks in HOOKS:
            getattr(module, hooks).clear()
    for module in copied.modules():
        for name, values in module._buffers.items():
            if values is not None and values.is_floating_point():
                module._buffers[name] = values.float()
    return copied.eval()


# -- models that cannot be converted ---------------------------------------------------------------
def check_replaceable(model: Any) -> None:
    """Raise SurgeryError if modules of the model cannot be replaced: a wrapper, an adapter, quantized or converted
    weights.
    """
    kind = type(model).__name__
    inner = next((name for name in ("_orig_mod", "module") if hasattr(model, name) and _is_wrapper(model)), None)
    if inner:
        raise SurgeryError(
            f"{kind} wraps a model; replaced modules must be known to it. Apply surgery to model.{inner} first"
        )
    if hasattr(model, "peft_config") or has_adapter(model):
        raise SurgeryError(
            f"{kind} has a PEFT adapter, whose base weights may not change below it. Merge it first (model = "
            "model.merge_and_unload()), or apply surgery to the base model and add the adapter afterwards"
        )
    if is_converted(model):
        raise SurgeryError(
            f"{kind} is already converted. Start from the original model, or multiply its structured linears out first "
            "(surgery.densify(model)); attention that was replaced stays replaced"
        )
    table = getattr(getattr(model, "config", None), "quantization_config", None)
    if table is not None or getattr(model, "is_quantized", False):
        method = table.get("quant_method") if isinstance(table, dict) else getattr(table, "quant_method", "unknown")
        raise SurgeryError(
            f"{kind} is quantized ({getattr(method, 'value', method)}); surgery needs full-precision weights. Load it "
            "without "
            "quantization, or call model.dequantize()"
        )
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and type(tensor.detach()) is not Tensor:
            raise SurgeryError(
                f"{kind}: {name} is a {type(tensor.detach()).__name__}, not a plain tensor (sharded or quantized "
                "weights). Apply "
                "surgery before the model is sharded or quantized"
            )


def _is_wrapper(model: Any) -> bool:
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return (
        isinstance(model, parallel) or hasattr(model, "_orig_mod") or "FullyShardedDataParallel" in type(model).__name__
    )
