"""What commands print: tables on stdout, progress on stderr."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console


def show(parts: list[Any]) -> None:
    """Tables and lines; into a file or a pipe, which has no width of its own, wide enough to read."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    Console(width=wide).print(*parts, sep="\n", soft_wrap=True)


def progress(quiet: bool) -> Any:
    from surgery.core.progress import Progress, RichProgress

    return Progress() if quiet else RichProgress()
