"""The comparison of many models as a table: for the terminal, Markdown, LaTeX (booktabs) and CSV, and its figures.

In the first three a line is a measurement and a column a model; CSV has one line for each measurement of each model,
with all numbers. All text from results is escaped for its format.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from surgery.core.errors import SurgeryError, suggestion
from surgery.core.files import atomic_write, check_not_dangling
from surgery.core.tables import command_line, format_number
from surgery.eval.results.averages import AverageRow
from surgery.eval.results.folders import AXES, COMPARISON
from surgery.eval.results.fronts import SharedFront
from surgery.eval.results.models import ModelComparison, ModelRow
from surgery.eval.results.pareto import ParetoChart
from surgery.eval.results.statistics import Interval
from surgery.eval.results.tables import LINE_GROUPS, escape_markdown, format_average
from surgery.eval.suite import SUITES
from surgery.publish.figures import KEPT, SIZES, size_rows
from surgery.publish.front import loss_label
from surgery.publish.ratios import Ratio

LEGEND = (
    "± is the standard error and [low, high] a 95% interval: Wilson's for accuracies, of a bootstrap for averages. In "
    "parentheses: "
    "difference from the base; for perplexities x, the ratio to the base, and its 95% interval; * if its 95% interval "
    "excludes no change"
)
CSV_COLUMNS = (
    *("suite", "task", "length", "depth", "position", "metric", "n", "units", "model", "value", "standard_error", "low", "high"),
    *("difference", "difference_low", "difference_high", "ratio", "ratio_low", "ratio_high", "mcnemar_p", "remarks", "command"),
)  # fmt: skip
SUFFIXES = {".md": "markdown", ".csv": "csv", ".tex": "latex", ".json": "json"}


def headers(done: ModelComparison) -> list[str]:
    """Return the column titles."""
    names = [f"{name} (base)" if name == done.base else name for name in done.names]
    return ["suite", "task", "n", *names]


def lines(done: ModelComparison) -> list[list[str]]:
    """Return the cells: sizes of the models, then summaries, lengths of each suite's main metric, and averages."""
    table: list[list[str]] = []
    for title, cells in size_rows([model.to_dict() for model in done.models], done.base).items():
        table.append(["" if table else "model", title, "", *(text for text, _ in cells)])
    for suite in dict.fromkeys(row.suite for row in done.rows):
        suite_lines: list[list[str]] = []
        for row in (row for row in done.rows if row.suite == suite):
            main = row.metric.name == done.main_metric(suite).name
            several = len(row.group) == 1 and set(row.group) <= LINE_GROUPS and main
            if row.is_summary or several:
                suite_lines.append([row.label, str(row.samples), *(_cell(row, name) for name in done.names)])
        for average in (row for row in done.averages if row.suite == suite):
            count = str(average.samples) if average.samples else ""
            suite_lines.append([average.label, count, *(_average_cell(average, name) for name in done.names)])
        table += [[suite if i == 0 else "", *line] for i, line in enumerate(suite_lines)]
    return table


def _cell(row: ModelRow, name: str) -> str:
    if name not in row.values:
        return ""
    text = format_number(row.values[name], row.errors[name], row.intervals.get(name))
    if row.metric.kind == "ppl":
        ratio = row.ratios.get(name)
        return text if ratio is None else f"{text}, {Ratio(ratio.change, ratio.low, ratio.high)}{_star(ratio, 1.0)}"
    return text + _change(row.differences.get(name), 0.0, "{:+.4g}")


def _average_cell(row: AverageRow, name: str) -> str:
    return format_average(row, name) + _change(row.differences.get(name), 0.0, "{:+.4g}") if name in row.values else ""


def _change(interval: Interval | None, none: float, form: str) -> str:
    if interval is None:
        return ""
    return f" ({form.format(interval.change)}{_star(interval, none)})"


def _star(interval: Interval, none: float) -> str:
    """Return * if an interval excludes `none`, which means no change."""
    sure = interval.low is not None and interval.high is not None and not interval.low <= none <= interval.high
    return "*" if sure else ""


def notes(done: ModelComparison) -> list[str]:
    """Return what stands below the table: legend, refused results, flags and remarks."""
    texts = [LEGEND, *(front.note for front in done.fronts), *(f"REFUSED: {text}" for text in done.refused)]
    flags: dict[str, list[str]] = {}
    for row in done.rows:
        for flag in row.flags if row.is_summary else ():
            flags.setdefault(flag, []).append(f"{row.task} {row.metric.label}")
    texts += [f"{flag}: {', '.join(rows[:8])}{' and more' if len(rows) > 8 else ''}" for flag, rows in flags.items()]
    texts += [f"{row.suite} {row.label}: without {', '.join(row.missing)}" for row in done.averages if row.missing]
    return texts + list(dict.fromkeys(done.notes))


def comparison_table(done: ModelComparison) -> list[Any]:
    """Return rich renderables: the table and its notes."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, header in enumerate(headers(done)):
        table.add_column(escape(header), justify="left" if i < 2 else "right", overflow="fold", no_wrap=i in (0, 2))
    for line in lines(done):
        table.add_row(*map(escape, line))
    return [table, *map(_front_table, done.fronts), *map(escape, notes(done))]


def _front_table(front: SharedFront) -> Any:
    """Return the table of a front; names of models wrap, so that it fits 80 columns."""
    from rich.markup import escape

    from surgery.core.tables import new_table

    *heads, last = front.heads()
    table = new_table(front.title, *heads)
    table.add_column(last, overflow="fold")
    for line in front.lines():
        table.add_row(*map(escape, line))
    return table


def to_markdown(done: ModelComparison) -> str:
    """Return the table and its notes in Markdown."""
    body = [[escape_markdown(line[0]), escape_markdown(line[1]), *line[2:]] for line in lines(done)]
    tables = [_markdown_table(headers(done), body, 2)]
    for front in done.fronts:
        *cells, names = zip(*front.lines())
        lines_of_front = [list(line) for line in zip(*cells, map(escape_markdown, names))]
        tables.append(f"{front.title}\n\n{_markdown_table(front.heads(), lines_of_front, 1)}")
    table = "\n\n".join(tables)
    remarks = [note if note == LEGEND else escape_markdown(note) for note in notes(done)]
    return table + "\n\n" + "".join(f"- {note}\n" for note in remarks)


def _markdown_table(heads: Sequence[str], body: Sequence[Sequence[str]], text_columns: int) -> str:
    """Return a table whose cells are escaped; the first `text_columns` are left-aligned."""
    rule = ["---"] * text_columns + ["---:"] * (len(heads) - text_columns)
    return "\n".join("| " + " | ".join(row) + " |" for row in [[*map(escape_markdown, heads)], rule, *body])


def to_latex(done: ModelComparison) -> str:
    """Return a tabular environment for the package booktabs, with the notes as comments."""
    head, body = headers(done), lines(done)
    rows = [r"\begin{tabular}{ll" + "r" * (len(head) - 2) + "}", r"\toprule", _latex_row(head), r"\midrule"]
    for i, line in enumerate(body):
        rows += [r"\addlinespace"] if i and line[0] else []
        rows.append(_latex_row(line))
    comments = [f"% {' '.join(note.split())}" for note in notes(done)]
    fronts = [line for front in done.fronts for line in ("", *_latex_front(front))]
    return "\n".join([*comments, *rows, r"\bottomrule", r"\end{tabular}", *fronts, ""])


def _latex_front(front: SharedFront) -> list[str]:
    """Return the lines of the table of a front, with its title as a comment."""
    heads = front.heads()
    begin = r"\begin{tabular}{l" + "r" * (len(heads) - 2) + "l}"
    body = [_latex_row(heads), r"\midrule", *map(_latex_row, front.lines())]
    return [f"% {front.title}", begin, r"\toprule", *body, r"\bottomrule", r"\end{tabular}"]


def to_csv(done: ModelComparison) -> str:
    """Return all measurements and averages as CSV, one line for each model."""
    file = io.StringIO()
    writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    for model in done.models:
        for key, title in {**SIZES, "kept": KEPT}.items():
            if (number := model.sizes()[key]) is not None:
                writer.writerow(_plain({"task": title, "model": model.name, "value": number}))
        if (front := model.front) is not None:
            own = {"value": front.own.loss, "low": front.own.low, "high": front.own.high}
            writer.writerow(_plain({"task": loss_label(front), "model": model.name, **own}))
    for row in done.rows:
        for name in row.values:
            writer.writerow(_plain(_csv_row(row, name) | {"command": _command(done, row.suite, name)}))
    for average in done.averages:
        for name in average.values:
            writer.writerow(_plain(_csv_average(average, name) | {"command": _command(done, average.suite, name)}))
    return file.getvalue()


def _csv_row(row: ModelRow, name: str) -> dict[str, Any]:
    low, high = row.intervals.get(name, ("", ""))
    others = "".join(f", {group} {value}" for group, value in row.group.items() if group not in AXES)
    return {
        "suite": row.suite, "task": row.task + others, **{axis: row.group.get(axis, "") for axis in AXES},
        "metric": row.metric.label, "n": row.samples, "units": row.units, "model": name, "value": row.values[name],
        "standard_error": row.errors[name], "low": low, "high": high, **_csv_interval("difference", row.differences.get(name)),
        **_csv_interval("ratio", row.ratios.get(name)), "mcnemar_p": row.p.get(name, ""), "remarks": "; ".join(row.flags),
    }  # fmt: skip


def _csv_average(row: AverageRow, name: str) -> dict[str, Any]:
    low, high = row.intervals[name] or ("", "")
    missing = f"without {', '.join(row.missing)}" if row.missing else ""
    return {
        "suite": row.suite, "task": row.name, "length": row.length, "metric": row.metric, "n": row.samples or "",
        "model": name, "value": row.values[name], "low": low, "high": high,
        **_csv_interval("difference", row.differences.get(name)), "remarks": missing,
    }  # fmt: skip


def _command(done: ModelComparison, suite: str, name: str) -> str:
    """Return the command that measured a suite of a model; "" if it was not recorded."""
    held = next((model.suites.get(suite) for model in done.models if model.name == name), None)
    return "" if held is None else command_line(held.result.provenance.get("command"))


def _csv_interval(name: str, interval: Interval | None) -> dict[str, Any]:
    if interval is None:
        return {}
    return {name: interval.change, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a CSV row in which no text is a formula of a spreadsheet: those begin with = + - @."""
    return {
        key: f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
        for key, value in row.items()
    }


LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def _latex_row(cells: list[str]) -> str:
    # The braces keep a "[" at the beginning from being read as an argument of the \\ before it.
    return (
        " & ".join(
            ("{}" if cell.startswith(("[", "*")) else "") + "".join(LATEX.get(c, c) for c in cell) for cell in cells
        )
        + r" \\"
    )


def _to_json(done: ModelComparison) -> str:
    return json.dumps(done.to_dict(), indent=1, ensure_ascii=False, default=str) + "\n"


FORMATS: dict[str, Callable[[ModelComparison], str]] = {
    "markdown": to_markdown,
    "latex": to_latex,
    "csv": to_csv,
    "json": _to_json,
}
FILES = {"table.md": to_markdown, "table.tex": to_latex, "table.csv": to_csv}


def check_format(form: str) -> None:
    """Raise SurgeryError for an unknown format."""
    if form not in FORMATS:
        raise SurgeryError(f"--format {form!r} is not known{suggestion(form, ['table', *FORMATS])}")


def format_comparison(done: ModelComparison, form: str) -> str:
    """Return the comparison as text. form: one of FORMATS."""
    check_format(form)
    return FORMATS[form](done)


def check_out(out: Path) -> None:
    """Raise SurgeryError if the comparison cannot be written to `out`, a folder or a file .md, .csv, .tex or .json."""
    check_not_dangling(out)
    if not out.absolute().parent.is_dir():
        raise SurgeryError(f"--out {out}: {out.absolute().parent} is not a folder. Create it first.")
    if out.suffix in SUFFIXES and out.is_dir():
        raise SurgeryError(f"--out {out} is a folder. Give a file, or a folder without the ending {out.suffix}.")
    if out.suffix not in SUFFIXES and out.exists() and not out.is_dir():
        raise SurgeryError(f"--out {out} is a file. Give a folder, or a file ending in {', '.join(SUFFIXES)}.")


def write_comparison(done: ModelComparison, out: Path) -> list[str]:
    """Write one file in the format of its ending, or a folder with comparison.json, tables and figures.

    Return reasons why figures could not be drawn; they never lose the tables.
    """
    if out.suffix in SUFFIXES:
        with atomic_write(out, "w") as file:
            file.write(format_comparison(done, SUFFIXES[out.suffix]))
        return []
    out.mkdir(exist_ok=True)
    failed = _draw(done, out)
    for name, make in {**FILES, COMPARISON: _to_json}.items():
        with atomic_write(out / name, "w") as file:
            file.write(make(done))
    return failed


def _draw(done: ModelComparison, out: Path) -> list[str]:
    from surgery.eval.results.plots import plot_by_group

    failed: list[str] = []

    jobs: list[tuple[str, Callable[[], list[Path]]]] = []
    for chart in done.charts:
        name = "pareto-" + re.sub(r"\W+", "-", chart.cost.partition(",")[0])
        jobs.append((name, partial(_draw_pareto, out / f"{name}.png", chart, done)))
    for suite, results in done.results.items():
        ordered = {name: results[name] for name in done.names if name in results}
        plot = SUITES[suite].plot if suite in SUITES else None
        draw = partial(plot, ordered, out) if plot is not None else partial(plot_by_group, suite, ordered, out)
        jobs.append((suite, partial(draw, base=done.base)))
    for what, job in jobs:
        try:
            done.plots += job()
        except Exception as error:  # a figure of strange numbers; the tables matter more
            failed.append(f"no figure of {what}: {type(error).__name__}: {error}")
    return failed


def _draw_pareto(path: Path, chart: ParetoChart, done: ModelComparison) -> list[Path]:
    from surgery.eval.results.plots import plot_pareto

    return [plot_pareto(path, chart, done.names, done.base)]
