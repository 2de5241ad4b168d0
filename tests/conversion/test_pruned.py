"""structure: pruned: the neurons of an MLP, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.small import FAMILIES, make_recipe, model_outputs, tiny_inputs
from safetensors.torch import save_file

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


STOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "surgery":
            raise ImportError("surgery is blocked")
sys.meta_path.insert(0, Blocked())
import torch, transformers
from safetensors.torch import load_file
folder, inputs, out = sys.argv[1:]
architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]
model, info = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
assert not any(info.values()), info
assert not any(name.partition(".")[0] == "surgery" for name in sys.modules)
with torch.inference_mode():
    torch.save(model.eval()(**load_file(inputs))[0], out)
"""


def run_stock(folder: Path, inputs: dict, scratch: Path) -> torch.Tensor:
    """Return the outputs of a checkpoint in a process that cannot import this package."""
    scratch.mkdir(exist_ok=True)
    save_file(inputs, scratch / "inputs.safetensors")
    (scratch / "stock.py").write_text(STOCK, encoding="utf-8")
    command = [sys.executable, "-P", "stock.py", str(folder), "inputs.safetensors", "out.pt"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(scratch / "out.pt")


@pytest.mark.parametrize("family", DENSE_MLPS)
def test_one_width_is_an_ordinary_checkpoint(family, checkpoints, calibration, tmp_path):
    recipe = make_recipe(**PRUNED, keep=0.5, width="uniform", calibration=calibration(family))
    convert(str(checkpoints(family)), recipe, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and "auto_map" not in config
    assert 24 in (config.get("intermediate_size"), config.get("d_ff")) or config.get("n_inner") == 64
    assert not list((tmp_path / "out").glob("*.py"))
    inputs = tiny_inputs(family, 3, seed=2)
    found = run_stock(tmp_path / "out", inputs, tmp_path / "scratch")
    assert torch.allclose(found, model_outputs(load(tmp_path / "out"), inputs), atol=1e-5)
