"""Tokenize evaluation texts, and cut them into windows or documents.

Many and long texts are tokenized in one call: a fast tokenizer does so in parallel, without offsets and without holding
Python's lock. The ids are those of `tokenizer(text).input_ids`. A slow tokenizer is called for one text at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from surgery.calibration.data import CALIBRATION_SUFFIXES, HUB_DATASET, document_stream, special_tokens, text_windows
from surgery.core.errors import SurgeryError
from surgery.eval.results.data_read import note_read
from surgery.eval.suite import EvalModel, EvalOptions, stable_id

Encode = Callable[[Sequence[str]], list[np.ndarray]]
Counts = Callable[[Sequence[str]], list[int]]


def encoder(tokenizer: Any, special: bool = True) -> Encode:
    """Return a function texts -> token ids (int32 arrays). special: add the tokenizer's special tokens."""
    fast = _fast_backend(tokenizer)
    if fast is None:
        return lambda texts: [
            to_array(tokenizer(text, add_special_tokens=special, verbose=False).input_ids) for text in texts
        ]
    return lambda texts: [to_array(encoding.ids) for encoding in fast(list(texts), add_special_tokens=special)]


def counter(tokenizer: Any, special: bool = True) -> Counts:
    """Return a function texts -> numbers of tokens. special: count the tokenizer's special tokens."""
    fast = _fast_backend(tokenizer)
    if fast is None:
        return lambda texts: [len(tokenizer(t, add_special_tokens=special, verbose=False).input_ids) for t in texts]
    return lambda texts: [len(encoding) for encoding in fast(list(texts), add_special_tokens=special)]


def _fast_backend(tokenizer: Any) -> Any:
    """Return the batch encoder of a fast tokenizer; None for a slow one."""
    # A fast tokenizer keeps the truncation and padding of earlier calls: reset both.
    tokenizer("x", truncation=False, padding=False, verbose=False)
    return getattr(getattr(tokenizer, "backend_tokenizer", None), "encode_batch_fast", None)


def to_array(ids: list[int]) -> np.ndarray:
    """Convert a list of token ids to an int32 array; ten times faster than torch.tensor."""
    return np.fromiter(ids, dtype=np.int32, count=len(ids))


PLAIN_TEXT_SUFFIXES = (".txt", ".md", "")  # read as one document of running text
WIKITEXT = "EleutherAI/wikitext_document_level"


@dataclass(frozen=True)
class TextWindow:
    """Token ids of one forward pass. unit: id of the document it is part of; None: the window is its own bootstrap
    unit.
    """

    ids: tuple[int, ...]
    id: str
    unit: str | None


def resolve_text(suite: str, text: str | None, mirror: Path | None) -> str:
    """Return the file or Hub data set that a suite reads: `text`, else WikiText of the mirror.

    Raises SurgeryError if there is none or `text` does not exist.
    """
    if text is None and mirror is not None and (mirror / WIKITEXT).is_dir():
        return str(mirror / WIKITEXT)
    if text is None:
        raise SurgeryError(
            f"--suite {suite} needs a text. Give --text FILE (.txt, .jsonl, .parquet) or --text org/name, a Hub data "
            "set" + (f"; the mirror {mirror} has no {WIKITEXT}" if mirror else "")
        )
    if not Path(text).exists() and (not HUB_DATASET.fullmatch(text) or Path(text).suffix in CALIBRATION_SUFFIXES):
        raise SurgeryError(f"--text {text!r} is not a file. Give a text file, or a Hub data set as org/name.")
    return text


def window_length_notes(eval_model: EvalModel, options: EvalOptions) -> list[str]:
    """Return a note if windows are shorter than requested because the model takes no longer inputs."""
    if eval_model.longest is None or eval_model.longest >= options.length:
        return []
    return [
        f"windows have {eval_model.longest:,} tokens instead of {options.length:,}: the context length of "
        f"{eval_model.name}"
    ]


def note_text(text: str, options: EvalOptions) -> None:
    """Record which text is read: a file, a data set of the mirror, or one of the Hub."""
    if options.text is None and options.data_root is not None:
        note_read("mirror", WIKITEXT, options.data_root)
    elif Path(text).exists():
        note_read("file", text)
    else:
        note_read("hub", text.partition(":")[0])


def load_text_windows(suite: str, eval_model: EvalModel, options: EvalOptions) -> list[TextWindow]:
    """Cut a text into windows of at most `options.length` tokens, special tokens included.

    A file of running text gives windows of full length, each a bootstrap unit. A data set gives its documents, each a
    unit, split where a document is longer. Windows are never longer than the model's longest input.
    """
    text = resolve_text(suite, options.text, options.data_root)
    note_text(text, options)
    length = min(options.length, eval_model.longest or options.length)
    if Path(text).is_file() and Path(text).suffix in PLAIN_TEXT_SUFFIXES:
        windows_NT = text_windows(
            document_stream(text), eval_model.tokenizer, options.tokens, length, text, option="--length "
        )
        windows = windows_NT.tolist()
        return [TextWindow(tuple(row), stable_id(i, row), None) for i, row in enumerate(windows[: options.limit])]
    return list(_document_windows(text, eval_model.tokenizer, options, length))


def _document_windows(text: str, tokenizer: Any, options: EvalOptions, length: int) -> Iterator[TextWindow]:
    """Yield the windows of each document, up to `options.tokens` tokens in all."""
    before, after = special_tokens(tokenizer)
    body, used = length - len(before) - len(after), 0
    for number, document in enumerate(islice(_stream_documents(text), options.limit)):
        if used >= options.tokens:
            return
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"][: options.tokens - used]
        used += len(ids)
        unit = stable_id(number, document)
        for start in range(0, len(ids), body):
            piece = (*before, *ids[start : start + body], *after)
            if len(piece) > 1:
                yield TextWindow(piece, f"{unit} {start}", unit)


def _stream_documents(text: str) -> Iterator[str]:
    """Yield documents of a text; pages of WikiText's test split for the mirrored data set."""
    if not text.endswith(WIKITEXT) or not Path(text).is_dir():
        yield from document_stream(text)
        return
    from surgery.eval.offline_data import load_folder_rows

    for row in load_folder_rows(Path(text), "wikitext-2-raw-v1", "test"):
        yield row["page"]
