"""Suites that run through lm-eval: needles, RULER, LongBench, retrieval, zero-shot tasks, and any lm-eval task by name.

lm-eval is imported only when one of them runs.
"""

from __future__ import annotations

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
from surgery.eval.document_suites import run_babilong, run_infinitebench, run_longbench2
from surgery.eval.long_context import run_niah, run_ruler
from surgery.eval.long_context.longbench import run_longbench, run_longbench_e
from surgery.eval.long_context.retrieval import run_retrieval
from surgery.eval.suite import FALLBACKS, Suite, register
from surgery.eval.task_names import find_lm_eval_suite, run_named, run_zeroshot

register(Suite("niah", "needles in a haystack by length and depth, with generated answers", run_niah))
register(
    Suite(
        "ruler",
        "the thirteen tasks of RULER, prompts filled to the exact length",
        run_ruler,
        averages=ruler_averages,
        version=3,  # 2: vt as since RULER's commit 4a216f4; 3: cwe with more than 8,166 words has RULER's list
    )
)
register(
    Suite(
        "longbench",
        "LongBench: fourteen tasks of the log-linear attention paper; --tasks all: all twenty-one",
        run_longbench,
        averages=longbench_averages,
        version=2,  # 2: narrativeqa's prompt to the letter
    )
)
register(
    Suite(
        "longbench-e",
        "LongBench-E: thirteen tasks by length of the document, 0-4k, 4-8k and 8k+ words",
        run_longbench_e,
        averages=longbench_e_averages,
    )
)
register(
    Suite(
        "longbench2",
        "LongBench v2: 503 questions with four choices about 8K to 2M words",
        run_longbench2,
        averages=longbench2_averages,
    )
)
register(
    Suite(
        "babilong",
        "BABILong: facts hidden in books, qa1 to qa5 at 1K to 128K tokens",
        run_babilong,
        averages=babilong_averages,
    )
)
register(
    Suite(
        "infinitebench",
        "InfiniteBench: eleven tasks on texts of more than 100K tokens",
        run_infinitebench,
        averages=infinitebench_averages,
    )
)
register(
    Suite(
        "retrieval",
        "SWDE, SQuAD, FDA, TriviaQA, DROP and NQ in contexts truncated to given lengths",
        run_retrieval,
        averages=retrieval_averages,
    )
)
register(
    Suite(
        "zeroshot",
        "lm-eval's WikiText, LAMBADA, PIQA, HellaSwag, WinoGrande and ARC",
        run_zeroshot,
        averages=zeroshot_averages,
    )
)
register(Suite("lm-eval", "tasks, groups or tags of lm-eval by name: --tasks boolq,mmlu", run_named))
FALLBACKS.append(find_lm_eval_suite)
