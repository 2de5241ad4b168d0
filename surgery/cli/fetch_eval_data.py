"""The command `surgery fetch-eval-data`; imports nothing heavy before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from surgery.cli import options
from surgery.cli.console import progress

Suites = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        "-s",
        help="Download the data of this suite, or of any lm-eval task. Repeatable. Default: all suites.",
    ),
]
Tasks = Annotated[
    str | None, typer.Option(help="Download only these tasks of LongBench or BABILong, separated by commas.")
]
Commits = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Download the commits that this file names: commits.json of another mirror. Default: the mirror's own, "
        "else the newest.",
    ),
]


def fetch_eval_data(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the mirror; created if it does not exist.")],
    suite: Suites = None,
    tasks: Tasks = None,
    commits: Commits = None,
    as_json: options.Json = False,
) -> None:
    """Download the data sets of `surgery eval` to a local mirror; `surgery eval --data-root DIR` then needs no network.

    surgery fetch-eval-data DATA --suite zeroshot
    """
    from surgery.eval.fetch import SUITE_SOURCES, read_commits
    from surgery.eval.word_list import fetch_suites

    suites = [name for names in suite or list(SUITE_SOURCES) for name in names.split(",")]
    pinned = None if commits is None else read_commits(commits)
    done = fetch_suites(folder, suites, [name for name in (tasks or "").split(",") if name], progress(as_json), pinned)
    if as_json:
        print(json.dumps({"folder": str(folder), **done}, indent=2))
        return
    print(f"{len(done['fetched'])} data sets downloaded, {len(done['kept'])} already present: {folder}")
