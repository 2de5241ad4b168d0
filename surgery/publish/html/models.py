"""Section of the report page about many models: the comparison that `surgery compare --out` wrote."""

from __future__ import annotations

from html import escape
from typing import Any

from surgery.core.tables import format_number, format_tokens
from surgery.publish.figures import size_rows
from surgery.publish.front import check_front, cost_label, front_cells, loss_label
from surgery.publish.html.data import PageData
from surgery.publish.html.front import front_figure
from surgery.publish.html.sections import NOTHING_FOUND, average_cell, figure_html, row_band, table_html
from surgery.publish.html.svg import Axis, Point, Series, heat_map, line_chart, scatter_chart
from surgery.publish.ratios import Ratio

LEGEND = (
    "In parentheses: difference from the base; for perplexities x, the ratio to the base, and its 95% interval. * if "
    "its 95% interval excludes no change."
)
COLORS = 7  # CSS classes m0 to m6, in the order of the plots
MAX_LINES = 400  # lines of the table
WIDEST = 3  # models that a table shows side by side on a small screen


def models_section(data: PageData) -> str:
    """Return the table of all models, quality against costs, needle maps and curves; "" without a comparison."""
    comparison = data.measured.comparison
    if comparison is None:
        return ""
    names, base = [str(model["name"]) for model in comparison["models"]], comparison["base"]
    kinds = model_classes(names, base)
    own_name = data.measured.own
    which = (
        "None of these models is known to be this checkpoint."
        if own_name is None
        else f"{own_name} is this checkpoint."
    )
    parts = [
        "<h2 id=models>Many models</h2>",
        f'<p class="note">{escape(which)}</p>',
        _table(comparison, names, base, own_name),
    ]
    remarks = [
        LEGEND,
        *(f"Refused: {text}" for text in comparison["refused"]),
        *_flags(comparison["rows"]),
        *comparison["notes"],
    ]
    parts.append("<ul>" + "".join(f"<li>{escape(str(text))}</li>" for text in remarks) + "</ul>")
    parts += [_front(shared) for shared in comparison.get("fronts", [])]  # none in files of older versions
    parts.append(f'<div class="pair">{"".join(_pareto(chart, kinds) for chart in comparison["charts"])}</div>')
    parts += [_needle_maps(comparison["rows"], names), _curves(comparison["rows"], kinds)]
    return "".join(parts)


def model_classes(names: list[str], base: str | None) -> dict[str, str]:
    """Return the CSS class of each model, which sets its color in all charts: "base", or m0 to m6 in order."""
    others = [name for name in names if name != base]
    return {name: f"m{i % COLORS}" for i, name in enumerate(others)} | ({} if base is None else {base: "base"})


def _table(comparison: dict[str, Any], names: list[str], base: str | None, own_name: str | None) -> str:
    body: list[list[Any]] = []
    for title, cells in size_rows(comparison["models"], base).items():
        body.append([title, "", *((text or "-", size) for text, size in cells)])
    for row in comparison["rows"]:
        if not _is_summary(row):
            continue
        where = "".join(f", {name} {value}" for name, value in row["group"].items())
        label = f"{row['task']}{where}, {row['metric']['title'] or row['metric']['name']}"
        body.append([label, str(row["samples"]), *(_cell(row, name) for name in names)])
    for row in comparison["averages"]:
        where = "" if row["length"] is None else f", {format_tokens(row['length'])} tokens"
        missing = f" (without {', '.join(map(str, row['missing']))})" if row["missing"] else ""
        cells = [average_cell(row, name, row["unit"] == "tokens") for name in names]
        body.append([f"{row['suite']}, {row['name']}{where}{missing}", str(row["samples"] or ""), *cells])
    known = {own_name: " (this one)", base: " (base)"}
    heads = ["measurement", "samples", *(name + known.get(name, "") for name in names)]
    caption = "All models: value, and its 95% interval or standard error (±)"
    if len(body) > MAX_LINES:
        caption += f"; the first {MAX_LINES} of {len(body):,} lines, all of them are in comparison.json"
    return table_html(caption, heads, body[:MAX_LINES], stacked=len(names) > WIDEST)


def _cell(row: dict[str, Any], name: str) -> Any:
    value = row["values"].get(name)
    if value is None:
        return "-"
    text = format_number(value, row["errors"].get(name), row["intervals"].get(name))
    ratio, change = row["ratios"].get(name), row["differences"].get(name)
    if row["metric"]["kind"] == "ppl" and ratio is not None:
        text += f", {Ratio(ratio['change'], ratio.get('low'), ratio.get('high'))}{_star(ratio, 1.0)}"
    elif change is not None:
        text += f" ({change['change']:+.4g}{_star(change, 0.0)})"
    return (text, value)


def _star(change: dict[str, Any], none: float) -> str:
    """Return * if the interval of a change excludes `none`, which means no change."""
    low, high = change.get("low"), change.get("high")
    return "*" if low is not None and high is not None and not low <= none <= high else ""


def _is_summary(row: dict[str, Any]) -> bool:
    return bool(row["group"]) != bool(row["metric"]["pooled"]) and len(row["group"]) <= 1


def _flags(rows: list[dict[str, Any]]) -> list[str]:
    """Return the flags of the rows of the table, each with the measurements that have it."""
    rows_by_flag: dict[str, dict[str, None]] = {}
    for row in rows:
        for flag in row.get("flags") or () if _is_summary(row) else ():
            rows_by_flag.setdefault(str(flag), {})[
                f"{row['task']} {row['metric']['title'] or row['metric']['name']}"
            ] = None
    return [f"{flag}: {', '.join(names)}" for flag, names in rows_by_flag.items()]


def _pareto(chart: dict[str, Any], kinds: dict[str, str]) -> str:
    points = [
        Point(
            name, kinds[name], float(p["cost"]), float(p["quality"]), _range(p["cost_interval"]), _range(p["quality_interval"]),
            filled=name in chart["front"],
        )
        for name, p in chart["points"].items()
    ]  # fmt: skip
    title = f"{chart['quality']} against {chart['cost']}"
    better = "higher" if chart["higher_is_better"] else "lower"
    drawn = scatter_chart(
        title, points, [str(n) for n in chart["front"]], Axis(str(chart["cost"])), Axis(str(chart["quality"])),
        bool(chart["higher_is_better"]),
    )  # fmt: skip
    caption = f"With 95% intervals. {better.capitalize()} is better. Filled points are on the Pareto front."
    return figure_html(drawn, caption)


def _front(shared: dict[str, Any]) -> str:
    """Return a front of surgery search with the points that models were converted from, as a picture and a table."""
    front = check_front({**shared["front"], "chosen": 1})
    names = [f"point {number}" for number in range(1, len(front.points) + 1)]
    models: dict[str, list[str]] = {name: [] for name in names}
    for model, number in shared["chosen"].items():
        models[names[int(number) - 1]].append(str(model))
    unhealed = shared.get("unhealed")  # files of older versions have none
    unhealed = unhealed if isinstance(unhealed, list) else []
    titles = {
        name: ", ".join(f"{model} (not healed)" if model in unhealed else model for model in models[name])
        for name in names
    }
    labels = [titles[name] or name for name in names]
    measured, quantity = shared["measured"], str(shared["quantity"])
    body = []
    for name, point, (cost, share, loss, interval) in zip(names, front.points, front_cells(front)):
        values = ", ".join(f"{float(measured[model]):.2g}" for model in models[name] if model in measured)
        own = [values] if quantity else []
        row = [name, (cost, point.value), (share, point.value), (loss, point.loss), interval, *own]
        body.append([*row, titles[name]])
    heads = ["point", cost_label(front), "of the original", f"{loss_label(front)}, nats per token", "interval"]
    heads += [f"measured ({quantity})"] if quantity else []
    caption = "Points of a front of surgery search with their predicted intervals. The filled ones were converted."
    caption += f" {shared['remark']}." if isinstance(shared.get("remark"), str) else ""
    converted = [label for label, name in zip(labels, names) if models[name]]
    return front_figure(front, labels, converted, caption) + table_html(caption, [*heads, "model"], body)


def _range(ends: Any) -> tuple[float, float] | None:
    return None if ends is None else (float(ends[0]), float(ends[1]))


def _needle_maps(rows: list[dict[str, Any]], names: list[str]) -> str:
    """Return one needle map per task and model, side by side."""
    rows_by_metric: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        metric = row["metric"]
        if set(row["group"]) == {"depth", "length"} and (metric["kind"] == "accuracy" or metric["top"] == 1):
            rows_by_metric.setdefault((str(row["task"]), str(metric["title"] or metric["name"])), []).append(row)
    first: dict[str, tuple[str, str]] = {}
    for key in rows_by_metric:
        first.setdefault(key[0], key)
    parts = []
    for task, key in first.items():
        cells = rows_by_metric[key]
        if not any(value for row in cells for value in row["values"].values()):
            parts.append(f"<h3>{escape(task)}</h3><p>{NOTHING_FOUND}</p>")
            continue
        lengths = sorted({float(row["group"]["length"]) for row in cells})
        depths = sorted({float(row["group"]["depth"]) for row in cells})
        parts.append(f'<h3>{escape(task)}</h3><div class="pair">')
        for name in names:
            scale = float(cells[0]["metric"]["scale"])
            known = {
                (float(r["group"]["length"]), float(r["group"]["depth"])): float(r["values"][name]) / scale
                for r in cells
                if name in r["values"]
            }
            if known:
                shares = [[known.get((n, d)) for d in depths] for n in lengths]
                columns = [f"{100 * d:.3g}%" for d in depths]
                drawn = heat_map(f"{task}, {name}", [format_tokens(n) for n in lengths], columns, shares)
                parts.append(
                    figure_html(drawn, f"{escape(name)}: {escape(key[1])} in percent by length in tokens and depth")
                )
        parts.append("</div>")
    return "".join(parts)


def _curves(rows: list[dict[str, Any]], kinds: dict[str, str]) -> str:
    """Return loss by position of all models, and each suite's measurements by length if there are several lengths."""
    charts: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if len(row["group"]) == 1 and (axis := next(iter(row["group"]))) in ("position", "length"):
            name = str(row["metric"]["title"] or row["metric"]["name"])
            charts.setdefault((str(row["task"]), name, axis), []).append(row)
    parts = []
    for (task, metric, axis), points in charts.items():
        if len(points) < 2:
            continue
        series = [
            Series(
                name,
                kind,
                sorted((float(r["group"][axis]), float(r["values"][name])) for r in points if name in r["values"]),
                row_band(points, axis, name),
            )
            for name, kind in kinds.items()
        ]
        where = "position in the text" if axis == "position" else "length, tokens"
        unit = str(points[0]["metric"]["unit"])
        y = Axis(f"{metric}, {unit}" if unit else metric)
        drawn = line_chart(f"{task}, {metric}", series, Axis(where, log=True, tokens=True), y)
        parts.append(figure_html(drawn, f"{escape(task)}: {escape(metric)} by {axis}, with 95% bands"))
    return f'<h3>By length and position</h3><div class="pair">{"".join(parts)}</div>' if parts else ""
