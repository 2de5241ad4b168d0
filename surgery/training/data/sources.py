"""Open the data sources of a recipe (files, folders, Hub data sets) and find the columns to read."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from surgery.calibration.chats import CHAT_COLUMNS
from surgery.calibration.data import decode_utf8, detect_encoding
from surgery.core.digests import arrow_cache
from surgery.core.errors import SurgeryError, suggestion
from surgery.training.data.documents import DatasetTable, Side, TextFiles, files_identity, is_held_out
from surgery.training.data.readers import DocumentReader, StreamReader, TableReader, unreadable_error
from surgery.training.data.recipe import SourceConfig
from surgery.training.data.teacher_text import TokenTable, is_teacher_text

TEXT_SUFFIXES, TABLE_FORMATS = (
    (".txt", ".md"),
    {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"},
)
COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2")  # of tables
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def open_data_source(config: SourceConfig, seed: int, side: Side, share: float, shuffled: bool) -> DocumentReader:
    """Return a reader of the training or validation documents of a source.

    share: fraction of the documents held out for validation. Raises SurgeryError if the source cannot be opened.
    """
    filter_fn = None
    if share > 0:
        filter_fn = lambda content: is_held_out(content, share) == (side == "validation")  # noqa: E731
    path = Path(config.path)
    if config.generated is not None or is_teacher_text(path):
        return TableReader(TokenTable(path), seed, shuffled, filter_fn)
    if path.exists():
        kind, files = _find_files(path)
        for name in ("subset", "revision", "split"):
            if getattr(config, name) != SourceConfig.model_fields[name].default:
                raise SurgeryError(
                    f"data source {path} is a local {'folder' if path.is_dir() else 'file'}; {name} applies to Hub "
                    "data sets only"
                )
        if kind == "text":
            if config.chat or config.text:
                column = config.messages or config.prompt or config.text
                raise SurgeryError(f"data source {path} is plain text and has no columns. Remove {column!r}.")
            return TableReader(TextFiles(files, config.separator, side, share), seed, shuffled, filter_fn)
        return _open_table(config, kind, files, seed, shuffled, filter_fn)
    if not HUB_ID.fullmatch(config.path) or _file_kind(path):
        raise SurgeryError(f"data source {config.path!r} must be a local file or folder, or a Hub id (org/name)")
    return _open_table(config, None, [], seed, shuffled, filter_fn)


def _file_kind(path: Path) -> str:
    """Return "text", the name of the format in the `datasets` library, or "" for an unknown suffix."""
    if path.suffix in COMPRESSED_SUFFIXES:
        return TABLE_FORMATS.get(Path(path.stem).suffix, "")
    return "text" if path.suffix in TEXT_SUFFIXES else TABLE_FORMATS.get(path.suffix, "")


def _find_files(path: Path) -> tuple[str, list[Path]]:
    """Return the kind of the files at `path`, and the files sorted by name."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and _file_kind(p))
    kinds = {_file_kind(p) for p in files}
    if not files or "" in kinds:
        known = ", ".join((*TEXT_SUFFIXES, *TABLE_FORMATS))
        raise SurgeryError(
            f"data source {path} has {'no file' if not files else 'a file without one'} of the supported suffixes "
            f"({known}; "
            f"tables may be compressed: {', '.join(COMPRESSED_SUFFIXES)})"
        )
    if len(kinds) > 1:
        raise SurgeryError(
            f"data source {path} contains files of several kinds ({', '.join(sorted(kinds))}). Make each kind its own "
            "source."
        )
    if "text" in kinds:
        for file in files:
            with open(file, "rb") as opened:
                start = opened.read(2**16)
            name = detect_encoding(start[:4096])
            if name not in (None, "utf-8-sig"):
                raise SurgeryError(
                    f"data source {file} must be UTF-8 (got {str(name).upper()}). Convert it, for example: "
                    f"iconv -f {str(name).upper()} -t UTF-8"
                )
            decode_utf8(file, start)
    return kinds.pop(), files


def _open_table(
    config: SourceConfig, kind: str | None, files: list[Path], seed: int, shuffled: bool, filter_fn: Any
) -> Any:
    import datasets

    where = f"data source {config.path}"
    if config.separator is not None:
        raise SurgeryError(f"{where} has one document per row; separator applies to text files only")
    options: dict[str, Any] = {"data_files": [str(f) for f in files]} if kind else {"revision": config.revision}
    try:
        with arrow_cache(files) if kind else nullcontext() as cache:
            rows: Any = datasets.load_dataset(
                kind or config.path,
                None if kind else config.subset,
                split="train" if kind else config.split,
                streaming=config.streaming,
                cache_dir=None if cache is None else str(cache),
                trust_remote_code=False,
                **options,
            )
            first = next(iter(rows.take(1)), None)
    except SurgeryError:
        raise
    except Exception as error:  # `datasets` raises many kinds, from many libraries
        raise unreadable_error(where, error) from None
    if first is None:
        raise SurgeryError(f"{where} has no rows")
    content = content_reader(config, first, where)
    identity = files_identity(files) if kind else f"{config.path} {config.subset} {config.split} {config.revision}"
    if config.streaming:
        return StreamReader(rows, content, filter_fn, identity, where)
    return TableReader(DatasetTable(rows, content, identity), seed, shuffled, filter_fn)


def content_reader(config: SourceConfig, first: dict[str, Any], where: str) -> Callable[[dict[str, Any]], Any]:
    """Return a function row -> content of a Document, None if it is empty. first: the first row, which shows the
    columns.
    """
    columns = [n for n in (config.text, config.messages, config.prompt, config.completion) if n is not None]
    for name in columns:
        if name not in first:
            raise SurgeryError(f"{where} has no column {name!r}{suggestion(name, first)}; columns: {', '.join(first)}")
    config = guess_columns(config, first)
    if config.messages is not None:
        messages = config.messages
        return lambda row: row[messages] or None
    if config.prompt is not None and config.completion is not None:
        prompt, completion = config.prompt, config.completion
        return lambda row: (row[prompt], row[completion]) if row[completion] else None
    if config.text is None:
        raise SurgeryError(
            f"{where}: cannot tell which column holds the text. Set text: NAME or messages: NAME; columns: "
            f"{', '.join(first)}"
        )
    column = config.text

    def read_text(row: dict[str, Any]) -> str | None:
        text = row[column]
        if text is not None and not isinstance(text, str):
            raise SurgeryError(
                f"{where}: column {column!r} must hold texts (a row has {str(text)[:80]!r}, {type(text).__name__})"
            )
        return text or None

    return read_text


def guess_columns(config: SourceConfig, first: dict[str, Any]) -> SourceConfig:
    """Return the config with columns of the usual names filled in, unless it names one."""
    if config.chat or config.text is not None:
        return config
    texts = [key for key, value in first.items() if isinstance(value, str)]
    chats = [key for key in CHAT_COLUMNS if isinstance(first.get(key), list)]
    if "text" in texts:
        return config.model_copy(update={"text": "text"})
    if chats:
        return config.model_copy(update={"messages": chats[0]})
    if {"prompt", "completion"} <= set(first):
        return config.model_copy(update={"prompt": "prompt", "completion": "completion"})
    return config.model_copy(update={"text": texts[0]}) if len(texts) == 1 else config
