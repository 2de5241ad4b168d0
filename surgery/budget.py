"""How the budget is spread: measured, tried against the even spread, the better one kept, both reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from surgery.allocate import Option, spread
from surgery.batch import Batch
from surgery.curvature import Survey
from surgery.plan import Plan
from surgery.progress import Progress
from surgery.recipe import Recipe
from surgery.score import Score
from surgery.skeleton import Skeleton
from surgery.stream import Stream

TRIAL_SHARE, TRIAL_SWEEPS = 0.25, 1

# (budgets, windows, recipe) -> held-out score of a conversion that is thrown away
Trial = Callable[[dict[str, float], Batch, Recipe], Score]


def even_budgets(plan: Plan) -> dict[str, float]:
    return {cut.name: cut.budget() for cuts in plan.cuts.values() for cut in cuts}


def budgets(
    skeleton: Skeleton,
    plan: Plan,
    recipe: Recipe,
    batch: Batch | None,
    stream: Stream,
    folder: Path,
    trial: Trial,
    progress: Progress,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Numbers for each cut by name, and what the report says of the choice."""
    even = even_budgets(plan)
    if batch is None:
        return even, {"kept": "uniform", "why": "no calibration text"}
    free = [cut for cut in plan.replaced() if not cut.explicit]
    if recipe.curvature == "none" and (recipe.allocate == "uniform" or not free):
        return even, {"kept": "uniform", "why": "recipe"}
    options = survey(skeleton, plan, recipe, batch, stream, folder, progress)
    if recipe.allocate == "uniform" or not free:
        return even, {"kept": "uniform", "why": "recipe" if free else "every rank is given"}
    given = spread({cut.name: options[cut.name] for cut in free}, sum(cut.budget() for cut in free))
    by_gain = {**even, **given}
    if recipe.allocate == "spread":
        return by_gain, {"kept": "spread", "why": "recipe"}
    return choose(even, by_gain, recipe, batch, trial)


def survey(
    skeleton: Skeleton, plan: Plan, recipe: Recipe, batch: Batch, stream: Stream, folder: Path, progress: Progress
) -> dict[str, list[Option]]:
    with progress.bar("measuring what each rank buys", len(plan.body.layers)) as tick:
        return Survey(skeleton, plan, recipe, stream, folder, tick).run(batch)


def choose(
    even: dict[str, float], by_gain: dict[str, float], recipe: Recipe, batch: Batch, trial: Trial
) -> tuple[dict[str, float], dict[str, Any]]:
    """Both spreads tried on a quarter of the text with one sweep, judged on all held-out text. Sequential where
    the recipe is: what errors of one layer do to the next decides between the spreads."""
    few = batch.fewer(TRIAL_SHARE)
    quick = recipe.model_copy(update={"sweeps": min(TRIAL_SWEEPS, recipe.sweeps)})
    scores = {name: trial(given, few, quick) for name, given in (("uniform", even), ("spread", by_gain))}
    kept = min(scores, key=lambda name: scores[name].converted)
    allocation: dict[str, Any] = {"kept": kept, "why": f"held-out loss of trials on {few.tokens():,} tokens"}
    allocation.update({name: result.to_dict() for name, result in scores.items()})
    return (even if kept == "uniform" else by_gain), allocation
