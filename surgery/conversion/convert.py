"""Convert a model: a source gives modules and tensors, a sink takes replacements, layer by layer.

Conversion(FolderSource("SRC"), FolderSink(Path("OUT")), recipe).run()      `surgery.convert`
Conversion(LiveSource(model), LiveSink(model), recipe).run()                `surgery.apply` (surgery/conversion/apply.py)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.outline import ModelDescription
from surgery.checkpoint.report import report_errors
from surgery.checkpoint.safetensors_io import DTYPES, TensorInfo, TensorSource
from surgery.conversion.choices import allocation_lines
from surgery.conversion.context import NON_LAYER, ConversionContext
from surgery.conversion.generated import generated_rows, with_generated_rows
from surgery.conversion.layer_shards import select_valid_entries
from surgery.conversion.norms import layer_norms_and_biases, outer_norms
from surgery.conversion.replacement import LayerReplacement, load_replacement, stored_module_name
from surgery.conversion.report import ReportInputs, conversion_report, short_text_warnings, uncalibrated_warnings
from surgery.conversion.score import HeldOutScore, check_held_out
from surgery.conversion.sequential import SequentialConverter, convert_head
from surgery.conversion.sinks import FolderSink, JournalEntry, Sink
from surgery.conversion.sources import CalibrationInputs, FolderSource, Source
from surgery.conversion.text_check import TextScore, score_text
from surgery.conversion.trial import choose_budgets
from surgery.conversion.tune import TrainedLayer, trained_parameters
from surgery.conversion.tune_model import ModelTuning, resident_bytes
from surgery.core.device import choose_device, fast_float32_matmul, return_freed_memory, trim_memory
from surgery.core.dispatch import without_timed_choices
from surgery.core.distributed import DistContext, init_distributed, local_device
from surgery.core.files import REPORT_NAME, explain_disk_errors
from surgery.core.journal import Journal
from surgery.core.progress import Progress, Tick
from surgery.planning.plan import make_plan, plan_with_experts, with_depth
from surgery.planning.recipe import ConversionRecipe, TuneRecipe
from surgery.planning.speed import with_structures
from surgery.planning.targets import Plan

if TYPE_CHECKING:
    from surgery.planning.depth import DepthPlan
    from surgery.planning.fewer_experts import ExpertsPlan


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

    source: a local folder, a GGUF file or a Hub repository; revision: its commit, branch or tag. device: where layers
    run, such as "cuda"; None chooses one. resume: continue an interrupted conversion from OUT.partial. overwrite:
    replace conversions in OUT and OUT.partial (surgery.conversion.output). dtype: of the result, into which weights are
    rounded as they are read; None: as stored. on_plan: called with the plan before anything is computed. If several
    processes take part (surgery.core.distributed), all of them call this function, and all get the report.

    Raises SurgeryError. A refused conversion leaves no files; an interrupted one leaves OUT.partial for `resume`.
    """
    began, out = time.perf_counter(), Path(out)
    dist = init_distributed(device)
    again = "run the same command with --resume" + (" in place of --overwrite" if overwrite else "")
    if recipe.stock is not None:
        # Imported by conversions into a stock class.
        from surgery.conversion.stock import convert_to_stock

        checkpoint = FolderSource(source, trust_remote_code, revision, dtype)
        return convert_to_stock(
            checkpoint, recipe, out, device=device, resumes=resume or overwrite, progress=progress, dist=dist
        )
    with dist.fail_together(), explain_disk_errors(out, again):
        conversion = Conversion(
            FolderSource(source, trust_remote_code, revision, dtype),
            FolderSink(out, resume, overwrite, dist),
            recipe,
            device=local_device(dist, device),
            progress=progress if dist.main else None,
            dist=dist,
            on_plan=on_plan,
        )
        return conversion.run(began)


class Conversion:
    """The steps of one conversion and their bookkeeping: journal, seconds of each step, report.

    source: where the original is read. sink: where the replacements go. device: where layers run; None chooses one.
    progress: messages and bars; None: nothing is shown. dist: the processes that share the conversion. on_plan: called
    with the plan by process 0, before anything is computed.
    """

    ctx: ConversionContext  # set by `run`
    journal: Journal

    def __init__(
        self,
        source: Source,
        sink: Sink,
        recipe: ConversionRecipe,
        *,
        device: str | None = None,
        progress: Progress | None = None,
        dist: DistContext | None = None,
        on_plan: Callable[[Plan], None] | None = None,
    ):
        self.source, self.sink, self.recipe, self.device, self.on_plan = source, sink, recipe, device, on_plan
        self.progress, self.dist = progress or Progress(), dist or DistContext()
        self.calibration: CalibrationInputs | None = None
        self.text_score: TextScore | None = None
        self.seconds: dict[str, float] = {}
        self.removals: dict[str, dict[str, Any]] = {}  # the report's entry of what was removed, by its key

    def run(self, began: float | None = None) -> dict[str, Any]:
        """Convert, deliver the result to the sink, and return the report. began: `time.perf_counter()` at the start of
        the command.
        """
        began = time.perf_counter() if began is None else began
        return_freed_memory()
        self.sink.check()
        with self.source.naming_modules():
            return self.convert_model(began)

    def convert_model(self, began: float) -> dict[str, Any]:
        """Run the preflight checks, build the context, and convert while the sink is open."""
        source, sink = self.source, self.sink
        model = source.open(self.progress)
        plan = source.plan(self.recipe)
        for note in (*plan.notes, *sink.notes(model)):
            self.progress.say(f"note: {note}")
        sink.check_plan(model, plan)
        if plan.recipe.calibration is not None:
            self.progress.say(f"reading the calibration inputs: {plan.recipe.calibration_label}")
        self.calibration = calibration = source.calibration(plan.recipe)
        samples = None
        if calibration is not None:
            samples = CalibrationSet.from_inputs(calibration.tensors, plan.recipe.holdout)
            if calibration.label != plan.recipe.calibration_label:
                plan = replace(plan, recipe=plan.recipe.model_copy(update={"calibration": calibration.label}))
        if self.on_plan is not None and self.dist.main:
            self.on_plan(plan)
        device = choose_device(self.device)
        layer_params = model.most_parameters(plan.layout.layers)
        with (
            sink.open(model, plan, samples) as journal,
            fast_float32_matmul(device, layer_params),
            without_timed_choices(),
        ):
            self.journal = journal
            if plan.removal is not None:  # first, the model with all layers and experts is measured
                plan = replace(plan, layout=plan.removal.layout)
                journal.keep(select_valid_entries(journal.entries, plan))
                plan = replace(plan, targets={}, pruned_targets={}, attention_targets={}, native_targets={})
            self.ctx = self._context(model, plan, samples, device)
            report = self._run_steps(began)
        for note in sink.closing_notes(model):
            self.progress.say_last(f"note: {note}")
        return report

    def _context(
        self, model: MetaModel, plan: Plan, samples: CalibrationSet | None, device: torch.device
    ) -> ConversionContext:
        """Return the context of a model and its plan, from which linears are removed that no input reaches."""
        work_dir, layout = self.journal.folder, plan.layout
        runner = LayerRunner(model, layout.layers, layout.head, device, scratch=work_dir, ranks=self.dist)
        if samples is not None:
            runner.packed = samples.packed
            reached, runner = self.source.keep_reached(plan, runner, samples)
            for note in reached.notes[len(plan.notes) :]:
                self.progress.say(f"warning: {note}")
            plan = reached
        return ConversionContext(model, plan, plan.recipe, samples, runner, work_dir, self.dist, device, self.progress)

    @property
    def tune(self) -> TuneRecipe:
        """What is trained on the calibration samples; nothing without them."""
        return TuneRecipe() if self.ctx.data is None else self.ctx.recipe.epochs

    def _run_steps(self, began: float) -> dict[str, Any]:
        """Convert what the journal does not hold yet, assemble the result, and return the report."""
        check_held_out(self.ctx)
        self.ctx.shards_dir.mkdir(exist_ok=True)
        self.seconds["start"] = round(time.perf_counter() - began, 3)  # imports, the plan and reading the text
        torch.manual_seed(self.ctx.recipe.seed)
        if self.ctx.plan.removal is None:
            self.journal.keep(select_valid_entries(self.journal.entries, self.ctx.plan))
            self._use_chosen_plan()
        with self._timer("text check"):
            self._check_text()
        self._generate_text()
        self._remove()
        for warning in short_text_warnings(self.ctx):
            self.progress.say(f"warning: {warning}")
        hybrid = self._resolve_attention()
        native = self._measure_level_weights()
        self._drop_damaged_layers()
        if self.journal.find("piece", piece=NON_LAYER) is None:
            budgets, allocation = self._resolve_budgets()
            self.convert_layers(budgets, allocation)
        return self.dist.on_main(lambda: self._write_result(hybrid, native, began))

    def _check_text(self) -> None:
        """Warn if the calibration text does not suit the model; ready input tensors are not checked."""
        if self.calibration is None or not self.calibration.is_text:
            return
        self.progress.say("checking that the calibration text suits the model")
        self.text_score = self.dist.on_main(lambda: score_text(self.ctx))
        for warning in self._text_warnings():
            self.progress.say(f"warning: {warning}")

    def _text_warnings(self) -> list[str]:
        notes = self.calibration.notes if self.calibration else []
        return [*notes, *(self.text_score.warnings if self.text_score else [])]

    def _generate_text(self) -> None:
        """Add the rows that the original samples to those that are fitted to."""
        if self.ctx.data is None or not self.ctx.recipe.generated_tokens:
            return
        with self._timer("generate"):
            rows_NT = generated_rows(self.ctx, self.journal, self.source.original)
        self.ctx = replace(self.ctx, data=with_generated_rows(self.ctx.data, rows_NT))

    def _remove(self) -> None:
        """Choose the layers or experts that `depth` or `experts` removes, and go on with the model without them."""
        ctx, depth, experts = self.ctx, self.ctx.plan.depth, self.ctx.plan.experts
        if depth is not None:
            model, plan = self._without_layers(depth)
        elif experts is not None:
            model, plan = self._with_fewer_experts(experts)
        else:
            return
        assert isinstance(model, MetaModel)  # as ctx.model is
        self.ctx = self._context(model, plan, ctx.data, ctx.device)
        self.journal.keep(select_valid_entries(self.journal.entries, self.ctx.plan))
        self._use_chosen_plan()

    def _without_layers(self, depth: DepthPlan) -> tuple[ModelDescription, Plan]:
        # Imported by conversions that remove layers.
        from surgery.conversion.depth import remove_layers
        from surgery.planning.depth import shortened

        with self._timer("depth"):
            removed = remove_layers(self.ctx, self.journal)
        self.removals, depth = {"depth": removed.record}, depth.with_kept(removed.kept)
        model = shortened(self.ctx.model, depth, removed.replaced)
        return model, with_depth(make_plan(model, self.ctx.recipe), depth)

    def _with_fewer_experts(self, experts: ExpertsPlan) -> tuple[ModelDescription, Plan]:
        # Imported by conversions that remove experts.
        from surgery.conversion.fewer_experts import remove_experts
        from surgery.planning.fewer_experts import with_fewer_experts

        with self._timer("experts"):
            removed = remove_experts(self.ctx, self.journal)
        self.removals, experts = {"experts": removed.record}, experts.with_kept(removed.kept)
        model = with_fewer_experts(self.ctx.model, experts, removed.replaced)
        return model, plan_with_experts(make_plan(model, self.ctx.recipe), experts)

    def _write_result(
        self, hybrid: dict[str, Any] | None, native: dict[str, Any] | None, began: float
    ) -> dict[str, Any]:
        """Let the sink assemble the layers, and return the report. hybrid, native: entries of the report."""
        entries = []
        for layer in (*self.ctx.plan.layout.layers, NON_LAYER):
            entry = self.journal.find("piece", piece=layer)
            assert entry is not None
            entries.append(entry)
        with self._timer("write"):
            stored = self.sink.write_model(self.ctx, entries)
        seconds = {**self.seconds, "total": round(time.perf_counter() - began, 3)}
        hint, score = self.source.calibration_hint, self.text_score
        inputs = ReportInputs(
            entries, stored, hybrid, seconds, hint, score, self._text_warnings(), self.removals, native
        )
        with report_errors(str(self.ctx.work_dir / REPORT_NAME)):
            report = conversion_report(self.ctx, inputs).to_dict()
        for record in report["modules"]:
            record["name"] = self.source.public_path(record["name"])
        self.sink.write_report(self.ctx, report)
        return report

    def _resolve_attention(self) -> dict[str, Any] | None:
        """Put the final attention targets into the plan; returns the report's "hybrid" entry."""
        if not self.ctx.plan.attention_targets or self.ctx.data is None:
            return None
        # The choices of layers, heads and cache sizes are imported by conversions that replace attention.
        from surgery.conversion.resolve_attention import resolve_attention_plan

        with self._timer("attention"):
            plan, hybrid = resolve_attention_plan(self.ctx, self.journal)
        self.ctx = replace(self.ctx, plan=plan)
        return hybrid

    def _measure_level_weights(self) -> dict[str, Any] | None:
        """Return the report's "native" entry: how much the level weights that a recipe adds change the logits."""
        if not self.ctx.plan.native_targets:
            return None
        entry = self.journal.find("native")
        if entry is None:
            # Imported by conversions that add level weights.
            from surgery.conversion.level_weights import measure_level_weights

            self.progress.say("measuring the change of the logits by level weights")
            with self._timer("level weights"):
                entry = self.dist.on_main(lambda: measure_level_weights(self.ctx))
            self.journal.add("native", **entry)
        return {key: entry[key] for key in ("change", "tokens")}

    def _resolve_budgets(self) -> tuple[dict[str, float], dict[str, Any]]:
        """Return (parameters for each target by name, the report's "allocation" entry)."""
        entry, plan = self.journal.find("budgets"), self.ctx.plan
        if entry is None:
            with self._timer("budgets"):
                entry = self.dist.broadcast_object(self._choose_budgets())
            self.journal.add("budgets", **entry)
            self._use_chosen_plan()
            plan = self.ctx.plan
        for line in allocation_lines(entry["allocation"]):
            self.progress.say(line)
        if plan.time is not None:
            self.ctx = replace(self.ctx, plan=with_structures(plan, entry["structures"]))
        return entry["budgets"], entry["allocation"]

    def _use_chosen_plan(self) -> None:
        """Use the plan whose targets have budgets in the journal, if a trial chose between two."""
        plan, entry = self.ctx.plan, self.journal.find("budgets")
        if entry is not None and plan.pruned_targets:
            chosen = next(one for one in plan.contenders().values() if one.target_names() == set(entry["budgets"]))
            self.ctx = replace(self.ctx, plan=chosen)

    def _choose_budgets(self) -> JournalEntry:
        """Return the journal's "budgets" entry; with `speed` it also has the structure of each target."""
        if self.ctx.plan.time is None:
            budgets, allocation = choose_budgets(self.ctx)
            return {"budgets": budgets, "allocation": allocation}
        from surgery.conversion.choose_by_time import choose_by_time

        return choose_by_time(self.ctx)

    def convert_layers(self, budgets: dict[str, float], allocation: dict[str, Any]) -> None:
        """Convert all layers and the head, and store all other tensors. budgets: parameters for each target, by
        name.
        """
        layers = self.ctx.plan.layout.layers
        with self._timer("layers"), self.progress.bar("converting layers", len(layers)) as tick:
            if self.ctx.data is None or not self._replaces:
                score, head = None, self._convert_data_free(budgets, tick)
            else:
                held_out, head = self._convert_calibrated(budgets, tick)
                score = held_out.to_dict()
        self.journal.merge()
        with self._timer("rest"):
            if self.dist.main:
                tensors = self._layer_tensors(NON_LAYER, head)
                self._store_layer(NON_LAYER, tensors, head, held_out=score, allocation=allocation)

    @property
    def _replaces(self) -> bool:
        """Whether the plan replaces anything; a recipe may remove layers only."""
        return bool(self.ctx.plan.targets or self.ctx.plan.attention_targets)

    def _convert_calibrated(self, budgets: dict[str, float], tick: Tick) -> tuple[HeldOutScore, LayerReplacement]:
        """Convert every layer and the head; the sink has those that are finished."""

        def write(layer: str, replacement: LayerReplacement, seconds: float) -> None:
            if self._is_writer(layer):
                step, tensors = "fitted" if self.tune.model else "piece", self._layer_tensors(layer, replacement)
                self._store_layer(layer, tensors, replacement, step, seconds=round(seconds, 3))
            tick()

        def finished(layer: str) -> LayerReplacement | None:
            replacement = self._load_finished(layer)
            if replacement is not None:
                tick()
            return replacement

        converter = SequentialConverter(
            self.ctx,
            budgets,
            finished=finished,
            write=write,
            tune_epochs=self.tune.layers,
            tune_norms=self.tune.norms,
        )
        score, head = converter.run()
        if self.tune.model:
            original_BTD = converter.original_BTD
            assert original_BTD is not None
            self.journal.merge()
            with self._timer("tune"), self.progress.bar("tuning the whole model", self.tune.model) as done:
                score = self.dist.on_main(lambda: self._tune_model(original_BTD, head, score, done))
        return score, head

    def _convert_data_free(self, budgets: dict[str, float], tick: Tick) -> LayerReplacement:
        """Convert this process's share of the layers that the journal lacks; return the head's replacement."""
        from surgery.conversion.data_free import convert_layers_data_free

        dist, layers = self.dist, self.ctx.plan.layout.layers
        for warning in uncalibrated_warnings(self.ctx, self.source.calibration_hint):
            label = "warning:" if self.ctx.plan.fitted_targets() else "note:"
            self.progress.say(f"{label} {warning}")
        missing = [layer for layer in layers if self.journal.find("piece", piece=layer) is None]
        tick(len(layers) - len(missing))
        share = missing[dist.index :: dist.count]
        for layer, replacement, seconds in convert_layers_data_free(self.ctx, budgets, share):
            self._store_layer(layer, self._layer_tensors(layer, replacement), replacement, seconds=round(seconds, 3))
            tick(min(dist.count, len(missing)))
        return convert_head(self.ctx, budgets)

    # -- tuning ------------------------------------------------------------------------------------
    def _tuned_originals(self, layer: str) -> dict[str, str]:
        """Return the norms and biases of a layer that are tuned too, parameter -> name in the files."""
        return layer_norms_and_biases(self.ctx.model, layer) if self.tune.norms else {}

    def _tune_model(
        self, original_BTD: Tensor, head: LayerReplacement, score: HeldOutScore, done: Tick
    ) -> HeldOutScore:
        """Train the whole model, store its layers, and return the held-out score. Process 0 does this alone."""
        ctx = self.ctx
        streamed = resident_bytes(ctx.plan) > ctx.runner.limit
        allocate = (lambda x: ctx.runner.file_tensor(x.shape)) if streamed else torch.empty_like
        trained = []
        fitted = {layer: self._fitted_layer(layer) for layer in ctx.plan.layout.layers}
        for path, (replacement, entries) in [*fitted.items(), ("", (head, head.entries))]:
            replacement.find_structured()
            originals = self._tuned_originals(path) if path and trained_parameters(ctx.model, replacement) else {}
            trained_layer = TrainedLayer(ctx.model, path, replacement, _dtypes(entries), allocate, originals)
            if trained_layer.tensors:
                trained.append(trained_layer)
            if streamed:
                trained_layer.release()
        tuned: dict[str, dict[str, Tensor]] = {}
        if trained:
            norms = outer_norms(ctx.model, ctx.plan.layout) if self.tune.norms else {}
            tuning = ModelTuning(ctx, trained, original_BTD, streamed, norms)
            head.tuned = tuning.run(self.tune.model, ctx.recipe.seed, done).to_dict()
            score = tuning.score()
            head.set_tensors(tuning.norms.finish(ctx.device), tuning.norms.dtypes)
        for trained_layer in trained:
            tensors = trained_layer.finish(torch.device("cpu") if trained_layer.path else ctx.device)
            if trained_layer.path:
                tuned[trained_layer.path] = tensors
            else:
                head.set_tensors(tensors, trained_layer.dtypes)
            if streamed:
                trained_layer.release()
        for layer, (replacement, entries) in fitted.items():
            if self.journal.find("piece", piece=layer) is None:
                replacement.entries = entries
                replacement.set_tensors(tuned.get(layer, {}), _dtypes(entries))
                self._store_layer(
                    layer, replacement.entries, replacement, seconds=self._entry("fitted", layer)["seconds"]
                )
        return score

    def _fitted_layer(self, layer: str) -> tuple[LayerReplacement, list[TensorSource]]:
        """Return the replacement of a layer as it was fitted, and all its tensors."""
        tensors = self.sink.read_layer(self.ctx, "fitted", layer)
        return self._load_replacement(self._entry("fitted", layer), tensors), tensors

    # -- layers ------------------------------------------------------------------------------------
    def _entry(self, step: str, layer: str) -> JournalEntry:
        entry = self.journal.find(step, piece=layer)
        assert entry is not None
        return entry

    def _drop_damaged_layers(self) -> None:
        """Remove the journal's entries of an interrupted run that cannot be reused.

        Process 0 checks the layers for all.
        """
        entries, steps = self.journal.entries, ("piece", "fitted")
        finished = sum(entry["step"] in steps for entry in entries)
        if not finished:
            return
        usable = self.dist.on_main(lambda: self.sink.usable_entries(self.ctx, entries))
        if lost := finished - sum(entry["step"] in steps for entry in usable):
            self.progress.say(
                f"note: the files of {lost} finished layers are damaged or were made by another plan; these layers are "
                "converted again"
            )
        self.journal.keep(usable)

    def _is_writer(self, layer: str) -> bool:
        """Return whether this process stores the layer, which all processes hold."""
        return self.ctx.plan.layout.layers.index(layer) % self.dist.count == self.dist.index

    def _load_finished(self, layer: str) -> LayerReplacement | None:
        step = "fitted" if self.tune.model else "piece"
        entry = self.journal.find(step, piece=layer)
        return None if entry is None else self._load_replacement(entry, self.sink.read_layer(self.ctx, step, layer))

    def _load_replacement(self, entry: JournalEntry, tensors: list[TensorSource]) -> LayerReplacement:
        """Return the replacement of a stored layer. tensors: all tensors that were stored."""
        ctx, layer = self.ctx, entry["piece"]
        locations = {t.name: t.source or TensorInfo.in_memory(t.name, t.tensor, layer) for t in tensors}  # type: ignore[arg-type]
        return load_replacement(ctx.model, ctx.plan, entry, locations, ctx.device, self._tuned_originals(layer))

    def _layer_tensors(self, layer: str, replacement: LayerReplacement) -> list[TensorSource]:
        """Return the replaced and the unchanged tensors of a layer, or of all that is outside the layers
        (NON_LAYER).
        """
        model = self.ctx.model
        replaced = {f"{stored_module_name(model, path)}.weight" for path in replacement.modules}
        split = {
            f"{stored_module_name(model, path)}.bias"
            for path, spec in replacement.table.items()
            if spec["structure"] == "split"
        }
        tensors = list(replacement.entries)
        written = replaced | split | {tensor.name for tensor in tensors}
        for parameter, name in model.keys.items():
            if self.ctx.shard_of[parameter] == layer and name not in written:
                tensors.append(TensorSource.from_file(name, model.source.tensors[name]))
        return tensors

    def _store_layer(
        self,
        layer: str,
        tensors: list[TensorSource],
        replacement: LayerReplacement,
        step: str = "piece",
        **fields: Any,
    ) -> None:
        """Give a layer's tensors to the sink, and enter it into the journal with `fields`.

        step: `piece`, or `fitted` before the whole model is trained.
        """
        trim_memory()
        entry = {
            "piece": layer,
            "sha256": self.sink.write_layer(self.ctx, step, layer, tensors),
            "table": replacement.table,
            "records": replacement.records,
            **({"mixers": replacement.mixer_table} if replacement.mixer_table else {}),
            **({"mixer_records": replacement.mixer_records} if replacement.mixer_table else {}),
            **({"tuned": replacement.tuned} if replacement.tuned else {}),
            **fields,
        }
        self.journal.add(step, **json.loads(json.dumps(entry)))  # the JSON types that a resumed run reads

    # -- seconds -----------------------------------------------------------------------------------
    @contextmanager
    def _timer(self, step: str) -> Iterator[None]:
        """Add the seconds spent inside to `seconds[step]`, without those of other steps that are timed inside."""
        began, others = time.perf_counter(), self._seconds_beside(step)
        yield
        spent = time.perf_counter() - began - (self._seconds_beside(step) - others)
        self.seconds[step] = round(self.seconds.get(step, 0.0) + spent, 3)

    def _seconds_beside(self, step: str) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if name != step)


def _dtypes(tensors: list[TensorSource]) -> dict[str, torch.dtype]:
    """Return the dtypes in which tensors are stored, by name."""
    return {tensor.name: DTYPES[tensor.dtype] for tensor in tensors if tensor.dtype in DTYPES}
