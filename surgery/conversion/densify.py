"""Undoing a conversion: the stand-ins multiplied out to ordinary weights, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.architectures.attention import output_path
from surgery.checkpoint.meta_model import build_unconverted_model
from surgery.checkpoint.rewrite import rewrite_checkpoint
from surgery.checkpoint.safetensors_io import DTYPES, TensorSource, write_shard
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import has_shims, quantization_table, read_mixers, read_table
from surgery.checkpoint.tensor_names import check_tensors, parameter_names, unused_of
from surgery.conversion.replacement import load_replacement_module
from surgery.core.errors import SurgeryError
from surgery.core.journal import check_output_path
from surgery.core.progress import Progress
from surgery.modeling.modules import SplitLinear, build_module
from surgery.modeling.quantizer import replace_modules
from surgery.structures import StructuredLinear

MAX_SHARD_BYTES = 2**29  # bytes of tensors in one piece


def densify(converted: str, out: str | Path, *, progress: Progress | None = None) -> dict[str, Any]:
    """Write an ordinary checkpoint computing what the converted one does; counts of what was multiplied out.

    Weights keep the dtype they are stored in, so a bf16 checkpoint rounds each product once.
    """
    progress, out = progress or Progress(), Path(out)
    check_output_path(out, True)
    source = open_converted_checkpoint(converted)
    table, mixers = read_table(source.config, converted), read_mixers(source.config, converted)
    outputs = _output_projections(source, mixers)
    unused = unused_of(source.config["quantization_config"])
    check_openable(source, converted)
    folded = {path: _folded_entry(spec) for path, spec in table.items() if path in outputs}
    table = {path: spec for path, spec in table.items() if spec.get("structure") != "folded"}
    config = _plain_config(source, folded, mixers, unused)
    rewrite_checkpoint(source, out, lambda place: _write_shards(source, table, set(folded), place, progress), config)
    return {"out": str(out), "modules": len(table)}


def check_openable(source: CheckpointSource, name: str) -> None:
    """SurgeryError unless the table, the tensors and their shapes are exactly those of the model that the config describes.
    A class that is code of the checkpoint is not looked at."""
    table, mixers = read_table(source.config, name), read_mixers(source.config, name)
    if source.config.get("auto_map") and not has_shims(source.config):
        return
    model = build_unconverted_model(source)
    replace_modules(model, table, mixers)
    check_tensors(model, source.tensors, name, unused_of(source.config["quantization_config"]))
    state = model.state_dict()
    for parameter, tensor in parameter_names(model, source.tensors, name).items():
        stored = source.tensors[tensor].shape
        if parameter in state and tuple(state[parameter].shape) != tuple(stored):
            raise SurgeryError(
                f"{name}: tensor {tensor!r} has shape {list(stored)}, and {type(model).__name__} needs "
                f"{list(state[parameter].shape)}: its config.json and its weights do not belong together. Fetch or convert "
                "the checkpoint again"
            )


def _output_projections(source: CheckpointSource, mixers: dict[str, Any]) -> set[str]:
    """Output projections of attention with a mixer. Mixers are not undone, so these stay folded (FoldedLinear)."""
    if not mixers:
        return set()
    model = build_unconverted_model(source)
    return {output_path(model, path) for path in mixers}


def _folded_entry(spec: dict[str, Any]) -> dict[str, Any]:
    names = ("in_features", "out_features", "bias", "file_name", "transposed")
    return {"structure": "folded", **{name: spec[name] for name in names if name in spec}}


def _plain_config(
    source: CheckpointSource, folded: dict[str, Any], mixers: dict[str, Any], unused: list[str]
) -> dict[str, Any]:
    config = {k: v for k, v in source.config.items() if k != "quantization_config"}
    if mixers:
        return {**config, "quantization_config": quantization_table(folded, mixers, unused)}
    if has_shims(config):
        del config["auto_map"]
    return config


def _write_shards(
    source: CheckpointSource, table: dict[str, Any], folded: set[str], folder: Path, progress: Progress
) -> list[Path]:
    """Everything that is not a stand-in's, then the products, in pieces of about BATCH bytes."""
    pieces: list[Path] = []
    batch: list[TensorSource] = []

    def write() -> None:
        pieces.append(folder / f"{len(pieces):05d}.safetensors")
        write_shard(pieces[-1], batch)
        batch.clear()

    with progress.bar("multiplying out", len(table)) as tick:
        for entry in _iter_tensors(source, table, folded, tick):
            batch.append(entry)
            if sum(e.nbytes for e in batch) > MAX_SHARD_BYTES:
                write()
    if batch:
        write()
    return pieces


def _iter_tensors(
    source: CheckpointSource, table: dict[str, Any], folded: set[str], tick: Any
) -> Iterator[TensorSource]:
    names = {entry.get("file_name", path): path for path, entry in table.items()}
    cores = {f"{base}.{name}" for base, path in names.items() for name in _stored_tensor_names(table[path])}
    yield from (TensorSource.from_file(name, info) for name, info in source.tensors.items() if name not in cores)
    for base, path in names.items():
        yield from dense_entries(source, base, table[path], path in folded)
        tick()


def _stored_tensor_names(spec: dict[str, Any]) -> list[str]:
    """Names below the module of what the stand-in stores (its bias stays, unless it is split)."""
    names = list(build_module(spec).state_dict())
    return [n for n in names if n != "bias"]


@torch.no_grad()
def dense_entries(
    source: CheckpointSource, base: str, spec: dict[str, Any], folded: bool = False
) -> list[TensorSource]:
    """The dense weight of one stand-in (and the bias of a split one), under its original names."""
    module = load_replacement_module(spec, base, source.tensors, torch.device("cpu"))
    stored = DTYPES[
        next(source.tensors[f"{base}.{n}"].dtype for n in _stored_tensor_names(spec) if not n.endswith("place"))
    ]
    assert isinstance(module, (StructuredLinear, SplitLinear))
    weight_OI = module.dense()
    weight = weight_OI[None] if folded else weight_OI.mT if spec.get("transposed") else weight_OI
    entries = [TensorSource.from_tensor(f"{base}.weight", weight.to(stored))]
    bias = module.fused_bias() if isinstance(module, SplitLinear) else None
    if isinstance(bias, Tensor):
        entries.append(TensorSource.from_tensor(f"{base}.bias", bias.to(stored)))
    return entries
