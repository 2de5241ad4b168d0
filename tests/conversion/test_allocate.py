"""Budget allocation: never above the budget, and optimal up to the last step."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from recipes.papers.quality.allocations import lems_factor, parse_allocation
from surgery.core.errors import SurgeryError
from surgery.planning.allocate import CostPoint, allocate_budget, lower_hull

OPTION = st.builds(CostPoint, st.integers(1, 40), st.integers(0, 60).map(float))
OPTIONS = st.lists(OPTION, min_size=1, max_size=6)
MODULES = st.dictionaries(st.sampled_from("abcd"), OPTIONS, min_size=1, max_size=4)
LAWS = settings(max_examples=300, deadline=None)


def error_at(options, params: float) -> float:
    """Return the least error of the options with at most `params` parameters."""
    return min((o.error for o in options if o.params <= params), default=float("inf"))


def least_parameters(modules) -> int:
    """Return the parameters stored when every module takes its smallest option."""
    return sum(min(o.params for o in options) for options in modules.values())


def total_error(modules, given) -> float:
    """Return the summed error of an allocation {module: parameters}."""
    return sum(error_at(modules[m], params) for m, params in given.items())


def best_error(modules, budget: float) -> float:
    """Return the least total error within the budget, by exhaustive search."""
    choices = itertools.product(*modules.values())
    return min((sum(o.error for o in c) for c in choices if sum(o.params for o in c) <= budget), default=float("inf"))


@LAWS
@given(OPTIONS)
def test_the_hull_falls_ever_more_slowly_and_nothing_lies_below_it(options):
    hull = lower_hull(options)
    assert set(hull) <= set(options)
    assert hull[0].params == min(o.params for o in options)
    assert hull[-1].error == min(o.error for o in options)
    gains = [(a.error - b.error) / (b.params - a.params) for a, b in itertools.pairwise(hull)]
    assert all(gain > 0 for gain in gains) and all(a > b for a, b in itertools.pairwise(gains))
    for option in options:
        for a, b in itertools.pairwise(hull):
            if a.params <= option.params <= b.params:
                line = a.error + (b.error - a.error) * (option.params - a.params) / (b.params - a.params)
                assert option.error >= line - 1e-9


@LAWS
@given(MODULES, st.floats(0, 200))
def test_a_budget_below_the_smallest_options_is_refused_with_the_numbers(modules, budget):
    least = least_parameters(modules)
    assume(least > budget)
    with pytest.raises(
        SurgeryError, match=f"store {least:,} parameters, more than the budget of {int(budget):,}; raise keep"
    ):
        allocate_budget(modules, budget)


@LAWS
@given(MODULES, st.floats(0, 200))
def test_a_budget_is_never_exceeded(modules, budget):
    assume(least_parameters(modules) <= budget)
    given_ = allocate_budget(modules, budget)
    assert given_.keys() == modules.keys()
    assert sum(given_.values()) <= budget
    assert all(params in {o.params for o in modules[m]} for m, params in given_.items())


@LAWS
@given(MODULES, st.floats(0, 200))
def test_greedy_is_optimal_up_to_the_last_step(modules, budget):
    """What it leaves is at most what the best choice leaves, plus one step that did not fit."""
    assume(least_parameters(modules) <= budget)
    given_ = allocate_budget(modules, budget)
    steps = [a.error - b.error for options in modules.values() for a, b in itertools.pairwise(lower_hull(options))]
    best = best_error(modules, budget)
    assert best <= total_error(modules, given_) <= best + max(steps, default=0.0) + 1e-9


@LAWS
@given(MODULES, st.data())
def test_a_budget_met_exactly_by_steps_is_spent_optimally(modules, data):
    """Where the steps taken use the budget up, no choice at all is better."""
    hulls = {m: lower_hull(options) for m, options in modules.items()}
    steps = sorted(
        ((a.error - b.error) / (b.params - a.params), b.params - a.params)
        for hull in hulls.values()
        for a, b in itertools.pairwise(hull)
    )[::-1]
    taken = data.draw(st.integers(0, len(steps)))
    budget = sum(hull[0].params for hull in hulls.values()) + sum(size for _, size in steps[:taken])
    given_ = allocate_budget(modules, budget)
    assume(sum(given_.values()) == budget)
    assert total_error(modules, given_) == pytest.approx(best_error(modules, budget))


@LAWS
@given(MODULES, st.floats(0, 100), st.floats(0, 100))
def test_all_the_money_buys_the_least_error(modules, budget, more):
    enough = sum(max(o.params for o in options) for options in modules.values())
    given_ = allocate_budget(modules, enough + more)
    assert total_error(modules, given_) == pytest.approx(best_error(modules, enough))


def test_modules_get_what_they_need():
    """One that hardly minds is cut; one that minds keeps its numbers."""
    options = {
        "minds": [CostPoint(10, 100.0), CostPoint(20, 40.0), CostPoint(30, 0.0)],
        "does not": [CostPoint(10, 1.0), CostPoint(20, 0.5), CostPoint(30, 0.0)],
    }
    assert allocate_budget(options, 40) == {"minds": 30, "does not": 10}


def test_the_allocations_of_the_table_of_measurements():
    """recipes/papers/quality/allocations.py: the factor of LEMS falls from 1 + gamma in the first layer to 1 in the
    last.
    """
    factors = [lems_factor(layer, 4, 1.0, 5.0) for layer in range(4)]
    assert factors[0] == pytest.approx(6) and factors[-1] == pytest.approx(1) and factors == sorted(factors)[::-1]
    assert [lems_factor(layer, 3, 0.0, 2.0) for layer in range(3)] == pytest.approx([3, 2, 1])
    assert parse_allocation("lems=0.5,2") == ("lems", (0.5, 2.0)) and parse_allocation("mean") == ("mean", ())
    assert parse_allocation("probed=1,2") == ("probed", (1.0, 2.0))
    for wrong in ("tilt", "lems=1", "probed=1", "spread=1", "power=x", "tilt=nan", "best"):
        with pytest.raises(SurgeryError, match="must be uniform, spread"):
            parse_allocation(wrong)
