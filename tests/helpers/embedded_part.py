"""The embedded checkpoint with fewer layers, and half as many heads and columns."""

from __future__ import annotations

import importlib.resources
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

EMBEDDED = Path(str(importlib.resources.files("surgery.recipes.tiny.checkpoint")))
TEXTS = ("calibration.txt", "heldout.txt")
HALVED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def save_part(folder: Path, layers: int, **changes: int) -> Path:
    """Save the first `layers` layers, heads and columns in `folder`, without texts; `changes`: of the config."""
    shutil.copytree(EMBEDDED, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "training_log.json", *TEXTS))
    config = json.loads((folder / "config.json").read_text())
    more = tuple(f"model.layers.{n}." for n in range(layers, config["num_hidden_layers"]))
    words = config["vocab_size"]
    kept = {
        name: tensor[tuple(slice(n if n == words else n // 2) for n in tensor.shape)].contiguous()
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.startswith(more)
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {key: config[key] // 2 for key in HALVED}
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers} | changes))
    return folder
