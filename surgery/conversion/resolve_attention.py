"""What a conversion settles about attention before it begins: layers that keep their softmax, and what a budget of
cache buys. Both go into the journal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.meta_model import MetaModel
from surgery.conversion.hybrid import choose_hybrid
from surgery.conversion.mixer_init.mlr_allocation import allocate_score_dims, allocated_targets
from surgery.core.journal import Journal
from surgery.core.progress import Progress
from surgery.planning.plan import Plan
from surgery.planning.recipe import ConversionRecipe


def resolve_attention_plan(
    skeleton: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    batch: CalibrationSet,
    stream: LayerRunner,
    folder: Path,
    journal: Journal,
    progress: Progress,
) -> tuple[Plan, dict[str, Any] | None]:
    """(the plan with the seats that will be filled, what the report says of a hybrid)"""
    settings, told = recipe.attention, None
    if settings is not None and settings.hybrid is not None and settings.hybrid.measured:
        if journal.find("hybrid") is None:
            journal.add("hybrid", told=choose_hybrid(skeleton, plan, recipe, settings.hybrid, batch, stream, progress))
        told = journal.find("hybrid")["told"]  # type: ignore[index]
        plan = replace(plan, seats={k: seat for k, seat in plan.seats.items() if k not in told["softmax"]})
    if settings is not None and settings.cache is not None:
        if journal.find("arranged") is None:
            alone = stream.alone()  # what is gathered is a sum over windows that has no parts
            look = partial(allocate_score_dims, skeleton, plan, recipe, batch, alone, folder, progress)
            journal.add("arranged", chosen=stream.ranks.by_main(look))
            stream.hidden_bytes = max(stream.hidden_bytes, alone.hidden_bytes)
        plan = replace(plan, seats=allocated_targets(plan, journal.find("arranged")["chosen"]))  # type: ignore[index]
    return plan, told
