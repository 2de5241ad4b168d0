"""Reading and writing safetensors one tensor at a time, by offset, without memory mapping or pickle.

A header is validated against the file before any tensor is read. Written files are deterministic: names are sorted, and
equal tensors give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.core.digests import hash_file
from surgery.core.errors import Interrupted, SurgeryError
from surgery.core.files import atomic_write, parse_json

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
CONVOLUTION_PART = (
    "_conv1d.weight"  # how names of parts of a joined convolution end (surgery.checkpoint.joined_convolutions)
)
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_AXES = 64
MAX_HEADER_BYTES = 100_000_000  # the safetensors limit
CHUNK_BYTES = 2**24


@dataclass(frozen=True)
class StoredPart:
    """Some columns of a stored matrix, transposed, or some values of a stored vector, as a tensor of its own.

    shape: of what is stored, (in, out) or (out,). outputs: the columns or values that are taken.
    """

    shape: tuple[int, ...]
    outputs: slice

    def take(self, stored: Tensor) -> Tensor:
        """Return a view of the part, (taken, in) or (taken,)."""
        return stored[..., self.outputs].mT if stored.dim() == 2 else stored[self.outputs]


@dataclass(frozen=True)
class TensorInfo:
    """The location of a tensor: bytes start:stop of a file. dtype: its safetensors name.

    tensor: the tensor itself if it is in memory (a live model's); `file` is then only a name for messages.
    part: which part of the bytes the tensor is, if not all of them; `shape` is the part's.
    stored: the dtype in the file if the values are rounded to `dtype` when they are read.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: Tensor | None = field(default=None, compare=False, repr=False)
    part: StoredPart | None = None
    stored: str | None = None

    @classmethod
    def in_memory(cls, name: str, tensor: Tensor, owner: str) -> TensorInfo:
        """Return the location of a tensor in memory, which is neither copied nor changed. owner: its model, for
        messages.
        """
        dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        size = tensor.numel() * tensor.element_size()
        return cls(name, Path(owner), dtype, tuple(tensor.shape), 0, size, tensor.detach())

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def nbytes(self) -> int:
        """The size in the file, in bytes."""
        whole = self.stop - self.start
        return whole if self.part is None else whole * self.numel // max(1, math.prod(self.part.shape))

    @property
    def nbytes_read(self) -> int:
        """The size of the values that are read, in bytes."""
        return self.nbytes if self.stored is None else self.numel * DTYPES[self.dtype].itemsize

    def rows(self, first: int, last: int) -> TensorInfo:
        """Return the location of rows first:last of the leading axis."""
        shape = (last - first, *self.shape[1:])
        if self.part is not None:
            taken = range(self.part.shape[-1])[self.part.outputs][first:last]
            stored_part = StoredPart(self.part.shape, slice(taken.start, taken.stop, taken.step))
            return replace(self, shape=shape, part=stored_part)
        row = self.nbytes // self.shape[0]
        start, stop = self.start + first * row, self.start + last * row
        tensor = None if self.tensor is None else self.tensor[first:last]
        return TensorInfo(self.name, self.file, self.dtype, shape, start, stop, tensor, stored=self.stored)

    def outputs(self, outputs: slice, transposed: bool = True) -> TensorInfo:
        """Return the location of some outputs of a matrix (out, in), or (in, out) if transposed, or of a vector (out,).

        A matrix is read as (out, in) either way.
        """
        vector = len(self.shape) == 1
        taken = range(self.shape[0 if vector or not transposed else 1])[outputs]
        if taken.step == 1 and (vector or not transposed):
            return self.rows(taken.start, taken.stop)
        if not vector and not transposed:
            raise NotImplementedError("rows of a matrix that do not follow each other")
        shape = (len(taken), *self.shape[:-1])
        stored_part = StoredPart(self.shape, slice(taken.start, taken.stop, taken.step))
        if self.tensor is not None:
            return replace(self, shape=shape, tensor=stored_part.take(self.tensor))
        return replace(self, shape=shape, part=stored_part)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file by name. Raise SurgeryError if the header does not describe the file."""

    def damaged_error(what: str) -> SurgeryError:
        return SurgeryError(f"{path} is damaged or not safetensors: {what}; download the file again")

    try:
        size = path.stat().st_size
        if size == 0:
            raise damaged_error("it is empty")
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise damaged_error(f"its header claims {length:,} bytes, the file has {size:,}")
            header = parse_json(file.read(length).decode("utf-8"), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise SurgeryError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise damaged_error("its header is not JSON, or has a duplicate name") from None
    if not isinstance(header, dict):
        raise damaged_error("its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        info = _parse_tensor_entry(name, entry, path, 8 + length)
        if info is None:
            raise damaged_error(f"the entry of tensor {name!r} is invalid")
        if info.stop > size:
            raise damaged_error(
                f"tensor {name!r} ends at byte {info.stop:,}, the file at {size:,} (a truncated download?)"
            )
        width = DTYPES[info.dtype].itemsize if info.dtype in DTYPES else None
        if width is not None and info.numel * width != info.nbytes:
            raise damaged_error(
                f"tensor {name!r} of shape {list(info.shape)} {info.dtype} cannot have {info.nbytes:,} bytes"
            )
        tensors[name] = info
    _check_overlap(tensors, damaged_error)
    return tensors


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dictionary; refuse duplicate keys, of which different readers use different ones."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("duplicate name")
    return table


def _parse_tensor_entry(name: Any, entry: Any, path: Path, base: int) -> TensorInfo | None:
    try:
        shape = tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        numbers = [*shape, start, stop]
        if not all(type(n) is int and 0 <= n < 2**62 for n in numbers) or stop < start or len(shape) > MAX_AXES:
            return None
        if math.prod(max(n, 1) for n in shape) >= 2**62:  # bounds the axes of an empty tensor too
            return None
        return TensorInfo(str(name), path, str(entry["dtype"]), shape, base + start, base + stop)
    except (KeyError, TypeError, ValueError):
        return None


def _check_overlap(tensors: dict[str, TensorInfo], damaged_error: Any) -> None:
    end, before = 0, ""
    for info in sorted(tensors.values(), key=lambda t: (t.start, t.stop)):
        if info.start < end and info.nbytes:
            raise damaged_error(f"tensors {before!r} and {info.name!r} share bytes")
        end, before = max(end, info.stop), info.name


def read_into(tensor: Tensor, info: TensorInfo) -> None:
    """Read a tensor's bytes into `tensor`, which has the stored dtype and shape."""
    view, got = _as_bytes(tensor), 0
    with source_errors(info.file), open(info.file, "rb", buffering=0) as file:
        file.seek(info.start)
        while got < info.stop - info.start:
            count = file.readinto(view[got : got + CHUNK_BYTES])
            if not count:
                raise SurgeryError(f"{info.file} ends inside tensor {info.name!r}; download the file again")
            got += count


@contextmanager
def source_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while reading a file whose header was read before into Interrupted.

    Finished work is kept, because the file may come back.
    """
    try:
        yield
    except OSError as error:
        raise Interrupted(
            f"{path} cannot be read any longer ({error.strerror or error}); it existed when this command began. "
            "Put the file back, then run the same command again (with --resume if it has that option)"
        ) from None


def read_tensor(
    info: TensorInfo,
    dtype: torch.dtype | None = None,
    check: bool = True,
    device: torch.device | str | None = None,
) -> Tensor:
    """Read a tensor, move it to `device` (as stored) and cast it to `dtype`, if given.

    check: raise SurgeryError if a floating-point tensor holds NaN or Inf.
    """
    if info.stored is not None:
        return _read_rounded(info, dtype, check, device)
    if info.dtype not in DTYPES:
        raise SurgeryError(f"tensor {info.name!r} has dtype {info.dtype}, which surgery cannot read")
    if info.part is not None:
        stored = torch.empty(info.part.shape, dtype=DTYPES[info.dtype])
        read_into(stored, info)
        tensor = info.part.take(stored).contiguous()
        tensor = tensor if device is None else tensor.to(device)
    elif info.tensor is not None:  # a contiguous copy, as a file gives
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype], device=device or "cpu").copy_(info.tensor)
    else:
        tensor = torch.empty(info.shape, dtype=DTYPES[info.dtype])
        if info.numel:
            read_into(tensor, info)
        tensor = tensor if device is None else tensor.to(device)
    if check and info.dtype in FLOAT_DTYPES and not is_finite(tensor):
        bad = int((~torch.isfinite(tensor)).sum())
        raise SurgeryError(
            f"tensor {info.name!r} in {info.file.name} holds {bad:,} NaN or Inf of {info.numel:,} values; "
            + (
                f"the finished layer file {info.file} is damaged; remove it, then run the same command with --resume"
                if info.file.parent.name == "pieces"
                else "the source checkpoint is damaged"
                if info.tensor is None
                else "the model's weights must be finite. Load them again"
            )
        )
    return tensor if dtype is None else tensor.to(dtype)


def _read_rounded(
    info: TensorInfo, dtype: torch.dtype | None, check: bool, device: torch.device | str | None
) -> Tensor:
    """Read a tensor and round it to its dtype. Raise SurgeryError if that cannot hold a value."""
    whole = replace(info, dtype=info.stored or info.dtype, stored=None)
    tensor = read_tensor(whole, None, check, device).to(DTYPES[info.dtype])
    if check and not is_finite(tensor):
        largest = torch.finfo(tensor.dtype).max
        raise SurgeryError(
            f"tensor {info.name!r} holds values over {largest:,.0f}, the largest of {info.dtype}. Give --dtype "
            "bfloat16, or leave --dtype out"
        )
    return tensor if dtype is None else tensor.to(dtype)


def edge_bytes(info: TensorInfo, count: int = 4096) -> bytes:
    """Return the first and the last `count` bytes of a tensor, without reading the rest; a short tensor's once."""
    if info.tensor is not None:
        flat = info.tensor.reshape(-1)
        step = count // info.tensor.element_size()
        parts = [flat[start : start + step] for start in sorted({0, max(0, len(flat) - step)})]
        return b"".join(bytes(_as_bytes(edge.cpu().contiguous())) for edge in parts)
    edges = b""
    with source_errors(info.file), open(info.file, "rb") as file:
        for start in {
            info.start,
            max(info.start, info.stop - count),
        }:  # unsorted: resumed journals hold this order's digest
            file.seek(start)
            edges += file.read(min(count, info.stop - start))
    return edges


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds no NaN or Inf. Its elements are only tested if their sum is not finite."""
    total = tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())


def read_rows(info: TensorInfo, rows: Tensor) -> Tensor:
    """Read rows of a 2-D tensor, adjacent ones together. `rows` must be ascending."""
    indices = rows.tolist()
    parts, first = [], 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1:
            parts.append(read_tensor(info.rows(indices[first], indices[i - 1] + 1)))
            first = i
    return torch.cat(parts)


# -- writing ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written: in memory (`tensor`), or still in its source file (`source`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tensor: Tensor | None = None
    source: TensorInfo | None = None

    @classmethod
    def from_tensor(cls, name: str, tensor: Tensor) -> TensorSource:
        """Return an entry for a tensor in memory."""
        tensor = tensor.detach().cpu().contiguous()
        return cls(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.numel() * tensor.element_size(), tensor)

    @classmethod
    def from_file(cls, name: str, source: TensorInfo) -> TensorSource:
        """Return an entry for a tensor that stays in its source file, written under `name`."""
        return cls(name, source.dtype, source.shape, source.nbytes_read, source=source)

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the tensor's bytes in chunks of at most CHUNK_BYTES, if it is in a file."""
        if self.tensor is not None:
            if self.nbytes:
                yield _as_bytes(self.tensor)
            return
        assert self.source is not None
        if self.source.tensor is not None or self.source.part is not None:
            yield _as_bytes(read_tensor(self.source))
            return
        # A chunk holds whole elements, so that it can be checked for NaN.
        for start in range(self.source.start, self.source.stop, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, self.source.stop)
            stored = self.source.stored or self.dtype
            width = DTYPES[stored].itemsize if stored in DTYPES else 1
            dtype = self.dtype if self.dtype in DTYPES else "U8"
            chunk = TensorInfo(
                *(self.name, self.source.file, dtype, ((stop - start) // width,), start, stop),
                stored=self.source.stored,
            )
            tensor = read_tensor(chunk)
            yield _as_bytes(tensor)


def _as_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's memory without copying."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def write_shard(path: Path, entries: Iterable[TensorSource]) -> str:
    """Write a safetensors file atomically and return its SHA-256 as hex digits."""
    ordered = sorted(entries, key=lambda e: e.name)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        offsets = [offset, offset + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with atomic_write(path) as file:
        for chunk in chain([len(text).to_bytes(8, "little") + text], *(entry.chunks() for entry in ordered)):
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def file_digest(path: Path) -> str | None:
    """Read a file and return its SHA-256 as hex digits, or None if it cannot be read."""
    try:
        return hash_file(path)
    except OSError:
        return None
