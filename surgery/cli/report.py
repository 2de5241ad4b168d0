"""The command `surgery report`; imports nothing heavy before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli import options

Measured = Annotated[
    Path | None,
    typer.Option(
        "--eval",
        help="Include the results in this folder, written by `surgery eval --out`. Default: OUT/eval if it exists.",
    ),
]


def report(
    converted: options.Converted,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the page to this file. Default: OUT/report.html.")
    ] = None,
    measured: Measured = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    plugins: options.Plugins = None,
) -> None:
    """Write a report page about a conversion: one HTML file with diagrams, training curves and tables.

    surgery report OUT --eval results --open
    """
    from surgery.publish.html.page import write_page

    path = write_page(str(converted), out, measured)
    print(f"report page: {path}")
    if show:
        typer.launch(str(path))
