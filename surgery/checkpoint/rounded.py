"""A checkpoint in another dtype: its weights are rounded when they are read, as if they had been stored so."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from surgery.checkpoint.safetensors_io import DTYPE_NAMES, DTYPES, FLOAT_DTYPES
from surgery.checkpoint.source import CheckpointSource
from surgery.core.errors import SurgeryError

DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json, in the spelling of transformers 5 and 4
ACCEPTED = ("bfloat16", "float16", "float32")


def round_checkpoint(source: CheckpointSource, dtype: str | None) -> CheckpointSource:
    """Return the checkpoint with the weights in `dtype`: bfloat16, float16 or float32. None: as stored.

    Tensors of the dtype that most values have are rounded. The others stay as stored, because a checkpoint keeps such
    tensors (routers, float8 scales) in another dtype on purpose.

    Raises SurgeryError for another dtype, and when a tensor is read whose values the dtype cannot hold.
    """
    if dtype is None:
        return source
    if dtype not in ACCEPTED:
        raise SurgeryError(
            f"--dtype {dtype} is no dtype in which a result can be stored. Give bfloat16, float16 or float32"
        )
    counts: Counter[str] = Counter()
    for info in source.tensors.values():
        if info.dtype in FLOAT_DTYPES:
            counts[info.dtype] += info.numel
    wanted = next(name for kind, name in DTYPE_NAMES.items() if str(kind) == f"torch.{dtype}")
    usual = max(counts, key=lambda name: counts[name], default=wanted)
    before = {str(DTYPES[usual]).removeprefix("torch."), *(source.config.get(key) for key in DTYPE_KEYS)}
    config = _with_dtype(source.config, before, dtype)
    if not any(config.get(key) for key in DTYPE_KEYS):
        config = {**config, "dtype": dtype}
    if usual == wanted:
        return replace(source, config=config)
    tensors = {
        name: replace(info, dtype=wanted, stored=usual) if info.dtype == usual else info
        for name, info in source.tensors.items()
    }
    return replace(source, config=config, tensors=tensors)


def _with_dtype(config: dict[str, Any], before: set[Any], dtype: str) -> dict[str, Any]:
    """Return a config, with its sub-configs, whose dtypes that are in `before` are replaced."""
    renewed = dict(config)
    for key, value in config.items():
        if isinstance(value, dict):
            renewed[key] = _with_dtype(value, before, dtype)
        elif key in DTYPE_KEYS and value is not None and value in before:
            renewed[key] = dtype
    return renewed
