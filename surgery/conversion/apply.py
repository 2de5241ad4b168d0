"""Convert a model in memory: the steps of `convert` on the live model's tensors, then the replacements are put into the model.

Fits and mixers are computed from copies, as for a checkpoint. The model changes only after everything was computed and built; an error
before or while modules are swapped leaves it as it was.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.experts import RoutedExperts, keep_experts_split, split_experts
from surgery.architectures.positions import longest_input
from surgery.calibration.data import CalibrationSet, align_left, check_model_inputs, read_labels
from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.safetensors_io import TensorSource
from surgery.checkpoint.writer import converted_config
from surgery.conversion.context import ConversionContext
from surgery.conversion.convert import Conversion
from surgery.conversion.generated import check_can_generate
from surgery.conversion.layer_shards import NON_LAYER
from surgery.conversion.live_inputs import LiveInputs, live_inputs
from surgery.conversion.live_model import LiveModel, is_library_model
from surgery.conversion.norms import outer_norms
from surgery.conversion.preflight import check_far_context, check_needs_no_calibration
from surgery.conversion.reached import keep_reached
from surgery.conversion.replacement import LayerReplacement, stored_module_name
from surgery.conversion.whole_module import PREFIX, PlainModel
from surgery.core.device import choose_device, fast_float32_matmul, return_freed_memory
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.files import explain_disk_errors
from surgery.core.journal import Journal
from surgery.core.progress import Progress
from surgery.mixers import mixer_config
from surgery.modeling.applied import original_folder, set_applied_class
from surgery.modeling.attention import replace_attention
from surgery.modeling.joined import JoinedLinear, connect_joined
from surgery.modeling.live import copy_hooks, model_device
from surgery.modeling.modules import build_module, connect_bases, shares_basis
from surgery.modeling.quantization_config import SurgeryConfig
from surgery.modeling.quantizer import untie
from surgery.planning.plan import make_plan
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.targets import LinearTarget, Plan
from surgery.structures.call_scope import hold_groups
from surgery.structures.shared_basis import SharedBasis, basis_path

PASS_CALIBRATION = "Pass the argument calibration, for example calibration=[text]"
AGAIN = "free some space, or choose another folder for temporary files (scratch=), and call surgery.apply again"


def apply(
    model: Any,
    recipe: ConversionRecipe,
    calibration: Any = None,
    *,
    tokenizer: Any = None,
    device: str | None = None,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> Any:
    """Convert a model in place and return it; the report is its attribute `surgery_report`.

    calibration: any form that `live_inputs` reads. device: where layers run; None: that of the weights. scratch: folder of temporary
    files; None: the system's. Raises SurgeryError, and leaves the model as it was.
    """
    began, progress = time.perf_counter(), progress or Progress()
    if scratch is not None and not scratch.is_dir():
        raise SurgeryError(f"scratch={str(scratch)!r} is not a folder. Make it first, or leave it out")
    home = model_device(model)
    place = choose_device(device or str(home))
    live, plan = plan_live(model, recipe)
    recipe = plan.recipe
    check_not_shared(live, plan)
    calibration = recipe.calibration if calibration is None else calibration
    given = None
    if calibration is None:
        check_needs_no_calibration(recipe, PASS_CALIBRATION)
    else:
        length = min(recipe.length, longest_input(live.model) or recipe.length)
        given = live_inputs(model, calibration, recipe.model_copy(update={"length": length}), live.config, tokenizer)
        if is_library_model(model):
            given.tensors = align_left(read_labels(given.tensors, live.model))
        check_model_inputs(given.tensors, live.model)
        check_far_context(given.tensors, recipe)
        check_can_generate(given.tensors, live, recipe)
        recipe = recipe.model_copy(update={"calibration": given.label})
    plan = replace(plan, recipe=recipe)
    if given is not None and isinstance(live.model, PlainModel):
        with _live_paths(live):
            plan = leave_unreached(live, plan, given.tensors)
    data = None if given is None else CalibrationSet.from_inputs(given.tensors, recipe.holdout)
    runner = LayerRunner(live, plan.layout.layers, plan.layout.head, place)
    runner.packed = frozenset() if data is None else data.packed
    if data is not None and not isinstance(live.model, PlainModel):
        plan, runner = keep_reached(plan, runner, data)
    for note in plan.notes:
        progress.say(f"note: {note}")
    return_freed_memory()
    with explain_disk_errors(scratch or Path(tempfile.gettempdir()), AGAIN), _kept_random_state(place):
        with tempfile.TemporaryDirectory(prefix="surgery-", dir=scratch) as folder:
            work_dir = Path(folder) / "work"
            runner.scratch = work_dir
            ctx = ConversionContext(live, plan, recipe, data, runner, work_dir, DistContext(), place, progress)
            with Journal(work_dir, {"source": live.source.name}, resume=False) as journal, fast_float32_matmul(place):
                conversion = LiveConversion(ctx, journal, given)
                with _live_paths(live):
                    report = conversion.run(began)
        install(live, conversion, report, tokenizer)
    return model


@contextmanager
def _kept_random_state(device: torch.device) -> Iterator[None]:
    """Restore the global random state afterwards: a conversion sets its own seed."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


# -- the plan --------------------------------------------------------------------------------------
def plan_live(model: Any, recipe: ConversionRecipe) -> tuple[LiveModel, Plan]:
    """Return the meta copy of a live model and the plan of a recipe for it. Reads no values of weights."""
    live = LiveModel(model)
    recipe, skipped = drop_tuning(live, recipe)
    with _live_paths(live):
        plan = make_plan(live, prefixed_rules(recipe, live.prefix))
    if live.prefix:
        note = f"{type(model).__name__} is no transformers model: its linears are matched by path, and rules cannot use roles"
        plan = replace(plan, notes=(note, *skipped, *plan.notes[1:]))
    return live, plan


@contextmanager
def _live_paths(live: LiveModel) -> Iterator[None]:
    """Name modules in errors as the live model does."""
    try:
        yield
    except SurgeryError as error:
        if not live.prefix or live.prefix not in str(error):
            raise
        raise type(error)(str(error).replace(live.prefix, "")) from None


def prefixed_rules(recipe: ConversionRecipe, prefix: str) -> ConversionRecipe:
    """Return the recipe with the prefix before the pattern of every rule, which then match paths of the meta copy."""
    if not prefix:
        return recipe
    rules = tuple(rule.model_copy(update={"match": f"{prefix}{rule.match}"}) for rule in recipe.rules)
    return recipe.model_copy(update={"rules": rules})


def check_not_shared(live: LiveModel, plan: Plan) -> None:
    """Raise SurgeryError if a linear to be replaced is the module itself, or shares its weight with another parameter."""
    if not live.prefix:
        return
    shared = {name for pair in live.tied.items() for name in pair}
    for path in plan.replaced_linears():
        if path == PREFIX.rstrip("."):
            raise SurgeryError(
                f"the model is a single {type(live.live).__name__}, which cannot be replaced in place. Give a module that contains it"
            )
        if f"{path}.weight" in shared:
            raise SurgeryError(
                f"{live.live_path(path)} shares its weight with another parameter, which replacing it would untie. Leave it dense: "
                f"rules=[{{'match': '{live.live_path(path)}', 'structure': 'dense'}}]"
            )


def leave_unreached(live: LiveModel, plan: Plan, inputs: dict[str, Tensor]) -> Plan:
    """Run two rows, and return the plan without the linears that did not run; a note lists them."""
    model: Any = live.model
    live.load_module("", torch.device("cpu"))
    try:
        reached = model.probe(inputs)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        shapes = {name: list(x.shape) for name, x in inputs.items()}
        raise SurgeryError(
            f"{type(live.live).__name__} does not run on its calibration inputs {shapes} ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}). Give inputs that its forward takes"
        ) from None
    finally:
        live.unload_module("")
    kept = {path: targets for path, targets in plan.targets.items() if path in reached}
    left = [live.live_path(path) for path in plan.targets if path not in reached]
    if not kept:
        raise SurgeryError(
            f"the calibration inputs reach no linear of the plan ({', '.join(left[:3])}, ..); give inputs that use them"
        )
    note = f"left dense, because the calibration inputs do not reach them: {', '.join(left)}"
    return replace(plan, targets=kept, notes=(*plan.notes, *([note] if left else [])))


def drop_tuning(live: LiveModel, recipe: ConversionRecipe) -> tuple[ConversionRecipe, list[str]]:
    """Return (the recipe, notes). For a model that is not of transformers, `tune` is left out with a note: it runs the layers of one."""
    if not live.prefix or not recipe.epochs.is_on:
        return recipe, []
    note = f"nothing is tuned: tune needs the layers of a transformers model (got a {type(live.live).__name__})"
    return recipe.model_copy(update={"tune": None}), [note]


# -- the conversion --------------------------------------------------------------------------------
class LiveConversion(Conversion):
    """A conversion whose result stays in memory.

    tensors: name -> new tensor, on the CPU. table, mixers: entries by path in the meta copy. given: the calibration samples.
    """

    calibration_hint = PASS_CALIBRATION

    def __init__(self, ctx: ConversionContext, journal: Journal, given: LiveInputs | None):
        super().__init__(ctx, journal, given.notes if given else [])
        self.is_text = given is not None and given.is_text
        self.tensors: dict[str, Tensor] = {}
        self.stored: list[TensorSource] = []
        self.fitted: dict[str, list[TensorSource]] = {}  # tensors of each layer before the whole model is trained
        self.table: dict[str, Any] = {}
        self.mixers: dict[str, Any] = {}

    def _check_text(self) -> None:
        if self.is_text:
            super()._check_text()

    @contextmanager
    def _original(self) -> Iterator[Any]:
        """Yield the live model in evaluation mode, on the device of the conversion."""
        live: Any = self.ctx.model
        model, home = live.live, model_device(live.live)
        trained = [module for module in model.modules() if module.training]
        try:
            yield model.to(self.ctx.device).eval()
        finally:
            model.to(home)
            for module in trained:
                module.training = True

    def _store_entries(
        self,
        shard: str,
        entries: list[TensorSource],
        replacement: LayerReplacement,
        step: str = "piece",
        **fields: Any,
    ) -> None:
        if step == "fitted":
            self.fitted[shard] = entries
        else:
            self.stored += [replace(entry, tensor=None) for entry in entries]
            self.tensors |= {entry.name: entry.tensor for entry in entries if entry.tensor is not None}
            self.table |= replacement.table
            self.mixers |= replacement.mixer_table
        self._add_to_journal(shard, "", replacement, step, **fields)

    def _fitted_entries(self, path: str) -> list[TensorSource]:
        return self.fitted.pop(path)

    def trained_originals(self) -> dict[str, Tensor]:
        """Return the norms and biases of the original that were tuned, by parameter."""
        if not self.tune.norms:
            return {}
        layout, kept = self.ctx.plan.layout, dict(outer_norms(self.ctx.model, self.ctx.plan.layout))
        for path in layout.layers:
            kept |= self._kept(path)
        return {parameter: self.tensors[name] for parameter, name in kept.items() if name in self.tensors}

    def _write_output(self, hybrid: dict[str, Any] | None, began: float) -> dict[str, Any]:
        """Return the report; nothing is written."""
        found = [self.journal.find("piece", piece=name) for name in (*self.ctx.plan.layout.layers, NON_LAYER)]
        entries = [entry for entry in found if entry is not None]
        report = self._report(entries, hybrid, self.stored, began).to_dict()
        live = self.ctx.model
        if isinstance(live, LiveModel) and live.prefix:
            for record in report["modules"]:
                record["name"] = live.live_path(record["name"])
        return report


# -- the model -------------------------------------------------------------------------------------
def install(live: LiveModel, conversion: LiveConversion, report: dict[str, Any], tokenizer: Any) -> None:
    """Put the replacements into the live model. An error on the way undoes what was done."""
    model = live.live
    refits = {
        linear.path: conversion.tensors[f"{stored_module_name(live, linear.path)}.weight"]
        for target in _refitted(conversion.ctx.plan)
        for linear in target.linears
        if linear.path not in conversion.table
    }
    with _undone_on_error(model) as undo:
        if _splits_experts(live, conversion.ctx.plan):
            split_experts(model)
            keep_experts_split(model)
        for parameter, tensor in conversion.trained_originals().items():
            path, _, leaf = parameter.rpartition(".")
            _set_parameter(model.get_submodule(live.live_path(path)), leaf, tensor, undo)
        ready = {path: _build(live, path, spec, conversion.tensors) for path, spec in conversion.table.items()}
        connect_joined(ready)
        _train_joined(live, ready)
        undo.append(lambda: hold_groups(model))  # after the modules are back: steps are undone from the last
        for path, module in ready.items():
            _swap(model, live.live_path(path), module, undo)
        hold_groups(model)
        sharing = [path for path, spec in conversion.table.items() if shares_basis(spec)]
        connect_bases(model, sharing, {basis_path(path): _basis(live, path, conversion.tensors) for path in sharing})
        for path, weight in refits.items():
            _set_parameter(model.get_submodule(live.live_path(path)), "weight", weight, undo)
        if not is_library_model(model):
            model.surgery_report = report
            return
        set_applied_class(model, bool(conversion.mixers))
        for path, spec in conversion.mixers.items():
            _set_mixer(model, path, spec, conversion.tensors)
        for path in ready:
            untie(model, path)
        _set_config(live, conversion)
        model.surgery_report = report
        model.surgery_companions = (tokenizer, original_folder(model))


def _splits_experts(live: LiveModel, plan: Plan) -> bool:
    """Return whether the live model's experts become linears: some are converted, or only so its files are those of the command.

    Where transformers' rules store experts one by one, the files have the same tensors without that.
    """
    routed = [module for module in live.model.modules() if isinstance(module, RoutedExperts)]
    converted = any(target.linear.experts for target in _refitted(plan))
    return converted or any(module.layout.stored_merged for module in routed)


def _refitted(plan: Plan) -> list[LinearTarget]:
    return [target for targets in plan.targets.values() for target in targets if target.part is None]


def _build(live: LiveModel, path: str, spec: dict[str, Any], tensors: dict[str, Tensor]) -> nn.Module:
    """Build the module of a table entry with its tensors, on the device of the linear that it replaces, whose bias it shares."""
    linear: Any = live.live.get_submodule(live.live_path(path))
    weight, base = linear.weight, stored_module_name(live, path)
    module: Any = build_module(spec, device=weight.device, dtype=weight.dtype)
    state = {name: tensors[f"{base}.{name}"] for name in module.state_dict() if name != "bias"}
    module.load_state_dict(state, strict=False)
    if spec["structure"] != "split" and linear.bias is not None:
        module.bias = linear.bias
    for parameter in module.parameters():
        if parameter is not linear.bias:
            parameter.requires_grad_(weight.requires_grad)
    copy_hooks(linear, module)
    built: nn.Module = module.train(linear.training)
    return built


def _train_joined(live: LiveModel, built: dict[str, nn.Module]) -> None:
    """Let the matrix of joined linears be trained if one of the linears that it replaces is."""
    trained: dict[nn.Module, bool] = {}
    for path, module in built.items():
        if isinstance(module, JoinedLinear):
            weight: Any = live.live.get_submodule(live.live_path(path)).weight
            trained[module.matrix] = trained.get(module.matrix, False) or bool(weight.requires_grad)
    for matrix, wanted in trained.items():
        matrix.requires_grad_(wanted)


def _basis(live: LiveModel, path: str, tensors: dict[str, Tensor]) -> SharedBasis:
    """Build the basis that the expert's linear at `path` shares, on its device."""
    linear: Any = live.live.get_submodule(path)
    weight, name = linear.weight, f"{stored_module_name(live, basis_path(path))}.weight"
    basis = SharedBasis(linear.in_features, linear.config.rank, device=weight.device, dtype=weight.dtype)
    basis.load_state_dict({"weight": tensors[name]})
    return basis.requires_grad_(weight.requires_grad).train(linear.training)


Undo = list[Callable[[], None]]


@contextmanager
def _undone_on_error(model: Any) -> Iterator[Undo]:
    """Yield a list of functions that undo changes; on an error, also classes, attributes and the config are restored."""
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
            for kept, now in ((modules, module._modules), (parameters, module._parameters)):
                now.clear()
                now.update(kept)
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
    replace_attention(model, path, mixer_config(spec))
    attention = model.get_submodule(path)
    names = attention.mixer.state_dict()
    attention.mixer.load_state_dict({name: tensors[f"{path}.mixer.{name}"] for name in names})
    frozen = not any(p.requires_grad for n, p in attention.named_parameters() if not n.startswith("mixer."))
    attention.mixer.requires_grad_(not frozen)


def _set_config(live: LiveModel, conversion: LiveConversion) -> None:
    """Record the table in the model's config; a replaced head or embedding is no longer tied."""
    written, config = converted_config(live.source, live, conversion.table, conversion.mixers), live.live.config
    for key, value in written.items():
        if key != "quantization_config" and value != live.source.config.get(key):
            setattr(config, key, copy.deepcopy(value))
    config.quantization_config = SurgeryConfig(conversion.table, conversion.mixers)
