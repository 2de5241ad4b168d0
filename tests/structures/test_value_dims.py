"""Laws of attention with fewer value dims: bases of the values, and the output projection fitted to them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.core.errors import SurgeryError
from surgery.structures import Metric, add_damping
from surgery.structures.value_dims import ValueDims, ValueDimsLinear

LAWS = settings(max_examples=15, deadline=None)
HEADS = st.sampled_from([(6, 3), (4, 4), (3, 1)])
SEEDS = st.integers(0, 99)
SIZE, OUT = 8, 20  # value dims of a head, outputs


def problem(heads: int, seed: int) -> tuple[torch.Tensor, Metric]:
    """Return an output projection in float64, and a metric of correlated heads and outputs."""
    g, in_ = torch.Generator().manual_seed(seed), heads * SIZE
    mix_II = torch.randn(in_, in_, generator=g, dtype=torch.float64) * torch.logspace(0, -1.5, in_)
    root_OO = torch.randn(OUT, OUT, generator=g, dtype=torch.float64)
    metric = Metric(add_damping(mix_II @ mix_II.mT / in_, 0.01), add_damping(root_OO @ root_OO.mT / OUT, 0.05))
    return torch.randn(OUT, in_, generator=g, dtype=torch.float64), metric


@LAWS
@given(heads=HEADS, seed=SEEDS, how=st.sampled_from(["plain", "both"]))
def test_the_curve_is_exact_and_falls(heads, seed, how):
    weight, both = problem(heads[0], seed)
    metric = both if how == "both" else Metric()
    curve = ValueDimsLinear.rank_error_curve(weight, ValueDims(None, 2 * heads[0], *heads), metric)
    assert [config.dims for config, _ in curve] == [2, 4, 6, 8]
    errors = [error for _, error in curve]
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0
    for config, error in curve:
        linear = ValueDimsLinear.project(weight, config, metric)
        expected = metric.squared_norm(weight - linear.dense())
        assert error == pytest.approx(expected, rel=1e-7, abs=1e-9 * metric.squared_norm(weight))


@LAWS
@given(seed=SEEDS, dims=st.integers(1, 7))
def test_one_head_is_the_best_matrix_of_its_rank(seed, dims):
    """By the singular values of T O C^(1/2) (Eckart and Young)."""
    weight, metric = problem(1, seed)
    linear = ValueDimsLinear.project(weight, ValueDims(dims, 1, 1, 1), metric)
    spectrum = torch.linalg.svdvals(metric.whiten(weight))
    assert metric.squared_norm(weight - linear.dense()) == pytest.approx(
        float(spectrum[dims:].square().sum()), rel=1e-6
    )


@LAWS
@given(heads=HEADS, seed=SEEDS, dims=st.sampled_from([3, 8]))
def test_the_two_linears_of_a_model_are_the_fit(heads, seed, dims):
    """On values: the projection of the values, and the output projection that reads what it computes."""
    weight, metric = problem(heads[0], seed)
    config = ValueDims(dims * heads[0], heads[0], *heads)
    fit: ValueDimsLinear = ValueDimsLinear.project(weight, config, metric)
    g = torch.Generator().manual_seed(seed)
    values_VI, x = torch.randn(heads[1] * SIZE, 10, generator=g, dtype=torch.float64), torch.randn(5, 10).double()
    sides = []
    for side, stored in (("values", fit.turn_values(values_VI)), ("output", fit.weight[0])):
        shape = (heads[1] * SIZE, 10) if side == "values" else (OUT, heads[0] * SIZE)
        sided = ValueDims(config.width, config.multiple, *heads, side)
        sides.append(ValueDimsLinear.from_cores(sided, shape, {"weight": stored.detach()[None]}))
    spread = lambda v: v.unflatten(-1, (heads[1], SIZE)).repeat_interleave(heads[0] // heads[1], -2).flatten(-2)  # noqa: E731
    wanted = fit(spread(x @ values_VI.mT))
    assert torch.allclose(sides[1](spread(sides[0](x))), wanted)
    for linear, rows in ((fit, spread(x @ values_VI.mT)), (sides[0], x), (sides[1], spread(sides[0](x)))):
        assert torch.allclose(linear(rows), rows @ linear.dense().mT)


def test_all_dims_are_the_original_bit_by_bit():
    weight, metric = problem(6, 0)
    linear = ValueDimsLinear.project(weight, ValueDims(6 * SIZE, 6, 6, 3), metric)
    assert torch.equal(linear.weight[0], weight) and torch.equal(linear.dense(), weight)


def test_budgets_and_what_can_be_met():
    config = ValueDims(None, 24, 6, 3)  # dims are multiples of 4
    assert (
        ValueDimsLinear.fit(config, 10, 48, 10 * 6 * 7).dims == 4 and ValueDimsLinear.fit(config, 10, 48, 480).dims == 8
    )
    with pytest.raises(
        SurgeryError, match=r"multiples of 4, and the budget covers 3 of the 8 .* Raise keep to 0.5 or more"
    ):
        ValueDimsLinear.fit(config, 10, 48, 10 * 6 * 3)
    with pytest.raises(SurgeryError, match=r"from 1 to the 8 value dims of a head .got 9"):
        ValueDimsLinear.fit(ValueDims(54, 24, 6, 3), 10, 48, 0)
