"""The key `front` of a conversion recipe: the front of `surgery search` that the recipe is a point of.

front: {cost: bytes, limit: 4724352, original: 7873920, at: 4096, healing: true, chosen: 1,
  points: [{value: 1034000, loss: 3.4, low: 3.1, high: 4.5}, {value: 4720000, loss: 0.014, low: 0.004, high: 0.06}]}

It changes nothing about the conversion. The report keeps it with the recipe, and page and model card show it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from surgery.core.errors import SurgeryError
from surgery.core.files import size_text
from surgery.core.tables import format_count, format_tokens

COST_LABELS = {
    "parameters": "parameters",
    "bytes": "bytes",
    "cache": "cache bytes",
    "decode": "ms of a decoding step",
    "prefill": "ms of the prompt",
}
AMOUNTS = {
    "parameters": "{} parameters",
    "bytes": "{} of tensors",
    "cache": "{} of cache at {} tokens",
    "decode": "{} ms of a decoding step after {} tokens",
    "prefill": "{} ms of a prompt of {} tokens",
}
Cost = Literal["parameters", "bytes", "cache", "decode", "prefill"]
Value = Annotated[int, Field(ge=0, lt=2**62, strict=True)]
Nats = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]


class FrontPoint(BaseModel):
    """A point of a front. value: of the cost. loss, low, high: predicted loss and its interval, nats per token."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: Value
    loss: Nats
    low: Nats
    high: Nats


class FrontRecipe(BaseModel):
    """A front. cost: what the points differ in; times in nanoseconds. limit: of the cost. original: its value in the
    unconverted model. at: tokens of the sequence whose cache and times count. healing: whether losses are those after
    healing. chosen: the number of the recipe's own point, from 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cost: Cost
    limit: Value
    original: Value
    at: Annotated[int, Field(ge=1, lt=2**62, strict=True)]
    healing: StrictBool
    chosen: Annotated[int, Field(ge=1, strict=True)]
    points: Annotated[tuple[FrontPoint, ...], Field(min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _check_points(self) -> FrontRecipe:
        if self.chosen > len(self.points):
            raise SurgeryError(
                f"front: chosen must be the number of one of the {len(self.points)} points (got {self.chosen})"
            )
        if wrong := [point for point in self.points if not point.low <= point.loss <= point.high]:
            raise SurgeryError(f"front: loss must lie between low and high (got {wrong[0]})")
        return self

    @property
    def own(self) -> FrontPoint:
        """The point of the recipe."""
        return self.points[self.chosen - 1]

    @property
    def loss_label(self) -> str:
        """What the losses are."""
        return "predicted loss after healing" if self.healing else "predicted loss of the conversion"

    @property
    def cost_label(self) -> str:
        """What the points differ in."""
        label = COST_LABELS[self.cost]
        return label if self.cost in ("parameters", "bytes") else f"{label}, {format_tokens(self.at)} tokens"

    def describe(self) -> str:
        """Return a sentence on the chosen point."""
        own = self.own
        limit, value = (
            AMOUNTS[self.cost].format(format_cost(self.cost, amount), format_tokens(self.at))
            for amount in (self.limit, own.value)
        )
        return (
            f"Point {self.chosen} of {len(self.points)} of a front by surgery search, asked for at most {limit}: {value}, "
            f"{self.loss_label} {own.loss:.2g} nats per token ({own.low:.2g} to {own.high:.2g})."
        )


def format_cost(name: str, value: float) -> str:
    """Format a value of a cost: bytes, a count, or nanoseconds in ms."""
    if name in ("decode", "prefill"):
        return f"{value / 1e6:.3g}"
    return format_count(round(value)) if name == "parameters" else size_text(value)


def read_front(report: dict[str, Any]) -> FrontRecipe | None:
    """Return the front in the recipe of a conversion's report; None without one, and for one that is damaged."""
    recipe = report.get("recipe")
    front = recipe.get("front") if isinstance(recipe, dict) else None
    try:
        return None if front is None else FrontRecipe.model_validate(front)
    except (ValidationError, SurgeryError):
        return None
