"""Options that are short for one key of the recipe: `--keep 0.7` is `--set keep=0.7`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from surgery.core.config import read_yaml
from surgery.core.errors import SurgeryError

if TYPE_CHECKING:
    from surgery.planning.recipe import ConversionRecipe

Values = Mapping[str, str | list[str] | int | float | None]  # of the options by key; None: not given
TEXT_KEYS = ("tokens", "length")  # keys that say how the calibration text is read


def with_shorthands(overrides: Sequence[str] | None, values: Values) -> list[str]:
    """Return the overrides of --set and of the options that are short for a key.

    Raises SurgeryError if an option and a --set give one key different values.
    """
    settings = {key: value for key, value in values.items() if value is not None}
    for key, value in settings.items():
        for override in overrides or ():
            _check_same(key, value, override)
    return [*(overrides or ()), *(f"{key}={json.dumps(value)}" for key, value in settings.items())]


def _check_same(key: str, value: str | list[str] | int | float, override: str) -> None:
    path, _, text = override.partition("=")
    path = path.strip()
    if path != key and not path.startswith(f"{key}."):
        return
    try:
        given = read_yaml(text)
    except ValueError:  # not YAML: the recipe refuses it with a better message
        return
    if key in TEXT_KEYS and isinstance(given, str):  # such as 1k, which the recipe refuses too
        return
    same = path == key and given == value
    if not same:
        raise SurgeryError(f"--{key} {value} and --set {override} give {key} different values. Leave one of them out")


def check_keep(recipe: ConversionRecipe, keep: float | None) -> None:
    """Raise SurgeryError for --keep with a recipe that replaces no linears, where it changes nothing."""
    structures = {recipe.structure, *(rule.structure for rule in recipe.rules)} - {"dense", None}
    if keep is not None and not structures:
        raise SurgeryError(
            f"--keep {keep} is a share of the parameters of linears, and this recipe replaces none. Leave it out, or "
            "add "
            "--set structure=low_rank"
        )


def check_calibrated(values: Values, advice: str) -> None:
    """Raise SurgeryError for --tokens and --length without a calibration text. advice: how to get one."""
    for key in TEXT_KEYS:
        if values.get(key) is not None:
            raise SurgeryError(
                f"--{key} {values[key]} is about the calibration text, and there is none. {advice}, or leave --{key} "
                "out"
            )
