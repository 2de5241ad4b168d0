"""Benchmark results as terminal tables, Markdown and plots; also those of `surgery bench train`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.eval.speed.context_tables import save_speed_plot, speed_markdown, speed_tables
from surgery.eval.speed.serve_tables import reproduction, save_serve_plot, serve_markdown, serve_tables
from surgery.planning.measured_times import CAPTURED, IN_A_ROW

ResultRow = dict[str, Any]  # of surgery.eval.speed.timer, which brings torch

CELL_LEGEND = (
    "a cell has the median ms, the speedup over the first row, and the share of the roofline's speed (bytes over the "
    "copy "
    "bandwidth or operations over the matrix product rate, whichever takes longer)"
)
FASTER = "faster than the fastest of PyTorch's own"
HOST_LEGEND = (
    "CPU time of an eager call: microseconds until its work is started, the least mean of short bursts of calls; "
    "dense: F.linear"
)


def result_tables(result: dict[str, Any]) -> list[Any]:
    """Return rich tables of a result."""
    from rich.markup import escape
    from rich.table import Table

    if result["kind"] == "train":
        return distill_tables(result) if result.get("stage") == "distill" else training_tables(result)
    if result["kind"] == "serve":
        return serve_tables(result)
    if result["kind"] == "speed":
        return speed_tables(result)
    parts: list[Any] = []
    for title, columns, rows in result_grids(result["rows"]):
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("")
        for column in columns:
            table.add_column(f"{column:,}", justify="right", no_wrap=True)
        for name, cells in rows:
            table.add_row(name, *cells)
        parts += [table, *skipped_notes(result["rows"], title), ""]
    legend = [CELL_LEGEND, *([HOST_LEGEND] if any("host_us" in row for row in result["rows"]) else [])]
    about = [*format_conditions(result), *map(escape, reproduction(result))]
    return [*parts, *crossovers(result["rows"]), "", *legend, *about]


def result_grids(rows: list[ResultRow]) -> list[tuple[str, list[int], list[tuple[str, list[str]]]]]:
    """Return (title, sizes, (implementation, cell per size)): times, then throughput where it is known."""
    grids = []
    for title in dict.fromkeys(row["table"] for row in rows):
        here = [row for row in rows if row["table"] == title]
        grids.append(_make_grid(title, here, format_cell))
        kind = title.split(",")[0]
        if kind == "model":
            grids.append(_make_grid(f"{title}, tokens per second", here, tokens_per_second))
        if title == "model, prefill":
            grids.append(
                _make_grid(f"{title}, peak GB beside weights", here, lambda row: format_in_units(row.get("peak"), 1e9))
            )
        if kind == "decode" and not title.endswith((CAPTURED, IN_A_ROW)):
            grids.append(_make_grid(f"{title}, cache in MB", here, lambda row: format_in_units(row.get("cache"), 1e6)))
    return grids


def _make_grid(
    title: str, rows: list[ResultRow], shown: Callable[[ResultRow], str]
) -> tuple[str, list[int], list[tuple[str, list[str]]]]:
    columns = sorted({row["x"] for row in rows})
    at = {(row["rival"], row["x"]): shown(row) for row in rows if row["ms"]}
    names = dict.fromkeys(row["rival"] for row in rows)
    lines = [(name, [at.get((name, x), "-") for x in columns]) for name in names]
    return title, columns, [line for line in lines if set(line[1]) != {"-"}]


def tokens_per_second(row: ResultRow) -> str:
    """Format the throughput of a row: of the whole prompt in prefill, of one token in decoding."""
    tokens = row["x"] if "prefill" in row["table"] else 1
    return f"{tokens / row['ms'] * 1e3:,.0f}"


def format_in_units(count: float | None, unit: float) -> str:
    """Format a count in multiples of a unit, with two decimals below 100; "-" for None."""
    return "-" if count is None else f"{count / unit:,.{0 if count >= 100 * unit else 2}f}"


def format_cell(row: ResultRow) -> str:
    """Format ms, or the CPU's microseconds, speedup over the table's first row, and share of the roofline's speed."""
    parts = [f"{row['host_us']:.1f} us" if "host_us" in row else format_ms(row["ms"])]
    if "ratio" in row and row["ratio"] != 1:
        parts.append(f"{row['ratio']:.2f}x")
    if row.get("fraction"):
        parts.append(f"{row['fraction']:.0%}")
    return " ".join(parts)


def format_ms(ms: float) -> str:
    """Format milliseconds with three digits."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.{2 if ms < 10 else 1}f}" if ms >= 1 else f"{ms:.3g}"


def skipped_notes(rows: list[ResultRow], title: str) -> list[str]:
    """Return a line per reason for implementations that were not measured."""
    names_by_reason: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row["table"] == title and row.get("note"):
            reason = "left out, too slow" if row["note"].startswith("left out") else row["note"]
            names_by_reason.setdefault(reason, {}).setdefault(row["rival"], []).append(f"{row['x']:,}")
    every = {
        reason: ", ".join(f"{name} ({' '.join(sizes)})" for name, sizes in names.items())
        for reason, names in names_by_reason.items()
    }
    return [f"  {reason}: {names}" for reason, names in every.items()]


def is_comparison_only(row: ResultRow) -> bool:
    """Return whether a row is only for comparison, and never the fastest choice in practice."""
    return row["rival"].endswith((", reference", ", multiplied out"))


def crossovers(rows: list[ResultRow], brief: bool = False) -> list[str]:
    """Return per table the size from which an implementation stays faster than all of torch's own.

    brief: without the words that repeat, and without the implementations that are faster nowhere.
    """
    lines = []
    for title in dict.fromkeys(row["table"] for row in rows if row["x"] != rows[0]["x"]):
        here = [row for row in rows if row["table"] == title and row["ms"]]
        torchs = [row for row in here if row.get("op") == "original" or row["rival"] == here[0]["rival"]]
        best = {x: min(r["ms"] for r in torchs if r["x"] == x) for x in {r["x"] for r in torchs}}
        ahead: dict[str, list[str]] = {}
        for name in dict.fromkeys(row["rival"] for row in here if row not in torchs and not is_comparison_only(row)):
            at = sorted((r["x"], r["ms"] < best[r["x"]]) for r in here if r["rival"] == name and r["x"] in best)
            behind = [x for x, wins in at if not wins]
            since = [x for x, _ in at if not behind or x > behind[-1]]
            ahead.setdefault(f"from {since[0]:,}" if since else "nowhere", []).append(name.removesuffix(", kernel"))
        sizes = {where: f"{where} {' · '.join(names)}" for where, names in ahead.items()}
        if brief:
            sizes.pop("nowhere", None)
        what = title if brief else f"{title}, {FASTER}"
        lines.append(f"{what}: {'; '.join(sizes.values()) or 'nowhere'}")
    return lines


def format_conditions(result: dict[str, Any]) -> list[str]:
    """Return device, dtype, versions, date and ceilings in a few lines."""
    limits, versions = result["ceilings"], result["versions"]
    several = result.get("processes", 1)  # each speedup is relative to the first row of the same process
    ends = f"; measured in {several} processes" if several > 1 else ""
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return [
        f"{result['device']}, {result['dtype']}, {named}, {result['date']}; copy {limits['copy'] / 1e12:.2f} TB/s, "
        f"matrix product {limits['rate'] / 1e12:,.1f} TFLOP/s{ends}" + ("" if result["complete"] else "; stopped early")
    ]


def markdown(result: dict[str, Any]) -> str:
    """Return a result in Markdown."""
    if result["kind"] in ("serve", "speed"):
        return serve_markdown(result) if result["kind"] == "serve" else speed_markdown(result)
    lines = []
    for title, columns, rows in result_grids(result["rows"]):
        lines += [f"### {title}", "", "| | " + " | ".join(f"{c:,}" for c in columns) + " |"]
        lines += ["| --- |" + " --- |" * len(columns)]
        lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows]
        lines += ["", *(f"- {note.strip()}" for note in skipped_notes(result["rows"], title)), ""]
    ahead = [f"- {line}" for line in crossovers(result["rows"], brief=True)]
    lead = f"Sizes from which an implementation stays {FASTER}; one that is not named is so nowhere:"
    ahead = [lead, "", *ahead] if ahead else []
    command = [f"{line}\n" for line in reproduction(result)]
    return "\n".join([*format_conditions(result), "", *command, *ahead, *([""] if ahead else []), *lines])


def save_plot(result: dict[str, Any], path: Path) -> None:
    """Draw ms against size, one figure per table; of `serve` tokens per second by batch size, of `speed` all measures
    by context.
    """
    try:
        import matplotlib
    except ImportError:
        raise SurgeryError("--plot needs matplotlib: pip install matplotlib") from None
    if result.get("kind") in ("serve", "speed"):
        save_serve_plot(result, path) if result["kind"] == "serve" else save_speed_plot(result, path)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    titles = {row["table"] for row in result["rows"]}
    every = [grid for grid in result_grids(result["rows"]) if grid[0] in titles]
    shown = [grid for grid in every if len(grid[1]) > 1] or every
    across = min(2, len(shown))
    down = -(-len(shown) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(7.5 * across, 5 * down), squeeze=False)
    for (title, _, rows), axis in zip(shown, axes.flat):
        for name, _ in rows:
            points = [
                (r["x"], r["ms"]) for r in result["rows"] if (r["table"], r["rival"]) == (title, name) and r["ms"]
            ]
            axis.plot(*zip(*sorted(points)), marker=".", label=name, linestyle="--" if "reference" in name else "-")
        axis.set(xscale="log", yscale="log", title=title, ylabel="ms")
        axis.legend(fontsize=6)
    figure.suptitle(format_conditions(result)[0], fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def lost_share(row: dict[str, Any]) -> float | None:
    """Return the share of the bare loop's speed that surgery's loop loses; None without a bare loop."""
    if "bare_ms" not in row or "ours_ms" not in row:
        return None
    return 1 - row["bare_ms"] / row["ours_ms"]


def training_line(row: dict[str, Any]) -> str:
    """Return a training row on one line."""
    if "ours_ms" not in row:
        return f"{row['case']}, {row['change']}: {row.get('note', 'not run')}"
    said = [f"surgery {row['ours_ms']:.4g} ms, {row['ours_tokens_per_second']:,.0f} tokens/s"]
    if row["ours_peak"]:
        said.append(f"{row['ours_peak'] / 1e9:.1f} GB")
    if (share := lost_share(row)) is not None:
        said.append(f"bare {row['bare_ms']:.4g} ms, {row['bare_tokens_per_second']:,.0f} tokens/s, {share:+.1%} lost")
    return f"{row['case']}, {row['change']}: " + " | ".join(said)


def training_tables(result: dict[str, Any]) -> list[Any]:
    """Return the training rows as rich tables."""
    from rich.markup import escape
    from rich.table import Table

    grid = Table(
        title="training, tokens per second", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for column in ("", "", "bare loop", "surgery", "lost", "peak GB, bare", "surgery"):
        grid.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for row in result["rows"]:
        share = lost_share(row)
        speeds = [row.get(f"{who}_tokens_per_second") for who in ("bare", "ours")]
        peaks = [row.get(f"{who}_peak") for who in ("bare", "ours")]
        grid.add_row(
            row["case"],
            row["change"],
            *(f"{speed:,.0f}" if speed else row.get("note", "-") for speed in speeds),
            f"{share:.1%}" if share is not None else "-",
            *(f"{peak / 1e9:.1f}" if peak else "-" for peak in peaks),
        )
    where = (
        f"{result['device']}, {result['processes']} process{'es' if result['processes'] > 1 else ''}, "
        f"{result['precision']}, {result['date']}"
    )
    return [grid, where, *map(escape, reproduction({**result, "processes": 1}))]


def distill_line(row: dict[str, Any]) -> str:
    """Return a row of `bench train --stage distill` on one line."""
    where = f"{row['case']}, {row['change']}: "
    if "ms" not in row:
        return where + row.get("note", "not run")
    if "ratio" in row:
        said = [f"{row['ms']:.4g} ms, the original {row['original_ms']:.4g} ms, {row['ratio']:.2f}x its time"]
    else:
        said = [f"{row['tokens_per_second']:,.0f} tokens/s, {row['ms']:.4g} ms a step"]
    if "share_of_peak" in row:
        said.append(f"{row['share_of_peak']:.1%} of the peak")
    if "card" in row:
        said.append(" / ".join(f"{row[key] / 1e9:.1f}" for key in ("allocated", "reserved", "card")) + " GB")
    if "seconds_to_full_speed" in row:
        said.append(
            f"full speed after {row['seconds_to_full_speed']:.1f} s{' ' + row['start'] if 'start' in row else ''}"
        )
    if references := row.get("references"):
        said.append("on the reference: " + "; ".join(f"{name} ({why})" for name, why in references.items()))
    return where + " | ".join(said)


def distill_tables(result: dict[str, Any]) -> list[Any]:
    """Return the rows of `bench train --stage distill` as rich tables: figures, then parts and kernels of each row."""
    from rich.markup import escape
    from rich.table import Table

    grid = Table(title="healing", title_justify="left", title_style="bold", box=None, pad_edge=False)
    columns = ("tokens/s", "of the peak", "allocated GB", "reserved", "card", "s to full speed", "on the reference")
    for column in ("", "", *columns):
        grid.add_column(column, justify="left" if not column else "right", no_wrap=True)
    steps: list[str] = []
    for row in result["rows"]:
        if "ratio" in row or "ms" not in row:
            steps.append(distill_line(row))
            continue
        memory = [f"{row[key] / 1e9:.1f}" if key in row else "-" for key in ("allocated", "reserved", "card")]
        share = f"{row['share_of_peak']:.1%}" if "share_of_peak" in row else "-"
        start = f"{row['seconds_to_full_speed']:.1f}{' ' + row['start'] if 'start' in row else ''}"
        references = ", ".join(row["references"]) or "none" if "references" in row else "-"
        grid.add_row(row["case"], row["change"], f"{row['tokens_per_second']:,.0f}", share, *memory, start, references)
    parts = [line for row in result["rows"] for line in kernel_lines(row)]
    devices = f"{result['processes']} process{'es' if result['processes'] > 1 else ''}"
    where = f"{result['device']}, {devices}, {result['precision']}, {result['date']}"
    return [grid, *map(escape, steps), "", *map(escape, parts), where]


def kernel_lines(row: dict[str, Any]) -> list[str]:
    """Return the shares of parts and of the longest kernels in a row's GPU time, as lines."""
    lines = []
    if "parts" in row:
        shares = ", ".join(f"{part} {share:.0%}" for part, share in row["parts"].items())
        lines.append(f"{row['case']}, {row['change']}, parts of an eager step ({row['eager_gpu_ms']:.4g} ms): {shares}")
    if "kernels" in row:
        kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in row["kinds"].items())
        lines.append(
            f"{row['case']}, {row['change']}, kernels of a step ({row['gpu_ms']:.4g} of {row['ms']:.4g} ms, "
            f"{row['launches']:,} launches): {kinds}"
        )
        lines += [f"  {kernel['share']:6.1%}  {kernel['kind']}: {kernel['kernel']}" for kernel in row["kernels"]]
    return lines
