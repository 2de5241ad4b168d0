"""Allocation of a parameter budget over modules (continuous multiple-choice knapsack).

Every module offers options (stored parameters, remaining error), the dense weight among them. Allocation starts from
the smallest option of each module, then takes the step with the largest error reduction per parameter while the budget
lasts. On the lower convex hulls of the options this greedy choice is optimal up to the last step (Sinha & Zoltners
1979). Errors of different modules must have one unit: the expected increase of the loss, 1/2 E[g^2] ||(W - B)
C^(1/2)||^2.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from surgery.core.errors import SurgeryError


class CostPoint(NamedTuple):
    """One option of a module: stored parameters, or nanoseconds where time is spent, and remaining error."""

    params: int
    error: float


class HullStep(NamedTuple):
    """A step between neighboring options on a module's hull. params: parameters added by the step."""

    gain: float  # error reduction per parameter
    module: str
    option: CostPoint
    params: int


def lower_hull(options: Sequence[CostPoint]) -> list[CostPoint]:
    """Return the options on the lower convex hull, smallest first; the gain per parameter falls from step to step."""
    hull: list[CostPoint] = []
    for option in sorted(options):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _gain(a: CostPoint, b: CostPoint) -> float:
    return (a.error - b.error) / (b.params - a.params)


def allocate_budget(options: Mapping[str, Sequence[CostPoint]], budget: float) -> dict[str, int]:
    """Return the number of parameters of each module, in total at most `budget`.

    Raises SurgeryError if even the smallest options exceed the budget.
    """
    chosen = spend(options, budget)
    if chosen is None:
        least = sum(lower_hull(choices)[0].params for choices in options.values())
        raise SurgeryError(
            f"the smallest structures of {len(options)} modules store {least:,} parameters, more than the "
            f"budget of {int(budget):,}; raise keep, or give fewer blocks"
        )
    return {module: option.params for module, option in chosen.items()}


def spend(options: Mapping[str, Sequence[CostPoint]], budget: float) -> dict[str, CostPoint] | None:
    """Return the option of each module, in total at most `budget`; None if even the cheapest options exceed it."""
    hulls = {module: lower_hull(choices) for module, choices in options.items()}
    chosen = {module: hull[0] for module, hull in hulls.items()}
    remaining_budget = budget - sum(option.params for option in chosen.values())
    if remaining_budget < 0:
        return None
    steps = [
        HullStep(_gain(a, b), module, b, b.params - a.params)
        for module, hull in hulls.items()
        for a, b in itertools.pairwise(hull)
    ]
    blocked: set[str] = set()
    for step in sorted(steps, key=lambda s: (-s.gain, s.module, s.params)):
        if step.module in blocked:
            continue
        if step.params > remaining_budget:  # this module gets no more; smaller steps of other modules may still fit
            blocked.add(step.module)
            continue
        chosen[step.module] = step.option
        remaining_budget -= step.params
    return chosen
