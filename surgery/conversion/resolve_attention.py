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
    meta_model: MetaModel,
    plan: Plan,
    recipe: ConversionRecipe,
    batch: CalibrationSet,
    runner: LayerRunner,
    folder: Path,
    journal: Journal,
    progress: Progress,
) -> tuple[Plan, dict[str, Any] | None]:
    """(the plan with the attention_targets that will be filled, what the report says of a hybrid)"""
    settings, hybrid_report = recipe.attention, None
    if settings is not None and settings.hybrid is not None and settings.hybrid.is_measured:
        if journal.find("hybrid") is None:
            journal.add(
                "hybrid", told=choose_hybrid(meta_model, plan, recipe, settings.hybrid, batch, runner, progress)
            )
        hybrid_report = journal.find("hybrid")["told"]  # type: ignore[index]
        plan = replace(
            plan,
            attention_targets={
                k: attention_target
                for k, attention_target in plan.attention_targets.items()
                if k not in hybrid_report["softmax"]
            },
        )
    if settings is not None and settings.cache is not None:
        if journal.find("arranged") is None:
            alone = runner.single_process()  # what is gathered is a sum over windows that has no parts
            look = partial(allocate_score_dims, meta_model, plan, recipe, batch, alone, folder, progress)
            journal.add("arranged", chosen=runner.ranks.on_main(look))
            runner.hidden_bytes = max(runner.hidden_bytes, alone.hidden_bytes)
        plan = replace(plan, attention_targets=allocated_targets(plan, journal.find("arranged")["chosen"]))  # type: ignore[index]
    return plan, hybrid_report
