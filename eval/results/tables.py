"""The comparison as a table, for the terminal and in Markdown."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from surgery.core.tables import command_line, format_interval, format_number, format_tokens
from surgery.eval.results.averages import AverageRow
from surgery.eval.results.compare import ComparisonRow
from surgery.eval.results.statistics import Interval

if TYPE_CHECKING:
    from surgery.eval.run import Evaluation

LINE_GROUPS = {"length", "position"}  # groups that get their own lines
LEGEND = (
    "± is the standard error; [low, high] is a 95% interval, Wilson's for accuracies and that of a bootstrap for "
    "averages"
)
HEADERS = ("suite", "task", "n", "base", "converted", "difference", "95% interval", "p")


def table_lines(done: Evaluation) -> list[list[str]]:
    """Return the cells of the table: a line per task and metric, and for a suite's main metric a line per length."""
    compared = "base" in done.models
    lines = []
    for suite in done.results:
        suite_lines = []
        for row in (row for row in done.rows if row.suite == suite):
            main = row.metric.name == done.main_metric(suite).name
            several = len(row.group) == 1 and set(row.group) <= LINE_GROUPS and main
            if row.is_summary or several:
                suite_lines.append(_format_line(row, compared))
        suite_lines += [_average_line(row, compared) for row in done.averages if row.suite == suite]
        lines += [[suite if i == 0 else "", *line] for i, line in enumerate(suite_lines)]
    return lines


def _average_line(row: AverageRow, compared: bool) -> list[str]:
    values = [format_average(row, role) for role in (("base", "converted") if compared else ("converted",))]
    samples = str(row.samples) if row.samples else ""
    if not compared:
        return [row.label, samples, *values]
    interval = row.differences.get("converted")
    change = "" if interval is None else f"{interval.change:+.4g}"
    return [row.label, samples, *values, change, _format_interval(interval), ""]


def format_average(row: AverageRow, model: str) -> str:
    """Format the value of an average with its 95% interval, "91.6 [90.2, 93.0]"."""
    value, interval = row.values[model], row.intervals[model]
    show = format_tokens if row.unit == "tokens" else lambda number: f"{number:.4g}"
    return show(value) + ("" if interval is None else f" [{show(interval[0])}, {show(interval[1])}]")


def headers(done: Evaluation) -> list[str]:
    """Return the column titles."""
    return list(HEADERS if "base" in done.models else (*HEADERS[:3], done.models["converted"]["name"]))


def _format_line(row: ComparisonRow, compared: bool) -> list[str]:
    where = "".join(f", {name} {value}" for name, value in row.group.items())
    task = f"{row.task}{where}, {row.metric.label}" + (f" ({row.metric.unit})" if row.metric.unit else "")
    values = [_format_value(row, role) for role in (("base", "converted") if compared else ("converted",))]
    if not compared:
        return [task, str(row.samples), *values]
    if row.metric.kind == "ppl" and row.ratio is not None:
        change = f"x {row.ratio.change:.4g}"
        return [task, str(row.samples), *values, change, _format_interval(row.ratio), ""]
    change = f"{row.difference.change:+.4g}" if row.difference is not None else ""
    return [
        task,
        str(row.samples),
        *values,
        change,
        _format_interval(row.difference),
        "" if row.p is None else f"{row.p:.2g}",
    ]


def _format_value(row: ComparisonRow, role: Any) -> str:
    if role not in row.values:
        return ""
    return format_number(row.values[role], row.errors[role], row.intervals.get(role))


def _format_interval(interval: Interval | None) -> str:
    return "" if interval is None else format_interval(interval.low, interval.high)


def table_notes(done: Evaluation) -> list[str]:
    """Return the notes below the table: flags, notes, failures, thresholds."""
    spoken = [row for row in done.rows if row.is_summary]
    said = [LEGEND] if done.rows else []
    said += [
        f"{flag}: {_flagged_rows(flag, spoken)}" for flag in dict.fromkeys(flag for row in spoken for flag in row.flags)
    ]
    said += [f"{row.suite} {row.label}: without {', '.join(row.missing)}" for row in done.averages if row.missing]
    said += done.notes
    for suite, by_role in done.results.items():
        said += [f"{suite}: {note}" for note in dict.fromkeys(n for r in by_role.values() for n in r.notes)]
    said += [f"{suite} could not be measured: {why}" for suite, why in done.broken.items()]
    for v in done.verdicts:
        ratio = "no ratio to the base" if v.ratio is None else f"{v.ratio:.4g} of the base"
        said.append(f"limit {v.limit}: {'held' if v.held else 'MISSED'}, {v.task} {v.metric} is {ratio}")
    if line := command_line(done.provenance.get("command")):
        said.append(f"reproduce with: {line}")
    return said


def _flagged_rows(flag: str, rows: list[ComparisonRow]) -> str:
    """Return the names of the rows with a flag; the suite's name if all its rows have it."""
    by_suite: dict[str, list[ComparisonRow]] = defaultdict(list)
    for row in rows:
        by_suite[row.suite].append(row)
    where: dict[str, None] = {}
    for suite, held in by_suite.items():
        names = [f"{row.task} {row.metric.label}" for row in held if flag in row.flags]
        whole = len(names) == len(held) > 2
        where |= dict.fromkeys([f"all of {suite}"] if whole else names)
    return ", ".join(where)


def eval_table(done: Evaluation) -> list[Any]:
    """Return rich renderables: the table and its notes."""
    from rich.markup import escape
    from rich.table import Table

    names = {role: model["name"] for role, model in done.models.items()}
    title = f"{names['converted']}" + (f" beside {names['base']}" if "base" in names else "")
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, header in enumerate(headers(done)):
        table.add_column(header, justify="left" if i < 2 else "right", overflow="fold", no_wrap=i != 1)
    for line in table_lines(done):
        table.add_row(*map(escape, line))
    return [table, *map(escape, table_notes(done))]


def escape_markdown(text: str) -> str:
    """Return text without Markdown's or HTML's meaning: links, emphasis, tags and cell borders."""
    escaped = re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown(done: Evaluation) -> str:
    """Return the table and its notes in Markdown."""
    body = [[escape_markdown(line[0]), escape_markdown(line[1]), *line[2:]] for line in table_lines(done)]
    lines = [[*map(escape_markdown, headers(done))], ["---"] * len(headers(done)), *body]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return text + "\n\n" + "".join(f"- {said}\n" for said in table_notes(done))
