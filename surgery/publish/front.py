"""The front that a recipe was chosen from, its key `front`, in words: for the report page, the model card and tables."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from surgery.core.config import validation_error
from surgery.core.errors import SurgeryError
from surgery.core.files import size_text
from surgery.core.tables import format_count, format_tokens
from surgery.planning.recipe import FrontRecipe

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
        return None if front is None else check_front(front)
    except SurgeryError:
        return None


def check_front(front: Any) -> FrontRecipe:
    """Return a front from a file. Raises SurgeryError if it breaks a rule."""
    try:
        return FrontRecipe.model_validate(front)
    except ValidationError as error:
        raise SurgeryError(validation_error(error, "front", FrontRecipe)) from None


def front_cells(front: FrontRecipe) -> list[tuple[str, str, str, str]]:
    """Return the points as (value of the cost, its share of the original, loss, interval)."""
    return [
        (
            format_cost(front.cost, point.value),
            f"{point.value / front.original:.0%}" if front.original else "",
            f"{point.loss:.2g}",
            f"{point.low:.2g} to {point.high:.2g}",
        )
        for point in front.points
    ]


def loss_label(front: FrontRecipe) -> str:
    """Return what the losses of a front are."""
    return "predicted loss after healing" if front.healing else "predicted loss of the conversion"


def cost_label(front: FrontRecipe) -> str:
    """Return what the points of a front differ in."""
    label = COST_LABELS[front.cost]
    return label if front.cost in ("parameters", "bytes") else f"{label}, {format_tokens(front.at)} tokens"


def describe_front(front: FrontRecipe, healed: bool) -> str:
    """Return a sentence on the chosen point of a front, and one more where the model is not what was predicted.

    healed: whether the model was trained after the conversion.
    """
    own = front.own
    limit, value = (
        AMOUNTS[front.cost].format(format_cost(front.cost, amount), format_tokens(front.at))
        for amount in (front.limit, own.value)
    )
    return (
        f"Point {front.chosen} of {len(front.points)} of a front by surgery search, asked for at most {limit}: {value}, "
        f"{loss_label(front)} {own.loss:.2g} nats per token ({own.low:.2g} to {own.high:.2g})."
        f"{' This model was not healed.' * (front.healing and not healed)}"
    )
