"""The healing recipes of version 0.2 (tests/data/healing_0_2) are settings of today's, by name and by the options that
the line about an old name prints.
"""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path

import pytest

from surgery.core.errors import RenamedWarning, SurgeryError
from surgery.planning.renamed import OLD_HEALING_RECIPES
from surgery.planning.shipped import read_recipes
from surgery.training.recipe import load_healing_recipe
from surgery.workflow import SETTINGS_NAME, _open_folder

ROOT = Path(__file__).resolve().parents[2]
BEFORE = {path.stem: path for path in sorted((ROOT / "tests/data/healing_0_2").glob("*.yaml"))}


def keys(name: str, *overrides: str, tiny: bool = False) -> dict:
    return load_healing_recipe(name, overrides, tiny).model_dump(mode="json", exclude={"description"})


def test_old_names_are_those_of_version_0_2():
    assert OLD_HEALING_RECIPES.keys() == BEFORE.keys() and not OLD_HEALING_RECIPES.keys() & read_recipes(True).keys()


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("name", BEFORE)
def test_an_old_name_trains_as_before(name, tiny):
    with pytest.warns(RenamedWarning) as noted:
        renamed = keys(name, "seed=3", tiny=tiny)
    assert renamed == keys(str(BEFORE[name]), "seed=3", tiny=tiny)
    (line,) = [str(warning.message) for warning in noted]
    assert line == f"recipe: {name} is now {OLD_HEALING_RECIPES[name].words}" and "\n" not in line


@pytest.mark.parametrize("name", BEFORE)
def test_the_printed_options_train_as_before(name):
    words = shlex.split(OLD_HEALING_RECIPES[name].words)
    assert words[::2] == ["--recipe", *["--set"] * (len(words) // 2 - 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert keys(*words[1::2]) == keys(str(BEFORE[name]))


# auto chooses its tokens, and control its rate; lambda has two stages, and says that it was not measured
@pytest.mark.parametrize("name", [name for name in read_recipes(True) if name not in ("auto", "control", "lambda")])
def test_descriptions_say_what_a_recipe_is_for_and_what_it_costs(name):
    """In the order: when to use it, what it does, its tokens, and what it was measured on."""
    recipe = load_healing_recipe(name)
    (stage,) = recipe.stages
    tokens = f"{stage.tokens // 10**6}M" if stage.tokens >= 10**6 else f"{stage.tokens // 1000}k"
    assert f"{tokens} tokens in rows of {stage.length:,}" in recipe.description
    assert re.search(r"measured on .*parameters$", recipe.description)


def test_a_run_that_stored_the_description_of_its_recipe_goes_on(tmp_path):
    settings = {"version": "0.2", "heal": {"seed": 0}}
    stored = {**settings, "heal": {"seed": 0, "description": "as version 0.2 had it"}}
    (tmp_path / SETTINGS_NAME).write_text(json.dumps(stored))
    _open_folder(tmp_path, settings)
    with pytest.raises(SurgeryError, match="heal differ"):
        _open_folder(tmp_path, {**settings, "heal": {"seed": 1}})
