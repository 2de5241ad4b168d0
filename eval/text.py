"""The text that suites read: windows of a running text, or documents one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from surgery.calibrate import FILES, HUB_DATASET, document_stream, special_tokens, text_windows
from surgery.errors import SurgeryError
from surgery.eval.suites import EvalOptions, Subject, stable_id

RUNNING = (".txt", ".md", "")  # one document: a file of running text
WIKITEXT = "EleutherAI/wikitext_document_level"


@dataclass(frozen=True)
class Piece:
    """ids of one forward; unit: the document it is of."""

    ids: tuple[int, ...]
    id: str
    unit: str | None


def check_text(suite: str, text: str | None, mirror: Path | None) -> str:
    if text is None and mirror is not None and (mirror / WIKITEXT).is_dir():
        return str(mirror / WIKITEXT)
    if text is None:
        raise SurgeryError(
            f"--suite {suite} reads text: --text FILE (.txt, .jsonl, .parquet) or --text org/name of a Hub data set"
            + (f"; {mirror} has no {WIKITEXT}" if mirror else "")
        )
    if not Path(text).exists() and (not HUB_DATASET.fullmatch(text) or Path(text).suffix in FILES):
        raise SurgeryError(f"--text {text!r} is not a file; give a text file, or a Hub data set as org/name")
    return text


def pieces(suite: str, subject: Subject, options: EvalOptions) -> list[Piece]:
    """Of a file of running text, windows of `length`, each a unit; of a data set its documents, each a unit, cut where it is
    longer than that. Both with the tokenizer's own special tokens, and never longer than the model was made for."""
    text = check_text(suite, options.text, options.data_root)
    length = min(options.length, subject.longest or options.length)
    if Path(text).is_file() and Path(text).suffix in RUNNING:
        windows = text_windows(document_stream(text), subject.tokenizer, options.tokens, length, text).tolist()
        return [Piece(tuple(row), stable_id(i, row), None) for i, row in enumerate(windows[: options.limit])]
    return list(_documents(text, subject.tokenizer, options, length))


def _documents(text: str, tokenizer: Any, options: EvalOptions, length: int) -> Iterator[Piece]:
    before, after = special_tokens(tokenizer)
    body, used = length - len(before) - len(after), 0
    for number, document in enumerate(islice(_stream(text), options.limit)):
        if used >= options.tokens:
            return
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"][: options.tokens - used]
        used += len(ids)
        unit = stable_id(number, document)
        for start in range(0, len(ids), body):
            piece = (*before, *ids[start : start + body], *after)
            if len(piece) > 1:
                yield Piece(piece, f"{unit} {start}", unit)


def _stream(text: str) -> Iterator[str]:
    if not text.endswith(WIKITEXT) or not Path(text).is_dir():
        yield from document_stream(text)
        return
    import datasets

    for row in datasets.load_dataset(text, "wikitext-2-raw-v1", split="test", trust_remote_code=False):
        yield row["page"]
