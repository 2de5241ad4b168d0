"""`round_ranks`: ranks that the budget chooses are multiples of a number, within the budget."""

from __future__ import annotations

import pytest
import torch
from helpers.small import allocate_by_gain, make_recipe, matrix_structures
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.api import plan
from surgery.conversion.convert import convert
from surgery.conversion.fisher import round_curve
from surgery.core.errors import SurgeryError
from surgery.planning.plan import fit_rounded, has_free_rank
from surgery.structures import STRUCTURES, Metric
from surgery.structures.low_rank import LowRank
from surgery.structures.monarch import Monarch

SHAPES = st.sampled_from([(48, 64), (64, 48), (37, 53), (7, 120), (64, 64), (256, 192)])


@pytest.mark.parametrize("name", matrix_structures())
@settings(max_examples=30, deadline=None)
@given(shape=SHAPES, keep=st.floats(0.05, 1.0), multiple=st.sampled_from([2, 3, 8, 64]))
def test_a_rank_is_a_multiple_and_within_the_budget(name, shape, keep, multiple):
    config, budget = STRUCTURES.config_type(name)(), keep * shape[0] * shape[1]
    cls = STRUCTURES[config]
    try:
        exact = cls.fit(config, *shape, budget)
        is_free = has_free_rank(config, shape)
    except SurgeryError:
        return  # the shape or the budget is refused, with and without rounding
    rounded = fit_rounded(config, shape, budget, multiple)
    assert cls.params(rounded, *shape) <= cls.params(exact, *shape) <= budget
    if not is_free or exact.rank < multiple or exact.rank == cls.full_rank(exact, *shape):
        assert rounded == exact
    else:
        assert rounded.rank % multiple == 0 and 0 <= exact.rank - rounded.rank < multiple


def test_ranks_that_are_given_are_not_rounded():
    assert fit_rounded(LowRank(rank=13), (64, 64), 4096, 8).rank == 13
    assert fit_rounded(LowRank(rank="full"), (64, 60), 4096, 8).rank == 60
    assert fit_rounded(Monarch(blocks=4), (96, 96), 96 * 96, 4).rank == 6, "96 / 4^2"


def test_a_curve_at_multiples_lies_on_the_curve():
    """Between the ranks of the curve, never below the true error, and close to it."""
    torch.manual_seed(0)
    weight = torch.randn(100, 90) * torch.logspace(0, -2, 90)
    cls = STRUCTURES[LowRank]
    every = dict(cls.rank_error_curve(weight, LowRank(), Metric(), steps=90))
    rounded = round_curve(cls.rank_error_curve(weight, LowRank(), Metric(), steps=13), 8)  # ranks 1, 7, 14, ..
    assert [config.rank for config, _ in rounded] == [1, 7, *range(8, 90, 8), 90]
    for config, error in rounded:
        assert every[config] * (1 - 1e-5) - 1e-6 <= error <= every[config] + 0.02 * every[LowRank(rank=1)]
    assert round_curve(list(every.items()), 8)[-1] == list(every.items())[-1]


@pytest.mark.parametrize("allocate", ["uniform", "measured"])
def test_a_conversion_with_multiples(checkpoints, calibration, tmp_path, monkeypatch, allocate):
    allocate_by_gain(monkeypatch)
    keys = {"structure": "low_rank", "keep": 0.6, "round_ranks": 4, "allocate": allocate, "sweeps": 0}
    report = convert(str(checkpoints("llama")), make_recipe(**keys, calibration=calibration("llama")), tmp_path / "out")
    structured = [module for module in report["modules"] if module["structure"]["structure"] != "dense"]
    assert structured and all(module["structure"]["rank"] % 4 == 0 for module in structured)
    assert report["totals"]["kept"] <= 0.6
    if allocate == "measured":
        assert len({module["structure"]["rank"] for module in structured}) > 1 and report["totals"]["kept"] > 0.55


def test_the_plan_says_so(checkpoints):
    """Ranks in the plan are multiples; a note says what is rounded, and for how many matrices the budget is too
    small.
    """
    found = plan(str(checkpoints("llama")), "low-rank-half", round_ranks=4)
    ranks = [target["first"]["rank"] for target in found["targets"]]
    assert all(rank % 4 == 0 for rank in ranks)
    assert "round_ranks: ranks chosen by the budget are rounded down to multiples of 4" in found["notes"]
    found = plan(str(checkpoints("llama")), "fast-half")
    assert any("14 matrices whose budget allows less than 64 keep the rank" in note for note in found["notes"])
