"""plan + shards -> structured shards, streaming and crash-safe.

OUT.partial/journal.jsonl     what is done
OUT.partial/pieces/           a file for every finished layer, and one for the rest
OUT.partial/curvature/        Gram matrices of the outputs' gradients, a file a layer
OUT                           the same folder, renamed once everything is in it
"""

from __future__ import annotations

import glob
import json
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.companions import in_subfolders
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.report import validate_report
from surgery.checkpoint.safetensors_io import TensorSource, read_header, write_shard
from surgery.checkpoint.source import CheckpointSource, open_checkpoint, open_converted_checkpoint
from surgery.checkpoint.table import SHIM_NAME
from surgery.checkpoint.tensor_names import listed
from surgery.checkpoint.writer import (
    WORK_FILES,
    converted_config,
    copy_companions,
    delivered_files,
    known_work_files,
    write_checkpoint,
)
from surgery.conversion.data_free import convert_layers_data_free
from surgery.conversion.layer_shards import REST, Pieces, well_formed
from surgery.conversion.preflight import check_disk_space, check_same_inputs, journal_fingerprint, load_calibration
from surgery.conversion.replacement import LayerReplacement, load_replacement, stored_module_name
from surgery.conversion.resolve_attention import resolve_attention_plan
from surgery.conversion.score import HeldOutScore
from surgery.conversion.sequential import SequentialConverter, convert_head
from surgery.conversion.text_check import TextFit, text_fit
from surgery.conversion.trial import choose_budgets
from surgery.core.device import (
    choose_device,
    device_name,
    fast_float32_matmul,
    peak_rss,
    return_freed_memory,
    trim_memory,
)
from surgery.core.distributed import DistContext, init_distributed, local_device
from surgery.core.errors import Interrupted, SurgeryError
from surgery.core.files import REPORT_NAME, explain_disk_errors, partial_path, refuse_unknown_files, write_json
from surgery.core.journal import Journal, check_output_path
from surgery.core.progress import Progress
from surgery.core.version import __version__
from surgery.modeling.auto_classes import write_shims
from surgery.planning.plan import Plan, make_plan
from surgery.planning.recipe import ConversionRecipe


def convert(
    source: str,
    recipe: ConversionRecipe,
    out: str | Path,
    *,
    device: str | None = None,
    resume: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Convert a checkpoint; the report, as written to OUT/surgery_report.json.

    Raises SurgeryError, leaving nothing but what was there before, or OUT.partial for `resume`. Of several processes
    (surgery.core.distributed) all call it, and all get the report.
    """
    ranks = init_distributed(device)
    with ranks.fail_together():
        device, progress = local_device(ranks, device), (progress if ranks.main else None) or Progress()
        with explain_disk_errors(Path(out), "run the same command with --resume"):
            return _convert(source, recipe, Path(out), device, resume, trust_remote_code, revision, progress, ranks)


def _convert(
    source: str,
    recipe: ConversionRecipe,
    out: Path,
    device: str | None,
    resume: bool,
    trust_remote_code: bool,
    revision: str | None,
    progress: Progress,
    ranks: DistContext,
) -> dict[str, Any]:
    began = time.perf_counter()
    return_freed_memory()
    ranks.on_main(lambda: check_output_path(out, resume))
    opened = open_checkpoint(source, trust_remote_code, revision=revision)
    meta_model = MetaModel(opened, trust_remote_code)
    plan = make_plan(meta_model, recipe)
    for note in plan.notes:
        progress.say(f"note: {note}")
    if meta_model.unused:
        progress.say(
            f"note: {type(meta_model.model).__name__} does not use {listed(meta_model.unused)}; copied as stored"
        )
    for name in in_subfolders(opened.folder).left:
        progress.say(f"note: not copied beside the weights: {name}")
    odd: list[str] = []
    batch = load_calibration(opened, meta_model, recipe, odd)
    ranks.on_main(lambda: check_disk_space(opened, plan, recipe, out))
    partial = partial_path(out)
    ranks.on_main(lambda: refuse_unknown_files(partial, known_work_files(opened)))
    place = choose_device(device)
    fingerprint = journal_fingerprint(opened, recipe, batch)
    check_same_inputs(ranks, fingerprint)
    with Journal(partial, fingerprint, resume, ranks) as journal, fast_float32_matmul(place):
        try:
            ranks.on_main(lambda: check_output_path(out, True))  # another conversion may have ended there meanwhile
            conversion = Conversion(meta_model, plan, batch, partial, journal, place, progress, odd)
            report = conversion.run(began)
        except Interrupted:
            raise
        except SurgeryError:
            if journal.created and ranks.main:  # what is refused now will be refused again: there is nothing to resume
                shutil.rmtree(partial, ignore_errors=True)
            raise
        ranks.on_main(lambda: journal.move(out, conversion.delivered))
    return report


class Conversion:
    def __init__(
        self,
        meta_model: MetaModel,
        plan: Plan,
        batch: CalibrationSet | None,
        partial: Path,
        journal: Journal,
        device: torch.device,
        progress: Progress,
        odd: list[str],
    ):
        self.odd = odd
        self.delivered: set[str] = set()  # files of the result, of the process that writes it
        self.text_fit: TextFit | None = None
        self.meta_model, self.plan, self.recipe, self.batch = meta_model, plan, plan.recipe, batch
        self.partial, self.journal, self.device, self.progress = partial, journal, device, progress
        self.pieces, self.grams = partial / "pieces", partial / "curvature"
        self.ranks, self.main = journal.ranks, journal.ranks.main
        self.pieces.mkdir(exist_ok=True)
        self.seconds: dict[str, float] = {}
        self.peaks = {"moments": 0, "hidden_states": 0}
        self.units = {name: self._shard_name(name) for name in meta_model.keys}

    def run(self, began: float) -> dict[str, Any]:
        torch.manual_seed(self.recipe.seed)
        self.journal.keep(well_formed(self.journal.entries, self.plan))
        self._check_text()
        hybrid = self._resolve_attention()
        self._keep_sound()
        if self.journal.find("piece", piece=REST) is None:
            target_budgets, allocation = self._resolve_budgets()
            self._convert(target_budgets, allocation)
        return self.ranks.on_main(lambda: self._write_output(hybrid, began))

    def _check_text(self) -> None:
        """Warns of a text that does not suit the model; ready inputs are taken as they are."""
        text = self.recipe.calibration
        if self.batch is None or text is None or text.endswith(".safetensors"):
            return
        batch, seed = self.batch, self.recipe.seed
        self.text_fit = self.ranks.on_main(
            lambda: text_fit(self.meta_model, self.plan, batch, self._make_runner(), seed)
        )
        for line in self._text_warnings():
            self.progress.say(f"[bold yellow]warning[/]: {escape(line)}")

    def _text_warnings(self) -> list[str]:
        return [*self.odd, *(self.text_fit.warnings if self.text_fit else [])]

    def _write_output(self, hybrid: dict[str, Any] | None, began: float) -> dict[str, Any]:
        """Pieces to a checkpoint with its report."""
        found = [self.journal.find("piece", piece=piece) for piece in (*self.plan.layout.layers, REST)]
        lines = [line for line in found if line is not None]
        assert len(lines) == len(found)
        rest, expected = lines[-1], {name for line in lines for name in self._pieces().expected(line)}
        with self._timed("write"):
            weight_map = write_checkpoint(
                self.partial, [self._shard_path(line["piece"]) for line in lines], self.journal, expected
            )
            table = {path: spec for line in lines for path, spec in line["table"].items()}
            mixers = {path: spec for line in lines for path, spec in line.get("mixers", {}).items()}
            config = converted_config(self.meta_model.source, self.meta_model, table, mixers)
            copy_companions(self.meta_model.source, self.partial)
            write_shims(self.partial, config, self.meta_model.model)
            write_json(self.partial / "config.json", config)
        report = self._report(lines, rest, weight_map, time.perf_counter() - began)
        report["hybrid"] = hybrid
        validate_report(json.loads(json.dumps(report)), str(self.partial / REPORT_NAME))
        write_json(self.partial / REPORT_NAME, report)
        shim = {SHIM_NAME} if config.get("auto_map") != self.meta_model.source.config.get("auto_map") else set()
        self.delivered = {*delivered_files(self.meta_model.source, weight_map), REPORT_NAME, *shim}
        for folder in (self.pieces, self.grams):
            shutil.rmtree(folder, ignore_errors=True)
        refuse_unknown_files(self.partial, {*WORK_FILES, *map(glob.escape, self.delivered)}, Interrupted)
        open_converted_checkpoint(str(self.partial))
        return report

    def _resolve_attention(self) -> dict[str, Any] | None:
        """Settles which attention gets which mixer; what the report says of a hybrid."""
        if not self.plan.attention_targets or self.batch is None:
            return None
        runner = self._make_runner()
        with self._timed("attention"):
            self.plan, hybrid = resolve_attention_plan(
                self.meta_model, self.plan, self.recipe, self.batch, runner, self.grams, self.journal, self.progress
            )
        self._record_peaks(runner)
        return hybrid

    def _resolve_budgets(self) -> tuple[dict[str, float], dict[str, Any]]:
        if done := self.journal.find("budgets"):
            return done["budgets"], done["allocation"]

        runner = self._make_runner()
        with self._timed("budgets"):
            target_budgets, allocation = choose_budgets(
                self.meta_model, self.plan, self.recipe, self.batch, runner, self.grams, self.progress
            )
        self._record_peaks(runner)
        target_budgets, allocation = self.ranks.broadcast_object((target_budgets, allocation))
        self.journal.add("budgets", budgets=target_budgets, allocation=allocation)
        return target_budgets, allocation

    def _convert(self, target_budgets: dict[str, float], allocation: dict[str, Any]) -> None:
        """All layers, then the rest."""
        with self._timed("layers"), self.progress.bar("converting layers", len(self.plan.layout.layers)) as tick:
            if self.batch is None:
                held, head = None, self._convert_data_free(target_budgets, tick)
            else:
                result, head = self._convert_calibrated(self.batch, target_budgets, tick)
                held = result.to_dict()
        self.journal.merge()
        with self._timed("rest"):
            if self.main:
                self._write_shard(REST, head, held_out=held, allocation=allocation)

    def _convert_calibrated(
        self, batch: CalibrationSet, target_budgets: dict[str, float], tick: Any
    ) -> tuple[HeldOutScore, LayerReplacement]:
        """Every layer and the head; finished layers are taken from disk."""

        def write(path: str, replacement: LayerReplacement, seconds: float) -> None:
            if self._is_writer(path):
                self._write_shard(path, replacement, seconds=round(seconds, 3))
            tick()

        runner = self._make_runner()
        run = SequentialConverter(
            self.meta_model,
            self.plan,
            self.recipe,
            target_budgets,
            runner,
            self.grams,
            batch,
            self._load_finished,
            write,
        ).run()
        self._record_peaks(runner)
        return run

    def _convert_data_free(self, target_budgets: dict[str, float], tick: Any) -> LayerReplacement:
        self.progress.say(
            "[bold yellow]no calibration text[/]: weights are projected in the Frobenius norm, which damages a pretrained "
            "model badly (docs/quality.md); give --calibration FILE"
        )
        todo = [path for path in self.plan.layout.layers if self.journal.find("piece", piece=path) is None]
        tick(len(self.plan.layout.layers) - len(todo))
        own = todo[self.ranks.index :: self.ranks.count]
        for path, replacement, seconds in convert_layers_data_free(
            self.meta_model, self.plan, target_budgets, own, self.device
        ):
            self._write_shard(path, replacement, seconds=round(seconds, 3))
            tick(min(self.ranks.count, len(todo)))
        return convert_head(
            self.meta_model, self.plan, self.recipe, target_budgets, None, None, self.grams, self.device
        )

    # -- pieces ------------------------------------------------------------------------------------
    def _pieces(self) -> Pieces:
        return Pieces(self.meta_model, self.plan, self.units, self.pieces)

    def _keep_sound(self) -> None:
        """What an interrupted run left is looked at once, by the first process for all."""
        lines = self.journal.entries
        if not any(line["step"] == "piece" for line in lines):
            return
        sound = self.ranks.on_main(lambda: self._pieces().sound(lines, self.partial))
        if lost := sum(line["step"] == "piece" for line in lines) - sum(line["step"] == "piece" for line in sound):
            self.progress.say(
                f"note: {lost} finished pieces are damaged, or not those of this plan; they are made again"
            )
        self.journal.keep(sound)

    def _make_runner(self) -> LayerRunner:
        layout = self.plan.layout
        return LayerRunner(
            self.meta_model, layout.layers, layout.head, self.device, scratch=self.partial, ranks=self.ranks
        )

    def _is_writer(self, path: str) -> bool:
        """Whether a layer that all have is this process's to write."""
        return self.plan.layout.layers.index(path) % self.ranks.count == self.ranks.index

    def _record_peaks(self, runner: LayerRunner) -> None:
        for what, size in (("moments", runner.moment_bytes), ("hidden_states", runner.hidden_bytes)):
            self.peaks[what] = max(self.peaks[what], size)

    def _shard_path(self, unit: str) -> Path:
        return self.pieces / f"{unit}.safetensors"

    def _shard_name(self, parameter: str) -> str:
        return next((path for path in self.plan.layout.layers if parameter.startswith(path + ".")), REST)

    def _load_finished(self, path: str) -> LayerReplacement | None:
        done = self.journal.find("piece", piece=path)
        if done is None:
            return None
        return load_replacement(self.meta_model, self.plan, done, read_header(self._shard_path(path)), self.device)

    def _write_shard(self, unit: str, replacement: LayerReplacement, **fields: Any) -> None:
        """The unit's tensors: stand-ins, and everything else as it was."""
        replaced = {f"{stored_module_name(self.meta_model, path)}.weight" for path in replacement.modules}
        split = {
            f"{stored_module_name(self.meta_model, p)}.bias"
            for p, spec in replacement.table.items()
            if spec["structure"] == "split"
        }
        entries = list(replacement.entries)
        for name, key in self.meta_model.keys.items():
            if self.units[name] == unit and key not in replaced | split:
                entries.append(TensorSource.from_file(key, self.meta_model.source.tensors[key]))
        trim_memory()
        digest = write_shard(self._shard_path(unit), entries)
        mixers = (
            {"mixers": replacement.mixer_table, "mixer_records": replacement.mixer_records}
            if replacement.mixers
            else {}
        )
        done = {
            "piece": unit,
            "sha256": digest,
            "table": replacement.table,
            "records": replacement.records,
            **mixers,
            **fields,
        }
        self.journal.add("piece", **json.loads(json.dumps(done)))  # as a resumed run reads it

    # -- the report --------------------------------------------------------------------------------
    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[what] = round(self.seconds.get(what, 0.0) + time.perf_counter() - began, 3)

    def _report(
        self, lines: list[Any], rest: dict[str, Any], weight_map: dict[str, str], total: float
    ) -> dict[str, Any]:
        import transformers

        source, records = self.meta_model.source, [record for line in lines for record in line["records"]]
        whole = [targets[0] for targets in self.plan.targets.values() if targets[0].part is None]
        refits = {target.name for target in whole if not target.configs}  # dense before and after
        return {
            "surgery": __version__,
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "source": {"name": source.name, "revision": source.revision, "fingerprint": source.fingerprint()},
            "model_type": self.plan.model_type,
            "recipe": json.loads(self.recipe.model_dump_json()),
            "seed": self.recipe.seed,
            "notes": list(self.plan.notes),
            "companions": [path.as_posix() for path in source.companions()],
            "calibration": {
                "tokens": self.batch.tokens(),
                "held_out_windows": self.batch.rows - self.batch.n_fit,
                "windows": self.batch.rows,
                "loss": self.text_fit.loss if self.text_fit else None,
                "own_samples_loss": self.text_fit.own_samples if self.text_fit else None,
                "warnings": self._text_warnings(),
            }
            if self.batch
            else None,
            "allocation": rest["allocation"],
            "held_out": rest["held_out"],
            "totals": totals([r for r in records if r["name"] not in refits], source, self.partial, weight_map),
            "modules": records,
            "mixers": [record for line in lines for record in line.get("mixer_records", [])],
            "time": {
                "seconds": {**self.seconds, "total": round(total, 3)},
                "layers": {line["piece"]: line["seconds"] for line in lines if "seconds" in line},
                "device": device_name(self.device),
                "threads": torch.get_num_threads(),
                "processes": self.ranks.count,
            },
            "memory": {"peak_rss": peak_rss(), "calibration": self.peaks, "largest_layer": self._largest_layer()},
        }

    def _largest_layer(self) -> int:
        """Bytes of the largest layer in float32."""
        sizes: dict[str, int] = {}
        for name, key in self.meta_model.keys.items():
            if self.units[name] != REST:
                sizes[self.units[name]] = sizes.get(self.units[name], 0) + 4 * source_numel(self.meta_model.source, key)
        return max(sizes.values(), default=0)


def source_numel(source: CheckpointSource, key: str) -> int:
    return source.tensors[key].numel


def totals(
    records: list[dict[str, Any]], source: CheckpointSource, folder: Path, weight_map: dict[str, str]
) -> dict[str, Any]:
    """Counted on what is stored: numbers and bytes of the whole checkpoint and of the replaced weights."""
    stored = [t for name in sorted(set(weight_map.values())) for t in read_header(folder / name).values()]
    before, after = (sum(r[key] for r in records) for key in ("params_before", "params_after"))
    return {
        "replaced_params_before": before,
        "replaced_params_after": after,
        "kept": after / before if before else 1.0,
        "macs_before": sum(r["macs_before"] for r in records),
        "macs_after": sum(r["macs_after"] for r in records),
        "params_before": sum(t.numel for t in source.tensors.values()),
        "params_after": sum(t.numel for t in stored),
        "bytes_before": source.nbytes,
        "bytes_after": sum(t.nbytes for t in stored),
    }
