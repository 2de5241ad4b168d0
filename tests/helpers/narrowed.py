"""Checks that conversions to smaller dense linears share: pruned MLPs, pruned attention, fewer value dims, fewer layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

import surgery
from helpers.small import model_outputs, relative
from surgery.checkpoint.model_classes import model_class
from surgery.conversion.densify import densify


def load(folder: Path | str) -> Any:
    """Return the model of a checkpoint in float32, for evaluation."""
    return model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32).eval()


def check_densified(converted_folder: Path, original_folder: Path, inputs: Any, out: Path) -> None:
    """Check that densify, of a checkpoint and of a model in memory, gives the same function in the original's shapes."""
    densify(str(converted_folder), out)
    dense, converted, original = (load(folder) for folder in (out, converted_folder, original_folder))
    assert relative(model_outputs(dense, inputs), model_outputs(converted, inputs)) < 1e-5
    shapes = [{name: t.shape for name, t in model.state_dict().items()} for model in (dense, original)]
    assert shapes[0] == shapes[1] and not hasattr(dense.config, "quantization_config")
    surgery.densify(converted)
    assert relative(model_outputs(converted, inputs), model_outputs(dense, inputs)) < 1e-5
