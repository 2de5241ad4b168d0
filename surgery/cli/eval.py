"""The command `surgery eval`; imports nothing heavy before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.cli import options
from surgery.cli.console import progress, show
from surgery.core.errors import SurgeryError
from surgery.core.progress import is_main_process

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
Text = Annotated[
    str | None,
    typer.Option(help="Score this text: a file or a Hub data set (org/name[:config:split:column])."),
]
FailBelow = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-below",
        metavar="NAME=RATIO",
        help="Exit with code 1 if the score is worse than this ratio of the base's: accuracies at least RATIO, perplexity at most RATIO, e.g. ppl=1.05. Repeatable.",
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Use at most this many samples for each task and length.")]
Tokens = Annotated[int, typer.Option(min=16, help="Score this many tokens of the text.")]
Length = Annotated[int, typer.Option(min=8, help="Split the text into windows of this many tokens.")]
Lengths = Annotated[
    str | None, typer.Option(help="Build long-context samples of these lengths in tokens, e.g. 4096,8192 or 4k,8k.")
]
Depths = Annotated[str | None, typer.Option(help="Place needles at these relative positions in [0, 1], e.g. 0,0.5,1.")]
Tasks = Annotated[str | None, typer.Option(help="Run only these tasks of the suite, separated by commas.")]
BatchSize = Annotated[str, typer.Option("--batch-size", help="Sequences in a batch, or auto.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the samples, which are the same for both models.")]
DataRoot = Annotated[
    Path | None,
    typer.Option(
        "--data-root",
        metavar="DIR",
        help="Read data sets from this local mirror, written by `surgery fetch-eval-data`.",
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="TASK=FILE",
        help="Read the records of an lm-eval task from this file of JSON lines instead of its data set, e.g. piqa=piqa.jsonl; or a folder with TASK.jsonl. Repeatable.",
    ),
]
FewShot = Annotated[
    int | None,
    typer.Option(
        "--num-fewshot",
        min=0,
        help="Number of few-shot examples in the prompts of lm-eval tasks. Default: each task's own.",
    ),
]
GenKwargs = Annotated[
    str | None,
    typer.Option("--gen-kwargs", help="Arguments passed to generate(), e.g. temperature=0.7,top_p=0.9."),
]
Metadata = Annotated[str | None, typer.Option(help="JSON object passed to the lm-eval tasks as their metadata.")]
IncludePath = Annotated[
    Path | None,
    typer.Option("--include-path", metavar="DIR", help="Also load lm-eval task definitions from this folder."),
]
SomeSamples = Annotated[
    str | None,
    typer.Option("--samples", help='Run only these documents of lm-eval tasks, as JSON: {"piqa": [0, 5]}.'),
]
UseCache = Annotated[
    Path | None,
    typer.Option(
        "--use-cache",
        metavar="DIR",
        help="Store every answer in this folder, for later runs with other options too. An interrupted suite continues without it if --out is given.",
    ),
]
Chat = Annotated[bool, typer.Option("--apply-chat-template", help="Format prompts with the model's chat template.")]
Dtype = Annotated[
    str, typer.Option(help="Compute in float32, bfloat16, float16, or auto (the dtype of the stored weights).")
]
Prompts = Annotated[
    str,
    typer.Option(
        help="Prompts and truncation of the retrieval tasks: based (this package's), or jrt, those of the Just-Read-Twice harness."
    ),
]
Fill = Annotated[
    str,
    typer.Option(
        help="Fill RULER's prompts to the exact number of tokens (exact), or by whole units as the original (ruler)."
    ),
]
Pairs = Annotated[
    str | None,
    typer.Option(
        help="Key-value pairs of mqar, e.g. 4,16,64, or the lengths and pairs of a paper: zoology, based, log-linear. Default: one for each 16 tokens."
    ),
]
Verify = Annotated[
    Path | None,
    typer.Option(
        "--verify",
        metavar="RESULTS",
        help="Measure nothing: say what differs between the versions, models, data and options of these finished results and those given here. Exit code 1 unless all is the same.",
    ),
]
ListSuites = Annotated[bool, typer.Option("--list-suites", help="List the suites, one per line, and exit.")]


def evaluate(
    context: typer.Context,
    converted: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL..",
            help="Checkpoint to measure, converted or not: a local folder, a GGUF file, or a Hub id. Several need --out and are compared at the end.",
        ),
    ] = None,
    suite: Suites = None,
    compare: Base = None,
    out: Out = None,
    text: Text = None,
    fail_below: FailBelow = None,
    limit: Limit = None,
    tokens: Tokens = 65536,
    length: Length = 1024,
    lengths: Lengths = None,
    depths: Depths = None,
    tasks: Tasks = None,
    batch_size: BatchSize = "auto",
    seed: Seed = 0,
    data_root: DataRoot = None,
    data: Data = None,
    num_fewshot: FewShot = None,
    gen_kwargs: GenKwargs = None,
    metadata: Metadata = None,
    include_path: IncludePath = None,
    apply_chat_template: Chat = False,
    samples: SomeSamples = None,
    use_cache: UseCache = None,
    prompts: Prompts = "based",
    fill: Fill = "exact",
    pairs: Pairs = None,
    verify: Verify = None,
    device: options.Device = None,
    dtype: Dtype = "float32",
    trust_remote_code: options.TrustRemoteCode = False,
    list_suites: ListSuites = False,
    plugins: options.Plugins = None,
    as_json: options.Json = False,
) -> None:
    """Evaluate a checkpoint, optionally against the original on the same samples; exit code 1 if a --fail-below threshold is missed.

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
    chosen = [name for raw in suite or ["ppl"] for name in split_words(raw)]
    eval_options = parse_options(
        text=text, limit=limit, tokens=tokens, length=length, lengths=split_words(lengths), depths=split_words(depths),
        tasks=split_words(tasks), batch_size=batch_size, seed=seed, data_root=data_root, num_fewshot=num_fewshot,
        gen_kwargs=_parse_pairs(gen_kwargs), metadata=_parse_json("--metadata", metadata), include_path=include_path,
        apply_chat_template=apply_chat_template, samples=_parse_json("--samples", samples), use_cache=use_cache,
        prompts=prompts, fill=fill, pairs=parse_pair_numbers(pairs), data=parse_data(data or []),
    )  # fmt: skip
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


def verify_results(
    context: typer.Context,
    results: Path,
    models: list[str],
    compare: str | None,
    suites: list[str],
    eval_options: Any,
    as_json: bool,
) -> None:
    """Compare finished results with what is here; exit code 1 unless all is the same."""
    from rich.markup import escape

    from surgery.eval.verify import verify

    given = {name for name in context.params if is_given(context, name)}
    if wrong := given & {"out", "fail_below", "use_cache"}:
        option = sorted(wrong)[0].replace("_", "-")
        raise SurgeryError(f"--verify measures nothing, so it takes no --{option}. Leave it out.")
    if len(models) > 1:
        raise SurgeryError(f"--verify takes one MODEL and its --compare BASE (got {len(models)} models)")
    named = {name: getattr(eval_options, name) for name in type(eval_options).model_fields if name in given}
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
    models: list[str], suites: list[str], eval_options: Any, settings: dict[str, Any], as_json: bool
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
        for each in value if isinstance(value, (list, tuple)) else [value]:
            words += option if isinstance(each, bool) else [*option, str(each)]
    return words


def parse_options(**raw: Any) -> Any:
    """Validate EvalOptions; a SurgeryError names the command-line option that is wrong."""
    from pydantic import ValidationError

    from surgery.eval.suite import EvalOptions

    try:
        return EvalOptions(**raw)
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + str(first["loc"][0]).replace("_", "-")
        raise SurgeryError(f"{name} {first.get('input')!r}: {first['msg'].lower()}") from None


def parse_data(raw: list[str]) -> dict[str, Path]:
    """Parse the values of --data to {task: file}; a folder has the key of all tasks."""
    from surgery.eval.suite import ANY_TASK

    found: dict[str, Path] = {}
    for word in raw:
        name, equals, path = (ANY_TASK, "=", word) if Path(word).is_dir() else word.partition("=")
        if not (name and equals and path):
            raise SurgeryError(
                f"--data must be TASK=FILE, or a folder with TASK.jsonl (got {word!r}, which is no folder). Write for example piqa=piqa.jsonl"
            )
        if name in found:
            raise SurgeryError(f"--data names {'two folders' if name == ANY_TASK else name + ' twice'}. Leave one out.")
        if name != ANY_TASK and not Path(path).is_file():
            what = "is a folder" if Path(path).is_dir() else "does not exist"
            raise SurgeryError(f"--data {word}: {path} {what}. Give a file of JSON lines.")
        found[name] = Path(path)
    return found


def split_words(raw: str | None) -> tuple[str, ...]:
    """Return the words of a list separated by commas."""
    return tuple(word.strip() for word in (raw or "").split(",") if word.strip())


def parse_pair_numbers(raw: str | None) -> Any:
    """Return the name of a paper's settings, or numbers of pairs separated by commas."""
    words = split_words(raw)
    if not words:
        return ()
    from surgery.core.errors import suggestion
    from surgery.eval.suites.mqar import PAPER_SETTINGS

    if all(word.isdecimal() for word in words):
        return words
    if len(words) == 1 and words[0] in PAPER_SETTINGS:
        return words[0]
    raise SurgeryError(
        f"--pairs {raw!r} must be whole numbers separated by commas, or one of {', '.join(PAPER_SETTINGS)}{suggestion(str(raw), PAPER_SETTINGS)}"
    )


def _parse_pairs(raw: str | None) -> dict[str, Any]:
    """Parse "temperature=0.7,top_p=0.9" to a dict, each value read as YAML."""
    from surgery.core.config import read_yaml

    found: dict[str, Any] = {}
    for word in split_words(raw):
        name, equals, value = word.partition("=")
        if not equals:
            raise SurgeryError(
                f"--gen-kwargs must be name=value pairs (got {word!r}). Write for example temperature=0.7,top_p=0.9"
            )
        try:
            found[name] = read_yaml(value)
        except ValueError as error:
            raise SurgeryError(f"--gen-kwargs {word!r}: {error}; for example temperature=0.7,top_p=0.9") from None
    return found


def _parse_json(option: str, raw: str | None) -> dict[str, Any]:
    try:
        found = json.loads(raw) if raw else {}
    except ValueError as error:
        raise SurgeryError(f"{option} {raw!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise SurgeryError(
            f'{option} must be a JSON object (got {raw!r}). Write for example {{"max_seq_lengths": [4096]}}'
        )
    return found
