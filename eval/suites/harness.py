"""Suites that run through lm-eval: needles, RULER, LongBench, retrieval, zero-shot, and its own tasks by name.

lm-eval itself is imported when one of them runs.
"""

from __future__ import annotations

from surgery.eval.long_context import run_niah, run_ruler
from surgery.eval.long_context.longbench import run_longbench
from surgery.eval.long_context.retrieval import run_retrieval
from surgery.eval.suite import FALLBACKS, Suite, register
from surgery.eval.task_names import find_lm_eval_suite, run_named, run_zeroshot

register(Suite("niah", "needles in a haystack by length and depth, answers generated", run_niah))
register(Suite("ruler", "RULER's thirteen tasks, filled to the token", run_ruler))
register(
    Suite("longbench", "LongBench: the fourteen of the log-linear paper; --tasks all: all twenty-one", run_longbench)
)
register(Suite("retrieval", "SWDE, SQuAD, FDA, TriviaQA, DROP, NQ in the context, cut to lengths", run_retrieval))
register(Suite("zeroshot", "wikitext, LAMBADA, PIQA, HellaSwag, WinoGrande, ARC, as lm-eval has them", run_zeroshot))
register(Suite("lm-eval", "any tasks, groups or tags of lm-eval: --tasks boolq,mmlu", run_named))
FALLBACKS.append(find_lm_eval_suite)
