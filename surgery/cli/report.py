"""The command `surgery report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from surgery.cli import options

Measured = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--eval", help="A folder of `surgery eval --out`. Default: OUT/eval, where there is one."),
]


def report(
    converted: options.Converted,
    out: Annotated[Optional[Path], typer.Option("--out", "-o", help="The file. Default: OUT/report.html.")] = None,  # noqa: UP045
    measured: Measured = None,
    show: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write a page about a conversion: one HTML file with pictures, curves and tables.

    surgery report OUT --eval results --open
    """
    from surgery.publish.html.page import write_page

    path = write_page(str(converted), out, measured)
    print(f"report page: {path}")
    if show:
        typer.launch(str(path))
