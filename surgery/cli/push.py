"""The command `surgery push`; imports nothing heavy before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from surgery.cli import options
from surgery.cli.console import progress as _progress
from surgery.cli.console import show as _show

Repo = Annotated[str, typer.Argument(metavar="USER/NAME", help="Hub repository; created if it does not exist.")]
Measured = Annotated[
    Path | None,
    typer.Option(
        "--eval",
        help="Include the table and plots in this folder, written by `surgery eval --out`. Default: OUT/eval if it "
        "exists.",
    ),
]


def push(
    converted: options.Converted,
    repo: Repo,
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    revision: Annotated[
        str | None, typer.Option(help="Push to this branch; created if it does not exist. Default: main.")
    ] = None,
    license: Annotated[
        str | None,
        typer.Option("--license", help="License id of the Hub's list, e.g. apache-2.0. Default: the source's license."),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Hub id of the original model, if OUT was converted from a local folder."),
    ] = None,
    measured: Measured = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Commit message.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files, print the model card, and upload nothing.")
    ] = False,
    plugins: options.Plugins = None,
    as_json: options.Json = False,
) -> None:
    """Push a converted checkpoint to the Hub with a model card: weights, config, tokenizer, report and plots, no other
    files.

    surgery push OUT me/llama-btt --dry-run
    """
    from surgery.publish.hub.push import prepare_upload
    from surgery.publish.hub.push import push as run
    from surgery.publish.tables import upload_table

    upload = prepare_upload(str(converted), repo, license, base_model, measured)
    result = {"dry_run": dry_run, **upload.to_dict()}
    if not as_json:
        _show(upload_table(result))
    if dry_run:
        print(json.dumps({**result, "card": upload.card}, indent=2) if as_json else f"\n{upload.card}")
        return
    result |= run(upload, private, revision, message, _progress(as_json))
    print(json.dumps(result, indent=2) if as_json else f"{result['url']}, commit {result['commit'][:10]}")
