"""The front of a search: the best choice at each of several values of the first limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surgery.budget.solver import Problem, Solution, binding, lowest_cost, solve


@dataclass(frozen=True)
class Front:
    """The solutions of a search.

    asked: at the limits themselves. binds: names of the limits that bind there. others: at other values of the first
    limit, from the smallest to the original's.
    """

    asked: Solution
    binds: list[str]
    others: list[Solution]


def find_front(problem: Problem, limits: Mapping[str, float], points: int) -> Front:
    """Return the solution at the limits, and up to `points` others that sweep the first limit and keep the rest."""
    asked = solve(problem, limits)
    swept, *_ = limits
    rest = {name: limit for name, limit in limits.items() if name != swept}
    free = solve(problem, rest)
    if free.excess:  # the other limits cannot be met whatever the first one is
        return Front(asked, binding(problem, limits, asked), [])
    least, most = lowest_cost(problem, swept, rest).costs[swept], free.costs[swept]
    found: dict[frozenset[str], Solution] = {}
    for number in range(points):
        limit = least + (most - least) * number // max(1, points - 1)
        solution = solve(problem, {swept: limit, **rest})
        found.setdefault(frozenset(option.name for option in solution.options), solution)
    found.pop(frozenset(option.name for option in asked.options), None)
    return Front(asked, binding(problem, limits, asked), list(found.values()))
