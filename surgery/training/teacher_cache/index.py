"""The index of a teacher cache and its validation against the shard files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surgery.checkpoint.safetensors_io import TensorInfo, read_header
from surgery.checkpoint.source import is_shard_name
from surgery.core.digests import hash_file
from surgery.core.errors import SurgeryError
from surgery.core.files import read_json

FORMAT, VERSION, INDEX_NAME = "surgery-teacher-cache", 1, "index.json"
Count = Annotated[int, Field(ge=1, lt=2**40)]
Text = Annotated[str, Field(max_length=10_000)]


class _IndexModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Shard(_IndexModel):
    file: Text
    first: Annotated[int, Field(ge=0, lt=2**40)]
    count: Count
    bytes: Count
    sha256: Text


class _Index(_IndexModel):
    format: Literal["surgery-teacher-cache"]
    version: int
    top_k: Count
    length: Count
    per_shard: Count
    examples: Count
    seed: int
    tokenizer: Text
    data: Text
    sources: list[Text]
    shards: list[_Shard]


def read_index(folder: Path) -> dict[str, Any]:
    """Read and validate index.json of a teacher cache.

    Raises SurgeryError if it is missing, damaged or of another version.
    """
    path = folder / INDEX_NAME
    if not path.is_file():
        raise SurgeryError(
            f"{folder} is not a teacher cache: it has no {INDEX_NAME}. Write one with `surgery teacher-cache`."
        )
    try:
        data = read_json(path)
    except SurgeryError as error:
        raise SurgeryError(f"{path} is not the index of a teacher cache: {error}") from None
    if isinstance(data, dict) and data.get("format") == FORMAT and data.get("version") != VERSION:
        raise SurgeryError(f"{path} must have version {VERSION} (got {str(data.get('version'))[:50]}).")
    try:
        index = _Index.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(key) for key in first["loc"]) or "it"
        raise SurgeryError(f"{path} is not the index of a teacher cache ({where}: {first['msg'].lower()})") from None
    for shard in index.shards:
        if not is_shard_name(shard.file):
            raise SurgeryError(f"{path} points to {shard.file!r}; shards must be .safetensors files beside the index.")
        if shard.first % index.per_shard or shard.count > index.per_shard:
            raise SurgeryError(
                f"{path}: shard {shard.file} holds rows {shard.first:,} to {shard.first + shard.count:,}, but shards "
                "have "
                f"{index.per_shard:,} rows each. Write the cache again."
            )
    return dict(data)


def is_intact(folder: Path, shard: dict[str, Any]) -> bool:
    """Return whether the shard file has the size and SHA-256 that the index gives."""
    path = folder / shard["file"]
    return path.is_file() and path.stat().st_size == shard["bytes"] and hash_file(path) == shard["sha256"]


def open_shard(folder: Path, shard: dict[str, Any], length: int, top_k: int) -> dict[str, TensorInfo]:
    """Return name -> place of the tensors of a shard. Raises SurgeryError if file or shapes differ from the index."""
    path = folder / shard["file"]
    if not is_intact(folder, shard):
        raise SurgeryError(
            f"{path} is {'damaged' if path.is_file() else 'missing'}: the index expects a file of sha256 "
            f"{shard['sha256'][:12]}. Write it again with surgery teacher-cache .. --resume."
        )
    tensors, rows = read_header(path), shard["count"]
    expected: dict[str, tuple[int, ...]] = {"tokens": (rows, length, top_k), "log_probs": (rows, length, top_k)}
    expected |= {"rest": (rows, length), "input_ids": (rows, length)}
    for name, shape in expected.items():
        stored = tensors[name].shape if name in tensors else None
        if stored != shape:
            raise SurgeryError(
                f"{path}: {name} must have shape {list(shape)} (got "
                f"{'no such tensor' if stored is None else list(stored)}). "
                "Write the cache again."
            )
    return tensors
