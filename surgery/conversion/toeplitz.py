"""Replace the mixing matrices of a checkpoint with block mixing (MHLA) by Toeplitz ones (TBM).

Each head's matrix is fitted by a sum of exponentials in the distance of two blocks, so that the model takes inputs of
any length in linear time. The fit's R^2 says how much of the matrices depends on distance alone (`surgery inspect`
shows it). Only the mixing matrices change.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surgery.architectures.attention import attention_shape
from surgery.checkpoint.meta_model import build_unconverted_model
from surgery.checkpoint.rewrite import rewrite_checkpoint
from surgery.checkpoint.safetensors_io import TensorSource, read_tensor, write_shard
from surgery.checkpoint.source import CheckpointSource, open_converted_checkpoint
from surgery.checkpoint.table import SHIM_NAME, read_mixers, read_table
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME
from surgery.core.journal import check_free
from surgery.mixers import MIXERS, AttentionShape, mixer_config
from surgery.mixers.masks.block_mixing import Blocks
from surgery.mixers.masks.toeplitz_block_mixing import ToeplitzBlocks
from surgery.mixers.masks.toeplitz_fit import ToeplitzFit, fit_heads

COMPONENTS = 8  # exponentials for each head


def toeplitz_fits(
    source: CheckpointSource, components: int = COMPONENTS
) -> dict[str, tuple[AttentionShape, Any, ToeplitzFit]]:
    """Return (shape, mixer config, Toeplitz fit of every head's matrix) by path of each attention with block mixing.

    components: exponentials for each head. Returns {} if no attention of the checkpoint has block mixing.
    """
    specs = {path: mixer_config(spec) for path, spec in read_mixers(source.config, source.name).items()}
    configs: dict[str, Any] = {p: c for p, c in specs.items() if isinstance(getattr(c, "mask", None), Blocks)}
    if not configs:
        return {}
    model = build_unconverted_model(source)
    fits = {}
    for path, config in configs.items():
        shape = attention_shape(model, path)
        mixer: Any = MIXERS[config](config, shape)
        stored = read_tensor(source.tensors[f"{path}.mixer.mask.weight_GJMM"])
        with torch.no_grad():
            mixer.mask.weight_GJMM.copy_(stored)
            fits[path] = (shape, config, fit_heads(mixer.mask.matrix(), components, shape.causal))
    return fits


def convert_to_toeplitz(converted: str, out: str | Path, components: int = COMPONENTS) -> dict[str, Any]:
    """Write the checkpoint with Toeplitz mixing matrices to `out`; return {"out", "r2": {path: mean over heads}}.

    Raises SurgeryError if the checkpoint has no block mixing, or if `out` exists.
    """
    out = Path(out)
    check_free(out, "checkpoint")
    source = open_converted_checkpoint(converted)
    fits = toeplitz_fits(source, components)
    if not fits:
        raise SurgeryError(
            f"{converted} has no attention with block mixing (mask: blocks), and only such attention can be made "
            "Toeplitz"
        )
    table, mixers = read_table(source.config, converted), read_mixers(source.config, converted)
    entries = []
    for path, (shape, config, fit) in fits.items():
        changed = replace(config, mask=ToeplitzBlocks(config.mask.block, components))
        mixer: Any = MIXERS[changed](changed, shape)
        mixer.mask.initialize(fit.amplitude.movedim(-1, 0).float(), fit.rate[:, 0].mT.float())
        dtype = read_tensor(source.tensors[f"{path}.mixer.mask.weight_GJMM"]).dtype
        for name, tensor in mixer.mask.state_dict().items():
            entries.append(TensorSource.from_tensor(f"{path}.mixer.mask.{name}", tensor.to(dtype)))
        mixers[path] = changed.to_dict()
    replaced = {f"{path}.mixer.mask.weight_GJMM" for path in fits}
    entries += [TensorSource.from_file(name, info) for name, info in source.tensors.items() if name not in replaced]
    quantization = {**source.config["quantization_config"], "modules": table, "mixers": mixers}
    config = {**source.config, "quantization_config": quantization}
    rewrite_checkpoint(
        source, out, lambda folder: _write_single_shard(folder, entries), config, (SHIM_NAME, REPORT_NAME)
    )
    return {"out": str(out), "r2": {path: float(fit.r2.mean()) for path, (_, _, fit) in fits.items()}}


def _write_single_shard(folder: Path, entries: list[TensorSource]) -> list[Path]:
    path = folder / "00000.safetensors"
    write_shard(path, entries)
    return [path]
