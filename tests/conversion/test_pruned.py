"""structure: pruned: the neurons of an MLP, end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.small import FAMILIES, make_recipe, model_outputs, tiny_inputs

from surgery.conversion.convert import convert

PRUNED = {"structure": "pruned", "multiple": 8}
DENSE_MLPS = [f for f in FAMILIES if "moe" not in f]


def load(folder: Path | str):
    from transformers import AutoConfig

    from surgery.checkpoint.model_classes import model_class

    return model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32).eval()


def mlps(report: dict) -> list[dict]:
    return [record for record in report["modules"] if record["structure"]["structure"] == "pruned"]


@pytest.mark.parametrize("family", DENSE_MLPS)
def test_every_family(family, checkpoints, calibration, tmp_path):
    recipe = make_recipe(**PRUNED, keep=0.5, calibration=calibration(family))
    report = convert(str(checkpoints(family)), recipe, tmp_path / "out")
    assert mlps(report)
    assert all(record["params_after"] == record["macs_after"] for record in mlps(report))
    after, before = (sum(record[f"params_{when}"] for record in mlps(report)) for when in ("after", "before"))
    assert 0 < after <= 0.5 * before
    inputs = tiny_inputs(family, 3, seed=2)
    assert bool(model_outputs(load(tmp_path / "out"), inputs).isfinite().all())
