"""Section of the report page about the front that the recipe was chosen from."""

from __future__ import annotations

from collections.abc import Container, Sequence
from html import escape

from surgery.planning.recipe import FrontRecipe
from surgery.publish.front import cost_label, describe_front, front_cells, loss_label, read_front
from surgery.publish.html.data import PageData
from surgery.publish.html.sections import figure_html, table_html
from surgery.publish.html.svg import Axis, Point, scatter_chart

SCALES = {"decode": 1e-6, "prefill": 1e-6}  # to the unit of the axis


def front_figure(front: FrontRecipe, names: Sequence[str], own: Container[str], caption: str) -> str:
    """Return the picture of a front. names: of its points. own: those that are filled."""
    scale = SCALES.get(front.cost, 1)
    points = [
        Point(name, "m0", scale * p.value, p.loss, None, (p.low, p.high), filled=name in own)
        for name, p in zip(names, front.points)
    ]
    x, y = Axis(cost_label(front)), Axis(f"{loss_label(front)}, nats per token")
    return figure_html(
        scatter_chart(f"{loss_label(front)} against {cost_label(front)}", points, names, x, y, False), escape(caption)
    )


def front_section(data: PageData) -> str:
    """Return the front with the chosen point, as a picture and a table; "" if the recipe is of no search."""
    front = read_front(data.report)
    if front is None:
        return ""
    names = [
        "this model" if number == front.chosen else f"point {number}" for number in range(1, len(front.points) + 1)
    ]
    caption = (
        "Points of the front with their intervals, as surgery search predicted them. The filled one is this model."
    )
    rows = [
        (name, (cost, p.value), (share, p.value), (loss, p.loss), interval)
        for name, p, (cost, share, loss, interval) in zip(names, front.points, front_cells(front))
    ]
    heads = ("point", cost_label(front), "of the original", f"{loss_label(front)}, nats per token", "interval")
    return (
        "<h2 id=front>Chosen from a front</h2>"
        f"<p>{escape(describe_front(front, bool(data.report.get('training'))))}</p>"
        f"{front_figure(front, names, ('this model',), caption)}{table_html('The points of the front', heads, rows)}"
    )
