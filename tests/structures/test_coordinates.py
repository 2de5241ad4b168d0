"""Coordinates in which tuning steps: they invert, gradients follow the chain rule, and steps have the size of those of
two factors.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.small import matrix_structures

from surgery.conversion.replacement import LayerReplacement
from surgery.conversion.tune import TrainedLayer
from surgery.structures import STRUCTURES, Metric
from surgery.structures.pivoted_low_rank import PivotedLowRank

RANK, OUT, IN = 24, 96, 80


def steep_weight(out: int = OUT, in_: int = IN) -> torch.Tensor:
    """Return a matrix (out, in_) whose singular values fall from 1 to 0.01."""
    generator, rank = torch.Generator().manual_seed(0), min(out, in_)
    left, right = (torch.linalg.qr(torch.randn(n, rank, generator=generator))[0] for n in (out, in_))
    return left * torch.logspace(0, -2, rank) @ right.mT


def half(name: str, out: int, in_: int):
    """Return the default config of a structure that stores half of the elements."""
    config_type = STRUCTURES.config_type(name)
    return STRUCTURES[config_type].fit(config_type(), out, in_, 0.5 * out * in_)


def project(config, weight, metric=None):
    return STRUCTURES[config].project(weight, config, metric or Metric())


@pytest.mark.parametrize("name", matrix_structures())
def test_coordinates_invert_and_turn_gradients_by_the_chain_rule(name):
    config = half(name, OUT, IN)
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


def relative_step(config, out: int, in_: int) -> float:
    """Return the change of a matrix, relative to its norm, by one step at the rate 0.01 down the gradient of a random
    linear function.
    """
    linear = project(config, steep_weight(out, in_))
    names = {f"layer.{name}": torch.float32 for name, _ in linear.named_parameters()}
    model = SimpleNamespace(keys={}, module=lambda path: None)
    layer = TrainedLayer(model, "", LayerReplacement(structured={"layer": linear}), names)
    before = linear.dense().detach()
    leaves = layer.parameters(torch.device("cpu"), trained=True)
    direction = torch.randn(out, in_, generator=torch.Generator().manual_seed(3))
    gradients = torch.autograd.grad((linear.dense() * direction).sum(), leaves, allow_unused=True)
    layer.update(leaves, list(gradients), 0.01)
    return float((linear.dense().detach() - before).norm() / before.norm())


@pytest.mark.parametrize("size", [(64, 64), (192, 256)])
@pytest.mark.parametrize("name", matrix_structures())
def test_a_step_moves_a_matrix_by_about_the_rate_whatever_its_structure_and_size(name, size):
    assert 0.01 < relative_step(half(name, *size), *size) < 0.025


def test_steps_in_the_stored_values_of_a_pivoted_matrix_go_too_far(monkeypatch):
    monkeypatch.setattr(STRUCTURES[PivotedLowRank], "step_coordinates", lambda self: {})
    near, far = (relative_step(half("pivoted_low_rank", n, n), n, n) for n in (64, 256))
    assert near > 0.025 and far > 1.5 * near
