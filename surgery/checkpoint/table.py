"""The table of replaced modules: the `quantization_config` entry in a converted checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME
from surgery.mixers.renamed import renew_mixer

if TYPE_CHECKING:
    from surgery.checkpoint.source import CheckpointSource

QUANT_METHOD = "surgery"  # the table's quant_method
SHIM_MODULE = "surgery_shim"  # module written beside the weights, through which the Auto classes import surgery
SHIM_NAME = f"{SHIM_MODULE}.py"


def quantization_table(
    table: dict[str, dict[str, Any]], mixers: dict[str, dict[str, Any]], unused: list[str]
) -> dict[str, Any]:
    """Return the `quantization_config` entry.

    table, mixers: entries by module path. unused: tensors that the model's class does not use.
    """
    from surgery.core.version import __version__

    table_entry = {"quant_method": QUANT_METHOD, "format": 1, "surgery_version": __version__, "modules": table}
    return {**table_entry, **({"mixers": mixers} if mixers else {}), **({"unused": unused} if unused else {})}


def read_table(config: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return the linear entries of a converted checkpoint's config by module path.

    Raises SurgeryError, with the checkpoint's `name`, if there is no valid table.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != QUANT_METHOD:
        raise SurgeryError(
            f"{name} is not a converted checkpoint (its config.json has no surgery table). Give a folder that "
            "`surgery convert` wrote"
        )
    modules = quantization.get("modules")
    if not isinstance(modules, dict) or not all(isinstance(entry, dict) for entry in modules.values()):
        raise SurgeryError(f"{name}: the surgery table in config.json is damaged")
    return modules


def read_mixers(config: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return the mixer entries of a converted checkpoint's config by attention path, {} if there are none.

    Options have today's names.
    """
    read_table(config, name)
    mixers = config["quantization_config"].get("mixers", {})
    if not isinstance(mixers, dict) or not all(isinstance(entry, dict) for entry in mixers.values()):
        raise SurgeryError(f"{name}: the surgery table in config.json is damaged")
    return {path: renew_mixer(entry) for path, entry in mixers.items()}


def table_of(source: CheckpointSource) -> dict[str, dict[str, Any]]:
    """Return the linear entries of a checkpoint that a conversion wrote, {} if it is an ordinary one with a report, as
    after pruning all MLPs to one width.

    Raises SurgeryError for other checkpoints.
    """
    return {} if _is_ordinary(source) else read_table(source.config, source.name)


def mixers_of(source: CheckpointSource) -> dict[str, dict[str, Any]]:
    """Return the mixer entries of a checkpoint that a conversion wrote, see `table_of`."""
    return {} if _is_ordinary(source) else read_mixers(source.config, source.name)


def _is_ordinary(source: CheckpointSource) -> bool:
    return "quantization_config" not in source.config and (source.folder / REPORT_NAME).is_file()


def renew_table(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a config with today's names of mixer options, unchanged if it has no table.

    name: of the checkpoint, for messages.
    """
    mixers = read_mixers(config, name) if "quantization_config" in config else {}
    if not mixers:
        return config
    return {**config, "quantization_config": {**config["quantization_config"], "mixers": mixers}}


def is_quantized(modules: dict[str, Any]) -> bool:
    """Return whether a linear of a table, a part of a split one, or the matrix of joined ones is stored as integers."""
    entries = list(modules.values())
    for entry in modules.values():
        parts = entry.get("parts")
        entries += [*(parts.values() if isinstance(parts, dict) else ()), entry.get("matrix")]
    return any(isinstance(entry, dict) and "bits" in entry for entry in entries)


def stored_size(modules: dict[str, Any], tensors: Mapping[str, Any]) -> tuple[str, int]:
    """Return ("params", elements of the tensors), or ("bytes", their bytes) if linears are stored as integers, two of 4
    bits in an element.
    """
    if is_quantized(modules):
        return "bytes", sum(tensor.nbytes for tensor in tensors.values())
    return "params", sum(tensor.numel for tensor in tensors.values())


def is_pruned(spec: dict[str, Any]) -> bool:
    """Return whether a table entry is that of a linear of a pruned MLP or attention."""
    return spec.get("structure") == "pruned"


def is_dropped(spec: Mapping[str, Any]) -> bool:
    """Return whether a table entry is that of a linear without weights (surgery.structures.dropped)."""
    return spec.get("structure") == "dropped"


def is_narrowed(spec: dict[str, Any]) -> bool:
    """Return whether a table entry, or the structure of a record, is of linears that lose parts together, with their
    biases: of a pruned MLP or attention, or of attention with fewer value dims.
    """
    return is_pruned(spec) or spec.get("structure") == "value_dims"


def has_shims(config: dict[str, Any]) -> bool:
    """Return whether the config's auto_map was written by write_shims."""
    return SHIM_MODULE in str(config.get("auto_map", ""))
