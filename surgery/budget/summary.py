"""The result of a search as a table and sentences."""

from __future__ import annotations

import shlex
from typing import Any

from rich.markup import escape

from surgery.budget.limits import MEASURES
from surgery.budget.times import PHASES
from surgery.core.files import size_text
from surgery.core.tables import format_count, format_tokens, new_table
from surgery.publish.front import format_cost


def search_lines(result: dict[str, Any]) -> list[Any]:
    """Return the table of the front and sentences on its first row. result: of surgery.budget.search.search."""
    original, points = result["original"], result["points"]
    loss = "healed loss" if result["healing"] else "loss"
    cache = f"cache {format_tokens(result['at'])}"
    timed = [phase for phase in PHASES if phase in original]
    columns = [f"{phase}, ms" for phase in timed]
    checked = any(point["measured"] is not None for point in points)
    damage = "together" if checked else "sum"
    # Few and narrow columns: on a terminal of 80 columns a wider table would be cut.
    table = new_table("front: one row for each recipe", "recipe", loss, damage, "parameters", "bytes", cache, *columns)
    swept = next(iter(result["limits"]))
    for number, point in sorted(enumerate(points), key=lambda item: item[1]["costs"][swept]):
        costs = point["costs"]
        name = point_name(point).removesuffix(".yaml")
        table.add_row(
            f"{name} *" if number == 0 else name,
            f"{point['loss']:.2g} ({point['low']:.2g}-{point['high']:.2g})",
            _damage(point["measured"] if checked else point["damage"]),
            *(_share(costs[name], original[name]) for name in ("parameters", "bytes", "cache", *timed)),
        )
    whole = [f"{format_count(original['parameters'])} parameters", size_text(original["bytes"])]
    whole += [f"{size_text(original['cache'])} of cache at {format_tokens(result['at'])}"]
    whole += [format_cost(phase, original[phase]) for phase in timed]
    where = "nearest to" if result["excess"] else "at"
    lines: list[Any] = [
        table,
        f"* {where} your limits. Predicted losses: nats per token of KL divergence from the original, with 95% intervals",
        f"{damage}: what the choices lose, {'measured as a whole' if checked else 'each alone, added up'}",
        f"shares are of the original: {', '.join(whole)}",
    ]
    lines += check_lines(result)
    if result["times"]:
        lines.append(escape(result["times"]))
    if result["not_fitted"]:
        names = ", ".join(name.replace("_", "-") for name in result["not_fitted"])
        lines.append(f"healing not fitted: {names}. Their loss is predicted as before healing")
    lines += [escape(line) for line in limit_lines(result)]
    taken = ", ".join(f"{count} x {name}" for name, count in points[0]["choices"].items())
    lines.append(escape(f"{point_name(points[0])}: {taken or 'nothing changes'}"))
    source, commands = str(result.get("source", "SRC")), []
    if recipe := points[0]["recipe"]:
        commands.append(f"surgery convert {shlex.quote(source)} --recipe {result['out']}/{recipe} --out OUT")
        source = "OUT"
    if bits := points[0]["bits"]:
        commands.append(f"surgery quantize {shlex.quote(source)} --rules {result['out']}/{bits} --out SMALL")
    lines += [escape(f"{'then' if number else 'next'}: {command}") for number, command in enumerate(commands)]
    return lines


def check_lines(result: dict[str, Any]) -> list[str]:
    """Return sentences on the plans that were measured as a whole, [] if none was."""
    points, rivals = result["points"], result["rivals"]
    ratios = [p["measured"] / p["damage"] for p in [*points, *rivals.values()] if p["measured"] and p["damage"]]
    lines = []
    if ratios:
        lines.append(
            f"measured together, choices lose {min(ratios):.2g} to {max(ratios):.2g} times the sum of what each loses "
            "alone. Predicted losses are scaled by it"
        )
    if rivals:
        losses = ", ".join(f"without {family.replace('_', '-')} {p['loss']:.2g}" for family, p in rivals.items())
        lines.append(f"measured too at your limits: {losses}. {point_name(points[0])} has the lowest predicted loss")
    return lines


def point_name(point: dict[str, Any]) -> str:
    """Return the file of a point of the front, or "the original"."""
    return str(point["recipe"] or point["bits"] or "the original")


def limit_lines(result: dict[str, Any]) -> list[str]:
    """Return sentences on the limits: which are exceeded, and which bind."""
    reached = result["points"][0]["costs"]
    exceeded = [
        f"{MEASURES[name].option} cannot be met: the nearest choice has {format_cost(name, reached[name])}, "
        f"{format_cost(name, excess)} more than the limit of {format_cost(name, result['limits'][name])}"
        for name, excess in result["excess"].items()
    ]
    binding = [MEASURES[name].option for name in result["binds"]]
    if exceeded:
        return exceeded
    return [f"what binds: {', '.join(binding)}" if binding else "what binds: no limit; the original meets them"]


def _damage(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _share(value: float, original: float) -> str:
    return f"{value / original:.0%}" if original else f"{value:g}"
