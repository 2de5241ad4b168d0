"""EvalOptions: the options of an evaluation, each declared once.

`surgery eval` and `surgery run` have a command-line option for each field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from surgery.core.config import CommandLine, Length, fields_at_default, read_yaml
from surgery.core.digests import content_digest
from surgery.core.errors import SurgeryError, suggestion

ANY_TASK = "*"  # key of a folder with TASK.jsonl in EvalOptions.data
OMITTED_AT_DEFAULT = (  # see EvalOptions.digest
    "prompts", "fill", "pairs", "data", "greedy_prompts", "greedy_tokens", "tolerance",
)  # fmt: skip
PairSettings = Literal["zoology", "based", "log-linear"]  # the keys of eval.suites.mqar.PAPER_SETTINGS


def split_words(value: Any) -> Any:
    """Return the words of text that is separated by commas; any other value unchanged."""
    return tuple(word.strip() for word in value.split(",") if word.strip()) if isinstance(value, str) else value


def parse_pair_numbers(value: Any) -> Any:
    """Return the name of a paper's settings, or the numbers of text such as "4,16"; any other value unchanged."""
    words = split_words(value)
    if words is value or all(word.isdecimal() for word in words):
        return words
    if value.strip() in get_args(PairSettings):
        return value.strip()
    names = get_args(PairSettings)
    raise ValueError(
        f"must be whole numbers separated by commas, or one of {', '.join(names)}{suggestion(value, names)}"
    )


def parse_arguments(value: Any) -> Any:
    """Return {"temperature": 0.7} for text such as "temperature=0.7,top_p=0.9", each value read as YAML; any other
    value unchanged.
    """
    if not isinstance(value, str):
        return value
    arguments: dict[str, Any] = {}
    for word in split_words(value):
        name, equals, raw = word.partition("=")
        if not equals:
            raise ValueError("must be name=value pairs, for example temperature=0.7,top_p=0.9")
        try:
            arguments[name] = read_yaml(raw)
        except ValueError as error:
            raise ValueError(f"{word}: {error}; for example temperature=0.7,top_p=0.9") from None
    return arguments


def parse_json(value: Any) -> Any:
    """Return the object of JSON text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value) if value else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError('must be a JSON object, for example {"max_seq_lengths": [4096]}')
    return parsed


def parse_records(value: Any) -> Any:
    """Return {task: file} for words TASK=FILE; a folder has the key ANY_TASK.

    Any other value than a list is returned unchanged.
    """
    if not isinstance(value, (list, tuple)):
        return value
    files: dict[str, Path] = {}
    for word in value:
        name, equals, path = (ANY_TASK, "=", word) if Path(word).is_dir() else word.partition("=")
        if not (name and equals and path):
            raise ValueError(
                f"{word!r} must be TASK=FILE, or a folder with TASK.jsonl (it is no folder). Write for example "
                "piqa=piqa.jsonl"
            )
        if name in files:
            raise ValueError(f"names {'two folders' if name == ANY_TASK else name + ' twice'}. Leave one out.")
        if name != ANY_TASK and not Path(path).is_file():
            what = "is a folder" if Path(path).is_dir() else "does not exist"
            raise ValueError(f"{word}: {path} {what}. Give a file of JSON lines.")
        files[name] = Path(path)
    return files


class EvalOptions(BaseModel):
    """Options of an evaluation.

    None or empty means the suite's default. Frozen, because stored results are keyed by it.

    A field's description is the help text of its option, and its bounds are the option's; fields of several values also
    take the text of the command line, e.g. lengths="4k,8k".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str | None = Field(
        None, description="Score this text: a file or a Hub data set (org/name[:config:split:column])."
    )
    limit: int | None = Field(None, ge=1, description="Use at most this many samples for each task, length and depth.")
    tokens: int = Field(65536, ge=16, description="Score this many tokens of the text.")
    length: int = Field(1024, ge=8, description="Split the text into windows of this many tokens.")
    lengths: Annotated[tuple[Annotated[Length, Field(ge=8)], ...], BeforeValidator(split_words)] = Field(
        (), description="Build long-context samples of these lengths in tokens, e.g. 4096,8192 or 4k,8k."
    )
    depths: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], BeforeValidator(split_words)] = Field(
        (), description="Place needles at these relative positions in [0, 1], e.g. 0,0.5,1."
    )
    tasks: Annotated[tuple[str, ...], BeforeValidator(split_words)] = Field(
        (), description="Run only these tasks of the suite, separated by commas."
    )
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="Sequences in a batch, or auto."
    )
    seed: int = Field(0, ge=0, description="Seed of the samples, which are the same for both models.")
    data_root: Annotated[Path | None, CommandLine(metavar="DIR")] = Field(
        None, description="Read data sets from this local mirror, written by `surgery fetch-eval-data`."
    )
    data: Annotated[
        dict[str, Path], BeforeValidator(parse_records), CommandLine(metavar="TASK=FILE", is_repeatable=True)
    ] = Field(
        {},
        description="Read the records of an lm-eval task from this file of JSON lines, e.g. piqa=piqa.jsonl; or a "
        "folder with TASK.jsonl. Repeatable.",
    )
    num_fewshot: int | None = Field(
        None, ge=0, description="Number of few-shot examples in the prompts of lm-eval tasks. Default: each task's own."
    )
    gen_kwargs: Annotated[dict[str, Any], BeforeValidator(parse_arguments)] = Field(
        {}, description="Arguments passed to generate(), e.g. temperature=0.7,top_p=0.9."
    )
    metadata: Annotated[dict[str, Any], BeforeValidator(parse_json)] = Field(
        {}, description="JSON object passed to the lm-eval tasks as their metadata."
    )
    include_path: Annotated[Path | None, CommandLine(metavar="DIR")] = Field(
        None, description="Also load lm-eval task definitions from this folder."
    )
    apply_chat_template: bool = Field(False, description="Format prompts with the model's chat template.")
    samples: Annotated[dict[str, tuple[int, ...]], BeforeValidator(parse_json)] = Field(
        {}, description='Run only these documents of lm-eval tasks, as JSON: {"piqa": [0, 5]}.'
    )
    use_cache: Annotated[Path | None, CommandLine(metavar="DIR")] = Field(
        None,
        description="Store every answer in this folder, for later runs with other options too.",
    )
    prompts: Literal["based", "jrt"] = Field(
        "based",
        description="Prompts of the retrieval tasks: based, or jrt (Just-Read-Twice).",
    )
    fill: Literal["exact", "ruler"] = Field(
        "exact",
        description="Fill RULER's prompts to the exact number of tokens (exact) or by whole units (ruler).",
    )
    pairs: Annotated[tuple[Annotated[int, Field(ge=1)], ...] | PairSettings, BeforeValidator(parse_pair_numbers)] = (
        Field(
            (),
            description="Key-value pairs of mqar, e.g. 4,16,64, or those of a paper: zoology, based, log-linear. "
            "Default: one for each 16 tokens.",
        )
    )
    greedy_prompts: int = Field(
        32, ge=0, description="Compare the greedy texts of agreement after this many prompts, taken from the text."
    )
    greedy_tokens: int = Field(64, ge=1, description="Compare greedy texts of this many tokens.")
    tolerance: float = Field(
        0.01,
        ge=0,
        description="Count a document as a tie in agreement up to this difference, in nats per token.",
    )

    def find_records(self, task: str) -> Path | None:
        """Return the file with local records of an lm-eval task: its own, or TASK.jsonl in the folder; None if there is
        none.
        """
        if task in self.data:
            return self.data[task]
        folder = self.data.get(ANY_TASK)
        file = folder / f"{task}.jsonl" if folder is not None and Path(task).name == task else None
        return file if file is not None and file.is_file() else None

    def digest(self) -> str:
        """Return the SHA-256 of every option that affects results.

        Options of OMITTED_AT_DEFAULT enter only if they are set, so that results of versions without them stay valid.
        Files enter by content. The mirror enters as present or absent only: the data sets that a suite reads from it
        are recorded per result (eval/results/data_read.py).
        """
        unset = fields_at_default(self, OMITTED_AT_DEFAULT)
        data = self.model_dump(mode="json", exclude={"batch_size", "use_cache", "data_root", *unset})
        for task, path in self.data.items():
            data["data"][task] = content_digest(path) if path.exists() else str(path)
        data["mirror"] = self.data_root is not None
        for name in ("text", "include_path"):
            if data[name] is not None and Path(data[name]).exists():
                data[name] = content_digest(Path(data[name]))
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def parse_options(
    values: Mapping[str, Any], where: str, name_option: Callable[[str], str] = lambda name: name
) -> EvalOptions:
    """Return validated options. A SurgeryError names the option that is wrong.

    Args:
        values: values by field, as the command line or Python gives them.
        where: the command or function, for the message on an unknown option.
        name_option: returns an option's name in messages, e.g. --batch-size for batch_size.
    """
    try:
        return EvalOptions.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
    field = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        raise SurgeryError(f"{where} has no option {field!r}{suggestion(field, EvalOptions.model_fields)}")
    cause = first.get("ctx", {}).get("error")  # a ValueError of one of the parsers above
    reason = str(cause) if cause is not None else first["msg"][:1].lower() + first["msg"][1:]
    raise SurgeryError(f"{name_option(field)} {first.get('input')!r}: {reason}")
