"""What the page shows, read from a converted checkpoint's folder and from a folder of its evaluation."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surgery.architectures.attention import attention_paths, attention_shape
from surgery.architectures.base import ROLES
from surgery.checkpoint.meta_model import build_unconverted_model
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import read_mixers
from surgery.core.errors import SurgeryError
from surgery.core.files import read_json
from surgery.mixers import MIXERS, mixer_config
from surgery.publish.summary import (
    describe_mixer,
    describe_structure,
    macs_per_token,
    read_report,
    softmax_cache,
    softmax_macs,
)

CONTEXTS = tuple(1024 * 4**power for power in range(6))  # 1K to 1M
MAX_BYTES = 64 * 2**20  # bytes of a log or of results that a page still shows


@dataclass
class PageData:
    """costs: context -> {"cache": (before, after), "macs": (before, after)}, numbers of one sequence and multiply-
    accumulates of the next token; log: lines of healing; results: of `surgery eval --out`; notes: what is not shown, and why."""

    name: str
    folder: Path
    report: dict[str, Any]
    mixing: dict[str, str]  # path of an attention -> what mixes its tokens
    costs: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def layers(self) -> list[int]:
        found = {layer_index(record["name"]) for record in self.report["modules"]} | {
            layer_index(path) for path in self.mixing
        }
        return sorted(layer for layer in found if layer is not None)

    @property
    def roles(self) -> list[str]:
        """Columns of pictures, in the order of a layer."""
        found = {module_role(record) for record in self.report["modules"] if layer_index(record["name"]) is not None}
        known = [role for role in ROLES if role in found]
        return known + sorted(found - set(known))


def text_warnings(report: dict[str, Any]) -> list[str]:
    """What the conversion said of its calibration text."""
    text = report.get("calibration")
    said = text.get("warnings", []) if isinstance(text, dict) else []
    return [f"calibration: {line}" for line in said if isinstance(line, str)] if isinstance(said, list) else []


def layer_index(path: str) -> int | None:
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(found[1]) if found else None


def module_role(record: dict[str, Any]) -> str:
    return " + ".join(record["roles"]) or str(record["name"]).rsplit(".", 1)[-1]


def load_page_data(name: str, measured: Path | None = None) -> PageData:
    """measured: a folder of `surgery eval --out`; by default OUT/eval, where there is one."""
    source = open_converted_checkpoint(name)
    report = read_report(source.folder, name)
    data = PageData(name, source.folder, report, {})
    _add_attention(data, source)
    data.notes += text_warnings(report)
    data.log = _read_log(source.folder / "training" / "log.jsonl", data.notes)
    place = measured or source.folder / "eval"
    if (place / "results.json").is_file():
        data.results = _read_results(place / "results.json")
    elif measured is not None:
        raise SurgeryError(
            f"{measured} has no results.json; `surgery eval {name} --compare SRC --out {measured}` writes one"
        )
    return data


def _add_attention(data: PageData, source: CheckpointSource) -> None:
    """What mixes tokens where, and what it costs at each context."""
    mixers = {path: mixer_config(spec) for path, spec in read_mixers(source.config, source.name).items()}
    try:
        model = build_unconverted_model(source)
        paths = attention_paths(model)
        shapes = {path: attention_shape(model, path) for path in paths}
    except SurgeryError as error:
        data.mixing = {path: describe_mixer(config) for path, config in mixers.items()}
        data.notes.append(f"costs against context are not shown: {error}")
        return
    data.mixing = {path: describe_mixer(mixers[path]) if path in mixers else "softmax" for path in paths}
    linears = macs_per_token(data.report, source) or {"before": 0, "after": 0}
    for context in CONTEXTS:
        cache, macs = [0, 0], [linears["before"], linears["after"]]
        for path, shape in shapes.items():
            before = softmax_cache(shape, context), softmax_macs(shape, context)
            after = before
            if path in mixers:
                cost = MIXERS[mixers[path]].cost(mixers[path], shape, context)
                after = cost.cache, cost.macs
            cache = [cache[0] + before[0], cache[1] + after[0]]
            macs = [macs[0] + before[1], macs[1] + after[1]]
        data.costs[context] = {"cache": (cache[0], cache[1]), "macs": (macs[0], macs[1])}


def _read_log(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Lines of training; a line that is none (a run was killed while it wrote) is left out."""
    if not path.is_file():
        return []
    if path.stat().st_size > MAX_BYTES:
        notes.append(f"the log of training has {path.stat().st_size:,} bytes and is not shown")
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            read = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(read, dict):
            found.append(read)
    return found


def _read_results(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_BYTES:
        raise SurgeryError(
            f"{path} has {path.stat().st_size:,} bytes; results of an evaluation have under {MAX_BYTES:,}"
        )
    read = read_json(path)
    if not isinstance(read, dict) or not isinstance(read.get("rows"), list):
        raise SurgeryError(f"{path} is no result of `surgery eval`")
    return read


def structure_class(record: dict[str, Any]) -> str:
    """A class of the style: that of the structure, or `other`."""
    name = str(record["structure"]["structure"])
    return name if name in ("btt", "monarch", "low_rank", "pivoted_low_rank", "kronecker") else "other"


def structure_text(record: dict[str, Any]) -> str:
    return describe_structure(record["structure"])
