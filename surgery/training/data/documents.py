"""Random access to documents: of text files, memory-mapped, and of local data sets."""

from __future__ import annotations

import codecs
import hashlib
import json
import mmap
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from surgery.calibration.data import unify_line_ends
from surgery.core.digests import file_digest

Side = Literal["training", "validation"]
CHUNK_BYTES = 2**20  # bytes of a text file that are decoded at a time


@dataclass(frozen=True)
class Document:
    """A document, or one part of a long one.

    content: text, a list of messages, or (prompt, completion). begins, ends: whether it contains the start and the end
    of its document.
    """

    content: Any
    begins: bool = True
    ends: bool = True

    @property
    def size(self) -> int:
        """Approximate number of characters."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(str(text)) for text in self.content)


def is_held_out(content: Any, share: float) -> bool:
    """Return whether a document is held out, by a hash of its content: copies are on the same side. share: in [0,
    1).
    """
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


# -- tables: documents by number -------------------------------------------------------------------
class DocumentTable(Protocol):
    """Interface of tables: documents by number. held_out_by_content: whether single documents are held out, see
    `is_held_out`.
    """

    held_out_by_content: bool

    def __len__(self) -> int: ...
    def document_parts(self, i: int) -> Iterator[Document]:
        """Yield the parts of document i in order."""
        ...

    def identity(self) -> str:
        """Return a text that is equal for equal contents."""
        ...


class TextFiles:
    """Documents of text files, as byte ranges.

    Without a separator each file is one document, and its last part, from the start of a line, is held out for
    validation. Line ends are read as LF, also those of the separator, and a byte order mark is left out.
    """

    def __init__(self, files: list[Path], separator: str | None, side: Side, share: float):
        self.files, self.held_out_by_content = files, separator is not None
        self.spans = array("q")  # file, start, stop; start, stop; ..
        for number, path in enumerate(files):
            data = _map_file(path)
            spans = _separator_spans(data, separator) if separator else _side_span(data, side, share)
            for start, stop in spans:
                if data[start : min(stop, start + 4096)].strip() or data[start:stop].strip():
                    self.spans.extend((number, start, stop))

    def __len__(self) -> int:
        return len(self.spans) // 3

    def document_parts(self, i: int) -> Iterator[Document]:
        """Yield document i in parts of about CHUNK_BYTES bytes, cut at line breaks."""
        number, start, stop = self.spans[3 * i : 3 * i + 3]
        data = _map_file(self.files[number])
        at = start
        while at < stop:
            to = _chunk_end(data, at, stop)
            text = unify_line_ends(data[at:to].decode("utf-8", "replace"))
            yield Document(text, at == start, to == stop)
            at = to

    def identity(self) -> str:
        """Return a digest of file names and contents."""
        return files_identity(self.files)


def _map_file(path: Path) -> Any:
    """Return the bytes of a file, memory-mapped."""
    stat = path.stat()
    return _open_mmap(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


@lru_cache(64)
def _open_mmap(path: Path, size: int, *changed: int) -> Any:
    if size == 0:
        return b""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


# A line end of any kind, and never a half of CRLF.
LINE_END = rb"(?:\r\n|\r(?!\n)|(?<!\r)\n)"


def _text_start(data: Any) -> int:
    """Return where the text begins: after a byte order mark."""
    return len(codecs.BOM_UTF8) if data[: len(codecs.BOM_UTF8)] == codecs.BOM_UTF8 else 0


def _separator_spans(data: Any, separator: str) -> Iterator[tuple[int, int]]:
    start = _text_start(data)
    for stop_before, stop in _separator_places(data, unify_line_ends(separator).encode()):
        yield start, stop_before
        start = stop
    yield start, len(data)


def _separator_places(data: Any, separator: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each separator, whose LF stand for line ends of any kind."""
    if b"\n" in separator and data.find(b"\r") >= 0:
        pattern = LINE_END.join(re.escape(line) for line in separator.split(b"\n"))
        yield from (hit.span() for hit in re.finditer(pattern, data))
        return
    start = 0
    while (hit := data.find(separator, start)) >= 0:
        start = hit + len(separator)
        yield hit, start


def _side_span(data: Any, side: Side, share: float) -> Iterator[tuple[int, int]]:
    boundary = len(data) if share == 0 else _boundary(data, int(len(data) * (1 - share)))
    yield (_text_start(data), boundary) if side == "training" else (boundary, len(data))


def _boundary(data: Any, target: int) -> int:
    """Return where the held-out part of a text begins: at the next line, if at least half of the part that was asked
    for is left then; else, in long lines, between two words."""
    line = data.find(b"\n", target) + 1
    if line and 2 * (len(data) - line) >= len(data) - target:
        return line
    return data.rfind(b" ", 0, target) + 1 or line or len(data)


def _chunk_end(data: Any, start: int, stop: int) -> int:
    """Return the end of a chunk: after a line break if there is one, never inside a UTF-8 character or a CRLF."""
    if stop - start <= CHUNK_BYTES:
        return stop
    if line := data.rfind(b"\n", start, start + CHUNK_BYTES) + 1:
        return line
    end = start + CHUNK_BYTES
    while data[end] & 0xC0 == 0x80:
        end -= 1
    return end - 1 if data[end - 1 : end + 1] == b"\r\n" else end


def files_identity(files: list[Path]) -> str:
    """Return the SHA-256 over file names and contents, in reading order."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {file_digest(path)}\n".encode())
    return digest.hexdigest()


class DatasetTable:
    """Documents of a local data set of the `datasets` library. content: function from a row to the content of its
    document.
    """

    held_out_by_content = True

    def __init__(self, rows: Any, content: Callable[[dict[str, Any]], Any], identity: str):
        self.rows, self.content, self._identity = rows, content, identity

    def __len__(self) -> int:
        return len(self.rows)

    def document_parts(self, i: int) -> Iterator[Document]:
        """Yield row i as one document; nothing if it is empty."""
        if (content := self.content(self.rows[i])) is not None:
            yield Document(content)

    def identity(self) -> str:
        """Return the identity that was passed to the constructor."""
        return self._identity
