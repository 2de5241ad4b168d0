"""Output of the commands: tables on stdout, progress on stderr.

Imports no torch: a command prints its first line before torch is imported.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console

from surgery.core.progress import Progress, QuietProgress, RichProgress


def show(parts: list[Any]) -> None:
    """Print tables and lines on stdout, 140 columns wide if stdout is not a terminal."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    Console(width=wide).print(*parts, sep="\n", soft_wrap=True)


class CommandProgress(RichProgress):
    """Progress of a command, which holds the lines back that belong behind its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[str] = []

    def say_last(self, text: str) -> None:
        """Hold one line back until `say_held`."""
        self.held.append(text)

    def say_held(self) -> None:
        """Print each line that was held back once."""
        for line in dict.fromkeys(self.held):
            self.say(line)
        self.held.clear()


def progress(silent: bool, quiet: bool = False) -> Any:
    """Return the progress display: nothing if `silent`, only warnings if `quiet`, else lines and bars on stderr."""
    if silent:
        return Progress()
    return QuietProgress() if quiet else CommandProgress()
