"""The command line `surgery`: a Typer app. Every command prints tables or, with --json, one JSON document on stdout.

Commands import what they need inside their function, so that `surgery --help` and `surgery recipes` start without
torch.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from surgery.cli import options
from surgery.cli.console import progress as _progress
from surgery.cli.console import show as _show
from surgery.cli.shorthands import check_calibrated, check_keep, with_shorthands
from surgery.core.environment import explain_broken_import
from surgery.core.errors import RenamedWarning, SurgeryError, WorkerError
from surgery.core.files import explain_path_error, partial_path
from surgery.core.hub_errors import explain_network_error
from surgery.core.progress import is_main_process
from surgery.core.version import __version__

if TYPE_CHECKING:
    from surgery.planning.targets import Plan

error_console = Console(stderr=True)
EXIT_INTERRUPTED = 130
USER_ERRNOS = (errno.EACCES, errno.ENOSPC, errno.EROFS)


@dataclass
class Settings:
    """Options of `surgery` itself, the object of the click context. debug: let errors through with their traceback."""

    debug: bool = False


def _version(show: bool) -> None:
    if show:
        print(f"surgery {__version__}")
        raise typer.Exit()


def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    context.ensure_object(Settings).debug = debug


def plan(
    source: options.Source,
    recipe: options.RecipeName,
    overrides: options.Overrides = None,
    keep: options.Keep = None,
    tokens: options.CalibrationTokens = None,
    length: options.CalibrationLength = None,
    context: options.PlannedContext = None,
    measured: options.MeasuredTimes = None,
    device: options.EstimateDevice = None,
    processes: options.Processes = 1,
    data_free: options.DataFree = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    plugins: options.Plugins = None,
    as_json: options.Json = False,
) -> None:
    """Show what a recipe would replace, from the config and the tensor headers alone; loads no weights.

    surgery plan SRC --recipe btt-half --keep 0.75
    """
    from surgery.checkpoint.outline import describe_checkpoint
    from surgery.checkpoint.source import open_checkpoint
    from surgery.conversion.estimation.estimate import estimate_conversion, estimate_lines
    from surgery.planning.plan import make_plan
    from surgery.planning.recipe import load_recipe
    from surgery.planning.speed import named_table
    from surgery.publish.speed_notes import notes_for_device, plan_notes, predict_linears, predicted_lines
    from surgery.publish.summary import plan_dict
    from surgery.publish.tables import plan_table

    values = {"keep": keep, "tokens": tokens, "length": length}
    chosen = load_recipe(recipe, with_shorthands(overrides, values))
    check_keep(chosen, keep)
    table = named_table(chosen, measured)
    opened = open_checkpoint(source, trust_remote_code, weights=False, revision=revision)
    if chosen.stock is not None:
        from surgery.planning.stock import plan_stock

        stock = plan_stock(opened, chosen, trust_remote_code)
        print(json.dumps(stock.to_dict(), indent=2)) if as_json else _show(stock.lines())
        return
    described = describe_checkpoint(opened, trust_remote_code)
    if data_free:
        from surgery.conversion.preflight import check_needs_no_calibration

        check_calibrated(values, "Leave out --data-free")
        check_needs_no_calibration(chosen, "Leave out --data-free")
    planned = make_plan(described, chosen)
    estimate = estimate_conversion(
        described, planned, device=device, processes=processes, calibrated=not data_free, context=context
    )
    data = {**plan_dict(planned, context, estimate), "estimate": estimate}
    data["speed"], data["linear_times"] = plan_notes(data, context), predict_linears(data, context, table)
    speed = [*predicted_lines(data["linear_times"]), *data["speed"]]
    speed = notes_for_device(speed, data["estimate"]["device"], asked=table is not None)
    print(json.dumps(data, indent=2)) if as_json else _show(
        [*plan_table(data), *estimate_lines(data["estimate"]), *speed]
    )


def convert(
    source: options.Source,
    recipe: options.RecipeName,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="Write the converted checkpoint to this folder, which must not exist without --overwrite.",
        ),
    ],
    calibration: options.CalibrationTexts = None,
    tokens: options.CalibrationTokens = None,
    length: options.CalibrationLength = None,
    keep: options.Keep = None,
    overrides: options.Overrides = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    dtype: options.ResultDtype = None,
    device: options.Device = None,
    seed: options.Seed = None,
    context: options.Context = 4096,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    plugins: options.Plugins = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Convert a checkpoint layer by layer.

    Where surgery is installed, transformers loads the result like any checkpoint.

    surgery convert SRC --recipe btt-half --calibration Salesforce/wikitext:wikitext-2-raw-v1:train:text --out OUT
    """
    shown = _progress(as_json, quiet)
    if is_main_process():  # before torch and transformers are imported, which takes seconds
        shown.say(f"converting {source} by recipe {recipe} into {out}")
    from surgery.conversion.convert import convert as run
    from surgery.core.files import REPORT_NAME
    from surgery.planning.recipe import load_recipe
    from surgery.publish.speed_notes import notes_for_device, report_notes
    from surgery.publish.summary import inspect as read
    from surgery.publish.tables import inspect_table

    texts = calibration[0] if calibration and len(calibration) == 1 else calibration or None
    values = {"calibration": texts, "tokens": tokens, "length": length, "keep": keep, "seed": seed}
    chosen = load_recipe(recipe, with_shorthands(overrides, values))
    check_keep(chosen, keep)
    if chosen.calibration is None:
        check_calibrated(values, "Give --calibration FILE")

    def note_long_tuning(planned: Plan) -> None:
        for line in _long_tuning(planned, device):
            shown.say(line)

    report = run(
        source,
        chosen,
        out,
        device=device,
        resume=resume,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
        revision=revision,
        dtype=dtype,
        progress=shown,
        on_plan=note_long_tuning,
    )
    if not is_main_process():
        return
    shown_report = read(str(out))
    notes = report_notes(shown_report, context)
    speed = notes_for_device(notes, report["time"]["device"], asked="speed" in report)
    if as_json:
        print(json.dumps({"out": str(out), "report": report, "speed": speed}, indent=2))
        return
    if quiet:
        print(out)
        return
    _show([*inspect_table(shown_report), *speed])
    sys.stdout.flush()
    shown.say_held()
    print(f"converted checkpoint: {out}\nreport: {out / REPORT_NAME}")


def _long_tuning(planned: Plan, device: str | None) -> list[str]:
    """Return a note if the tuning of a conversion is estimated at over an hour on this machine."""
    from surgery.conversion.estimation.tuning import tuning_dict
    from surgery.core.device import choose_device
    from surgery.publish.tables import long_tuning_lines

    if planned.recipe.calibration is None:
        return []
    return long_tuning_lines(tuning_dict(planned, planned.recipe.fitted_tokens, choose_device(device).type))


def inspect(
    converted: options.Converted,
    modules: Annotated[
        bool, typer.Option("--modules", help="Show one row per module instead of one per role.")
    ] = False,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--eval",
            help="Give the verdict with these results of `surgery eval --out` or `surgery compare --out`. Default: "
            "OUT/eval if it exists.",
        ),
    ] = None,
    plugins: options.Plugins = None,
    as_json: options.Json = False,
) -> None:
    """Show what a conversion replaced: stored parameters, multiply-accumulates per token, relative errors, a verdict.
    Tensors are checked by the headers of their files: a file that is cut off is an error, changed bytes in a tensor are
    not noticed.
    """
    from surgery.core.device import choose_device
    from surgery.publish.speed_notes import notes_for_device, report_notes
    from surgery.publish.summary import inspect as run
    from surgery.publish.tables import inspect_table, module_table

    report = run(converted, measured)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    notes = notes_for_device(report_notes(report), choose_device(None).type, asked="speed" in report)
    _show([*(module_table(report) if modules else inspect_table(report)), *notes])


def densify(
    converted: options.Converted,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Write the dense checkpoint to this folder, which must not exist.")
    ],
    plugins: options.Plugins = None,
    as_json: options.Json = False,
) -> None:
    """Undo a conversion: multiply structured weights out to a dense checkpoint with the same outputs."""
    from surgery.conversion.densify import densify as run

    result = run(converted, out, progress=_progress(as_json))
    print(json.dumps(result, indent=2) if as_json else f"{result['modules']} linears multiplied out: {out}")


def quantize(
    converted: options.Converted,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Write the quantized checkpoint to this folder, which must not exist.")
    ],
    bits: Annotated[
        int | None, typer.Option(help="Store the weights of linears in 8 or 4 bits. Default: 8.", show_default=False)
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            help="Inputs that share a scale: 8 to 256, a power of two. Default: 64 with 4 bits, all of an output with "
            "8."
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(help="Store int (integers), or fp8 (e4m3, with 8 bits), which rounds the inputs of products too."),
    ] = "int",
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Give each linear the bits of this YAML file of `surgery search --bits`.",
        ),
    ] = None,
    plugins: options.Plugins = None,
    as_json: options.Json = False,
) -> None:
    """Store the linears of a converted checkpoint in 8 or 4 bits: less memory, and fewer bytes to read for each token.

    The result loads like any converted checkpoint.

    surgery quantize OUT --bits 4 --out SMALL
    """
    from surgery.conversion.quantize_checkpoint import quantize as run
    from surgery.conversion.quantize_checkpoint import quantize_line

    if rules is not None and (bits is not None or group is not None or format != "int"):
        raise SurgeryError(
            "--rules gives each linear its bits and group. Leave out --bits, --group and --format, or --rules"
        )
    found = None
    if rules is not None:
        from surgery.planning.bits_recipe import read_bits

        found = read_bits(rules)
    stored: Any = format  # checked by Storage
    result = run(
        converted, out, 8 if bits is None else bits, group, format=stored, rules=found, progress=_progress(as_json)
    )
    print(json.dumps(result, indent=2) if as_json else f"{quantize_line(result)}: {out}")


def toeplitz(
    converted: options.Converted,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Write the new checkpoint to this folder, which must not exist.")
    ],
    components: Annotated[
        int, typer.Option(min=1, max=16, help="Number of exponentials that approximate each Toeplitz kernel.")
    ] = 8,
    plugins: options.Plugins = None,
    as_json: options.Json = False,
) -> None:
    """Turn MHLA mixers into Toeplitz block mixing (TBM), which reads any length in linear time.

    `surgery inspect` shows how well it fits.
    """
    from surgery.conversion.toeplitz import convert_to_toeplitz

    result = convert_to_toeplitz(str(converted), out, components)
    mean = sum(result["r2"].values()) / len(result["r2"])
    print(json.dumps(result, indent=2) if as_json else f"{len(result['r2'])} layers, R^2 {mean:.4f}: {out}")


def demo(
    out: options.DemoOut = None,
    recipe: options.RecipeName = "btt-half",
    as_json: options.Json = False,
) -> None:
    """Run plan, convert, inspect, eval, densify and report on the embedded tiny checkpoint, in under 90 seconds on two
    cores.
    """
    from surgery.cli.demo import demo as run
    from surgery.publish.tables import demo_ending, demo_table

    shown = _progress(as_json)
    result = run(out, recipe, shown, (lambda parts: None) if as_json else _show)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    _show(["", *demo_table(result), *demo_ending(result)])
    sys.stdout.flush()
    shown.say_held()
    print(f"report: {result['report']}\npage: {result['page']}")


def bench_speed(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="Benchmark to run: linear, attention, packages, decode, model, speed, serve, train, vllm or draft.",
        ),
    ],
    peers: options.Peers = False,
    sizes: options.Sizes = None,
    only: options.Only = None,
    dtype: options.BenchDtype = None,
    out: options.BenchOut = None,
    plot: options.Plot = None,
    time_limit: options.TimeLimit = None,
    device: options.Device = None,
    as_json: options.Json = False,
    stage: options.BenchStage = None,
    model: options.DraftModel = None,
    drafter: options.DrafterName = None,
    text: options.DraftText = None,
    replay: options.DraftReplay = None,
) -> None:
    """Benchmark the kernels against their PyTorch references and torch's own operators.

    surgery bench attention --peers --out attention.json
    """
    from surgery.cli.eval import command_words
    from surgery.eval.speed.run import bench
    from surgery.eval.speed.tables import result_tables, save_plot

    asked: dict[str, Any]
    if what == "draft":
        from surgery.eval.speed.draft import bench_draft, draft_tables

        asked = {"device": device, "dtype": dtype, "out": out, "progress": _progress(as_json), "replayed": replay}
        asked |= {"time_limit": time_limit, "command": command_words(context)}
        measured = bench_draft(model, drafter, text, sizes, **asked)
        print(json.dumps(measured, indent=2)) if as_json else _show(draft_tables(measured))
        return
    if what == "vllm" and not (drafter or text or replay):
        from surgery.eval.speed.vllm_engines import bench_vllm, vllm_tables

        asked = {"only": only, "dtype": dtype, "out": out, "time_limit": time_limit, "progress": _progress(as_json)}
        measured = bench_vllm(model, sizes, **asked, command=command_words(context))
        print(json.dumps(measured, indent=2)) if as_json else _show(vllm_tables(measured))
        return
    if drafter or text or replay or (model and what != "linear"):
        from surgery import api

        api.bench(what, model=model, drafter=drafter, text=text, replay=replay)  # refuses the option by its name
    asked = {"out": out, "only": only, "progress": _progress(as_json), "dtype": dtype, "shapes_of": model}
    asked["stage"] = stage
    asked["command"] = command_words(context)
    result = bench(what, sizes, peers, device, time_limit, **asked)
    if not is_main_process():
        return
    print(json.dumps(result, indent=2)) if as_json else _show(result_tables(result))
    if plot is not None:
        save_plot(result, plot)


# -- the application -------------------------------------------------------------------------------
# The commands in the order of `surgery --help`, by panel.
PANELS = {
    "Convert": ("demo", "recipes", "plan", "search", "convert", "run", "inspect", "quantize", "densify"),
    "Heal": ("finetune", "teacher-cache"),
    "Measure": ("eval", "compare", "report", "fetch-eval-data"),
    "Share": ("push", "serve"),
    "Advanced": ("pretrain", "toeplitz", "bench"),
}
COMMANDS = [name for names in PANELS.values() for name in names]


def command_function(name: str) -> tuple[Callable[..., None], type[TyperCommand] | None]:
    """Return (the function of a command, the class of its Typer command or None). Imports its module and no other."""
    match name:
        case "recipes":
            from surgery.cli.recipes import recipes

            return recipes, None
        case "search":
            from surgery.cli.search import search

            return search, None
        case "run":
            from surgery.cli.model_options import ModelCommand
            from surgery.cli.run import run

            return run, ModelCommand
        case "finetune":
            from surgery.cli.finetune import finetune

            return finetune, None
        case "teacher-cache":
            from surgery.cli.teacher_cache import teacher_cache

            return teacher_cache, None
        case "eval":
            from surgery.cli.eval import evaluate
            from surgery.cli.model_options import ModelCommand

            return evaluate, ModelCommand
        case "compare":
            from surgery.cli.compare import compare

            return compare, None
        case "report":
            from surgery.cli.report import report

            return report, None
        case "fetch-eval-data":
            from surgery.cli.fetch_eval_data import fetch_eval_data

            return fetch_eval_data, None
        case "push":
            from surgery.cli.push import push

            return push, None
        case "serve":
            from surgery.cli.serve import ServeCommand, serve

            return serve, ServeCommand
        case "pretrain":
            from surgery.cli.pretrain import pretrain

            return pretrain, None
    here: dict[str, Callable[..., None]] = {
        "demo": demo,
        "plan": plan,
        "convert": convert,
        "inspect": inspect,
        "quantize": quantize,
        "densify": densify,
        "toeplitz": toeplitz,
        "bench": bench_speed,
    }
    return here[name], None


def make_app(only: str | None = None) -> typer.Typer:
    """Return the application with one command, or with all of them. One command starts faster than all."""
    app = typer.Typer(
        name="surgery",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={
            "token_normalize_func": lambda word: word.replace("_", "-")
        },  # --batch_size, as lm-eval has it
        rich_markup_mode="rich",
        help=(
            "Replace the expensive parts of a pretrained Hugging Face transformer by structured ones.\n\n"
            "[bold]run[/] does everything in one go. [bold]plan[/] shows what a recipe would replace, [bold]convert[/] "
            "replaces it, [bold]inspect[/] and [bold]eval[/] measure the "
            "result, [bold]densify[/] undoes the conversion. Start with [bold]surgery demo[/].\n\n"
            "    surgery convert Qwen/Qwen3-0.6B --recipe btt-half --calibration "
            "Salesforce/wikitext:wikitext-2-raw-v1:train:text --out OUT"
        ),
    )
    app.callback()(_root)
    for panel, names in PANELS.items():
        for name in names:
            if only in (None, name):
                function, kind = command_function(name)
                app.command(name, cls=kind, rich_help_panel=panel)(function)
    return app


def __getattr__(name: str) -> Any:
    """Build `app`, the application with all commands, when it is asked for (PEP 562)."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = app = make_app()
    return app


def asked_command(words: Sequence[str]) -> str | None:
    """Return the command that is asked for; None for help, completion and mistyped words, which need all commands."""
    word = next((word for word in words if not word.startswith("-")), None)
    return word if word in COMMANDS and "_SURGERY_COMPLETE" not in os.environ else None


RESUMABLE = ("convert", "finetune", "pretrain", "teacher-cache")  # commands with the option --resume


def continue_command(words: Sequence[str]) -> str:
    """Return the command line that continues an interrupted one. words: of the interrupted command, without
    `surgery`.
    """
    words = [
        word for word in words if word != "--overwrite"
    ]  # a resumed conversion replaces what it was begun to replace
    command = next((word for word in words if not word.startswith("-")), "")
    resume = ["--resume"] if command in RESUMABLE and "--resume" not in words else []
    return shlex.join(["surgery", *words, *resume])


def _interrupted_message(argv: Sequence[str] | None) -> str:
    words = sys.argv[1:] if argv is None else list(argv)
    out = next((after for word, after in pairwise(words) if word in ("--out", "-o")), None)
    if "convert" in words[:2] and out and not partial_path(Path(out)).exists():  # stopped early, or into stock layers
        return f"interrupted. Nothing was written. Start again with: {shlex.join(['surgery', *words])}"
    return f"interrupted. Finished work is kept. Continue with: {continue_command(words)}"


def main(argv: list[str] | None = None) -> None:
    """Run the command line.

    Exit codes:
        0      success
        1      a defect of this package, or an eval threshold missed
        2      an error that the user can correct
        130    interrupted
    """
    settings = Settings()
    _set_up_libraries()
    try:
        with _renamed_words_noted():
            make_app(asked_command(sys.argv[1:] if argv is None else argv))(
                args=argv, standalone_mode=True, obj=settings
            )
    except SurgeryError as error:
        if error.reported_by_peer and not settings.debug:
            sys.exit(2)
        _fail(str(error), 2, settings)
    except WorkerError as error:
        _fail(str(error), error.code, settings)
    except SystemExit as left:
        if left.code == EXIT_INTERRUPTED:  # Typer has caught the KeyboardInterrupt and printed nothing
            _fail(_interrupted_message(argv), EXIT_INTERRUPTED, settings)
        raise
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        if _was_interrupted(error):
            _fail(_interrupted_message(argv), EXIT_INTERRUPTED, settings)
        if isinstance(error, OSError) and error.errno in USER_ERRNOS:
            _fail(
                f"{error.strerror}: {error.filename or ''}. Finished work is kept; run the same command with --resume "
                "to continue.",
                2,
                settings,
            )
        words = sys.argv[1:] if argv is None else argv
        if (unusable := explain_path_error(error, words)) is not None:
            _fail(unusable, 2, settings)
        if (broken := explain_broken_import(error)) is not None:
            _fail(f"this Python environment is broken: {broken}", 2, settings)
        if (unreachable := explain_network_error(error)) is not None:
            _fail(unreachable, 2, settings)
        _fail(
            f"internal error, {type(error).__name__}: {error} (please report it with the traceback that `surgery "
            "--debug ..` shows)",
            1,
            settings,
        )


@contextmanager
def _renamed_words_noted() -> Iterator[None]:
    """Print each warning of an old word in a recipe once, as a note."""
    noted: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", RenamedWarning)
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, RenamedWarning):
                show(message, category, *where, **more)
            elif str(message) not in noted and is_main_process():
                noted.add(str(message))
                error_console.print(f"note: {message}", highlight=False, markup=False, soft_wrap=True)

        warnings.showwarning = note
        yield


def _was_interrupted(error: BaseException | None) -> bool:
    """Return whether a Ctrl-C caused the error: libraries that import lazily raise errors of their own while they
    handle it.
    """
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _fail(message: str, code: int, settings: Settings) -> None:
    """Print an error and exit with `code`; with --debug, re-raise the error being handled instead."""
    if settings.debug:
        raise
    if "SURGERY_WORKER" in os.environ:  # the process that started it reports the error
        from surgery.training.distributed.launch import write_worker_error

        if write_worker_error(message):
            sys.exit(code)
    error_console.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(code)


def _set_up_libraries() -> None:
    """Set environment variables that libraries read when they are imported.

    Transformers prints no advice and, if stderr is no terminal, huggingface_hub no progress bars. OpenMP threads of
    torch sleep while they wait, because spinning makes a busy machine several times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1" if not sys.stderr.isatty() else "0")
