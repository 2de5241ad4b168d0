"""Suites that run through lm-eval: needles, RULER, LongBench, retrieval, zero-shot tasks, and any lm-eval task by name.

lm-eval is imported only when one of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from surgery.eval.averages import (
    babilong_averages,
    infinitebench_averages,
    longbench2_averages,
    longbench_averages,
    longbench_e_averages,
    retrieval_averages,
    ruler_averages,
    zeroshot_averages,
)
from surgery.eval.document_suites import (
    babilong_tasks,
    infinitebench_tasks,
    longbench2_tasks,
    run_babilong,
    run_infinitebench,
    run_longbench2,
)
from surgery.eval.long_context import niah_tasks, ruler_tasks, run_niah, run_ruler
from surgery.eval.long_context.longbench import longbench_e_tasks, longbench_tasks, run_longbench, run_longbench_e
from surgery.eval.long_context.retrieval import retrieval_tasks, run_retrieval
from surgery.eval.suite import FALLBACKS, EvalOptions, Suite, register
from surgery.eval.task_names import (
    find_lm_eval_suite,
    named_tasks,
    run_named,
    run_zeroshot,
    zeroshot_tasks,
)


def with_prefix(prefix: str, select: Callable[[EvalOptions], Sequence[str]]) -> Callable[[EvalOptions], Sequence[str]]:
    """Return a function that puts a prefix before the selected tasks: `longbench`'s qasper is longbench_qasper in
    --samples.
    """
    return lambda options: [f"{prefix}_{name}" for name in select(options)]


register(Suite("niah", "needles in a haystack by length and depth, with generated answers", run_niah, tasks=niah_tasks))
register(
    Suite(
        "ruler",
        "the thirteen tasks of RULER, prompts filled to the exact length",
        run_ruler,
        tasks=ruler_tasks,
        averages=ruler_averages,
        version=3,  # 2: vt as since RULER's commit 4a216f4; 3: cwe with more than 8,166 words has RULER's list
    )
)
register(
    Suite(
        "longbench",
        "LongBench: fourteen tasks of the log-linear attention paper; --tasks all: all twenty-one",
        run_longbench,
        tasks=with_prefix("longbench", longbench_tasks),
        averages=longbench_averages,
        version=2,  # 2: narrativeqa's prompt to the letter
    )
)
register(
    Suite(
        "longbench-e",
        "LongBench-E: thirteen tasks by length of the document, 0-4k, 4-8k and 8k+ words",
        run_longbench_e,
        tasks=with_prefix("longbench_e", longbench_e_tasks),
        averages=longbench_e_averages,
    )
)
register(
    Suite(
        "longbench2",
        "LongBench v2: 503 questions with four choices about 8K to 2M words",
        run_longbench2,
        tasks=with_prefix("longbench2", longbench2_tasks),
        averages=longbench2_averages,
    )
)
register(
    Suite(
        "babilong",
        "BABILong: facts hidden in books, qa1 to qa5 at 1K to 128K tokens",
        run_babilong,
        tasks=with_prefix("babilong", babilong_tasks),
        averages=babilong_averages,
    )
)
register(
    Suite(
        "infinitebench",
        "InfiniteBench: eleven tasks on texts of more than 100K tokens",
        run_infinitebench,
        tasks=with_prefix("infinitebench", infinitebench_tasks),
        averages=infinitebench_averages,
    )
)
register(
    Suite(
        "retrieval",
        "SWDE, SQuAD, FDA, TriviaQA, DROP and NQ in contexts truncated to given lengths",
        run_retrieval,
        tasks=retrieval_tasks,
        averages=retrieval_averages,
    )
)
register(
    Suite(
        "zeroshot",
        "lm-eval's WikiText, LAMBADA, PIQA, HellaSwag, WinoGrande and ARC",
        run_zeroshot,
        tasks=zeroshot_tasks,
        averages=zeroshot_averages,
    )
)
register(Suite("lm-eval", "tasks, groups or tags of lm-eval by name: --tasks boolq,mmlu", run_named, tasks=named_tasks))
FALLBACKS.append(find_lm_eval_suite)
