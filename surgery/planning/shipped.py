"""The lists that `surgery recipes` prints, read from the YAML files without importing torch."""

from __future__ import annotations

import importlib.resources
from pathlib import Path


def read_descriptions(healing: bool = False) -> dict[str, str]:
    """Return name -> description of the shipped conversion or healing recipes, in alphabetical order; nothing is validated."""
    import yaml

    folder = Path(str(importlib.resources.files("surgery.recipes").joinpath("healing" if healing else "convert")))
    recipes = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.yaml"))}
    return {name: str(recipe.get("description", "")) for name, recipe in recipes.items()}
