"""`surgery quantize`: a converted checkpoint with its linears stored in 8 or 4 bits. See surgery.modeling.quantize."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from surgery.architectures.linears import find_linears
from surgery.checkpoint.meta_model import build_unconverted_model
from surgery.checkpoint.rewrite import rewrite_checkpoint, write_shards
from surgery.checkpoint.safetensors_io import DTYPES, FLOAT_DTYPES, TensorSource
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import SHIM_NAME, is_dropped, is_quantized, quantization_table, renew_table, table_of
from surgery.checkpoint.tensor_names import map_tensor_names
from surgery.conversion.densify import check_openable
from surgery.conversion.replacement import load_replacement_module
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, read_json, write_json
from surgery.core.journal import check_free
from surgery.core.progress import Progress
from surgery.modeling.modules import build_module
from surgery.modeling.quantize import (
    MIXED_BITS,
    dense_linears,
    make_storage,
    quantize_named,
    quantized_table,
    storage_summary,
)
from surgery.modeling.quantizer import split_named_experts
from surgery.planning.bits_recipe import BitsRecipe
from surgery.structures.quantized import Format, Storage


def quantize(
    converted: str,
    out: str | Path,
    bits: int = 8,
    group: int | None = None,
    *,
    format: Format = "int",
    rules: BitsRecipe | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a converted checkpoint with quantized linears to `out`; return {"out", "linears", "bytes_before",
    "bytes_after", ..}.

    format: int, or fp8 with 8 bits. rules: bits of some linears, in place of `bits` and `group` for all of them; with rules an original checkpoint is
    quantized too.

    Memory is that of one linear and one file of results. Raises SurgeryError if `converted` is not a converted
    checkpoint or quantized already, if weights are not finite, or if `out` exists.
    """
    progress, out = progress or Progress(), Path(out)
    given = None if rules is not None else make_storage(bits, group, format)
    check_free(out, "checkpoint")
    source = open_converted_checkpoint(converted)
    is_original = is_unconverted(source)
    if is_original and rules is None:
        line = f'rules: [{{match: "*", bits: {bits}}}]'
        raise SurgeryError(
            f"{converted} is not a converted checkpoint. To store the linears of an original in {bits} bits as integers, "
            f"give --rules FILE with the line {line} instead of --bits, --group and --format; or convert it first: "
            f"surgery convert {converted} --recipe low-rank-half --out OUT"
        )
    table = {} if is_original else table_of(source)
    if is_quantized(table):
        raise SurgeryError(f"{converted} is quantized already. Quantize the checkpoint that it was made from")
    if not is_original:
        check_openable(source, converted)
    skeleton = build_unconverted_model(source)
    split_named_experts(skeleton, source.tensors)
    dense = dense_linears(skeleton, table)
    names = map_tensor_names(skeleton, source.tensors, converted)
    for path, entry in dense.items():
        stored = names[f"{path}.weight"].removesuffix(".weight")
        entry |= {} if stored == path else {"file_name": stored}
    every = {path: entry for path, entry in {**table, **dense}.items() if not is_dropped(entry)}
    storages = dict.fromkeys(every, given) if given is not None else storages_by_rules(skeleton, every, rules)
    whole = {path: every[path] for path in storages}
    config = copy.deepcopy(renew_table(source.config, converted))
    config.setdefault("quantization_config", quantization_table({}, {}, []))
    config["quantization_config"]["modules"] = {**table, **quantized_table(whole, storages)}
    rewrite_checkpoint(
        source,
        out,
        lambda folder: write_shards(_iter_tensors(source, whole, storages, progress), folder),
        config,
        (SHIM_NAME, REPORT_NAME),
    )
    summary = {"out": str(out), **storage_summary(storages)}
    written = open_converted_checkpoint(str(out))
    sizes = [sum(t.nbytes for t in opened.tensors.values()) for opened in (source, written)]
    summary |= {"bytes_before": sizes[0], "bytes_after": sizes[1]}
    _update_report(out, summary)
    return summary


def is_unconverted(source: CheckpointSource) -> bool:
    """Return whether no conversion wrote the checkpoint."""
    return "quantization_config" not in source.config and not (source.folder / REPORT_NAME).is_file()


def storages_by_rules(skeleton: Any, table: Mapping[str, Any], rules: BitsRecipe | None) -> dict[str, Storage]:
    """Return the storage of the linears of a table that rules give fewer bits, by path. skeleton: the unconverted model.

    Raises SurgeryError for a rule that matches no linear.
    """
    assert rules is not None
    linears = {linear.path: linear for linear in find_linears(skeleton).linears if linear.path in table}
    for number, rule in enumerate(rules.rules):
        if not any(rule.applies(linear) for linear in linears.values()):
            raise SurgeryError(
                f"--rules: rules.{number} matches no linear ({rule.match!r}, layers {rule.layers or ':'}); a linear looks "
                f"like {next(iter(linears), 'none')!r}"
            )
    chosen = ((path, rules.rule_of(linear)) for path, linear in linears.items())
    return {path: make_storage(rule.bits, rule.group) for path, rule in chosen if rule is not None}


def _iter_tensors(
    source: CheckpointSource, table: dict[str, Any], storages: Mapping[str, Storage], progress: Progress
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
            quantized = quantize_named(path, module.to(dtype), storages[path])
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
    groups = "groups by their bits" if summary["bits"] == MIXED_BITS else groups
    before, after = summary["bytes_before"], summary["bytes_after"]
    return f"{summary['linears']} linears in {summary['bits']} bits ({'fp8, ' if 'format' in summary else ''}{groups}), all tensors: {before:,} -> {after:,} bytes"
