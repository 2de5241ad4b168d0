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


def progress(quiet: bool) -> Any:
    """Return the progress display: silent if `quiet`, else bars on stderr."""
    from surgery.core.progress import Progress, RichProgress

    return Progress() if quiet else RichProgress()
