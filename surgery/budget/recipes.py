"""Recipes from choices: what `surgery convert` takes, with ranges of layers in place of single ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import yaml

from surgery.budget.choices import (
    ATTENTION,
    FULL_BITS,
    PATTERNS,
    REMOVED,
    STORED_IN_BITS,
    Choice,
    Choices,
    Kind,
)
from surgery.planning.recipe import validate_recipe

T = TypeVar("T")
TUNE = {"model": 20}  # as in the shipped recipes for linears


def recipe_of(
    choices: Choices, chosen: Sequence[Choice], settings: Mapping[str, Any], description: str
) -> dict[str, Any]:
    """Return the recipe of a choice of every part as plain data. settings: keys that all recipes of the search have."""
    removed = [choice.layer for choice in chosen if choice.name == REMOVED]
    data: dict[str, Any] = {"description": description, "structure": "dense", **settings}
    if removed:
        data["depth"] = {"remove": [choices.removable.index(layer) for layer in removed], "refit": False}
    if numbers := [choice.number for choice in chosen if choice.number is not None]:
        data["experts"] = numbers[0]
    kinds = {
        (choice.layer, choice.kind.part): choice.kind
        for choice in chosen
        if choice.kind is not None and choice.number is None
    }
    remaining = [layer for layer in choices.layers if layer not in removed]
    rules = [
        {"match": PATTERNS[part], "layers": layers, **kind.settings}
        for part in PATTERNS
        for kind, layers in ranges([kinds.get((layer, part)) for layer in remaining])
    ]
    if rules:
        data |= {"rules": rules, "tune": TUNE}
    attention = [kinds.get((layer, ATTENTION)) for layer in choices.attention if layer not in removed]
    if any(attention):
        data["attention"] = attention_of(attention)
    return data


def bits_of(choices: Choices, chosen: Sequence[Choice]) -> dict[str, Any] | None:
    """Return the rules of `surgery quantize --rules` for the result of the recipe, None if no part has fewer bits."""
    removed = {choice.layer for choice in chosen if choice.name == REMOVED}
    bits = {(choice.layer, choice.part): choice.bits for choice in chosen if choice.bits != FULL_BITS}
    remaining = [layer for layer in choices.layers if layer not in removed]
    rules = [
        {"match": PATTERNS[part], "layers": layers, "bits": number}
        for part in STORED_IN_BITS
        for number, layers in ranges([bits.get((layer, part)) for layer in remaining])
    ]
    return {"rules": rules} if rules else None


def attention_of(kinds: Sequence[Kind | None]) -> dict[str, Any]:
    """Return the key `attention` of a recipe. kinds: of each layer with attention, None where it keeps softmax."""
    counts = Counter(kind.name for kind in kinds if kind is not None)
    by_name = {kind.name: kind for kind in kinds if kind is not None}
    plain = [name for name in counts if "cache" not in by_name[name].settings]
    main = max(plain or counts, key=lambda name: counts[name])
    settings = dict(by_name[main].settings) if plain else {"mixer": by_name[main].settings["mixer"]}
    if softmax := [number for number, kind in enumerate(kinds) if kind is None]:
        settings["hybrid"] = {"layers": softmax}
    ruled = [kind if kind is not None and (kind.name != main or not plain) else None for kind in kinds]
    if rules := [{"layers": layers, **kind.settings} for kind, layers in ranges(ruled)]:
        settings["rules"] = rules
    return settings


def ranges(kinds: Sequence[T | None]) -> list[tuple[T, str]]:
    """Return (kind, range of neighboring layers) of each run of one kind; None stands for layers without one."""
    runs: list[tuple[T | None, int, int]] = []
    for number, kind in enumerate(kinds):
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1], number + 1)
        else:
            runs.append((kind, number, number + 1))
    return [
        (kind, str(first) if stop == first + 1 else f"{first}:{stop}") for kind, first, stop in runs if kind is not None
    ]


def recipe_text(data: Mapping[str, Any]) -> str:
    """Return a recipe, which is validated, as YAML."""
    validate_recipe(dict(data), "of the search")
    return yaml_text(data)


def yaml_text(data: Mapping[str, Any]) -> str:
    """Return data as YAML, in the order of its keys."""
    return yaml.safe_dump(dict(data), sort_keys=False, default_flow_style=None, width=120)
