"""Block mixing that turned out to depend on distance alone, made so: MHLA -> TBM, by the nearest sum of exponentials.

A checkpoint in, a checkpoint out; only the mixing matrices change. What they lose is the fit's R^2 (`surgery inspect`
shows it); what is gained is any length, in linear time.
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
from surgery.core.journal import check_output_path
from surgery.mixers import MIXERS, AttentionShape, mixer_config
from surgery.mixers.masks.block_mixing import Blocks
from surgery.mixers.masks.toeplitz_block_mixing import ToeplitzBlocks
from surgery.mixers.masks.toeplitz_fit import ToeplitzFit, fit_heads

COMPONENTS = 8


def toeplitz_fits(
    source: CheckpointSource, components: int = COMPONENTS
) -> dict[str, tuple[AttentionShape, Any, ToeplitzFit]]:
    """path -> (shape, config, fit of every head's matrix) of the attention that mixes blocks freely."""
    specs = {path: mixer_config(spec) for path, spec in read_mixers(source.config, source.name).items()}
    found: dict[str, Any] = {p: c for p, c in specs.items() if isinstance(getattr(c, "mask", None), Blocks)}
    if not found:
        return {}
    model = build_unconverted_model(source)
    fits = {}
    for path, config in found.items():
        shape = attention_shape(model, path)
        mixer: Any = MIXERS[config](config, shape)
        stored = read_tensor(source.tensors[f"{path}.mixer.mask.weight_GJMM"])
        with torch.no_grad():
            mixer.mask.weight_GJMM.copy_(stored)
            fits[path] = (shape, config, fit_heads(mixer.mask.matrix(), components, shape.causal))
    return fits


def convert_to_toeplitz(converted: str, out: str | Path, components: int = COMPONENTS) -> dict[str, Any]:
    """Write the checkpoint with every block-mixing matrix replaced; {"out", "r2": {path: mean over heads}}."""
    out = Path(out)
    check_output_path(out, True)
    source = open_converted_checkpoint(converted)
    fits = toeplitz_fits(source, components)
    if not fits:
        raise SurgeryError(f"{converted} mixes no blocks (mask: blocks); only such attention can be made Toeplitz")
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
    gone = {f"{path}.mixer.mask.weight_GJMM" for path in fits}
    entries += [TensorSource.from_file(name, info) for name, info in source.tensors.items() if name not in gone]
    quantization = {**source.config["quantization_config"], "modules": table, "mixers": mixers}
    config = {**source.config, "quantization_config": quantization}
    rewrite_checkpoint(source, out, lambda place: _write_single_shard(place, entries), config, (SHIM_NAME, REPORT_NAME))
    return {"out": str(out), "r2": {path: float(fit.r2.mean()) for path, (_, _, fit) in fits.items()}}


def _write_single_shard(place: Path, entries: list[TensorSource]) -> list[Path]:
    path = place / "00000.safetensors"
    write_shard(path, entries)
    return [path]
