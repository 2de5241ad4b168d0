"""Fronts of `surgery search` among models that are compared: which points were converted, and what they lost.

The front of a model is in its results, which took it from the report of the conversion. Models of one search share a
front and differ in the chosen point. Beside the predicted loss stands what was measured: the KL divergence of the suite
`agreement`, which is what a search predicts, or else the rise of the loss, ln(ratio of perplexities).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surgery.eval.results.folders import StoredModel
from surgery.planning.recipe import FrontRecipe
from surgery.publish.front import cost_label, front_cells, loss_label

if TYPE_CHECKING:
    from surgery.eval.results.models import ModelRow

KL, RISE = "KL", "rise"  # columns of what was measured
QUANTITIES = {
    KL: "measured KL divergence from the original",
    RISE: "measured rise of the loss, ln(ratio of perplexities)",
}


@dataclass(frozen=True)
class SharedFront:
    """A front. chosen: number of the point of each model, from 1. measured: loss of each model in nats per token, as far
    as it was measured. quantity: what was measured, "" if nothing was. unhealed: models that were not trained, where
    the front predicts the loss after healing.
    """

    front: FrontRecipe
    chosen: dict[str, int]
    measured: dict[str, float] = field(default_factory=dict)
    quantity: str = ""
    unhealed: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The title of its table."""
        return f"front of surgery search: {loss_label(self.front)}, nats per token"

    @property
    def note(self) -> str:
        """A sentence on its columns."""
        measured = f"; {self.quantity}: {QUANTITIES[self.quantity]}, nats per token" if self.quantity else ""
        said = f"front of {', '.join(self.chosen)}: the points differ in {cost_label(self.front)}{measured}"
        return f"{said}. {self.remark}" if self.remark else said

    @property
    def remark(self) -> str:
        """A sentence on models that were not healed, "" if predictions and models are of the same kind."""
        verb = "were" if len(self.unhealed) > 1 else "was"
        return f"{', '.join(self.unhealed)} {verb} not healed, but losses are predicted after healing" * bool(
            self.unhealed
        )

    def heads(self) -> list[str]:
        """Return the column titles of its table."""
        return ["point", self.front.cost, "share", "loss", "95% interval", *filter(None, [self.quantity]), "model"]

    def lines(self) -> list[list[str]]:
        """Return the cells: a line for each point, one more for each further model of that point."""
        table = []
        for number, (cost, share, loss, interval) in enumerate(front_cells(self.front), 1):
            names = [name for name, chosen in self.chosen.items() if chosen == number]
            for place, name in enumerate(names or [""]):
                own = [str(number), cost, share, loss, interval] if place == 0 else [""] * 5
                value = [f"{self.measured[name]:.2g}" if name in self.measured else ""] if self.quantity else []
                table.append([*own, *value, f"{name} (not healed)" if name in self.unhealed else name])
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return its entry in comparison.json: a front without `chosen`, and its models."""
        front = self.front.model_dump(mode="json", exclude={"chosen"})
        return {"front": front, "chosen": self.chosen, "measured": self.measured, "quantity": self.quantity} | (
            {"remark": self.remark, "unhealed": list(self.unhealed)} if self.remark else {}
        )


def shared_fronts(models: Sequence[StoredModel], rows: Sequence[ModelRow]) -> list[SharedFront]:
    """Return the fronts that the models were chosen from, each with its models. rows: of the comparison."""
    by_front: dict[str, list[StoredModel]] = {}
    for model in models:
        if model.front is not None:
            by_front.setdefault(model.front.model_copy(update={"chosen": 1}).model_dump_json(), []).append(model)
    quantity, losses = _measured_losses(rows)
    found = []
    for same in by_front.values():
        chosen = {model.name: model.front.chosen for model in same if model.front is not None}
        measured = {name: losses[name] for name in chosen if name in losses}
        assert same[0].front is not None
        front = same[0].front
        unhealed = tuple(model.name for model in same if model.healed is False) if front.healing else ()
        found.append(SharedFront(front, chosen, measured, quantity if measured else "", unhealed))
    return found


def _measured_losses(rows: Sequence[ModelRow]) -> tuple[str, Mapping[str, float]]:
    """Return (what was measured, nats per token by model); ("", {}) without KL divergence and ratios of perplexities."""
    for row in rows:
        if row.suite == "agreement" and row.metric.name == "kl" and row.is_summary:
            return KL, {name: value for name, value in row.values.items() if math.isfinite(value)}
    for row in rows:
        if row.metric.kind == "ppl" and row.is_summary and row.ratios:
            return RISE, {name: math.log(r.change) for name, r in row.ratios.items() if 0 < r.change < math.inf}
    return "", {}
