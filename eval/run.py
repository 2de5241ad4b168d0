"""`surgery eval`: run suites on a checkpoint and, with --compare, on the checkpoint that it was made from."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.core.device import choose_device, device_name
from surgery.core.digests import content_digest
from surgery.core.distributed import DistContext, init_distributed, local_device
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.files import exclusive_lock, explain_disk_errors, is_disk_error
from surgery.core.progress import Progress
from surgery.eval.journal import SampleJournal
from surgery.eval.model import (
    LiveEvalModel,
    OpenedModel,
    check_dtype,
    load,
    load_eval_model,
    load_eval_tokenizer,
    open_model,
)
from surgery.eval.options import ANY_TASK
from surgery.eval.report_warnings import fitted_text_warnings, other_original_warning
from surgery.eval.results.averages import AverageRow, average_rows
from surgery.eval.results.compare import ComparisonRow, compare_results
from surgery.eval.results.data_read import describe_data, list_reads, package_versions, record_reads
from surgery.eval.results.store import ResultStore, result_key
from surgery.eval.results.thresholds import Threshold, ThresholdResult, check_thresholds, parse_thresholds
from surgery.eval.suite import (
    EvalMetric,
    EvalModel,
    EvalOptions,
    Role,
    Suite,
    SuiteResult,
    check_task_names,
    find_suite,
)
from surgery.eval.upstream import UPSTREAM
from surgery.publish.hub.files import redact_secrets

if TYPE_CHECKING:
    import torch

__all__ = ["Evaluation", "evaluate", "load"]

RESULTS, TABLE = "results.json", "table.md"


@dataclass
class Evaluation:
    """Result of `evaluate`: suite results by role, comparison rows, and files written.

    Attributes:
        averages: averages over tasks, as papers report them.
        notes: warnings of the whole evaluation, and averages that cannot be given -> why, by suite.
        broken: suites or tasks that could not be measured -> reason; the others were measured.
        verdicts: results of --fail-below.
        exit_code: the same in every process: 0 success, 1 a threshold was missed, 2 something could not be measured.
    """

    models: dict[Role, dict[str, Any]]
    options: EvalOptions
    results: dict[str, dict[Role, SuiteResult]]
    rows: list[ComparisonRow] = field(default_factory=list)
    averages: list[AverageRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    verdicts: list[ThresholdResult] = field(default_factory=list)
    plots: list[Path] = field(default_factory=list)
    provenance: dict[str, Any] = field(default_factory=dict)
    exit_code: int = 0

    def row(self, task: str, metric: str | None = None) -> ComparisonRow:
        """Return the summary row of a task, for the named metric or else the first."""
        return next(r for r in self.rows if r.task == task and r.is_summary and metric in (None, r.metric.name))

    def main_metric(self, suite: str) -> EvalMetric:
        """Return the first metric of a suite, by which it is judged."""
        return next(iter(next(iter(self.results[suite].values())).metrics.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of results.json, with access tokens redacted."""
        suites = {
            suite: {
                role: {
                    "seconds": r.seconds,
                    "notes": r.notes,
                    "provenance": r.provenance,
                    "reads": redact_secrets(list_reads(r.reads)),
                    **({"upstream": UPSTREAM[suite].url} if suite in UPSTREAM else {}),
                }
                for role, r in by_role.items()
            }
            for suite, by_role in self.results.items()
        }
        return {
            "provenance": self.provenance,
            "models": self.models,
            "options": redact_secrets(self.options.model_dump(mode="json", exclude_defaults=True)),
            "all_options": redact_secrets(self.options.model_dump(mode="json")),
            "suites": suites,
            "rows": [row.to_dict() for row in self.rows],
            "averages": [row.to_dict() for row in self.averages],
            "notes": self.notes,
            "broken": self.broken,
            "limits": [verdict.to_dict() for verdict in self.verdicts],
            "plots": [path.name for path in self.plots],
        }


def evaluate(
    name: str | LiveEvalModel,
    suites: Sequence[str],
    options: EvalOptions,
    *,
    compare: str | LiveEvalModel | None = None,
    out: Path | None = None,
    fail_below: Sequence[str] = (),
    device: str | None = None,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] = (),
    comparison_files: bool = True,
    lock: bool = True,
    beside: Sequence[str] = (),
) -> Evaluation:
    """Run suites on one model, or on two and compare them.

    Each model is loaded once, one after the other. Results already stored in `out` for the same model, options and data
    are read instead of measured again.

    Args:
        name: checkpoint to evaluate (role "converted"): a local folder or a Hub id; or a model in memory.
        suites: names of suites, or of lm-eval tasks.
        compare: checkpoint to compare with (role "base").
        out: folder for results; None writes nothing.
        fail_below: thresholds NAME=SHARE (eval/results/thresholds.py); they need `compare`.
        dtype: one of eval.model.DTYPES.
        command: the command line's arguments, recorded in results.json.
        comparison_files: whether results.json, the table and the figures are written beside the results of the suites;
            False: only results.json, in the folder of the model.
        lock: whether to lock `out` against other evaluations; False if the caller holds the lock.
        beside: further models that take turns with these in suites that time (`run_pair`); they are all loaded
            together.
    """
    chosen = [find_suite(suite) for suite in dict.fromkeys(suites)]
    for suite in chosen:
        if suite.compares_two and compare is None:
            raise SurgeryError(f"--suite {suite.name} compares two models. Give the original with --compare SRC.")
    check_task_names(chosen, options)
    limits = parse_thresholds(fail_below, compare is not None)
    check_dtype(dtype)
    ranks = init_distributed(device)
    names: list[tuple[Role, str | LiveEvalModel]] = [("converted", name)]
    names = [("base", compare), *names] if compare is not None else names
    run = _EvaluationRun(
        chosen,
        options,
        local_device(ranks, device),
        dtype,
        trust_remote_code=trust_remote_code,
        ranks=ranks,
        progress=progress or Progress(),
        out=out,
        command=command,
        comparison_files=comparison_files,
    )
    with ExitStack() as stack:
        if out is not None:
            stack.callback(run.store.close)
            stack.enter_context(explain_disk_errors(out, "run the same command again to continue with what is missing"))
            ranks.together_or_raise(
                lambda: stack.enter_context(exclusive_lock(out, "evaluation")) if lock and ranks.main else None
            )
        opened = [open_model(role, name, ranks) for role, name in names]
        run.warn(opened)
        timed = any(suite.run_pair is not None for suite in chosen)
        run.measure(opened, [open_model("converted", other, ranks) for other in beside if timed])
        return run.compare(opened, limits)


def provenance(device: torch.device, command: Sequence[str]) -> dict[str, Any]:
    """Return what is needed to repeat a measurement: versions, device, date (UTC) and the command line without
    secrets.
    """
    command = redact_secrets(list(command))
    return {"versions": package_versions(), "device": device_name(device), "date": utc_timestamp(), "command": command}


def utc_timestamp() -> str:
    """Return the current UTC time in ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


class _EvaluationRun:
    """One call of `evaluate`: measures every suite on every model, then compares and writes the results."""

    def __init__(
        self,
        suites: list[Suite],
        options: EvalOptions,
        device: str | None,
        dtype: str,
        *,
        trust_remote_code: bool,
        ranks: DistContext,
        progress: Progress,
        out: Path | None,
        command: Sequence[str] = (),
        comparison_files: bool = True,
    ):
        self.comparison_files = comparison_files
        self.suites, self.options, self.dtype, self.trust_remote_code, self.ranks = (
            suites,
            options,
            dtype,
            trust_remote_code,
            ranks,
        )
        self.device, self.progress, self.store = choose_device(device), progress, ResultStore(out)
        self.results: dict[str, dict[Role, SuiteResult]] = {suite.name: {} for suite in suites}
        self.broken: dict[str, str] = {}
        self.warnings: list[str] = []
        self.models: dict[Role, dict[str, Any]] = {}
        self.cache: dict[
            tuple[str, str], SuiteResult
        ] = {}  # (fingerprint, suite); hit if a model is compared with itself
        self.provenance = provenance(self.device, command)
        ranks.together_or_raise(self.store.open if ranks.main else lambda: None)

    # -- measuring -----------------------------------------------------------------------------------
    def measure(self, opened: list[OpenedModel], beside: Sequence[OpenedModel] = ()) -> None:
        """Run all suites: each model is loaded once; suites with `run_pair` then load all together, those of `beside`
        too; suites with `run_against` load the base and the converted model themselves.
        """
        for one in opened:
            self.models[one.role] = {
                "name": one.name,
                "fingerprint": one.fingerprint,
                "dtype": self.dtype,
                "device": device_name(self.device),
                "processes": self.ranks.count,
                **one.sizes(),
            }
        unique: dict[str, OpenedModel] = {}
        for one in (*opened, *beside):
            unique.setdefault(one.fingerprint, one)
        together = list(unique.values())
        paired = [suite for suite in self.suites if len(together) > 1 and suite.run_pair is not None]
        against = [suite for suite in self.suites if suite.run_against is not None]
        for one in opened:
            self._measure(one, [suite for suite in self.suites if suite not in (*paired, *against)])
        for suite in paired:
            self._measure_together(opened, together, suite)
        for suite in against:
            self._measure_against(opened[0], opened[-1], suite)

    def _measure(self, one: OpenedModel, suites: list[Suite]) -> None:
        missing = [suite for suite in suites if suite.name not in self.broken and not self._load_stored(one, suite)]
        if not missing:
            return
        with self._load_model(one) as eval_model:
            for suite in missing:
                assert suite.run is not None
                began = time.perf_counter()
                try:
                    eval_model.journal = self._open_journal(one, suite)
                    with record_reads() as reads:
                        result = suite.run(eval_model, self.options)
                    result.info.setdefault("longest", eval_model.longest)
                    self._store_result(one, suite, result, eval_model.journal, began, reads=reads)
                except Exception as error:
                    self._record_failure(suite, one, error)

    def _open_journal(self, one: OpenedModel, suite: Suite, pair: tuple[str, ...] = ()) -> SampleJournal | None:
        """Return the journal of a suite, with the samples of an interrupted run; None without --out."""
        folder = self._result_folder(one, suite)
        if folder is None:
            return None
        journal = SampleJournal(folder, self._key(one, suite, pair), self.ranks)
        if journal.stored and self.ranks.main:
            self.progress.say(
                f"{suite.name} of {one.name} continues with {len(journal.stored):,} samples of an interrupted run"
            )
        return journal

    def _measure_together(self, opened: list[OpenedModel], together: list[OpenedModel], suite: Suite) -> None:
        """Run a suite on all models while they take turns, and keep the results of `opened`; those of all are
        written.
        """
        pair = tuple(sorted(one.fingerprint for one in together))
        if all(self._load_stored(one, suite, pair) for one in opened) or suite.run_pair is None:
            return
        began = time.perf_counter()
        try:
            with ExitStack() as stack:
                models = [stack.enter_context(self._load_model(one)) for one in together]
                # In the folder of the model that is written last, so that no result is lost between two of them.
                models[-1].journal = self._open_journal(together[-1], suite, pair)
                with record_reads() as reads:
                    results = suite.run_pair(models, self.options)
                for one, eval_model, result in zip(together, models, results):
                    result.info.setdefault("longest", eval_model.longest)
                    self._store_result(one, suite, result, eval_model.journal, began, reads=reads, pair=pair)
            for one in opened:
                self._load_stored(one, suite, pair)
        except Exception as error:
            from surgery.eval.speed.generation import is_out_of_memory

            if is_out_of_memory(error):
                error = SurgeryError(
                    f"{suite.name}: {len(together)} models take turns and must fit in the memory of {self.device} "
                    "together. Evaluate fewer "
                    "at once, or use --dtype bfloat16"
                )
            self._record_failure(suite, opened[-1], error)

    def _measure_against(self, base: OpenedModel, one: OpenedModel, suite: Suite) -> None:
        """Run a suite that measures a model against the base, and keep the result of the model."""
        assert suite.run_against is not None
        pair = (base.fingerprint, one.fingerprint)
        if self._load_stored(one, suite, pair):
            return
        began = time.perf_counter()
        try:
            journal = self._open_journal(one, suite, pair)
            with record_reads() as reads:
                result = suite.run_against(
                    partial(self._load_model, base, journal), partial(self._load_model, one, journal),
                    load_eval_tokenizer(one, self.trust_remote_code), self.options,
                )  # fmt: skip
            self._store_result(one, suite, result, journal, began, reads=reads, pair=pair)
        except Exception as error:
            self._record_failure(suite, one, error)

    @contextmanager
    def _load_model(self, one: OpenedModel, journal: SampleJournal | None = None) -> Iterator[EvalModel]:
        with load_eval_model(
            one, self.device, self.dtype, self.trust_remote_code, self.ranks, self.progress
        ) as eval_model:
            eval_model.journal = journal
            yield eval_model

    def _key(self, one: OpenedModel, suite: Suite, pair: tuple[str, ...]) -> dict[str, Any]:
        key = result_key(one.fingerprint, suite.name, self.options, self.device.type, self.dtype, version=suite.version)
        return key | ({"pair": list(pair)} if pair else {})

    def _load_stored(self, one: OpenedModel, suite: Suite, pair: tuple[str, ...] = ()) -> bool:
        """Use a stored result if there is one. The main process decides for all processes."""
        stored = self.cache.get((one.fingerprint, suite.name))
        if stored is None and self.ranks.main:
            stored = self.store.load(self._result_folder(one, suite), self._key(one, suite, pair), self.options)
        stored = self.ranks.broadcast_object(stored)
        if stored is not None:
            self.results[suite.name][one.role] = self.cache[one.fingerprint, suite.name] = stored
        return stored is not None

    def _result_folder(self, one: OpenedModel, suite: Suite) -> Path | None:
        return self.store.result_folder(one.name, one.fingerprint, suite.name)

    def _store_result(
        self,
        one: OpenedModel,
        suite: Suite,
        result: SuiteResult,
        journal: SampleJournal | None,
        began: float,
        *,
        reads: dict[str, str],
        pair: tuple[str, ...] = (),
    ) -> None:
        result.seconds = time.perf_counter() - began
        result.reads = reads
        data = describe_data(reads, self.options.data_root)
        result.provenance = {
            **self.provenance,
            "date": utc_timestamp(),
            "model": one.fingerprint,
            "name": redact_secrets(one.name),
            "suite_version": suite.version,
            **one.sizes(),
            **({} if one.front is None else {"front": one.front.model_dump(mode="json")}),
            **({} if one.healed is None else {"healed": one.healed}),
            "options": redact_secrets(self.options.model_dump(mode="json", exclude_defaults=True)),
            "data": data,
            **self._extra_tasks(),
        }
        broken = result.broken
        if self.ranks.main and not broken:  # a stored result would count as complete in the next run
            result = self.store.save(self._result_folder(one, suite), self._key(one, suite, pair), result)
        self.results[suite.name][one.role] = self.cache[one.fingerprint, suite.name] = result
        self.broken |= {f"{suite.name} {task}": f"{why} ({one.name})" for task, why in broken.items()}
        if self.ranks.main:
            if not broken and journal is not None:
                journal.remove()
            self.progress.say(f"{suite.name} of {one.name}: {len(result.samples):,} samples, {result.seconds:.1f} s")

    def _extra_tasks(self) -> dict[str, str]:
        """Return the digest of the folder of additional lm-eval tasks, if there is one."""
        path = self.options.include_path
        return {} if path is None or not path.exists() else {"include_path": content_digest(path)}

    def _record_failure(self, suite: Suite, one: OpenedModel, error: Exception) -> None:
        """Re-raise if this is the only suite or a disk error; otherwise record the failure and continue."""
        if len(self.suites) == 1 or is_disk_error(error):
            raise error
        kind = "" if isinstance(error, SurgeryError) else f"{type(error).__name__}: "
        self.broken[suite.name] = f"{kind}{' '.join(str(error).split())[:500]} ({one.name})"
        if self.ranks.main:
            self.progress.say(f"{suite.name} failed, continuing with the other suites: {self.broken[suite.name]}")

    # -- both ----------------------------------------------------------------------------------------
    def warn(self, opened: list[OpenedModel]) -> None:
        """Warn, at the start and in the results, of what the models' own reports say against a measurement."""
        self.warnings = fitted_text_warnings(opened, self.options.text)
        if any(suite.run_against is not None for suite in self.suites):
            warning = other_original_warning(opened[0], opened[-1])
            self.warnings += [warning] if warning is not None else []
        for warning in self.warnings:
            self.progress.say(f"warning: {warning}")

    def compare(self, opened: list[OpenedModel], limits: list[Threshold]) -> Evaluation:
        """Compare and write on the main process; broadcast the exit code."""
        notes = [f"warning: {warning}" for warning in self.warnings]
        done = Evaluation(self.models, self.options, {}, broken=self.broken, provenance=self.provenance, notes=notes)
        self.ranks.together_or_raise(lambda: self._fill_comparison(done, opened, limits) if self.ranks.main else None)
        done.exit_code = self.ranks.broadcast_object(done.exit_code)
        return done

    def _fill_comparison(self, done: Evaluation, opened: list[OpenedModel], limits: list[Threshold]) -> None:
        same = len(opened) == 2 and opened[0].fingerprint == opened[1].fingerprint
        for suite in self.suites:
            if suite.name in self.broken:
                continue
            by_role = self.results[suite.name]
            try:
                shown = (
                    {"converted": suite.combine(by_role["base"], by_role["converted"])} if suite.combine else by_role
                )
                done.rows += compare_results(suite.name, shown, same, self.options.seed)
                self._add_averages(done, suite, shown, same)
                done.results[suite.name] = by_role
                done.plots += self._plot(suite, by_role)
            except SurgeryError as error:
                self._record_failure(suite, opened[-1], error)
        try:
            first = {suite: done.main_metric(suite).name for suite in done.results}
            self._check_samples(done)
            done.verdicts = check_thresholds(limits, done.rows, first, list(done.broken))
            done.exit_code = 2 if done.broken else int(not all(verdict.held for verdict in done.verdicts))
        finally:  # results are written even if a threshold names an unknown task
            self._write(done)

    def _add_averages(self, done: Evaluation, suite: Suite, results: Mapping[Role, SuiteResult], same: bool) -> None:
        if suite.averages is None:
            return
        base, itself = ("base" if "base" in results else None), (["converted"] if same else [])
        rows, notes = average_rows(suite.name, suite.averages, results, base, itself, seed=self.options.seed)
        done.averages += rows
        done.notes += [f"{suite.name}: {note}" for note in notes]

    def _check_samples(self, done: Evaluation) -> None:
        """Raise SurgeryError if --samples or --data names a task that was not measured, of suites that do not declare
        theirs.
        """
        known: dict[str, None] = {}
        for by_role in done.results.values():
            for sample in (sample for result in by_role.values() for sample in result.samples):
                known |= dict.fromkeys((sample.task, f"{sample.task}_{sample.group.get('length', '')}"))
        asked = [("--samples", name) for name in self.options.samples]
        asked += [("--data", name) for name in self.options.data if name != ANY_TASK]
        for option, name in asked:
            if name not in known and not any(name in broken for broken in self.broken):
                tasks = [task for task in known if not task.endswith("_")]
                raise SurgeryError(
                    f"{option}: no task {name!r} was measured{suggestion(name, tasks)}; measured: "
                    f"{', '.join(tasks[:20])}"
                )

    def _plot(self, suite: Suite, by_role: dict[Role, SuiteResult]) -> list[Path]:
        """Draw the suite's figures. A failure is reported, and never loses the results."""
        if self.store.folder is None or not self.comparison_files:
            return []
        try:
            from surgery.eval.results.plots import plot_by_group

            if suite.plot is not None:
                return suite.plot(by_role, self.store.folder)
            return plot_by_group(suite.name, by_role, self.store.folder)
        except Exception as error:
            self.progress.say(f"no figure of {suite.name}: {type(error).__name__}: {error}")
            return []

    def _write(self, done: Evaluation) -> None:
        from surgery.eval.results.tables import markdown

        text = json.dumps(done.to_dict(), indent=1, ensure_ascii=False, default=str) + "\n"
        if self.comparison_files:
            self.store.write(RESULTS, text)
            self.store.write(TABLE, markdown(done))
        else:  # one of several models: for --verify, in the folder of the model
            self.store.write(RESULTS, text, self.models["converted"])
