"""Progress output: Rich progress bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console

SECONDS_BETWEEN_LINES = 30.0  # where the output is no terminal


class Tick(Protocol):
    """A function that advances a progress bar."""

    def __call__(self, steps: int = 1) -> None:
        """Advance the bar by `steps`."""


class Progress:
    """Progress output that prints nothing; the base of RichProgress."""

    def say(self, text: str) -> None:
        """Print one line."""

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Tick]:
        """Show a progress bar and yield a function to call after each step."""
        yield lambda steps=1: None


class RichProgress(Progress):
    """Progress output on stderr, so that stdout stays clean for tables and --json."""

    def __init__(self) -> None:
        self.console: Any = Console(stderr=True)

    def say(self, text: str) -> None:
        """Print one line of plain text. The word "warning" at its start is emphasized."""
        from rich.text import Text

        line = Text(text)
        if text.startswith("warning"):
            line.stylize("bold yellow", 0, len("warning"))
        self.console.print(line, highlight=False)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Tick]:
        """Show a progress bar on a terminal, elsewhere a line every SECONDS_BETWEEN_LINES; yield a function to call after each step."""
        if not self.console.is_terminal:
            yield self._lines(title, total)
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

    def _lines(self, title: str, total: int) -> Tick:
        done, last = 0, time.monotonic()

        def tick(steps: int = 1) -> None:
            nonlocal done, last
            done += steps
            if done < total and time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                self.say(f"{title}: {done:,} of {total:,}")

        return tick


class QuietProgress(RichProgress):
    """Progress output that prints warnings on stderr, and nothing else."""

    def say(self, text: str) -> None:
        """Print one line if it is a warning."""
        if text.startswith("warning"):
            super().say(text)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Tick]:
        """Show nothing; yield a function that does nothing."""
        yield lambda steps=1: None


def is_main_process() -> bool:
    """Return whether this process has rank 0, according to the environment. Other ranks print nothing."""
    return os.environ.get("RANK", "0") == "0"
