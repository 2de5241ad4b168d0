"""The healed checkpoint: the student's own folder with the trained tensors in place of the old ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint import SHIM
from surgery.conversion import REPORT
from surgery.errors import SurgeryError
from surgery.rewrite import rewrite
from surgery.shards import DTYPES, Entry, TensorInfo, write_shard
from surgery.skeleton import _parameter_keys
from surgery.source import Source
from surgery.storage import write_json
from surgery.training.log import CURVE, LOG

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


def write_result(
    source: Source, keys: dict[str, str], trained: dict[str, Tensor], work: Path, record: dict[str, Any]
) -> Path:
    """A whole checkpoint in WORK/healed, in the dtypes of the student's file."""
    new = {keys[name]: tensor for name, tensor in trained.items()}
    target = work / "healed"
    shutil.rmtree(target, ignore_errors=True)
    rewrite(source, target, lambda folder: _pieces(source, new, folder), source.config, beside=(SHIM, REPORT))
    write_json(target / REPORT, _reported(target / REPORT, record))
    logs = target / "training"
    logs.mkdir()
    for name in (LOG, CURVE):
        if (work / name).is_file():
            shutil.copyfile(work / name, logs / name)
    if (work / ADAPTER).is_dir():
        shutil.copytree(work / ADAPTER, target / ADAPTER)
    return target


def _pieces(source: Source, new: dict[str, Tensor], folder: Path) -> list[Path]:
    """One for each of the source's files."""
    files: dict[Path, list[TensorInfo]] = {}
    for info in source.tensors.values():
        files.setdefault(info.file, []).append(info)
    pieces = []
    for number, infos in enumerate(files.values()):
        pieces.append(folder / f"{number:05d}.safetensors")
        write_shard(pieces[-1], [_entry(info, new.get(info.name)) for info in infos])
    return pieces


def _entry(info: TensorInfo, tensor: Tensor | None) -> Entry:
    if tensor is None:
        return Entry.copy(info.name, info)
    return Entry.of(info.name, tensor.detach().to(DTYPES[info.dtype]))


def _reported(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The conversion's report and what was trained after it, one record a run."""
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {**report, "training": [*report.get("training", []), record]}


def settle(target: Path, out: Path, work: Path) -> None:
    """The result in its place, then the work folder gone."""
    os.replace(target, out)
    shutil.rmtree(work, ignore_errors=True)
