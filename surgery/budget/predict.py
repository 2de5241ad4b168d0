"""Predicted losses of plans: gains times damages, summed, and scaled by what the plan loses as a whole.

    predicted(P) = s(P) sum_{c in P} gain_c damage_c       s(P) = damage(P) / sum_{c in P} damage_c

damage(P): the measured damage of the plan as a whole, which is above the sum where choices add to each other's errors. A
plan that was not measured has s = 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surgery.budget.choices import AS_IS, FULL_BITS, Choice
from surgery.budget.damage import Damage
from surgery.budget.gains import COVERAGE_QUANTILE, Gain, Term, interval
from surgery.budget.solver import Option, Problem
from surgery.budget.table import PlanKey, plan_key


@dataclass(frozen=True)
class Predictor:
    """Predicted losses. damages: of the choices, by name. gains: of families; a family without one has the gain 1.
    plans: damages of plans measured as a whole.
    """

    damages: Mapping[str, Damage]
    gains: Mapping[str, Gain]
    plans: Mapping[PlanKey, Damage]

    def terms(self, choice: Choice) -> list[Term]:
        """Return the damage of a choice with its gain, and that of its bits, which are chosen after healing."""
        terms = []
        if choice.name != AS_IS:
            damage = self.damages[replace(choice, bits=FULL_BITS).key]
            gain = self.gains.get(choice.family, Gain())
            terms.append(Term(choice.family, damage.nats, damage.error or 0.0, gain))
        if choice.bits != FULL_BITS:
            damage = self.damages[choice.rounding]
            terms.append(Term("bits", damage.nats, damage.error or 0.0, Gain()))
        return terms

    def problem(self, choices: Sequence[Choice], base: Mapping[str, int]) -> Problem:
        """Return the problem of the solver: an option for each choice, with its predicted loss. base: costs of the
        original.
        """
        options = tuple(
            Option(c.key, c.covers, sum(term.healed for term in self.terms(c)), dict(c.costs)) for c in choices
        )
        return Problem(options, base)

    def losses(self, chosen: Sequence[Choice]) -> dict[str, Any]:
        """Return the predicted loss of a whole plan with its interval, and before healing the sum of damages and, where
        it was measured, the damage of the whole with its standard error.
        """
        terms = [term for choice in chosen for term in self.terms(choice)]
        total = math.fsum(term.damage for term in terms)
        measured, noise = self.plans.get(plan_key(chosen)), 0.0
        if measured is not None and total > 0:
            scale = measured.nats / total
            gain = math.fsum(term.healed for term in terms) / total
            noise = COVERAGE_QUANTILE * gain * (measured.error or 0.0)
            terms = [replace(term, damage=scale * term.damage, error=0.0) for term in terms]
        elif measured is not None:  # choices that do nothing alone
            terms = [Term("", measured.nats, measured.error or 0.0, Gain())]
        low, high = interval(terms, noise)
        return {
            "loss": math.fsum(term.healed for term in terms),
            "low": low,
            "high": high,
            "damage": total,
            "measured": None if measured is None else measured.nats,
            "measured_error": None if measured is None else measured.error,
        }
