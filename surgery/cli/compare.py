"""The command `surgery compare`; imports nothing heavy before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli import options
from surgery.cli.console import show

Format = Annotated[str, typer.Option("--format", "-f", help="Print a table, markdown, latex, csv or json.")]


def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR..", help="Folders with finished results, written by `surgery eval --out`."),
    ],
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            metavar="DIR",
            help="Compare with the model in this results folder. Default: the base that all results name, if there is "
            "one.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write tables, figures and comparison.json to this folder; or one table to this file, by its ending: "
            ".md, .tex, .csv or .json.",
        ),
    ] = None,
    form: Format = "table",
    quality: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Show this task, suite or average in the Pareto charts. Default: perplexity if it was measured, else "
            "the first average or task.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Compare results that `surgery eval --out` has written, in one table. Exit code 2 if a result is not comparable.

    surgery compare RESULTS-A RESULTS-B RESULTS-C --base RESULTS-SRC --out COMPARISON
    """
    from rich.markup import escape

    from surgery.core.files import explain_disk_errors
    from surgery.eval.results.model_tables import (
        check_format,
        check_out,
        comparison_table,
        format_comparison,
        write_comparison,
    )
    from surgery.eval.results.models import compare_folders

    if out is not None:
        check_out(out)
    form = "json" if as_json else form
    if form != "table":
        check_format(form)
    done = compare_folders(folders, base, quality=quality, seed=seed)
    messages: list[str] = []
    if out is not None:
        with explain_disk_errors(out):
            messages = write_comparison(done, out)
    if form == "table":
        show([*comparison_table(done), *map(escape, [*messages, *([f"written: {out}"] if out is not None else [])])])
    else:
        print(format_comparison(done, form), end="")
    if done.exit_code:
        raise typer.Exit(done.exit_code)
