"""Checks that conversions to smaller dense linears share: pruned MLPs, pruned attention, fewer value dims, fewer layers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

import surgery
from helpers.small import model_outputs, relative, tiny_inputs
from helpers.stock import STOCK
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


def check_stock(folder: Path, names: Sequence[str], families: Sequence[str]) -> None:
    """Check that checkpoints of `folder` have the same outputs in a process that cannot import this package.

    names: of their folders. families: whose inputs they take.
    """
    for name, family in zip(names, families):
        save_file(tiny_inputs(family, 3, seed=2), folder / f"{name}-inputs.safetensors")
    (folder / "stock.py").write_text(STOCK, encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-P", "stock.py", *names]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, family in zip(names, families):
        found = torch.load(folder / f"{name}-outputs.pt")
        assert torch.allclose(found, model_outputs(load(folder / name), tiny_inputs(family, 3, seed=2)), atol=1e-5)
