"""Undoing a conversion: the stand-ins multiplied out to ordinary weights, tensor by tensor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.assemble import assemble, copy_companions
from surgery.checkpoint import names_shims, table_of
from surgery.convert import partial_of
from surgery.errors import SurgeryError
from surgery.grafts import load_standin
from surgery.journal import Journal
from surgery.progress import Progress
from surgery.shards import DTYPES, Entry, write_json, write_shard
from surgery.source import Source, open_converted
from surgery.standins import SplitLinear, empty_standin
from surgery.structures import StructuredLinear

BATCH = 2**29  # bytes of tensors in one piece


def densify(converted: str, out: str | Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Write an ordinary checkpoint computing what the converted one does; counts of what was multiplied out.

    Weights keep the dtype they are stored in, so a bf16 checkpoint rounds each product once.
    """
    progress, out = progress or Progress(), Path(out)
    if out.exists():
        raise SurgeryError(f"{out} exists; choose another --out, or remove it")
    source = open_converted(converted)
    table = table_of(source.config, converted)
    partial = partial_of(out)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with Journal(partial, {"densify": source.fingerprint()}, resume=False) as journal:
            pieces = _pieces(source, table, partial / "pieces", progress)
            assemble(partial, pieces, journal)
        copy_companions(source, partial)
        write_json(partial / "config.json", _plain_config(source))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(partial / "pieces", ignore_errors=True)
    for leftover in ("lock", "journal.jsonl"):
        (partial / leftover).unlink(missing_ok=True)
    os.replace(partial, out)
    return {"out": str(out), "modules": len(table)}


def _plain_config(source: Source) -> dict[str, Any]:
    config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    if names_shims(config):
        del config["auto_map"]
    return config


def _pieces(source: Source, table: dict[str, Any], folder: Path, progress: Progress) -> list[Path]:
    """Everything that is not a stand-in's, then the products, in pieces of about BATCH bytes."""
    folder.mkdir()
    pieces: list[Path] = []
    batch: list[Entry] = []

    def write() -> None:
        pieces.append(folder / f"{len(pieces):05d}.safetensors")
        write_shard(pieces[-1], batch)
        batch.clear()

    with progress.bar("multiplying out", len(table)) as tick:
        for entry in _entries(source, table, tick):
            batch.append(entry)
            if sum(e.nbytes for e in batch) > BATCH:
                write()
    if batch:
        write()
    return pieces


def _entries(source: Source, table: dict[str, Any], tick: Any) -> Iterator[Entry]:
    names = {entry.get("file_name", path): path for path, entry in table.items()}
    cores = {f"{base}.{name}" for base, path in names.items() for name in _tensors(table[path])}
    yield from (Entry.copy(name, info) for name, info in source.tensors.items() if name not in cores)
    for base, path in names.items():
        yield from dense_entries(source, base, table[path])
        tick()


def _tensors(spec: dict[str, Any]) -> list[str]:
    """Names below the module of what the stand-in stores (its bias stays, unless it is split)."""
    names = list(empty_standin(spec).state_dict())
    return [n for n in names if n != "bias"]


@torch.no_grad()
def dense_entries(source: Source, base: str, spec: dict[str, Any]) -> list[Entry]:
    """The dense weight of one stand-in (and the bias of a split one), under its original names."""
    module = load_standin(spec, base, source.tensors, torch.device("cpu"))
    stored = DTYPES[next(source.tensors[f"{base}.{n}"].dtype for n in _tensors(spec) if not n.endswith("place"))]
    assert isinstance(module, (StructuredLinear, SplitLinear))
    weight_OI = module.dense()
    entries = [Entry.of(f"{base}.weight", (weight_OI.mT if spec.get("transposed") else weight_OI).to(stored))]
    bias = module.fused_bias() if isinstance(module, SplitLinear) else None
    if isinstance(bias, Tensor):
        entries.append(Entry.of(f"{base}.bias", bias.to(stored)))
    return entries
