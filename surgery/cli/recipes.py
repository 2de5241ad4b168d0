"""The command `surgery recipes`."""

from __future__ import annotations

import json
from typing import Any

from rich.markup import escape
from rich.table import Table

from surgery.cli import options
from surgery.cli.console import show
from surgery.planning.shipped import read_recipes


def recipes(
    healing: options.HealingRecipes = False, every: options.AllRecipes = False, as_json: options.Json = False
) -> None:
    """List the conversion recipes that most people need, with aim and cost; --all lists every recipe.

    surgery recipes --all
    """
    descriptions = read_recipes(healing, every)
    if as_json:
        print(json.dumps(descriptions, indent=2))
        return
    show(recipe_tables(descriptions))
    if not healing and not every:
        others = len(read_recipes(every=True)) - len(descriptions)
        show([f"\n{others} others: surgery recipes --all; what each one replaces: surgery plan SRC --recipe NAME"])


def recipe_tables(recipes: dict[str, dict[str, str]]) -> list[Any]:
    """Return a table of the recipes with an aim and a cost, and one of the others with their descriptions."""
    table = _table("recipe", "aim", "cost")
    others = _table("recipe" if not any("aim" in recipe for recipe in recipes.values()) else "others", "what it does")
    for name, recipe in recipes.items():
        if "aim" in recipe:
            table.add_row(name, escape(recipe["aim"]), escape(recipe.get("cost", "")))
        else:
            others.add_row(name, escape(recipe.get("description", "")))
    tables = [t for t in (table, others) if t.row_count]
    return tables if len(tables) < 2 else [table, "", others]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0)
    return table
