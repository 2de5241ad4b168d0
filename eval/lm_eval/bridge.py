"""Run lm-eval's `evaluate` around a loaded model and convert its results to samples.

`simple_evaluate` would first collect a report on the machine, which takes seconds; seeds and settings are applied to
the tasks here as it applies them.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.core.project import install_command
from surgery.eval import offline_data as mirror
from surgery.eval.lm_eval.adapter import harness_model
from surgery.eval.lm_eval.samples import (
    chance_score,
    fill_stderrs,
    make_own_sample,
    make_samples,
    to_json_value,
)
from surgery.eval.lm_eval.tasks import OwnTask
from surgery.eval.suite import EvalMetric, EvalModel, EvalOptions, SuiteResult, infer_metric_kind

BOOTSTRAP_DRAWS = 1000  # of lm-eval's own standard errors of perplexities and corpus scores
FEWSHOT_SEED = 1234  # lm-eval's default; --seed is added


def require_lm_eval() -> None:
    """Raise SurgeryError if lm-eval is not installed."""
    try:
        with _silence_lm_eval():
            import lm_eval.evaluator  # noqa: F401
    except ImportError as error:
        raise SurgeryError(
            f"this suite needs lm-eval ({error}): {install_command('eval')}, or 'lm_eval[hf,ruler,longbench]'"
        ) from None


def run_own_tasks(
    eval_model: EvalModel,
    tasks: Iterable[tuple[str, Callable[[], OwnTask | None]]],
    options: EvalOptions,
    metric: EvalMetric,
    longest: int | None = None,
) -> SuiteResult:
    """Run our own generation tasks (OwnTask); a task that fails is reported and the others run.

    Args:
        tasks: name and constructor of each task. Tasks are built one at a time, because all prompts of a long RULER
            take gigabytes; a constructor that returns None leaves its task out.
        metric: the metric of their scores.
        longest: longest prompt in tokens.
    """
    require_lm_eval()
    result, error = SuiteResult([], {metric.name: metric}), None
    for name, make in tasks:
        try:
            task = make()
            if task is not None:
                _run_own_task(eval_model, task, options, metric.name, longest, result)
        except Exception as broken:
            error = broken
            result.broken[name] = error_message(broken)
            eval_model.progress.say(f"{name} failed, continuing with the other tasks: {result.broken[name]}")
    if error is not None and not result.samples:
        raise error
    result.notes += _result_notes(result.info, options, [])
    if longest is not None and eval_model.longest is not None and longest > eval_model.longest:
        result.notes.append(
            f"{eval_model.name} has a context length of {eval_model.longest:,} tokens: longer inputs are beyond its "
            "training"
        )
    result.metrics = {metric.name: infer_metric_kind(metric, [s.metrics[metric.name] for s in result.samples])}
    return result


def _run_own_task(
    eval_model: EvalModel, task: OwnTask, options: EvalOptions, metric: str, longest: int | None, result: SuiteResult
) -> None:
    with _silence_lm_eval():
        chat = task.chat and options.apply_chat_template
        output = _evaluate(harness_model(eval_model, options, longest), [task.to_lm_eval()], options, chat)
    result.samples += [make_own_sample(task, metric, entry) for entry in output["samples"][task.name]]
    result.info = _merge_results(result.info, {key: value for key, value in output.items() if key != "samples"})


def _result_notes(info: dict[str, Any], options: EvalOptions, tasks: list[Any]) -> list[str]:
    """Return notes on truncated prompts, and on tasks to which --num-fewshot does not apply."""
    cut = [f"{count:,} of {task}" for task, count in info.get("cut", {}).items()]
    lost = "middle" if info.get("keep_ends") else "beginning"
    said = [f"prompts longer than the model's input, scored without their {lost}: {', '.join(cut)}"] if cut else []
    fixed = [
        task.config.task
        for task in tasks
        if options.num_fewshot is not None and task.get_config("num_fewshot") != options.num_fewshot
    ]
    return said + (
        [f"--num-fewshot does not apply to {', '.join(fixed)}: the task itself sets 0 examples"] if fixed else []
    )


def error_message(error: Exception) -> str:
    """Return the error on one line of at most about 500 characters; the type is named unless it is a SurgeryError."""
    kind = "" if isinstance(error, SurgeryError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())[:500]}"


def run_tasks(
    eval_model: EvalModel,
    names: Sequence[str],
    options: EvalOptions,
    load: Any,
    *,
    longest: int | None = None,
    keep_ends: bool = False,
) -> SuiteResult:
    """Run lm-eval's own tasks by name. load(names, options) returns {"tasks": .., "groups": ..}.

    longest, keep_ends: how inputs are truncated, see `harness_model`. Metrics that are means or perplexities become
    samples; others are only in lm-eval's own results.
    """
    require_lm_eval()
    with _silence_lm_eval():
        loaded = load(names, options)
        built = list(loaded["tasks"].values())
        if unsafe := [task.config.task for task in built if getattr(task, "UNSAFE_CODE", False)]:
            raise SurgeryError(
                f"{unsafe[0]} executes code that the model writes, which surgery does not do. Leave it out of --tasks."
            )
        model = partial(harness_model, eval_model, options, longest, keep_ends=keep_ends)
        output, broken = _evaluate_all_or_each(model, built, options, loaded["groups"])
    result = SuiteResult([], {}, info={key: value for key, value in output.items() if key != "samples"}, broken=broken)
    left_out: set[str] = set()
    for task in built:
        name = task.config.task
        if name in broken:
            continue
        samples, metrics, skipped = make_samples(task, output["samples"][name])
        result.samples += samples
        left_out |= skipped
        for measure in metrics.values():
            known = result.metrics.setdefault(measure.name, measure)
            if known.kind != measure.kind:
                result.metrics[measure.name] = known if known.kind == "mean" else measure
        if floor := chance_score(task, output["samples"][name]):
            result.floors[name] = {metric: floor for metric in metrics if metric in ("acc", "acc_norm")}
    result.notes += _result_notes(result.info, options, built)
    if left_out:
        result.notes.append(
            f"not compared, because these metrics are not means over samples: {', '.join(sorted(left_out))}"
        )
    return result


def _evaluate_all_or_each(
    model: Callable[[], Any], tasks: list[Any], options: EvalOptions, groups: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (results, failures): all tasks together or, if that fails, one after the other without groups.

    model: returns a new harness_model.
    """
    chat = options.apply_chat_template
    broken: dict[str, str] = {}
    output: dict[str, Any] = {}
    try:
        return _evaluate(model(), tasks, options, chat, groups), {}
    except Exception as error:
        if len(tasks) == 1:
            raise
        last = error
    for task in tasks:
        lm = model()
        try:
            output = _merge_results(output, _evaluate(lm, [task], options, chat))
        except Exception as error:
            last, broken[task.config.task] = error, error_message(error)
            lm.eval_model.progress.say(
                f"{task.config.task} failed, continuing with the other tasks: {error_message(error)}"
            )
    if not output:
        raise last
    return output, broken


def _evaluate(
    lm: Any, tasks: list[Any], options: EvalOptions, chat: bool, groups: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run lm-eval's `evaluate` and return its results as JSON data."""
    import random

    import numpy as np
    import torch

    from lm_eval.evaluator import evaluate

    random.seed(options.seed)
    np.random.seed(FEWSHOT_SEED + options.seed)
    torch.manual_seed(FEWSHOT_SEED + options.seed)
    for task in tasks:
        _configure_task(task, options)
    documents = _selected_documents(tasks, options)
    with _no_worker_processes(), contextlib.redirect_stdout(io.StringIO()):
        output = evaluate(
            lm,
            {"tasks": {task.config.task: task for task in tasks}, "groups": groups or {}},
            limit=None if documents else options.limit,
            samples=documents or None,
            # For lm_eval.json; our intervals are computed in eval/results/statistics.py
            bootstrap_iters=BOOTSTRAP_DRAWS,
            log_samples=True,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
        )
    fill_stderrs(output, tasks)
    output["cut"], output["keep_ends"] = dict(lm.truncated), lm.keep_ends
    output["config"] = {
        "model": lm.eval_model.name,
        "model_source": "surgery",
        "batch_size": options.batch_size,
        "device": str(lm.eval_model.device),
        "limit": options.limit,
        "gen_kwargs": options.gen_kwargs or None,
        "random_seed": options.seed,
        "numpy_seed": FEWSHOT_SEED + options.seed,
        "torch_seed": FEWSHOT_SEED + options.seed,
        "fewshot_seed": FEWSHOT_SEED + options.seed,
        "max_length": lm.max_length,
        "model_dtype": str(lm.eval_model.dtype),
    }
    return to_json_value(output)


@contextlib.contextmanager
def _no_worker_processes() -> Iterator[None]:
    """Let lm-eval bootstrap its standard errors in this process: its pool would fork a process that holds a model."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


def _selected_documents(tasks: list[Any], options: EvalOptions) -> dict[str, list[int]]:
    """Return the document indices of --samples; for tasks that it does not name, the first --limit ones."""
    documents: dict[str, list[int]] = {}
    for task in tasks if options.samples else ():
        name, there = task.config.task, len(task.eval_docs)
        asked = sorted(set(options.samples.get(name, ()))) or list(range(min(there, options.limit or there)))
        if asked[0] < 0 or asked[-1] >= there:
            raise SurgeryError(
                f"--samples: {name} has documents 0 to {there - 1}, not {asked[0] if asked[0] < 0 else asked[-1]}"
            )
        documents[name] = asked
    return documents


def _configure_task(task: Any, options: EvalOptions) -> None:
    """Apply command line settings, which override the task's own, as simple_evaluate does."""
    if options.gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config(key="generation_kwargs", value=dict(options.gen_kwargs), update=True)
    shots = task.get_config("num_fewshot")
    if shots is None:
        task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
    elif options.num_fewshot is not None and shots != 0:
        task.set_config(key="num_fewshot", value=options.num_fewshot)
    task.set_fewshot_seed(seed=FEWSHOT_SEED + options.seed)
    build = task.build_all_requests

    def build_silently(**settings: Any) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            build(**settings)

    task.build_all_requests = build_silently


def _merge_results(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {
        key: {**a.get(key, {}), **b[key]}
        if isinstance(b.get(key), dict) and isinstance(a.get(key, {}), dict)
        else b.get(key, a.get(key))
        for key in {**a, **b}
    }


@contextlib.contextmanager
def _silence_lm_eval() -> Iterator[None]:
    """Silence lm-eval, whose advice is about its own command line; standard output stays clean for --json."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr), mirror.hide_progress_bars():
            yield
    finally:
        logger.setLevel(level)
