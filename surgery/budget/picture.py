"""SEARCH/front.png: predicted loss against the cost of the first limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgery.budget.limits import MEASURES
from surgery.budget.summary import point_name
from surgery.core.files import atomic_path
from surgery.publish.front import format_cost

COLOR, BASE_COLOR, LIMIT_COLOR = "#0072b2", "#666666", "#d55e00"


def draw_front(result: dict[str, Any], path: Path) -> None:
    """Draw the front of a search to a PNG file. result: what front.json holds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    swept = next(iter(result["limits"]))
    points = sorted(result["points"], key=lambda point: float(point["costs"][swept]))
    asked = result["points"][0]
    xs, ys = [point["costs"][swept] for point in points], [point["loss"] for point in points]
    figure = Figure(figsize=(7.0, 4.3), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(xs, ys, "o-", color=COLOR, ms=4, lw=1)
    if any(point["measured"] is not None for point in points):
        whole = [(x, point["measured"]) for x, point in zip(xs, points) if point["measured"] is not None]
        axes.plot(*zip(*whole), "s", color=BASE_COLOR, ms=4, mfc="none", label="before healing, measured")
        sums = [point["damage"] for point in points]
        axes.plot(xs, sums, ":", color=BASE_COLOR, lw=1, label="before healing, sum of choices")
    axes.fill_between(xs, [p["low"] for p in points], [p["high"] for p in points], color=COLOR, alpha=0.18, linewidth=0)
    axes.plot([asked["costs"][swept]], [asked["loss"]], "D", color=LIMIT_COLOR, ms=8, label=point_name(asked))
    axes.axvline(result["limits"][swept], color=BASE_COLOR, lw=0.8, ls="--", label=MEASURES[swept].option)
    for point in points:
        number = point_name(point).removeprefix("recipe-").removeprefix("bits-").removesuffix(".yaml")
        place = point["costs"][swept], point["loss"]
        axes.annotate(number, place, xytext=(3, 5), textcoords="offset points", fontsize=8)
    axes.set_yscale("symlog", linthresh=max(1e-6, max(ys) / 100))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_cost(swept, x)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.3g}"))
    axes.set(
        xlabel=MEASURES[swept].label,
        ylabel="predicted loss, nats per token",
        title="front, with the numbers of recipes",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    with atomic_path(path) as partial:
        FigureCanvasAgg(figure).print_png(str(partial))
