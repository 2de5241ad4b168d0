"""Coordinates in which a refinement steps: they invert, gradients follow the chain rule, and steps have the size of those of two factors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from surgery.conversion.refine import TrainedLayer
from surgery.conversion.replacement import LayerReplacement
from surgery.structures import STRUCTURES, Metric
from surgery.structures.low_rank import LowRank
from surgery.structures.pivoted_low_rank import PivotedLowRank

RANK, OUT, IN = 24, 96, 80


def steep_weight(seed: int = 0) -> torch.Tensor:
    """Return a matrix (OUT, IN) whose singular values fall from 1 to 1e-3."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(n, 64, generator=generator))[0] for n in (OUT, IN))
    return left * torch.logspace(0, -3, 64) @ right.mT


def project(config, weight, metric=None):
    return STRUCTURES[config].project(weight, config, metric or Metric())


@pytest.mark.parametrize("name", STRUCTURES.names())
def test_coordinates_invert_and_turn_gradients_by_the_chain_rule(name):
    config_type = STRUCTURES.config_type(name)
    config = STRUCTURES[config_type].fit(config_type(), OUT, IN, 0.5 * OUT * IN)
    linear = project(config, steep_weight())
    found = linear.step_coordinates()
    order = STRUCTURES[config].step_order(config, OUT, IN)
    assert all(c.matrix.shape == c.inverse.shape == (order, order) for c in found.values()) and bool(order) == bool(
        found
    )
    for core, coordinates in found.items():
        value = linear.get_parameter(core).detach()
        z = coordinates.of(value).requires_grad_(True)
        torch.testing.assert_close(coordinates.core(z.detach()), value, rtol=1e-3, atol=1e-4)
        weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        (wanted,) = torch.autograd.grad((coordinates.core(z) * weights).sum(), z)
        torch.testing.assert_close(coordinates.gradient(weights), wanted)


def test_pivoted_coordinates_are_balanced_factors():
    linear = project(PivotedLowRank(rank=RANK), steep_weight())
    found = linear.step_coordinates()
    pivots, right = found["right"].matrix, found["right"].of(linear.right.detach())
    left = torch.cat([pivots, found["weight"].of(linear.weight.detach())[0]])
    torch.testing.assert_close(left.norm(dim=0), right.norm(dim=1), rtol=1e-3, atol=1e-5)
    gram = left.mT @ left
    assert float((gram - gram.diagonal().diag()).abs().max()) < 1e-3 * float(gram.max())


@pytest.mark.parametrize("weight", [torch.zeros(OUT, IN), torch.ones(OUT, IN)], ids=["zero", "rank one"])
def test_a_matrix_of_smaller_rank_has_finite_coordinates(weight):
    linear = project(PivotedLowRank(rank=RANK), weight + 1e-3 * steep_weight() * weight)
    linear.right.data[1:] = linear.right.data[:1] if bool(weight.any()) else 0.0
    for coordinates in linear.step_coordinates().values():
        assert bool(torch.isfinite(coordinates.matrix).all() and torch.isfinite(coordinates.inverse).all())


def relative_step(config) -> float:
    """Return the change of a matrix, relative to its norm, by one step at the rate 0.01 down the gradient of a random linear function."""
    linear = project(config, steep_weight())
    names = {f"layer.{name}": torch.float32 for name in ("weight", "right")}
    model = SimpleNamespace(keys={}, module=lambda path: None)
    layer = TrainedLayer(model, "", LayerReplacement(structured={"layer": linear}), names)
    before = linear.dense().detach()
    leaves = layer.parameters(torch.device("cpu"), trained=True)
    direction = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(3))
    layer.update(leaves, list(torch.autograd.grad((linear.dense() * direction).sum(), leaves)), 0.01)
    return float((linear.dense().detach() - before).norm() / before.norm())


def test_a_step_moves_a_pivoted_matrix_as_far_as_its_factors(monkeypatch):
    low_rank, pivoted = relative_step(LowRank(rank=RANK)), relative_step(PivotedLowRank(rank=RANK))
    assert 0.5 * low_rank < pivoted < 1.25 * low_rank
    monkeypatch.setattr(STRUCTURES[PivotedLowRank], "step_coordinates", lambda self: {})
    assert relative_step(PivotedLowRank(rank=RANK)) > 1.5 * low_rank, "steps in the stored values go too far"
