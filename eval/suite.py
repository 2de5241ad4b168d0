"""Interfaces of the evaluation: EvalModel, Sample, EvalMetric, SuiteResult, Suite, and the registry SUITES.

EvalOptions is in options.py.

    suite.run(eval_model, options) -> SuiteResult
    suite.run_against(load_base, load_converted, tokenizer, options) -> SuiteResult    of a suite that compares two models
    register(suite)                                                                    adds the suite to SUITES

A suite measures one loaded model, or one against the base, and returns samples; each sample has one value per metric. A sample is one question,
document or window. Its `id` is the same for every model, so that the samples of base and converted model can be paired.
Statistics, tables and files are written elsewhere (eval/results/compare.py, tables.py, store.py).
To add a suite, add one file to eval/suites/.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import json
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surgery.core.errors import SurgeryError, suggestion
from surgery.eval.options import ANY_TASK, EvalOptions

if TYPE_CHECKING:  # torch is imported only when something is measured
    import torch
    from torch import Tensor

    from surgery.core.distributed import DistContext
    from surgery.core.progress import Progress
    from surgery.eval.averages import SuiteAverages
    from surgery.eval.journal import SampleJournal

Role = Literal["base", "converted"]
# Metrics of lm-eval between 0 and 1, which are accuracies if all values are 0 or 1.
BOUNDED_METRICS = {"acc", "acc_norm", "acc_mutual_info", "exact_match", "em", "contains", "score", "f1"}


@dataclass
class EvalModel:
    """A loaded model under evaluation.

    Attributes:
        folder: local folder of the checkpoint.
        fingerprint: digest of the checkpoint's files.
        longest: longest input in tokens that the config declares (`max_position_embeddings`); None if unbounded.
        ranks: the processes that share the samples.
        progress: receiver of progress bars and messages.
        journal: finished samples of the suite that is running; None: nothing is written, so an interrupted suite begins
            again.
    """

    role: Role
    name: str
    folder: Path
    fingerprint: str
    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    longest: int | None
    ranks: DistContext
    progress: Progress
    journal: SampleJournal | None = None


ModelLoader = Callable[[], AbstractContextManager[EvalModel]]


@dataclass(frozen=True)
class EvalMetric:
    """How a metric is aggregated and displayed.

    Attributes:
        kind: "mean" (weighted mean), "accuracy" (mean of zeros and ones, compared by McNemar's test) or "ppl" (exp of
            the weighted mean of nats).
        scale: factor applied to values for display.
        top: largest possible value before scaling; None if unbounded (losses).
        floor: value that guessing reaches, before scaling; `SuiteResult.floors` overrides it per task.
        title: name in tables if it differs from `name` ("perplexity" for a sample's "nll").
        pooled: whether a mean over groups is meaningful (a mean of milliseconds over several lengths is not).
    """

    name: str
    kind: Literal["mean", "accuracy", "ppl"] = "mean"
    higher_is_better: bool = True
    scale: float = 1.0
    top: float | None = None
    floor: float | None = None
    unit: str = ""
    title: str = ""
    pooled: bool = True

    @property
    def label(self) -> str:
        """Name of the metric in tables."""
        return self.title or self.name


def infer_metric_kind(metric: EvalMetric, values: Sequence[float]) -> EvalMetric:
    """Set the kind of one of BOUNDED_METRICS to "accuracy" if all values are 0 or 1, else to "mean", and its top to 1
    if all lie between.
    """
    if metric.kind == "ppl" or not values:
        return metric
    bounded = min(values) >= 0 and max(values) <= 1 and metric.name.split(",")[0] in BOUNDED_METRICS
    counted = bounded and all(value in (0.0, 1.0) for value in values)
    return replace(metric, kind="accuracy" if counted else "mean", top=1.0 if bounded else metric.top)


@dataclass(frozen=True)
class Sample:
    """One measured question, document or window.

    Attributes:
        group: values that results are tabulated by, e.g. {"length": 1024, "depth": 0.5}.
        weight: weight in a mean, e.g. the number of tokens.
        unit: key of the bootstrap unit, e.g. the document that several samples come from; None: the sample is its own
            unit.
        shown: prompt, output, target and the like, written to samples.jsonl.
    """

    task: str
    id: str
    metrics: Mapping[str, float]
    group: Mapping[str, float | int | str] = field(default_factory=dict)
    weight: float = 1.0
    unit: str | None = None
    shown: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as JSON data."""
        return asdict(self)


@dataclass
class SuiteResult:
    """Result of one suite for one model.

    Attributes:
        metrics: metrics by name; the first is the suite's main metric.
        floors: task -> metric -> value that guessing reaches.
        arrays: tensors that plots need, e.g. losses by position.
        notes: warnings for the reader.
        broken: tasks that could not be measured -> reason.
        info: further JSON data, e.g. lm-eval's own results.
        seconds: wall time of the measurement.
        reads: data that was read -> content digest or version (eval/results/data_read.py).
        provenance: versions, device, date and command of the measurement.
    """

    samples: list[Sample]
    metrics: dict[str, EvalMetric]
    floors: dict[str, dict[str, float]] = field(default_factory=dict)
    arrays: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    reads: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """A named measurement.

    Attributes:
        run: measures one model; None for a suite with `run_against`.
        combine: computes samples that need both results, e.g. an encoder's cosine similarity to the original.
        run_pair: measures both models alternately while both are loaded, e.g. for timings.
        run_against: measures how the converted model differs from the base, e.g. by the divergence of their
            predictions. It is called with functions that load each for the duration of a context, so that the two need
            not fit in memory together, the converted model's tokenizer, and the options. The result belongs to the
            converted model; the base has none.
        plot: plot(results, folder, base=..) writes figures for {model: result} into a folder and returns their paths;
            base: which model is the base, or None. Without it: curves by length and heat maps by length and depth,
            where samples have these groups.
        averages: declares averages over the suite's tasks, given the lengths of its samples (eval/averages.py).
        tasks: returns the names of the tasks that the options select, as --samples and --data have them; raises
            SurgeryError if --tasks names a task that the suite does not have. Called before a model is loaded. None:
            the names are known only from the samples.
        version: raised whenever the same options give other prompts or scores, so that results are not mixed.
    """

    name: str
    description: str
    run: Callable[[EvalModel, EvalOptions], SuiteResult] | None
    combine: Callable[[SuiteResult, SuiteResult], SuiteResult] | None = None
    run_pair: Callable[[list[EvalModel], EvalOptions], list[SuiteResult]] | None = None
    run_against: Callable[[ModelLoader, ModelLoader, Any, EvalOptions], SuiteResult] | None = None
    plot: Callable[..., list[Path]] | None = None
    averages: Callable[[Sequence[int | None]], SuiteAverages] | None = None
    tasks: Callable[[EvalOptions], Sequence[str]] | None = None
    version: int = 1

    @property
    def compares_two(self) -> bool:
        """Whether the suite measures nothing without a base."""
        return self.combine is not None or self.run_against is not None


def no_tasks(options: EvalOptions) -> Sequence[str]:
    """Return the tasks of a suite that measures one thing: it has none to select, and takes neither --samples nor
    --data.
    """
    return ()


def select_tasks(suite: str, options: EvalOptions, usual: Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    """Return --tasks, or the usual ones; raise SurgeryError if one is not among `known`."""
    names = tuple(options.tasks or usual)
    if unknown := [name for name in names if name not in known]:
        raise SurgeryError(f"--suite {suite} has no task {unknown[0]!r}{suggestion(unknown[0], known)}")
    return names


def check_task_names(suites: Sequence[Suite], options: EvalOptions) -> None:
    """Raise SurgeryError, before a model is loaded, if --tasks, --samples or --data names a task that the suites do not
    have.

    Names in --samples and --data cannot be checked here beside a suite that does not declare its tasks.
    """
    declared = [suite.tasks(options) for suite in suites if suite.tasks is not None]
    if len(declared) < len(suites):
        return
    known = list(dict.fromkeys(name for names in declared for name in names))
    named = [("--tasks", name) for name in options.tasks] if not known else []
    named += [("--samples", name) for name in options.samples]
    named += [("--data", name) for name in options.data if name != ANY_TASK]
    for option, name in named:
        if not known:
            chosen = ", ".join(suite.name for suite in suites)
            raise SurgeryError(
                f"{option} {name}: {chosen} has no tasks to choose from. Leave it out, or give a --suite with tasks."
            )
        if (
            name not in known and re.sub(r"_\d+$", "", name) not in known
        ):  # some tasks have their length behind the name
            raise SurgeryError(f"{option}: no task {name!r} is measured{suggestion(name, known)}")


SUITES: dict[str, Suite] = {}
# Functions name -> Suite for names that are not in SUITES (any lm-eval task); None if the name is unknown.
FALLBACKS: list[Callable[[str], Suite | None]] = []


def register(suite: Suite) -> Suite:
    """Add a suite to SUITES and return it."""
    SUITES[suite.name] = suite
    return suite


def load_suites() -> dict[str, Suite]:
    """Import every module of eval/suites/ and return SUITES."""
    package = importlib.import_module("surgery.eval.suites")
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{info.name}")
    return SUITES


def find_suite(name: str) -> Suite:
    """Return the suite of that name, or one made by FALLBACKS (any lm-eval task).

    Raises SurgeryError with the nearest known name if there is no such suite.
    """
    known = load_suites()
    if name in known:
        return known[name]
    # A misspelt name of our own suites is reported at once: lm-eval takes seconds to index its tasks.
    slip = "_" not in name and difflib.get_close_matches(name, known, cutoff=0.8)
    for find_fallback in [] if slip else FALLBACKS:
        if (fallback := find_fallback(name)) is not None:
            return fallback
    raise SurgeryError(f"unknown suite {name!r}{suggestion(name, known)}")


def stable_id(*parts: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a sample's content; the same on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]
