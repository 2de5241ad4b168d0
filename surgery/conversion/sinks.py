"""Where a conversion puts its result, layer by layer.

FolderSink     OUT.partial with a journal, renamed to OUT when it is complete
LiveSink       the modules of a model in memory (surgery/conversion/live_sink.py)

OUT.partial/journal.jsonl     the finished steps
OUT.partial/pieces/           one layer shard for each finished layer, and one for all other tensors
OUT.partial/fitted/           with tune: layers as they were fitted, before the whole model is trained
OUT.partial/curvature/        Gram matrices of the output gradients, one file for each layer
OUT.partial/aligned/          aligned attention of the layers, for hybrids whose layers are chosen by measurements
OUT.partial/generated.safetensors   token ids that the original sampled, with generated_tokens, and batch by batch generated-0.safetensors ..
OUT                           OUT.partial, renamed when it is complete
"""

from __future__ import annotations

import glob
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from surgery.calibration.data import CalibrationSet
from surgery.checkpoint.companions import companion_notes
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import TensorInfo, TensorSource, read_header, write_shard
from surgery.checkpoint.source import open_converted_checkpoint
from surgery.checkpoint.table import SHIM_NAME
from surgery.checkpoint.tensor_names import format_tensor_names
from surgery.checkpoint.writer import (
    WORK_FILES,
    converted_config,
    copy_companions,
    delivered_files,
    known_work_files,
    write_checkpoint,
)
from surgery.conversion.context import DEPTH_NAME, EXPERTS_NAME, ConversionContext
from surgery.conversion.expert_tensors import merge_entries, merged_shapes
from surgery.conversion.generated import GENERATED_NAME, PART_NAME
from surgery.conversion.layer_shards import LayerShards
from surgery.conversion.output import Output
from surgery.conversion.preflight import (
    check_disk_space,
    check_same_inputs,
    journal_fingerprint,
    renew_fingerprint,
)
from surgery.core.digests import hash_file
from surgery.core.distributed import DistContext
from surgery.core.errors import Interrupted, SurgeryError
from surgery.core.files import REPORT_NAME, check_no_unknown_files, partial_path, write_json
from surgery.core.journal import Journal
from surgery.mixers.renamed import renew_mixer
from surgery.modeling.auto_classes import write_shims
from surgery.planning.targets import Plan

JournalEntry = dict[str, Any]


class Sink(Protocol):
    """The result of a conversion. The methods are called in this order; those of layers many times.

    Layers have the names of their shards: the path of a layer, or NON_LAYER for all tensors outside the layers. step:
    `piece` for a layer as it is delivered, `fitted` for one before the whole model is trained.
    """

    def check(self) -> None:
        """Raise SurgeryError if nothing can be put here. Called before the original is read."""

    def check_plan(self, model: MetaModel, plan: Plan) -> None:
        """Raise SurgeryError if what the plan replaces cannot be put here.

        Called before the calibration samples are read.
        """

    def notes(self, model: MetaModel) -> list[str]:
        """Return sentences about what the result will lack, or has beside the replacements."""

    def closing_notes(self, model: MetaModel) -> list[str]:
        """Return sentences about the finished result."""

    def open(self, model: MetaModel, plan: Plan, samples: CalibrationSet | None) -> AbstractContextManager[Journal]:
        """Return a context manager of the journal of the finished steps, in the folder of temporary files.

        At its end, if there was no error, the result is delivered.
        """

    def usable_entries(self, ctx: ConversionContext, entries: list[JournalEntry]) -> list[JournalEntry]:
        """Return the journal's entries of an interrupted conversion without those whose tensors are lost or damaged."""

    def write_layer(self, ctx: ConversionContext, step: str, layer: str, tensors: list[TensorSource]) -> str:
        """Store the tensors of a layer; return their SHA-256, "" if they stay in memory."""

    def read_layer(self, ctx: ConversionContext, step: str, layer: str) -> list[TensorSource]:
        """Return the tensors that `write_layer` stored."""

    def write_model(self, ctx: ConversionContext, entries: list[JournalEntry]) -> Sequence[TensorInfo | TensorSource]:
        """Assemble the layers; return the tensors of the result. entries: of all layers, in the order in which they are
        assembled.
        """

    def write_report(self, ctx: ConversionContext, report: dict[str, Any]) -> None:
        """Store the report, and finish what is delivered."""


class FolderSink:
    """A checkpoint folder that is written resumably.

    out: the folder, which must not exist. resume: whether OUT.partial may exist, whose finished steps are then kept.
    overwrite: whether conversions in OUT and OUT.partial may be replaced. dist: the processes that share the
    conversion; process 0 writes what is no layer.
    """

    def __init__(self, out: Path, resume: bool = False, overwrite: bool = False, dist: DistContext | None = None):
        self.out, self.output = out, Output(out, resume, overwrite)
        self.dist = dist or DistContext()
        self.delivered: set[str] = set()  # names of the result's files, in process 0

    @property
    def work_dir(self) -> Path:
        """OUT.partial."""
        return partial_path(self.out)

    def check(self) -> None:
        """Raise SurgeryError if OUT exists, or is in a place where no checkpoint may lie."""
        before = self.output
        self.output = self.dist.on_main(lambda: Output.checked(self.out, before.resume, before.overwrite))

    def check_plan(self, model: MetaModel, plan: Plan) -> None:
        """Raise SurgeryError if the source would be deleted, or if the disk has not enough room."""
        self.dist.on_main(lambda: self.output.check_source(model.source))
        self.dist.on_main(lambda: check_disk_space(model.source, plan, plan.recipe, self.out))

    def notes(self, model: MetaModel) -> list[str]:
        """Return what is copied without being read."""
        if not model.unused:
            return []
        return [f"{type(model.model).__name__} does not use {format_tensor_names(model.unused)}; copied as stored"]

    def closing_notes(self, model: MetaModel) -> list[str]:
        """Return what was not copied, and whether the tokenizer lacks a chat template."""
        return companion_notes(model.source.folder, self.out, chats="ForCausalLM" in type(model.model).__name__)

    @contextmanager
    def open(self, model: MetaModel, plan: Plan, samples: CalibrationSet | None) -> Iterator[Journal]:
        """Lock OUT.partial, and rename it at the end. See `Sink.open`.

        A SurgeryError removes a folder that was begun here, because the same input will be refused again.
        """
        dist, work_dir, source = self.dist, self.work_dir, model.source
        fingerprint = journal_fingerprint(source, plan.recipe, samples, plan.time) | self.output.start
        dist.on_main(lambda: check_no_unknown_files(work_dir, known_work_files(source)))
        check_same_inputs(dist, fingerprint)
        dist.on_main(lambda: self.output.remove_interrupted(source))
        renew = partial(renew_fingerprint, work_dir)
        with Journal(work_dir, fingerprint, self.output.resume, dist, renew=renew) as journal:
            self.journal = journal
            try:
                dist.on_main(self.output.check_free)
                yield journal
            except Interrupted:
                raise
            except SurgeryError:
                if journal.created and dist.main:
                    shutil.rmtree(work_dir, ignore_errors=True)
                raise
            dist.on_main(lambda: self.output.deliver(journal, self.delivered))

    def shards(self, ctx: ConversionContext, step: str = "piece") -> LayerShards:
        """Return the layer shards of a step, see `Sink`."""
        folder = ctx.fitted_dir if step == "fitted" else ctx.shards_dir
        return LayerShards(ctx.model, ctx.plan, ctx.shard_of, folder)

    def usable_entries(self, ctx: ConversionContext, entries: list[JournalEntry]) -> list[JournalEntry]:
        """Check the files of all layers. See `Sink.usable_entries`."""
        fitted = self.shards(ctx, "fitted")
        if any(entry["step"] == "piece" for entry in entries):
            entries = self.shards(ctx).select_usable_entries(entries, ctx.work_dir)
        return [entry for entry in entries if entry["step"] != "fitted" or fitted.is_intact(entry)]

    def write_layer(self, ctx: ConversionContext, step: str, layer: str, tensors: list[TensorSource]) -> str:
        """Write a layer shard. See `Sink.write_layer`."""
        file = self.shards(ctx, step).path(layer)
        file.parent.mkdir(exist_ok=True)
        return write_shard(file, tensors)

    def read_layer(self, ctx: ConversionContext, step: str, layer: str) -> list[TensorSource]:
        """Return the tensors of a layer shard, which stay in its file."""
        header = read_header(self.shards(ctx, step).path(layer))
        return [TensorSource.from_file(name, info) for name, info in header.items()]

    def write_model(self, ctx: ConversionContext, entries: list[JournalEntry]) -> Sequence[TensorInfo | TensorSource]:
        """Merge the layer shards, and write config.json and the companion files."""
        source, work_dir, shards = ctx.model.source, ctx.work_dir, self.shards(ctx)
        ctx.progress.say("writing the checkpoint")
        table, mixers = merged_tables(entries)
        config = converted_config(source, ctx.model, table, mixers)
        shapes = {name: shape for entry in entries for name, shape in shards.expected_shapes(entry).items()}
        merge = None
        if "quantization_config" not in config:  # an ordinary checkpoint, whose experts are as transformers reads them
            merged = merged_shapes(ctx.model.model, shapes)
            merge, shapes = partial(merge_entries, ctx.model.model) if merged != shapes else None, merged
        files = [shards.path(entry["piece"]) for entry in entries]
        weight_map = write_checkpoint(work_dir, files, self.journal, set(shapes), merge)
        copy_companions(source, work_dir)
        if "quantization_config" in config:
            write_shims(work_dir, config, ctx.model.model)
        write_json(work_dir / "config.json", config)
        shim = {SHIM_NAME} if config.get("auto_map") != source.config.get("auto_map") else set()
        self.delivered = {*delivered_files(source, weight_map), REPORT_NAME, *shim}
        return [info for name in sorted(set(weight_map.values())) for info in read_header(work_dir / name).values()]

    def write_report(self, ctx: ConversionContext, report: dict[str, Any]) -> None:
        """Write surgery_report.json, remove temporary files, and open the result once. See `Sink.write_report`."""
        work_dir = ctx.work_dir
        report["files"] = self._digests(work_dir)
        write_json(work_dir / REPORT_NAME, report)
        for folder in (ctx.shards_dir, ctx.fitted_dir, ctx.grams_dir, ctx.aligned_dir):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (
            work_dir / GENERATED_NAME,
            work_dir / DEPTH_NAME,
            work_dir / EXPERTS_NAME,
            *work_dir.glob(PART_NAME.format("*")),
        ):
            file.unlink(missing_ok=True)
        check_no_unknown_files(work_dir, {*WORK_FILES, *map(glob.escape, self.delivered)}, Interrupted)
        open_converted_checkpoint(str(work_dir))

    def _digests(self, work_dir: Path) -> dict[str, str]:
        """Return the SHA-256 of the result's files by name; those of the shards are in the journal."""
        digests = {}
        for name in sorted(self.delivered - {REPORT_NAME}):
            entry = self.journal.find("shard", name=name)
            digests[name] = hash_file(work_dir / name) if entry is None else entry["sha256"]
        return digests


def merged_tables(entries: list[JournalEntry]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (table, mixers) of a converted model's quantization_config, by path. entries: the journal's, of all
    layers.
    """
    table = {path: spec for entry in entries for path, spec in entry["table"].items()}
    mixers = {path: renew_mixer(spec) for entry in entries for path, spec in entry.get("mixers", {}).items()}
    return table, mixers
