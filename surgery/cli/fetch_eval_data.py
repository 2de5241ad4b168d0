"""The command `surgery fetch-eval-data`; imports nothing heavy before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from surgery.cli import options
from surgery.cli.console import progress

Suites = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--suite",
        "-s",
        help="For these: niah, ruler, longbench, retrieval, zeroshot, or any task of lm-eval. Default: ours.",
    ),
]
Tasks = Annotated[Optional[str], typer.Option(help="Of longbench, these only, separated by commas.")]  # noqa: UP045


def fetch_eval_data(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the mirror is, or will be.")],
    suite: Suites = None,
    tasks: Tasks = None,
    as_json: options.Json = False,
) -> None:
    """Download the data sets that `surgery eval` reads, once; then `--data-root DIR` needs no network.

    surgery fetch-eval-data DATA --suite zeroshot
    """
    from surgery.eval.fetch import SUITE_SOURCES, dataset_sources, fetch

    suites = [name for each in suite or list(SUITE_SOURCES) for name in each.split(",")]
    wanted = dataset_sources(suites, [name for name in (tasks or "").split(",") if name])
    done = fetch(folder, wanted, progress(as_json))
    if as_json:
        print(json.dumps({"folder": str(folder), **done}, indent=2))
        return
    print(f"{len(done['fetched'])} data sets fetched, {len(done['kept'])} were there: {folder}")
