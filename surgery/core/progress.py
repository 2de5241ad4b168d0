"""Progress output on stderr: one line for each step; while a step runs a bar on a terminal, a line now and then
elsewhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console

# When the output is no terminal, a line is due after this many seconds if LINE_SHARE more of the step is done, and
# otherwise after LONGEST_SILENCE, or after ELAPSED_SHARE of the time of the step if that is longer: a step of ten hours
# prints about a hundred lines.
SECONDS_BETWEEN_LINES = 5.0
LINE_SHARE = 0.1
LONGEST_SILENCE = 30.0
ELAPSED_SHARE = 0.05


class Tick(Protocol):
    """A function that advances a progress bar."""

    def __call__(self, steps: int = 1) -> None:
        """Advance the bar by `steps`."""


class Progress:
    """Progress output that prints nothing; the base of RichProgress."""

    is_terminal = True  # whether a bar is drawn while a step runs, so that no lines are needed

    def say(self, text: str) -> None:
        """Print one line."""

    def say_last(self, text: str) -> None:
        """Print one line that belongs behind all others, the tables of a command included."""
        self.say(text)

    def say_held(self) -> None:
        """Print the lines that `say_last` held back."""

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Tick]:
        """Show a counted step and yield a function to call after each count."""
        yield lambda steps=1: None


class LinePace:
    """Decides when the next line about a step is due. total: counts of the step."""

    def __init__(self, total: int):
        self.total, self.began = total, time.monotonic()
        self.said, self.said_count = self.began, 0

    def is_due(self, done: int) -> bool:
        """Return whether a line is due at `done` counts; the line then counts as printed."""
        now = time.monotonic()
        since, more = now - self.said, done - self.said_count
        silence = max(LONGEST_SILENCE, ELAPSED_SHARE * (now - self.began))
        if since < SECONDS_BETWEEN_LINES or (more < LINE_SHARE * self.total and since < silence):
            return False
        self.said, self.said_count = now, done
        return True


class _Count:
    """The count of one step: how much of it is done, how fast, and how long the rest takes."""

    def __init__(self, title: str, total: int):
        self.title, self.total, self.done = title, total, 0
        self.began = time.monotonic()
        self.first: tuple[int, float] | None = None  # (count, time) of the first tick

    def advance(self, steps: int) -> None:
        self.done += steps
        self.first = self.first or (self.done, time.monotonic())

    def seconds_each(self) -> float | None:
        """Return the seconds of one count.

        The first tick is left out if there are more: it is slower than the others, or counts what an interrupted run
        had finished.
        """
        now = time.monotonic()
        if self.first is not None and self.done > self.first[0]:
            return (now - self.first[1]) / (self.done - self.first[0])
        return (now - self.began) / self.done if self.done else None

    def rate(self) -> str:
        """Return "2.1 s each" or "43 per second", "" before the first tick."""
        seconds = self.seconds_each()
        if not seconds:
            return ""
        return f"{duration_text(seconds)} each" if seconds >= 1 else f"{1 / seconds:,.3g} per second"

    def line(self) -> str:
        """Return "TITLE: 3 of 12, 2.1 s each, 19 s left"."""
        seconds = self.seconds_each()
        left = [] if seconds is None else [self.rate(), f"{duration_text(seconds * (self.total - self.done))} left"]
        return ", ".join([f"{self.title}: {self.done:,} of {self.total:,}", *left])

    def last_line(self) -> str:
        """Return "TITLE: 12 of 12 in 25 s", or "TITLE: ended after 9 of 12 in 19 s"."""
        ended = "ended after " if self.done < self.total else ""
        return f"{self.title}: {ended}{self.done:,} of {self.total:,} in {duration_text(time.monotonic() - self.began)}"


class RichProgress(Progress):
    """Progress output on stderr, so that stdout stays clean for tables and --json."""

    def __init__(self) -> None:
        self.console: Any = Console(stderr=True)
        self.bars: Any = None  # those that are drawn now: rich draws one group at a time

    @property
    def is_terminal(self) -> bool:  # type: ignore[override]
        """Whether stderr is a terminal."""
        return bool(self.console.is_terminal)

    def say(self, text: str) -> None:
        """Print one line of plain text. The word "warning" at its start is emphasized."""
        from rich.text import Text

        line = Text(text)
        if text.startswith("warning"):
            line.stylize("bold yellow", 0, len("warning"))
        self.console.print(line, highlight=False, soft_wrap=not self.is_terminal)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Tick]:
        """Show a counted step: a bar on a terminal, elsewhere its title and lines with rate and time left.

        Yield a function to call after each count.
        """
        count = _Count(title, total)
        if not self.is_terminal:
            yield from self._lines(count)
        elif self.bars is not None:  # a step inside another
            yield from self._drawn(count)
        else:
            with _new_bars(self.console) as self.bars:
                try:
                    yield from self._drawn(count)
                finally:
                    self.bars = None

    def _lines(self, count: _Count) -> Iterator[Tick]:
        self.say(count.title)
        pace, is_long = LinePace(count.total), False

        def tick(steps: int = 1) -> None:
            nonlocal is_long
            before = count.done
            count.advance(steps)
            if count.done < count.total and pace.is_due(count.done):
                is_long = True
                self.say(count.line())
            elif before < count.total <= count.done and is_long:
                self.say(count.last_line())

        yield tick
        if is_long and count.done < count.total:
            self.say(count.last_line())

    def _drawn(self, count: _Count) -> Iterator[Tick]:
        bars = self.bars
        task = bars.add_task(count.title, total=count.total, rate="")

        def tick(steps: int = 1) -> None:
            before = count.done
            count.advance(steps)
            bars.update(task, advance=steps, rate=count.rate())
            if before < count.total <= count.done:
                bars.update(task, visible=False)
                self.say(count.last_line())

        yield tick
        bars.remove_task(task)
        if count.done < count.total:
            self.say(count.last_line())


def _new_bars(console: Any) -> Any:
    from rich import progress as rich

    columns = [
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[rate]}"),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    ]
    return rich.Progress(*columns, console=console, transient=True)


def duration_text(seconds: float) -> str:
    """Format a duration: "under 1 s", "2.1 s", "21 s", "3 min", "1.4 h"."""
    if seconds < 1:
        return "under 1 s"
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


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
