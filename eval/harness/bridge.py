"""The one bridge to lm-eval: its `evaluate` around a loaded model, its results as samples.

`simple_evaluate` is that with a report on the machine before it, which takes seconds every time; seeds and settings are
given to the tasks here as it does.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from surgery.errors import SurgeryError
from surgery.eval.harness import mirror
from surgery.eval.harness.lm import harness_model
from surgery.eval.harness.tasks import OwnTask
from surgery.eval.suites import EvalOptions, Metric, Sample, Subject, SuiteResult, stable_id

FEWSHOT_SEED = 1234  # lm-eval's, for --seed 0
OF_ONE = {
    "acc",
    "acc_norm",
    "acc_mutual_info",
    "exact_match",
    "em",
    "contains",
    "score",
}  # accuracies where all are 0 or 1


def require_lm_eval() -> None:
    try:
        with _quiet():
            import lm_eval.evaluator  # noqa: F401
    except ImportError as error:
        raise SurgeryError(
            f"this suite needs lm-eval ({error}): pip install 'transformer-surgery[eval]', or 'lm_eval[hf,ruler,longbench]'"
        ) from None


def run_own(
    subject: Subject, tasks: Sequence[OwnTask], options: EvalOptions, metric: Metric, longest: int | None = None
) -> SuiteResult:
    """Tasks of ours; samples are grouped by the docs' length and depth. longest: the longest of the prompts, in tokens."""
    require_lm_eval()
    result = SuiteResult([], {metric.name: metric})
    for chat in (True, False):
        chosen = [task for task in tasks if (task.chat and options.apply_chat_template) == chat]
        if not chosen:
            continue
        with _quiet():
            built = [task.for_lm_eval() for task in chosen]
            found = _evaluate(harness_model(subject, options, longest), built, options, chat)
        for task in chosen:
            result.samples += [_own_sample(task, metric.name, each) for each in found["samples"][task.name]]
        result.info = _merged(result.info, {key: value for key, value in found.items() if key != "samples"})
    result.metrics = {metric.name: _kind(metric, [s.metrics[metric.name] for s in result.samples])}
    return result


def run_tasks(subject: Subject, names: Sequence[str], options: EvalOptions, load: Any) -> SuiteResult:
    """lm-eval's own tasks, by name. load(names, options): {tasks: .., groups: ..}; all metrics that are means, or perplexities."""
    require_lm_eval()
    with _quiet():
        loaded = load(names, options)
        built = list(loaded["tasks"].values())
        chat = options.apply_chat_template
        found = _evaluate(harness_model(subject, options), built, options, chat, loaded["groups"])
    result = SuiteResult([], {}, info={key: value for key, value in found.items() if key != "samples"})
    left_out: set[str] = set()
    for task in built:
        name = task.config.task
        samples, metrics, skipped = _samples(task, found["samples"][name])
        result.samples += samples
        left_out |= skipped
        for each in metrics.values():
            known = result.metrics.setdefault(each.name, each)
            if known.kind != each.kind:
                result.metrics[each.name] = known if known.kind == "mean" else each
        if floor := _floor(task, found["samples"][name]):
            result.floors[name] = {metric: floor for metric in metrics if metric in ("acc", "acc_norm")}
    if left_out:
        result.notes.append(f"not compared, for they are no means over samples: {', '.join(sorted(left_out))}")
    return result


def _evaluate(
    lm: Any, tasks: list[Any], options: EvalOptions, chat: bool, groups: dict[str, Any] | None = None
) -> dict[str, Any]:
    import random

    import numpy as np
    import torch
    from lm_eval.evaluator import evaluate

    random.seed(options.seed)
    np.random.seed(FEWSHOT_SEED + options.seed)
    torch.manual_seed(FEWSHOT_SEED + options.seed)
    for task in tasks:
        _configure(task, options)
    wanted = _wanted(tasks, options)
    found = evaluate(
        lm,
        {"tasks": {task.config.task: task for task in tasks}, "groups": groups or {}},
        limit=None if wanted else options.limit,
        samples=wanted or None,
        bootstrap_iters=0,  # intervals are ours
        log_samples=True,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )
    _stderrs(found, tasks)
    found["config"] = {
        "model": lm.subject.name,
        "model_source": "surgery",
        "batch_size": options.batch_size,
        "device": str(lm.subject.device),
        "limit": options.limit,
        "gen_kwargs": options.gen_kwargs or None,
        "random_seed": options.seed,
        "numpy_seed": FEWSHOT_SEED + options.seed,
        "torch_seed": FEWSHOT_SEED + options.seed,
        "fewshot_seed": FEWSHOT_SEED + options.seed,
        "max_length": lm.max_length,
        "model_dtype": str(lm.subject.dtype),
    }
    return _plain(found)


def _wanted(tasks: list[Any], options: EvalOptions) -> dict[str, list[int]]:
    """The documents of --samples; of tasks that it does not name, the first ones, as without it."""
    wanted: dict[str, list[int]] = {}
    for task in tasks if options.samples else ():
        name, there = task.config.task, len(task.eval_docs)
        asked = sorted(set(options.samples.get(name, ()))) or list(range(min(there, options.limit or there)))
        if asked[0] < 0 or asked[-1] >= there:
            raise SurgeryError(
                f"--samples: {name} has documents 0 to {there - 1}, not {asked[0] if asked[0] < 0 else asked[-1]}"
            )
        wanted[name] = asked
    return wanted


def _stderrs(found: dict[str, Any], tasks: list[Any]) -> None:
    """Of means, in closed form, also where a perplexity stands beside them."""
    for task in tasks:
        name, aggregation = task.config.task, task.aggregation()
        values: dict[str, list[float]] = {}
        for each in found["samples"][name]:
            for metric in each["metrics"]:
                if _is_mean(aggregation.get(metric)) and isinstance(each[metric], (int, float)):
                    values.setdefault(f"{metric}_stderr,{each['filter']}", []).append(float(each[metric]))
        for key, each in values.items():
            if found["results"][name].get(key) == "N/A" and len(each) > 1:
                found["results"][name][key] = statistics.stdev(each) / len(each) ** 0.5


def _configure(task: Any, options: EvalOptions) -> None:
    """Settings given on the command line, before the task's own; as simple_evaluate applies them."""
    if options.gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config(key="generation_kwargs", value=dict(options.gen_kwargs), update=True)
    shots = task.get_config("num_fewshot")
    if shots is None:
        task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
    elif options.num_fewshot is not None and shots != 0:
        task.set_config(key="num_fewshot", value=options.num_fewshot)
    task.set_fewshot_seed(seed=FEWSHOT_SEED + options.seed)


def _own_sample(task: OwnTask, metric: str, logged: dict[str, Any]) -> Sample:
    doc = logged["doc"]
    group = {key: doc[key] for key in ("length", "depth") if doc.get(key) is not None}
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


def _samples(task: Any, logged: list[dict[str, Any]]) -> tuple[list[Sample], dict[str, Metric], set[str]]:
    """A sample for each document (filters become metrics of their own); perplexities, whose weights differ, one each."""
    name, better, aggregation = task.config.task, task.higher_is_better(), task.aggregation()
    values: dict[str, list[float]] = {}
    skipped: set[str] = set()
    samples: dict[int, Sample] = {}
    weighted: list[Sample] = []
    metrics: dict[str, Metric] = {}
    ids = _ids(name, logged)
    for each in logged:
        sample = samples.setdefault(each["doc_id"], Sample(name, ids[each["doc_id"]], {}, shown=_shown(each)))
        for metric in each["metrics"]:
            how = getattr(aggregation.get(metric), "__name__", "")
            label = metric if each["filter"] == "none" else f"{metric},{each['filter']}"
            value = each[metric]
            if how in ("weighted_perplexity", "bits_per_byte"):
                if metric != "word_perplexity":
                    continue  # the same likelihoods by bytes: in lm-eval's own results
                nats, weight = -value[0] / value[1], float(value[1])
                metrics[label] = Metric(label, "ppl", False)
                weighted.append(Sample(name, sample.id, {label: nats}, weight=weight, shown=sample.shown))
            elif how == "perplexity":
                metrics[label] = Metric(label, "ppl", False)
                sample.metrics[label] = -float(value)
            elif _is_mean(aggregation.get(metric)) and isinstance(value, (int, float)):
                metrics.setdefault(label, Metric(label, "mean", better.get(metric, True)))
                sample.metrics[label] = float(value)
                values.setdefault(label, []).append(float(value))
            else:
                skipped.add(metric)
    kinds = {label: _kind(metric, values.get(label, [])) for label, metric in metrics.items() if metric.name == label}
    found = [s for s in samples.values() if s.metrics] + weighted
    known = {label for sample in found for label in sample.metrics}
    return found, {label: metric for label, metric in kinds.items() if label in known}, skipped


def _ids(task: str, logged: list[dict[str, Any]]) -> dict[int, str]:
    """By content, so that two models' samples meet; documents that are there twice are numbered."""
    seen: Counter[str] = Counter()
    ids: dict[int, str] = {}
    for each in logged:
        if each["doc_id"] not in ids:
            ids[each["doc_id"]] = stable_id(task, each["doc_hash"], seen[each["doc_hash"]])
            seen[each["doc_hash"]] += 1
    return ids


def _shown(logged: dict[str, Any]) -> dict[str, Any]:
    keys = ("doc_id", "doc", "arguments", "filtered_resps", "target", "doc_hash", "prompt_hash", "target_hash")
    return {key: logged[key] for key in keys}


def _kind(metric: Metric, values: list[float]) -> Metric:
    """Whether zeros and ones are counted, or anything between; both are at most 1."""
    if metric.kind == "ppl" or not values:
        return metric
    bounded = min(values) >= 0 and max(values) <= 1 and metric.name.split(",")[0] in OF_ONE | {"f1"}
    counted = bounded and all(value in (0.0, 1.0) for value in values)
    return Metric(
        metric.name, "accuracy" if counted else "mean", metric.higher_is_better, metric.scale,
        1.0 if bounded else metric.top, metric.floor, metric.unit,
    )  # fmt: skip


def _floor(task: Any, logged: list[dict[str, Any]]) -> float | None:
    """What guessing among the choices gets."""
    if task.OUTPUT_TYPE != "multiple_choice" or not logged:
        return None
    return sum(1 / max(1, len(each["arguments"])) for each in logged) / len(logged)


def _is_mean(function: Any) -> bool:
    return getattr(function, "__name__", "") in ("mean", "nanmean", "aggregate_metrics")


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {**a.get(key, {}), **b[key]}
        if isinstance(b.get(key), dict) and isinstance(a.get(key, {}), dict)
        else b.get(key, a.get(key))
        for key in {**a, **b}
    }


def _plain(value: Any) -> Any:
    """As JSON has it; what it has not becomes text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else str(value)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval's advice is about flags that are not ours; stdout stays clean for --json."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr), mirror.without_bars():
            yield
    finally:
        logger.setLevel(level)
