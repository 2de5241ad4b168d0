"""What an evaluation is made of: a loaded model is measured by suites, a suite gives samples, samples have metrics.

    suite.run(eval_model, options) -> SuiteResult      register(suite) puts it into SUITES

A sample is one question, document or window; its `id` says which, the same for every model, so that base and
converted can be paired. Statistics, tables and files are not a suite's business: compare.py, shown.py, eval/results/store.py.
A new suite is one file in suites/.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from surgery.core.digests import content_digest
from surgery.core.errors import SurgeryError, suggestion

if TYPE_CHECKING:  # torch comes when something is measured
    import torch
    from torch import Tensor

    from surgery.core.distributed import DistContext
    from surgery.core.progress import Progress

Role = Literal["base", "converted"]


@dataclass
class EvalModel:
    """A loaded model. folder: where its files lie; longest: the longest input it was made for, None: unbounded;
    ranks: the processes that share the work; progress: where bars go."""

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


class EvalOptions(BaseModel):
    """How to measure. None or empty: what the suite does by itself. Frozen, for results are kept by it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str | None = Field(None, description="a file or a Hub data set; suites that read text")
    tokens: int = Field(65536, ge=16, description="of the text, at most")
    length: int = Field(1024, ge=8, description="tokens of a window of the text")
    limit: int | None = Field(None, ge=1, description="samples of every task and length (and depth), at most")
    lengths: tuple[Annotated[int, Field(ge=8)], ...] = Field(
        (), description="tokens of a sample, for suites that have several"
    )
    depths: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field((), description="0 to 1: where a needle lies")
    tasks: tuple[str, ...] = Field((), description="of a suite, these only")
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="rows at a time; does not change results"
    )
    seed: int = Field(0, ge=0)
    data_root: Path | None = Field(None, description="a local mirror of data sets")
    num_fewshot: int | None = Field(None, ge=0)
    gen_kwargs: dict[str, Any] = Field(default_factory=dict, description="passed to generate()")
    apply_chat_template: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict, description="passed to lm-eval's tasks")
    include_path: Path | None = Field(None, description="a folder of lm-eval tasks of one's own")

    samples: dict[str, tuple[int, ...]] = Field(
        default_factory=dict, description="of tasks of lm-eval, these documents"
    )
    use_cache: Path | None = Field(None, description="a folder for answers, kept as they come")

    def digest(self) -> str:
        """SHA-256 of every option that results depend on; files by their contents, a mirror by what a suite reads of it (eval/results/data_read.py)."""
        said = self.model_dump(mode="json", exclude={"batch_size", "use_cache", "data_root"})
        said["mirror"] = self.data_root is not None
        for name in ("text", "include_path"):
            if said[name] is not None and Path(said[name]).exists():
                said[name] = content_digest(Path(said[name]))
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class EvalMetric:
    """kind mean: weighted mean; accuracy: of zeros and ones (McNemar); ppl: exp of the weighted mean of nats.
    scale: what is shown is scale x the value; top: its largest value before that, None: unbounded (losses);
    floor: what guessing scores, before scale; `floors` of a result says it where tasks differ; title: what tables call
    it, where that is not the name ("perplexity" of a sample's "nll"); pooled: whether a mean over groups says anything
    (one of milliseconds at several lengths does not)."""

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
        return self.title or self.name


@dataclass(frozen=True)
class Sample:
    """One thing asked. group: {"length": 1024, "depth": 0.5}; weight: tokens, where a mean is weighted;
    unit: what is drawn as one in the bootstrap (a document that several samples come from), None: the id;
    shown: prompt, output, target and the like, for samples.jsonl."""

    task: str
    id: str
    metrics: Mapping[str, float]
    group: Mapping[str, float | int | str] = field(default_factory=dict)
    weight: float = 1.0
    unit: str | None = None
    shown: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class SuiteResult:
    """metrics: by name, the first is the one that speaks for the suite; floors: task -> metric -> what guessing scores;
    arrays: what plots need and samples are too coarse for; notes: warnings for people; broken: tasks that could not
    be measured, and why; info: any JSON, e.g. lm-eval's own results; reads: the data that was read, by content (eval/results/data_read.py);
    provenance: versions, device, date and command of the measurement."""

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
    """combine: samples that only both results together give (an encoder's cosine); run_pair: measures
    both while both are loaded, turn by turn, as times want it; plot: writes pictures into a folder, of
    {role: result}, and returns their paths; None: curves by length, heat maps by length and depth, where samples have those."""

    name: str
    description: str
    run: Callable[[EvalModel, EvalOptions], SuiteResult]
    combine: Callable[[SuiteResult, SuiteResult], SuiteResult] | None = None
    run_pair: Callable[[list[EvalModel], EvalOptions], list[SuiteResult]] | None = None
    plot: Callable[[Mapping[str, SuiteResult], Path], list[Path]] | None = None


SUITES: dict[str, Suite] = {}
# name -> suite, for names that are not in SUITES (any lm-eval task); None where it does not know the name.
FALLBACKS: list[Callable[[str], Suite | None]] = []


def register(suite: Suite) -> Suite:
    SUITES[suite.name] = suite
    return suite


def load_suites() -> dict[str, Suite]:
    """SUITES, filled: every file of suites/."""
    package = importlib.import_module("surgery.eval.suites")
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{info.name}")
    return SUITES


def find_suite(name: str) -> Suite:
    known = load_suites()
    if name in known:
        return known[name]
    # A slip of a name of ours is told at once: lm-eval takes seconds to know its thousands of tasks.
    slip = "_" not in name and difflib.get_close_matches(name, known, cutoff=0.8)
    for find_fallback in [] if slip else FALLBACKS:
        if (found := find_fallback(name)) is not None:
            return found
    raise SurgeryError(f"unknown suite {name!r}{suggestion(name, known)}")


def stable_id(*parts: Any) -> str:
    """Sixteen hex digits of a sample's content: the same on every machine."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]
