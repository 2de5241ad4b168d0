"""Convolutions that a checkpoint stores in parts (of queries, keys and values), and transformers joins on loading:
OLMo-hybrid, Kimi Linear.

They are small, so they are read when the checkpoint is opened. From then on the checkpoint has the joined tensor, under
the name that it has in the model, and converted files hold it so. See _build_checkpoint_conversion_mapping in
https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/conversion_mapping.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from surgery.checkpoint.safetensors_io import CONVOLUTION_PART, DTYPES, TensorInfo, read_tensor
from surgery.core.errors import SurgeryError


def joined_convolutions(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, list[str]]:
    """Return the parts of each joined convolution, in order, by its name. config: config.json."""
    names = set(names)
    joined = {}
    for target, parts in _rules(config):
        for name in sorted(names):
            prefix = name.removesuffix(parts[0])
            if prefix != name and all(prefix + part in names for part in parts):
                joined[prefix + target] = [prefix + part for part in parts]
    return joined


def _rules(config: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield (end of the joined name, ends of the parts' names) of transformers' rules for the config's model types."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    nested = (value for value in config.values() if isinstance(value, Mapping))
    kinds = {c["model_type"] for c in (config, *nested) if isinstance(c.get("model_type"), str)}
    for kind in sorted(kinds):
        for rule in get_checkpoint_conversion_mapping(kind) or []:  # type: ignore[no-untyped-call]
            parts, targets = list(rule.source_patterns), list(rule.target_patterns)
            operations = [(type(o).__name__, getattr(o, "dim", None)) for o in getattr(rule, "operations", None) or ()]
            if (
                operations == [("Concatenate", 0)]
                and len(targets) == 1
                and all(part.endswith(CONVOLUTION_PART) for part in parts)
            ):
                yield targets[0], parts


def join_convolutions(
    config: Mapping[str, Any], tensors: dict[str, TensorInfo], *, values: bool = True
) -> dict[str, TensorInfo]:
    """Return the tensors of a checkpoint with joined convolutions in place of their parts. values: whether the files are
    there to be read; without, the joined tensors are on meta.
    """
    joined = joined_convolutions(config, tensors)
    if not joined:
        return tensors
    tensors = dict(tensors)
    for name, parts in joined.items():
        infos = [tensors.pop(part) for part in parts]
        if len({(info.dtype, *info.shape[1:]) for info in infos}) > 1 or infos[0].dtype not in DTYPES:
            raise SurgeryError(
                f"tensors {', '.join(parts)} must have one dtype and, but for their first axis, one shape to be joined (got "
                f"{', '.join(f'{info.dtype} {list(info.shape)}' for info in infos)}). Download the checkpoint again"
            )
        if values:
            whole = torch.cat([read_tensor(info) for info in infos])
        else:
            rows = sum(info.shape[0] for info in infos)
            whole = torch.empty(rows, *infos[0].shape[1:], dtype=DTYPES[infos[0].dtype], device="meta")
        tensors[name] = replace(TensorInfo.in_memory(name, whole, ""), file=infos[0].file)
    return tensors
