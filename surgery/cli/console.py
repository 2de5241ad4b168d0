"""Output of the commands: tables on stdout, progress on stderr."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console


def show(parts: list[Any]) -> None:
    """Print tables and lines on stdout, 140 columns wide if stdout is not a terminal."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    Console(width=wide).print(*parts, sep="\n", soft_wrap=True)


def progress(silent: bool, quiet: bool = False) -> Any:
    """Return the progress display: nothing if `silent`, only warnings if `quiet`, else lines and bars on stderr."""
    from surgery.core.progress import Progress, QuietProgress, RichProgress

    if silent:
        return Progress()
    return QuietProgress() if quiet else RichProgress()
