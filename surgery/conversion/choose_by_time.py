"""Choose the structures of a recipe with `speed`: within the time that the target leaves, by error curves, and by
trials on held-out text.
"""

from __future__ import annotations

from typing import Any

from surgery.conversion.context import ConversionContext
from surgery.conversion.trial import choose_allocation, measure_rank_errors, uniform_budgets
from surgery.planning.speed import Choice, allocate_time, even_points, with_structures


def choose_by_time(ctx: ConversionContext) -> dict[str, Any]:
    """Return the journal's "budgets" entry: parameters and structure of each target by name, and the report's
    "allocation" entry.

    "uniform" spends the time evenly, "measured" where it lowers the expected loss most; with `allocate: measured`
    trials on held-out text choose between them. Both meet the target. Raises SurgeryError if the target cannot be
    reached.
    """
    plan, recipe, time = ctx.plan, ctx.recipe, ctx.plan.time
    assert time is not None
    targets = plan.replaced_targets()  # without those that the calibration inputs do not reach
    even = allocate_time(targets, {target.name: even_points(target) for target in targets}, time)
    contenders = {"uniform": structures_of(even)}
    allocation = {"kept": "uniform", "why": "no calibration text" if ctx.data is None else "recipe"}
    if ctx.data is not None and (recipe.curvature != "none" or recipe.allocate == "measured"):
        points = measure_rank_errors(ctx)
        if recipe.allocate == "measured":
            contenders["measured"] = structures_of(allocate_time(targets, points, time))
    plans = {name: with_structures(plan, structures) for name, structures in contenders.items()}
    budgets = {name: uniform_budgets(contender_plan) for name, contender_plan in plans.items()}
    if "measured" in contenders:
        if contenders["uniform"] == contenders["measured"]:
            allocation = {"kept": "measured", "why": "both ways to spend the time chose the same structures"}
        else:
            _, allocation = choose_allocation(ctx, budgets, plans)
    best = allocation["kept"]
    return {"budgets": budgets[best], "allocation": allocation, "structures": contenders[best]}


def structures_of(choice: Choice) -> dict[str, Any]:
    """Return a choice as plain data, as journals store it."""
    return {name: None if config is None else config.to_dict() for name, config in choice.items()}
