"""The command `surgery search`; imports nothing heavy before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from surgery.cli import options
from surgery.cli.console import progress, show

EXIT_MISSED = 1  # the limits cannot be met


def search(
    source: options.Source,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="Write table, front and recipes to this folder. A search that was begun there goes on.",
        ),
    ],
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="LIMIT", help="Store at most this much, e.g. 60% of SRC, 80MB or 1.5GiB."),
    ] = None,
    max_parameters: Annotated[
        str | None,
        typer.Option("--max-parameters", metavar="LIMIT", help="Store at most so many parameters, e.g. 60% or 80M."),
    ] = None,
    max_cache_bytes: Annotated[
        str | None,
        typer.Option(
            "--max-cache-bytes",
            metavar="LIMIT",
            help="Let the cache of one sequence of --at tokens have at most these bytes, e.g. 50% or 200MB.",
        ),
    ] = None,
    at: Annotated[
        int,
        typer.Option(
            "--at",
            parser=options.parse_tokens,
            metavar="TOKENS",
            help="Count cache and times of a sequence of this length, e.g. 32768 or 32k (32 x 1,024).",
        ),
    ] = 4096,
    max_decode_ms: Annotated[
        str | None,
        typer.Option(
            "--max-decode-ms",
            metavar="LIMIT",
            help="Let a decoding step of one sequence after --at tokens take at most these ms, e.g. 60% or 8.5.",
        ),
    ] = None,
    max_prefill_ms: Annotated[
        str | None,
        typer.Option(
            "--max-prefill-ms",
            metavar="LIMIT",
            help="Let a prompt of --at tokens take at most these ms, e.g. 60% or 120.",
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE", help="Take the times of this device, e.g. h200. Default: the first one included."
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the times of linears from this file of `surgery bench linear --out`."),
    ] = None,
    calibration: options.CalibrationTexts = None,
    tokens: options.CalibrationTokens = None,
    length: options.CalibrationLength = None,
    points: Annotated[
        int,
        typer.Option(min=0, max=100, help="Solve for this many more values of the first limit, which gives the front."),
    ] = 8,
    bits: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Let parts of linears be stored in these bits too, 8 or 4, e.g. 8,4: for `surgery quantize --rules`.",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help="Use only kinds of choices whose name contains one of these words; prefix a word with - to exclude "
            "it, "
            "e.g. mlp,-btt. Default: all.",
        ),
    ] = None,
    healing: Annotated[
        bool,
        typer.Option(
            "--healing/--no-healing",
            help="Predict the loss after healing, or that of the conversion itself. Default: after healing.",
        ),
    ] = True,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Measure each point of the front as a whole, or take the sum of its choices' damages. Default: "
            "measure.",
        ),
    ] = True,
    gains: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read what healing gives back from this file. Default: the values included."),
    ] = None,
    seed: options.Seed = None,
    device: options.Device = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    plugins: options.Plugins = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Choose a structure for every part of every layer so that the model loses least within limits.

    Exit code 1 if no choice meets the limits; the nearest one is written.

    surgery search SRC --max-bytes 60% --calibration calibration.txt --out SEARCH
    """
    from surgery import api
    from surgery.budget.limits import parse_bits
    from surgery.budget.summary import search_lines

    result = api.search(
        source,
        out,
        max_bytes=max_bytes,
        max_parameters=max_parameters,
        max_cache_bytes=max_cache_bytes,
        max_decode_ms=max_decode_ms,
        max_prefill_ms=max_prefill_ms,
        at=at,
        on=on,
        measured=measured,
        calibration=calibration,
        tokens=tokens,
        length=length,
        points=points,
        bits=parse_bits(bits),
        only=only,
        healing=healing,
        check=check,
        gains=gains,
        seed=seed,
        device=device,
        revision=revision,
        trust_remote_code=trust_remote_code,
        progress=progress(as_json, quiet),
    )
    if as_json:
        print(json.dumps(result, indent=2))
    elif quiet:
        print(out)
    else:
        show(search_lines(result))
    if result["excess"]:
        raise typer.Exit(EXIT_MISSED)
