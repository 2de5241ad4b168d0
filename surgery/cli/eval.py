"""The command `surgery eval`; imports nothing heavy before it runs.

Its options on what is measured are the fields of EvalOptions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgery.cli import options
from surgery.cli.console import progress, show
from surgery.cli.model_options import options_of
from surgery.core.errors import SurgeryError
from surgery.core.progress import is_main_process

if TYPE_CHECKING:
    from surgery.eval.options import EvalOptions

Suites = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        "-s",
        help="Run this suite; repeatable, or several separated by commas. --list-suites lists them. Default: ppl.",
    ),
]
Base = Annotated[
    str | None,
    typer.Option(
        "--compare",
        metavar="BASE",
        help="Also measure this checkpoint, usually the original, on the same samples, and test the difference.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Write results, samples and plots to this folder. Suites already finished there are not run again.",
    ),
]
FailBelow = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-below",
        metavar="NAME=RATIO",
        help="Exit with code 1 if the score is worse than this ratio of the base's: accuracies at least RATIO, "
        "perplexity at most RATIO, e.g. ppl=1.05. Repeatable.",
    ),
]
Verify = Annotated[
    Path | None,
    typer.Option(
        "--verify",
        metavar="RESULTS",
        help="Measure nothing: say what differs between these finished results and the arguments given here. Exit code "
        "1 unless all is the same.",
    ),
]
Dtype = Annotated[
    str, typer.Option(help="Compute in float32, bfloat16, float16, or auto (the dtype of the stored weights).")
]
ListSuites = Annotated[bool, typer.Option("--list-suites", help="List the suites, one per line, and exit.")]


def load_eval_options() -> type[EvalOptions]:
    """Import and return EvalOptions."""
    from surgery.eval.options import EvalOptions

    return EvalOptions


@options_of(load_eval_options)
def evaluate(
    context: typer.Context,
    converted: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL..",
            help="Checkpoints to measure: folders, GGUF files, or Hub ids. Several need --out and are compared at the "
            "end.",
        ),
    ] = None,
    suite: Suites = None,
    compare: Base = None,
    out: Out = None,
    fail_below: FailBelow = None,
    *,
    verify: Verify = None,
    device: options.Device = None,
    dtype: Dtype = "float32",
    trust_remote_code: options.TrustRemoteCode = False,
    list_suites: ListSuites = False,
    plugins: options.Plugins = None,
    as_json: options.Json = False,
    **asked: Any,
) -> None:
    """Evaluate a checkpoint, optionally against the original on the same samples; exit code 1 if a --fail-below
    threshold is missed.

    surgery eval OUT --text FILE --suite ppl --suite needle --compare SRC --out RESULTS --fail-below ppl=1.05
    """
    from surgery.eval.results.tables import eval_table
    from surgery.eval.run import evaluate as run
    from surgery.eval.suite import load_suites

    if list_suites:
        print("\n".join(f"{name:<14} {suite.description}" for name, suite in load_suites().items()))
        return
    if not converted and verify is None:
        raise SurgeryError("MODEL is missing. Name the checkpoint to evaluate: surgery eval MODEL --text FILE")
    chosen = [name.strip() for words in suite or ["ppl"] for name in words.split(",") if name.strip()]
    eval_options = read_options(asked)
    settings: dict[str, Any] = {
        "compare": compare, "out": out, "fail_below": fail_below or [], "device": device, "dtype": dtype,
        "trust_remote_code": trust_remote_code, "progress": progress(as_json), "command": command_words(context),
    }  # fmt: skip
    if verify is not None:
        verify_results(context, verify, converted or [], compare, chosen if suite else [], eval_options, as_json)
        return
    models = converted or []
    if len(models) > 1:
        exit_code = evaluate_several(models, chosen, eval_options, settings, as_json)
        if exit_code:
            raise typer.Exit(exit_code)
        return
    done = run(models[0], chosen, eval_options, **settings)
    if is_main_process():
        print(json.dumps(done.to_dict(), indent=2, default=str)) if as_json else show(eval_table(done))
        if out is not None and not as_json:
            show([f"results: {out}"])
    if done.exit_code:
        raise typer.Exit(done.exit_code)


def read_options(asked: Mapping[str, Any]) -> EvalOptions:
    """Return validated options. asked: values of the command line by field, None: not given."""
    from surgery.eval.options import parse_options

    values = {name: value for name, value in asked.items() if value is not None}
    return parse_options(values, "surgery eval", lambda name: "--" + name.replace("_", "-"))


def verify_results(
    context: typer.Context,
    results: Path,
    models: list[str],
    compare: str | None,
    suites: list[str],
    eval_options: EvalOptions,
    as_json: bool,
) -> None:
    """Compare finished results with what is here; exit code 1 unless all is the same."""
    from rich.markup import escape

    from surgery.eval.verify import verify

    option_names = {name for name in context.params if is_given(context, name)}
    if wrong := option_names & {"out", "fail_below", "use_cache"}:
        option = sorted(wrong)[0].replace("_", "-")
        raise SurgeryError(f"--verify measures nothing, so it takes no --{option}. Leave it out.")
    if len(models) > 1:
        raise SurgeryError(f"--verify takes one MODEL and its --compare BASE (got {len(models)} models)")
    named = {name: getattr(eval_options, name) for name in type(eval_options).model_fields if name in option_names}
    done = verify(
        results,
        models[0] if models else None,
        compare=compare,
        text=named.pop("text", None),
        data_root=named.pop("data_root", None),
        data=named.pop("data", None),
        include_path=named.pop("include_path", None),
        suites=tuple(suites),
        options=named,
    )
    print(json.dumps(done.to_dict(), indent=2)) if as_json else show([escape(line) for line in done.lines()])
    if done.exit_code:
        raise typer.Exit(done.exit_code)


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether the command line gives this parameter."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def evaluate_several(
    models: list[str], suites: list[str], eval_options: EvalOptions, settings: dict[str, Any], as_json: bool
) -> int:
    """Evaluate several models into one folder and print their comparison; return the exit code."""
    from rich.markup import escape

    from surgery.eval.results.model_tables import comparison_table
    from surgery.eval.several import evaluate_models

    done = evaluate_models(models, suites, eval_options, **settings)
    if is_main_process() and done.comparison is not None:
        if as_json:
            print(json.dumps(done.to_dict(), indent=2, default=str))
        else:
            show([*comparison_table(done.comparison), *map(escape, [*done.messages, f"results: {settings['out']}"])])
    return done.exit_code


def command_words(context: typer.Context) -> list[str]:
    """Return the command line as a list of words, rebuilt from the parsed options: it is stored with the results."""
    words = ["surgery", str(context.info_name)]
    for parameter in context.command.params:
        name = parameter.name or ""
        if not is_given(context, name):
            continue
        value = context.params[name]
        option = [max(parameter.opts, key=len)] if parameter.param_type_name == "option" else []
        for item in value if isinstance(value, (list, tuple)) else [value]:
            words += option if isinstance(item, bool) else [*option, str(item)]
    return words
