"""Convert a checkpoint: plan and safetensors shards in, structured shards out, layer by layer and resumable.

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
import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.companions import companion_notes
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.report import (
    AllocationReport,
    CalibrationReport,
    HeldOutReport,
    HybridReport,
    MemoryReport,
    MixerReport,
    ModuleReport,
    RefinementReport,
    Report,
    SourceReport,
    SpeedReport,
    TimeReport,
    TotalsReport,
    TuneReport,
    report_errors,
)
from surgery.checkpoint.rounded import round_checkpoint
from surgery.checkpoint.safetensors_io import DTYPES, TensorInfo, TensorSource, read_header, write_shard
from surgery.checkpoint.source import CheckpointSource, open_checkpoint, open_converted_checkpoint
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
from surgery.conversion.choices import allocation_lines
from surgery.conversion.choose_by_time import choose_by_time, speed_report
from surgery.conversion.context import ConversionContext
from surgery.conversion.data_free import convert_layers_data_free
from surgery.conversion.generated import (
    GENERATED_NAME,
    PART_NAME,
    generated_rows,
    loaded_original,
    with_generated_rows,
)
from surgery.conversion.layer_shards import NON_LAYER, LayerShards, select_valid_entries
from surgery.conversion.mixer_init.base import MixerInit, select_init
from surgery.conversion.norms import layer_norms_and_biases, outer_norms
from surgery.conversion.output import Output
from surgery.conversion.preflight import (
    GIVE_CALIBRATION,
    check_disk_space,
    check_same_inputs,
    journal_fingerprint,
    load_calibration,
    renew_fingerprint,
)
from surgery.conversion.reached import keep_reached
from surgery.conversion.refine import TrainedLayer, trained_parameters
from surgery.conversion.refine_model import ModelRefinement, resident_bytes
from surgery.conversion.replacement import LayerReplacement, load_replacement, stored_module_name
from surgery.conversion.resolve_attention import resolve_attention_plan
from surgery.conversion.score import HeldOutScore
from surgery.conversion.sequential import SequentialConverter, convert_head
from surgery.conversion.text_check import TextScore, score_text
from surgery.conversion.trial import choose_budgets
from surgery.core.device import (
    choose_device,
    device_name,
    fast_float32_matmul,
    peak_rss,
    return_freed_memory,
    trim_memory,
)
from surgery.core.digests import hash_file
from surgery.core.distributed import DistContext, init_distributed, local_device
from surgery.core.errors import Interrupted, SurgeryError
from surgery.core.files import REPORT_NAME, check_no_unknown_files, explain_disk_errors, partial_path, write_json
from surgery.core.journal import Journal
from surgery.core.progress import Progress, Tick
from surgery.core.version import __version__
from surgery.mixers.renamed import renew_mixer
from surgery.modeling.auto_classes import write_shims
from surgery.planning.plan import make_plan
from surgery.planning.recipe import ConversionRecipe, TuneRecipe
from surgery.planning.speed import with_structures
from surgery.planning.targets import Plan


def convert(
    source: str,
    recipe: ConversionRecipe,
    out: str | Path,
    *,
    device: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> dict[str, Any]:
    """Convert a checkpoint and return the report, as written to OUT/surgery_report.json.

    source: a local folder or a Hub repository; revision: its commit, branch or tag. device: where layers run, such as
    "cuda"; None chooses one. resume: continue an interrupted conversion from OUT.partial. overwrite: replace conversions in OUT and
    OUT.partial (surgery.conversion.output). dtype: of the result, into which weights are rounded as they are read; None: as stored.
    on_plan: called with the plan before anything is computed. If several processes take part (surgery.core.distributed), all of them
    call this function, and all get the report.

    Raises SurgeryError. A refused conversion leaves no files; an interrupted one leaves OUT.partial for `resume`.
    """
    began = time.perf_counter()
    dist = init_distributed(device)
    with dist.fail_together():
        device, progress = local_device(dist, device), (progress if dist.main else None) or Progress()
        again = "run the same command with --resume" + (" in place of --overwrite" if overwrite else "")
        with explain_disk_errors(Path(out), again):
            return_freed_memory()
            output = dist.on_main(lambda: Output.checked(Path(out), resume, overwrite))
            opened = open_checkpoint(source, trust_remote_code, revision=revision, progress=progress)
            opened = round_checkpoint(opened, dtype)
            dist.on_main(lambda: output.check_source(opened))
            model = MetaModel(opened, trust_remote_code)
            return _convert(model, recipe, output, choose_device(device), progress, dist, on_plan=on_plan, began=began)


def _convert(
    model: MetaModel,
    recipe: ConversionRecipe,
    output: Output,
    device: torch.device,
    progress: Progress,
    dist: DistContext,
    *,
    on_plan: Callable[[Plan], None] | None,
    began: float,
) -> dict[str, Any]:
    """Run the preflight checks, build the context, and convert while the journal holds its lock."""
    plan, opened, out = make_plan(model, recipe), model.source, output.path
    noted = plan.notes
    for note in noted:
        progress.say(f"note: {note}")
    if model.unused:
        progress.say(
            f"note: {type(model.model).__name__} does not use {format_tensor_names(model.unused)}; copied as stored"
        )
    if recipe.calibration is not None:
        progress.say(f"reading the calibration inputs: {recipe.calibration}")
    text_notes: list[str] = []
    data = load_calibration(opened, model, recipe, text_notes)
    dist.on_main(lambda: check_disk_space(opened, plan, recipe, out))
    work_dir = partial_path(out)
    if on_plan is not None and dist.main:
        on_plan(plan)
    fingerprint = journal_fingerprint(opened, recipe, data, plan.time) | output.start
    renew = partial(renew_fingerprint, work_dir)
    dist.on_main(lambda: check_no_unknown_files(work_dir, known_work_files(opened)))
    check_same_inputs(dist, fingerprint)
    dist.on_main(lambda: output.remove_interrupted(opened))
    with Journal(work_dir, fingerprint, output.resume, dist, renew=renew) as journal, fast_float32_matmul(device):
        try:
            dist.on_main(output.check_free)
            layout, packed = plan.layout, data.packed if data else frozenset()
            runner = LayerRunner(model, layout.layers, layout.head, device, scratch=work_dir, ranks=dist)
            runner.packed = packed
            if data is not None:
                plan, runner = keep_reached(plan, runner, data)
                for note in plan.notes[len(noted) :]:
                    progress.say(f"warning: {note}")
            ctx = ConversionContext(model, plan, plan.recipe, data, runner, work_dir, dist, device, progress)
            conversion = Conversion(ctx, journal, text_notes)
            report = conversion.run(began)
        except Interrupted:
            raise
        except SurgeryError:
            if journal.created and dist.main:  # the same input will be refused again: there is nothing to resume
                shutil.rmtree(work_dir, ignore_errors=True)
            raise
        dist.on_main(lambda: output.deliver(journal, conversion.delivered))
    for note in companion_notes(opened.folder, out, chats="ForCausalLM" in type(model.model).__name__):
        progress.say_last(f"note: {note}")
    return report


class Conversion:
    """The steps of one conversion and their bookkeeping: journal, layer shards, seconds of each step, report.

    text_notes: warnings about the calibration text, for the report.
    """

    calibration_hint: ClassVar[str] = GIVE_CALIBRATION

    def __init__(self, ctx: ConversionContext, journal: Journal, text_notes: list[str]):
        self.ctx, self.journal, self.text_notes = ctx, journal, text_notes
        self.delivered: set[str] = set()  # files of the result, of the process that writes it
        self.text_score: TextScore | None = None
        ctx.shards_dir.mkdir(exist_ok=True)
        self.seconds: dict[str, float] = {}
        self.tune = TuneRecipe() if ctx.data is None else ctx.recipe.epochs
        self.shard_of = {name: self._shard_name(name) for name in ctx.model.keys}

    def run(self, began: float) -> dict[str, Any]:
        """Convert what the journal does not hold yet, write the checkpoint, and return the report.

        began: `time.perf_counter()` at the start of the conversion.
        """
        self.seconds["start"] = round(time.perf_counter() - began, 3)  # imports, the plan and reading the text
        torch.manual_seed(self.ctx.recipe.seed)
        self.journal.keep(select_valid_entries(self.journal.entries, self.ctx.plan))
        with self._timer("text check"):
            self._check_text()
        self._generate_text()
        for warning in short_text_warnings(self.ctx):
            self.ctx.progress.say(f"warning: {warning}")
        hybrid = self._resolve_attention()
        self._drop_damaged_shards()
        if self.journal.find("piece", piece=NON_LAYER) is None:
            budgets, allocation = self._resolve_budgets()
            self._convert(budgets, allocation)
        return self.ctx.dist.on_main(lambda: self._write_output(hybrid, began))

    def _check_text(self) -> None:
        """Warn if the calibration text does not suit the model; ready input tensors are not checked."""
        text = self.ctx.recipe.calibration
        if self.ctx.data is None or text is None or text.endswith(".safetensors"):
            return
        self.ctx.progress.say("checking that the calibration text suits the model")
        self.text_score = self.ctx.dist.on_main(lambda: score_text(self.ctx))
        for warning in self._text_warnings():
            self.ctx.progress.say(f"warning: {warning}")

    def _generate_text(self) -> None:
        """Add the rows that the original samples to those that are fitted to."""
        if self.ctx.data is None or not self.ctx.recipe.generated_tokens:
            return
        with self._timer("generate"):
            rows_NT = generated_rows(self.ctx, self.journal, self._original)
        self.ctx = replace(self.ctx, data=with_generated_rows(self.ctx.data, rows_NT))

    def _original(self) -> AbstractContextManager[Any]:
        """Return a context manager of the original model, in evaluation mode on the device of the conversion."""
        return loaded_original(self.ctx.model, self.ctx.device)

    def _text_warnings(self) -> list[str]:
        return [*self.text_notes, *(self.text_score.warnings if self.text_score else [])]

    def _write_output(self, hybrid: dict[str, Any] | None, began: float) -> dict[str, Any]:
        """Assemble the layer shards into a checkpoint and write its config and report."""
        ctx, work_dir = self.ctx, self.ctx.work_dir
        found = [self.journal.find("piece", piece=name) for name in (*ctx.plan.layout.layers, NON_LAYER)]
        entries = [entry for entry in found if entry is not None]
        assert len(entries) == len(found)
        expected = {name for entry in entries for name in self._shards().expected_shapes(entry)}
        ctx.progress.say("writing the checkpoint")
        with self._timer("write"):
            shards = [self._shards().path(entry["piece"]) for entry in entries]
            weight_map = write_checkpoint(work_dir, shards, self.journal, expected)
            table = {path: spec for entry in entries for path, spec in entry["table"].items()}
            mixers = {path: renew_mixer(spec) for entry in entries for path, spec in entry.get("mixers", {}).items()}
            config = converted_config(ctx.model.source, ctx.model, table, mixers)
            copy_companions(ctx.model.source, work_dir)
            write_shims(work_dir, config, ctx.model.model)
            write_json(work_dir / "config.json", config)
        source = ctx.model.source
        shim = {SHIM_NAME} if config.get("auto_map") != source.config.get("auto_map") else set()
        files = {*delivered_files(source, weight_map), *shim}
        self.delivered = {*files, REPORT_NAME}
        with report_errors(str(work_dir / REPORT_NAME)):
            stored = [t for name in sorted(set(weight_map.values())) for t in read_header(work_dir / name).values()]
            report = self._report(entries, hybrid, stored, began)
            written = report.model_copy(update={"files": self._digests(files)}).to_dict()
        write_json(work_dir / REPORT_NAME, written)
        for folder in (ctx.shards_dir, ctx.fitted_dir, ctx.grams_dir, ctx.aligned_dir):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (work_dir / GENERATED_NAME, *work_dir.glob(PART_NAME.format("*"))):
            file.unlink(missing_ok=True)
        check_no_unknown_files(work_dir, {*WORK_FILES, *map(glob.escape, self.delivered)}, Interrupted)
        open_converted_checkpoint(str(work_dir))
        return written

    def _digests(self, files: set[str]) -> dict[str, str]:
        """Return the SHA-256 of files of the result by name; those of the shards are in the journal."""
        shards = {name: self.journal.find("shard", name=name) for name in files}
        return {
            name: hash_file(self.ctx.work_dir / name) if (entry := shards[name]) is None else entry["sha256"]
            for name in sorted(files)
        }

    def _resolve_attention(self) -> dict[str, Any] | None:
        """Put the final attention targets into the plan; returns the report's "hybrid" entry."""
        if not self.ctx.plan.attention_targets or self.ctx.data is None:
            return None
        with self._timer("attention"):
            plan, hybrid = resolve_attention_plan(self.ctx, self.journal)
        self.ctx = replace(self.ctx, plan=plan)
        return hybrid

    def _resolve_budgets(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Return (parameters for each target by name, the report's "allocation" entry)."""
        done, plan = self.journal.find("budgets"), self.ctx.plan
        if done is None:
            with self._timer("budgets"):
                chosen = choose_by_time(self.ctx) if plan.time else _budgets_entry(*choose_budgets(self.ctx))
            done = self.ctx.dist.broadcast_object(chosen)
            self.journal.add("budgets", **done)
        for line in allocation_lines(done["allocation"]):
            self.ctx.progress.say(line)
        if plan.time is not None:
            self.ctx = replace(self.ctx, plan=with_structures(plan, done["structures"]))
        return done["budgets"], done["allocation"]

    def _convert(self, budgets: dict[str, float], allocation: dict[str, Any]) -> None:
        """Convert all layers and the head, and store all other tensors."""
        layers = self.ctx.plan.layout.layers
        with self._timer("layers"), self.ctx.progress.bar("converting layers", len(layers)) as tick:
            if self.ctx.data is None:
                score, head = None, self._convert_data_free(budgets, tick)
            else:
                result, head = self._convert_calibrated(budgets, tick)
                score = result.to_dict()
        self.journal.merge()
        with self._timer("rest"):
            if self.ctx.dist.main:
                self._write_shard(NON_LAYER, head, held_out=score, allocation=allocation)

    def _convert_calibrated(self, budgets: dict[str, float], tick: Tick) -> tuple[HeldOutScore, LayerReplacement]:
        """Convert every layer and the head; finished layers are read from their shards."""

        def write(path: str, replacement: LayerReplacement, seconds: float) -> None:
            if self._is_writer(path):
                step = "fitted" if self.tune.model else "piece"
                self._write_shard(path, replacement, step, seconds=round(seconds, 3))
            tick()

        def finished(path: str) -> LayerReplacement | None:
            replacement = self._load_finished(path)
            if replacement is not None:
                tick()
            return replacement

        epochs = self.tune
        converter = SequentialConverter(
            self.ctx,
            budgets,
            finished=finished,
            write=write,
            refine_epochs=epochs.layers,
            refine_norms=epochs.norms,
        )
        score, head = converter.run()
        if epochs.model:
            original_BTD = converter.original_BTD
            assert original_BTD is not None
            self.journal.merge()
            with self._timer("tune"), self.ctx.progress.bar("tuning the whole model", epochs.model) as done:
                score = self.ctx.dist.on_main(lambda: self._tune_model(original_BTD, head, score, done))
        return score, head

    # -- tuning ------------------------------------------------------------------------------------
    def _kept(self, path: str) -> dict[str, str]:
        """Return the norms and biases of a layer that are tuned too, parameter -> name in the files."""
        return layer_norms_and_biases(self.ctx.model, path) if self.tune.norms else {}

    def _tune_model(
        self, original_BTD: Tensor, head: LayerReplacement, score: HeldOutScore, done: Tick
    ) -> HeldOutScore:
        """Train the whole model, write the layers' shards, and return the held-out score. Process 0 does this alone."""
        ctx = self.ctx
        streamed = resident_bytes(ctx.plan) > ctx.runner.limit
        allocate = (lambda x: ctx.runner.file_tensor(x.shape)) if streamed else torch.empty_like
        trained = []
        fitted = {path: self._fitted_layer(path) for path in ctx.plan.layout.layers}
        for path, (replacement, entries) in [*fitted.items(), ("", (head, head.entries))]:
            replacement.find_structured()
            stored = {entry.name: DTYPES[entry.dtype] for entry in entries if entry.dtype in DTYPES}
            kept = self._kept(path) if path and trained_parameters(ctx.model, replacement) else {}
            layer = TrainedLayer(ctx.model, path, replacement, stored, allocate, kept)
            if layer.tensors:
                trained.append(layer)
            if streamed:
                layer.release()
        refined: dict[str, dict[str, Tensor]] = {}
        if trained:
            norms = outer_norms(ctx.model, ctx.plan.layout) if self.tune.norms else {}
            refinement = ModelRefinement(ctx, trained, original_BTD, streamed, norms)
            head.refined = refinement.run(self.tune.model, ctx.recipe.seed, done).to_dict()
            score = refinement.score()
            head.set_tensors(refinement.norms.finish(ctx.device), refinement.norms.dtypes)
        for layer in trained:
            tensors = layer.finish(torch.device("cpu") if layer.path else ctx.device)
            if layer.path:
                refined[layer.path] = tensors
            else:
                head.set_tensors(tensors, layer.dtypes)
            if streamed:
                layer.release()
        for path, (replacement, entries) in fitted.items():
            if self.journal.find("piece", piece=path) is None:
                self._write_tuned(path, replacement, entries, refined.get(path, {}))
        return score

    def _fitted_layer(self, path: str) -> tuple[LayerReplacement, list[TensorSource]]:
        """Return a layer as it was fitted, and all tensors of its shard."""
        entry = self.journal.find("fitted", piece=path)
        assert entry is not None
        entries = self._fitted_entries(path)
        tensors = {t.name: t.source or TensorInfo.in_memory(t.name, t.tensor, path) for t in entries}  # type: ignore[arg-type]
        return load_replacement(
            self.ctx.model, self.ctx.plan, entry, tensors, self.ctx.device, self._kept(path)
        ), entries

    def _fitted_entries(self, path: str) -> list[TensorSource]:
        header = read_header(self._shards("fitted").path(path))
        return [TensorSource.from_file(name, info) for name, info in header.items()]

    def _write_tuned(
        self, path: str, replacement: LayerReplacement, entries: list[TensorSource], tensors: dict[str, Tensor]
    ) -> None:
        """Write the shard of a layer with trained tensors, by name."""
        entry = self.journal.find("fitted", piece=path)
        assert entry is not None
        replacement.entries = entries
        replacement.set_tensors(tensors, {e.name: DTYPES[e.dtype] for e in entries if e.dtype in DTYPES})
        self._store_entries(path, replacement.entries, replacement, seconds=entry["seconds"])

    def _convert_data_free(self, budgets: dict[str, float], tick: Tick) -> LayerReplacement:
        """Convert this process's share of the layers that the journal lacks; return the head's replacement."""
        dist, layers = self.ctx.dist, self.ctx.plan.layout.layers
        for warning in uncalibrated_warnings(self.ctx, self.calibration_hint):
            label = "warning:" if self.ctx.plan.replaced_targets() else "note:"
            self.ctx.progress.say(f"{label} {warning}")
        todo = [path for path in layers if self.journal.find("piece", piece=path) is None]
        tick(len(layers) - len(todo))
        own = todo[dist.index :: dist.count]
        for path, replacement, seconds in convert_layers_data_free(self.ctx, budgets, own):
            self._write_shard(path, replacement, seconds=round(seconds, 3))
            tick(min(dist.count, len(todo)))
        return convert_head(self.ctx, budgets)

    # -- layer shards --------------------------------------------------------------------------------
    def _shards(self, step: str = "piece") -> LayerShards:
        folder = self.ctx.fitted_dir if step == "fitted" else self.ctx.shards_dir
        return LayerShards(self.ctx.model, self.ctx.plan, self.shard_of, folder)

    def _drop_damaged_shards(self) -> None:
        """Remove the journal entries of an interrupted run that cannot be reused. Process 0 checks the shards for all."""
        entries, steps = self.journal.entries, ("piece", "fitted")
        before = sum(entry["step"] in steps for entry in entries)
        if not before:
            return
        usable = self.ctx.dist.on_main(self._usable_entries)
        if lost := before - sum(entry["step"] in steps for entry in usable):
            self.ctx.progress.say(
                f"note: the files of {lost} finished layers are damaged or were made by another plan; these layers are converted again"
            )
        self.journal.keep(usable)

    def _usable_entries(self) -> list[dict[str, Any]]:
        usable, fitted = self.journal.entries, self._shards("fitted")
        if any(entry["step"] == "piece" for entry in usable):
            usable = self._shards().select_usable_entries(usable, self.ctx.work_dir)
        return [entry for entry in usable if entry["step"] != "fitted" or fitted.is_intact(entry)]

    def _is_writer(self, path: str) -> bool:
        """Return whether this process writes the layer, which all processes hold."""
        return self.ctx.plan.layout.layers.index(path) % self.ctx.dist.count == self.ctx.dist.index

    def _shard_name(self, parameter: str) -> str:
        return next((path for path in self.ctx.plan.layout.layers if parameter.startswith(path + ".")), NON_LAYER)

    def _load_finished(self, path: str) -> LayerReplacement | None:
        step = "fitted" if self.tune.model else "piece"
        done = self.journal.find(step, piece=path)
        if done is None:
            return None
        tensors = read_header(self._shards(step).path(path))
        return load_replacement(self.ctx.model, self.ctx.plan, done, tensors, self.ctx.device, self._kept(path))

    def _shard_tensors(self, shard: str, replacement: LayerReplacement) -> list[TensorSource]:
        """Return the replaced and unchanged tensors of a layer shard. shard: the layer's path, or NON_LAYER."""
        model = self.ctx.model
        replaced = {f"{stored_module_name(model, path)}.weight" for path in replacement.modules}
        split = {
            f"{stored_module_name(model, path)}.bias"
            for path, spec in replacement.table.items()
            if spec["structure"] == "split"
        }
        entries = list(replacement.entries)
        written = replaced | split | {entry.name for entry in entries}
        for name, key in model.keys.items():
            if self.shard_of[name] == shard and key not in written:
                entries.append(TensorSource.from_file(key, model.source.tensors[key]))
        return entries

    def _write_shard(self, shard: str, replacement: LayerReplacement, step: str = "piece", **fields: Any) -> None:
        """Write a layer shard and enter it into the journal with `fields`. step: `piece`, or `fitted` before the whole model is trained."""
        self._store_entries(shard, self._shard_tensors(shard, replacement), replacement, step, **fields)

    def _store_entries(
        self,
        shard: str,
        entries: list[TensorSource],
        replacement: LayerReplacement,
        step: str = "piece",
        **fields: Any,
    ) -> None:
        """Write the tensors of a layer shard, and its journal entry."""
        trim_memory()
        file = self._shards(step).path(shard)
        file.parent.mkdir(exist_ok=True)
        self._add_to_journal(shard, write_shard(file, entries), replacement, step, **fields)

    def _add_to_journal(
        self, shard: str, sha256: str, replacement: LayerReplacement, step: str = "piece", **fields: Any
    ) -> None:
        done = {
            "piece": shard,
            "sha256": sha256,
            "table": replacement.table,
            "records": replacement.records,
            **({"mixers": replacement.mixer_table} if replacement.mixers else {}),
            **({"mixer_records": replacement.mixer_records} if replacement.mixers else {}),
            **({"refined": replacement.refined} if replacement.refined else {}),
            **fields,
        }
        self.journal.add(step, **json.loads(json.dumps(done)))  # the JSON types that a resumed run reads

    # -- the report --------------------------------------------------------------------------------
    @contextmanager
    def _timer(self, step: str) -> Iterator[None]:
        """Add the seconds spent inside to `seconds[step]`, without those of other steps that are timed inside."""
        began, others = time.perf_counter(), self._seconds_beside(step)
        yield
        spent = time.perf_counter() - began - (self._seconds_beside(step) - others)
        self.seconds[step] = round(self.seconds.get(step, 0.0) + spent, 3)

    def _seconds_beside(self, step: str) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if name != step)

    def _report(
        self,
        entries: list[dict[str, Any]],
        hybrid: dict[str, Any] | None,
        stored: Sequence[TensorInfo | TensorSource],
        began: float,
    ) -> Report:
        """Return the report. entries: the journal's entries of all layer shards, NON_LAYER last. stored: the result's tensors."""
        import transformers

        ctx, source, non_layer = self.ctx, self.ctx.model.source, entries[-1]
        records = [record for entry in entries for record in entry["records"]]
        unsplit = [targets[0] for targets in ctx.plan.targets.values() if targets[0].part is None]
        unreached: dict[str, Any] = {"unreached": list(ctx.plan.unreached)} if ctx.plan.unreached else {}
        timed = speed_report(ctx.plan, records)
        speed: dict[str, Any] = {} if timed is None else {"speed": SpeedReport.model_validate(timed)}
        refits = {target.name for target in unsplit if not target.configs}  # dense before and after
        replaced = [record for record in records if record["name"] not in refits]
        return Report(
            surgery=__version__,
            versions={
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            source=SourceReport(name=source.name, revision=source.revision, fingerprint=source.fingerprint()),
            model_type=ctx.plan.model_type,
            recipe=json.loads(ctx.recipe.model_dump_json()),
            seed=ctx.recipe.seed,
            notes=[*ctx.plan.notes, *uncalibrated_warnings(ctx, self.calibration_hint), *short_text_warnings(ctx)],
            **unreached,
            **speed,
            companions=[path.as_posix() for path in source.companions()],
            calibration=self._calibration_report(),
            allocation=AllocationReport.model_validate(non_layer["allocation"]),
            held_out=None if non_layer["held_out"] is None else HeldOutReport.model_validate(non_layer["held_out"]),
            totals=TotalsReport.model_validate(totals(replaced, source, stored)),
            modules=[ModuleReport.model_validate(record) for record in records],
            mixers=[MixerReport.model_validate(r) for entry in entries for r in entry.get("mixer_records", [])],
            time=TimeReport(
                seconds={**self.seconds, "total": round(time.perf_counter() - began, 3)},
                layers={entry["piece"]: entry["seconds"] for entry in entries if "seconds" in entry},
                device=device_name(ctx.device),
                threads=torch.get_num_threads(),
                processes=ctx.dist.count,
            ),
            memory=MemoryReport(
                peak_rss=peak_rss(),
                calibration={"moments": ctx.runner.moment_bytes, "hidden_states": ctx.runner.hidden_bytes},
                largest_layer=self._largest_layer(),
            ),
            hybrid=None if hybrid is None else HybridReport.model_validate(hybrid),
            tune=self._tune_report(entries),
        )

    def _tune_report(self, entries: list[dict[str, Any]]) -> TuneReport | None:
        if self.ctx.data is None:
            return None
        records = {
            entry["piece"]: RefinementReport.model_validate(entry["refined"])
            for entry in entries
            if entry.get("refined")
        }
        whole = records.pop(NON_LAYER, None)
        norms: dict[str, Any] = {"norms": True} if self.tune.norms else {}
        return TuneReport(layers=self.tune.layers, model=self.tune.model, **norms, by_layer=records, whole=whole)

    def _calibration_report(self) -> CalibrationReport | None:
        data = self.ctx.data
        if data is None:
            return None
        row, generated = data.tokens() // data.rows, {}
        if self.ctx.recipe.generated_tokens:
            generated["generated_tokens"] = self.ctx.recipe.generated_tokens // row * row
        return CalibrationReport(
            tokens=data.tokens(),
            held_out_windows=data.rows - data.n_fit,
            windows=data.rows,
            **generated,
            loss=self.text_score.loss if self.text_score else None,
            own_samples_loss=self.text_score.own_samples if self.text_score else None,
            warnings=self._text_warnings(),
        )

    def _largest_layer(self) -> int:
        """Return the bytes of the largest layer in float32."""
        sizes: dict[str, int] = {}
        for name, key in self.ctx.model.keys.items():
            if (shard := self.shard_of[name]) != NON_LAYER:
                sizes[shard] = sizes.get(shard, 0) + 4 * self.ctx.model.source.tensors[key].numel
        return max(sizes.values(), default=0)


def _budgets_entry(budgets: dict[str, float], allocation: dict[str, Any]) -> dict[str, Any]:
    return {"budgets": budgets, "allocation": allocation}


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
    """Return what a conversion without calibration text loses: the fit of weights, tuning, the calibrated start of mixers. hint: what to do."""
    warnings = []
    if ctx.data is None and ctx.plan.replaced_targets():
        untuned = " and not tuned" if ctx.recipe.epochs.is_on else ""
        warnings.append(
            f"no calibration text: weights are projected in the Frobenius norm{untuned}, which damages a pretrained model badly "
            f"(docs/quality.md). {hint}"
        )
    elif ctx.data is None and ctx.recipe.epochs.is_on:
        warnings.append(f"no calibration text: nothing is tuned. {hint}")
    attention, mixers = ctx.recipe.attention, [target.config for target in ctx.plan.attention_targets.values()]
    if ctx.data is None and attention and any(type(select_init(m, attention)) is not MixerInit for m in mixers):
        warnings.append(
            "no calibration text: the mixers are not fitted to the original attention (as with start: copied), so training takes longer. "
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
        f"the calibration windows have {length} tokens, and the mixers attend exactly to the last {max(nears)} tokens: nothing shows what the "
        f"mixers lose on tokens farther back. Set length above {max(nears)}"
    ]
