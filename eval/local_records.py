"""Records of lm-eval's tasks in local JSONL files (`--data TASK=FILE`), scored by lm-eval's own task without a mirror.

Two forms are read:

    the columns of the task's own data set, for any task: {"goal": .., "sol1": .., "sol2": .., "label": 0} for piqa
    the form in which records of in-context learning are passed on (LLM Foundry's local_data), for the tasks of
    CONVERTERS: {"query", "choices", "gold"}, {"context", "continuation"} or {"context_options", "continuation", "gold"}

Records of the second form become columns from which lm-eval's task makes its own prompts and choices, so the scores are
those of lm-eval. The file may be anybody's: every line is checked, and an error names the file and the line.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from surgery.core.errors import SurgeryError
from surgery.core.files import parse_json
from surgery.core.hub_errors import first_line
from surgery.eval.results.data_read import DATASET_NAME, note_read
from surgery.eval.suite import EvalOptions

Record = dict[str, Any]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FOUNDRY_KEYS = ("query", "context_options", "continuation")


@dataclass(frozen=True)
class LocalRecords:
    """The records of one task.

    Attributes:
        lines: line numbers in the file.
        rows: columns of the task's data set.
        converted: whether the rows were made from the form of in-context learning, and are right by construction.
    """

    path: Path
    lines: tuple[int, ...]
    rows: tuple[Record, ...] = ()
    converted: bool = False


# -- reading -----------------------------------------------------------------------------------------
def read_records(task: str, path: Path) -> LocalRecords:
    """Read a task's records.

    Raises SurgeryError, which names the file and the line, for anything that the task could not read.
    """
    numbered = list(_read_lines(path))
    if not numbered:
        raise SurgeryError(f"--data {task}={path} has no records. Write one JSON object per line.")
    first = numbered[0][1]
    convert = CONVERTERS.get(task) if any(key in first for key in FOUNDRY_KEYS) else None
    rows = []
    for number, record in numbered:
        where = f"{path}, line {number}"
        _check_like_first(record, first, where, numbered[0][0])
        try:
            rows.append(record if convert is None else convert(record))
        except _WrongRecordError as error:
            raise SurgeryError(f"{where}: {error}, in a record of {task}. {_expected_keys(task)}") from None
    return LocalRecords(path, tuple(number for number, _ in numbered), tuple(rows), convert is not None)


def _read_lines(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield (line number, object) of every line that is not empty."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SurgeryError(f"--data: {path} cannot be read ({error.strerror}). Give a file of JSON lines.") from None
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = parse_json(line.decode("utf-8"), parse_constant=_refuse_constant)
        except UnicodeDecodeError:
            raise SurgeryError(
                f"{where} is not UTF-8. Convert the file, for example: iconv -f LATIN1 -t UTF-8"
            ) from None
        except ValueError as error:
            raise SurgeryError(f"{where} is not JSON ({first_line(error)}). Write one JSON object per line.") from None
        if not isinstance(record, dict):
            raise SurgeryError(f"{where} must be a JSON object (got {_kind(record)}). Write one JSON object per line.")
        yield number, record


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _check_like_first(record: Record, first: Record, where: str, first_line_number: int) -> None:
    """Raise SurgeryError unless a record has the keys of the first one with values of the same types, as a table needs
    them.
    """
    for key in sorted(first.keys() ^ record.keys()):
        has, lacks = ("no", "has") if key in first else ("a", "does not have")
        raise SurgeryError(
            f"{where} has {has} key {key!r}, which line {first_line_number} {lacks}. Every record needs the same keys."
        )
    for key, value in record.items():
        if not _same_type(value, first[key]):
            raise SurgeryError(
                f"{where}: {key!r} is {_kind(value)}, and in line {first_line_number} {_kind(first[key])}. "
                "A key needs the same type in every record."
            )


def _same_type(a: Any, b: Any) -> bool:
    """Return whether two values fit into one column; null fits everywhere."""
    if a is None or b is None:
        return True
    if isinstance(a, list) and isinstance(b, list):
        items = [item for item in (*a, *b) if item is not None]
        return all(_same_type(item, items[0]) for item in items[1:])
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same_type(a[key], b[key]) for key in a)
    return _kind(a) == _kind(b) and "too large" not in _kind(a)


def _kind(value: Any) -> str:
    """Return the type of a JSON value in words."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int):
        return "a whole number" if -(2**63) <= value < 2**63 else "a whole number that is too large"
    if isinstance(value, float):
        return "a number" if math.isfinite(value) else "a number that is too large"
    names: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


# -- records of in-context learning ------------------------------------------------------------------
class _WrongRecordError(Exception):
    """What is wrong with a record, without its place."""


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise _WrongRecordError(f"{key!r} must be a text that is not empty (got {_shown(value)})")
    return value


def _texts(record: Record, key: str, count: int | None = None) -> list[str]:
    values = record.get(key)
    texts = isinstance(values, list) and len(values) > 1 and all(isinstance(v, str) and v.strip() for v in values)
    if not isinstance(values, list) or not texts or count not in (None, len(values)):
        expected = "a list of at least two texts" if count is None else f"a list of {count} texts"
        raise _WrongRecordError(f"{key!r} must be {expected} that are not empty (got {_shown(values)})")
    return values


def _gold(record: Record, choices: Sequence[str]) -> int:
    gold = record.get("gold")
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise _WrongRecordError(f"'gold' must be the number of a choice, 0 to {len(choices) - 1} (got {_shown(gold)})")
    return gold


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)[:80]


def _question(record: Record) -> str:
    """Return the question of `Question: ..`; lm-eval's prompts add that word and `Answer:`."""
    query = _text(record, "query").removeprefix("Question: ")
    return query.removesuffix("Answer:").removesuffix("\n") if query.endswith(("\nAnswer:", "\n")) else query


def _convert_piqa(record: Record) -> Record:
    choices = _texts(record, "choices", 2)
    return {"goal": _question(record), "sol1": choices[0], "sol2": choices[1], "label": _gold(record, choices)}


def _convert_arc(record: Record) -> Record:
    choices = _texts(record, "choices")
    if len(choices) > len(LETTERS):
        raise _WrongRecordError(f"'choices' has {len(choices)} entries, more than there are letters")
    labels = list(LETTERS[: len(choices)])
    columns = {"text": choices, "label": labels}
    return {"question": _question(record), "choices": columns, "answerKey": labels[_gold(record, choices)]}


def _convert_boolq(record: Record) -> Record:
    choices = _texts(record, "choices", 2)
    if sorted(choices) != ["no", "yes"]:
        raise _WrongRecordError(f"'choices' must be no and yes (got {_shown(choices)})")
    passage, mark, question = _text(record, "query").removeprefix("Passage: ").rpartition("\nQuestion: ")
    if not mark:
        raise _WrongRecordError("'query' must be a passage, a line break and `Question: ..`")
    question = _question({"query": question}).removesuffix("?")  # the prompt adds a question mark
    return {"passage": passage, "question": question, "label": ("no", "yes").index(choices[_gold(record, choices)])}


def _convert_copa(record: Record) -> Record:
    choices = _texts(record, "choices", 2)
    match = re.fullmatch(r"(.*?),?\s+(because|therefore)\s*", _text(record, "query"), re.DOTALL)
    if match is None:
        raise _WrongRecordError("'query' must end with `because` or `therefore`")
    kind = {"because": "cause", "therefore": "effect"}[match[2]]
    columns = {"choice1": choices[0], "choice2": choices[1], "label": _gold(record, choices)}
    return {"premise": f"{match[1]}.", "question": kind, **columns}  # the prompt drops the period


def _convert_winogrande(record: Record) -> Record:
    options, rest = _texts(record, "context_options", 2), _text(record, "continuation")
    words = zip(*(option.split(" ")[:-1] for option in options))
    shared = "".join(f"{one} " for one, _ in takewhile(lambda pair: pair[0] == pair[1], words))
    if "_" in shared:  # the mark of the gap, of which lm-eval takes the first
        shared = ""
    answer = str(_gold(record, options) + 1)
    one, other = (option[len(shared) :] for option in options)
    return {"sentence": f"{shared}_ {rest}", "option1": one, "option2": other, "answer": answer}


def _convert_lambada(record: Record) -> Record:
    context, last = _text(record, "context"), _text(record, "continuation")
    if " " in last:
        raise _WrongRecordError(f"'continuation' must be one word without a space (got {_shown(last)})")
    return {"text": f"{context} {last}"}


CONVERTERS: dict[str, Callable[[Record], Record]] = {
    "lambada_openai": _convert_lambada,
    "arc_easy": _convert_arc,
    "arc_challenge": _convert_arc,
    "piqa": _convert_piqa,
    "winogrande": _convert_winogrande,
    "copa": _convert_copa,
    "boolq": _convert_boolq,
}
FOUNDRY_FORMS = {"lambada_openai": "context, continuation", "winogrande": "context_options, continuation, gold"}


def _expected_keys(task: str) -> str:
    """Return the sentence that says which keys a task's records may have."""
    columns = f"Records of {task} have the columns of its data set"
    if task in CONVERTERS:
        return f"{columns}, or the keys {FOUNDRY_FORMS.get(task, 'query, choices, gold')}."
    return f"{columns}; the keys query, choices, gold are read for {', '.join(CONVERTERS)} only."


# -- lm-eval's tasks ---------------------------------------------------------------------------------
def read_task_records(configs: Sequence[Record], options: EvalOptions) -> dict[str, LocalRecords]:
    """Return the local records of tasks by name, empty if --data has none of them.

    Raises SurgeryError if only some tasks of a group have records, or for a task that reads its data by code of its
    own.
    """
    paths = {str(config.get("task")): options.find_records(str(config.get("task"))) for config in configs}
    if not any(paths.values()):
        return {}
    if lacking := [task for task, path in paths.items() if path is None]:
        raise SurgeryError(f"--data has no records of {', '.join(lacking)}. Name the tasks with records in --tasks.")
    for config in configs:
        path = config.get("dataset_path")
        if config.get("class") or config.get("dataset_kwargs") or not DATASET_NAME.fullmatch(str(path)):
            raise SurgeryError(
                f"--data: lm-eval's {config.get('task')} does not read a plain data set, so it takes no local records. "
                "Leave it out."
            )
    return {task: read_records(task, path) for task, path in paths.items() if path is not None}


@contextmanager
def records_mirror(configs: Sequence[Record], records: Mapping[str, LocalRecords]) -> Iterator[Path]:
    """Yield a temporary mirror (offline_data.py) in which every split that a task names consists of its records."""
    with tempfile.TemporaryDirectory(prefix="surgery-records-") as root:
        listed: dict[str, list[Record]] = {}
        for number, config in enumerate(configs):
            task, folder = str(config["task"]), Path(root, config["dataset_path"])
            folder.mkdir(parents=True, exist_ok=True)
            rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in records[task].rows)
            (folder / f"{number}.jsonl").write_text(rows, encoding="utf-8")
            files = [{"split": split, "path": f"{number}.jsonl"} for split in _splits(config)]
            listed.setdefault(config["dataset_path"], []).append(
                {"config_name": config.get("dataset_name") or "default", "data_files": files}
            )
            note_read("records", task, records[task].path)
        for path, entries in listed.items():
            if len({entry["config_name"] for entry in entries}) < len(entries):
                raise SurgeryError(
                    f"--data: several tasks of one group read {path}. Name the tasks one by one in --tasks."
                )
            header = yaml.safe_dump({"configs": entries}, sort_keys=False, allow_unicode=True)
            Path(root, path, "README.md").write_text(f"---\n{header}---\n", encoding="utf-8")
        yield Path(root)


def _splits(config: Record) -> list[str]:
    named = [config.get(f"{kind}_split") for kind in ("training", "validation", "test", "fewshot")]
    named.append((config.get("fewshot_config") or {}).get("split"))
    return [split for split in dict.fromkeys(named) if isinstance(split, str)]


def explain_unreadable(task: str, records: LocalRecords, error: Exception) -> SurgeryError:
    """Return the error for records of which lm-eval's task cannot make its first question."""
    return SurgeryError(
        f"{records.path}, line {records.lines[0]}: lm-eval's {task} cannot make a question of it "
        f"({type(error).__name__}: "
        f"{first_line(error)}). {_expected_keys(task)}"
    )


def check_documents(task: Any, records: LocalRecords, num_fewshot: int | None) -> None:
    """Raise SurgeryError for a record of which the loaded task can make no question, and for examples, of which a file
    has none.

    num_fewshot: the option. A label outside the choices would count as a wrong answer, or as the last choice if it is
    negative.
    """
    name = task.config.task
    shots = task.get_config("num_fewshot")
    shots = num_fewshot if num_fewshot is not None and shots != 0 else shots
    if shots and not task.fewshot_cfg.samples:  # examples that the task itself lists
        raise SurgeryError(
            f"{name} asks with {shots} examples, and --data has no records to take them from. Give --num-fewshot 0, or "
            "a mirror "
            "(--data-root), which has the data set's split of examples."
        )
    if records.converted or task.config.process_docs is not None:  # that may drop records, so a document has no line
        return
    for number, doc in zip(records.lines, task.eval_docs):
        try:
            text, target = task.doc_to_text(doc), task.doc_to_target(doc)
            choices = task.doc_to_choice(doc) if task.config.doc_to_choice is not None else None
        except Exception as error:
            raise explain_unreadable(name, LocalRecords(records.path, (number,)), error) from None
        answer = text if task.multiple_input else target
        if task.OUTPUT_TYPE == "multiple_choice" and not _is_choice(answer, choices or []):
            raise SurgeryError(
                f"{records.path}, line {number}: the answer {_shown(answer)} is none of the {len(choices or [])} "
                f"choices of {name}. "
                f"{_expected_keys(name)}"
            )


def _is_choice(answer: Any, choices: Sequence[Any]) -> bool:
    if isinstance(answer, list):
        return all(_is_choice(item, choices) for item in answer)
    return 0 <= answer < len(choices) if isinstance(answer, int) else answer in choices
