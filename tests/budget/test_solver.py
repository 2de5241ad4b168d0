"""The solver against all combinations of small tables, and limits that cannot be met."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from surgery.budget.front import find_front
from surgery.budget.solver import Option, Problem, binding, lowest_cost, solve
from surgery.core.errors import SurgeryError

LAYERS = 3


def random_problem(seed: int) -> Problem:
    """Return three layers with two parts each, of two to four options, and one that covers both parts of a layer."""
    draw = random.Random(seed)
    options = []
    for layer in range(LAYERS):
        for part in "ab":
            for number in range(draw.randint(2, 4)):
                costs = {"bytes": draw.randint(-(10**9), 10**9), "cache": draw.randint(0, 1000)}
                loss = draw.random() * 10 ** draw.randint(-4, 0)
                options.append(Option(f"{layer}{part} {number}", (f"{layer}{part}",), loss, costs))
        options.append(Option(f"{layer} removed", (f"{layer}a", f"{layer}b"), draw.random()))
    return Problem(tuple(options), {"bytes": 5 * 10**8, "cache": 10})


def combinations(problem: Problem, covered: frozenset[str] = frozenset()) -> Iterator[list[Option]]:
    """Yield all choices that cover every part once."""
    missing = next((part for part in problem.parts if part not in covered), None)
    if missing is None:
        yield []
        return
    for option in problem.options:
        if missing in option.covers and not covered & set(option.covers):
            for others in combinations(problem, covered | set(option.covers)):
                yield [option, *others]


def costs_of(problem: Problem, chosen: list[Option]) -> dict[str, float]:
    return {
        name: problem.base.get(name, 0) + sum(option.cost(name) for option in chosen) for name in problem.cost_names
    }


def loss_of(chosen: list[Option]) -> float:
    return sum(option.loss for option in chosen)


@pytest.mark.parametrize("seed", range(25))
def test_a_solution_is_the_best_of_all_combinations(seed):
    problem, draw = random_problem(seed), random.Random(seed)
    limits = {"bytes": draw.randint(-(10**9), 3 * 10**9), "cache": draw.randint(10, 4000)}
    everything = [(costs_of(problem, chosen), chosen) for chosen in combinations(problem)]
    within = [chosen for costs, chosen in everything if all(costs[name] <= limits[name] for name in limits)]
    solution = solve(problem, limits)
    assert solution.costs == costs_of(problem, list(solution.options))
    if within:
        assert not solution.excess
        assert solution.loss == pytest.approx(min(map(loss_of, within)), rel=1e-6)
    else:

        def excess(costs: dict[str, float]) -> float:
            return sum(max(0, costs[name] - limits[name]) / max(1, abs(limits[name])) for name in limits)

        assert excess(dict(solution.costs)) == pytest.approx(min(excess(costs) for costs, _ in everything), rel=1e-6)
        assert set(binding(problem, limits, solution)) == set(solution.excess) != set()


@pytest.mark.parametrize("seed", range(5))
def test_the_lowest_cost_is_that_of_all_combinations(seed):
    problem = random_problem(seed)
    everything = [costs_of(problem, chosen) for chosen in combinations(problem)]
    assert lowest_cost(problem, "bytes", {}).costs["bytes"] == min(costs["bytes"] for costs in everything)
    cache = sorted(costs["cache"] for costs in everything)[len(everything) // 4]
    least = min(costs["bytes"] for costs in everything if costs["cache"] <= cache)
    assert lowest_cost(problem, "bytes", {"cache": cache}).costs["bytes"] == least


def test_a_limit_is_met_to_the_byte():
    """Costs of billions are beyond the tolerance of floating-point rows."""
    options = (Option("small", ("a",), 1.0, {"bytes": 10**12}), Option("large", ("a",), 0.0, {"bytes": 10**12 + 1}))
    assert solve(Problem(options), {"bytes": 10**12}).options[0].name == "small"
    assert solve(Problem(options), {"bytes": 10**12 + 1}).options[0].name == "large"


def test_small_losses_are_told_apart():
    """Differences of 1e-8 nats decide where nothing else does."""
    options = tuple(
        Option(f"{part}{number}", (part,), 1e-8 * number, {"bytes": -number}) for part in "abc" for number in range(3)
    )
    best = solve(Problem(options), {"bytes": -2})
    assert best.loss == pytest.approx(2e-8) and best.costs["bytes"] == -2


def test_what_binds_is_named():
    options = (
        Option("dense", ("a",), 0.0, {"bytes": 100, "cache": 10}),
        Option("half", ("a",), 1.0, {"bytes": 50, "cache": 10}),
    )
    problem = Problem(options)
    limits = {"bytes": 60, "cache": 20}
    assert binding(problem, limits, solve(problem, limits)) == ["bytes"]
    loose = {"bytes": 200, "cache": 20}
    assert binding(problem, loose, solve(problem, loose)) == []


def test_limits_that_contradict_each_other():
    """A choice that saves bytes costs cache: the nearest one exceeds one limit by least."""
    options = (
        Option("bytes", ("a",), 0.5, {"bytes": 50, "cache": 120}),
        Option("cache", ("a",), 0.1, {"bytes": 100, "cache": 100}),
    )
    problem, limits = Problem(options), {"bytes": 50, "cache": 100}
    solution = solve(problem, limits)
    assert solution.options[0].name == "bytes" and solution.excess == {"cache": 20}
    front = find_front(problem, limits, 4)
    assert front.binds == ["cache"] and front.asked == solution


def test_a_limit_that_no_option_changes():
    """It is exceeded whatever is chosen, and the option with the lowest loss is left."""
    options = (Option("small", ("a",), 1.0, {"bytes": -10, "cache": 0}), Option("large", ("a",), 0.0, {"bytes": 0}))
    nearest = solve(Problem(options, {"bytes": 100, "cache": 12582912}), {"bytes": 95, "cache": 7549747})
    assert nearest.options[0].name == "small" and nearest.excess == {"cache": 12582912 - 7549747}


def test_rivals_do_without_a_family():
    """Each is the best within the limits without one family; a family that the limits need has no rival."""
    options = [Option(f"{part} as it is", (part,), 0.0) for part in "ab"]
    options += [Option(f"{part} narrow", (part,), 0.1, {"bytes": -10}) for part in "ab"]
    options += [Option(f"{part} factored", (part,), 0.3, {"bytes": -10}) for part in "ab"]
    families = {f"{part} {name}": frozenset({name}) for part in "ab" for name in ("narrow", "factored")}
    problem = Problem(tuple(options), {"bytes": 100})
    front = find_front(problem, {"bytes": 80}, 0, families)
    assert front.asked.loss == pytest.approx(0.2) and front.rivals["narrow"].loss == pytest.approx(0.6)
    assert front.rivals.keys() == {"narrow"}
    assert not find_front(problem, {"bytes": 80}, 0).rivals
    alone = Problem(tuple(option for option in options if "factored" not in option.name), {"bytes": 100})
    assert not find_front(alone, {"bytes": 80}, 0, families).rivals


def test_the_front_falls():
    """A larger limit never has a larger loss, and no point equals another."""
    problem = random_problem(3)
    front = find_front(problem, {"bytes": 10**9, "cache": 3000}, 8)
    points = sorted([front.asked, *front.others], key=lambda point: point.costs["bytes"])
    losses = [point.loss for point in points]
    assert len(points) > 3 and losses == sorted(losses, reverse=True) and len(set(losses)) == len(losses)
    assert all(point.costs["cache"] <= 3000 for point in points)


def test_an_unknown_cost_is_refused():
    with pytest.raises(SurgeryError, match=r"no option has the cost 'joules'; costs are bytes"):
        solve(Problem((Option("a", ("a",), 0.0, {"bytes": 1}),)), {"joules": 3})


def test_parts_that_nothing_covers_once_are_refused():
    pairs = (Option("first", ("a", "b"), 0.0, {"bytes": 1}), Option("second", ("b", "c"), 0.0, {"bytes": 1}))
    with pytest.raises(SurgeryError, match="no combination of the options covers every part once"):
        solve(Problem(pairs), {"bytes": 1})
