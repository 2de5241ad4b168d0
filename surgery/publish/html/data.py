"""Load the data of the report page from a converted checkpoint and its evaluation results."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

from surgery.architectures.attention import mixer_shape, shapes_without_mixer
from surgery.architectures.base import ROLES
from surgery.architectures.linears import find_linears
from surgery.checkpoint.meta_model import build_unconverted_model
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import mixers_of
from surgery.core.errors import SurgeryError
from surgery.core.files import read_json
from surgery.mixers import mixer_config
from surgery.modeling.joined import record_paths
from surgery.publish.front import read_front
from surgery.publish.measured import EVAL_FOLDER, MAX_BYTES, Measurements, load_measurements
from surgery.publish.names import mixer_title
from surgery.publish.speed_notes import report_times
from surgery.publish.summary import (
    attention_costs,
    compare_costs,
    describe_mixer,
    describe_structure,
    is_dense,
    macs_per_token,
    read_report,
    report_linears,
)

CONTEXTS = tuple(1024 * 2**power for power in range(11))  # 1K to 1M
SOFTMAX = ("softmax", "softmax")  # the token mixing of attention that nothing replaced
GENERATIONS_NAME, MAX_GENERATIONS = "generations.json", 8


@dataclass
class PageData:
    """Data of the report page.

    report: surgery_report.json. mixing: path of an attention module -> (name of its token mixing, description). kept:
    the linears that nothing replaced, as (number of the layer, role). costs: context
    length in tokens -> {"cache_bytes": (before, after), "macs": (before, after)}: bytes in the cache of one sequence,
    and multiply-accumulates of the next token. dtype: the name of the model's dtype, and so of its keys and values.
    log: entries of the training log. measured: results of `surgery eval --out` and `surgery compare --out`. notes:
    remarks to show on the page. generations: continuations of prompts, {"prompt", "original", "converted"}.
    """

    name: str
    folder: Path
    report: dict[str, Any]
    mixing: dict[str, tuple[str, str]]
    kept: set[tuple[int | None, str]] = field(default_factory=set)
    costs: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    dtype: str = "bfloat16"
    log: list[dict[str, Any]] = field(default_factory=list)
    measured: Measurements = field(default_factory=Measurements)
    notes: list[str] = field(default_factory=list)
    generations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def layers(self) -> list[int]:
        """Indices of the layers with replaced linears or attention."""
        indices = {layer_index(record["name"]) for record in self.report["modules"]} | {
            layer_index(path) for path in self.mixing
        }
        return sorted(layer for layer in indices if layer is not None)

    @property
    def roles(self) -> list[str]:
        """Roles of the linears in layers, in the order of computation: the columns of the diagram."""
        names = {module_role(record) for record in self.report["modules"] if layer_index(record["name"]) is not None}
        names |= {role for _, role in self.kept}
        known = [role for role in ROLES if role in names]
        return known + sorted(names - set(known))


def text_warnings(report: dict[str, Any]) -> list[str]:
    """Return the warnings about the calibration text in the report."""
    text = report.get("calibration")
    warnings = text.get("warnings", []) if isinstance(text, dict) else []
    return [f"calibration: {line}" for line in warnings if isinstance(line, str)] if isinstance(warnings, list) else []


def layer_index(path: str) -> int | None:
    """Return the first number in a module path, None without one."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(match[1]) if match else None


def module_role(record: dict[str, Any]) -> str:
    """Return the roles of a replaced linear, or the last part of its name if it has none."""
    return " + ".join(record["roles"]) or str(record["name"]).rsplit(".", 1)[-1]


def load_page_data(name: str, measured: Path | None = None) -> PageData:
    """Load the data of a converted checkpoint, a folder or Hub id.

    measured: folder of `surgery eval --out` or `surgery compare --out`; None: eval/ in the checkpoint's folder, if it
    exists. Raises SurgeryError if a given folder has no results, or only those of other checkpoints.
    """
    source = open_converted_checkpoint(name)
    report = read_report(source.folder, name)
    data = PageData(name, source.folder, report, {})
    _add_attention(data, source)
    data.notes += text_warnings(report)
    if not all(is_dense(record) for record in report["modules"]):  # of mixers alone the linears are as fast as before
        data.notes += [Text.from_markup(line).plain for line in report_times(report_linears(report, source))]
    if (report.get("recipe") or {}).get("front") is not None and read_front(report) is None:
        data.notes.append("the front of `surgery search` in surgery_report.json is damaged, so it is not shown")
    data.log = _read_log(source.folder / "training" / "log.jsonl", data.notes)
    folder = measured or source.folder / EVAL_FOLDER
    data.measured = load_measurements(source, folder)
    if (folder / GENERATIONS_NAME).is_file():
        data.generations = _read_generations(folder / GENERATIONS_NAME)
    if measured is not None:
        data.measured.check(name, measured)
    return data


def _add_attention(data: PageData, source: CheckpointSource) -> None:
    """Fill `mixing`, and `costs` at each length of CONTEXTS."""
    data.dtype = str(source.dtype).removeprefix("torch.")
    mixers = {path: mixer_config(spec) for path, spec in mixers_of(source).items()}
    try:
        model = build_unconverted_model(source)
        every = {path: mixer_shape(model, path, config) for path, config in mixers.items()}
        every |= shapes_without_mixer(model, mixers)
        shapes = {path: every[path] for path, _ in model.named_modules() if path in every}
    except SurgeryError as error:
        data.mixing = {path: (mixer_title(config), describe_mixer(config)) for path, config in mixers.items()}
        data.notes.append(f"costs against context are not shown: {error}")
        return
    data.mixing = {
        path: (mixer_title(mixers[path]), describe_mixer(mixers[path])) if path in mixers else SOFTMAX
        for path in shapes
    }
    replaced_linears = {path for record in data.report["modules"] for path in record_paths(record["name"])}
    data.kept = {
        (layer_index(linear.path), " + ".join(linear.roles))
        for linear in find_linears(model).linears
        if linear.layer and linear.roles and linear.path not in replaced_linears
    }
    replaced = [(path, config, shapes[path]) for path, config in mixers.items()]
    softmax = [shape for path, shape in shapes.items() if path not in mixers]
    data.report |= attention_costs(replaced, softmax, "mixer_rows", source.dtype)
    linears = macs_per_token(data.report, source) or {"before": 0, "after": 0}
    for context in CONTEXTS:
        sums = {"cache_bytes": (0, 0), "macs": (linears["before"], linears["after"])}
        for path, shape in shapes.items():
            for name, (before, after) in compare_costs(mixers.get(path), shape, context, source.dtype).items():
                sums[name] = sums[name][0] + before, sums[name][1] + after
        data.costs[context] = sums


def _read_log(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the entries of the training log, without incomplete lines of a killed run."""
    if not path.is_file():
        return []
    if path.stat().st_size > MAX_BYTES:
        notes.append(f"the training log is not shown: it has {path.stat().st_size:,} bytes (at most {MAX_BYTES:,})")
        return []
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            read = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(read, dict):
            lines.append(read)
    return lines


def _read_generations(path: Path) -> list[dict[str, Any]]:
    if path.stat().st_size > MAX_BYTES:
        raise SurgeryError(f"{path} must have at most {MAX_BYTES:,} bytes (got {path.stat().st_size:,})")
    read = read_json(path)
    entries = read.get("generations") if isinstance(read, dict) else None
    keys = {"prompt", "original", "converted"}
    if not isinstance(entries, list) or not all(isinstance(e, dict) and keys <= e.keys() for e in entries):
        raise SurgeryError(
            f"{path} must hold a list of generations with {', '.join(sorted(keys))}. Write it again with `surgery run`"
        )
    return entries[:MAX_GENERATIONS]


def structure_class(record: dict[str, Any]) -> str:
    """Return the CSS class of a record's structure: "unchanged" if it is dense, "other" for structures of plugins."""
    if is_dense(record):
        return "unchanged"
    name = str(record["structure"]["structure"])
    return name if name in ("btt", "monarch", "low_rank", "pivoted_low_rank", "kronecker", "mlr") else "other"


def structure_text(record: dict[str, Any]) -> str:
    """Return a record's structure as text, e.g. "btt 4x4 rank 2"."""
    return describe_structure(record["structure"])
