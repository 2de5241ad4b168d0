"""surgery push."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from surgery.cli import options
from surgery.cli.console import progress as _progress
from surgery.cli.console import show as _show

Repo = Annotated[str, typer.Argument(metavar="USER/NAME", help="Repository on the Hub; made if it is not there.")]
Measured = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--eval", help="A folder of `surgery eval --out`: its table and plots go along. Default: OUT/eval."),
]


def push(
    converted: options.Converted,
    repo: Repo,
    private: Annotated[bool, typer.Option("--private", help="A repository that is made now is private.")] = False,
    revision: Annotated[Optional[str], typer.Option(help="Branch; made if it is not there.")] = None,  # noqa: UP045
    licence: Annotated[Optional[str], typer.Option("--license", help="Where the source names none.")] = None,  # noqa: UP045
    base_model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="ID", help="Hub id of the source, if OUT was converted from a folder."),
    ] = None,
    measured: Measured = None,
    message: Annotated[Optional[str], typer.Option("--message", "-m", help="Of the commit.")] = None,  # noqa: UP045
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would go up, show the card, send nothing.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Push a converted checkpoint to the Hub, with a model card: weights, config, tokenizer, report, plots, nothing else.

    surgery push OUT me/llama-btt --dry-run
    """
    from surgery.publish.hub.push import prepare_upload
    from surgery.publish.hub.push import push as run
    from surgery.publish.tables import upload_table

    upload = prepare_upload(str(converted), repo, licence, base_model, measured)
    result = {"dry_run": dry_run, **upload.to_dict()}
    if not as_json:
        _show(upload_table(result))
    if dry_run:
        print(json.dumps({**result, "card": upload.card}, indent=2) if as_json else f"\n{upload.card}")
        return
    result |= run(upload, private, revision, message, _progress(as_json))
    print(json.dumps(result, indent=2) if as_json else f"{result['url']}, commit {result['commit'][:10]}")
