"""Figures of comparisons: curves with error bands, heat maps side by side, and quality against cost.

A model has one color, line and marker in all figures, those of the report page (surgery/publish/html/page.css). They
can be told apart in gray and with color blindness. Sizes are chosen so that text is legible when a figure is as wide as
a phone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.core.tables import format_tokens
from surgery.eval.results.compare import collect_units, shared_metrics
from surgery.eval.results.pareto import CostPoint, ParetoChart
from surgery.eval.results.statistics import Z_95, estimate, wilson_interval
from surgery.eval.suite import EvalMetric, Sample, SuiteResult

MAX_TASKS = 4  # a suite with more tasks gets one figure for all
MAX_TICKS = 8
HEAT_MAPS_PER_ROW = 2
MARKER_POINTS = 8
MANY_POINTS, MARKERS_PER_CURVE = 20, 8
LABEL_OFFSETS = tuple((x, y) for y in (8, -16, 24, -32, 40, -48) for x in (8, -8))  # points from a point to its label
FONT_POINTS, DPI = 13, 150
BASE_COLOR, BASE_LINE, BASE_MARKER = "#6b7280", "--", "*"
FRONT_COLOR = "#1c2330"
COLORS = ("#0f766e", "#c2570c", "#6d28d9", "#0072b2", "#b8860b", "#be185d", "#1c2330")
LINES, MARKERS = ("-", "-.", ":"), ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Curve:
    """A curve: points, and the ends of their 95% intervals or of another band, or empty."""

    xs: Sequence[float]
    ys: Sequence[float]
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    """A measure of several models over lengths: title, and curve by model."""

    title: str
    curves: Mapping[str, Curve]


@dataclass(frozen=True)
class Style:
    """How a model is drawn, in every figure."""

    color: str
    line: str
    marker: str


def model_styles(names: Sequence[str], base: str | None) -> dict[str, Style]:
    """Return the style of every model. The base is gray and dashed; the others take COLORS in order."""
    others = [name for name in names if name != base]
    styles = {
        name: Style(COLORS[i % len(COLORS)], LINES[i // len(COLORS) % len(LINES)], MARKERS[i % len(MARKERS)])
        for i, name in enumerate(others)
    }
    return styles | ({base: Style(BASE_COLOR, BASE_LINE, BASE_MARKER)} if base is not None else {})


def _figure(rows: int = 1, columns: int = 1, width: float = 7.0, height: float = 4.3) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _set_font_sizes(figure: Any) -> None:
    for axes in figure.axes:
        axes.title.set_fontsize(FONT_POINTS)
        for text in (axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()):
            text.set_fontsize(FONT_POINTS - 1)


def _save_figure(figure: Any, path: Path) -> Path:
    _set_font_sizes(figure)
    new = path.with_name(f".{path.name}")
    figure.savefig(new, dpi=DPI, format="png")
    new.replace(path)
    return path


def _legend(axes: Any, count: int) -> None:
    axes.legend(fontsize=FONT_POINTS - 2, ncols=1 if count <= 4 else 2, framealpha=0.8)


def _thin(values: Sequence[float]) -> list[float]:
    """Return at most MAX_TICKS of the values, the last included."""
    every = -(-len(values) // MAX_TICKS)
    return list(values)[::-1][::every][::-1]


def _token_ticks(axes: Any, xs: Sequence[float], log: bool) -> None:
    """Label the axis with token counts as people write them: at the measured lengths, or at multiples of a power of
    two.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        chosen = _thin(sorted(set(xs)))
    else:
        step = 2 ** max(0, round(math.log2(max(max(xs), 1) / 6)))
        chosen = [step * i for i in range(int(max(xs) // step) + 1)]
    axes.set_xticks(chosen)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "0" if x == 0 else format_tokens(x)))


def plot_lines(
    path: Path,
    series: Mapping[str, Curve],
    x: str,
    y: str,
    title: str,
    *,
    log: bool = False,
    base: str | None = "base",
) -> Path:
    """Draw one curve per model, with its 95% band, over a number of tokens; return the path. base: which model is the
    base.
    """
    figure, (axes,) = _figure()
    _draw_curves(axes, series, model_styles(list(series), base if base in series else None))
    _token_ticks(axes, [x for curve in series.values() for x in curve.xs], log)
    axes.set(xlabel=x, ylabel=_plain(y), title=_plain(title))
    axes.grid(alpha=0.3)
    _legend(axes, len(series))
    return _save_figure(figure, path)


def plot_panels(
    path: Path, panels: Sequence[Panel], names: Sequence[str], x: str, title: str, *, base: str | None
) -> Path:
    """Draw a panel for each measure, one below the other, both axes logarithmic; return the path. names: of all models,
    for their colors."""
    figure, every = _figure(len(panels), height=1.0 + 2.9 * len(panels))
    styles = model_styles(names, base if base in names else None)
    for axes, panel in zip(every, panels):
        _draw_curves(axes, panel.curves, styles)
        _token_ticks(axes, [x for curve in panel.curves.values() for x in curve.xs], True)
        _number_ticks(axes)
        axes.set(title=_plain(panel.title))
        axes.grid(alpha=0.3)
    every[-1].set_xlabel(x)
    handles, labels = every[0].get_legend_handles_labels()
    small = FONT_POINTS - 2
    figure.legend(
        handles, labels, loc="outside upper center", ncols=2, fontsize=small, title=_plain(title), title_fontsize=small
    )
    return _save_figure(figure, path)


def _draw_curves(axes: Any, series: Mapping[str, Curve], styles: Mapping[str, Style]) -> None:
    """Draw one curve for each model, with its band.

    A curve of many points has MARKERS_PER_CURVE markers, which tell it apart in gray.
    """
    for index, (name, curve) in enumerate(series.items()):
        style, every = styles[name], len(curve.xs) // MARKERS_PER_CURVE
        axes.plot(
            curve.xs,
            curve.ys,
            style.line,
            color=style.color,
            label=_plain(name),
            marker=style.marker,
            markevery=None if len(curve.xs) < MANY_POINTS else (index * every // len(series), every),
            zorder=3 if style.line == BASE_LINE else 2,  # dashes show the line below them
        )
        if len(curve.lows):
            axes.fill_between(curve.xs, curve.lows, curve.highs, color=style.color, alpha=0.18, linewidth=0)


def _number_ticks(axes: Any) -> None:
    """Make the vertical axis logarithmic, with ticks at 1, 2 and 5 times powers of ten, as people write them: 500, 2k,
    10M.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 4 * low:  # at least one tick of 1, 2 and 5 on either side
        middle = math.sqrt(low * high)
        axes.set_ylim(middle / 2, middle * 2)
    wide = axes.get_ylim()[1] > 100 * axes.get_ylim()[0]
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _format_cost(y)))


def plot_heat_maps(
    path: Path,
    tables: Mapping[str, Mapping[tuple[float, float], float]],
    x: str,
    y: str,
    title: str,
    longest: int | None = None,
) -> Path:
    """Draw one heat map per model, two in a row, with a common scale of 0 to 100 percent; return the path.

    tables[model][x, y] is a share in [0, 1]; x is a number of tokens, y a depth in [0, 1]. Lengths beyond `longest` are
    marked with *.
    """
    columns = min(HEAT_MAPS_PER_ROW, len(tables))
    rows = -(-len(tables) // columns)
    depths = max(len({key[1] for key in table}) for table in tables.values())
    figure, every = _figure(rows, columns, 4.0 * columns, rows * max(2.6, 1.4 + 0.36 * depths))
    image = None
    for index, (axes, (name, table)) in enumerate(zip(every, tables.items())):
        xs, ys = (sorted({key[i] for key in table}) for i in (0, 1))
        grid = [[100 * table.get((a, b), float("nan")) for a in xs] for b in ys]
        image = axes.imshow(grid, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        shown = _thin(xs)
        marks = [format_tokens(a) + ("*" if longest and a > longest else "") for a in shown]
        axes.set_xticks([xs.index(a) for a in shown], marks, rotation=45 if len(shown) > 6 else 0)
        axes.set_yticks(range(len(ys)), [f"{100 * b:.3g}%" for b in ys])
        axes.set(xlabel=x, title=_plain(name))
        if index % columns == 0:
            axes.set_ylabel(y)
        else:
            axes.tick_params(labelleft=False)
        size = min(FONT_POINTS - 1, 110 / max(1, len(xs)) / (1.0 if len(xs) < 8 else 1.2))
        for i, row in enumerate(grid):
            for j, value in enumerate(row):
                if math.isfinite(value):
                    color = "black" if value > 60 else "white"
                    axes.text(j, i, f"{value:.0f}", ha="center", va="center", color=color, fontsize=size)
    for axes in every[len(tables) :]:
        axes.set_visible(False)
    figure.colorbar(image, ax=every, format="%.0f%%", ticks=range(0, 101, 25))
    beyond = f"\n(*: beyond the model's longest input, {longest:,} tokens)" if longest else ""
    figure.suptitle(_plain(title) + beyond, fontsize=FONT_POINTS)
    return _save_figure(figure, path)


def plot_pareto(path: Path, chart: ParetoChart, names: Sequence[str], base: str | None) -> Path:
    """Draw quality against cost: labeled points with 95% intervals, and the Pareto front. names: of all models, for
    their colors.
    """
    figure, (axes,) = _figure(width=7.0, height=4.8)
    styles = model_styles(names, base)
    ordered = sorted(chart.points, key=lambda name: (chart.points[name].cost, chart.points[name].quality))
    labels = []
    for name in ordered:
        point, style = chart.points[name], styles[name]
        bars = {
            "xerr": _bar(point.cost, point.cost_interval),
            "yerr": _bar(point.quality, point.quality_interval),
        }
        axes.errorbar(
            point.cost, point.quality, fmt=style.marker, color=style.color, capsize=3, markersize=MARKER_POINTS,
            markerfacecolor=style.color if name in chart.front else "white", **bars,
        )  # fmt: skip
        where = (point.cost, point.quality)
        labels.append(
            axes.annotate(_plain(name), where, LABEL_OFFSETS[0], textcoords="offset points", fontsize=FONT_POINTS - 2)
        )
    front = [chart.points[name] for name in chart.front]
    axes.plot(
        [p.cost for p in front], [p.quality for p in front], drawstyle="steps-post", color=FRONT_COLOR, linewidth=1,
        linestyle="--", zorder=0, label="Pareto front",
    )  # fmt: skip
    costs = [p.cost for p in chart.points.values() if p.cost > 0]
    if len(costs) == len(chart.points) and max(costs) > 8 * min(costs):
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: _format_cost(x))
    axes.margins(x=0.22, y=0.15)
    _extend_front(axes, front, chart.higher_is_better)
    better = "higher is better" if chart.higher_is_better else "lower is better"
    axes.set(xlabel=_plain(chart.cost), ylabel=_plain(f"{chart.quality}\n({better})"))
    axes.grid(alpha=0.3)
    _legend(axes, 1)
    _set_font_sizes(figure)
    _separate_labels(figure, labels, [axes.get_legend()], [label.xy for label in labels])
    return _save_figure(figure, path)


def _extend_front(axes: Any, front: Sequence[CostPoint], higher_is_better: bool) -> None:
    """Draw the front from its ends to the borders: no measured model costs less than its first point or is better than
    its last.
    """
    if not front:
        return
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    first, last = front[0], front[-1]
    worst = bottom if higher_is_better else top
    style = {"color": FRONT_COLOR, "linewidth": 1, "linestyle": "--", "zorder": 0, "label": "_"}
    axes.plot([first.cost, first.cost], [first.quality, worst], **style)
    axes.plot([last.cost, right], [last.quality, last.quality], **style)
    axes.set(xlim=(left, right), ylim=(bottom, top))


def _separate_labels(figure: Any, labels: Sequence[Any], fixed: Sequence[Any], points: Sequence[Any]) -> None:
    """Move each label to the first place around its point where it covers no earlier label, no point and nothing that
    is fixed.

    Without such a place, it takes the one where it covers least. points: (x, y) in the units of the axes.
    """
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    inside = figure.axes[0].get_window_extent()
    taken = [item.get_window_extent().padded(2) for item in fixed]
    half = MARKER_POINTS / 2 * figure.dpi / 72
    for x, y in figure.axes[0].transData.transform(points):
        taken.append(Bbox.from_extents(x - half, y - half, x + half, y + half))
    for label in labels:
        options: list[tuple[float, int, tuple[int, int], Any]] = []
        for x, y in LABEL_OFFSETS:
            label.set_horizontalalignment("left" if x > 0 else "right")
            label.xyann = (x, y)
            box = label.get_window_extent()
            overlaps = (box.intersection(box, other) for other in taken)
            covered = sum(common.width * common.height for common in overlaps if common is not None)
            outside = box.x1 > inside.x1 or box.x0 < inside.x0 or box.y1 > inside.y1 or box.y0 < inside.y0
            options.append((covered + (box.width * box.height if outside else 0), len(options), (x, y), box))
            if not options[-1][0]:
                break
        _, _, best, box = min(options, key=lambda item: item[:2])
        label.set_horizontalalignment("left" if best[0] > 0 else "right")
        label.xyann = best
        taken.append(box)


def _bar(value: float, interval: tuple[float, float] | None) -> list[list[float]] | None:
    return None if interval is None else [[max(0.0, value - interval[0])], [max(0.0, interval[1] - value)]]


def _format_cost(value: float) -> str:
    """Format with three digits and a unit: 1234567 -> 1.23M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _plain(text: str) -> str:
    """Return text that matplotlib draws as it is: a pair of dollar signs would be a formula, and a leading _ hides a
    label.
    """
    return text.replace("$", r"\$") if not text.startswith("_") else "\u200b" + text.replace("$", r"\$")


def plot_by_group(
    suite: str, results: Mapping[str, SuiteResult], folder: Path, base: str | None = "base"
) -> list[Path]:
    """Draw per task heat maps (length x depth) and curves by length, where samples have these groups; return the
    paths.
    """
    first = next(iter(results.values()))
    longest = first.info.get("longest")
    longest = longest if isinstance(longest, int) else None
    tasks: list[str | None] = list(dict.fromkeys(s.task for s in first.samples))
    metrics = [m for i, m in enumerate(shared_metrics(results.values()).values()) if i == 0 or not m.pooled]
    written = []
    for task in tasks if len(tasks) <= MAX_TASKS else [None]:
        for metric in metrics:
            name = (task or suite) + (f"-{metric.name}" if len(metrics) > 1 else "")
            file = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lstrip(".")[:100]
            cells = {role: _cell_values(r, task, metric, ("length", "depth")) for role, r in results.items()}
            if all(cells.values()) and (metric.kind == "accuracy" or metric.top == 1):
                shares = {role: {k: v[0] / metric.scale for k, v in table.items()} for role, table in cells.items()}
                beyond = longest if any(x > (longest or x) for table in cells.values() for x, _ in table) else None
                title = f"{name}, {metric.label}, percent"
                written.append(plot_heat_maps(folder / f"{file}.png", shares, "length, tokens", "depth", title, beyond))
            curves = {role: _cell_values(r, task, metric, ("length",)) for role, r in results.items()}
            if all(len(curve) > 1 for curve in curves.values()):
                series = {role: _curve(cells) for role, cells in curves.items()}
                label = metric.label + (f", {metric.unit}" if metric.unit else "")
                written.append(
                    plot_lines(
                        folder / f"{file}-length.png", series, "length, tokens", label, name, log=True, base=base
                    )
                )
    return written


def _curve(cells: Mapping[tuple[float, ...], tuple[float, float, float]]) -> Curve:
    keys = sorted(cells)
    ys, lows, highs = zip(*(cells[k] for k in keys))
    return Curve([k[0] for k in keys], ys, lows, highs)


def _cell_values(
    result: SuiteResult, task: str | None, metric: EvalMetric, names: tuple[str, ...]
) -> dict[Any, tuple[float, float, float]]:
    """Return (value, low, high) by cell, scaled for display: Wilson's interval of accuracies, else 1.96 standard
    errors.
    """
    cells: dict[Any, list[Sample]] = defaultdict(list)
    for sample in result.samples:
        if task in (None, sample.task) and all(n in sample.group for n in names) and metric.name in sample.metrics:
            cells[tuple(sample.group[name] for name in names)].append(sample)
    return {key: _interval(held, metric) for key, held in cells.items()}


def _interval(samples: list[Sample], metric: EvalMetric) -> tuple[float, float, float]:
    units, scale = collect_units(samples, metric.name), metric.scale
    if metric.kind == "accuracy":
        low, high = wilson_interval(units)
        return scale * units.value, scale * low, scale * high
    value, error = estimate(units, metric.top, "exp" if metric.kind == "ppl" else "mean")
    half = Z_95 * (error or 0.0)
    return scale * value, scale * (value - half), scale * (value + half)
