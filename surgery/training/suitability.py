"""Warnings about a healing recipe that runs on a model it was not made for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from surgery.modeling.cache import mixer_modules
from surgery.modeling.modules import is_new
from surgery.training.stages import STAGES
from surgery.training.stages.base import StageConfig


def is_converted(model: nn.Module) -> bool:
    """Return whether any linear or attention of the model was replaced."""
    return any(map(is_new, model.modules())) or any(True for _ in mixer_modules(model))


def recipe_warnings(
    name: str, model: nn.Module, stages: Iterable[StageConfig], *, converted_whole: bool = False
) -> list[str]:
    """Return warnings about stages that run on the model, but were made for another kind.

    An unconverted model has nothing to recover from a teacher. A recipe that gives mixers a rate of their own and has
    no stage for whatever is `new` was made for replaced attention. name: of the checkpoint. converted_whole:
    whether its conversion removed layers or wrote a stock class, which the modules do not show.
    """
    configs: list[Any] = list(stages)
    if not is_converted(model) and not converted_whole:
        if all(STAGES[config](config).needs_teacher == "nothing" for config in configs):
            return []
        return [
            f"{name} is not a converted checkpoint: no linear and no attention in it was replaced, so there is nothing "
            "to recover from a "
            f"teacher. Convert it first: surgery convert {name} --recipe btt-half --out OUT, then train OUT"
        ]
    has_mixers = any(True for _ in mixer_modules(model))
    for_mixers = any("mixers" in config.rates for config in configs)
    if has_mixers or not for_mixers or any("new" in config.trains for config in configs):
        return []
    return [
        f"this recipe is made for replaced attention, and the attention of {name} is as it was. For replaced linears "
        "use the recipe linears"
    ]
