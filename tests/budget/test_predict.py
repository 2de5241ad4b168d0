"""Predicted losses of plans: sums of healed damages, scaled by the damage of the whole plan where it was measured."""

from __future__ import annotations

import pytest

from surgery.budget.choices import MLP, Choice, linear_kinds, part_name
from surgery.budget.damage import Damage
from surgery.budget.gains import Gain
from surgery.budget.predict import Predictor
from surgery.budget.table import plan_key

(HALF,) = linear_kinds(MLP, "pruned", (0.5,))
CHOSEN = [Choice(layer, (part_name(layer, MLP),), HALF.name, HALF) for layer in ("l.0", "l.1")]
GAINS = {"pruned": Gain(0.5, 0.1, 1.0, 2)}
DAMAGES = {choice.key: Damage(0.1, 0.0) for choice in CHOSEN}


def test_without_a_measured_plan_damages_are_summed():
    losses = Predictor(DAMAGES, GAINS, {}).losses(CHOSEN)
    assert losses["damage"] == pytest.approx(0.2) and losses["loss"] == pytest.approx(0.1)
    assert (losses["low"], losses["high"]) == (pytest.approx(0.02), pytest.approx(0.2))
    assert losses["measured"] is losses["measured_error"] is None


@pytest.mark.parametrize("measured", [0.05, 0.8])
def test_a_measured_plan_scales_the_loss_and_its_interval(measured):
    losses = Predictor(DAMAGES, GAINS, {plan_key(CHOSEN): Damage(measured, None)}).losses(CHOSEN)
    assert losses["damage"] == pytest.approx(0.2) and losses["measured"] == measured
    assert losses["loss"] == pytest.approx(measured / 2)
    assert (losses["low"], losses["high"]) == (pytest.approx(0.1 * measured), pytest.approx(measured))


def test_the_error_of_the_measured_plan_widens_the_interval():
    def width(error: float) -> float:
        losses = Predictor(DAMAGES, GAINS, {plan_key(CHOSEN): Damage(0.8, error)}).losses(CHOSEN)
        return losses["high"] - losses["low"]

    assert width(0.0) < width(0.1) < width(0.2)


def test_choices_that_do_nothing_alone_may_do_something_together():
    damages = dict.fromkeys(DAMAGES, Damage(0.0, 0.0))
    losses = Predictor(damages, GAINS, {plan_key(CHOSEN): Damage(0.3, 0.0)}).losses(CHOSEN)
    assert losses["loss"] == losses["low"] == losses["high"] == 0.3


def test_the_order_of_choices_and_unchanged_parts_do_not_matter():
    same = [*CHOSEN[::-1], Choice("l.2", (part_name("l.2", MLP),), "as it is")]
    assert plan_key(same) == plan_key(CHOSEN)
