"""Summaries of plans and reports as data, and the cost of mixers against softmax attention at several contexts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from surgery.architectures.attention import attention_shape
from surgery.architectures.linears import ModelLayout, find_linears
from surgery.checkpoint.outline import describe_unconverted_model
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import read_mixers, read_table
from surgery.conversion.toeplitz import toeplitz_fits
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, read_json
from surgery.mixers import MIXERS, AttentionShape, MixerConfig, mixer_config
from surgery.mixers.masks.base import MASKS
from surgery.planning.plan import LinearTarget, Plan
from surgery.structures import STRUCTURES


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return one row per role, shape and structure of the planned replacements; parameter counts assume uniform ranks."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for targets in plan.targets.values():
        for target in targets:
            row = _plan_row(target)
            key = (row["role"], *row["shape"], row["structure"])
            known = rows.setdefault(key, {**row, "modules": 0, "before": 0, "after": 0, "macs": 0})
            known["modules"] += 1
            for count in ("before", "after", "macs"):
                known[count] += row[count]
    return list(rows.values())


def _plan_row(target: LinearTarget) -> dict[str, Any]:
    roles = target.part.role if target.part else " + ".join(target.linear.roles) or target.linear.path.split(".", 3)[-1]
    row = {"role": roles, "shape": [target.out, target.in_], "before": target.numel}
    if target.preview is None:
        return {**row, "structure": "dense", "after": target.numel, "macs": target.numel}
    cls = STRUCTURES[target.preview]
    meta = cls(target.in_, target.out, target.preview, bias=False, device="meta")
    label = describe_structure(target.preview.to_dict()) if len(target.configs) == 1 else "auto"
    return {**row, "structure": label, "after": cls.params(target.preview, target.out, target.in_), "macs": meta.macs()}


def describe_structure(structure: dict[str, Any]) -> str:
    """Format a structure: {"structure": "btt", "blocks": [4, 4], "rank": 8} -> btt 4x4 rank 8."""
    if structure["structure"] == "split":
        return "split: " + ", ".join(f"{k} {describe_structure(v)}" for k, v in structure["parts"].items())
    words = [structure["structure"]]
    if isinstance(structure.get("blocks"), (list, tuple)):
        words.append("x".join(str(n) for n in structure["blocks"]))
    if structure.get("rank") is not None and (structure["structure"] != "monarch" or structure["rank"] != 1):
        words.append(f"rank {structure['rank']}")
    return " ".join(words)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON data, for --json and notebooks."""
    targets = [
        {"name": t.name, "shape": [t.out, t.in_], "keep": t.keep, "first": t.preview.to_dict() if t.preview else None}
        for t in plan.replaced_targets()
    ]
    return {
        "source": plan.source,
        "model_type": plan.model_type,
        "recipe": json.loads(plan.recipe.model_dump_json()),
        "rows": plan_rows(plan),
        "targets": targets,
        "cuts": targets,  # the key until 0.1, for scripts that read it
        "totals": plan.totals(),
        "candidates": sorted({config.name for t in plan.replaced_targets() for config in t.configs}),
        "mixers": mixer_rows((t.path, t.config, t.shape) for t in plan.attention_targets.values()),
        "notes": list(plan.notes),
    }


def read_report(folder: Path, name: str) -> dict[str, Any]:
    """Read and validate the report of a converted checkpoint."""
    path = folder / REPORT_NAME
    if not path.is_file():
        raise SurgeryError(f"{name} has no {REPORT_NAME}, which `surgery convert` writes. Give a converted checkpoint.")
    from surgery.checkpoint.report import validate_report

    report: dict[str, Any] = read_json(path)
    validate_report(report, str(path))
    return report


def inspect(name: str) -> dict[str, Any]:
    """Return the report of a converted checkpoint, compared with the stored tensors and extended by costs."""
    source = open_converted_checkpoint(name)
    table, report = read_table(source.config, name), read_report(source.folder, name)
    stored = sum(t.numel for t in source.tensors.values())
    claimed = report["totals"]["params_after"]
    report["checks"] = {"stored_params": stored, "as_reported": stored == claimed, "structured_linears": len(table)}
    report["macs_per_token"] = macs_per_token(report, source)
    if mixers := read_mixers(source.config, name):
        model = describe_unconverted_model(source)
        found = ((path, mixer_config(spec), attention_shape(model, path)) for path, spec in mixers.items())
        report["mixer_rows"] = mixer_rows(found)
        fits = toeplitz_fits(source)
        report["toeplitzness"] = {path: fit.r2.flatten().tolist() for path, (_, _, fit) in fits.items()}
    return report


def macs_per_token(report: dict[str, Any], source: CheckpointSource) -> dict[str, int] | None:
    """Return multiply-accumulates per token of all linears, before and after; FLOPs are twice that. Attention scores, which
    depend on the context, are not counted. None for models of remote code."""
    try:
        layout: ModelLayout = find_linears(describe_unconverted_model(source))
    except SurgeryError:  # a model of remote code
        return None
    before = sum(linear.out * linear.in_ for linear in layout.linears)
    change = report["totals"]["macs_after"] - report["totals"]["macs_before"]
    return {"before": before, "after": before + change}


def inspect_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per role: modules, structures, parameters, multiply-accumulates, median and worst relative error."""
    roles: dict[str, list[dict[str, Any]]] = {}
    for record in report["modules"]:
        roles.setdefault(" + ".join(record["roles"]) or "other", []).append(record)
    rows = []
    for role, records in roles.items():
        errors = sorted(
            r["error"] for r in records if r["error"] is not None
        )  # models trained from scratch have no errors
        names = [describe_structure(r["structure"]).split(" rank")[0] for r in records]
        rows.append(
            {
                "role": role,
                "modules": len(records),
                "structures": {n: names.count(n) for n in dict.fromkeys(names)},
                "before": sum(r["params_before"] for r in records),
                "after": sum(r["params_after"] for r in records),
                "macs_after": sum(r["macs_after"] for r in records),
                "median_error": errors[len(errors) // 2] if errors else None,
                "worst_error": errors[-1] if errors else None,
                "worst_module": max(records, key=lambda r: r["error"])["name"] if errors else None,
            }
        )
    return rows


CONTEXTS = (1024, 8192, 65536)


def softmax_cache(shape: AttentionShape, length: int) -> int:
    """Return the elements that the KV cache of softmax attention holds for one sequence."""
    return shape.groups * (shape.key + shape.value) * min(length, shape.window or length)


def softmax_macs(shape: AttentionShape, length: int) -> int:
    """Return the multiply-accumulates of scores and mixing for the next token."""
    return shape.heads * (shape.key + shape.value) * min(length, shape.window or length)


def mixer_rows(found: Iterable[tuple[str, MixerConfig, AttentionShape]]) -> list[dict[str, Any]]:
    """Return one row per mixer: cache elements and multiply-accumulates of the next token at each of CONTEXTS, summed over its
    layers, before and after. found: (path, config, shape) of every layer."""
    rows: dict[str, dict[str, Any]] = {}
    for path, config, shape in found:
        row = rows.setdefault(
            describe_mixer(config),
            {
                "mixer": describe_mixer(config),
                "paths": [],
                "params": 0,
                "cache": {},
                "macs": {},
                "notes": mixer_notes(config),
            },
        )
        row["paths"].append(path)
        for length in CONTEXTS:
            cost = MIXERS[config].cost(config, shape, length)
            _add_costs(row["cache"], length, softmax_cache(shape, length), cost.cache)
            _add_costs(row["macs"], length, softmax_macs(shape, length), cost.macs)
        row["params"] += cost.params
    return list(rows.values())


def _add_costs(sums: dict[str, list[int]], length: int, before: int, after: int) -> None:
    total = sums.setdefault(str(length), [0, 0])
    total[0] += before
    total[1] += after


def describe_mixer(config: Any) -> str:
    """Format a mixer config, for example "linear: gates mask, hedgehog features" or "mlr 32|16|16 sliding"."""
    if not hasattr(config, "mask"):
        words = [config.name]
        if ranks := getattr(config, "ranks", None):
            words.append("|".join(str(r) for r in ranks))
        return " ".join([*words, *([config.form] if hasattr(config, "form") else [])])
    scores = "delta rule" if config.scores == "delta" else f"{config.features.name} features"
    extras = [f"{name} {getattr(config, name)}" for name in ("window", "sinks", "convolution") if getattr(config, name)]
    return ", ".join(
        [f"{config.name}: {config.mask.name} mask", scores, *(["normalised"] if config.normalise else []), *extras]
    )


def mixer_notes(config: Any) -> list[str]:
    """Return warnings about the size of a mixer's state."""
    mask = getattr(config, "mask", None)
    if mask is not None and not MASKS[mask].has_bounded_state:
        return [f"a {mask.name} mask has no bounded state: each step keeps and reads all tokens so far"]
    return []
