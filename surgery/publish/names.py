"""Names of recipes and mixers as people say them, for the page and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surgery.mixers.head_hybrid import HeadHybrid
from surgery.mixers.native_config import Native
from surgery.planning.shipped import read_recipes

# Linear attention by (scores, mask): the name in its paper.
LINEAR_NAMES = {
    ("delta", "ones"): "DeltaNet",
    ("delta", "gates"): "Gated DeltaNet",
    ("delta", "hierarchical"): "log-linear GDN",
    ("kernel", "gates"): "Mamba-2",
    ("kernel", "hierarchical"): "log-linear Mamba-2",
    ("kernel", "decay"): "RetNet",
    ("kernel", "ones"): "linear attention",
    ("kernel", "blocks"): "MHLA",
    ("kernel", "toeplitz_blocks"): "TBM",
}


def mixer_title(config: Any) -> str:
    """Return the short name of a mixer, for example "log-linear GDN + window 64" or "MLR 32|16|16"."""
    if isinstance(config, HeadHybrid):
        heads = len(config.softmax_heads)
        return f"{mixer_title(config.others)}, softmax in {heads} head{'s' if heads > 1 else ''}"
    if isinstance(config, Native):
        return "level weights"
    if config.name == "none":
        return "no attention"
    if hasattr(config, "mask"):
        kind = config.scores, config.mask.name
        masked = f"{'DeltaNet' if config.scores == 'delta' else 'linear'}, {config.mask.name.replace('_', ' ')} mask"
        name = LINEAR_NAMES.get(kind, masked)
    else:
        name = {"mlr": "MLR", "global_window": "softmax of fewer dims"}.get(config.name, config.name.replace("_", " "))
        name += f" {'|'.join(map(str, ranks))}" if (ranks := getattr(config, "ranks", None)) else ""
    if not (window := getattr(config, "window", 0)):
        return name
    return f"window {window}" if config.name == "window" else f"{name} + window {window}"


def recipe_name(recipe: Mapping[str, Any]) -> str:
    """Return the name of the shipped recipe with the description of a report's recipe; for others the description, ""
    without one. recipe: `recipe` of a report.
    """
    said = str(recipe.get("description") or "")
    shipped = read_recipes(every=True).items() if said else ()
    return next((name for name, words in shipped if words.get("description") == said), said)
