"""A tiny converted checkpoint, its text, and short training runs."""

from __future__ import annotations

import atexit
import importlib.resources
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.small import DECODER, make_recipe

EMBEDDED = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))


def copy_first_layers(folder: Path, layers: int, **config: Any) -> None:
    """Write to `folder` the embedded checkpoint with its first layers only and with changed config entries, and its
    texts.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(EMBEDDED, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "training_log.json"))
    settings = json.loads((folder / "config.json").read_text())
    dropped = tuple(f"model.layers.{n}." for n in range(layers, settings["num_hidden_layers"]))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": layers, **config}))


def _temporary_copy(layers: int) -> Path:
    """Return a copy of the embedded checkpoint's first layers that is deleted when this process ends."""
    place = tempfile.mkdtemp(prefix="surgery-tests-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    copy_first_layers(Path(place) / "tiny", layers)
    return Path(place) / "tiny"


# A trained model at a third of the embedded checkpoint's cost. It predicts worse than all six layers, but far better than
# chance.
LAYERS = 2
TINY_CHECKPOINT = _temporary_copy(LAYERS)
LM = {"kind": "lm", "trains": ["all"], "length": 16, "tokens": 128, "batch": 4, "rows": 2, "rate": 1e-2}
LORA = {"kind": "lora", "targets": ["attention", "mlp"], "length": 16, "tokens": 64, "batch": 4, "rows": 4}


def healing_recipe_names() -> list[str]:
    """Return the names of the shipped healing recipes, in alphabetical order."""
    from surgery.planning.recipe import recipes_folder

    return sorted(path.stem for path in (recipes_folder() / "healing").glob("*.yaml"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """Documents to train on, one JSON line each."""
    path = tmp_path_factory.mktemp("texts") / "stories.jsonl"
    parts = (TINY_CHECKPOINT / "calibration.txt").read_text(encoding="utf-8").splitlines()
    stories = [part for part in parts if len(part) > 40][:150]
    path.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories), encoding="utf-8")
    return path


def convert_tiny(folder: Path, name: str, *overrides: str) -> Path:
    """Convert TINY_CHECKPOINT by a shipped recipe with overrides, without tuning."""
    from surgery.conversion.convert import convert
    from surgery.planning.recipe import load_recipe

    out = folder / name
    quick = [
        f"calibration={TINY_CHECKPOINT / 'calibration.txt'}",
        "tokens=1024",
        "length=128",
        "allocate=uniform",
        "tune=false",
    ]
    convert(str(TINY_CHECKPOINT), load_recipe(name, [*quick, "curvature=none", *overrides]), out)
    return out


@pytest.fixture(scope="session")
def btt(tmp_path_factory) -> Path:
    """TINY_CHECKPOINT with BTT linears."""
    return convert_tiny(tmp_path_factory.mktemp("btt"), "btt-half")


@pytest.fixture(scope="session")
def mixed(tmp_path_factory) -> Path:
    """TINY_CHECKPOINT with linear attention mixers."""
    return convert_tiny(tmp_path_factory.mktemp("mixed"), "hedgehog", "attention.steps=2")


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """A text file of 6,000 characters."""
    path = tmp_path_factory.mktemp("words") / "text.txt"
    path.write_text((TINY_CHECKPOINT / "calibration.txt").read_text(encoding="utf-8")[:6000], encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def student(tmp_path_factory):
    """A converted random model of one layer, with a tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from surgery.conversion.convert import convert

    folder = tmp_path_factory.mktemp("student")
    tokenizer = AutoTokenizer.from_pretrained(TINY_CHECKPOINT)
    torch.manual_seed(0)
    shape = {**DECODER, "vocab_size": len(tokenizer), "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder / "source")
    tokenizer.save_pretrained(folder / "source")
    convert(str(folder / "source"), make_recipe(structure="low_rank"), folder / "converted")
    return folder / "converted"


@pytest.fixture
def without_curves(monkeypatch) -> None:
    """Skip drawing loss curves, a quarter of a short run's time; test_training_recipes.py draws them."""
    monkeypatch.setattr("surgery.training.runner.draw_curve", lambda lines, path: False)


def healing_recipe(texts: Path, *stages: dict[str, Any], **keys: Any) -> Any:
    """Return a recovery distillation recipe of short float32 stages."""
    from surgery.training.recipe import parse_healing_recipe

    data = {"sources": [{"path": str(texts)}], "validation": 0.1, "validation_examples": 4}
    common = {"length": 64, "batch": 4, "rows": 2, "tokens": 1024, "rate": 1e-4}
    settings = {"precision": "float32", "log": 1, "checkpoint": 2, "data": data, "common": common}
    settings |= {"evaluate": 0, "deliver": "last"}  # tests compare the state after the last step
    return parse_healing_recipe({**settings, **keys, "stages": list(stages)})


def interrupt_at_step(monkeypatch: Any, number: int) -> None:
    """Let training raise KeyboardInterrupt before the step after `number` of them, until the patch is undone."""
    from surgery.training import loop

    step = loop.TrainingLoop._step

    def stopping(self: Any, taken: Any) -> None:
        if self.at.step == number:
            raise KeyboardInterrupt
        step(self, taken)

    monkeypatch.setattr(loop.TrainingLoop, "_step", stopping)


def read_losses(folder: Path) -> list[tuple[int, int, float]]:
    """Return (stage, step, loss) of a run's log."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(line["stage"], line["step"], line["loss"]) for line in lines if "loss" in line]


def tensors(out):
    """Return all tensors of a result and of its adapter."""
    from safetensors.torch import load_file

    return {(path.parent.name == "adapter", name): t for path in sorted(out.rglob("*.safetensors")) for name, t in load_file(path).items()}  # fmt: skip


def assert_equal_tensors(out, whole):
    """Assert that two results have bit-equal tensors."""
    ours, theirs = tensors(out), tensors(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def set_fsdp_environment(rank):
    """Set, in a child process, the FSDP2 environment of `accelerate launch`."""
    settings = {"USE_FSDP": "true", "FSDP_VERSION": "2", "AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    names = {"USE_FSDP": "ACCELERATE_USE_FSDP", "AUTO_WRAP_POLICY": "FSDP_AUTO_WRAP_POLICY"}
    os.environ |= {names.get(key, key): value for key, value in settings.items()}
    os.environ |= {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
