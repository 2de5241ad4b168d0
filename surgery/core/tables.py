"""Rich tables in one style; counts with a unit, measured values, commands, and lengths in tokens as people write
them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rich.table import Table


def new_table(title: str, *columns: str) -> Table:
    """Return an empty table: the first column and text columns left-aligned, all others right-aligned.

    Columns of long names wrap; numbers are never cut.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        wide = column in ("structures", "structure", "module", "mixer")
        table.add_column(column, justify="left" if i == 0 or wide else "right", overflow="fold", no_wrap=not wide)
    return table


def format_count(number: int) -> str:
    """Return a count with three significant digits, so that tables fit narrow terminals: 12,345,678 -> 12.3M."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.{max(0, 3 - len(str(number // size)))}f}{unit}"
    return str(number)


def format_tokens(count: float) -> str:
    """Format a length as people write it: 512, 4K, 128K, 1M; "none" for 0."""
    number = round(count)
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if number and number % size == 0:
            return f"{number // size}{unit}"
    return str(number) if number else "none"


def format_number(value: float, error: float | None, interval: Sequence[float] | None) -> str:
    """Format a value with its interval, "75 [53.1, 88.8]", or with its standard error, "2.35 ± 0.04"."""
    if interval is not None:
        return f"{value:.4g} [{interval[0]:.3g}, {interval[1]:.3g}]"
    exact = error is None or error < 1e-9 * abs(value)  # e.g. bytes
    return f"{value:.4g}" + ("" if exact else f" ± {error:.2g}")


def format_interval(low: float | None, high: float | None, sign: str = "") -> str:
    """Format a 95% interval, "1.1 to 1.34"; "" if an end is not known. sign: "+" writes the signs of differences."""
    return "" if low is None or high is None else f"{low:{sign}.4g} to {high:{sign}.4g}"


def command_line(words: Any) -> str:
    """Return the words of a recorded command as a line for a shell; "" if there are none or they are not plain text."""
    if not (isinstance(words, list) and words and all(isinstance(word, str) and word.isprintable() for word in words)):
        return ""
    return shlex.join(words)
