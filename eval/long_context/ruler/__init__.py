"""The thirteen tasks of RULER, prompts filled to the exact number of tokens."""

from __future__ import annotations

from surgery.eval.long_context.ruler.aggregation import CommonWords, FrequentWords
from surgery.eval.long_context.ruler.base import LengthTooShortError, RulerQuestion, RulerTask, TaskContext
from surgery.eval.long_context.ruler.niah import NeedleTask
from surgery.eval.long_context.ruler.qa import DocumentQATask
from surgery.eval.long_context.ruler.variable_tracking import VariableTracking

TASKS: dict[str, RulerTask] = {
    task.name: task
    for task in (
        NeedleTask("niah_single_1", "noise"),
        NeedleTask("niah_single_2", "essay"),
        NeedleTask("niah_single_3", "essay", value="uuids"),
        NeedleTask("niah_multikey_1", "essay", keys=4),
        NeedleTask("niah_multikey_2", "needle"),
        NeedleTask("niah_multikey_3", "needle", key="uuids", value="uuids"),
        NeedleTask("niah_multivalue", "essay", values=4),
        NeedleTask("niah_multiquery", "essay", queries=4),
        VariableTracking(),
        CommonWords(),
        FrequentWords(),
        DocumentQATask("qa_1", "squad"),
        DocumentQATask("qa_2", "hotpot"),
    )
}

__all__ = ["TASKS", "LengthTooShortError", "RulerQuestion", "RulerTask", "TaskContext"]
