"""Undoing a conversion: the stand-ins multiplied out to ordinary weights, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.architectures.attention import output_path
from surgery.checkpoint.meta_model import unconverted
from surgery.checkpoint.rewrite import rewrite
from surgery.checkpoint.safetensors_io import DTYPES, Entry, write_shard
from surgery.checkpoint.source import Source, open_converted
from surgery.checkpoint.table import mixers_of, names_shims, quantization_table, table_of
from surgery.checkpoint.tensor_names import refuse_incomplete, unused_of
from surgery.conversion.replacement import load_standin
from surgery.core.journal import refuse_out
from surgery.core.progress import Progress
from surgery.modeling.modules import SplitLinear, empty_standin
from surgery.modeling.quantizer import put_standins
from surgery.structures import StructuredLinear

BATCH = 2**29  # bytes of tensors in one piece


def densify(converted: str, out: str | Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Write an ordinary checkpoint computing what the converted one does; counts of what was multiplied out.

    Weights keep the dtype they are stored in, so a bf16 checkpoint rounds each product once.
    """
    progress, out = progress or Progress(), Path(out)
    refuse_out(out, True)
    source = open_converted(converted)
    table, mixers = table_of(source.config, converted), mixers_of(source.config, converted)
    outputs = _outputs(source, mixers)
    unused = unused_of(source.config["quantization_config"])
    if not source.config.get("auto_map") or names_shims(source.config):  # else its class is code that is not run here
        model = unconverted(source)
        put_standins(model, table, mixers)
        refuse_incomplete(model, source.tensors, converted, unused)
    folded = {path: _folded(spec) for path, spec in table.items() if path in outputs}
    table = {path: spec for path, spec in table.items() if spec.get("structure") != "folded"}
    config = _plain_config(source, folded, mixers, unused)
    rewrite(source, out, lambda place: _pieces(source, table, set(folded), place, progress), config)
    return {"out": str(out), "modules": len(table)}


def _outputs(source: Source, mixers: dict[str, Any]) -> set[str]:
    """Output projections of attention with a mixer. Mixers are not undone, so these stay folded (FoldedLinear)."""
    if not mixers:
        return set()
    model = unconverted(source)
    return {output_path(model, path) for path in mixers}


def _folded(spec: dict[str, Any]) -> dict[str, Any]:
    names = ("in_features", "out_features", "bias", "file_name", "transposed")
    return {"structure": "folded", **{name: spec[name] for name in names if name in spec}}


def _plain_config(source: Source, folded: dict[str, Any], mixers: dict[str, Any], unused: list[str]) -> dict[str, Any]:
    config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    if mixers:
        return {**config, "quantization_config": quantization_table(folded, mixers, unused)}
    if names_shims(config):
        del config["auto_map"]
    return config


def _pieces(source: Source, table: dict[str, Any], folded: set[str], folder: Path, progress: Progress) -> list[Path]:
    """Everything that is not a stand-in's, then the products, in pieces of about BATCH bytes."""
    pieces: list[Path] = []
    batch: list[Entry] = []

    def write() -> None:
        pieces.append(folder / f"{len(pieces):05d}.safetensors")
        write_shard(pieces[-1], batch)
        batch.clear()

    with progress.bar("multiplying out", len(table)) as tick:
        for entry in _entries(source, table, folded, tick):
            batch.append(entry)
            if sum(e.nbytes for e in batch) > BATCH:
                write()
    if batch:
        write()
    return pieces


def _entries(source: Source, table: dict[str, Any], folded: set[str], tick: Any) -> Iterator[Entry]:
    names = {entry.get("file_name", path): path for path, entry in table.items()}
    cores = {f"{base}.{name}" for base, path in names.items() for name in _tensors(table[path])}
    yield from (Entry.copy(name, info) for name, info in source.tensors.items() if name not in cores)
    for base, path in names.items():
        yield from dense_entries(source, base, table[path], path in folded)
        tick()


def _tensors(spec: dict[str, Any]) -> list[str]:
    """Names below the module of what the stand-in stores (its bias stays, unless it is split)."""
    names = list(empty_standin(spec).state_dict())
    return [n for n in names if n != "bias"]


@torch.no_grad()
def dense_entries(source: Source, base: str, spec: dict[str, Any], folded: bool = False) -> list[Entry]:
    """The dense weight of one stand-in (and the bias of a split one), under its original names."""
    module = load_standin(spec, base, source.tensors, torch.device("cpu"))
    stored = DTYPES[next(source.tensors[f"{base}.{n}"].dtype for n in _tensors(spec) if not n.endswith("place"))]
    assert isinstance(module, (StructuredLinear, SplitLinear))
    weight_OI = module.dense()
    weight = weight_OI[None] if folded else weight_OI.mT if spec.get("transposed") else weight_OI
    entries = [Entry.of(f"{base}.weight", weight.to(stored))]
    bias = module.fused_bias() if isinstance(module, SplitLinear) else None
    if isinstance(bias, Tensor):
        entries.append(Entry.of(f"{base}.bias", bias.to(stored)))
    return entries
