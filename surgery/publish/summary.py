"""Summaries of plans and reports as data, and the cost of mixers against softmax attention at several contexts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from surgery.architectures.attention import mixer_shape, shapes_without_mixer
from surgery.architectures.linears import LinearInfo, ModelLayout, find_linears
from surgery.checkpoint.outline import describe_unconverted_model
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import QUANT_METHOD, is_narrowed, mixers_of, stored_size, table_of
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, read_json
from surgery.mixers import AttentionShape, MixerConfig, mixer_config
from surgery.mixers.cache_size import cache_bytes, mixer_cost
from surgery.mixers.head_hybrid import HeadHybrid
from surgery.mixers.masks.base import MASKS
from surgery.mixers.native_config import Native, native_macs, native_state_bytes
from surgery.mixers.softmax import Softmax, describe_softmax
from surgery.modeling.joined import record_paths
from surgery.modeling.modules import DAMAGED_TABLE, build_module
from surgery.planning.renamed import renew_report
from surgery.planning.speed import speed_dict
from surgery.planning.targets import LinearTarget, Plan
from surgery.publish.figures import CACHE_TOKENS, checkpoint_figures
from surgery.publish.large_weights import large_weights
from surgery.publish.measured import EVAL_FOLDER, explain_damage, load_measurements
from surgery.publish.training_kernels import training_kernels
from surgery.publish.verdict import verdict
from surgery.structures import STRUCTURES, StructureConfig

NOT_REPLACED = "not replaced"  # the structure that tables show for a matrix that stays dense


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return one row per role, shape and structure of the planned replacements; parameter counts assume uniform ranks.

    macs: multiply-accumulates per token, which few of the routed experts compute.
    """
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
    roles = " + ".join(target.roles) or _path_in_layer(target.linear)
    row = {"role": roles, "shape": [target.out, target.in_], "before": target.numel}
    if target.preview is None:
        return {**row, "structure": "dense", "after": target.numel, "macs": round(target.numel * target.linear.active)}
    label = describe_structure(_preview_dict(target) or {}) if len(target.configs) == 1 or target.options else "auto"
    after = target.params(target.preview)
    macs = after if target.neurons else _structure_cost(target.preview, target.out, target.in_)[1]
    return {
        **row,
        "structure": label,
        "after": after,
        "macs": round(macs * target.linear.active),
    }


def _outputs(target: LinearTarget) -> dict[str, list[int]]:
    """Return the numbers of outputs of joined linears, {} for others."""
    return {"outputs": [linear.out for linear in target.joined]} if target.joined else {}


def _preview_dict(target: LinearTarget) -> dict[str, Any] | None:
    if target.preview is None:
        return None
    share = {"share": "experts"} if target.basis else {"share": "input"} if target.joined else {}
    return {**target.preview.to_dict(), **share}


@lru_cache(4096)
def _structure_cost(config: StructureConfig, out: int, in_: int) -> tuple[int, int]:
    """Return (parameters, multiply-accumulates) of a structure; the experts of a layer have the same shapes."""
    cls = STRUCTURES[config]
    return cls.params(config, out, in_), cls(in_, out, config, bias=False, device="meta").macs()


def _path_in_layer(linear: LinearInfo) -> str:
    """Return the path of a linear without that of its layer, after the name of its tower."""
    path = linear.path.split(".", max(3, linear.layer.count(".") + 1))[-1]
    return f"{linear.tower} {path}" if linear.tower else path


def describe_structure(structure: dict[str, Any]) -> str:
    """Format a structure: {"structure": "btt", "blocks": [4, 4], "rank": 8} -> btt 4x4 rank 8, and with levels mlbtc
    1+4x4 ranks 16+2.
    """
    if structure["structure"] == "split":
        return "split: " + ", ".join(f"{k} {describe_structure(v)}" for k, v in structure["parts"].items())
    if structure["structure"] == "joined":
        return f"joined: {describe_structure(structure['matrix'])}" if "matrix" in structure else "joined"
    words = [structure["structure"], *([f"int{structure['bits']}"] if "bits" in structure else [])]
    if structure.get("share") == "experts":
        words.append("shared basis")
    if structure.get("share") == "input":
        words.append("joined")
    if isinstance(structure.get("blocks"), (list, tuple)):
        words.append("x".join(str(n) for n in structure["blocks"]))
    elif isinstance(structure.get("blocks"), int):  # of a structure of the user's
        words.append(f"{structure['blocks']} blocks")
    if isinstance(levels := structure.get("levels"), (list, tuple)):
        words.append("+".join("x".join(map(str, n[:2])) if isinstance(n, (list, tuple)) else str(n) for n in levels))
    if structure.get("ranks") is not None:
        words.append("ranks " + "+".join(str(n) for n in structure["ranks"]))
    elif structure.get("rank") is not None and (structure["structure"] != "monarch" or structure["rank"] != 1):
        words.append(f"rank {structure['rank']}")
    if isinstance(structure.get("width"), int):
        unit = structure.get("unit", 1)
        sized = "width" if unit == 1 or structure["structure"] == "value_dims" else "groups"
        words.append(f"{sized} {structure['width'] // unit}")
    if structure.get("order") == "strided":
        words.append("strided")
    return " ".join(words)


def plan_dict(plan: Plan, context: int | None = None, estimate: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the plan as JSON data, for --json and notebooks. context: as in `cost_lengths`. estimate: of the
    conversion, with the time of its tuning."""
    targets = [
        {"name": t.name, "shape": [t.out, t.in_], "keep": t.keep, "first": _preview_dict(t), **_outputs(t)}
        for t in plan.replaced_targets()
    ]
    mixed, softmax, chosen = plan.attention_after()
    return {
        "source": plan.source,
        "model_type": plan.model_type,
        "recipe": json.loads(plan.recipe.model_dump_json()),
        "rows": plan_rows(plan),
        "targets": targets,
        "cuts": targets,  # the key until 0.1, for scripts that read it
        "unchanged": unchanged_linears(plan),
        "totals": plan.totals(),
        "candidates": sorted({config.name for t in plan.replaced_targets() for config in t.configs}),
        **attention_costs(
            ((t.path, t.config, t.shape) for t in mixed), softmax, "mixers", plan.dtype, chosen, cost_lengths(context)
        ),
        "tune": None if estimate is None else estimate["tune"],
        "speed_target": speed_dict(
            plan, {t.name: t.preview.to_dict() if t.preview else None for t in plan.replaced_targets()}
        ),
        "notes": list(plan.notes),
    }


def unchanged_linears(plan: Plan) -> list[dict[str, Any]] | None:
    """Return the linears that stay dense, as [{"shape": [out, in], "count"}], with "last": True for the head, which
    reads only the last token of a prompt; None with routed experts, of which few compute a token.
    """
    if any(linear.experts for linear in plan.layout.linears):
        return None
    shapes = [((t.out, t.in_), False) for targets in plan.targets.values() for t in targets if not t.configs]
    replaced = plan.replaced_linears()
    for target in plan.replaced_targets():
        width = getattr(target.preview, "width", 0)
        shapes += [(narrowed_shape(n, target.in_, width), False) for n in target.all_linears if target.neurons]
    rest = [linear for linear in plan.layout.linears if linear.path not in replaced]
    return _counted_shapes(shapes + [((linear.out, linear.in_), "head" in linear.roles) for linear in rest])


def _counted_shapes(shapes: list[tuple[tuple[int, int], bool]]) -> list[dict[str, Any]]:
    kinds = Counter(shapes).items()
    return [
        {"shape": list(shape), "count": count, **({"last": True} if last else {})} for (shape, last), count in kinds
    ]


def _how_to_get_report(folder: Path) -> str:
    """Return what to do about a folder without a report: `save_pretrained` of a loaded model writes none."""
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else None
    table = config.get("quantization_config") if isinstance(config, dict) else None
    if isinstance(table, dict) and table.get("quant_method") == QUANT_METHOD:
        return "The weights are converted: copy the file from the checkpoint that the model was loaded from."
    return "Give a converted checkpoint."


def read_report(folder: Path, name: str) -> dict[str, Any]:
    """Read and validate the report of a converted checkpoint; one of an older version is returned in today's words."""
    path = folder / REPORT_NAME
    if not path.is_file():
        raise SurgeryError(f"{name} has no {REPORT_NAME}, which `surgery convert` writes. {_how_to_get_report(folder)}")
    from surgery.checkpoint.report import validate_report

    report: dict[str, Any] = read_json(path)
    report = renew_report(report) if isinstance(report, dict) else report
    validate_report(report, str(path))
    return report


def inspect(name: str, measured: Path | None = None) -> dict[str, Any]:
    """Return the report of a converted checkpoint, compared with the stored tensors, extended by costs and the verdict.

    measured: folder of `surgery eval --out` or `surgery compare --out`; None: eval/ in the checkpoint's folder, if it
    exists. Raises SurgeryError if a given folder has no results of this checkpoint.
    """
    source = open_converted_checkpoint(name)
    table, report = table_of(source), read_report(source.folder, name)
    check_entries(table, source)
    unit, stored = stored_size(table, source.tensors)
    as_reported = stored == report["totals"][f"{unit}_after"]
    report["checks"] = {f"stored_{unit}": stored, "as_reported": as_reported, "structured_linears": len(table)}
    report["macs_per_token"] = macs_per_token(report, source)
    report["linears"] = report_linears(report, source)
    if mixers_of(source):
        report |= checkpoint_costs(source)
        report["large_weights"] = large_weights(source)
        report["training_kernels"] = training_kernels(checkpoint_mixers(source))
        from surgery.conversion.toeplitz import toeplitz_fits

        fits = toeplitz_fits(source)
        report["toeplitzness"] = {path: fit.r2.flatten().tolist() for path, (_, _, fit) in fits.items()}
    with explain_damage(name):
        results = load_measurements(source, measured or source.folder / EVAL_FOLDER)
        if measured is not None:
            results.check(name, measured)
        report["verdict"] = verdict(report, results.beside_original())
    return report


def check_entries(table: dict[str, dict[str, Any]], source: CheckpointSource) -> None:
    """Raise SurgeryError for an entry of the table that is invalid, or that the stored tensors do not fit."""
    shapes: dict[str, dict[str, list[int]]] = {}  # by entry: layers repeat them
    for path, spec in table.items():
        key = json.dumps(spec, sort_keys=True)
        if key not in shapes:
            built = build_module(spec).state_dict()
            shapes[key] = {name: list(tensor.shape) for name, tensor in built.items()}
        for name, shape in shapes[key].items():
            stored = source.tensors.get(f"{path}.{name}")
            if stored is not None and sorted(stored.shape) != sorted(shape):  # transposed for a Conv1D
                raise SurgeryError(
                    f"{DAMAGED_TABLE}: by its entry for {path!r} the tensor {name} has the shape {shape}, the file has "
                    f"{list(stored.shape)}"
                )


def checkpoint_costs(source: CheckpointSource, lengths: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Return `attention_costs` of a converted checkpoint, its rows under "mixer_rows". lengths: in tokens; None:
    CONTEXTS.

    Raises SurgeryError for models of remote code.
    """
    mixers = mixers_of(source)
    model = describe_unconverted_model(source)
    with_mixers = _mixers_of(model, mixers)
    with_softmax = shapes_without_mixer(model, {path: config for path, config, _ in with_mixers}).values()
    return attention_costs(with_mixers, with_softmax, "mixer_rows", source.dtype, lengths=lengths or CONTEXTS)


def model_sizes(source: CheckpointSource) -> dict[str, Any]:
    """Return what results of `surgery eval` say of a checkpoint, converted or not: "cache_bytes", the bytes in the
    cache of one sequence of CACHE_TOKENS tokens, None for models of remote code and without attention; and "kept", the
    share of the parameters of replaced matrices that is stored, None where the report tells of none.
    """
    kept = None
    try:
        replaced = checkpoint_figures(read_report(source.folder, source.name)).get("replaced")
        kept = None if replaced is None else replaced.after / replaced.before
    except (
        SurgeryError
    ):  # no conversion: an original, as it is or trained on; or a damaged report, which scores do not need
        pass
    try:
        model, converted = describe_unconverted_model(source), "quantization_config" in source.config
        mixers = _mixers_of(model, mixers_of(source) if converted else {})
        softmax = shapes_without_mixer(model, {path: config for path, config, _ in mixers})
        modules: list[tuple[MixerConfig | None, AttentionShape]] = [(config, shape) for _, config, shape in mixers]
        modules += [(None, shape) for shape in softmax.values()]
    except SurgeryError:
        return {"cache_bytes": None, "kept": kept}
    sizes = (compare_costs(*module, CACHE_TOKENS, source.dtype)["cache_bytes"][1] for module in modules)
    return {"cache_bytes": sum(sizes) or None, "kept": kept}


def checkpoint_mixers(source: CheckpointSource) -> list[tuple[str, MixerConfig, AttentionShape]]:
    """Return (path, config, shape) of every mixer of a converted checkpoint."""
    return _mixers_of(describe_unconverted_model(source), mixers_of(source))


def _mixers_of(model: Any, mixers: dict[str, dict[str, Any]]) -> list[tuple[str, MixerConfig, AttentionShape]]:
    configs = {path: mixer_config(spec) for path, spec in mixers.items()}
    return [(path, config, mixer_shape(model, path, config)) for path, config in configs.items()]


def macs_per_token(report: dict[str, Any], source: CheckpointSource) -> dict[str, int] | None:
    """Return multiply-accumulates per token of all linears, before and after; FLOPs are twice that.

    Attention scores, which depend on the context, are not counted. Of routed experts those count that compute a token.
    None for models of remote code. The config may say the width of pruned MLPs and the heads of pruned attention
    already, so that its model has fewer.
    """
    try:
        layout: ModelLayout = find_linears(describe_unconverted_model(source))
    except SurgeryError:  # a model of remote code
        return None
    before = sum(linear.out * linear.in_ * linear.active for linear in layout.linears)
    sizes = {linear.path: linear.out * linear.in_ for linear in layout.linears}
    active = {linear.path: linear.active for linear in layout.linears if linear.experts}
    change, removed = 0.0, sum((report.get(key) or {}).get("macs", 0) for key in ("depth", "experts"))
    for record in report["modules"]:
        paths = record_paths(record["name"])
        share = active.get(paths[0], 1.0)
        change += (record["macs_after"] - record["macs_before"]) * share
        if is_narrowed(record["structure"]):
            before += (record["macs_before"] - sum(sizes[path] for path in paths)) * share
    return {"before": round(before + removed), "after": round(before + change)}


def report_linears(report: dict[str, Any], source: CheckpointSource) -> dict[str, Any] | None:
    """Return the linears of a converted checkpoint as {"replaced": [{"structure", "shape", "count"}], "unchanged":
    [{"shape", "count"}]}.

    None if their time is not that of their structures: with integers, with routed experts, and for models of remote
    code.
    """
    try:
        layout: ModelLayout = find_linears(describe_unconverted_model(source))
    except SurgeryError:  # a model of remote code
        return None
    if report.get("storage") or any(linear.experts for linear in layout.linears):
        return None
    records = [record for record in report["modules"] if not is_narrowed(record["structure"])]
    replaced = Counter(json.dumps([r["structure"], r["shape"], r.get("outputs")]) for r in records)
    widths = _widths_to_apply(report, layout)
    paths = {path for record in report["modules"] for path in record_paths(record["name"])} - widths.keys()
    others = [
        (narrowed_shape(n, *widths.get(n.path, (0, 0))), "head" in n.roles)
        for n in layout.linears
        if n.path not in paths
    ]
    kinds = ((*json.loads(kind), count) for kind, count in replaced.items())
    return {
        "replaced": [
            {"structure": structure, "shape": shape, "count": count, **({"outputs": outputs} if outputs else {})}
            for structure, shape, outputs, count in kinds
        ],
        "unchanged": _counted_shapes(others),
    }


def _widths_to_apply(report: dict[str, Any], layout: ModelLayout) -> dict[str, tuple[int, int]]:
    """Return (columns before, columns that stay) of the last linear of each pruned MLP or attention, by the path of each
    of its linears; equal numbers where the config says already what stays, so that the linears of `layout` have it.
    """
    sizes = {linear.path: linear.in_ for linear in layout.linears}
    widths: dict[str, tuple[int, int]] = {}
    for record in report["modules"]:
        if is_narrowed(record["structure"]):
            paths = record_paths(record["name"])
            widths |= dict.fromkeys(paths, (sizes[paths[-1]], record["structure"]["width"]))
    return widths


def narrowed_shape(linear: LinearInfo, before: int, width: int) -> tuple[int, int]:
    """Return the shape (out, in) of a linear, in a pruned MLP or attention of whose `before` columns `width` stay.

    before: 0 for other linears.
    """
    if not before:
        return linear.out, linear.in_
    if set(linear.roles) & {"mlp.down", "expert.down", "attention.output"}:
        return linear.out, width
    return linear.out * width // before, linear.in_


def _kind_of_structure(structure: dict[str, Any]) -> str:
    """Return a structure's description without its size, which differs from matrix to matrix."""
    return re.split(" rank| width| groups", describe_structure(structure))[0]


def inspect_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per role: modules, structures, parameters, multiply-accumulates, and the median and worst relative
    error of the matrices that were replaced. is_dense: whether no matrix of the role was replaced."""
    roles: dict[str, list[dict[str, Any]]] = {}
    for record in report["modules"]:
        roles.setdefault(" + ".join(record["roles"]) or "other", []).append(record)
    rows = []
    for role, records in roles.items():
        replaced = [r for r in records if not is_dense(r)]
        errors = sorted(
            r["error"] for r in replaced if r["error"] is not None
        )  # models trained from scratch have no errors
        names = [NOT_REPLACED if is_dense(r) else _kind_of_structure(r["structure"]) for r in records]
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
                "is_dense": not replaced,
            }
        )
    return rows


def is_dense(record: dict[str, Any]) -> bool:
    """Return whether the matrix of a record of a report was not replaced."""
    return bool(record["structure"] == {"structure": "dense"})


def is_behind_mixer(record: dict[str, Any], report: dict[str, Any]) -> bool:
    """Return whether a record of a report is a dense output projection that was fitted to the mixer before it."""
    return is_dense(record) and bool(report.get("mixers")) and "attention.output" in record["roles"]


CONTEXTS = (1024, CACHE_TOKENS, 65536)


def cost_lengths(context: int | None) -> tuple[int, ...]:
    """Return the lengths in tokens at which costs of attention are shown: CONTEXTS, with `context` in place of the
    nearest of them.
    """
    if context is None:
        return CONTEXTS
    nearest = min(CONTEXTS, key=lambda length: max(length, context) / min(length, context))
    return tuple(sorted({*CONTEXTS, context} - ({nearest} - {context})))


def softmax_macs(shape: AttentionShape, length: int) -> int:
    """Return the multiply-accumulates of scores and mixing for the next token."""
    return shape.heads * (shape.key + shape.value) * min(length, shape.window or length)


def attention_costs(
    with_mixers: Iterable[tuple[str, MixerConfig, AttentionShape]],
    softmax: Iterable[AttentionShape],
    rows_key: str,
    dtype: torch.dtype,
    chosen: int = 0,
    lengths: tuple[int, ...] = CONTEXTS,
) -> dict[str, Any]:
    """Return {rows_key: one row per mixer, "attention_totals": the costs of all attention modules, None without mixers,
    "cache_dtype": the name of `dtype`}.

    Costs are `cache_bytes`, bytes in the cache of one sequence, and `macs`, multiply-accumulates of the next token:
    [before, after] at each of `lengths`, in tokens. A row sums over the layers of its mixer. with_mixers: (path,
    config, shape) of every mixer. softmax: shapes of the modules that keep softmax attention. dtype: of the model, and
    so of keys and values. chosen: how many of the `with_mixers` will keep softmax too, chosen by measurements. Which is
    not known, so every mixer counts by the share of those that remain: exactly, if the mixers are equal, and the mean
    over all choices otherwise.
    """
    modules = list(with_mixers)
    replaced = sum(config.replaces_attention for _, config, _ in modules)
    share_of_mixers = Fraction(replaced - chosen, replaced) if replaced else Fraction(1)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    softmax_costs: dict[str, Any] = {"cache_bytes": {}, "macs": {}}
    for path, config, shape in modules:
        share = share_of_mixers if config.replaces_attention else Fraction(1)
        row = rows.setdefault(
            (describe_mixer(config), json.dumps(_cost_options(config), sort_keys=True)),
            {
                "mixer": describe_mixer(config),
                "paths": [],
                "layers": Fraction(0),
                "params": 0,
                "cache_bytes": {},
                "macs": {},
                "notes": mixer_notes(config),
            },
        )
        row["paths"].append(path)
        row["layers"] += share
        _add_costs(row, shape, config, share, lengths, dtype)
        _add_costs(softmax_costs, shape, None, 1 - share, lengths, dtype)
        row["params"] += share * mixer_cost(config, shape, lengths[0]).params
    others = list(softmax)
    for shape in others:
        _add_costs(softmax_costs, shape, None, Fraction(1), lengths, dtype)
    totals = None
    if modules:
        count = len(modules) + len(others)
        totals = {"layers": count, "softmax_layers": chosen + len(others), "softmax": softmax_costs}
        for name in ("cache_bytes", "macs"):
            totals[name] = {
                str(n): [sum(cost[name][str(n)][i] for cost in (softmax_costs, *rows.values())) for i in (0, 1)]
                for n in lengths
            }
    every: dict[str, Any] = _rounded({rows_key: list(rows.values()), "attention_totals": totals})
    return {**every, "cache_dtype": str(dtype).removeprefix("torch.")}


def _cost_options(config: MixerConfig) -> dict[str, Any]:
    """Return the options of a mixer that its costs depend on: of the heads that keep softmax, how many they are."""
    options = config.to_dict()
    heads = options.get("softmax_heads")
    return options if heads is None else {**options, "softmax_heads": len(heads)}


def _add_costs(
    row: dict[str, Any],
    shape: AttentionShape,
    config: MixerConfig | None,
    share: Fraction,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Add `share` of the costs of an attention module at each of `lengths`. config: of its mixer; None: softmax
    attention.
    """
    for length in lengths:
        for name, costs in compare_costs(config, shape, length, dtype).items():
            sums = row[name].setdefault(str(length), [Fraction(0), Fraction(0)])
            for i, cost in enumerate(costs):
                sums[i] += share * cost


def compare_costs(
    config: MixerConfig | None, shape: AttentionShape, length: int, dtype: torch.dtype
) -> dict[str, tuple[int, int]]:
    """Return the costs of one attention module by name, as (softmax attention, its mixer): `cache_bytes` of one
    sequence after `length` tokens, and `macs` of the next token. config: of the mixer; None: softmax attention
    stays.
    """
    before = cache_bytes(None, shape, length, dtype), softmax_macs(shape, length)
    if config is None:
        return {"cache_bytes": (before[0],) * 2, "macs": (before[1],) * 2}
    cost = mixer_cost(config, shape, length)
    if not config.replaces_attention:
        before = native_state_bytes(shape, dtype), native_macs(shape)
    return {"cache_bytes": (before[0], cache_bytes(config, shape, length, dtype)), "macs": (before[1], cost.macs)}


def _rounded(value: Any) -> Any:
    """Return nested data with fractions as whole numbers, or, if they are none, as floats with one digit after the
    point.
    """
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    if not isinstance(value, Fraction):
        return value
    return int(value) if value.denominator == 1 else round(float(value), 1)


def describe_mixer(config: Any) -> str:
    """Format a mixer config, for example "linear: gates mask, hedgehog features" or "mlr 32|16|16 sliding"."""
    if isinstance(config, HeadHybrid):
        heads = "key/value head" if len(config.softmax_heads) == 1 else "key/value heads"
        options = "" if config.softmax.is_plain else f" ({describe_softmax(config.softmax)})"
        return f"softmax in {len(config.softmax_heads)} {heads} of a layer{options}; {describe_mixer(config.others)}"
    if isinstance(config, Softmax):
        return f"softmax: {describe_softmax(config)}"
    if isinstance(config, Native):
        return f"native: {config.levels} level weights, block {config.block}"
    if not hasattr(config, "mask"):
        words = [config.name]
        if ranks := getattr(config, "ranks", None):
            words.append("|".join(str(r) for r in ranks))
        return " ".join([*words, *([config.form] if hasattr(config, "form") else [])])
    scores = "delta rule" if config.scores == "delta" else f"{config.features.name} features"
    extras = [f"{name} {getattr(config, name)}" for name in ("window", "sinks", "convolution") if getattr(config, name)]
    extras += [f"near tokens in {config.near_tokens}"] if config.near_tokens != "sliding" else []
    extras += [f"block {config.mask.block}"] if getattr(config.mask, "block", 1) > 1 else []
    extras += describe_log_linear(config.mask) if config.mask.name == "hierarchical" else []
    extras += [f"rope {config.rope}"] if config.rope != "keep" else []
    extras += ["negative eigenvalues"] if config.negative_eigenvalues else []
    extras += ["states per head"] if config.states == "per_head" else []
    return ", ".join(
        [f"{config.name}: {config.mask.name} mask", scores, *(["normalised"] if config.normalise else []), *extras]
    )


def describe_log_linear(mask: Any) -> list[str]:
    """Return the options of a log-linear mask for which no fused kernel was measured, for example ["strong
    admissibility"].
    """
    words = ["strong admissibility"] if mask.strong else []
    words += [f"{mask.form} lambda"] if mask.form != "softplus" else []
    return words + ([f"{mask.matrix.replace('_', ' ')} Lambda"] if mask.matrix != "scalar" else [])


def mixer_notes(config: Any) -> list[str]:
    """Return warnings about the size of a mixer's state, and about what has no fused kernel: options, or MLR attention
    on a CPU.
    """
    if getattr(config, "others", config).name == "mlr":
        return ["on a CPU MLR attention runs in plain PyTorch, several times slower than softmax (docs/performance.md)"]
    mask = getattr(getattr(config, "others", config), "mask", None)
    if mask is not None and mask.name == "hierarchical" and (words := describe_log_linear(mask)):
        where = "training, prefill and decoding run" if mask.strong else "decoding steps run"
        return [f"no fused kernel computes log-linear attention with {' and '.join(words)}: {where} in plain torch"]
    if mask is not None and not MASKS[mask].has_bounded_state:
        reach = MASKS[mask].reach(mask)
        tokens = "all tokens so far" if reach is None else f"the last {reach} tokens"
        return [
            f"mask {mask.name} has no state besides keys and values, in float32: each step keeps and reads {tokens}"
        ]
    return []
