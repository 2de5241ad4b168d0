"""Progress a person can watch: Rich bars on a terminal, silence elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console


class Tick(Protocol):
    def __call__(self, steps: int = 1) -> None: ...


class Progress:
    """`say` tells one line; `bar` gives a function to call after each step. This one is silent."""

    def say(self, text: str) -> None:
        pass

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Tick]:
        yield lambda steps=1: None


class RichProgress(Progress):
    """On stderr, so that stdout stays clean for tables and --json."""

    def __init__(self) -> None:

        self.console: Any = Console(stderr=True)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Tick]:
        if not self.console.is_terminal:
            yield lambda steps=1: None
            return
        from rich import progress as rich

        columns = [
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
        ]
        with rich.Progress(*columns, console=self.console, transient=True) as bars:
            task = bars.add_task(title, total=total)
            yield lambda steps=1: bars.advance(task, steps)


def is_main_process() -> bool:
    """Whether this process is the only one, or the first of several: the others print nothing."""
    return os.environ.get("RANK", "0") == "0"
