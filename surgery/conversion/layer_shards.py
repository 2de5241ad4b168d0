"""Layer shards of a conversion: the tensors that each must hold, and the journal entries that a resumed run may use.

An entry is used if it has the form that surgery writes, agrees with the plan, and its file has the entry's SHA-256 and
exactly the tensors that the plan and the entry's table call for. Every other step is done again. In the journal a layer
shard is called a "piece".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError

from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.report import (
    AllocationReport,
    HeldOutReport,
    HybridReport,
    MixerReport,
    ModuleReport,
    _ReportModel,
)
from surgery.checkpoint.safetensors_io import FLOAT_DTYPES, file_digest, read_header
from surgery.checkpoint.writer import flat, shard_name
from surgery.conversion.mixer_init.base import build_mixer
from surgery.conversion.replacement import stored_module_name
from surgery.conversion.sequential import untied_entries
from surgery.core.errors import SurgeryError
from surgery.mixers import MIXERS, mixer_config
from surgery.modeling.modules import build_module
from surgery.planning.attention_plan import AttentionTarget
from surgery.planning.plan import Plan

NON_LAYER = "rest"  # the name of the shard of all tensors that belong to no layer
Shapes = dict[str, tuple[int, ...]]
Finite = Annotated[float, Field(ge=0, le=1e30)]


class _LayerEntry(_ReportModel):
    piece: str
    sha256: str
    table: dict[str, dict[str, Any]]
    records: list[ModuleReport]
    mixers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    mixer_records: list[MixerReport] = Field(default_factory=list)
    seconds: Finite = 0.0


class _NonLayerEntry(_LayerEntry):
    held_out: HeldOutReport | None
    allocation: AllocationReport


class _Budgets(_ReportModel):
    budgets: dict[str, Finite]
    allocation: AllocationReport


class _Hybrid(_ReportModel):
    told: HybridReport


class _Chosen(_ReportModel):
    config: dict[str, Any]
    fixed: dict[str, Any]


class _Arranged(_ReportModel):
    chosen: dict[str, _Chosen]


class _Shards(_ReportModel):
    groups: list[list[str]]


class _Shard(_ReportModel):
    name: str
    sha256: str


SHAPES: dict[str, type[_ReportModel]] = {
    "budgets": _Budgets,
    "hybrid": _Hybrid,
    "arranged": _Arranged,
    "shards": _Shards,
    "shard": _Shard,
}


@dataclass(frozen=True)
class LayerShards:
    """The layer shards in `folder`. units: parameter -> its layer, or NON_LAYER."""

    meta_model: MetaModel
    plan: Plan
    units: dict[str, str]
    folder: Path

    def names(self) -> list[str]:
        return [*self.plan.layout.layers, NON_LAYER]

    def path(self, unit: str) -> Path:
        return self.folder / f"{unit}.safetensors"

    # -- contents of a shard ------------------------------------------------------------------------
    def expected(self, line: dict[str, Any]) -> Shapes:
        """Return tensor -> shape of the shard of a journal entry. SurgeryError if its table disagrees with the plan."""
        unit, table, mixers = line["piece"], line["table"], line.get("mixers", {})
        keys, layer = self.meta_model.keys, "" if line["piece"] == NON_LAYER else line["piece"]
        shapes = {key: self.meta_model.source.tensors[key].shape for n, key in keys.items() if self.units[n] == unit}
        linears = {linear.path: linear for linear in self.plan.layout.linears}
        cuts, attention_target = self.plan.targets_in_layer(layer), self.plan.attention_targets.get(layer)
        for path in cuts if not layer else ():
            shapes |= {entry.name: entry.shape for entry in untied_entries(self.meta_model, path)}
        for path in {*cuts, *table}:
            if path not in cuts and (attention_target is None or path != attention_target.output):
                raise SurgeryError(f"the plan replaces nothing at {path}")
            base, linear = stored_module_name(self.meta_model, path), linears[path]
            dense = (linear.in_, linear.out) if linear.transposed else (linear.out, linear.in_)
            shapes[f"{base}.weight"] = dense
            if path in table:
                _check_table_entry(table[path], linear, base)
                del shapes[f"{base}.weight"]
                if table[path].get("structure") == "split":
                    shapes.pop(f"{base}.bias", None)
                state = build_module(table[path]).state_dict()
                shapes |= {f"{base}.{name}": tuple(t.shape) for name, t in state.items() if name != "bias"}
        if set(mixers) != ({attention_target.path} if attention_target else set()):
            raise SurgeryError(f"the plan has no mixers at {sorted(mixers)}")
        for path, spec in mixers.items():
            assert attention_target is not None
            config = mixer_config(spec)
            with torch.device("meta"):
                state = MIXERS[config](config, attention_target.shape).state_dict()
            shapes |= {f"{path}.mixer.{name}": tuple(t.shape) for name, t in state.items()}
        return shapes

    def holds(self, file: Path, line: dict[str, Any], whole: bool) -> bool:
        """Return whether the file has the tensors of the entry's shard; whole: and no others."""
        header = read_header(file)
        found = {name: info.shape for name, info in header.items()}
        expected = self.expected(line)
        if not all(self._has_stored_dtype(name, header[name].dtype) for name in expected.keys() & header.keys()):
            return False
        return found == expected if whole else expected.items() <= found.items()

    def _has_stored_dtype(self, name: str, dtype: str) -> bool:
        """A copied tensor has the source's dtype; the numbers of a stand-in, that of the weight it stands for."""
        source, base = self.meta_model.source.tensors, name
        if name in source:
            return dtype == source[name].dtype
        while base and f"{base}.weight" not in source:
            base = base.rpartition(".")[0]
        return not base or dtype not in FLOAT_DTYPES or dtype == source[f"{base}.weight"].dtype

    # -- what an interrupted run left --------------------------------------------------------------
    def sound(self, lines: list[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
        """The lines that are used again. out: where finished shards lie."""
        entries: dict[str, dict[str, Any]] = {}
        for line in lines:
            if line["step"] == "piece" and line["piece"] in self.names():
                entries.setdefault(line["piece"], line)
        shards = self._finished_shards(lines, entries, out)
        on_disk = {unit for unit, line in entries.items() if self._is_sound(line)}
        joined = {unit for unit, line in entries.items() if unit in shards and self._is_in(shards[unit], line)}
        others = [line for line in lines if line["step"] not in ("piece", "shards", "shard")]
        if on_disk | joined == set(self.names()):
            done = {path.name for unit, path in shards.items() if unit in joined}
            planned = [] if self._groups(lines) is None else [line for line in lines if line["step"] == "shards"][:1]
            ends = [line for line in lines if line["step"] == "shard" and line["name"] in done]
            return [*others, *entries.values(), *planned, *ends]
        for file in out.glob("model*.safetensors"):
            file.unlink()
        return [*others, *(line for unit, line in entries.items() if unit in on_disk - {NON_LAYER})]

    def _is_sound(self, line: dict[str, Any]) -> bool:
        path = self.path(line["piece"])
        return file_digest(path) == line["sha256"] and _holds(lambda: self.holds(path, line, whole=True))

    def _is_in(self, shard: Path, line: dict[str, Any]) -> bool:
        return _holds(lambda: self.holds(shard, line, whole=False))

    def _groups(self, lines: list[dict[str, Any]]) -> list[list[str]] | None:
        """Return the layer shards of each output file, as the journal has them; None if it has none, or other shards."""
        groups = next((line["groups"] for line in lines if line["step"] == "shards"), None)
        files = [self.path(unit).name for unit in self.names()]
        return groups if groups is not None and flat(groups) == files and all(groups) else None

    def _finished_shards(
        self, lines: list[dict[str, Any]], entries: dict[str, dict[str, Any]], out: Path
    ) -> dict[str, Path]:
        """Unit -> the shard that it was joined into, of those that are as they were written."""
        if (groups := self._groups(lines)) is None:
            return {}
        written = {line["name"]: line["sha256"] for line in lines if line["step"] == "shard"}
        units, found = iter(self.names()), {}
        for i, group in enumerate(groups):
            name, inside = shard_name(i, len(groups)), [next(units) for _ in group]
            digest = written.get(name)
            if digest is None and len(inside) == 1 and inside[0] in entries:  # moved, not yet written down
                digest = entries[inside[0]]["sha256"]
            if digest is not None and file_digest(out / name) == digest:
                found.update(dict.fromkeys(inside, out / name))
        return found


def well_formed(lines: list[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """The lines that are as surgery writes them for this plan."""
    kept = [line for line in lines if _is_well_formed(line, plan)]
    hybrid: list[str] = next((line["told"]["softmax"] for line in kept if line["step"] == "hybrid"), [])
    return [x for x in kept if x["step"] != "arranged" or set(x["chosen"]) == set(plan.attention_targets) - set(hybrid)]


def _is_well_formed(line: dict[str, Any], plan: Plan) -> bool:
    step = line["step"]
    if step == "start":
        return True
    shape = (_NonLayerEntry if line.get("piece") == NON_LAYER else _LayerEntry) if step == "piece" else SHAPES.get(step)
    if shape is None:
        return False
    try:
        shape.model_validate({key: value for key, value in line.items() if key != "step"})
        return _agrees(step, line, plan)
    except (ValidationError, SurgeryError):
        return False


def _agrees(step: str, line: dict[str, Any], plan: Plan) -> bool:
    if step == "budgets":
        return line["budgets"].keys() == {cut.name for cuts in plan.targets.values() for cut in cuts}
    if step == "hybrid":
        return set(line["told"]["softmax"]) <= set(plan.attention_targets)
    if step == "arranged":
        return all(
            layer in plan.attention_targets and _serves(plan.attention_targets[layer], x)
            for layer, x in line["chosen"].items()
        )
    return True


def _serves(attention_target: AttentionTarget, chosen: dict[str, Any]) -> bool:
    """Whether a mixer of this attention_target can be made with the config and the tensors that were chosen."""
    config = mixer_config(chosen["config"])
    MIXERS[config].check_config(config, attention_target.shape)
    try:
        state = build_mixer(
            replace(attention_target, config=config, fixed=chosen["fixed"]), torch.device("cpu")
        ).state_dict()
    except (KeyError, RuntimeError, TypeError, ValueError):
        return False
    order = state.get("order", torch.arange(attention_target.shape.key)[None]).sort(-1).values
    numbers = [tensor for tensor in state.values() if tensor.is_floating_point()]
    return bool((order == torch.arange(attention_target.shape.key)).all()) and all(
        bool(t.isfinite().all()) for t in numbers
    )


def _holds(check: Callable[[], bool]) -> bool:
    try:
        return check()
    except SurgeryError:
        return False


def _check_table_entry(spec: dict[str, Any], linear: Any, base: str) -> None:
    """A table entry describes the linear that it replaces."""
    build_module(spec)  # refuses what is no entry
    parts = list(spec["parts"].values()) if spec.get("structure") == "split" else [spec]
    fits = sum(part["out_features"] for part in parts) == linear.out
    fits &= all(part["in_features"] == linear.in_ and part["bias"] == linear.bias for part in parts)
    fits &= spec.get("file_name", linear.path) == base and spec.get("transposed", False) == linear.transposed
    if not fits:
        raise SurgeryError(f"the journal's entry for {linear.path} describes another linear: {str(spec)[:100]}")
