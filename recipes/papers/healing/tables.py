"""Tables and figures of the results of recipes/papers/healing/suites.py.

One table with a column per conversion, one with a line per conversion, needle heat maps, and losses by position.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Parts = dict[str, Any]  # part of recipes/papers/healing/suites.py -> evaluation_record
WIDTH = 33  # positions in a running mean
ANSWER_METRICS = ("accuracy", "score")  # names of the share of questions answered


def load_parts(places: list[Path]) -> dict[str, Parts]:
    """Return the results by conversion, in the order given; of a folder, by name."""
    files = [file for place in places for file in (sorted(place.glob("*.json")) if place.is_dir() else [place])]
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


# -- table -----------------------------------------------------------------------------------------
def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what identifies a row across conversions."""
    return row["suite"], row["task"], row["metric"]["name"], tuple(sorted(row["group"].items()))


def is_table_row(row: dict[str, Any]) -> bool:
    """Return whether a row is shown: main metrics in total and by length, losses by position, and speed without peak memory."""
    name, group = row["metric"]["name"], set(row["group"])
    if row["suite"] == "speed":
        return name in ("prefill_ms", "decode_ms", "cache_mb") and group == {"length"}
    return (name in ("nll", *ANSWER_METRICS) and group <= {"length"}) or group == {"position"}


def select_rows(found: dict[str, Parts]) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    """Return row -> conversion -> its values."""
    table: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for name, parts in found.items():
        rows = [row for part in parts.values() for row in part["rows"] if is_table_row(row)]
        asks = {row["suite"] for row in rows if row["metric"]["name"] in ANSWER_METRICS}
        for row in rows:
            if row["suite"] not in asks or row["metric"]["name"] in ANSWER_METRICS:
                table.setdefault(row_key(row), {})[name] = row
    return table


def row_label(row: dict[str, Any]) -> str:
    """Return a row's title: task or metric, group and unit."""
    title = row["metric"]["title"] or row["metric"]["name"]
    group = "".join(f", {'to ' if name == 'position' else ''}{value:,}" for name, value in row["group"].items())
    unit = row["metric"]["unit"]
    task = row["task"] if row["suite"] != "speed" else title
    return f"`{task}`{group}" + (f", {unit}" if unit and unit not in ("nats",) else "")


def format_value(row: dict[str, Any], role: str) -> str:
    """Format a model's value with its standard error."""
    error = row["errors"].get(role)
    shown = f"{row['values'][role]:.4g}"
    return shown if not error or row["suite"] == "speed" else f"{shown} ± {error:.2g}"


def format_change(row: dict[str, Any]) -> str:
    """Format the ratio for perplexities and times, the difference otherwise, with its 95% interval."""
    if row["suite"] == "speed":
        return f"x {row['values']['converted'] / row['values']['base']:.2f}"
    ratio = row["metric"]["kind"] == "ppl"
    found, form, sign = (row["ratio"], ".3f", "x ") if ratio else (row["difference"], "+.3g", "")
    ends = "" if found["low"] is None else f" [{found['low']:{form.strip('+')}}, {found['high']:{form.strip('+')}}]"
    return f"{sign}{found['change']:{form}}{ends}"


def markdown(found: dict[str, Parts]) -> str:
    """Return the table with a column per conversion."""
    lines = ["| | n | original | " + " | ".join(found) + " |", "|" + " --- |" * (3 + len(found))]
    for by_name in select_rows(found).values():
        first = next(iter(by_name.values()))
        cells = [
            "" if (row := by_name.get(name)) is None else f"{format_value(row, 'converted')}, {format_change(row)}"
            for name in found
        ]
        guess = " (no evidence: guesses)" if any("no evidence" in flag for flag in first["flags"]) else ""
        line = [row_label(first), f"{first['samples']:,}", format_value(first, "base") + guess, *cells]
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def change_table(found: dict[str, Parts]) -> str:
    """Return the table with a line per conversion: its change from the original, whose values come first."""
    table = {key: by_name for key, by_name in select_rows(found).items() if key[0] != "speed"}
    firsts = [next(iter(by_name.values())) for by_name in table.values()]
    lines = ["| | " + " | ".join(map(row_label, firsts)) + " |", "|" + " --- |" * (1 + len(firsts))]
    lines.append("| original | " + " | ".join(format_value(row, "base") for row in firsts) + " |")
    for name in found:
        cells = [format_change(by_name[name]) if name in by_name else "" for by_name in table.values()]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


# -- figures ---------------------------------------------------------------------------------------
def needle_maps(found: dict[str, Parts], task: str) -> dict[str, dict[tuple[float, float], float]]:
    """Return model -> (length, depth) -> share of questions answered; the original first."""
    shown: dict[str, dict[tuple[float, float], float]] = {}
    for name, parts in found.items():
        for row in (row for part in parts.values() for row in part["rows"]):
            cell = row["metric"]["name"] in ANSWER_METRICS and set(row["group"]) == {"length", "depth"}
            if row["task"] == task and cell:
                where = (row["group"]["length"], row["group"]["depth"])
                shown.setdefault("original", {})[where] = row["values"]["base"] / row["metric"]["scale"]
                shown.setdefault(name, {})[where] = row["values"]["converted"] / row["metric"]["scale"]
    return shown


def make_figure(columns: int, rows: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return (figure, flat array of its axes). size: inches of one panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False).flatten()


def draw_maps(shown: dict[str, dict[tuple[float, float], float]], title: str, path: Path) -> None:
    """Draw needle heat maps side by side."""
    columns = min(3, len(shown))
    figure, every = make_figure(columns, -(-len(shown) // columns), (3.2, 2.4))
    for axes in every[len(shown) :]:
        axes.set_axis_off()
    for axes, (name, table) in zip(every, shown.items()):
        lengths, depths = (sorted({key[i] for key in table}) for i in (0, 1))
        grid = [[table[length, depth] for length in lengths] for depth in depths]
        axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], fontsize=8)
        axes.set_yticks(range(len(depths)), [f"{d:g}" for d in depths], fontsize=8)
        axes.set_title(name, fontsize=9)
        for i, row in enumerate(grid):
            for j, share in enumerate(row):
                colour = "black" if share > 0.6 else "white"
                axes.text(j, i, f"{100 * share:.0f}", ha="center", va="center", color=colour, fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(str(path), dpi=80)


def smooth(values: list[float]) -> list[float]:
    """Return the running mean over WIDTH positions, over fewer at the ends."""
    half = WIDTH // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]


def draw_positions(found: dict[str, Parts], path: Path) -> None:
    """Draw losses by position."""
    from matplotlib import colormaps

    curves = {name: parts["reading"]["by_position"] for name, parts in found.items() if "reading" in parts}
    figure, (axes,) = make_figure(1, 1, (7.0, 3.6))
    base = next(iter(curves.values()))["base"]
    axes.set_prop_cycle(color=[colormaps["tab20"](i) for i in range(20)])
    axes.plot(range(1, len(base) + 1), smooth(base), "k--", linewidth=1.2, label="original", zorder=3)
    for name, roles in curves.items():
        axes.plot(range(1, len(base) + 1), smooth(roles["converted"]), linewidth=1.2, label=name)
    axes.set(xlabel="position in the window", ylabel="nats per token", xscale="log")
    axes.set_title(f"running mean of {WIDTH} positions", fontsize=9)
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize=7)
    figure.savefig(str(path), dpi=80)


def show(places: list[Path], figures: str | None) -> None:
    """Print the tables and write the figures."""
    found = load_parts(places)
    print(markdown(found), change_table(found), sep="\n\n")
    if figures is None:
        return
    draw_positions(found, Path(f"{figures}-position.png"))
    tasks = {row["task"] for parts in found.values() for part in parts.values() for row in part["rows"]}
    for task in sorted(tasks & {"needle", "needle-rank", "niah_story"}):
        title = f"{task}: % answered, by length (across, tokens) and depth (down)"
        draw_maps(needle_maps(found, task), title, Path(f"{figures}-{task}.png"))
