"""Sequential readers of documents, in an order determined by a seed and resumable from a cursor.

document = reader.take()            the next document, or None at the end of an epoch
reader.cursor()                     position as JSON data; reader.restore(cursor) continues there
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from surgery.core.errors import SurgeryError
from surgery.core.hub_errors import explain_hub_error
from surgery.training.data.documents import Document, DocumentTable


class DocumentReader(Protocol):
    """Interface of the readers. initial_cursor: the cursor before the first document."""

    initial_cursor: dict[str, Any]

    def take(self) -> Document | None:
        """Return the next document, or None at the end of an epoch."""
        ...

    def cursor(self) -> dict[str, Any]:
        """Return the position of the next document as JSON data."""
        ...

    def restore(self, cursor: dict[str, Any]) -> None:
        """Continue from a position that `cursor` returned."""
        ...

    def identity(self) -> str:
        """Return a text that is equal for equal data."""
        ...

    @property
    def epoch(self) -> int:
        """Number of complete passes over the documents."""
        ...


class TableReader:
    """Reads every document of a table once per epoch, in random order if `shuffled`. filter_fn: filters documents by
    content.
    """

    def __init__(self, table: DocumentTable, seed: int, shuffled: bool, filter_fn: Callable[[Any], bool] | None):
        self.table, self.seed, self.shuffled = table, seed, shuffled
        self.filter_fn = filter_fn if table.held_out_by_content else None
        self.initial_cursor = {"epoch": 0, "unit": 0, "part": 0}
        self.restore(self.initial_cursor)

    @property
    def epoch(self) -> int:
        """Number of complete passes over the documents."""
        return self._epoch

    def cursor(self) -> dict[str, Any]:
        """Return {"epoch", "unit", "part"}: passes, documents and parts of a document that were read."""
        return {"epoch": self._epoch, "unit": self._unit, "part": self._part}

    def restore(self, cursor: dict[str, Any]) -> None:
        """Continue from a position that `cursor` returned."""
        self._epoch, self._unit = cursor["epoch"], cursor["unit"]
        self._order: Any = self._permutation()
        self._part, self._parts = 0, self._open()
        for _ in range(cursor["part"]):
            next(self._parts)
            self._part += 1

    def take(self) -> Document | None:
        """Return the next document, or None at the end of an epoch."""
        while self._unit < len(self.table):
            document = next(self._parts, None)
            if document is not None:
                first, self._part = self._part == 0, self._part + 1
                if not first or self.filter_fn is None or self.filter_fn(document.content):
                    return document
            self._unit, self._part = self._unit + 1, 0
            self._parts = self._open()
        self.restore({**self.initial_cursor, "epoch": self._epoch + 1})
        return None

    def identity(self) -> str:
        """Return the identity of the table."""
        return self.table.identity()

    def _open(self) -> Iterator[Document]:
        if self._unit >= len(self.table):
            return iter(())
        return self.table.document_parts(int(self._order[self._unit]) if self._order is not None else self._unit)

    def _permutation(self) -> Any:
        if not self.shuffled:
            return None
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", self._epoch))
        narrow = torch.int32 if len(self.table) < 2**31 else torch.int64
        return torch.randperm(len(self.table), generator=generator, dtype=narrow)


class StreamReader:
    """Reads a streaming data set in its own order. content: function from a row to its content; filter_fn: filters
    documents by content; where: name of the source in errors.
    """

    def __init__(self, rows: Any, content: Callable[[dict[str, Any]], Any], filter_fn: Any, identity: str, where: str):
        self.rows, self.content, self.filter_fn, self._identity, self.where = rows, content, filter_fn, identity, where
        self.initial_cursor = {"epoch": 0, "state": json.loads(json.dumps(rows.state_dict()))}
        self.restore(self.initial_cursor)

    @property
    def epoch(self) -> int:
        """Number of complete passes over the documents."""
        return self._epoch

    def cursor(self) -> dict[str, Any]:
        """Return {"epoch", "state"}: passes, and the state of the data set."""
        if self._restored is not None:  # until a row is read, the state of `rows` is still the one before `restore`
            return self._restored
        return {"epoch": self._epoch, "state": json.loads(json.dumps(self.rows.state_dict()))}

    def restore(self, cursor: dict[str, Any]) -> None:
        """Continue from a position that `cursor` returned."""
        self._epoch = cursor["epoch"]
        self._restored: dict[str, Any] | None = cursor
        self.rows.load_state_dict(cursor["state"])
        self._live: Iterator[Any] = iter(self.rows)

    def take(self) -> Document | None:
        """Return the next document, or None at the end of an epoch. Raises SurgeryError if the data cannot be read."""
        try:
            for row in self._live:
                self._restored = None
                content = self.content(row)
                if content is not None and (self.filter_fn is None or self.filter_fn(content)):
                    return Document(content)
        except Exception as error:  # datasets raises many kinds, from many libraries
            raise unreadable_error(self.where, error) from None
        self.restore({**self.initial_cursor, "epoch": self._epoch + 1})
        return None

    def identity(self) -> str:
        """Return the identity that was passed to the constructor."""
        return self._identity


def derive_seed(*what: object) -> int:
    """Return a seed derived from several values by a hash."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=7).digest(), "big")


def unreadable_error(where: str, error: Exception) -> SurgeryError:
    """Return the error for a source that the `datasets` library cannot read."""
    kinds = ("a local file or folder", "a Hub data set")
    reason = explain_hub_error(error, "it", "give the path of local files", kinds=kinds)
    if isinstance(error, StopIteration):  # of an empty file
        reason = "it has no rows. Give a file with text"
    cause = error.__cause__ or error  # it names the row
    reason = reason or f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
    return SurgeryError(f"{where} cannot be read: {reason}")
