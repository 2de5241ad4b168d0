"""Interfaces of the evaluation: EvalModel, EvalOptions, Sample, EvalMetric, SuiteResult, Suite, and the registry SUITES.

    suite.run(eval_model, options) -> SuiteResult      register(suite) adds the suite to SUITES

A suite measures one loaded model and returns samples; each sample has one value per metric. A sample is one question,
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from surgery.core.config import Length, fields_at_default
from surgery.core.digests import content_digest
from surgery.core.errors import SurgeryError, suggestion

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
ANY_TASK = "*"  # key of a folder with TASK.jsonl in EvalOptions.data
OMITTED_AT_DEFAULT = ("prompts", "fill", "pairs", "data")  # see EvalOptions.digest


@dataclass
class EvalModel:
    """A loaded model under evaluation.

    Attributes:
        folder: local folder of the checkpoint.
        fingerprint: digest of the checkpoint's files.
        longest: longest input in tokens that the config declares (`max_position_embeddings`); None if unbounded.
        ranks: the processes that share the samples.
        progress: receiver of progress bars and messages.
        journal: finished samples of the suite that is running; None: nothing is written, so an interrupted suite begins again.
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


class EvalOptions(BaseModel):
    """Options of an evaluation. None or empty means the suite's default. Frozen, because stored results are keyed by it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str | None = Field(None, description="text file or Hub data set, for suites that read text")
    tokens: int = Field(65536, ge=16, description="maximum number of tokens of the text")
    length: int = Field(1024, ge=8, description="tokens per window of the text")
    limit: int | None = Field(None, ge=1, description="maximum number of samples per task, length and depth")
    lengths: tuple[Annotated[Length, Field(ge=8)], ...] = Field(
        (), description="sample lengths in tokens, for suites that measure several"
    )
    depths: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (), description="needle positions in the context, 0 (start) to 1 (end)"
    )
    tasks: tuple[str, ...] = Field((), description="run only these tasks of a suite")
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="rows per batch; does not change results"
    )
    seed: int = Field(0, ge=0)
    data_root: Path | None = Field(None, description="folder of locally mirrored data sets")
    num_fewshot: int | None = Field(None, ge=0)
    gen_kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to generate()")
    apply_chat_template: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict, description="passed to lm-eval's tasks")
    include_path: Path | None = Field(None, description="folder with additional lm-eval task definitions")

    data: dict[str, Path] = Field(
        {}, description="files of records (JSONL) by lm-eval task; under *: a folder with TASK.jsonl"
    )
    samples: dict[str, tuple[int, ...]] = Field(
        default_factory=dict, description="document indices to run, by lm-eval task"
    )
    use_cache: Path | None = Field(None, description="folder in which answers are cached as they are computed")
    prompts: Literal["based", "jrt"] = Field(
        "based",
        description="prompts and truncation of the retrieval tasks: this package's, or those of the Just-Read-Twice harness",
    )
    fill: Literal["exact", "ruler"] = Field(
        "exact",
        description="length of RULER's prompts: the exact number of tokens, or whole units of text as the original counts them",
    )
    pairs: tuple[Annotated[int, Field(ge=1)], ...] | Literal["zoology", "based", "log-linear"] = Field(
        (), description="key-value pairs of mqar, or the lengths and pairs of a paper"
    )

    def find_records(self, task: str) -> Path | None:
        """Return the file with local records of an lm-eval task: its own, or TASK.jsonl in the folder; None if there is none."""
        if task in self.data:
            return self.data[task]
        folder = self.data.get(ANY_TASK)
        path = folder / f"{task}.jsonl" if folder is not None and Path(task).name == task else None
        return path if path is not None and path.is_file() else None

    def digest(self) -> str:
        """Return the SHA-256 of every option that affects results.

        Options of OMITTED_AT_DEFAULT enter only if they are set, so that results of versions without them stay valid. Files enter by content. The mirror enters as present or absent only: the data sets that a suite reads from it are
        recorded per result (eval/results/data_read.py).
        """
        unset = fields_at_default(self, OMITTED_AT_DEFAULT)
        data = self.model_dump(mode="json", exclude={"batch_size", "use_cache", "data_root", *unset})
        for task, path in self.data.items():
            data["data"][task] = content_digest(path) if path.exists() else str(path)
        data["mirror"] = self.data_root is not None
        for name in ("text", "include_path"):
            if data[name] is not None and Path(data[name]).exists():
                data[name] = content_digest(Path(data[name]))
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class EvalMetric:
    """How a metric is aggregated and displayed.

    Attributes:
        kind: "mean" (weighted mean), "accuracy" (mean of zeros and ones, compared by McNemar's test) or "ppl" (exp of the
            weighted mean of nats).
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
    """Set the kind of one of BOUNDED_METRICS to "accuracy" if all values are 0 or 1, else to "mean", and its top to 1 if all lie between."""
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
        unit: key of the bootstrap unit, e.g. the document that several samples come from; None: the sample is its own unit.
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
        run: measures one model.
        combine: computes samples that need both results, e.g. an encoder's cosine similarity to the original.
        run_pair: measures both models alternately while both are loaded, e.g. for timings.
        plot: plot(results, folder, base=..) writes figures for {model: result} into a folder and returns their paths; base: which model
            is the base, or None. Without it: curves by length and heat maps by length and depth, where samples have these groups.
        averages: declares averages over the suite's tasks, given the lengths of its samples (eval/averages.py).
        version: raised whenever the same options give other prompts or scores, so that results are not mixed.
    """

    name: str
    description: str
    run: Callable[[EvalModel, EvalOptions], SuiteResult]
    combine: Callable[[SuiteResult, SuiteResult], SuiteResult] | None = None
    run_pair: Callable[[list[EvalModel], EvalOptions], list[SuiteResult]] | None = None
    plot: Callable[..., list[Path]] | None = None
    averages: Callable[[Sequence[int | None]], SuiteAverages] | None = None
    version: int = 1


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
