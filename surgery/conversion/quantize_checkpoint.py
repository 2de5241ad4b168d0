"""`surgery quantize`: a converted checkpoint with its linears stored in 8 or 4 bits. See surgery.modeling.quantize."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from surgery.checkpoint.meta_model import build_unconverted_model
from surgery.checkpoint.rewrite import rewrite_checkpoint, write_shards
from surgery.checkpoint.safetensors_io import DTYPES, FLOAT_DTYPES, TensorSource
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import SHIM_NAME, is_quantized, quantization_table, renew_table, table_of
from surgery.checkpoint.tensor_names import map_tensor_names
from surgery.conversion.densify import check_openable
from surgery.conversion.replacement import load_replacement_module
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, read_json, write_json
from surgery.core.journal import check_output_path
from surgery.core.progress import Progress
from surgery.modeling.modules import build_module
from surgery.modeling.quantize import dense_linears, make_storage, quantize_named, quantized_table, storage_summary
from surgery.modeling.quantizer import split_named_experts
from surgery.structures.quantized import Storage


def quantize(
    converted: str, out: str | Path, bits: int = 8, group: int | None = None, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Write a converted checkpoint with quantized linears to `out`; return {"out", "linears", "bytes_before",
    "bytes_after", ..}.

    Memory is that of one linear and one file of results. Raises SurgeryError if `converted` is not a converted
    checkpoint or quantized already, if weights are not finite, or if `out` exists.
    """
    progress, out, storage = progress or Progress(), Path(out), make_storage(bits, group)
    check_output_path(out, True)
    source = open_converted_checkpoint(converted)
    table = table_of(source)
    if is_quantized(table):
        raise SurgeryError(f"{converted} is quantized already. Quantize the checkpoint that it was made from")
    check_openable(source, converted)
    skeleton = build_unconverted_model(source)
    split_named_experts(skeleton, source.tensors)
    dense = dense_linears(skeleton, table)
    names = map_tensor_names(skeleton, source.tensors, converted)
    for path, entry in dense.items():
        stored = names[f"{path}.weight"].removesuffix(".weight")
        entry |= {} if stored == path else {"file_name": stored}
    whole = {**table, **dense}
    config = copy.deepcopy(renew_table(source.config, converted))
    config.setdefault("quantization_config", quantization_table({}, {}, []))
    config["quantization_config"]["modules"] = quantized_table(whole, storage)
    rewrite_checkpoint(
        source,
        out,
        lambda folder: write_shards(_iter_tensors(source, whole, storage, progress), folder),
        config,
        (SHIM_NAME, REPORT_NAME),
    )
    summary = {"out": str(out), **storage_summary(whole, storage)}
    written = open_converted_checkpoint(str(out))
    sizes = [sum(t.nbytes for t in opened.tensors.values()) for opened in (source, written)]
    summary |= {"bytes_before": sizes[0], "bytes_after": sizes[1]}
    _update_report(out, summary)
    return summary


def _iter_tensors(
    source: CheckpointSource, table: dict[str, Any], storage: Storage, progress: Progress
) -> Iterator[TensorSource]:
    """Yield the unchanged tensors, then the integers and scales of the linears."""
    bases = {path: entry.get("file_name", path) for path, entry in table.items()}
    names = {path: [f"{bases[path]}.{name}" for name in build_module(e).state_dict()] for path, e in table.items()}
    replaced = {name for path in table for name in names[path]}
    yield from (TensorSource.from_file(name, info) for name, info in source.tensors.items() if name not in replaced)
    with progress.bar("quantizing", len(table)) as tick:
        for path, entry in table.items():
            module = load_replacement_module(entry, bases[path], source.tensors, torch.device("cpu"))
            dtype = next(DTYPES[d] for n in names[path] if (d := source.tensors[n].dtype) in FLOAT_DTYPES)
            quantized = quantize_named(path, module.to(dtype), storage)
            for name, t in quantized.state_dict().items():
                yield TensorSource.from_tensor(f"{bases[path]}.{name}", t)
            tick()


def _update_report(folder: Path, summary: dict[str, Any]) -> None:
    """Record the storage in the report, whose bytes become those of the quantized checkpoint."""
    path = folder / REPORT_NAME
    if not path.is_file():
        return
    report = read_json(path)
    if isinstance(report.get("totals"), dict):
        report["totals"]["bytes_after"] = summary["bytes_after"]
    write_json(path, {**report, "storage": {k: v for k, v in summary.items() if k != "out"}})


def quantize_line(summary: dict[str, Any]) -> str:
    """Return the result of a quantization as a sentence."""
    groups = f"groups of {summary['group']}" if summary["group"] else "one scale per output"
    before, after = summary["bytes_before"], summary["bytes_after"]
    return (
        f"{summary['linears']} linears in {summary['bits']} bits ({groups}), all tensors: {before:,} -> {after:,} bytes"
    )
