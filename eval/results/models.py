"""Compare many models whose results were measured before: `surgery compare`.

For every suite one model is the reference: the base if it has the suite, else the first model that has. A result is
compared with it only if both were measured alike: same version of the suite, options, data and samples; timings also on
the same device. Otherwise the result is refused, and a sentence says why. Other differences (versions of packages,
precision, device) are remarks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from surgery.core.errors import SurgeryError, suggestion
from surgery.core.tables import command_line
from surgery.eval.results.averages import AverageRow, average_rows
from surgery.eval.results.compare import ComparisonRow, compare_results, sample_keys
from surgery.eval.results.folders import StoredModel, StoredSuite, base_of_folder, named_base, read_models
from surgery.eval.results.fronts import SharedFront, shared_fronts
from surgery.eval.results.pareto import CostPoint, ParetoChart, pareto_front
from surgery.eval.results.statistics import Z_95, Interval
from surgery.eval.suite import BOUNDED_METRICS, SUITES, EvalMetric, SuiteResult, load_suites
from surgery.publish.figures import SIZES

REMARKED = ("surgery", "torch", "transformers", "lm_eval", "datasets")  # packages whose other versions are remarked
COSTS = {"prefill_ms": "prefill, ms", "decode_ms": "decode, ms a token"}  # metrics of `speed`
MAX_NOTE = 500  # characters of a remark in a results folder


@dataclass
class ModelRow:
    """A row of the comparison of many models.

    Attributes:
        values, errors, intervals: value, standard error and, for accuracies, Wilson's interval by model, scaled.
        differences, ratios, p: against the base, by model, as in ComparisonRow.
    """

    suite: str
    task: str
    metric: EvalMetric
    group: dict[str, Any]
    samples: int
    units: int
    values: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float | None] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    differences: dict[str, Interval] = field(default_factory=dict)
    ratios: dict[str, Interval] = field(default_factory=dict)
    p: dict[str, float] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)

    @property
    def is_summary(self) -> bool:
        """Whether the row summarizes its task."""
        return not self.group if self.metric.pooled else len(self.group) == 1

    @property
    def label(self) -> str:
        """Name of the row in tables."""
        where = "".join(f", {name} {value}" for name, value in self.group.items())
        return f"{self.task}{where}, {self.metric.label}" + (f" ({self.metric.unit})" if self.metric.unit else "")

    def range_of(self, model: str) -> tuple[float, float] | None:
        """Return the 95% interval of a model's value: Wilson's, else 1.96 standard errors around it."""
        if model in self.intervals:
            return self.intervals[model]
        error, value = self.errors.get(model), self.values[model]
        return None if error is None else (value - Z_95 * error, value + Z_95 * error)


@dataclass
class ModelComparison:
    """Result of `compare_folders`.

    Attributes:
        models: in the order of the tables; the base is the first.
        base: its name; None: no differences.
        fronts: of surgery search, with the points that models were converted from.
        results: suite -> model -> result, of those that are compared.
        refused: results that are damaged or not comparable, one sentence each.
        notes: remarks.
    """

    models: list[StoredModel]
    base: str | None
    rows: list[ModelRow] = field(default_factory=list)
    averages: list[AverageRow] = field(default_factory=list)
    charts: list[ParetoChart] = field(default_factory=list)
    fronts: list[SharedFront] = field(default_factory=list)
    results: dict[str, dict[str, SuiteResult]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[Path] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0, or 2 if a result was refused."""
        return 2 if self.refused else 0

    @property
    def names(self) -> list[str]:
        """Names of the models."""
        return [model.name for model in self.models]

    def main_metric(self, suite: str) -> EvalMetric:
        """Return the first metric of a suite."""
        return next(row.metric for row in self.rows if row.suite == suite)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of comparison.json."""
        return {
            "models": [model.to_dict() for model in self.models],
            "base": self.base,
            "rows": [asdict(row) for row in self.rows],
            "averages": [row.to_dict() for row in self.averages],
            "charts": [asdict(chart) for chart in self.charts],
            "fronts": [front.to_dict() for front in self.fronts],
            "refused": self.refused,
            "notes": self.notes,
            "plots": [path.name for path in self.plots],
        }


def compare_folders(
    folders: Sequence[Path], base: Path | None = None, *, quality: str | None = None, seed: int = 0
) -> ModelComparison:
    """Compare the models in folders of `surgery eval --out`.

    Args:
        folders: results folders, or folders of single models in them.
        base: folder of the model that the others are compared with; None: the base that all results name, if there is
            one.
        quality: task, suite or average that the Pareto charts show; None: perplexity if measured, else the first
            average or task.
        seed: of the bootstrap.

    Damaged results are left out and named in `refused`. Raises SurgeryError for fewer than two models, or models
    without a suite in common.
    """
    load_suites()
    models, damaged = read_models([*([base] if base is not None else []), *folders])
    if len(models) < 2:
        raise SurgeryError(
            f"{', '.join(map(str, folders))}: a comparison needs two models (got {len(models)}). Give the folders of "
            "others." + "".join(f" {why}" for why in damaged)
        )
    if base is not None:
        base_fingerprint: str | None = base_of_folder(base)
    else:
        base_fingerprint, unread = named_base(folders)
        damaged = [*damaged, *unread]
    return compare_models(models, base_fingerprint, quality=quality, seed=seed, damaged=damaged)


def compare_models(
    stored: Sequence[StoredModel],
    base_fingerprint: str | None,
    *,
    quality: str | None = None,
    seed: int = 0,
    damaged: Sequence[str] = (),
) -> ModelComparison:
    """Compare models whose results were read.

    base_fingerprint: of the base, None without one. damaged: results that were left out, and why.
    """
    first = next((model for model in stored if model.fingerprint == base_fingerprint), None)
    models = [*([first] if first else []), *(model for model in stored if model is not first)]
    done = ModelComparison(models, first.name if first else None, refused=list(damaged))
    for suite in dict.fromkeys(suite for model in models for suite in model.suites):
        try:
            _compare_suite(done, suite, seed)
        except SurgeryError as error:  # results that are whole, but contradict each other
            done.refused.append(f"{suite} is left out: {error}")
    if not done.rows:
        raise SurgeryError(
            f"the models have no results in common that can be compared. {'; '.join(done.refused)}".strip()
        )
    done.charts = _charts(done, quality)
    done.fronts = shared_fronts(models, done.rows)
    done.notes += _reproduction_notes(models)
    return done


def _compare_suite(done: ModelComparison, suite: str, seed: int) -> None:
    """Add the rows, averages, refusals and remarks of one suite."""
    owners = [model for model in done.models if suite in model.suites]
    reference, known = owners[0], SUITES.get(suite)
    against = known is not None and known.run_against is not None  # the base has no result of its own
    if missing := [m.name for m in done.models if m not in owners and not (against and m.name == done.base)]:
        done.notes.append(f"{suite} was not measured for {', '.join(missing)}")
    if len(owners) == 1 and not against:
        return
    results = {reference.name: reference.suites[suite].result}
    for model in owners[1:]:
        if why := _differences(reference.suites[suite], model.suites[suite]):
            done.refused.append(f"{suite} of {model.name} is not compared with {reference.name}: {'; '.join(why)}")
            continue
        results[model.name] = model.suites[suite].result
        remark = _remarks(reference.suites[suite], model.suites[suite])
        done.notes += [f"{suite} of {model.name}: {', '.join(remark)}"] if remark else []
    if against:
        done.rows += _merge_rows(suite, results, None, seed)
        done.notes += _result_notes(suite, results)
        return
    timed = in_turns = False
    if known is not None and known.run_pair is not None:
        results, timed = _shared_lengths(suite, results, done.notes), True
        in_turns = _took_turns([model.suites[suite] for model in owners if model.name in results])
        if not in_turns:
            done.notes.append(
                f"{suite}: no differences are given, because models of different runs were not timed alternately"
            )
    if len(results) < 2:
        return
    base = done.base if done.base in results else None
    if known is not None and known.combine is not None:
        if base is None:
            done.notes.append(f"{suite} compares with a base, which is missing: give --base")
            return
        combined = {name: known.combine(results[base], result) for name, result in results.items() if name != base}
        done.rows += _merge_rows(suite, combined, None, seed)
        return
    done.rows += _merge_rows(suite, results, None if timed and not in_turns else base, seed)
    done.results[suite] = results
    if known is not None and known.averages is not None:
        rows, notes = average_rows(suite, known.averages, results, base, seed=seed)
        done.averages += rows
        done.notes += [f"{suite}: {note}" for note in notes]
    done.notes += _result_notes(suite, results)


def _result_notes(suite: str, results: Mapping[str, SuiteResult]) -> list[str]:
    return [
        f"{suite} of {name}: {_short(note, MAX_NOTE)}"
        for name, result in results.items()
        for note in dict.fromkeys(result.notes)
    ]


def _took_turns(timed: Sequence[StoredSuite]) -> bool:
    """Return whether timings are of one run in which all these models took turns: their keys name the same models, and
    all of them.
    """
    named = timed[0].key.get("pair") if timed else None
    if not isinstance(named, list) or any(suite.key.get("pair") != named for suite in timed):
        return False
    return len(timed) > 1 and all(suite.key["fingerprint"] in named for suite in timed)


def _merge_rows(suite: str, results: Mapping[str, SuiteResult], base: str | None, seed: int) -> list[ModelRow]:
    """Return the rows of a suite: each model is compared with the base, and the columns are put together."""
    merged: dict[tuple[Any, ...], ModelRow] = {}
    for name, result in results.items():
        if name == base and len(results) > 1:
            continue
        pair = {"converted": result} if base is None else {"base": results[base], "converted": result}
        for row in compare_results(suite, pair, same=False, seed=seed, shown=results.values()):
            key = (row.task, row.metric.name, tuple(row.group.items()))
            whole = merged.setdefault(
                key, ModelRow(suite, row.task, row.metric, row.group, row.samples, row.units, flags=row.flags)
            )
            _add_column(whole, row, name, "converted")
            if base is not None:
                _add_column(whole, row, base, "base")
    return list(merged.values())


def _add_column(whole: ModelRow, row: ComparisonRow, name: str, role: str) -> None:
    whole.values[name], whole.errors[name] = row.values[role], row.errors[role]
    if role in row.intervals:
        whole.intervals[name] = row.intervals[role]
    whole.flags = list(dict.fromkeys([*whole.flags, *row.flags]))
    if role == "converted":
        for held, value in ((whole.differences, row.difference), (whole.ratios, row.ratio), (whole.p, row.p)):
            if value is not None:
                held[name] = value


# -- what can be compared ----------------------------------------------------------------------------
def _differences(a: StoredSuite, b: StoredSuite) -> list[str]:
    """Return the reasons, in words, why b cannot be compared with a; empty if it can."""
    why = []
    if a.version != b.version:
        why.append(f"version {b.version} of the suite instead of {a.version}")
    if a.key["options"] != b.key["options"]:
        why.append(_options_text(a.result.provenance.get("options"), b.result.provenance.get("options")))
    if data := _data_text(a.result.reads, b.result.reads):
        why.append(data)
    if _definitions(a.result) != _definitions(b.result) and not why:
        why.append("its metrics are defined otherwise")
    known = SUITES.get(a.key["suite"])
    if known is not None and known.run_against is not None and _against(a) != _against(b):
        why.append("measured against another original")
    if known is not None and known.run_pair is not None:
        devices = [_short(suite.result.provenance.get("device", suite.key["device"])) for suite in (a, b)]
        if devices[0] != devices[1] or a.key["dtype"] != b.key["dtype"]:
            why.append(f"timed on {devices[1]} in {b.key['dtype']} instead of {devices[0]} in {a.key['dtype']}")
    elif not why:
        ours, theirs = sample_keys(b.result), sample_keys(a.result)
        if ours != theirs:
            why.append(f"other samples ({len(ours):,} instead of {len(theirs):,}, {len(ours & theirs):,} in common)")
    return why


def _against(stored: StoredSuite) -> Any:
    """Return the fingerprint of the model that a suite with `run_against` compared with."""
    pair = stored.key.get("pair")
    return pair[0] if isinstance(pair, list) and pair else None


def _definitions(result: SuiteResult) -> dict[str, EvalMetric]:
    """Return the metrics without what is inferred from a model's scores: whether all are 0 or 1."""
    return {
        name: replace(metric, kind="mean", top=None) if name.split(",")[0] in BOUNDED_METRICS else metric
        for name, metric in result.metrics.items()
    }


def _options_text(a: Any, b: Any) -> str:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return "other options, or another text"
    words = [
        f"{name} {_short(b.get(name, 'default'))} instead of {_short(a.get(name, 'default'))}"
        for name in dict.fromkeys([*a, *b])
        if a.get(name) != b.get(name)
    ]
    return ", ".join(words) or "the files that its options name have other contents"


def _short(value: Any, most: int = 60) -> str:
    """Return a value from a file as at most `most` printable characters."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split())[:most])


def _data_text(a: Mapping[str, str] | None, b: Mapping[str, str] | None) -> str:
    """Return how the data differs, in words. A file counts by its content alone, because it may have been moved."""

    def contents(reads: Mapping[str, str]) -> dict[str, str]:
        files = sorted(digest for read, digest in reads.items() if read.startswith("file:"))
        named = {read: digest for read, digest in reads.items() if not read.startswith(("file:", "package:"))}
        return named | {f"text file {i + 1}": digest for i, digest in enumerate(files)}

    if a is None or b is None:
        return "" if a is b else "it is not recorded which data it read"
    ours, theirs = contents(b), contents(a)
    return ", ".join(
        f"other content of {_short(name)} ({_short(ours.get(name, 'not read'))[:12]} instead of "
        f"{_short(theirs.get(name, 'not read'))[:12]})"
        for name in dict.fromkeys([*theirs, *ours])
        if ours.get(name) != theirs.get(name)
    )


def _remarks(a: StoredSuite, b: StoredSuite) -> list[str]:
    """Return differences that do not forbid a comparison."""
    remarks = []
    versions = [suite.result.provenance.get("versions") for suite in (a, b)]
    ours, theirs = (v if isinstance(v, dict) else {} for v in (versions[1], versions[0]))
    for package in REMARKED:
        if package in ours and package in theirs and ours[package] != theirs[package]:
            remarks.append(f"{package} {_short(ours[package])} instead of {_short(theirs[package])}")
    for name in ("dtype", "device"):
        if a.key[name] != b.key[name]:
            remarks.append(f"{name} {b.key[name]} instead of {a.key[name]}")
    return remarks


def _shared_lengths(suite: str, results: Mapping[str, SuiteResult], notes: list[str]) -> dict[str, SuiteResult]:
    """Return timings at the lengths and repeats that all models have: a long input may not fit in memory of some."""
    shared = set.intersection(*(sample_keys(result) for result in results.values()))
    cut_results = {}
    for name, result in results.items():
        samples = [s for s in result.samples if (s.task, tuple(sorted(s.group.items())), s.id) in shared]
        if len(samples) < len(result.samples):
            notes.append(
                f"{suite} of {name}: {len(result.samples) - len(samples)} samples that others lack are left out"
            )
        cut_results[name] = replace(result, samples=samples)
    return cut_results if shared else {}


def _reproduction_notes(models: Sequence[StoredModel]) -> list[str]:
    """Return the commands that measured the models, each once; the shell comment after it names its models."""
    commands: dict[str, dict[str, None]] = {}
    for model in models:
        for stored in model.suites.values():
            if line := command_line(stored.result.provenance.get("command")):
                commands.setdefault(line[:2000], {})[model.name] = None
    return [f"reproduce with: {line}  # {', '.join(names)}" for line, names in commands.items()]


# -- quality against costs ---------------------------------------------------------------------------
def _charts(done: ModelComparison, quality: str | None) -> list[ParetoChart]:
    """Return one chart for each cost that two models have: parameters, bytes, cache, and times at the longest length
    measured.
    """
    chosen = _quality(done, quality)
    if chosen is None:
        return []
    title, better, points = chosen
    costs: dict[str, dict[str, tuple[float, tuple[float, float] | None]]] = {
        label: {m.name: (float(size), None) for m in done.models if (size := m.sizes()[key])}
        for key, label in SIZES.items()
    }
    timed = [row for row in done.rows if row.suite == "speed" and row.metric.name in COSTS and len(row.group) == 1]
    for metric, label in COSTS.items():
        rows = [row for row in timed if row.metric.name == metric and "length" in row.group]
        if rows:
            row = max(rows, key=lambda r: r.group["length"])
            costs[f"{label}, at {row.group['length']:,} tokens"] = {
                m: (v, row.range_of(m)) for m, v in row.values.items()
            }
    charts = []
    for label, by_model in costs.items():
        held = {
            name: CostPoint(by_model[name][0], by_model[name][1], value, interval)
            for name, (value, interval) in points.items()
            if name in by_model
        }
        if len(held) > 1:
            charts.append(ParetoChart(label, title, better, held, pareto_front(held, better)))
    return charts


def _quality(
    done: ModelComparison, name: str | None
) -> tuple[str, bool, dict[str, tuple[float, tuple[float, float] | None]]] | None:
    """Return (title, whether higher is better, value and interval by model) of the measure of quality.

    With a base the values are paired: the ratio to the base for perplexities, else the difference from it.
    """
    rows = [row for row in done.rows if row.is_summary and row.suite != "speed" and not row.group]
    averages = [row for row in done.averages if row.unit != "tokens" and not row.missing]
    if name is not None:
        rows = [row for row in rows if name in (row.suite, row.task, f"{row.task}:{row.metric.name}", row.label)]
        averages = [row for row in averages if name in (row.name, row.label)]
        if not rows and not averages:
            names = [row.task for row in done.rows if row.is_summary] + [row.label for row in done.averages]
            raise SurgeryError(f"--quality: nothing is called {name!r}{suggestion(name, names)}")
    perplexities = [row for row in rows if row.metric.kind == "ppl"]
    if (name is None and not perplexities and averages) or (name is not None and not rows):
        best = averages[0]
        title = f"{best.suite}, {best.label}"
        values = {m: (v, best.intervals[m]) for m, v in best.values.items()}
        return _paired(title, True, best.differences, done.base, "difference from", 0.0) or (title, True, values)
    for row in perplexities or rows:
        better, is_ratio = row.metric.higher_is_better, row.metric.kind == "ppl"
        changes, how, none = (row.ratios, "ratio to", 1.0) if is_ratio else (row.differences, "difference from", 0.0)
        values = {m: (v, row.range_of(m)) for m, v in row.values.items()}
        return _paired(row.label, better, changes, done.base, how, none) or (row.label, better, values)
    return None


def _paired(
    label: str, better: bool, changes: Mapping[str, Interval], base: str | None, how: str, none: float
) -> tuple[str, bool, dict[str, tuple[float, tuple[float, float] | None]]] | None:
    """Return the measure of quality as changes against the base, which has no change, `none`; None without changes."""
    if base is None or not changes:
        return None
    values: dict[str, tuple[float, tuple[float, float] | None]] = {base: (none, None)}
    for name, change in changes.items():
        ends = None if change.low is None or change.high is None else (change.low, change.high)
        values[name] = change.change, ends
    return f"{label}, {how} {base}", better, values
