"""SVG charts. CSS classes set the colors, so that light and dark themes work.

Marks have titles for hovering, charts have descriptions for screen readers. All text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from surgery.core.tables import format_tokens

WIDTH, HEIGHT = 440, 270  # text stays at ten points on a phone
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 14, 46
MAX_POINTS, MAX_VISIBLE_DOTS = 300, 12  # per line: points that are drawn, and up to how many dots are visible
SCROLL_WIDTH = 480  # wider pictures scroll instead of shrinking
LETTER, LINE = 6.8, 14  # mean width of a letter, and height of a line of text


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    kind: CSS class: base, converted, healed, third, or m0 to m6 of many models; points: (x, y); band: (x, low, high) of
    an interval.
    """

    name: str
    kind: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Axis:
    """Label and scale of an axis. tokens: its values are lengths in tokens, which are written 512, 8K, 128K."""

    label: str
    log: bool = False
    tokens: bool = False

    @property
    def name(self) -> str:
        """The label without its unit: "accuracy" of "accuracy, %"."""
        return self.label.partition(", ")[0]

    @property
    def unit(self) -> str:
        """The unit in the label: "%" of "accuracy, %"; "" without one."""
        return self.label.partition(", ")[2]

    def format(self, value: float) -> str:
        """Format a value of the axis."""
        return format_tokens(value) if self.tokens and value else format_si(value)

    def ticks(self, low: float, high: float) -> list[float]:
        """Return about five values between `low` and `high`: round ones, or powers of two of tokens."""
        if not (self.tokens and self.log):
            return ticks(low, high, self.log)
        powers = range(math.ceil(math.log2(low) - 0.01), math.floor(math.log2(high) + 0.01) + 1)
        return [2.0**power for power in powers[:: max(1, -(-len(powers) // 6))]] or [low, high]


def format_si(value: float) -> str:
    """Format a number with three digits and an SI prefix: 1234567 -> 1.23M, 0.01234 -> 0.0123."""
    size = abs(value)
    for unit, unit_size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size >= unit_size:
            return f"{value / unit_size:.3g}{unit}"
    return f"{value:.3g}"


def ticks(low: float, high: float, log: bool) -> list[float]:
    """Return about five round values between `low` and `high`."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        every = max(1, round((last - first) / 5))
        powers = [10.0**power for power in range(first, last + 1, every)]
        return [tick for tick in powers if low / 1.001 <= tick <= high * 1.001] or [low, high]
    step = 10 ** math.floor(math.log10(max(high - low, 1e-12) / 5))
    step = next(step * k for k in (1, 2, 2.5, 5, 10) if (high - low) / (step * k) <= 6)
    start = math.ceil(low / step - 1e-9)
    return [k * step for k in range(start, math.floor(high / step + 1e-9) + 1)]


class AxisScale:
    """Maps values to coordinates between `start` and `end`."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float):
        low, high = min(values), max(values)
        if low == high:
            low, high = (low / 2, high * 2) if log else (low - abs(low or 1) / 2, high + abs(high or 1) / 2)
        self.low, self.high, self.log, self.start, self.end = low, high, log, start, end

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        at = ((math.log(value) if self.log else value) - low) / (high - low)
        return self.start + at * (self.end - self.start)


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Return a line chart; "" without points.

    Points that are not finite, or not positive on a log axis, are left out.
    """
    drawn = [
        Series(
            s.name,
            s.kind,
            _thin_out([p for p in s.points if _is_drawable(p, x, y)]),
            _thin_out([b for b in s.band if _is_drawable(b[:2], x, y) and _is_drawable(b[::2], x, y)]),
        )
        for s in series
    ]
    drawn = [s for s in drawn if s.points]
    if not drawn:
        return ""
    if said := _flat_or_identical(drawn, x, y):
        return f'<p class="chart">{escape(title)}</p><p class="flat">{escape(said)}</p>'
    xs, ys = zip(*(point for s in drawn for point in s.points))
    ys += tuple(end for s in drawn for band in s.band for end in band[1:])
    across = AxisScale(xs, x.log, LEFT, WIDTH - RIGHT)
    up = AxisScale(ys, y.log, HEIGHT - BOTTOM, TOP)
    marks = [_grid(across, up, x, y)]
    for s in drawn:
        edge = [*((a, low) for a, low, _ in s.band), *((a, high) for a, _, high in reversed(s.band))]
        if len(edge) > 2:
            corners = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in edge)
            marks.append(f'<polygon class="band {s.kind}" points="{corners}"/>')
    for s in sorted(
        drawn, key=lambda s: s.kind == "base"
    ):  # the dashed base line is drawn last, over lines that coincide with it
        places = [(across(a), up(b), a, b) for a, b in s.points]
        marks.append(
            f'<polyline class="line {s.kind}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b, _, _ in places)}"/>'
        )
        dot = "dot" if len(places) > MAX_VISIBLE_DOTS else "dot few"
        marks += [
            f'<circle class="{dot} {s.kind}" cx="{a:.1f}" cy="{b:.1f}" r="3"><title>{escape(s.name)}: {format_si(v)} '
            f"at {format_si(u)}</title></circle>"
            for a, b, u, v in places
        ]
    description = "; ".join(f"{s.name} from {format_si(s.points[0][1])} to {format_si(s.points[-1][1])}" for s in drawn)
    return _chart(title, f"{title}: {description}.", "".join(marks), WIDTH, HEIGHT) + _legend(drawn)


def _flat_or_identical(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Return a sentence that replaces a chart whose lines are all flat, or all the same; "" otherwise."""
    if all(_is_flat(s.points) for s in series):
        values = {s.name: y.format(s.points[0][1]) for s in series}
        if len(set(values.values())) == 1:
            names = " and ".join([", ".join([*values][:-1]), [*values][-1]]) if len(values) > 1 else next(iter(values))
            said = next(iter(values.values()))
            what = f"{names}:" if y.name in names else f"{names}: {y.name}"
            where = f" at every {x.name}" if _several(series) else ""
            return f"{what} {' '.join(filter(None, [said, y.unit]))}{where}"
        return (
            f"{y.label}: "
            + ", ".join(f"{name} {value}" for name, value in values.items())
            + f"; the same at every {x.name}"
        )
    first = series[0].points
    if len(series) > 1 and all(list(s.points) == list(first) for s in series):
        names = " and ".join([", ".join(s.name for s in series[:-1]), series[-1].name])
        return f"{names} are identical: {y.label} from {y.format(first[0][1])} to {y.format(first[-1][1])}"
    return ""


def _several(series: Sequence[Series]) -> bool:
    return any(len(s.points) > 1 for s in series)


def _is_flat(points: Sequence[tuple[float, float]]) -> bool:
    values = [value for _, value in points]
    return max(values) - min(values) <= 1e-6 * max(abs(v) for v in values)


def _is_drawable(point: tuple[float, float], x: Axis, y: Axis) -> bool:
    return all(math.isfinite(v) and (v > 0 or not axis.log) for v, axis in zip(point, (x, y)))


def _thin_out(points: list[Any]) -> list[Any]:
    every = -(-len(points) // MAX_POINTS) or 1
    return points[::every] + ([points[-1]] if points and (len(points) - 1) % every else [])


def _grid(across: AxisScale, up: AxisScale, x: Axis, y: Axis) -> str:
    parts = []
    for tick in y.ticks(up.low, up.high):
        at = up(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{at + 4:.1f}">{y.format(tick)}</text>')
    for tick in x.ticks(across.low, across.high):
        parts.append(
            f'<text class="tick mid" x="{across(tick):.1f}" y="{HEIGHT - BOTTOM + 18}">{x.format(tick)}</text>'
        )
    parts.append(f'<text class="tick mid" x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}">{escape(x.label)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="tick mid" transform="translate(14 {middle}) rotate(-90)">{escape(y.label)}</text>')
    return "".join(parts)


def _legend(series: Sequence[Series]) -> str:
    items = "".join(f'<li><span class="key {s.kind}"></span>{escape(s.name)}</li>' for s in series)
    return f'<ul class="legend">{items}</ul>'


@dataclass(frozen=True)
class Point:
    """A model in a scatter chart. x_range, y_range: 95% intervals, or None; filled: whether it is on the Pareto
    front.
    """

    name: str
    kind: str
    x: float
    y: float
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    filled: bool = True


def scatter_chart(
    title: str, points: Sequence[Point], front: Sequence[str], x: Axis, y: Axis, higher_is_better: bool
) -> str:
    """Return a chart of labeled points with intervals, and a step line through the points named by `front`; "" without
    points.

    higher_is_better: of y. The step line begins at the worst y of the chart and ends at its largest x.

    Points and ends of intervals that are not finite are left out.
    """
    drawn = [p for p in points if _is_drawable((p.x, p.y), x, y)]
    if not drawn:
        return ""
    xs = [v for p in drawn for v in (p.x, *(p.x_range or ())) if math.isfinite(v)]
    ys = [v for p in drawn for v in (p.y, *(p.y_range or ())) if math.isfinite(v)]
    across = AxisScale(xs, False, LEFT + 14, WIDTH - RIGHT - 90)  # room for a label at the right
    up = AxisScale(ys, False, HEIGHT - BOTTOM - 12, TOP + 16)
    marks = [_grid(across, up, x, y)]
    steps = [(across(p.x), up(p.y)) for name in front for p in drawn if p.name == name]
    path = [
        point for (a, b), last in zip(steps, [None, *steps]) for point in ([(a, last[1])] if last else []) + [(a, b)]
    ]
    if path:
        path = [(path[0][0], HEIGHT - BOTTOM if higher_is_better else TOP), *path, (WIDTH - RIGHT, path[-1][1])]
        marks.append(f'<polyline class="front" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in path)}"/>')
    ordered = sorted(drawn, key=lambda p: (p.x, p.y))
    places = _place_labels([(across(p.x), up(p.y), len(_short(p.name))) for p in ordered])
    for p, (text_x, text_y) in zip(ordered, places):
        if abs(text_y - up(p.y)) > 2 * LINE:  # a label far from its point
            end = text_x if text_x > across(p.x) else text_x + LETTER * len(_short(p.name))
            marks.append(
                f'<line class="grid" x1="{across(p.x):.1f}" y1="{up(p.y):.1f}" x2="{end:.1f}" y2="{text_y - 4:.1f}"/>'
            )
        a, b = across(p.x), up(p.y)
        for ends, at in ((p.x_range, lambda v, b=b: (across(v), b)), (p.y_range, lambda v, a=a: (a, up(v)))):
            if ends is not None and all(math.isfinite(v) for v in ends):
                (x1, y1), (x2, y2) = at(ends[0]), at(ends[1])
                marks.append(f'<line class="line {p.kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
        kind = f"point {p.kind}" + ("" if p.filled else " open")
        marks.append(
            f'<g><title>{escape(p.name)}: {format_si(p.y)} at {format_si(p.x)}</title><circle class="{kind}" '
            f'cx="{a:.1f}" '
            f'cy="{b:.1f}" r="5"/><text x="{text_x:.1f}" y="{text_y:.1f}">{escape(_short(p.name))}</text></g>'
        )
    text = "; ".join(f"{p.name}: {format_si(p.y)} at {format_si(p.x)}" for p in drawn)
    return _chart(title, f"{title}: {text}. On the Pareto front: {', '.join(front)}.", "".join(marks), WIDTH, HEIGHT)


def _short(name: str) -> str:
    return name if len(name) <= 20 else name[:19] + "…"


def _place_labels(points: Sequence[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """Return the start of the baseline of each point's label, so that labels cover neither each other nor other points.

    points: (x, y, letters). Labels stand at the right or left of their points, as near as there is room. Without any
    room the nearest place is taken.
    """
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y, _ in points]
    places = []
    for x, y, letters in points:
        width = LETTER * letters
        sides = [side for side in (x + 8, x - 8 - width) if LEFT <= side <= WIDTH - width]
        found = [(side, y + 4 + step * sign) for step in range(10, HEIGHT, 5) for sign in (-1, 1) for side in sides]
        found = [(a, b) for a, b in found if b - LINE + 4 >= TOP and b <= HEIGHT - BOTTOM - 2] or [(x + 8, y - 6)]
        boxes = [(a, b - LINE + 3, a + width, b + 3) for a, b in found]
        free = (place for place, box in zip(found, boxes) if not any(_overlap(box, other) for other in taken))
        a, b = next(free, found[0])
        taken.append((a, b - LINE + 3, a + width, b + 3))
        places.append((a, b))
    return places


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    """Return whether two boxes (left, top, right, bottom) overlap."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def heat_map(title: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]]) -> str:
    """Return a heat map of values in [0, 1], shown in percent. None: not measured."""
    wide, high, left, top = 56, 28, 74, 30
    parts = [
        f'<text class="tick mid" x="{left + wide * (j + 0.5)}" y="{top - 9}">{escape(c)}</text>'
        for j, c in enumerate(columns)
    ]
    for i, (name, row) in enumerate(zip(rows, values)):
        y = top + i * high
        parts.append(f'<text class="tick end" x="{left - 8}" y="{y + 18}">{escape(name)}</text>')
        for j, value in enumerate(row):
            x, label = left + j * wide, "-" if value is None else f"{100 * value:.0f}"
            strength = 0.0 if value is None else 0.06 + 0.54 * max(0.0, min(1.0, value))
            parts.append(
                f'<g><title>{escape(name)}, {escape(columns[j])}: {label} %</title><rect class="cell" x="{x + 1}" '
                f'y="{y + 1}" '
                f'width="{wide - 2}" height="{high - 2}" rx="3" fill-opacity="{strength:.2f}"/>'
                f'<text class="tick mid" x="{x + wide / 2}" y="{y + 18}">{label}</text></g>'
            )
    known = [v for row in values for v in row if v is not None]
    description = (
        f"{title}: from {100 * min(known):.0f} to {100 * max(known):.0f} percent."
        if known
        else f"{title}: not measured."
    )
    return _chart(title, description, "".join(parts), left + wide * len(columns) + 6, top + high * len(rows) + 6)


@dataclass(frozen=True)
class MatrixBox:
    """A matrix in the layer diagram. fraction: filled share in [0, 1]; kind: CSS class of its error (e0 to e4) or
    structure; title: text shown when hovering.
    """

    fraction: float
    kind: str
    title: str


def layer_diagram(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, tuple[str, str], Sequence[MatrixBox | None]]]
) -> str:
    """Return the diagram of a model. rows: (name, name and description of token mixing, matrices) of each layer."""
    longest = max((len(mixing) for _, (mixing, _), _ in rows), default=0)
    wide, high, left, top = 92, 24, 52, 26
    mixer = min(max(120, round(LETTER * longest) + 36), 270)
    parts = [f'<text class="tick mid" x="{left + mixer / 2}" y="{top - 9}">token mixing</text>']
    parts += [
        f'<text class="tick mid" x="{left + mixer + wide * (j + 0.5)}" y="{top - 9}">{escape(c)}</text>'
        for j, c in enumerate(columns)
    ]
    for i, (name, (mixing, description), cells) in enumerate(rows):
        y = top + i * high
        parts.append(f'<text class="tick end" x="{left - 8}" y="{y + 16}">{escape(name)}</text>')
        if mixing:
            kind = "softmax" if mixing == "softmax" else "replaced"
            most = int((mixer - 36) / LETTER)
            label = mixing if len(mixing) <= most else mixing[: most - 1] + "…"
            parts.append(
                f'<g><title>layer {escape(name)}: {escape(description)}</title><rect class="{kind}" x="{left + 2}" '
                f'y="{y + 3}" width="{mixer - 6}" height="{high - 6}" rx="4"/><text class="tick mid" '
                f'x="{left + mixer / 2 - 1}" y="{y + 16}">{escape(label)}</text></g>'
            )
        for j, cell in enumerate(cells):
            if cell is None:
                continue
            x = left + mixer + j * wide
            share = max(0.0, min(1.0, cell.fraction))
            parts.append(
                f'<g><title>{escape(cell.title)}</title><rect class="original" x="{x + 2}" y="{y + 3}" '
                f'width="{wide - 6}" height="{high - 6}" rx="3"/>'
                f'<rect class="kept {cell.kind}" x="{x + 2}" y="{y + 3}" width="{(wide - 6) * share:.1f}" '
                f'height="{high - 6}" rx="3"/></g>'
            )
    width, height = left + mixer + wide * len(columns) + 6, top + high * len(rows) + 6
    return _chart(
        title,
        f"{title}: {len(rows)} layers; the table of matrices below has the same data as text.",
        "".join(parts),
        width,
        height,
    )


def _chart(title: str, description: str, inside: str, width: float, height: float) -> str:
    least = f"min-width:{width * 0.75:.0f}px;" if width > SCROLL_WIDTH else ""
    drawn = (
        f'<svg role="img" viewBox="0 0 {width:g} {height:g}" style="{least}max-width:{width * 1.4:.0f}px" '
        f'aria-label="{escape(description)}">'
        f"<title>{escape(title)}</title>{inside}</svg>"
    )
    heading = f'<p class="chart">{escape(title)}</p>'
    if not least:
        return heading + drawn
    # tabindex makes it scrollable by keyboard
    return f'{heading}<div class="wide" tabindex="0" role="group" aria-label="{escape(title)}">{drawn}</div>'
