"""The cheapest choice of options in predicted loss under linear limits: a mixed-integer program.

    min  sum_o loss_o x_o      x_o in {0, 1}
    s.t. sum_{o covers p} x_o = 1              for every part p
         base_k + sum_o cost_ok x_o <= limit_k for every limit k

An option covers one part, or several that change together, such as all parts of a removed layer. The program is solved
by HiGHS (Huangfu & Hall 2018, "Parallelizing the dual revised simplex method"; `scipy.optimize.milp`). Costs are whole
numbers, or real ones such as milliseconds. HiGHS meets a row up to a tolerance, so that a solution is checked in exact
arithmetic, and solved again without that choice where it exceeds a limit.

If no choice meets all limits, the nearest one is returned: that with the least sum of excess_k / limit_k, and of these
the one with the lowest loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surgery.core.errors import SurgeryError

REL_GAP = 1e-7  # relative gap of the objective at which HiGHS stops
OBJECTIVE = 1e4  # to which losses are scaled: HiGHS also stops at an absolute gap of 1e-6
TIME_LIMIT = 60.0  # seconds of one solution
ATTEMPTS = 32  # solutions, until one meets the limits exactly


@dataclass(frozen=True)
class Option:
    """One option. covers: names of its parts. loss: in nats per token. costs: by name of the cost; 0 if left out."""

    name: str
    covers: tuple[str, ...]
    loss: float
    costs: Mapping[str, float] = field(default_factory=dict)

    def cost(self, name: str) -> float:
        """Return the cost of this name."""
        return self.costs.get(name, 0)


@dataclass(frozen=True)
class Problem:
    """Options and what does not depend on them. base: costs of what is not chosen, by name."""

    options: tuple[Option, ...]
    base: Mapping[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> list[str]:
        """The parts that options cover, in order."""
        return list(dict.fromkeys(part for option in self.options for part in option.covers))

    @property
    def cost_names(self) -> list[str]:
        """The names of all costs, in order."""
        return list(dict.fromkeys([*self.base, *(name for option in self.options for name in option.costs)]))


@dataclass(frozen=True)
class Solution:
    """The chosen options. costs: of all of them and the base, by name. gap: how far `loss` may be above the optimum, in
    nats per token. excess: limits that are exceeded, by name, and by how much; {} if all are met.
    """

    options: tuple[Option, ...]
    loss: float
    costs: Mapping[str, float]
    gap: float = 0.0
    excess: Mapping[str, float] = field(default_factory=dict)


def solve(problem: Problem, limits: Mapping[str, float]) -> Solution:
    """Return the choice with the lowest loss within the limits, by name of the cost; the nearest one if none meets all
    of them.

    Raises SurgeryError for a limit of a cost that no option has, and for parts that no combination of options covers
    once.
    """
    for name in limits:
        if name not in problem.cost_names:
            raise SurgeryError(f"no option has the cost {name!r}; costs are {', '.join(problem.cost_names)}")
    found = _within(problem, limits)
    return _nearest(problem, limits) if found is None else found


def lowest_cost(problem: Problem, name: str, limits: Mapping[str, float]) -> Solution:
    """Return the choice with the lowest cost of this name within the limits, and of equal ones that with the lowest
    loss. Some choice must be within the limits.
    """
    by_cost = Problem(tuple(Option(o.name, o.covers, o.cost(name), o.costs) for o in problem.options), problem.base)
    cheapest = _within(by_cost, limits)
    assert cheapest is not None
    found = _within(problem, {**limits, name: cheapest.costs[name]})
    assert found is not None
    return found


def binding(problem: Problem, limits: Mapping[str, float], solution: Solution) -> list[str]:
    """Return the limits without which the loss would be lower, or, if limits are exceeded, those that are. Where no
    single one is, because another one asks for the same, all that the choice without limits exceeds.
    """
    if solution.excess:
        return list(solution.excess)
    names = []
    for name in limits:
        without = _within(problem, {other: limit for other, limit in limits.items() if other != name})
        if without is not None and without.loss < solution.loss and without.costs[name] > limits[name]:
            names.append(name)
    if names:
        return names
    free = _within(problem, {})
    assert free is not None
    return [name for name, limit in limits.items() if free.costs[name] > limit]


def _within(problem: Problem, limits: Mapping[str, float]) -> Solution | None:
    """Return the best choice within the limits, None if there is none."""
    options = _undominated(problem.options, list(limits))
    refused: list[list[Option]] = []
    for _ in range(ATTEMPTS):
        found = _run(Problem(options, problem.base), limits, refused=refused)
        if found is None:
            return None
        chosen, gap = found
        costs = _costs(problem, chosen)
        over = [name for name, limit in limits.items() if costs[name] > limit]
        if not over:
            return Solution(tuple(chosen), math.fsum(option.loss for option in chosen), costs, gap)
        refused.append(chosen)
    raise SurgeryError(
        f"{ATTEMPTS} choices exceed {', '.join(over)} by less than the tolerance of the solver. Give another limit"
    )


def _nearest(problem: Problem, limits: Mapping[str, float]) -> Solution:
    """Return the choice with the least sum of relative excesses, and of these the one with the lowest loss."""
    found = _run(problem, limits, with_excess=True)
    if found is None:
        raise SurgeryError("no combination of the options covers every part once")
    reached = _costs(problem, found[0])
    allowed = {name: max(limit, reached[name]) for name, limit in limits.items()}
    best = _within(problem, allowed)
    assert best is not None
    excess = {name: best.costs[name] - limit for name, limit in limits.items() if best.costs[name] > limit}
    return Solution(best.options, best.loss, best.costs, best.gap, excess)


def _costs(problem: Problem, chosen: Sequence[Option]) -> dict[str, float]:
    """Return the costs of a choice by name; sums of whole numbers are exact."""
    costs = {}
    for name in problem.cost_names:
        terms = [problem.base.get(name, 0), *(option.cost(name) for option in chosen)]
        costs[name] = sum(terms) if all(isinstance(term, int) for term in terms) else math.fsum(terms)
    return costs


def _undominated(options: Sequence[Option], names: Sequence[str]) -> tuple[Option, ...]:
    """Return the options without those that another one of the same parts beats or equals in loss and in the costs of
    these names.
    """
    by_parts: dict[frozenset[str], list[tuple[tuple[float, ...], int, Option]]] = {}
    for index, option in enumerate(options):
        values = (option.loss, *(option.cost(name) for name in names))
        by_parts.setdefault(frozenset(option.covers), []).append((values, index, option))
    kept: list[tuple[int, Option]] = []
    for rivals in by_parts.values():
        best: list[tuple[float, ...]] = []  # sorted rivals: what beats one comes before it
        for values, index, option in sorted(rivals, key=lambda rival: rival[:2]):
            if not any(all(a <= b for a, b in zip(other, values)) for other in best):
                best.append(values)
                kept.append((index, option))
    return tuple(option for _, option in sorted(kept, key=lambda pair: pair[0]))


def _run(
    problem: Problem,
    limits: Mapping[str, float],
    *,
    with_excess: bool = False,
    refused: Sequence[Sequence[Option]] = (),
) -> tuple[list[Option], float] | None:
    """Return (the chosen options, the gap of the objective), None if the limits cannot be met.

    with_excess: minimize the sum of excess_k / limit_k, each a variable >= 0, instead of the loss. refused: choices
    that are not taken.
    """
    # SciPy's optimizers take a third of a second to import.
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    options, parts = problem.options, problem.parts
    count, row_of = len(options), {part: row for row, part in enumerate(parts)}
    column_of = {option.name: column for column, option in enumerate(options)}
    size = count + (len(limits) if with_excess else 0)
    cover = np.zeros((len(parts), size))
    for column, option in enumerate(options):
        for part in option.covers:
            cover[row_of[part], column] = 1
    losses = np.array([option.loss for option in options])
    scale = OBJECTIVE / max(float(np.abs(losses).max()), 1e-30)
    objective = np.concatenate([np.zeros(count), np.ones(size - count)]) if with_excess else losses * scale
    constraints: list[Any] = [LinearConstraint(cover, 1, 1)]
    for number, (name, limit) in enumerate(limits.items()):
        terms, bound, unit = _row(problem, name, limit)
        row = np.zeros(size)
        row[:count] = terms
        if with_excess:
            row[count + number] = -max(abs(limit), 1) / unit
        constraints.append(LinearConstraint(row[None], -np.inf, bound))
    for chosen in refused:
        row = np.zeros(size)
        row[[column_of[option.name] for option in chosen]] = 1
        constraints.append(LinearConstraint(row[None], -np.inf, len(chosen) - 1))
    result = milp(
        objective,
        integrality=np.concatenate([np.ones(count), np.zeros(size - count)]),
        bounds=Bounds(0, np.concatenate([np.ones(count), np.full(size - count, np.inf)])),
        constraints=constraints,
        options={"mip_rel_gap": REL_GAP, "time_limit": TIME_LIMIT},
    )
    if result.x is None:
        if result.status == 2:
            return None
        raise SurgeryError(f"the solver stopped without a choice: {result.message}")
    best = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
    gap = 0.0 if with_excess else max(0.0, float(result.fun - best) / scale)
    return [option for option, x in zip(options, result.x) if x > 0.5], gap


def _row(problem: Problem, name: str, limit: float) -> tuple[list[float], float, float]:
    """Return (coefficients of the options, bound, unit) of a limit's row, in units of about its largest coefficient.

    Every part is covered once, so the lowest cost of its options is a constant and leaves the row, whose numbers are
    then as small as they can be. A bound on whole numbers is moved up by a half, so that rounding does not decide.
    """
    lowest: dict[str, float] = {}
    for option in problem.options:
        if len(option.covers) == 1:
            part = option.covers[0]
            lowest[part] = min(lowest.get(part, math.inf), option.cost(name))
    terms = [option.cost(name) - sum(lowest.get(part, 0) for part in option.covers) for option in problem.options]
    base = problem.base.get(name, 0)
    bound = limit - base - sum(lowest.values())
    if all(isinstance(value, int) for value in (*terms, base, limit)):
        step = math.gcd(*terms) or 1  # type: ignore[arg-type]
        terms, bound = [term // step for term in terms], bound // step + 0.5
        limit_step = float(step)
    else:
        limit_step = 1.0
    unit = max(abs(term) for term in terms) or max(abs(bound), 1.0)  # where no option changes the cost
    return [term / unit for term in terms], bound / unit, unit * limit_step
