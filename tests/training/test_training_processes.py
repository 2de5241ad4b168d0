"""Two processes give the losses of one at an equal global batch, replicated and sharded with FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers.forked import run_command
from helpers.ports import reserved_port
from helpers.small_training import TINY_CHECKPOINT, read_losses

from surgery.training.finetune import finetune

ROOT = Path(__file__).resolve().parents[2]
STAGES = [
    {"kind": "align", "trains": ["new"], "matrix_weight": 0.5, "matrix_probes": 8},
    {"kind": "distill", "trains": ["new"], "ema": 0.9},
    {"kind": "lm", "trains": ["all"], "memory": "checkpoint"},
]


def recipe_keys(texts):
    data = {"sources": [{"path": str(texts)}], "validation": 0.1, "validation_examples": 3}
    common = {"length": 48, "batch": 4, "rows": 2, "tokens": 384, "rate": 1e-4}
    told = {"precision": "float32", "log": 1, "checkpoint": 1, "evaluate": 0, "deliver": "last"}
    return {**told, "data": data, "common": common, "stages": STAGES}


@pytest.fixture(scope="session")
def alone(btt, texts, tmp_path_factory):
    from surgery.training.recipe import parse_healing_recipe

    out = tmp_path_factory.mktemp("alone") / "out"
    return out, finetune(str(btt), parse_healing_recipe(recipe_keys(texts)), out, teacher=str(TINY_CHECKPOINT))


def launch(btt, texts, folder, settings):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_keys(texts)))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", "-m", "surgery"]
    command += [
        "finetune",
        str(btt),
        "--teacher",
        str(TINY_CHECKPOINT),
        "--recipe",
        "recipe.yaml",
        "--out",
        "out",
        "--json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with reserved_port() as port:
        (folder / "accelerate.yaml").write_text(yaml.safe_dump({**settings, "main_process_port": port}))
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{") :])


def run_forked(btt, texts, folder):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_keys(texts)))
    said = run_command(
        2,
        folder,
        ["finetune", str(btt), "--teacher", str(TINY_CHECKPOINT), "--recipe", "recipe.yaml", "--out", "out", "--json"],
    )
    return json.loads(said[said.index("{") :])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replicated", "fsdp2"])
def test_two_are_one(alone, btt, texts, tmp_path, how):
    if how == "fsdp2":  # as a person starts it
        shipped = yaml.safe_load((ROOT / "recipes/accelerate/fsdp2.yaml").read_text())
        record = launch(btt, texts, tmp_path, {**shipped, "num_processes": 2, "mixed_precision": "no"})
    else:
        record = run_forked(btt, texts, tmp_path)
    assert record["processes"] == 2 and (record["spread"] == "FSDP2") == (how == "fsdp2")
    ours, theirs = (
        torch.tensor(read_losses(f / "training"), dtype=torch.float64) for f in (tmp_path / "out", alone[0])
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    for key in ("original", "before", "after"):
        pair = [r["validation"][key]["loss"] for r in (record, alone[1])]
        assert pair[0] == pytest.approx(pair[1], rel=1e-4), key  # weights are stored in half precision
