"""A tiny converted checkpoint with text, and short runs over it."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

import pytest

EMBEDDED = Path(str(importlib.resources.files("surgery.data.tiny")))


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """Documents to train on, a JSON line each."""
    path = tmp_path_factory.mktemp("texts") / "stories.jsonl"
    parts = (EMBEDDED / "calibration.txt").read_text(encoding="utf-8").splitlines()
    stories = [part for part in parts if len(part) > 40][:150]
    path.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories), encoding="utf-8")
    return path


def conversion(folder: Path, name: str, *overrides: str) -> Path:
    from surgery.conversion import convert
    from surgery.recipe import load_recipe

    out = folder / name
    quick = [f"calibration={EMBEDDED / 'calibration.txt'}", "tokens=1024", "length=128", "allocate=uniform"]
    convert(str(EMBEDDED), load_recipe(name, [*quick, "curvature=none", *overrides]), out)
    return out


@pytest.fixture(scope="session")
def btt(tmp_path_factory) -> Path:
    return conversion(tmp_path_factory.mktemp("btt"), "btt-half")


@pytest.fixture(scope="session")
def mixed(tmp_path_factory) -> Path:
    """Attention with mixers."""
    return conversion(tmp_path_factory.mktemp("mixed"), "hedgehog", "attention.steps=2")


@pytest.fixture
def without_curves(monkeypatch) -> None:
    """Drawing one takes a quarter of a short run's time; test_training_recipes.py has them drawn."""
    monkeypatch.setattr("surgery.training.healing.draw", lambda lines, path: False)


def recipe(texts: Path, *stages: dict[str, Any], **keys: Any) -> Any:
    from surgery.training.recipe import parse_healing

    data = {"sources": [{"path": str(texts)}], "validation": 0.1, "validation_examples": 4}
    common = {"length": 64, "batch": 4, "rows": 2, "tokens": 1024, "rate": 1e-4}
    told = {"precision": "float32", "log": 1, "checkpoint": 2, "data": data, "common": common}
    return parse_healing({**told, **keys, "stages": list(stages)})


def losses(folder: Path) -> list[tuple[int, int, float]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(line["stage"], line["step"], line["loss"]) for line in lines if "loss" in line]
