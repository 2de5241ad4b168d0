"""Tables and the plot of `surgery bench serve`."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.core.files import size_text
from surgery.core.tables import command_line

Cell = dict[str, Any]  # a row of the result, see eval/speed/serve.py
LEGEND = (
    "tokens per second of all rows together; speed over the original in the same cell, measured / predicted from the "
    "bytes that a step reads "
    "(weights once, the cache of each row)"
)


def serve_tables(result: dict[str, Any]) -> list[Any]:
    """Return rich tables: throughput, speed over the original, memory; then crossovers and what did not fit."""
    from rich.markup import escape
    from rich.table import Table

    parts: list[Any] = []
    for title, columns, rows in serve_grids(result["rows"]):
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("")
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for name, cells in rows:
            table.add_row(name, *cells)
        parts += [table, ""]
    return [*parts, *remarks(result["rows"]), "", LEGEND, conditions(result), *map(escape, reproduction(result))]


def serve_markdown(result: dict[str, Any]) -> str:
    """Return the tables in Markdown."""
    lines = [conditions(result), "", *(f"{line}\n" for line in reproduction(result))]
    for title, columns, rows in serve_grids(result["rows"]):
        lines += [f"### {title}", "", "| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
        lines += [*(f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows), ""]
    return "\n".join([*lines, *crossover_table(result["rows"]), *(f"- {x}" for x in notes(result["rows"]))])


def crossover_table(cells: list[Cell]) -> list[str]:
    """Return the lines of a table: the batches at which a model is faster than the original, by context."""
    found = {(context, name): f"{measured} / {predicted}" for context, name, measured, predicted in crossovers(cells)}
    if not found:
        return []
    contexts, names = sorted({context for context, _ in found}), dict.fromkeys(name for _, name in found)
    rows = [(name, [found.get((context, name), "") for context in contexts]) for name in names]
    return [
        *("### faster than the original: measured / by counted bytes", ""),
        *("| | " + " | ".join(f"context {c:,}" for c in contexts) + " |", "| --- |" + " --- |" * len(contexts)),
        *(f"| {name} | " + " | ".join(shown) + " |" for name, shown in rows),
        "",
    ]


def remarks(cells: list[Cell]) -> list[str]:
    """Return lines about crossovers, the spread of the runs, steps that were not captured, and cells without a time."""
    return [*crossover_lines(cells), *notes(cells)]


def notes(cells: list[Cell]) -> list[str]:
    """Return lines about the spread of the runs, steps that were not captured, and cells without a time."""
    return [*spread_lines(cells), *uncaptured_lines(cells), *missing_lines(cells)]


def spread(cell: Cell) -> float:
    """Return how far the runs of a cell lie apart, as a share of their median."""
    return (max(cell["runs_ms"]) - min(cell["runs_ms"])) / cell["ms"]


def spread_lines(cells: list[Cell]) -> list[str]:
    """Return a line per model: the number of runs of a cell, and the median and the largest spread over its cells."""
    lines = []
    for name in dict.fromkeys(cell["model"] for cell in cells):
        timed = [cell for cell in cells if cell["model"] == name and cell.get("ms")]
        if timed:
            worst, middle = max(timed, key=spread), median(map(spread, timed))
            lines.append(
                f"{name}: median of {min(len(c['runs_ms']) for c in timed)} runs in turns with the other models, which "
                f"lie {middle:.1%} apart "
                f"(at most {spread(worst):.1%}: batch {worst['batch']}, context {worst['context']:,})"
            )
    return lines


def uncaptured_lines(cells: list[Cell]) -> list[str]:
    """Return a line per model and reason for steps that ran without a CUDA graph on a GPU."""
    cells_by_name: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.get("problem"):
            key = cell["model"], str(cell["problem"])
            cells_by_name.setdefault(key, []).append(f"batch {cell['batch']}, context {cell['context']:,}")
    return [
        f"{name}, not in a CUDA graph ({problem}): {'; '.join(where)}"
        for (name, problem), where in cells_by_name.items()
    ]


def reproduction(result: dict[str, Any]) -> list[str]:
    """Return the line with the command that measured a result; [] if it was not recorded, or several runs were
    merged.
    """
    line = command_line(result.get("command")) if result.get("processes", 1) == 1 else ""
    return [f"reproduce with: {line}"] if line else []


def conditions(result: dict[str, Any]) -> str:
    """Return device, dtype, versions and date in a line."""
    named = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    ends = "" if result["complete"] else "; not finished, run the same command again to go on"
    return f"{result['device']}, {result['dtype']}, {named}, {result['date']}, {result['sizes']}{ends}"


def serve_grids(cells: list[Cell]) -> list[tuple[str, list[str], list[tuple[str, list[str]]]]]:
    """Return for each context (title, columns, (model, cells)): throughput with speed over the original, then
    memory.
    """
    batches = sorted({cell["batch"] for cell in cells})
    columns = [f"batch {batch}" for batch in batches]
    grids = []
    for context in sorted({cell["context"] for cell in cells}):
        here = {(c["model"], c["batch"]): c for c in cells if c["context"] == context}
        names = dict.fromkeys(name for name, _ in here)
        rows = [(name, [throughput_cell(here, name, batch) for batch in batches]) for name in names]
        grids.append((f"context {context:,}: tokens per second", columns, rows))
        rows = [(name, [memory_cell(here.get((name, batch))) for batch in batches]) for name in names]
        grids.append((f"context {context:,}: cache, peak memory", columns, rows))
    return grids


def throughput(cell: Cell) -> float:
    """Return the tokens per second of all rows of a measured cell."""
    return 1e3 * cell["batch"] / cell["ms"]


def step_bytes(cell: Cell) -> int:
    """Return the bytes that a step reads: W + B C."""
    return cell["weight_bytes"] + cell["batch"] * cell["row_bytes"]


def first_name(cells: list[Cell]) -> str:
    """Return the name of the original, whose cells come first."""
    return cells[0]["model"]


def throughput_cell(here: dict[tuple[str, int], Cell], name: str, batch: int) -> str:
    """Format tokens per second and, beside it, measured and predicted speed over the original."""
    cell, base = here.get((name, batch)), here.get((next(iter(here))[0], batch))
    if cell is None:
        return "-"
    if not cell.get("ms"):
        return cell["note"].split(":")[0]
    text = f"{throughput(cell):,.0f}"
    if base is None or base is cell:
        return text
    predicted = f"{step_bytes(base) / step_bytes(cell):.2f}x"
    return f"{text} {base['ms'] / cell['ms']:.2f}x / {predicted}" if base.get("ms") else f"{text} - / {predicted}"


def memory_cell(cell: Cell | None) -> str:
    """Format the bytes of the cache and the peak memory of a cell, each in the unit that fits."""
    if cell is None or not cell.get("ms"):
        return "-"
    peak = cell.get("peak_bytes")
    return size_text(cell["cache_bytes"]) + (f", {size_text(peak)}" if peak else "")


def predicted_crossover(original: Cell, cell: Cell) -> str:
    """Return from which batch a step reads fewer bytes than the original's, in words. B* = (W - W_o) / (C_o - C)."""
    weights, cache = cell["weight_bytes"] - original["weight_bytes"], original["row_bytes"] - cell["row_bytes"]
    if weights <= 0 and cache >= 0:
        return "every batch" if weights or cache else "nowhere"
    if weights >= 0 and cache <= 0:
        return "nowhere"
    border = weights / cache
    return f"from batch {math.floor(border) + 1}" if cache > 0 else f"up to batch {math.ceil(border) - 1}"


def measured_crossover(pairs: list[tuple[int, bool]]) -> str:
    """Return from which measured batch a model stays ahead, in words. pairs: (batch, whether it is ahead),
    ascending.
    """
    behind = [batch for batch, ahead in pairs if not ahead]
    since = [batch for batch, _ in pairs if not behind or batch > behind[-1]]
    if not since:
        best = [batch for batch, ahead in pairs if ahead]
        return f"at batch {', '.join(map(str, best))}" if best else "nowhere"
    return "every batch" if since[0] == pairs[0][0] else f"from batch {since[0]}"


def crossovers(cells: list[Cell]) -> list[tuple[int, str, str, str]]:
    """Return per context and model the batches at which it is faster than the original: (context, model, measured,
    predicted by counted bytes).
    """
    found, original = [], first_name(cells) if cells else ""
    for context in sorted({cell["context"] for cell in cells}):
        base = {c["batch"]: c for c in cells if (c["model"], c["context"]) == (original, context)}
        for name in dict.fromkeys(c["model"] for c in cells if c["model"] != original):
            here = sorted((c["batch"], c) for c in cells if (c["model"], c["context"]) == (name, context))
            both = [(b, c["ms"] < base[b]["ms"]) for b, c in here if c.get("ms") and base.get(b, {}).get("ms")]
            if not here or here[0][0] not in base:
                continue
            crossover = measured_crossover(both) if both else "no cell of both"
            predicted = predicted_crossover(base[here[0][0]], here[0][1])
            found.append((context, name, crossover, predicted))
    return found


def crossover_lines(cells: list[Cell]) -> list[str]:
    """Return a line per context and model: where it is faster than the original, measured and predicted."""
    return [
        f"context {context:,}, {name}, faster than the original: {measured}; by counted bytes: {predicted}"
        for context, name, measured, predicted in crossovers(cells)
    ]


def missing_lines(cells: list[Cell]) -> list[str]:
    """Return a line per cell without a time, with the reason."""
    return [
        f"{c['model']}, batch {c['batch']}, context {c['context']:,}: {c['note']}" for c in cells if not c.get("ms")
    ]


def save_serve_plot(result: dict[str, Any], path: Path) -> None:
    """Draw tokens per second against the batch size, a panel per context.

    A dashed line is the prediction by counted bytes, scaled so that it meets the original's first measured cell.
    """
    try:
        import matplotlib
    except ImportError:
        raise SurgeryError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = [cell for cell in result["rows"] if cell.get("ms")]
    if not cells:
        raise SurgeryError(
            "no cell was measured, so there is nothing to draw. Run the same command again without a time limit"
        )
    contexts = sorted({cell["context"] for cell in cells})
    names = list(dict.fromkeys(cell["model"] for cell in result["rows"]))
    across = min(2, len(contexts))
    figure, axes = pyplot.subplots(
        -(-len(contexts) // across), across, figsize=(6 * across, 4.5 * -(-len(contexts) // across)), squeeze=False
    )
    for axis, context in zip(axes.flat, contexts):
        bandwidth = next(
            (step_bytes(c) / c["ms"] for c in cells if c["model"] == names[0] and c["context"] == context), None
        )
        for number, name in enumerate(names):
            here = sorted((c["batch"], c) for c in cells if (c["model"], c["context"]) == (name, context))
            style = {"color": f"C{number}", "marker": "osD^v"[number % 5]}
            axis.plot([b for b, _ in here], [throughput(c) for _, c in here], label=name, **style)
            if bandwidth:
                counted = [1e3 * b * bandwidth / step_bytes(c) for b, c in here]
                axis.plot([b for b, _ in here], counted, linestyle="--", linewidth=0.8, color=f"C{number}")
        axis.set(
            xscale="log", yscale="log", title=f"context {context:,}", xlabel="batch size", ylabel="tokens per second"
        )
        axis.set_xticks(
            sorted({c["batch"] for c in cells}), [str(b) for b in sorted({c["batch"] for c in cells})], minor=False
        )
        axis.legend(fontsize=8)
    for axis in list(axes.flat)[len(contexts) :]:
        axis.set_visible(False)
    figure.suptitle(conditions(result), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
