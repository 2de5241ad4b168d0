"""The command line. Every command prints tables for people or, with --json, one JSON document on stdout."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from surgery.cli import options
from surgery.cli.console import progress as _progress
from surgery.cli.console import show as _show
from surgery.cli.eval import evaluate
from surgery.cli.fetch_eval_data import fetch_eval_data
from surgery.cli.finetune import finetune
from surgery.cli.pretrain import pretrain
from surgery.cli.push import push
from surgery.cli.report import report
from surgery.cli.teacher_cache import teacher_cache
from surgery.core.errors import SurgeryError
from surgery.core.progress import is_main_process
from surgery.core.version import __version__

app = typer.Typer(
    name="surgery",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda word: word.replace("_", "-")},  # --batch_size, as lm-eval has it
    rich_markup_mode="rich",
    help=(
        "Replace the expensive parts of a pretrained Hugging Face transformer by structured ones.\n\n"
        "[bold]plan[/] shows what a recipe would cut, [bold]convert[/] does it, [bold]inspect[/] and [bold]eval[/] measure, "
        "[bold]densify[/] undoes it. Start with [bold]surgery demo[/].\n\n"
        "    surgery convert SRC --recipe btt-half --calibration text.txt --out OUT"
    ),
)
error_console = Console(stderr=True)
DEBUG = {"on": False}
EXIT_INTERRUPTED = 130


def _version(show: bool) -> None:
    if show:
        print(f"surgery {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    DEBUG["on"] = debug


@app.command()
def recipes(as_json: options.Json = False) -> None:
    """List the shipped recipes, a line each."""
    from surgery.planning.recipe import shipped_recipes

    found = shipped_recipes()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    width = max(len(name) for name in found)
    for name, description in found.items():
        print(f"{name:<{width}}  {description}")


@app.command()
def plan(
    source: options.Source,
    recipe: options.RecipeName,
    overrides: options.Overrides = None,
    context: options.Context = 4096,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Show what a recipe would cut; loads nothing but the config and the tensor headers.

    surgery plan SRC --recipe btt-half --set keep=0.75
    """
    from surgery.checkpoint.meta_model import MetaModel
    from surgery.checkpoint.source import open_checkpoint
    from surgery.planning.plan import make_plan
    from surgery.planning.recipe import load_recipe
    from surgery.publish.speed_notes import plan_notes
    from surgery.publish.summary import plan_dict
    from surgery.publish.tables import plan_table

    chosen = load_recipe(recipe, overrides or [])
    opened = open_checkpoint(source, trust_remote_code, weights=False, revision=revision)
    data = plan_dict(make_plan(MetaModel(opened, trust_remote_code), chosen))
    data["speed"] = plan_notes(data, context)
    print(json.dumps(data, indent=2)) if as_json else _show([*plan_table(data), *data["speed"]])


@app.command()
def convert(
    source: options.Source,
    recipe: options.RecipeName,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the converted checkpoint; must not exist.")],
    overrides: options.Overrides = None,
    calibration: options.Calibration = None,
    resume: options.Resume = False,
    device: options.Device = None,
    seed: options.Seed = None,
    context: options.Context = 4096,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Convert a checkpoint, a layer at a time; OUT loads in plain transformers after `import surgery`.

    surgery convert SRC --recipe btt-half --calibration text.txt --out OUT
    """
    from surgery.conversion.convert import convert as run
    from surgery.core.files import REPORT_NAME
    from surgery.planning.recipe import load_recipe
    from surgery.publish.speed_notes import report_notes
    from surgery.publish.summary import inspect as read
    from surgery.publish.tables import inspect_table

    given = list(overrides or [])
    given += [f"calibration={json.dumps(calibration)}"] if calibration is not None else []
    given += [f"seed={seed}"] if seed is not None else []
    report = run(
        source,
        load_recipe(recipe, given),
        out,
        device=device,
        resume=resume,
        trust_remote_code=trust_remote_code,
        revision=revision,
        progress=_progress(as_json),
    )
    if not is_main_process():
        return
    speed = report_notes(read(str(out)), context)
    if as_json:
        print(json.dumps({"out": str(out), "report": report, "speed": speed}, indent=2))
        return
    _show([*inspect_table(report), *speed])
    print(f"converted checkpoint: {out}\nreport: {out / REPORT_NAME}")


@app.command()
def inspect(
    converted: options.Converted,
    modules: Annotated[bool, typer.Option("--modules", help="A row for every module, not for every role.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show what was replaced: stored parameters, multiply-accumulates per token, errors."""
    from surgery.publish.speed_notes import report_notes
    from surgery.publish.summary import inspect as run
    from surgery.publish.tables import inspect_table, module_table

    report = run(converted)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    _show([*(module_table(report) if modules else inspect_table(report)), *report_notes(report)])


app.command()(finetune)
app.command()(pretrain)
app.command("teacher-cache")(teacher_cache)
app.command()(report)
app.command()(push)


app.command(name="eval")(evaluate)
app.command(name="fetch-eval-data")(fetch_eval_data)


@app.command()
def densify(
    converted: options.Converted,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the ordinary checkpoint; must not exist.")],
    as_json: options.Json = False,
) -> None:
    """Undo a conversion: structured weights multiplied out to an ordinary checkpoint."""
    from surgery.conversion.densify import densify as run

    result = run(converted, out, progress=_progress(as_json))
    print(json.dumps(result, indent=2) if as_json else f"{result['modules']} linears multiplied out: {out}")


@app.command()
def toeplitz(
    converted: options.Converted,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the new checkpoint; must not exist.")],
    components: Annotated[int, typer.Option(min=1, max=16, help="Exponentials in each kernel.")] = 8,
    as_json: options.Json = False,
) -> None:
    """Make block mixing (MHLA) Toeplitz (TBM): any length, linear time. `surgery inspect` says how well it fits."""
    from surgery.conversion.toeplitz import convert_to_toeplitz

    result = convert_to_toeplitz(str(converted), out, components)
    mean = sum(result["r2"].values()) / len(result["r2"])
    print(json.dumps(result, indent=2) if as_json else f"{len(result['r2'])} layers, R^2 {mean:.4f}: {out}")


@app.command()
def demo(
    out: options.DemoOut = None,
    recipe: options.RecipeName = "btt-half",
    as_json: options.Json = False,
) -> None:
    """Run the whole chain on the embedded tiny checkpoint: plan, convert, inspect, eval, densify. Under two minutes."""
    from surgery.cli.demo import demo as run
    from surgery.publish.tables import demo_table

    result = run(out, recipe, _progress(as_json), (lambda parts: None) if as_json else _show)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    _show(["", *demo_table(result)])
    print(f"report: {result['report']}")


@app.command(name="bench")
def bench_speed(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="linear, attention, decode, model or train.")],
    peers: options.Peers = False,
    sizes: options.Sizes = None,
    only: options.Only = None,
    dtype: options.BenchDtype = None,
    out: options.BenchOut = None,
    plot: options.Plot = None,
    time_limit: options.TimeLimit = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Time kernels, the references they stand in for, and torch's own, side by side.

    surgery bench attention --peers --out attention.json
    """
    from surgery.eval.speed.run import bench
    from surgery.eval.speed.tables import result_tables, save_plot

    result = bench(what, sizes, peers, device, time_limit, out, only, _progress(as_json), dtype)
    if not is_main_process():
        return
    print(json.dumps(result, indent=2)) if as_json else _show(result_tables(result))
    if plot is not None:
        save_plot(result, plot)


def main(argv: list[str] | None = None) -> None:
    """Exit codes: 0 done, 2 something the user can put right, 1 a defect of ours (of eval: a limit missed), 130 interrupted."""
    _set_up_libraries()
    try:
        app(args=argv, standalone_mode=True)
    except SurgeryError as error:
        if error.reported_by_peer and not DEBUG["on"]:
            sys.exit(2)
        _fail(str(error), 2)
    except SystemExit as left:
        if left.code == EXIT_INTERRUPTED:  # Typer has caught the KeyboardInterrupt, and says nothing
            _fail(
                "interrupted; what is done is kept, and the same command goes on (with --resume, where it has one)",
                EXIT_INTERRUPTED,
            )
        raise
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (13, 28, 30):  # denied, disk full, read-only
            _fail(f"{error.strerror}: {error.filename or ''}; what is done is kept, --resume continues", 2)
        _fail(f"internal error, {type(error).__name__}: {error} (surgery --debug .. shows where; please report it)", 1)


def _fail(message: str, code: int) -> None:
    if DEBUG["on"]:
        raise
    error_console.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(code)


def _set_up_libraries() -> None:
    """Before they are imported. Loading bars and advice of transformers are not ours to print; and torch's threads
    sleep while they wait for one another, since spinning makes a busy machine several times slower."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1" if not sys.stderr.isatty() else "0")
