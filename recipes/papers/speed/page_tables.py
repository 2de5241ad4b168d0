"""Results of `surgery bench` as docs/measurements/performance.md shows them: fewer sizes and shorter cells than
`surgery bench --out` has.

attention   milliseconds, a table for each pass
decode      milliseconds, a table for each batch: in a CUDA graph, then eagerly
linear      speed as a multiple of dense, one table of all sizes; rows of dense are milliseconds. One token: in a CUDA
            graph. Structures at half of the parameters are left out: those of `--sizes compressed` have ranks that are
            multiples of 64
model       milliseconds, a table for each title that `surgery bench speed` does not measure
speed       one table: a row for each measure and model
serve       one table: a row for each context and model, with the multiple of the original's speed
"""

from __future__ import annotations

from typing import Any

from surgery.core.tables import command_line
from surgery.eval.speed.context_tables import speed_grids
from surgery.eval.speed.serve_tables import serve_grids
from surgery.eval.speed.tables import FASTER, crossovers, format_ms

Row = dict[str, Any]
Grid = tuple[str, list[str], list[tuple[str, list[str]]]]  # title, columns, (row name, cells)

LEGEND = """\
Cells are medians in milliseconds. Of linears they are speeds as multiples of the dense row, which is in milliseconds;
of speed and serve also multiples (x) or shares (%) of the original. `-`: too slow, or not measured in time."""
SIZES = {
    "attention": (128, *(2**n for n in range(11, 18))),
    "decode": (1024, 65_536),
    "linear": (1, 8192),
    "model": (2048, 8192, 32_768, 131_072),
    "speed": (2048, 32_768, 131_072),
    "serve": (1, 16, 64, 256),  # batches
}
GRAPH = ", CUDA graph"
VERSIONS = ("torch", "triton")


def page_section(result: dict[str, Any]) -> str:
    """Return the section of a result in Markdown, without its heading."""
    named = ", ".join(f"{name} {result['versions'][name]}" for name in VERSIONS if result["versions"].get(name))
    command = command_line(result.get("command")) or f"surgery bench {result['kind']}"
    about = f"{result['device']}, {result['dtype']}, {named}, {result['date']},"
    about += ("\n" if len(about) + len(command) > 116 else " ") + f"`{command}`:"
    return "\n\n".join([about, *_crossover_list(result), *map(_table, grids(result))]) + "\n"


def _crossover_list(result: dict[str, Any]) -> list[str]:
    lines = crossovers(result["rows"], brief=True) if result["kind"] in ("attention", "decode") else []
    lead = f"Sizes from which an implementation stays {FASTER}; one that is not named is so nowhere:"
    return [f"{lead}\n\n" + "\n".join(f"- {line}" for line in lines)] if lines else []


def _table(grid: Grid) -> str:
    title, columns, rows = grid
    head = [f"| | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    body = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]
    return "\n".join([*([f"### {title}", ""] if title else []), *head, *body])


def grids(result: dict[str, Any]) -> list[Grid]:
    """Return the tables of a result."""
    kind, rows = result["kind"], result["rows"]
    key = "batch" if kind == "serve" else "context" if kind == "speed" else "x"
    rows = [row for row in rows if row[key] in SIZES.get(kind, ())] or rows
    if kind == "serve":
        return [serve_grid(rows)]
    if kind == "speed":
        return [speed_grid(rows)]
    rows = [
        row for row in rows if "host_us" not in row and not row["rival"].endswith((", reference", ", multiplied out"))
    ]
    rows = [row for row in rows if "8 heads" not in row["table"]] or rows
    rows = [row for row in rows if row["table"] not in ("model, prefill", "model, decode")]
    if kind == "linear":
        full = [row for row in rows if ", half" not in row["rival"]] if result.get("sizes") != "compressed" else rows
        return [linear_grid(full)] if full else []
    return joined_grids([_grid(title, rows) for title in dict.fromkeys(row["table"] for row in rows)])


def _grid(title: str, rows: list[Row]) -> Grid:
    """Return the milliseconds of one table of the benchmark."""
    here = [row for row in rows if row["table"] == title]
    sizes = sorted({row["x"] for row in here})
    at = {(row["rival"], row["x"]): format_ms(row["ms"]) for row in here if row["ms"]}
    names = [name for name in dict.fromkeys(row["rival"] for row in here) if any(n == name for n, _ in at)]
    return title, [f"{size:,}" for size in sizes], [(name, [at.get((name, x), "-") for x in sizes]) for name in names]


def joined_grids(grids: list[Grid]) -> list[Grid]:
    """Return one grid for each batch of decoding steps: in a CUDA graph and eagerly side by side. Other grids stay."""
    by_title = {title: (columns, dict(rows)) for title, columns, rows in grids}
    joined = []
    for title, columns, rows in grids:
        if title.endswith(GRAPH) and title.removesuffix(GRAPH) in by_title:
            continue
        if f"{title}{GRAPH}" in by_title:
            captured, cells = by_title[f"{title}{GRAPH}"]
            ends = sorted({0, len(columns) - 1})  # eager steps wait for the host: their times hardly depend on the size
            columns, rows = [columns[i] for i in ends], [(name, [times[i] for i in ends]) for name, times in rows]
            empty = ["-"] * len(captured)
            rows = [(name, [*cells.get(name, empty), *eager]) for name, eager in rows]
            columns = [*(f"CUDA graph, {c}" for c in captured), *(f"eager, {c}" for c in columns)]
        joined.append((title, columns, rows))
    return joined


def linear_grid(rows: list[Row]) -> Grid:
    """Return the speeds of all linears: a column for each pass and number of tokens, a row for each size and structure."""
    columns: dict[str, None] = {}
    cells: dict[str, dict[str, str]] = {}
    titles = dict.fromkeys(row["table"] for row in rows)
    for title in titles:
        linear, _, what = title.partition(", ")
        here = [row for row in rows if row["table"] == title]
        sizes = {row["x"] for row in here} - ({1} if what == "forward" and f"{title}{GRAPH}" in titles else set())
        for size in sorted(sizes):
            columns[f"{what}, {size:,}"] = None
        for row in here:
            name = f"{linear.removeprefix('linear ')}, {row['rival']}"
            shown = cells.setdefault(name, {})
            if row["ms"]:
                ratio = row.get("ratio", 1)
                shown[f"{what}, {row['x']:,}"] = format_ms(row["ms"]) if ratio == 1 else f"{ratio:.2f}"
    return "", list(columns), [(n, [c.get(column, "-") for column in columns]) for n, c in cells.items() if c]


def speed_grid(rows: list[Row]) -> Grid:
    """Return the time to the first token of `surgery bench speed`, and decoding and peak memory at the largest batch."""
    last = max(row["batch"] for row in rows)
    shown = ("time to first token, ms", f"decoding, tokens per second, batch {last}", f"peak memory, GB, batch {last}")
    found = [grid for grid in speed_grids(rows) if grid[0] in shown]
    lines = [(f"{title}: {name}", cells) for title, _, models in found for name, cells in models]
    return "", found[0][1] if found else [], lines


def serve_grid(rows: list[Row]) -> Grid:
    """Return the tokens per second of `surgery bench serve`, with the multiple of the original's."""
    lines, columns = [], []
    for title, heads, models in serve_grids(rows):
        context, _, what = title.partition(": ")
        if what == "tokens per second":
            columns = heads
            lines += [(f"{context}, {name}", [cell.partition(" / ")[0] for cell in cells]) for name, cells in models]
    return "", columns, lines
