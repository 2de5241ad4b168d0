"""Laws of a pruned MLP's `down`: the neurons that stay are fitted best to the outputs of all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.core.errors import SurgeryError
from surgery.structures import STRUCTURES, Metric, add_damping
from surgery.structures.pruned import Pruned, PrunedLinear, leading_units, neuron_scores, refit_columns

LAWS = settings(max_examples=25, deadline=None)
DIMS = st.sampled_from([(12, 40), (40, 24), (7, 33)])
SEEDS = st.integers(0, 99)


def problem(out: int, neurons: int, seed: int) -> tuple[torch.Tensor, Metric]:
    """Return `down` (out, neurons) in float64, and a metric of correlated neurons and outputs."""
    g = torch.Generator().manual_seed(seed)
    mix_II = torch.randn(neurons, neurons, generator=g, dtype=torch.float64) * torch.logspace(0, -1.5, neurons)
    root_OO = torch.randn(out, out, generator=g, dtype=torch.float64)
    c_II, g_OO = add_damping(mix_II @ mix_II.mT / neurons, 0.01), add_damping(root_OO @ root_OO.mT / out, 0.05)
    return torch.randn(out, neurons, generator=g, dtype=torch.float64), Metric(c_II, g_OO)


def project(weight_OI: torch.Tensor, width: int, metric: Metric) -> PrunedLinear:
    linear = PrunedLinear.project(weight_OI, Pruned(width), metric)
    assert isinstance(linear, PrunedLinear)
    return linear


@LAWS
@given(dims=DIMS, seed=SEEDS, share=st.sampled_from([0.3, 0.5, 0.9]))
def test_the_gradient_in_the_columns_that_stay_is_zero(dims, seed, share):
    weight, metric = problem(*dims, seed)
    linear = project(weight, int(share * dims[1]), metric)
    gradient_OI = metric.apply(weight - linear.dense())
    size = float(metric.apply(weight).abs().max())
    assert float(gradient_OI[:, linear.columns.long()].abs().max()) < 1e-8 * size
    assert float(gradient_OI.abs().max()) > 1e-3 * size, "the other columns are not fitted"


@LAWS
@given(dims=DIMS, seed=SEEDS)
def test_the_full_width_is_the_original_bit_by_bit(dims, seed):
    weight, metric = problem(*dims, seed)
    linear = project(weight, dims[1], metric)
    assert torch.equal(linear.weight[0], weight) and linear.columns.tolist() == list(range(dims[1]))
    assert PrunedLinear.fit(Pruned(), *dims, budget=dims[0] * dims[1]).width == dims[1]


@LAWS
@given(dims=DIMS, seed=SEEDS, width=st.integers(2, 20))
def test_the_order_of_the_neurons_does_not_matter(dims, seed, width):
    weight, metric = problem(*dims, seed)
    order = torch.randperm(dims[1], generator=torch.Generator().manual_seed(seed))
    permuted = Metric(metric.c_II[order[:, None], order], metric.g_OO)
    here, there = project(weight, width, metric), project(weight[:, order], width, permuted)
    assert sorted(order[there.columns.long()].tolist()) == here.columns.tolist()
    assert torch.allclose(there.dense(), here.dense()[:, order], rtol=1e-9, atol=1e-9)


@LAWS
@given(dims=DIMS, seed=SEEDS, how=st.sampled_from(["plain", "inputs", "both", "diagonal"]))
def test_the_curve_is_exact_and_falls(dims, seed, how):
    weight, both = problem(*dims, seed)
    diagonal = Metric(both.c_II, both.g_OO.diagonal().clone())
    metric = {"plain": Metric(), "inputs": Metric(both.c_II), "both": both, "diagonal": diagonal}[how]
    curve = PrunedLinear.rank_error_curve(weight, Pruned(multiple=8), metric)
    assert [config.width for config, _ in curve] == [*range(8, dims[1], 8), dims[1]]
    errors = [error for _, error in curve]
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0
    for config, error in curve:
        expected = metric.squared_norm(weight - project(weight, config.width, metric).dense())
        assert error == pytest.approx(expected, rel=1e-7, abs=1e-9 * metric.squared_norm(weight))


def test_neurons_that_write_nothing_go_first():
    weight, metric = problem(12, 40, 0)
    weight[:, [3, 17]] = 0
    assert {3, 17} == {*neuron_scores(weight, metric).argsort()[:2].tolist()}
    linear = project(weight, 38, metric)
    assert torch.allclose(linear.dense(), weight), "and removing them changes nothing"


@LAWS
@given(dims=DIMS, seed=SEEDS, rows=st.sampled_from([(), (1,), (3, 5)]))
def test_forward_is_the_dense_product(dims, seed, rows):
    weight, metric = problem(*dims, seed)
    linear = project(weight, 7, metric)
    x = torch.randn(*rows, dims[1], dtype=torch.float64)
    assert torch.allclose(linear(x), x @ linear.dense().mT)
    assert linear.cost() == (7 * dims[0] + 7, 7 * dims[0]) and linear.macs() == 7 * dims[0]


def test_widths_are_multiples_and_errors_say_what_can_be_met():
    fit = PrunedLinear.fit
    assert fit(Pruned(), 10, 256, 10 * 130).width == 128
    assert fit(Pruned(multiple=1), 10, 256, 10 * 130.9).width == 130
    assert fit(Pruned(width=100), 10, 256, 10).width == 100, "widths that are given are not rounded"
    with pytest.raises(SurgeryError, match=r"covers 60 of 256 neurons. Raise keep to 0.25 or more, or set multiple to"):
        fit(Pruned(), 10, 256, 10 * 60)
    with pytest.raises(
        SurgeryError, match=r"multiples of 300, and .* covers 60 of 256 neurons. Set multiple to 60 or less$"
    ):
        fit(Pruned(multiple=300), 10, 256, 10 * 60)
    with pytest.raises(SurgeryError, match=r"covers 0 of 256 neurons. Raise keep to 0.25 or more$"):
        fit(Pruned(), 10, 256, 5)
    with pytest.raises(SurgeryError, match=r"covers 0 of 256 neurons. Set multiple below 256 and raise keep to 0.0"):
        fit(Pruned(multiple=300), 10, 256, 5)
    with pytest.raises(SurgeryError, match=r"from 1 to the 256 neurons of the MLP .got 300"):
        fit(Pruned(width=300), 10, 256, 10 * 60)
    linear = STRUCTURES[Pruned](8, 4, Pruned(3), bias=False)
    linear.columns = torch.tensor([0, 0, 5])
    with pytest.raises(SurgeryError, match="different numbers below 8 in ascending order"):
        linear.check_loaded()


# -- units of columns: the heads of attention -------------------------------------------------------------------------
UNITS = Pruned(multiple=4, unit=4)


@LAWS
@given(out=st.sampled_from([5, 12]), count=st.integers(2, 6), seed=SEEDS, how=st.sampled_from(["plain", "both"]))
def test_each_step_removes_the_unit_that_raises_the_error_least(out, count, seed, how):
    weight, both = problem(out, 4 * count, seed)
    metric = both if how == "both" else Metric()
    order = leading_units(weight, metric, 4).tolist()
    assert sorted(order) == list(range(count))

    def error(units: list[int]) -> float:
        columns = torch.tensor([4 * u + i for u in sorted(units) for i in range(4)])
        rest = weight.clone()
        rest[:, columns] -= refit_columns(weight, columns, metric)
        return metric.squared_norm(rest)

    for left in range(count, 1, -1):
        errors = {u: error([v for v in order[:left] if v != u]) for u in order[:left]}
        assert errors[order[left - 1]] <= min(errors.values()) * (1 + 1e-6)


@LAWS
@given(count=st.integers(2, 6), seed=SEEDS)
def test_the_curve_of_units_is_exact_and_falls(count, seed):
    weight, metric = problem(12, 4 * count, seed)
    curve = PrunedLinear.rank_error_curve(weight, UNITS, metric)
    assert [config.width for config, _ in curve] == [4 * (n + 1) for n in range(count)]
    errors = [error for _, error in curve]
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0
    for config, error in curve:
        linear = PrunedLinear.project(weight, config, metric)
        assert (linear.columns.view(-1, 4)[:, 0] % 4 == 0).all(), "whole units"
        expected = metric.squared_norm(weight - linear.dense())
        assert error == pytest.approx(expected, rel=1e-7, abs=1e-9 * metric.squared_norm(weight))


def test_budgets_of_units_and_what_can_be_met():
    fit = PrunedLinear.fit
    assert fit(UNITS, 10, 12, 10 * 11).width == 8 and fit(UNITS, 10, 12, 10 * 12).width == 12
    assert UNITS.to_dict()["unit"] == 4 and "unit" not in Pruned().to_dict()
    with pytest.raises(
        SurgeryError, match=r"of which it has 3, and its budget covers 0.75. Raise keep to 0.334 or more"
    ):
        fit(UNITS, 10, 12, 10 * 3)
    with pytest.raises(SurgeryError, match=r"groups must be from 1 to the 3 key/value heads .got 4"):
        fit(Pruned(16, 4, 4), 10, 12, 10)
