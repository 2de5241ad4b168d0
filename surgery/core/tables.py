"""Rich tables in one style, counts with a unit, and lengths in tokens as people write them."""

from __future__ import annotations

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
