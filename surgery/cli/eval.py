"""The command `surgery eval`; imports nothing heavy before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from surgery.cli import options
from surgery.cli.console import progress, show
from surgery.core.errors import SurgeryError
from surgery.core.progress import is_main_process

Suites = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--suite", "-s", help="What to measure; repeatable, or separated by commas. --list-suites names all."),
]
Base = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--compare", metavar="BASE", help="The original, measured on the same samples."),
]
Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--out", "-o", help="Folder for results, samples and plots; what it holds is not measured again."),
]
Text = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Text to score: a file, or a Hub data set org/name[:config:split:column]."),
]
FailBelow = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--fail-below", metavar="NAME=SHARE", help="Exit 1 unless so much of the base's score is left; ppl=1.05."
    ),
]
Limit = Annotated[Optional[int], typer.Option(min=1, help="Samples of every task and length, at most.")]  # noqa: UP045
Tokens = Annotated[int, typer.Option(min=16, help="Tokens of the text to score.")]
Length = Annotated[int, typer.Option(min=8, help="Tokens of a window of the text.")]
Lengths = Annotated[Optional[str], typer.Option(help="Tokens of samples, e.g. 4096,8192,16384.")]  # noqa: UP045
Depths = Annotated[Optional[str], typer.Option(help="Where needles lie, e.g. 0,0.5,1.")]  # noqa: UP045
Tasks = Annotated[Optional[str], typer.Option(help="Of a suite, these tasks only, separated by commas.")]  # noqa: UP045
BatchSize = Annotated[str, typer.Option("--batch-size", help="Rows at a time, or auto.")]
Seed = Annotated[int, typer.Option(min=0, help="Of samples; the same for both models.")]
DataRoot = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--data-root", metavar="DIR", help="A local mirror of data sets (`surgery fetch-eval-data`)."),
]
FewShot = Annotated[Optional[int], typer.Option("--num-fewshot", min=0, help="Of lm-eval's tasks.")]  # noqa: UP045
GenKwargs = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--gen-kwargs", help="Passed to generate(), e.g. temperature=0.7,top_p=0.9."),
]
Metadata = Annotated[Optional[str], typer.Option(help="JSON passed to lm-eval's tasks.")]  # noqa: UP045
IncludePath = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--include-path", metavar="DIR", help="A folder of lm-eval tasks of one's own."),
]
SomeSamples = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--samples", help='Of lm-eval\'s tasks these documents, as JSON: {"piqa": [0, 5]}.'),
]
UseCache = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--use-cache", metavar="DIR", help="Keep every answer there; an interrupted suite goes on within."),
]
Chat = Annotated[bool, typer.Option("--apply-chat-template", help="Ask as the model's chat template says.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: as stored.")]
ListSuites = Annotated[bool, typer.Option("--list-suites", help="Print the suites, a line each.")]


def evaluate(
    context: typer.Context,
    converted: Annotated[str, typer.Argument(metavar="MODEL", help="Any checkpoint, converted or not.")] = "",
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
    num_fewshot: FewShot = None,
    gen_kwargs: GenKwargs = None,
    metadata: Metadata = None,
    include_path: IncludePath = None,
    apply_chat_template: Chat = False,
    samples: SomeSamples = None,
    use_cache: UseCache = None,
    device: options.Device = None,
    dtype: Dtype = "float32",
    trust_remote_code: options.TrustRemoteCode = False,
    list_suites: ListSuites = False,
    as_json: options.Json = False,
) -> None:
    """Measure a checkpoint, beside the original: suites of samples, paired; exit code 1 where a limit is missed.

    surgery eval OUT --text FILE --suite ppl --suite needle --compare SRC --out RESULTS --fail-below ppl=1.05
    """
    from surgery.eval.results.tables import eval_table
    from surgery.eval.run import evaluate as run
    from surgery.eval.suite import load_suites

    if list_suites:
        print("\n".join(f"{name:<14} {suite.description}" for name, suite in load_suites().items()))
        return
    if not converted:
        raise SurgeryError("give the checkpoint to measure: surgery eval MODEL --text FILE")
    chosen = [name for raw in suite or ["ppl"] for name in _split_words(raw)]
    eval_options = parse_options(
        text=text, limit=limit, tokens=tokens, length=length, lengths=_split_words(lengths), depths=_split_words(depths),
        tasks=_split_words(tasks), batch_size=batch_size, seed=seed, data_root=data_root, num_fewshot=num_fewshot,
        gen_kwargs=_parse_pairs(gen_kwargs), metadata=_parse_json("--metadata", metadata), include_path=include_path,
        apply_chat_template=apply_chat_template, samples=_parse_json("--samples", samples), use_cache=use_cache,
    )  # fmt: skip
    done = run(
        converted, chosen, eval_options, compare=compare, out=out, fail_below=fail_below or [], device=device, dtype=dtype,
        trust_remote_code=trust_remote_code, progress=progress(as_json), command=command_words(context),
    )  # fmt: skip
    if is_main_process():
        print(json.dumps(done.to_dict(), indent=2, default=str)) if as_json else show(eval_table(done))
        if out is not None and not as_json:
            show([f"results: {out}"])
    if done.exit_code:
        raise typer.Exit(done.exit_code)


def command_words(context: typer.Context) -> list[str]:
    """The words of the command line, a value after its option's name."""
    words = ["surgery", str(context.info_name)]
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        option = [max(parameter.opts, key=len)] if parameter.param_type_name == "option" else []
        for each in value if isinstance(value, (list, tuple)) else [value]:
            words += option if isinstance(each, bool) else [*option, str(each)]
    return words


def parse_options(**raw: Any) -> Any:
    """EvalOptions, with what is wrong said as an option of the command."""
    from pydantic import ValidationError

    from surgery.eval.suite import EvalOptions

    try:
        return EvalOptions(**raw)
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + str(first["loc"][0]).replace("_", "-")
        raise SurgeryError(f"{name} {first.get('input')!r}: {first['msg'].lower()}") from None


def _split_words(raw: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (raw or "").split(",") if word.strip())


def _parse_pairs(raw: str | None) -> dict[str, Any]:
    """temperature=0.7,top_p=0.9 as lm-eval reads it; numbers, true and false are those."""
    from surgery.core.config import read_yaml

    found: dict[str, Any] = {}
    for word in _split_words(raw):
        name, equals, value = word.partition("=")
        if not equals:
            raise SurgeryError(f"--gen-kwargs {word!r}: write name=value, for example temperature=0.7,top_p=0.9")
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
        raise SurgeryError(f'{option} {raw!r}: a JSON object, for example {{"max_seq_lengths": [4096]}}')
    return found
