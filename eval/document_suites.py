"""Suites `longbench2`, `babilong` and `infinitebench`: lm-eval's tasks over long documents, with truncation as in
LongBench.

Prompts, few-shot examples and scores are lm-eval's, unchanged. A prompt longer than the input loses its middle, as in
LongBench, so that the instruction and the question remain; `--suite lm-eval --tasks longbench2` truncates from the
left, as lm-eval does. Samples have the group `length` (the longest input in tokens, or BABILong's nominal length) where
--lengths asks for several.

LongBench v2    Bai et al. 2024, arXiv:2412.15204: 503 questions with four choices; by length short (below 32K words), medium, long
                (above 128K words).
BABILong        Kuratov et al. 2024, arXiv:2406.10149: facts of bAbI hidden in books, at nominal lengths.
InfiniteBench   Zhang et al. 2024, arXiv:2402.13718: lm-eval has eleven of the twelve tasks, without math_calc.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.eval.averages import BABILONG_TASKS, INFINITEBENCH_TASKS, LONGBENCH2, LONGBENCH2_RANGES
from surgery.eval.lm_eval.bridge import error_message, require_lm_eval, run_tasks
from surgery.eval.suite import EvalModel, EvalOptions, Sample, SuiteResult, select_tasks, stable_id
from surgery.eval.task_names import load_tasks

BABILONG, INFINITEBENCH = "RMT-team/babilong-1k-samples", "xinrongzhang2022/InfiniteBench"
BABILONG_LENGTHS = {1024 * 2**i: f"{2**i}k" for i in range(8)}  # tokens: configuration of the data set
BABILONG_SHORT = tuple(f"qa{i}" for i in range(6, 21))  # tasks that exist without surrounding text only
# Words. LongBench v2's table 2 has the columns Short (<32k), Medium (32k-128k) and Long (>128k); upstream's README
# (commit 2e00731) says only that the field `length` names the group. The ends count where a row has no such field.
RANGE_ENDS = (32_000, 128_000)
MAX_SHOWN = 3000  # characters of a text that are written to samples.jsonl
GroupOf = Callable[[Mapping[str, Any]], dict[str, Any]]


def longbench2_tasks(options: EvalOptions) -> tuple[str, ...]:
    """Return the tasks of `longbench2` that are run."""
    known = [task for tasks in LONGBENCH2.values() for task in tasks]
    return _select_short("longbench2", options, known, known)


def infinitebench_tasks(options: EvalOptions) -> tuple[str, ...]:
    """Return the tasks of `infinitebench` that are run."""
    return _select_short("infinitebench", options, INFINITEBENCH_TASKS, INFINITEBENCH_TASKS)


def babilong_tasks(options: EvalOptions) -> tuple[str, ...]:
    """Return the tasks of `babilong` that are run."""
    return _select_short("babilong", options, BABILONG_TASKS, (*BABILONG_TASKS, *BABILONG_SHORT))


def _select_short(suite: str, options: EvalOptions, usual: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the tasks to run without lm-eval's prefix, the suite's name, with which --tasks may have them."""
    short = tuple(name.removeprefix(f"{suite}_") for name in options.tasks)
    return select_tasks(suite, options.model_copy(update={"tasks": short}), usual, known)


def run_longbench2(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Run the suite `longbench2`: which of four choices is likeliest, by the range of the document's length."""
    return _run_documents("longbench2", longbench2_tasks(options), eval_model, options, longbench2_groups)


def run_infinitebench(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Run the suite `infinitebench`: generated answers to questions about texts of more than 100K tokens."""
    return _run_documents("infinitebench", infinitebench_tasks(options), eval_model, options, lambda doc: {})


def longbench2_groups(doc: Mapping[str, Any]) -> dict[str, Any]:
    """Return the range of a document's length in words, and its difficulty if the data set says it.

    The range is the one that the data set names, else it is counted: words of the context, separated by spaces.
    """
    told = doc.get("length")
    words = len(str(doc["context"]).split())
    counted = LONGBENCH2_RANGES[sum(words >= end for end in RANGE_ENDS)]
    groups = {"words": told if told in LONGBENCH2_RANGES else counted}
    return groups | ({"difficulty": doc["difficulty"]} if doc.get("difficulty") in ("easy", "hard") else {})


def run_babilong(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Run the suite `babilong`: qa1 to qa5 (or --tasks) at each nominal length; qa6 to qa20 without surrounding
    text.
    """
    require_lm_eval()
    names = babilong_tasks(options)
    if wrong := [n for n in options.lengths if n not in BABILONG_LENGTHS]:
        raise SurgeryError(f"--lengths {wrong[0]}: babilong has {', '.join(map(str, BABILONG_LENGTHS))} tokens")
    reach = eval_model.longest or max(BABILONG_LENGTHS)
    lengths: Sequence[int | None] = options.lengths or tuple(n for n in BABILONG_LENGTHS if n <= reach) or (None,)
    long = [name for name in names if name in BABILONG_TASKS]
    short = [name for name in names if name in BABILONG_SHORT]
    parts: list[tuple[str, Callable[[], SuiteResult]]] = []
    for chosen, n in [(long, n) for n in lengths] + [(short, None)]:
        if chosen:
            config = BABILONG_LENGTHS[n] if n is not None else "0k"
            asked = options.model_copy(update={"metadata": {**options.metadata, "max_seq_lengths": config}})
            run = partial(
                _run_once, "babilong_", chosen, eval_model, asked, max(n or 0, eval_model.longest or 0) or None
            )
            parts.append((f"babilong at {config}", partial(_grouped, run, n, lambda doc: {})))
    return _merge(parts, eval_model)


def _run_documents(
    suite: str, names: Sequence[str], eval_model: EvalModel, options: EvalOptions, group_of: GroupOf
) -> SuiteResult:
    """Run tasks with inputs of at most each of --lengths, or of the model's longest input."""
    require_lm_eval()
    lengths: Sequence[int | None] = options.lengths or (None,)
    parts = []
    for n in lengths:
        run = partial(_run_once, f"{suite}_", names, eval_model, options, n)
        parts.append((suite if n is None else f"{suite} at {n:,}", partial(_grouped, run, n, group_of)))
    return _merge(parts, eval_model)


def _run_once(
    prefix: str, names: Sequence[str], eval_model: EvalModel, options: EvalOptions, longest: int | None
) -> SuiteResult:
    """Run lm-eval's tasks with inputs of at most `longest` tokens."""
    tasks = [f"{prefix}{name}" for name in names]
    return run_tasks(eval_model, tasks, options, load_tasks, longest=longest, keep_ends=True)


def _grouped(run: Callable[[], SuiteResult], length: int | None, group_of: GroupOf) -> SuiteResult:
    """Run a part and give its samples their groups; texts in `shown` keep their ends only."""
    result = run()
    result.samples = [_with_group(sample, length, group_of) for sample in result.samples]
    return result


def _with_group(sample: Sample, length: int | None, group_of: GroupOf) -> Sample:
    group = group_of(sample.shown["doc"]) | ({"length": length} if length is not None else {})
    name = sample.id if length is None else stable_id(sample.id, length)
    return replace(sample, id=name, group=group, shown=shorten_texts(sample.shown))


def shorten_texts(value: Any) -> Any:
    """Return JSON data in which every long text has its beginning and its end: documents have up to millions of
    words.
    """
    if isinstance(value, str):
        half = MAX_SHOWN // 2
        return value if len(value) <= MAX_SHOWN else f"{value[:half]} [..] {value[-half:]}"
    if isinstance(value, Mapping):
        return {key: shorten_texts(item) for key, item in value.items()}
    return [shorten_texts(item) for item in value] if isinstance(value, (list, tuple)) else value


def _merge(parts: Sequence[tuple[str, Callable[[], SuiteResult]]], eval_model: EvalModel) -> SuiteResult:
    """Run the parts one after the other and put their results together; a part that fails is reported and the others
    run.
    """
    merged: SuiteResult | None = None
    error: Exception | None = None
    broken: dict[str, str] = {}
    for name, run in parts:
        try:
            result = run()
        except Exception as failed:
            error, broken[name] = failed, error_message(failed)
            if len(parts) > 1:
                eval_model.progress.say(f"{name} failed, continuing with the other parts: {broken[name]}")
            continue
        broken |= {f"{task} ({name})": why for task, why in result.broken.items()}
        if merged is None:
            merged = result
            continue
        merged.samples += result.samples
        merged.floors |= result.floors
        merged.notes += [f"{name}: {note}" for note in result.notes if note not in merged.notes]
        merged.info = {**merged.info, name: result.info}
        for metric in result.metrics.values():
            known = merged.metrics.setdefault(metric.name, metric)
            merged.metrics[metric.name] = metric if known.kind == "accuracy" else known
    if merged is None:
        raise error or SurgeryError("there is nothing to measure")
    merged.broken = broken
    return merged
