"""The rows of `surgery bench speed` (eval/speed/contexts.py) as samples, tables and a figure; the suite `speed` takes
samples and figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from surgery.core.errors import SurgeryError
from surgery.core.tables import format_tokens
from surgery.eval.speed.serve_tables import conditions, reproduction
from surgery.eval.suite import EvalMetric, Sample, SuiteResult

if TYPE_CHECKING:
    from rich.table import Table

    from surgery.eval.results.plots import Curve

Row = dict[str, Any]
LEGEND = (
    "medians of the runs; in parentheses: times as fast as the original, or the share of its memory. All models took "
    "turns in one process. Peak memory "
    "includes the model's weights, and a cache counts what it holds"
)


def _metric(name: str, unit: str, title: str, higher_is_better: bool = False) -> EvalMetric:
    return EvalMetric(name, "mean", higher_is_better=higher_is_better, unit=unit, title=title, pooled=False)


def metrics(many: int) -> dict[str, EvalMetric]:
    """Return the metrics of the suite `speed`, by name. many: rows of the larger batch."""
    all_metrics = (
        _metric("prefill_ms", "ms", "time to first token"),
        _metric("decode_ms", "ms", "decode, a token"),
        _metric("tokens_s", "tokens/s", "decode, batch 1", True),
        _metric("tokens_s_many", "tokens/s", f"decode, batch {many}", True),
        _metric("cache_mb", "MB", "cache"),
        _metric("peak_mb", "MB", "peak memory, weights included"),
        _metric("peak_many_mb", "MB", f"peak memory, batch {many}"),
    )
    return {metric.name: metric for metric in all_metrics}


def speed_samples(rows: Sequence[Row]) -> list[Sample]:
    """Return a sample for each run of one model's rows."""
    samples = []
    for context in dict.fromkeys(row["context"] for row in rows):
        one, *many = sorted((row for row in rows if row["context"] == context), key=lambda row: row["batch"])
        for i, (first_ms, ms) in enumerate(zip(one["first_token_ms"], one["step_ms"])):
            values = {
                "prefill_ms": first_ms,
                "decode_ms": ms,
                "tokens_s": 1e3 / ms,
                "cache_mb": one["cache_bytes"] / 1e6,
            }
            if "peak_bytes" in one:
                values["peak_mb"] = one["peak_bytes"] / 1e6
            for row in (row for row in many if i < len(row["step_ms"])):
                values["tokens_s_many"] = 1e3 * row["batch"] / row["step_ms"][i]
                if "peak_bytes" in row:
                    values["peak_many_mb"] = row["peak_bytes"] / 1e6
            samples.append(Sample("speed", f"{context} {i}", values, {"length": context}))
    return samples


def speed_result(rows: Sequence[Row], notes: Sequence[str] = ()) -> SuiteResult:
    """Return the result of the suite for one model's rows, which are kept in its `info`."""
    many = max((row["batch"] for row in rows), default=1)
    return SuiteResult(speed_samples(rows), metrics(many), notes=list(notes), info={"bench": list(rows)})


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each model."""
    return {name: [row for row in rows if row["model"] == name] for name in dict.fromkeys(row["model"] for row in rows)}


# -- tables ------------------------------------------------------------------------------------------
def speed_grids(rows: Sequence[Row]) -> list[tuple[str, list[str], list[tuple[str, list[str]]]]]:
    """Return (title, columns, (model, cells)) for each measure; a column is a context."""
    contexts = sorted({row["context"] for row in rows})
    batches = sorted({row["batch"] for row in rows})
    names = list(by_model(rows))
    at = {(row["model"], row["context"], row["batch"]): row for row in rows}
    measures = [("time to first token, ms", 1, "first_token_ms", False)]
    measures += [(f"decoding, tokens per second, batch {batch}", batch, "tokens_s", True) for batch in batches]
    measures += [(f"live cache, MB, batch {batch}", batch, "cache_bytes", False) for batch in batches]
    measures += [(f"peak memory, GB, batch {batch}", batch, "peak_bytes", False) for batch in batches]
    grids = []
    for title, batch, key, more in measures:
        lines = [
            (name, [_cell(at.get((name, c, batch)), at.get((names[0], c, batch)), key, more) for c in contexts])
            for name in names
        ]
        if any(cell not in ("", "-") for _, cells in lines for cell in cells):
            grids.append((title, [format_tokens(context) for context in contexts], lines))
    return grids


def measured(row: Row | None, key: str) -> float | None:
    """Return a measure of a row; None if it was not measured."""
    if row is None or row.get("note") or not row["step_ms"]:
        return None
    if key == "tokens_s":
        return 1e3 * row["batch"] / median(row["step_ms"])
    return median(row[key]) if isinstance(row.get(key), list) else row.get(key)


def _cell(row: Row | None, base: Row | None, key: str, higher_is_better: bool) -> str:
    value, first = measured(row, key), measured(base, key)
    if value is None:
        return "does not fit" if row is not None and row.get("note") else "-"
    unit = {"cache_bytes": 1e6, "peak_bytes": 1e9}.get(key, 1.0)
    text = f"{value / unit:,.0f}" if value / unit >= 100 else f"{value / unit:.3g}"
    if first is None or row is base:
        return text
    is_share = key.endswith("_bytes")
    ratio = value / first if is_share or higher_is_better else first / value
    return f"{text} ({100 * ratio:.3g}%)" if is_share else f"{text} ({ratio:.3g}x)"


def speed_tables(result: dict[str, Any]) -> list[Any]:
    """Return rich tables of a result of `surgery bench speed`."""
    from rich.markup import escape
    from rich.table import Table

    parts: list[Table | str] = []
    for title, columns, lines in speed_grids(result["rows"]):
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("")
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for name, cells in lines:
            table.add_row(name, *cells)
        parts += [table, ""]
    return [*parts, LEGEND, conditions(result), *map(escape, reproduction(result))]


def speed_markdown(result: dict[str, Any]) -> str:
    """Return the tables in Markdown."""
    lines = [
        conditions(result),
        "",
        f"{LEGEND[0].upper()}{LEGEND[1:]}.",
        "",
        *(f"{line}\n" for line in reproduction(result)),
    ]
    for title, columns, cells in speed_grids(result["rows"]):
        lines += [f"### {title[0].upper()}{title[1:]}", "", "| | " + " | ".join(columns) + " |"]
        lines += ["| --- |" + " --- |" * len(columns)]
        lines += [*(f"| {name} | " + " | ".join(values) + " |" for name, values in cells), ""]
    return "\n".join(lines)


# -- figure ------------------------------------------------------------------------------------------
def save_speed_plot(result: dict[str, Any], path: Path) -> None:
    """Draw a result of `surgery bench speed`: time to first token, tokens per second and memory by context."""
    results = {name: speed_result(held) for name, held in by_model(result["rows"]).items()}
    results = {name: suite_result for name, suite_result in results.items() if suite_result.samples}
    if not results:
        raise SurgeryError(
            "no context was measured, so there is nothing to draw. Run the same command again without a time limit"
        )
    plot_speed(results, path, base=result["rows"][0]["model"])


def plot_speed(results: Mapping[str, SuiteResult], path: Path, base: str | None) -> list[Path]:
    """Draw a panel for each metric by length: median, and as a band the fastest to the slowest run.

    Return the path, or nothing without a sample.
    """
    from surgery.eval.results.plots import Panel, plot_panels

    first = next(iter(results.values()), None)
    panels = []
    for metric in first.metrics.values() if first is not None else ():
        if metric.name in (
            "decode_ms",
            "peak_many_mb",
        ):  # tokens per second say the same; the larger batch is in the tables
            continue
        curves = {name: _run_curve(result.samples, metric.name) for name, result in results.items()}
        if curves := {name: curve for name, curve in curves.items() if curve is not None}:
            panels.append(Panel(f"{metric.label}, {metric.unit}", curves))
    if not panels:
        return []
    title = "median, and the range of the runs"
    return [plot_panels(path, panels, list(results), "context, tokens", title, base=base)]


def _run_curve(samples: Sequence[Sample], name: str) -> Curve | None:
    """Return the median of a metric by length with the range of its runs; None if no sample has it."""
    from surgery.eval.results.plots import Curve

    values: dict[float, list[float]] = {}
    for sample in samples:
        if name in sample.metrics and isinstance(length := sample.group.get("length"), (int, float)):
            values.setdefault(length, []).append(sample.metrics[name])
    lengths = sorted(values)
    held = [values[length] for length in lengths]
    return Curve(lengths, [*map(median, held)], [*map(min, held)], [*map(max, held)]) if held else None
