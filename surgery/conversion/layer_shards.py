"""Layer shards of a conversion: which tensors each file must hold, and which steps of an interrupted run can be reused.

A layer shard is the safetensors file of one finished layer; one more shard, NON_LAYER, has all tensors outside the
layers. Once all are finished, they are merged into the output shards of the checkpoint.

A step is reused only if its journal entry is valid and agrees with the plan. Its file must have the entry's SHA-256,
and exactly the tensors that follow from the plan and the entry's table. Every other step is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field, ValidationError

from surgery.architectures.linears import LinearInfo
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.report import (
    AllocationReport,
    Count,
    DepthReport,
    ExpertsReport,
    HeldOutReport,
    HybridReport,
    MixerReport,
    ModuleReport,
    NativeReport,
    ReportModel,
    TrialReport,
    TuningReport,
)
from surgery.checkpoint.safetensors_io import FLOAT_DTYPES, file_digest, read_header
from surgery.checkpoint.table import is_narrowed, is_pruned
from surgery.checkpoint.writer import concatenate, shard_name
from surgery.conversion.context import NON_LAYER
from surgery.conversion.expert_tensors import merged_shapes
from surgery.conversion.mixer_init.base import build_mixer
from surgery.conversion.replacement import stored_module_name
from surgery.conversion.sequential import untied_entries
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, mixer_config
from surgery.modeling.modules import build_module, fewer_features, is_joined, shares_basis
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.speed import option_of, time_after, time_before, with_structures
from surgery.planning.targets import Plan
from surgery.structures.shared_basis import basis_path

if TYPE_CHECKING:
    from surgery.planning.fewer_experts import ExpertsPlan

TensorShapes = dict[str, tuple[int, ...]]
NonNegative = Annotated[float, Field(ge=0, le=1e30)]


# -- schema of the journal's entries, by step ------------------------------------------------------
class _ShardEntry(ReportModel):
    piece: str
    sha256: str
    table: dict[str, dict[str, Any]]
    records: list[ModuleReport]
    mixers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    mixer_records: list[MixerReport] = Field(default_factory=list)
    seconds: NonNegative = 0.0
    tuned: TuningReport | None = None
    refined: TuningReport | None = None  # `tuned` in journals of version 0.2


class _NonLayerEntry(_ShardEntry):
    held_out: HeldOutReport | None
    allocation: AllocationReport


class _BudgetsEntry(ReportModel):
    budgets: dict[str, NonNegative]
    allocation: AllocationReport
    structures: dict[str, dict[str, Any] | None] | None = None  # with `speed`; None: dense


class _HybridEntry(ReportModel):
    told: HybridReport


class _AlignedEntry(ReportModel):
    piece: str
    sha256: str
    config: dict[str, Any]
    errors: dict[str, NonNegative]


class _GeneratedEntry(ReportModel):
    sha256: str


class _DepthEntry(ReportModel):
    record: DepthReport
    sha256: str


class _ExpertsEntry(ReportModel):
    record: ExpertsReport
    sha256: str


class _RestoredEntry(ReportModel):
    round: Count
    given: list[str]
    before: TrialReport
    scores: dict[str, TrialReport]


class _MixerChoice(ReportModel):
    config: dict[str, Any]
    fixed: dict[str, Any]


class _MixerChoicesEntry(ReportModel):
    chosen: dict[str, _MixerChoice]


class _OutputShardsEntry(ReportModel):
    groups: list[list[str]]


class _OutputShardEntry(ReportModel):
    name: str
    sha256: str


ENTRY_MODELS: dict[str, type[ReportModel]] = {
    "native": NativeReport,
    "budgets": _BudgetsEntry,
    "hybrid": _HybridEntry,
    "aligned": _AlignedEntry,
    "generated": _GeneratedEntry,
    "depth": _DepthEntry,
    "experts": _ExpertsEntry,
    "restored": _RestoredEntry,
    "arranged": _MixerChoicesEntry,
    "fitted": _ShardEntry,
    "shards": _OutputShardsEntry,
    "shard": _OutputShardEntry,
}


@dataclass(frozen=True)
class LayerShards:
    """The layer shards of one conversion, and checks of the files that an interrupted run left.

    shard_of: name of the shard of each source parameter, the path of its layer or NON_LAYER. folder: the shards'
    folder.
    """

    meta_model: MetaModel
    plan: Plan
    shard_of: dict[str, str]
    folder: Path

    def names(self) -> list[str]:
        """Return the names of all shards, in the order in which they are merged."""
        return [*self.plan.layout.layers, NON_LAYER]

    def path(self, name: str) -> Path:
        """Return the file of a shard."""
        return self.folder / f"{name}.safetensors"

    # -- the tensors of a shard --------------------------------------------------------------------
    def expected_shapes(self, entry: dict[str, Any]) -> TensorShapes:
        """Return the shape of each tensor of the shard that a journal entry describes.

        Raises SurgeryError if the entry's table or mixers disagree with the plan.
        """
        name, keys = entry["piece"], self.meta_model.keys
        layer = "" if name == NON_LAYER else name
        stored = self.meta_model.source.tensors
        shapes = {key: stored[key].shape for parameter, key in keys.items() if self.shard_of[parameter] == name}
        if not layer:
            for path in self.plan.replaced_linears(layer):
                shapes |= {tensor.name: tensor.shape for tensor in untied_entries(self.meta_model, path)}
        self._replace_linear_shapes(shapes, layer, entry["table"])
        return shapes | self._mixer_shapes(layer, entry.get("mixers", {}))

    def _replace_linear_shapes(self, shapes: TensorShapes, layer: str, table: dict[str, dict[str, Any]]) -> None:
        """Replace the shapes of the layer's replaced linears: dense ones, and the structured ones of `table`."""
        linears = {linear.path: linear for linear in self.plan.layout.linears}
        targets, attention_target = self.plan.replaced_linears(layer), self.plan.attention_targets.get(layer)
        for path in {*targets, *table}:
            if path not in targets and (attention_target is None or path != attention_target.output):
                raise SurgeryError(f"the journal has a table entry for {path}, which the plan does not replace")
            base, linear = stored_module_name(self.meta_model, path), linears[path]
            if path not in table:
                shapes[f"{base}.weight"] = (linear.in_, linear.out) if linear.transposed else (linear.out, linear.in_)
                continue
            _check_table_entry(table[path], linear, base)
            shapes.pop(f"{base}.weight", None)
            if table[path].get("structure") == "split":
                shapes.pop(f"{base}.bias", None)
            state = build_module(table[path]).state_dict()
            own = {n: tuple(t.shape) for n, t in state.items() if n != "bias" or is_narrowed(table[path])}
            shapes |= {f"{base}.{name}": shape for name, shape in own.items()}
            if is_narrowed(table[path]) != bool(targets[path].neurons if path in targets else ()):
                raise SurgeryError(f"the journal's entry for {path} is of a pruned MLP, or not, unlike the plan")
            if shares_basis(table[path]) != bool(targets[path].basis if path in targets else ""):
                raise SurgeryError(f"the journal's entry for {path} shares a basis, or has its own, unlike the plan")
            if is_joined(table[path]) != bool(targets[path].joined if path in targets else ()):
                raise SurgeryError(f"the journal's entry for {path} is of joined linears, or of one, unlike the plan")
            if shares_basis(table[path]):
                shapes[f"{basis_path(base)}.weight"] = (1, state["weight"].shape[-1], linear.in_)

    def _mixer_shapes(self, layer: str, mixers: dict[str, dict[str, Any]]) -> TensorShapes:
        both = self.plan.attention_targets.get(layer), self.plan.native_targets.get(layer)
        shape_of = {target.path: target.shape for target in both if target is not None}
        if set(mixers) != set(shape_of):
            raise SurgeryError(f"the journal has mixers at {sorted(mixers)}, which are not those of the plan")
        shapes: TensorShapes = {}
        for path, spec in mixers.items():
            config = mixer_config(spec)
            with torch.device("meta"):
                state = MIXERS[config](config, shape_of[path]).state_dict()
            shapes |= {f"{path}.mixer.{name}": tuple(t.shape) for name, t in state.items()}
        return shapes

    def has_tensors(self, file: Path, entry: dict[str, Any], *, exact: bool) -> bool:
        """Return whether `file` has the tensors of an entry's shard, in their shapes and dtypes; exact: and no
        others.
        """
        header = read_header(file)
        shapes = {name: info.shape for name, info in header.items()}
        expected = self.expected_shapes(entry)
        if not all(self._has_stored_dtype(name, header[name].dtype) for name in expected.keys() & header.keys()):
            return False
        return shapes == expected if exact else expected.items() <= shapes.items()

    def _has_stored_dtype(self, name: str, dtype: str) -> bool:
        """Return whether a tensor has the dtype of its source, or of the weight that its module replaces."""
        source, base = self.meta_model.source.tensors, name
        if name in source:
            return dtype == source[name].dtype
        while base and f"{base}.weight" not in source:
            base = base.rpartition(".")[0]
        return not base or dtype not in FLOAT_DTYPES or dtype == source[f"{base}.weight"].dtype

    # -- what an interrupted run left --------------------------------------------------------------
    def select_usable_entries(self, entries: list[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
        """Return the journal entries whose steps can be reused. out: the folder of the output shards.

        If a layer shard is in neither its own file nor an output shard, merging starts again: the output shards are
        removed, and with them the entries of merged layers.
        """
        shards: dict[str, dict[str, Any]] = {}
        for entry in entries:
            if entry["step"] == "piece" and entry["piece"] in self.names():
                shards.setdefault(entry["piece"], entry)
        merged_into = self._intact_output_shards(entries, shards, out)
        on_disk = {name for name, entry in shards.items() if self.is_intact(entry)}
        merged = {
            name for name, entry in shards.items() if name in merged_into and self._is_in(merged_into[name], entry)
        }
        others = [entry for entry in entries if entry["step"] not in ("piece", "shards", "shard")]
        if on_disk | merged == set(self.names()):
            finished = {path.name for name, path in merged_into.items() if name in merged}
            groups = [] if self._groups(entries) is None else [e for e in entries if e["step"] == "shards"][:1]
            written = [entry for entry in entries if entry["step"] == "shard" and entry["name"] in finished]
            return [*others, *shards.values(), *groups, *written]
        for file in out.glob("model*.safetensors"):
            file.unlink()
        return [*others, *(entry for name, entry in shards.items() if name in on_disk - {NON_LAYER})]

    def is_intact(self, entry: dict[str, Any]) -> bool:
        """Return whether the shard's own file has the journal's SHA-256 and the tensors that the plan expects."""
        path = self.path(entry["piece"])
        return file_digest(path) == entry["sha256"] and _is_true(lambda: self.has_tensors(path, entry, exact=True))

    def _is_in(self, output_shard: Path, entry: dict[str, Any]) -> bool:
        """Return whether an output shard has the tensors of a layer shard; those of experts may be merged there."""

        def has_merged() -> bool:
            header = read_header(output_shard)
            merged = merged_shapes(self.meta_model.model, self.expected_shapes(entry))
            return merged.items() <= {name: info.shape for name, info in header.items()}.items()

        return _is_true(lambda: self.has_tensors(output_shard, entry, exact=False) or has_merged())

    def _groups(self, entries: list[dict[str, Any]]) -> list[list[str]] | None:
        """Return the layer shards of each output shard as the journal has them; None if it has none, or other
        layers.
        """
        groups: list[list[str]] | None = next((e["groups"] for e in entries if e["step"] == "shards"), None)
        files = [self.path(name).name for name in self.names()]
        return groups if groups is not None and concatenate(groups) == files and all(groups) else None

    def _intact_output_shards(
        self, entries: list[dict[str, Any]], shards: dict[str, dict[str, Any]], out: Path
    ) -> dict[str, Path]:
        """Return the output shard of each layer shard that was merged into one with the SHA-256 of the journal."""
        if (groups := self._groups(entries)) is None:
            return {}
        digests = {entry["name"]: entry["sha256"] for entry in entries if entry["step"] == "shard"}
        names, paths = iter(self.names()), {}
        for i, group in enumerate(groups):
            file, members = shard_name(i, len(groups)), [next(names) for _ in group]
            digest = digests.get(file)
            if digest is None and len(members) == 1 and members[0] in shards:
                digest = shards[members[0]]["sha256"]  # renamed, but the run ended before its journal entry
            if digest is not None and file_digest(out / file) == digest:
                paths.update(dict.fromkeys(members, out / file))
        return paths


def select_valid_entries(entries: list[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """Return the journal entries that have the schema of their step and agree with the plan."""
    valid = [entry for entry in entries if _is_valid(entry, plan)]
    softmax: list[str] = next((entry["told"]["softmax"] for entry in valid if entry["step"] == "hybrid"), [])
    with_mixers = set(plan.attention_targets) - set(
        softmax
    )  # `arranged` has no hybrids by heads: cache budgets refuse them
    return [entry for entry in valid if entry["step"] != "arranged" or set(entry["chosen"]) == with_mixers]


def _is_valid(entry: dict[str, Any], plan: Plan) -> bool:
    step = entry["step"]
    if step == "start":
        return True
    if step == "piece":
        model: type[ReportModel] | None = _NonLayerEntry if entry.get("piece") == NON_LAYER else _ShardEntry
    else:
        model = ENTRY_MODELS.get(step)
    if model is None:
        return False
    try:
        model.model_validate({key: value for key, value in entry.items() if key != "step"})
        return _agrees_with_plan(entry, plan)
    except (ValidationError, SurgeryError):
        return False


def _keeps_as_planned(record: dict[str, Any], planned: ExpertsPlan) -> bool:
    """Return whether the experts that stay are as many as planned, in each layer, in ascending order."""
    fits = [
        len(kept) == planned.number and kept == sorted(set(kept)) and kept[-1] < planned.stack.count
        for kept in record["kept"].values()
    ]
    return all(fits) and set(record["kept"]) == set(planned.stack.paths)


def _agrees_with_plan(entry: dict[str, Any], plan: Plan) -> bool:
    if entry["step"] == "budgets":
        names = set(entry["budgets"])
        return any(names == one.target_names() for one in plan.contenders().values()) and _meets_target(entry, plan)
    if entry["step"] == "depth":
        planned, record = plan.depth, entry["record"]
        fits = planned is not None and record["layers"] == planned.stack.count
        return fits and len(record["removed"]) == len(planned.removed)  # type: ignore[union-attr]
    if entry["step"] == "experts":
        return plan.experts is not None and _keeps_as_planned(entry["record"], plan.experts)
    if entry["step"] == "hybrid":
        return set(entry["told"]["softmax"]) <= set(plan.attention_targets) and _names_heads(entry["told"], plan)
    if entry["step"] == "piece":
        return _has_options(entry["records"], plan)
    if entry["step"] == "fitted":
        return entry["piece"] in plan.layout.layers and _has_options(entry["records"], plan)
    if entry["step"] == "aligned":
        return entry["piece"] in plan.attention_targets
    if entry["step"] == "restored":
        return bool(entry["scores"]) and {*entry["given"], *entry["scores"]} == set(plan.attention_targets)
    if entry["step"] == "arranged":
        return all(
            layer in plan.attention_targets and _can_build_mixer(plan.attention_targets[layer], choice)
            for layer, choice in entry["chosen"].items()
        )
    return True


def _meets_target(entry: dict[str, Any], plan: Plan) -> bool:
    """Return whether an entry has structures, if and only if the recipe has `speed`: options of the plan, in its time,
    with their parameters.
    """
    structures = entry.get("structures")
    if plan.time is None or structures is None:
        return plan.time is None and structures is None
    if set(structures) != {target.name for target in plan.replaced_targets()}:
        return False
    chosen = with_structures(plan, structures)  # raises SurgeryError for a structure that is no option
    budgets = {target.name: target.uniform_budget() for slices in chosen.targets.values() for target in slices}
    return budgets == entry["budgets"] and time_after(plan, structures) <= time_before(plan) / plan.time.ratio


def _has_options(records: list[dict[str, Any]], plan: Plan) -> bool:
    """Return whether the structures of fitted matrices are options of the plan; True for a recipe without `speed`."""
    targets = {} if plan.time is None else {target.name: target for target in plan.replaced_targets()}
    for record in records:
        if record["name"] in targets:
            option_of(targets[record["name"]], record["structure"])  # raises SurgeryError if it is none
    return True


def _names_heads(choice: dict[str, Any], plan: Plan) -> bool:
    """Return whether a choice names key/value heads of the plan's layers, if and only if the recipe chooses heads."""
    hybrid, heads = plan.recipe.attention.hybrid if plan.recipe.attention else None, choice.get("heads")
    if hybrid is None or not hybrid.of_heads:
        return heads is None
    if heads is None or set(heads) != set(plan.attention_targets):
        return False
    groups = {layer: target.shape.groups for layer, target in plan.attention_targets.items()}
    valid = all(
        numbers == sorted(set(numbers)) and all(0 <= n < groups[layer] for n in numbers)
        for layer, numbers in heads.items()
    )
    return valid and set(choice["softmax"]) == {
        layer for layer, numbers in heads.items() if len(numbers) == groups[layer]
    }


def _can_build_mixer(target: AttentionTarget, choice: dict[str, Any]) -> bool:
    """Return whether a mixer can be built from a choice's config and tensors, with finite values and a valid order."""
    config = mixer_config(choice["config"])
    MIXERS[config].check_config(config, target.shape)
    try:
        chosen = replace(target, config=config, fixed=choice["fixed"])
        state = build_mixer(chosen, torch.device("cpu")).state_dict()
    except (KeyError, RuntimeError, TypeError, ValueError):
        return False
    dims_K = torch.arange(target.shape.key)
    order_GK = state.get("order", dims_K[None]).sort(-1).values
    is_finite = all(bool(t.isfinite().all()) for t in state.values() if t.is_floating_point())
    return bool((order_GK == dims_K).all()) and is_finite


def _is_true(check: Callable[[], bool]) -> bool:
    """Return the result of `check`, False if it raises SurgeryError."""
    try:
        return check()
    except SurgeryError:
        return False


def _check_table_entry(spec: dict[str, Any], linear: LinearInfo, base: str) -> None:
    """Raise SurgeryError unless a table entry is valid and describes this linear. base: its name in the files."""
    build_module(spec)  # raises SurgeryError if the entry is invalid
    parts = list(spec["parts"].values()) if spec.get("structure") == "split" else [spec]
    fits = sum(slice_spec["out_features"] for slice_spec in parts) == linear.out
    fits &= all(slice_spec["in_features"] == linear.in_ for slice_spec in parts)
    if is_pruned(spec):  # the rows of gate and up, or the columns of down
        fits = fewer_features(spec, linear.in_, linear.out)
    fits &= all(slice_spec["bias"] == linear.bias for slice_spec in parts)
    fits &= spec.get("file_name", linear.path) == base and spec.get("transposed", False) == linear.transposed
    if not fits:
        raise SurgeryError(f"the journal's entry for {linear.path} describes another linear: {str(spec)[:100]}")
