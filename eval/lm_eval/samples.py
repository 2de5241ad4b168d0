"""Convert lm-eval's logged samples to Sample and EvalMetric."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from surgery.eval.lm_eval.tasks import OwnTask
from surgery.eval.suite import EvalMetric, Sample, infer_metric_kind, stable_id


def make_own_sample(task: OwnTask, metric: str, logged: dict[str, Any]) -> Sample:
    """Return the sample of a logged document of an OwnTask."""
    doc = logged["doc"]
    group = {key: doc[key] for key in ("length", "depth", "words") if doc.get(key) is not None}
    return Sample(
        task=doc.get("task") or task.name,
        id=doc["id"],
        metrics={metric: float(logged["score"])},
        group=group,
        shown={
            "prompt": doc["prompt"] + doc["prefix"],
            "output": logged["resps"][0][0],
            "target": doc["answers"],
            "doc_hash": logged["doc_hash"],
        },
    )


def make_samples(task: Any, logged: list[dict[str, Any]]) -> tuple[list[Sample], dict[str, EvalMetric], set[str]]:
    """Return (samples, metrics, names of metrics left out) of a task.

    Each document gives one sample, filters becoming separate metrics. Perplexities get samples of their own, because
    their weights differ.
    """
    name, better, aggregation = task.config.task, task.higher_is_better(), task.aggregation()
    values: dict[str, list[float]] = {}
    skipped: set[str] = set()
    samples: dict[int, Sample] = {}
    weighted: list[Sample] = []
    metrics: dict[str, EvalMetric] = {}
    ids = _sample_ids(name, logged)
    for entry in logged:
        sample = samples.setdefault(
            entry["doc_id"], Sample(name, ids[entry["doc_id"]], {}, shown=_logged_fields(entry))
        )
        for metric in entry["metrics"]:
            how = getattr(aggregation.get(metric), "__name__", "")
            label = metric if entry["filter"] == "none" else f"{metric},{entry['filter']}"
            value = entry[metric]
            if how in ("weighted_perplexity", "bits_per_byte"):
                if metric != "word_perplexity":
                    continue  # the same likelihoods per byte remain in lm-eval's own results
                nats, weight = -value[0] / value[1], float(value[1])
                metrics[label] = EvalMetric(label, "ppl", False)
                weighted.append(Sample(name, sample.id, {label: nats}, weight=weight, shown=sample.shown))
            elif how == "perplexity":
                metrics[label] = EvalMetric(label, "ppl", False)
                sample.metrics[label] = -float(value)
            elif _is_mean(aggregation.get(metric)) and isinstance(value, (int, float)):
                metrics.setdefault(label, EvalMetric(label, "mean", better.get(metric, True)))
                sample.metrics[label] = float(value)
                values.setdefault(label, []).append(float(value))
            else:
                skipped.add(metric)
    kinds = {
        label: infer_metric_kind(metric, values.get(label, []))
        for label, metric in metrics.items()
        if metric.name == label
    }
    scored = [s for s in samples.values() if s.metrics] + weighted
    known = {label for sample in scored for label in sample.metrics}
    return scored, {label: metric for label, metric in kinds.items() if label in known}, skipped


def _sample_ids(task: str, logged: list[dict[str, Any]]) -> dict[int, str]:
    """Return ids by document content, equal for both models; repeated documents are numbered."""
    seen: Counter[str] = Counter()
    ids: dict[int, str] = {}
    for entry in logged:
        if entry["doc_id"] not in ids:
            ids[entry["doc_id"]] = stable_id(task, entry["doc_hash"], seen[entry["doc_hash"]])
            seen[entry["doc_hash"]] += 1
    return ids


def _logged_fields(logged: dict[str, Any]) -> dict[str, Any]:
    keys = ("doc_id", "doc", "arguments", "filtered_resps", "target", "doc_hash", "prompt_hash", "target_hash")
    return {key: logged[key] for key in keys}


def chance_score(task: Any, logged: list[dict[str, Any]]) -> float | None:
    """Return what guessing among the choices scores; None if the task has no choices."""
    if task.OUTPUT_TYPE != "multiple_choice" or not logged:
        return None
    return sum(1 / max(1, len(entry["arguments"])) for entry in logged) / len(logged)


def fill_stderrs(results: dict[str, Any], tasks: list[Any]) -> None:
    """Add standard errors of means, in closed form, where lm-eval left them out."""
    for task in tasks:
        name, aggregation = task.config.task, task.aggregation()
        values: dict[str, list[float]] = {}
        for entry in results["samples"][name]:
            for metric in entry["metrics"]:
                if _is_mean(aggregation.get(metric)) and isinstance(entry[metric], (int, float)):
                    values.setdefault(f"{metric}_stderr,{entry['filter']}", []).append(float(entry[metric]))
        for key, entry in values.items():
            if results["results"][name].get(key) == "N/A" and len(entry) > 1:
                results["results"][name][key] = statistics.stdev(entry) / len(entry) ** 0.5


def _is_mean(function: Any) -> bool:
    return getattr(function, "__name__", "") in ("mean", "nanmean", "aggregate_metrics")


def to_json_value(value: Any) -> Any:
    """Return the value as JSON data; other types become text."""
    if isinstance(value, dict):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else str(value)
