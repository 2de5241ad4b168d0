"""The report of a conversion, from the entries of its journal."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from surgery.checkpoint.report import (
    AllocationReport,
    CalibrationReport,
    DepthReport,
    ExpertsReport,
    HeldOutReport,
    HybridReport,
    MemoryReport,
    MixerReport,
    ModuleReport,
    NativeReport,
    Report,
    ReportModel,
    SourceReport,
    SpeedReport,
    TimeReport,
    TotalsReport,
    TuneReport,
    TuningReport,
)
from surgery.checkpoint.safetensors_io import TensorInfo, TensorSource
from surgery.checkpoint.source import CheckpointSource
from surgery.conversion.context import NON_LAYER, ConversionContext
from surgery.conversion.mixer_init.base import MixerInit, select_init
from surgery.conversion.replacement import entry_of_tuning
from surgery.conversion.text_check import TextScore
from surgery.core.device import device_name, peak_rss
from surgery.core.version import __version__
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.speed import speed_dict


@dataclass
class ReportInputs:
    """What a report says beside the context.

    entries: the journal's entries of all layers, NON_LAYER last. stored: the tensors of the result. hybrid: the entry
    of the choice of layers that keep softmax. seconds: of each step, with their total. calibration_hint: see Source.
    text_score, text_warnings: of the calibration text. removals: the entry of the layers or experts that were removed,
    by its key. native: the entry of level weights; None without any.
    """

    entries: Sequence[dict[str, Any]]
    stored: Sequence[TensorInfo | TensorSource]
    hybrid: dict[str, Any] | None
    seconds: Mapping[str, float]
    calibration_hint: str
    text_score: TextScore | None
    text_warnings: list[str]
    removals: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    native: dict[str, Any] | None = None


def report_head(source: CheckpointSource, recipe: ConversionRecipe) -> dict[str, Any]:
    """Return what every report begins with: versions, the source with its companion files, the recipe and its seed."""
    import transformers

    return {
        "surgery": __version__,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "source": SourceReport(name=source.name, revision=source.revision, fingerprint=source.fingerprint()),
        "recipe": json.loads(recipe.model_dump_json()),
        "seed": recipe.seed,
        "companions": [path.as_posix() for path in source.companions()],
    }


def conversion_report(ctx: ConversionContext, inputs: ReportInputs) -> Report:
    """Return the report of a conversion. Raises pydantic's ValidationError for entries of a damaged journal."""
    entries, source, non_layer = inputs.entries, ctx.model.source.original, inputs.entries[-1]
    records = [record for entry in entries for record in entry["records"]]
    unsplit = [targets[0] for targets in ctx.plan.targets.values() if targets[0].part is None]
    unreached: dict[str, Any] = {"unreached": list(ctx.plan.unreached)} if ctx.plan.unreached else {}
    timed = speed_dict(ctx.plan, {record["name"]: record["structure"] for record in records})
    speed: dict[str, Any] = {} if timed is None else {"speed": SpeedReport.model_validate(timed)}
    refits = {target.name for target in unsplit if not target.configs}  # dense before and after
    replaced = [record for record in records if record["name"] not in refits]
    models: dict[str, type[ReportModel]] = {"depth": DepthReport, "experts": ExpertsReport}
    removed: dict[str, Any] = {key: models[key].model_validate(record) for key, record in inputs.removals.items()}
    native: dict[str, Any] = {} if inputs.native is None else {"native": NativeReport.model_validate(inputs.native)}
    held_out = _held_out(inputs)
    return Report(
        **report_head(source, ctx.recipe),
        model_type=ctx.plan.model_type,
        notes=[*ctx.plan.notes, *uncalibrated_warnings(ctx, inputs.calibration_hint), *short_text_warnings(ctx)],
        **unreached,
        **speed,
        **removed,
        **native,
        calibration=_calibration_report(ctx, inputs),
        allocation=AllocationReport.model_validate(non_layer["allocation"]),
        held_out=None if held_out is None else HeldOutReport.model_validate(held_out),
        totals=TotalsReport.model_validate(totals(replaced, source, inputs.stored)),
        modules=[ModuleReport.model_validate(record) for record in records],
        mixers=[MixerReport.model_validate(r) for entry in entries for r in entry.get("mixer_records", [])],
        time=TimeReport(
            seconds=dict(inputs.seconds),
            layers={entry["piece"]: entry["seconds"] for entry in entries if "seconds" in entry},
            device=device_name(ctx.device),
            threads=torch.get_num_threads(),
            processes=ctx.dist.count,
        ),
        memory=MemoryReport(
            peak_rss=peak_rss(),
            calibration={"moments": ctx.runner.moment_bytes, "hidden_states": ctx.runner.hidden_bytes},
            largest_layer=_largest_layer(ctx),
        ),
        hybrid=None if inputs.hybrid is None else HybridReport.model_validate(inputs.hybrid),
        tune=_tune_report(ctx, entries),
    )


def _held_out(inputs: ReportInputs) -> dict[str, Any] | None:
    """Return the score on held-out samples, where the original has all layers and experts."""
    score: dict[str, Any] | None = inputs.entries[-1]["held_out"]
    removal: dict[str, Any] | None = next((r.get("held_out") for r in inputs.removals.values()), None)
    if score is None or removal is None:
        return score or removal
    return {**score, "original": removal["original"], "difference_se": None}


def _tune_report(ctx: ConversionContext, entries: Sequence[dict[str, Any]]) -> TuneReport | None:
    if ctx.data is None:
        return None
    tune = ctx.recipe.epochs
    tuned = {entry["piece"]: entry_of_tuning(entry) for entry in entries}
    records = {layer: TuningReport.model_validate(record) for layer, record in tuned.items() if record}
    whole = records.pop(NON_LAYER, None)
    norms: dict[str, Any] = {"norms": True} if tune.norms else {}
    return TuneReport(layers=tune.layers, model=tune.model, **norms, by_layer=records, whole=whole)


def _calibration_report(ctx: ConversionContext, inputs: ReportInputs) -> CalibrationReport | None:
    samples, score = ctx.data, inputs.text_score
    if samples is None:
        return None
    row, generated = samples.tokens() // samples.rows, {}
    if ctx.recipe.generated_tokens:
        generated["generated_tokens"] = ctx.recipe.generated_tokens // row * row
    return CalibrationReport(
        tokens=samples.tokens(),
        held_out_windows=samples.rows - samples.n_fit,
        windows=samples.rows,
        **generated,
        loss=score.loss if score else None,
        own_samples_loss=score.own_samples if score else None,
        warnings=inputs.text_warnings,
    )


def _largest_layer(ctx: ConversionContext) -> int:
    """Return the bytes of the largest layer in float32."""
    sizes: dict[str, int] = {}
    for parameter, name in ctx.model.keys.items():
        if (layer := ctx.shard_of[parameter]) != NON_LAYER:
            sizes[layer] = sizes.get(layer, 0) + 4 * ctx.model.source.tensors[name].numel
    return max(sizes.values(), default=0)


def totals(
    records: list[dict[str, Any]], source: CheckpointSource, stored: Sequence[TensorInfo | TensorSource]
) -> dict[str, Any]:
    """Return parameters and bytes of the whole checkpoint as stored, and parameters and MACs of the replaced weights.

    records: of the replaced modules. stored: all tensors of the converted checkpoint.
    """
    before, after = (sum(r[key] for r in records) for key in ("params_before", "params_after"))
    return {
        "replaced_params_before": before,
        "replaced_params_after": after,
        "kept": after / before if before else 1.0,
        "macs_before": sum(r["macs_before"] for r in records),
        "macs_after": sum(r["macs_after"] for r in records),
        "params_before": sum(t.numel for t in source.tensors.values()),
        "params_after": sum(math.prod(t.shape) for t in stored),
        "bytes_before": source.nbytes,
        "bytes_after": sum(t.nbytes for t in stored),
    }


def uncalibrated_warnings(ctx: ConversionContext, hint: str) -> list[str]:
    """Return what a conversion without calibration text loses: the fit of weights, tuning, the calibrated start of
    mixers. hint: what to do.
    """
    warnings = []
    if ctx.data is None and ctx.plan.fitted_targets():
        untuned = " and not tuned" if ctx.recipe.epochs.is_on else ""
        warnings.append(
            f"no calibration text: weights are projected in the Frobenius norm{untuned}, which damages a pretrained "
            "model badly "
            f"(docs/quality.md). {hint}"
        )
    elif ctx.data is None and ctx.recipe.epochs.is_on:
        warnings.append(f"no calibration text: nothing is tuned. {hint}")
    attention, mixers = ctx.recipe.attention, [target.config for target in ctx.plan.attention_targets.values()]
    if ctx.data is None and attention and any(type(select_init(m, attention)) is not MixerInit for m in mixers):
        warnings.append(
            "no calibration text: the mixers are not fitted to the original attention (as with start: copied), so "
            "training takes longer. "
            f"{hint}"
        )
    return warnings


def short_text_warnings(ctx: ConversionContext) -> list[str]:
    """Return a warning if the calibration windows are so short that every token is in the softmax window of a mixer."""
    if ctx.data is None or "input_ids" not in ctx.data.inputs:
        return []
    length, nears = ctx.data.inputs["input_ids"].shape[1], set()
    for target in ctx.plan.attention_targets.values():
        mixer = getattr(target.config, "others", target.config)  # of a head hybrid: the mixer of the other heads
        if window := getattr(mixer, "window", 0):
            nears.add(getattr(mixer, "sinks", 0) + window * (2 if getattr(mixer, "near_tokens", "") == "chunks" else 1))
    if not nears or length > max(nears):
        return []
    return [
        f"the calibration windows have {length} tokens, and the mixers attend exactly to the last {max(nears)} tokens: "
        "nothing shows what the "
        f"mixers lose on tokens farther back. Set length above {max(nears)}"
    ]
