"""Tokenize each block of text once per machine: one process writes the tokens to a file, the others read it.

    data.tokens = SharedTokens(folder / "tokens", writes=rank == 0)

Every process reads the same documents in the same order, so a block is identified by a hash of its text. A file is
complete or absent. Old files are deleted: processes train in step, so none falls far behind. The format is safetensors,
not pickle.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from surgery.checkpoint.safetensors_io import TensorSource, read_header, read_tensor, write_shard
from surgery.core.errors import SurgeryError
from surgery.training.data.documents import Document
from surgery.training.data.tokenize import TokenSequence

KEPT_TOKENS = 2**24  # tokens in recent files; processes are apart by at most the prefetched tokens, see prefetch.py
WAIT_SECONDS = 1800.0  # timeout for the file of one block
DocumentLists = list[list[Document]]  # one list per source
SequenceLists = list[list[TokenSequence]]


class SharedTokens:
    """Token files in `folder`. writes: whether this process tokenizes; the others wait for its files."""

    def __init__(self, folder: Path, writes: bool):
        self.folder, self.writes = folder, writes
        self.recent_files: deque[tuple[Path, int]] = deque()

    def get_or_tokenize(self, read: DocumentLists, tokenize: Callable[[DocumentLists], SequenceLists]) -> SequenceLists:
        """Return the token sequences of the documents of a block, tokenized here or read from its file."""
        path = self.folder / f"{documents_fingerprint(read)}.safetensors"
        if self.writes and not path.is_file():
            pieces = tokenize(read)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_shard(path, _to_entries(pieces))
            self._add_and_prune(path, sum(len(piece) for some in pieces for piece in some))
            return pieces
        self._wait(path)
        return _read_sequences(path)

    def _add_and_prune(self, path: Path, tokens: int) -> None:
        self.recent_files.append((path, tokens))
        while sum(count for _, count in self.recent_files) - self.recent_files[0][1] > KEPT_TOKENS:
            self.recent_files.popleft()[0].unlink(missing_ok=True)

    def _wait(self, path: Path) -> None:
        until = time.monotonic() + WAIT_SECONDS
        while not path.is_file():
            if time.monotonic() > until:
                raise SurgeryError(
                    f"{path}: no process wrote these tokens within {WAIT_SECONDS:.0f} seconds. All processes must see "
                    "the folder "
                    f"{self.folder.parent}: choose --out on a disk that they share."
                )
            time.sleep(0.01)


def documents_fingerprint(read: DocumentLists) -> str:
    """Return a 128-bit BLAKE2b digest (hex) of the documents, their boundaries and sources."""
    digest = hashlib.blake2b(digest_size=16)
    for documents in read:
        digest.update(b"source")
        for document in documents:
            text = document.content if isinstance(document.content, str) else repr(document.content)
            text_bytes = text.encode("utf-8", "surrogatepass")
            digest.update(f"{len(text_bytes)} {document.begins} {document.ends} ".encode() + text_bytes)
    return digest.hexdigest()


def _to_entries(pieces: SequenceLists) -> list[TensorSource]:
    """Return the tensors of a file: ids and training targets of all sequences joined, lengths and flags of each, counts
    per source.
    """
    every = [piece for some in pieces for piece in some]
    tensors = {
        "ids": _concatenate([piece.ids_T.to(torch.int32) for piece in every], torch.int32),
        "trained": _concatenate([p.trained_T.to(torch.uint8) for p in every if p.trained_T is not None], torch.uint8),
        "lengths": torch.tensor([len(piece) for piece in every], dtype=torch.int64),
        "marked": torch.tensor([piece.trained_T is not None for piece in every], dtype=torch.uint8),
        "whole": torch.tensor([piece.indivisible for piece in every], dtype=torch.uint8),
        "counts": torch.tensor([len(some) for some in pieces], dtype=torch.int64),
    }
    return [TensorSource.from_tensor(name, tensor) for name, tensor in tensors.items()]


def _concatenate(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)


def _read_sequences(path: Path) -> SequenceLists:
    arrays = {name: read_tensor(info, check=False) for name, info in read_header(path).items()}
    lengths, marked = arrays["lengths"].tolist(), arrays["marked"].tolist()
    ids = arrays["ids"].long().split(lengths)
    trained = iter(arrays["trained"].bool().split([n for n, m in zip(lengths, marked) if m]))
    every = iter(
        TokenSequence(ids_T, next(trained) if mark else None, bool(whole))
        for ids_T, mark, whole in zip(ids, marked, arrays["whole"].tolist())
    )
    return [[next(every) for _ in range(count)] for count in arrays["counts"].tolist()]
