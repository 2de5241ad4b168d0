"""Read text that a teacher wrote (write_text.py): a folder of token ids, which are trained on as they were sampled,
without decoding and tokenizing them again.

    teacher_text.json            settings, teacher and tokenizer, and the finished shards with their SHA-256
    text-00000.safetensors       ids: int32 (tokens,), all documents joined; lengths: int32 (documents,)

Everything read is checked first: the index against its model, the shapes and dtypes of each header against the index,
the contents against the SHA-256, the ids against the tokenizer's vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgery.checkpoint.safetensors_io import TensorInfo, read_header, read_tensor
from surgery.checkpoint.source import is_shard_name
from surgery.core.digests import file_digest
from surgery.core.errors import SurgeryError
from surgery.core.files import read_json
from surgery.training.data.documents import Document, files_identity
from surgery.training.data.tokenize import TokenSequence, tokenizer_fingerprint

INDEX_NAME, SHARD_NAME = "teacher_text.json", "text-{:05d}.safetensors"
Text = Annotated[str, Field(max_length=10_000)]
Number = Annotated[int, Field(ge=1, lt=2**40)]


class _IndexModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class TextShard(_IndexModel):
    """A finished shard. documents, tokens: their numbers. sha256: of the file."""

    file: Text
    documents: Number
    tokens: Number
    sha256: Text


class TextSettings(_IndexModel):
    """What the text is a function of, beside the shards' size: teacher_digest: of the teacher's files. tokens: at least
    as many are written. chat: whether the documents are conversations.
    """

    teacher_digest: Text
    tokens: Number
    length: Number
    temperature: float
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    chat: bool


class TextIndex(_IndexModel):
    """Contents of teacher_text.json. rows: documents sampled together, one shard; shards: empty until all are
    written.
    """

    format: Literal["surgery-teacher-text"] = "surgery-teacher-text"
    version: Literal[1] = 1
    teacher: Text
    settings: TextSettings
    rows: Number
    engine: Literal["transformers", "vllm"]
    vocabulary: Number
    tokenizer: Text
    shards: list[TextShard] = []


def is_teacher_text(path: Path) -> bool:
    """Return whether a path is a folder of teacher text."""
    return (path / INDEX_NAME).is_file()


def read_index(folder: Path) -> TextIndex:
    """Read and check the index of a folder. Raises SurgeryError if it is missing, damaged or of another version."""
    path = folder / INDEX_NAME
    try:
        index = TextIndex.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise SurgeryError(f"{path}: {where}: {first['msg']}. Remove {folder} to write the text again.") from None
    for shard in index.shards:
        if not is_shard_name(shard.file):
            raise SurgeryError(f"{path} names a shard {shard.file!r}, which is no plain name of a .safetensors file")
    return index


def check_shard(path: Path) -> tuple[TensorInfo, TensorInfo]:
    """Return where the ids (tokens,) and lengths (documents,) of a shard lie.

    Raises SurgeryError for other contents.
    """
    header = read_header(path)
    if set(header) != {"ids", "lengths"} or any(i.dtype != "I32" or len(i.shape) != 1 for i in header.values()):
        raise SurgeryError(f"{path} must hold ids (tokens,) and lengths (documents,), both int32")
    ids, lengths = header["ids"], header["lengths"]
    lengths_D = read_tensor(lengths)
    if not lengths.numel or int(lengths_D.min()) < 1 or int(lengths_D.sum(dtype=torch.int64)) != ids.numel:
        raise SurgeryError(f"{path}: the lengths of its documents must be at least 1 and sum to its {ids.numel:,} ids")
    return ids, lengths


class TokenTable:
    """Documents of a folder of teacher text, memory-mapped. Raises SurgeryError if it is missing, unfinished or
    damaged.
    """

    held_out_by_content = True

    def __init__(self, folder: Path):
        if not is_teacher_text(folder):
            raise SurgeryError(
                f"data source generated: {folder} holds no text of a teacher. `surgery finetune .. --teacher SRC --data "
                "generated` writes it"
            )
        self.folder, self.index = folder, read_index(folder)
        if not self.index.shards:
            raise SurgeryError(f"{folder}: its text is unfinished. Repeat the command that writes it, with --resume")
        self.files = [folder / shard.file for shard in self.index.shards]
        self.ids, starts, shards = [], [], []
        for number, (path, shard) in enumerate(zip(self.files, self.index.shards)):
            if not path.is_file() or file_digest(path) != shard.sha256:
                raise SurgeryError(f"{path} is missing or was changed. Remove {folder} to write the text again.")
            ids, lengths = check_shard(path)
            if (ids.numel, lengths.numel) != (shard.tokens, shard.documents):
                raise SurgeryError(f"{path} does not have the size that {INDEX_NAME} names. Remove {folder}.")
            self.ids.append(np.memmap(path, dtype="<i4", mode="r", offset=ids.start, shape=(ids.numel,)))
            ends_D = read_tensor(lengths).long().cumsum(0)
            starts.append(torch.stack([ends_D - read_tensor(lengths), ends_D], 1))
            shards.append(torch.full((len(ends_D),), number))
        self.spans, self.shards = torch.cat(starts), torch.cat(shards)

    def __len__(self) -> int:
        return len(self.shards)

    def document_parts(self, i: int) -> Iterator[Document]:
        """Yield document i, its content an array of ids."""
        start, stop = self.spans[i].tolist()
        yield Document(array("i", self.ids[int(self.shards[i])][start:stop].tolist()))

    def identity(self) -> str:
        """Return a digest of file names and contents."""
        return files_identity(self.files)

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise SurgeryError unless the ids are those of this tokenizer."""
        if self.index.tokenizer != tokenizer_fingerprint(tokenizer):
            raise SurgeryError(
                f"{self.folder} holds token ids of {self.index.teacher}, whose tokenizer is not the one of this model"
            )
        for path, ids_N in zip(self.files, self.ids):
            if int(ids_N.min()) < 0 or int(ids_N.max()) >= self.index.vocabulary:
                raise SurgeryError(f"{path}: its ids must be below {self.index.vocabulary:,}, the vocabulary's size")


def token_sequences(documents: list[Document]) -> list[TokenSequence]:
    """Return the ids of the documents of a TokenTable."""
    return [TokenSequence(torch.tensor(document.content, dtype=torch.int64)) for document in documents]
