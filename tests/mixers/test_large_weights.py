"""`inspect` warns about weights of the linear branch that were fitted to almost nothing."""

from __future__ import annotations

import pytest
from helpers.small_training import convert_tiny
from safetensors.torch import load_file, save_file

from surgery.publish.large_weights import LARGE
from surgery.publish.summary import inspect
from surgery.publish.tables import inspect_table


@pytest.mark.parametrize("recipe", ["log-linear-gdn", "gated-deltanet"])
def test_inspect_names_the_mixer_with_the_largest_weight(recipe, tmp_path):
    converted = convert_tiny(tmp_path, recipe, "attention.steps=2", "attention.window=8")
    assert inspect(str(converted))["large_weights"] == {}
    path = converted / "model.safetensors"
    tensors = load_file(path)
    name = "mask.level.bias" if recipe == "log-linear-gdn" else "linear_weight_H"
    for layer, value in ((0, LARGE - 1), (1, 3e6)):
        tensors[f"model.layers.{layer}.self_attn.mixer.linear_weight_H"].fill_(1)
        tensors[f"model.layers.{layer}.self_attn.mixer.{name}"][-1] = value
    save_file(tensors, path, metadata={"format": "pt"})
    report = inspect(str(converted))
    assert report["large_weights"] == {"model.layers.1.self_attn": pytest.approx(3e6, rel=0.01)}
    (line,) = [line for line in inspect_table(report) if isinstance(line, str) and "linear branch" in line]
    assert "up to 3e+06 in 1 of the mixers (largest in model.layers.1.self_attn)" in line
