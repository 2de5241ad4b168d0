"""The command `surgery run`; imports nothing heavy before it prints its first line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.cli import options
from surgery.cli.console import progress, show
from surgery.cli.eval import Suites, load_eval_options, read_options
from surgery.cli.model_options import options_of
from surgery.cli.shorthands import check_keep, with_shorthands

Out = Annotated[
    Path,
    typer.Option(
        "--out", "-o", help="Write everything to this folder. The same command continues an interrupted run there."
    ),
]
Heal = Annotated[
    str | None,
    typer.Option(
        "--heal",
        metavar="RECIPE",
        help="Heal by this recipe: auto, linears, attention, new-modules, lambda, or a .yaml file. Default: do not heal.",
    ),
]
HealOverrides = Annotated[
    list[str] | None,
    typer.Option(
        "--heal-set",
        metavar="KEY=VALUE",
        help="Override one key of the healing recipe, e.g. stages.0.tokens=3M. Repeatable.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Train on this text: a file (.txt, .jsonl, .parquet), a folder, a Hub id, or generated, which the original "
        "writes. Without --calibration, also calibrate on it, unless it is generated. Default: the healing recipe's.",
    ),
]
HeldOutText = Annotated[
    str | None,
    typer.Option(
        "--text",
        help="Measure on this text, a file or a Hub data set. Default: the last tenth of --data or --calibration, if "
        "that is a .txt file.",
    ),
]


@options_of(load_eval_options, "limit", "tokens", "length", "lengths")
def run(
    source: options.Source,
    recipe: options.RecipeName,
    out: Out,
    heal: Heal = None,
    data: Data = None,
    calibration: options.Calibration = None,
    text: HeldOutText = None,
    keep: options.Keep = None,
    overrides: options.Overrides = None,
    heal_overrides: HealOverrides = None,
    tiny: options.Tiny = False,
    suite: Suites = None,
    *,
    device: options.Device = None,
    gpus: options.Gpus = None,
    trust_remote_code: options.TrustRemoteCode = False,
    plugins: options.Plugins = None,
    as_json: options.Json = False,
    **asked: Any,
) -> None:
    """Plan, convert, heal, evaluate and report in one folder; the same command continues an interrupted run.

    surgery run SRC --recipe btt-half --heal linears --data corpus.txt --out RUN
    """
    shown = progress(as_json)
    shown.say(f"running {recipe} on {source} in {out}")  # before torch and transformers are imported
    from surgery.eval.options import split_words
    from surgery.planning.recipe import load_recipe
    from surgery.workflow import RunOptions, parse_suites
    from surgery.workflow import run as run_all

    read_options(asked)
    eval_options = {**asked, "lengths": split_words(asked["lengths"] or "")}  # as run.json has them
    whole = with_shorthands(overrides, {"keep": keep})
    check_keep(load_recipe(recipe, whole), keep)
    chosen = RunOptions(
        source,
        recipe,
        overrides=tuple(whole),
        heal=heal,
        heal_overrides=tuple(heal_overrides or ()),
        data=data,
        calibration=calibration,
        text=text,
        suites=parse_suites(suite),
        eval_options=tuple(eval_options.items()),
        tiny=tiny,
        device=device,
        gpus=gpus,
        trust_remote_code=trust_remote_code,
    )
    result = run_all(chosen, out, shown, (lambda parts: None) if as_json else show)
    sys.stdout.flush()
    shown.say_held()
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
