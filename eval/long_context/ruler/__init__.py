"""RULER's thirteen tasks, filled to the token."""

from __future__ import annotations

from surgery.eval.long_context.ruler.aggregation import CommonWords, FrequentWords
from surgery.eval.long_context.ruler.base import Question, Room, Task, Unfit
from surgery.eval.long_context.ruler.niah import Needles
from surgery.eval.long_context.ruler.qa import Documents
from surgery.eval.long_context.ruler.variable_tracking import Tracking

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Needles("niah_single_1", "noise"),
        Needles("niah_single_2", "essay"),
        Needles("niah_single_3", "essay", value="uuids"),
        Needles("niah_multikey_1", "essay", keys=4),
        Needles("niah_multikey_2", "needle"),
        Needles("niah_multikey_3", "needle", key="uuids", value="uuids"),
        Needles("niah_multivalue", "essay", values=4),
        Needles("niah_multiquery", "essay", queries=4),
        Tracking(),
        CommonWords(),
        FrequentWords(),
        Documents("qa_1", "squad"),
        Documents("qa_2", "hotpot"),
    )
}

__all__ = ["TASKS", "Question", "Room", "Task", "Unfit"]
