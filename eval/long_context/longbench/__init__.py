"""Suite `longbench`: prompts truncated in the middle, answers scored 0 to 100 by the original's rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.eval import offline_data as mirror
from surgery.eval.averages import LONGBENCH_E_RANGES, LONGBENCH_E_TASKS
from surgery.eval.lm_eval.bridge import run_own_tasks
from surgery.eval.lm_eval.tasks import OwnTask
from surgery.eval.long_context import prompt_token_counter
from surgery.eval.long_context.longbench.prompts import TASKS, LongBenchTask
from surgery.eval.long_context.longbench.scores import SCORES, first_line
from surgery.eval.long_context.truncate import truncate_middle
from surgery.eval.suite import EvalMetric, EvalModel, EvalOptions, SuiteResult, select_tasks

DATASET = "Xnhyacinth/LongBench"
DEFAULT_LENGTH = 32768  # tokens of a prompt for a model without a longest input
PAPER_TASKS = tuple(name for name, task in TASKS.items() if task.in_paper)
SCORE = EvalMetric("score", "mean", True, scale=100.0, top=1.0, floor=0.0)


def longbench_tasks(options: EvalOptions) -> tuple[str, ...]:
    """Return the tasks of LongBench that are run: those of the paper, --tasks, or with --tasks all every one."""
    names = select_tasks("longbench", options, PAPER_TASKS, [*TASKS, "all"])
    return tuple(TASKS) if "all" in names else names


def longbench_e_tasks(options: EvalOptions) -> tuple[str, ...]:
    """Return the tasks of LongBench-E that are run."""
    return select_tasks("longbench-e", options, LONGBENCH_E_TASKS, LONGBENCH_E_TASKS)


def run_longbench(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Run fourteen tasks, or all twenty-one with --tasks all. --lengths: maximum tokens of prompt and answer, each run
    separately.
    """
    names = longbench_tasks(options)
    mirror.check_datasets(options.data_root, "longbench", [DATASET])
    lengths = options.lengths or (eval_model.longest or DEFAULT_LENGTH,)
    tasks = [
        (f"longbench_{name}", partial(_make_task, name, eval_model, options, n)) for n in lengths for name in names
    ]
    return run_own_tasks(eval_model, tasks, options, SCORE, max(*lengths, eval_model.longest or 0))


def run_longbench_e(eval_model: EvalModel, options: EvalOptions) -> SuiteResult:
    """Run LongBench-E: thirteen tasks with as many documents of each range of length. --limit applies to each range."""
    names = longbench_e_tasks(options)
    mirror.check_datasets(options.data_root, "longbench-e", [DATASET])
    lengths = options.lengths or (eval_model.longest or DEFAULT_LENGTH,)
    tasks = [
        (f"longbench_e_{name}", partial(_make_task, name, eval_model, options, n, ranges=True))
        for n in lengths
        for name in names
    ]
    asked = options.model_copy(update={"limit": None})  # the limit is of each range
    return run_own_tasks(eval_model, tasks, asked, SCORE, max(*lengths, eval_model.longest or 0))


def length_range(row: Mapping[str, Any]) -> str:
    """Return LongBench-E's range of a row by its `length` in words: 0-4k (below 4000), 4-8k (below 8000) or 8k+."""
    words = int(row["length"])
    return LONGBENCH_E_RANGES[(words >= 4000) + (words >= 8000)]


def best_score(task: LongBenchTask, output: str, answers: list[str], classes: list[str]) -> float:
    """Return the best score over the references."""
    scored = first_line(output) if task.first_line_only else output
    return max((float(SCORES[task.score](scored, answer, classes or [])) for answer in answers), default=0.0)


def format_prompt(task: LongBenchTask, row: Mapping[str, Any]) -> str:
    """Fill in the task's prompt. The data set's conversion names the question `input`."""
    asked = row["input"] if "input" in row else row["question"]
    return task.prompt.format(context=row["context"], input=asked)


def _make_task(name: str, eval_model: EvalModel, options: EvalOptions, length: int, *, ranges: bool = False) -> OwnTask:
    """Return a task of LongBench or, with `ranges`, of LongBench-E, whose documents have the group `words`."""
    task, tokenizer = TASKS[name], eval_model.tokenizer
    suite, title = ("longbench-e", f"longbench_e_{name}") if ranges else ("longbench", f"longbench_{name}")
    rows = mirror.load_rows(options.data_root, suite, DATASET, f"{name}_e" if ranges else name, "test")
    count = prompt_token_counter(tokenizer, options.apply_chat_template and not task.no_chat_template)
    most = length - task.answer_tokens
    if most < 32:
        raise SurgeryError(
            f"longbench's {name} needs {task.answer_tokens} tokens for its answer, so {length} leave no room for a "
            "prompt. "
            f"Use --lengths {task.answer_tokens + 512}."
        )
    docs = []
    counts: Counter[str] = Counter()
    for number, row in enumerate(rows):
        words = length_range(row) if ranges else ""
        counts[words] += 1
        if options.limit is not None and counts[words] > options.limit:
            continue
        docs.append(
            {
                "id": f"{name}{'_e' if ranges else ''} {length} {row.get('_id') or row.get('id') or number}",
                "task": title,
                **({"words": words} if ranges else {}),
                "prompt": truncate_middle(format_prompt(task, row), tokenizer, count, most),
                "prefix": "",
                "answers": list(row["answers"]),
                "classes": list(row["all_classes"] or []),
                **({"length": length} if options.lengths else {}),
            }
        )

    def score(doc: Mapping[str, Any], output: str) -> float:
        return best_score(task, output, doc["answers"], doc["classes"])

    generation = _one_line_generation(tokenizer) if name == "samsum" else {}
    called = f"{title}_{length}" if options.lengths else title
    return OwnTask(called, docs, score, task.answer_tokens, generation=generation, chat=not task.no_chat_template)


def _one_line_generation(tokenizer: Any) -> dict[str, Any]:
    """Stop samsum at a newline, after at least one token: models continue with further dialogues."""
    newline = tokenizer.encode("\n", add_special_tokens=False)
    ends = {tokenizer.eos_token_id, newline[-1] if newline else None} - {None}
    return {"eos_token_id": sorted(ends), "min_new_tokens": 1}
