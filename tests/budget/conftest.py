"""A small trained checkpoint and a finished search of it."""

from __future__ import annotations

import importlib.resources
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

EMBEDDED = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))
LAYERS = 2
TOKENS, LENGTH = 2048, 512  # longer than the windows of the kinds of attention


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """The first layers of the embedded checkpoint, which is trained."""
    folder = tmp_path_factory.mktemp("searched") / "SRC"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    config = json.loads((EMBEDDED / "config.json").read_text())
    gone = tuple(f"model.layers.{n}." for n in range(LAYERS, config["num_hidden_layers"]))
    kept = {name: x for name, x in load_file(EMBEDDED / "model.safetensors").items() if not name.startswith(gone)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    return folder


@pytest.fixture(scope="session")
def text() -> str:
    """The path of the calibration text."""
    return str(EMBEDDED / "calibration.txt")


@pytest.fixture(scope="session")
def searched(source, text, tmp_path_factory):
    """(folder, result) of a search over all kinds of choices."""
    from surgery.budget.search import SearchSettings, search

    out = tmp_path_factory.mktemp("search") / "SEARCH"
    settings = SearchSettings(text, TOKENS, LENGTH, device="cpu", points=4, at=8192)
    return out, search(str(source), out, {"bytes": "60%", "cache": "60%"}, settings)
