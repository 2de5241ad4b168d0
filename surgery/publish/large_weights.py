"""Weights of the linear branch of a checkpoint's mixers that are so large that some text makes the model fail.

Conversions before the ridge of the least squares (surgery/conversion/mixer_init/linear.py) could give any weight, 2e7
and more, to a branch that was almost zero on the calibration text. Training does not bring such a weight down, because
its steps are smaller than the rounding of the parameter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from surgery.checkpoint.safetensors_io import read_tensor
from surgery.checkpoint.source import CheckpointSource
from surgery.checkpoint.table import mixers_of
from surgery.mixers import mixer_config
from surgery.mixers.masks.level_weights import compute_lambdas

LARGE = 200.0  # several times what the ridge leaves
TENSORS = ("linear_weight_H", "mask.level.bias", "mask.scale_HL")


def large_weights(source: CheckpointSource) -> dict[str, float]:
    """Return, by path of each attention, the largest weight of its linear branch, where it exceeds LARGE.

    In log-linear attention a weight is multiplied by the lambda of a level for hidden states of zero.
    """
    found = {}
    for path, spec in mixers_of(source).items():
        config: Any = mixer_config(spec)
        prefix = f"{path}.mixer." + ("others." if hasattr(config, "others") else "")
        stored = {
            name: read_tensor(source.tensors[prefix + name]) for name in TENSORS if prefix + name in source.tensors
        }
        if "linear_weight_H" in stored and (weight := _largest_weight(config, stored)) > LARGE:
            found[path] = weight
    return found


def _largest_weight(config: Any, stored: dict[str, Tensor]) -> float:
    """Return the largest weight of a head. stored: those of TENSORS that the mixer has, by name."""
    weight_H1 = stored["linear_weight_H"].float().abs().unsqueeze(-1)
    if "mask.level.bias" not in stored:
        return float(weight_H1.max())
    z_HL, scale_HL = stored["mask.level.bias"].float().view(len(weight_H1), -1), stored.get("mask.scale_HL")
    mask = getattr(config, "others", config).mask
    return float((weight_H1 * compute_lambdas(mask.form, z_HL, scale_HL).abs()).max())
