"""How the budget is spread: measured, tried against the even spread, the better one kept, both reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgery.allocate import Option, spread
from surgery.batch import Batch
from surgery.curvature import Survey
from surgery.planning import Plan
from surgery.progress import Progress
from surgery.recipe import Recipe
from surgery.skeleton import Skeleton
from surgery.stream import Stream
from surgery.trial import QuickTrial, sequential_trial

TRIAL_SHARE = 0.25  # of the windows to fit
MATTERS = 0.02  # a rise of the held-out loss (a relative output error) below which either spread will do


def even_budgets(plan: Plan) -> dict[str, float]:
    return {cut.name: cut.budget() for cuts in plan.cuts.values() for cut in cuts}


def budgets(
    skeleton: Skeleton,
    plan: Plan,
    recipe: Recipe,
    batch: Batch | None,
    stream: Stream,
    folder: Path,
    progress: Progress,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Numbers for each cut by name, and what the report says of the choice."""
    even = even_budgets(plan)
    if batch is None:
        return even, {"kept": "uniform", "why": "no calibration text"}
    if not plan.replaced():
        return even, {"kept": "uniform", "why": "no linear is replaced"}
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
    contenders = {"uniform": even, "spread": by_gain}
    return choose(contenders, skeleton, plan, recipe, batch, stream, folder, progress)


def survey(
    skeleton: Skeleton, plan: Plan, recipe: Recipe, batch: Batch, stream: Stream, folder: Path, progress: Progress
) -> dict[str, list[Option]]:
    with progress.bar("measuring what each rank buys", len(plan.body.layers)) as tick:
        return Survey(skeleton, plan, recipe, stream, folder, tick).run(batch)


def choose(
    contenders: dict[str, dict[str, float]],
    skeleton: Skeleton,
    plan: Plan,
    recipe: Recipe,
    batch: Batch,
    stream: Stream,
    folder: Path,
    progress: Progress,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Tried on a quarter of the text, judged on all held-out text. A quick trial that prefers the even spread
    contradicts the survey; where it is about more than the noise of a loss, sequential trials then decide, which
    also see how layers make up for the errors below them (docs/quality.md)."""
    few, layers, how = batch.fewer(TRIAL_SHARE), len(plan.body.layers), "quick trials"
    with progress.bar("trying spreads of ranks", layers) as tick:
        scores = QuickTrial(skeleton, plan, recipe, contenders, few, stream, folder, tick).run()
    contradicts = scores["uniform"].converted < scores["spread"].converted
    if contradicts and scores["spread"].rise > MATTERS and recipe.calibrate == "sequential":
        how = "sequential trials"
        with progress.bar("trying them layer after layer", layers * len(contenders)) as tick:
            for name, given in contenders.items():
                scores[name] = sequential_trial(skeleton, plan, recipe, given, few, stream, folder, tick)
    kept = min(scores, key=lambda name: scores[name].converted)
    allocation: dict[str, Any] = {"kept": kept, "why": f"held-out loss of {how} on {few.tokens():,} tokens"}
    allocation.update({name: result.to_dict() for name, result in scores.items()})
    return contenders[kept], allocation
