"""The front of a search: the best choice at each of several values of the first limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from surgery.budget.solver import Problem, Solution, binding, lowest_cost, solve


@dataclass(frozen=True)
class Front:
    """The solutions of a search.

    asked: at the limits themselves. binds: names of the limits that bind there. others: at other values of the first
    limit, from the smallest to the original's. rivals: at the limits too, each without one family of the choices of
    `asked`, by its name.
    """

    asked: Solution
    binds: list[str]
    others: list[Solution]
    rivals: dict[str, Solution] = field(default_factory=dict)


def find_rivals(
    problem: Problem, limits: Mapping[str, float], asked: Solution, families: Mapping[str, frozenset[str]]
) -> dict[str, Solution]:
    """Return the solution at the limits without each family of the choices of `asked`, where there is one.

    families: of the options that have some, by name of the option. The sum of losses, which the solver minimizes, may
    underestimate one family more than another: where plans are measured as a whole, these differ enough to show it.
    """
    rivals: dict[str, Solution] = {}
    found = {frozenset(option.name for option in asked.options)}
    for family in sorted({family for option in asked.options for family in families.get(option.name, ())}):
        options = tuple(option for option in problem.options if family not in families.get(option.name, ()))
        solution = solve(Problem(options, problem.base), limits)
        names = frozenset(option.name for option in solution.options)
        if not solution.excess and names not in found:
            found.add(names)
            rivals[family] = solution
    return rivals


def find_front(
    problem: Problem, limits: Mapping[str, float], points: int, families: Mapping[str, frozenset[str]] | None = None
) -> Front:
    """Return the solution at the limits, up to `points` others that sweep the first limit and keep the rest, and with
    `families` its rivals (see `find_rivals`).
    """
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
    rivals = {} if asked.excess else find_rivals(problem, limits, asked, families or {})
    return Front(asked, binding(problem, limits, asked), list(found.values()), rivals)
