"""Spreading a budget of stored numbers over modules by what each next step buys.

Every module offers options (numbers stored, error left), dense among them. The cheapest options are taken
everywhere; then, as long as the budget lasts, the step with the largest fall of error per number. On the
lower convex hulls of the options this greedy choice is optimal up to the last step (the continuous
multiple-choice knapsack: Sinha & Zoltners 1979). Errors of different modules must be in one unit: the
expected rise of the loss, 1/2 E[g^2] ||(W - B) C^(1/2)||^2.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from surgery.core.errors import SurgeryError


class CostPoint(NamedTuple):
    params: int
    error: float


class HullStep(NamedTuple):
    gain: float  # error bought per number
    module: str
    option: CostPoint
    params: int


def lower_hull(options: Sequence[CostPoint]) -> list[CostPoint]:
    """The options on the lower convex hull, cheapest first: gains per number fall from step to step."""
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
    """Numbers given to each module, in total at most `budget`; SurgeryError where the least exceeds it."""
    hulls = {module: lower_hull(choices) for module, choices in options.items()}
    chosen = {module: hull[0] for module, hull in hulls.items()}
    least = sum(option.params for option in chosen.values())
    left = budget - least
    if left < 0:
        raise SurgeryError(
            f"the smallest structures of {len(options)} modules store {least:,} numbers, more than the "
            f"budget of {int(budget):,}; raise keep, or give fewer blocks"
        )
    steps = [
        HullStep(_gain(a, b), module, b, b.params - a.params)
        for module, hull in hulls.items()
        for a, b in itertools.pairwise(hull)
    ]
    blocked: set[str] = set()
    for step in sorted(steps, key=lambda s: (-s.gain, s.module, s.params)):
        if step.module in blocked:
            continue
        if step.params > left:  # this module stops here; cheaper steps of others may still fit
            blocked.add(step.module)
            continue
        chosen[step.module] = step.option
        left -= step.params
    return {module: option.params for module, option in chosen.items()}
