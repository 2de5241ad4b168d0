"""The healed checkpoint: the student's own folder with the trained tensors in place of the old ones.

Trained tensors are read from the run's last checkpoint, never from a model in memory, so that a run which went on after
a kill writes what one that was never stopped writes. The result is read again and compared with that checkpoint before it
gets its name.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint import SHIM
from surgery.conversion import REPORT
from surgery.errors import SurgeryError
from surgery.rewrite import rewrite
from surgery.shards import DTYPES, Entry, TensorInfo, read_tensor, write_shard
from surgery.skeleton import _parameter_keys
from surgery.source import Source, open_converted
from surgery.storage import write_json
from surgery.training.log import CURVE, LOG
from surgery.training.teacher_index import sha256

ADAPTER = "adapter"


def keys_of(student: Any, source: Source, trained: set[str]) -> dict[str, str]:
    """Parameter -> name of its tensor in the file, a tied one's that of its twin."""
    keys = _parameter_keys(student, source)
    twins: dict[str, str] = dict(getattr(student, "all_tied_weights_keys", None) or {})
    for first, second in list(twins.items()):
        twins.setdefault(second, first)
    found = {}
    for name in trained:
        key = keys.get(name) or keys.get(twins.get(name, ""))
        if key is None:
            raise SurgeryError(
                f"{source.name} has no tensor for {name!r}, which was trained; it cannot be written back"
            )
        found[name] = key
    return found


@torch.no_grad()
def round_as_stored(trained: dict[str, Tensor], keys: dict[str, str], source: Source) -> None:
    """In place, so that what is measured last is what is written."""
    for name, tensor in trained.items():
        tensor.copy_(tensor.to(DTYPES[source.tensors[keys[name]].dtype]).to(tensor.dtype))


def write_result(source: Source, new: dict[str, TensorInfo], work: Path, record: dict[str, Any], adapter: bool) -> Path:
    """A whole checkpoint in WORK/healed, in the dtypes of the student's file. new: name of a tensor in that file -> where
    the trained numbers are stored; adapter: whether WORK/adapter belongs to it."""
    target = work / "healed"
    shutil.rmtree(target, ignore_errors=True)
    rewrite(source, target, lambda folder: _pieces(source, new, folder), source.config, beside=(SHIM, REPORT))
    write_json(target / REPORT, _reported(target / REPORT, record))
    logs = target / "training"
    logs.mkdir()
    for name in (LOG, CURVE):
        if (work / name).is_file():
            shutil.copyfile(work / name, logs / name)
    if adapter:
        shutil.copytree(work / ADAPTER, target / ADAPTER)
    return target


def _pieces(source: Source, new: dict[str, TensorInfo], folder: Path) -> list[Path]:
    """One for each of the source's files."""
    files: dict[Path, list[TensorInfo]] = {}
    for info in source.tensors.values():
        files.setdefault(info.file, []).append(info)
    pieces = []
    for number, infos in enumerate(files.values()):
        pieces.append(folder / f"{number:05d}.safetensors")
        write_shard(pieces[-1], [_entry(info, new.get(info.name)) for info in infos])
    return pieces


def _entry(info: TensorInfo, trained: TensorInfo | None) -> Entry:
    if trained is None:
        return Entry.copy(info.name, info)
    return Entry.of(info.name, read_tensor(trained, DTYPES[info.dtype]))


def refuse_difference(target: Path, source: Source, new: dict[str, TensorInfo]) -> None:
    """SurgeryError unless every tensor of the result is, bit by bit, the last checkpoint's where it was trained, and the
    source's everywhere else."""
    written = open_converted(str(target)).tensors
    if strange := sorted(set(written) ^ set(source.tensors)):
        raise _differs(target, strange[0], source, new)
    for name, info in source.tensors.items():
        found, trained = written[name], new.get(name)
        expected = _stored(info) if trained is None else _bytes(read_tensor(trained, DTYPES[info.dtype]))
        if (found.dtype, found.shape) != (info.dtype, info.shape) or not torch.equal(_stored(found), expected):
            raise _differs(target, name, source, new)


def _stored(info: TensorInfo) -> Tensor:
    return read_tensor(replace(info, dtype="U8", shape=(info.nbytes,)), check=False)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _differs(target: Path, name: str, source: Source, new: dict[str, TensorInfo]) -> SurgeryError:
    kept = new[name].file.parent if name in new else source.folder
    return SurgeryError(
        f"{target}: tensor {name!r} is not the one in {kept}; the result must hold the numbers of the run's last checkpoint. "
        "Nothing was renamed or removed: run the same command with --resume to write it again"
    )


def _reported(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The conversion's report and what was trained after it, one record a run."""
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {**report, "training": [*report.get("training", []), record]}


def adapter_digests(work: Path) -> dict[str, str]:
    """File -> sha256, of what is kept in WORK/adapter; nothing where no adapter is."""
    return {path.name: sha256(path) for path in sorted((work / ADAPTER).glob("*")) if path.is_file()}


def settle(target: Path, out: Path, work: Path) -> None:
    """The result in its place, then the work folder gone."""
    os.replace(target, out)
    shutil.rmtree(work, ignore_errors=True)
