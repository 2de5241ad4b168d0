"""The lists that `surgery recipes` prints, read from the YAML files without importing torch."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

# The conversion recipes that most people need, in the order in which they are listed. Their aims and costs stand in
# their files.
COMMON = (
    *("auto-half", "pruned-half", "low-rank-half", "btt-half", "fast-half"),
    *("hybrid-25", "log-linear", "mlr-cache-60", "gated-deltanet"),
)
SHOWN_KEYS = ("description", "aim", "cost")


def read_recipes(healing: bool = False, every: bool = False) -> dict[str, dict[str, str]]:
    """Return name -> {description, aim, cost} of shipped recipes; keys that a file lacks are left out, and nothing is
    validated.

    healing: the healing recipes, in alphabetical order, instead of the COMMON conversion recipes. every: behind the
    COMMON ones also the other conversion recipes, in alphabetical order.
    """
    folder = Path(str(importlib.resources.files("surgery.recipes").joinpath("healing" if healing else "convert")))
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    if not healing:
        names = [*COMMON, *(name for name in names if every and name not in COMMON)]
    return {name: _shown(folder / f"{name}.yaml") for name in names}


def _shown(path: Path) -> dict[str, str]:
    import yaml

    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {key: str(recipe[key]) for key in SHOWN_KEYS if key in recipe}
