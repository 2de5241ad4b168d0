"""docs/reference/ is what the command line and the schemas say.

Write it again with `python tests/helpers/reference_pages.py`.
"""

from __future__ import annotations

from typing import Literal

import pytest
from helpers.reference_pages import (
    FOLDER,
    PAGES,
    UNSET,
    commands_page,
    keys_page,
    sections,
    shipped_stages,
    type_text,
)

from surgery.planning.recipe import ConversionRecipe


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_are_up_to_date(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run python tests/helpers/reference_pages.py"


def test_every_command_option_and_key_is_there():
    import typer

    from surgery.cli.main import app

    commands, keys = commands_page(), keys_page()
    for name, command in typer.main.get_command(app).commands.items():
        section = commands.partition(f"## surgery {name}\n")[2].partition("\n## ")[0]
        assert all(
            f"`{option}`" in section
            for p in command.params
            if p.name != "help"
            for option in p.opts
            if option[0] == "-"
        )
    assert all(f"| `{key}` |" in keys for key in ConversionRecipe.model_fields)
    assert all(f"## Stage `{name}`" in keys for name in shipped_stages())
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(PAGES)


def test_keys_that_nothing_sets_are_keys():
    assert all(key in sections()[heading].model_fields for heading, key in UNSET)


def test_types_are_words():
    assert type_text(Literal["a", "b"] | int | None) == "`a` or `b`, integer or none"
    assert (
        type_text(tuple[float, ...]) == "list of number" and type_text(dict[str, int]) == "mapping of text to integer"
    )
