"""Section of the report page about the front that the recipe was chosen from."""

from __future__ import annotations

from html import escape

from surgery.publish.front import cost_label, describe_front, format_cost, loss_label, read_front
from surgery.publish.html.data import PageData
from surgery.publish.html.sections import figure_html, table_html
from surgery.publish.html.svg import Axis, Point, scatter_chart

SCALES = {"decode": 1e-6, "prefill": 1e-6}  # to the unit of the axis


def front_section(data: PageData) -> str:
    """Return the front with the chosen point, as a picture and a table; "" if the recipe is of no search."""
    front = read_front(data.report)
    if front is None:
        return ""
    scale = SCALES.get(front.cost, 1)
    names = [
        "this model" if number == front.chosen else f"point {number}" for number in range(1, len(front.points) + 1)
    ]
    points = [
        Point(name, "m0", scale * p.value, p.loss, None, (p.low, p.high), filled=name == "this model")
        for name, p in zip(names, front.points)
    ]
    x, y = Axis(cost_label(front)), Axis(f"{loss_label(front)}, nats per token")
    picture = scatter_chart(f"{loss_label(front)} against {cost_label(front)}", points, names, x, y, False)
    caption = (
        "Points of the front with their intervals, as surgery search predicted them. The filled one is this model."
    )
    rows = [
        (
            name,
            (format_cost(front.cost, p.value), p.value),
            (f"{p.value / front.original:.0%}" if front.original else "", p.value),
            (f"{p.loss:.2g}", p.loss),
            f"{p.low:.2g} to {p.high:.2g}",
        )
        for name, p in zip(names, front.points)
    ]
    heads = ("point", cost_label(front), "of the original", f"{loss_label(front)}, nats per token", "interval")
    return (
        "<h2 id=front>Chosen from a front</h2>"
        f"<p>{escape(describe_front(front))}</p>"
        f"{figure_html(picture, caption)}{table_html('The points of the front', heads, rows)}"
    )
