"""The tables "at equal bytes" of docs/measurements/quality.md, from the rows that quantized.py and quantized_times.py
wrote.

python -m recipes.papers.quality.equal_bytes [ROWS.jsonl ..]                    print all tables, with bytes, needles and every way
python -m recipes.papers.quality.equal_bytes [ROWS.jsonl ..] --write docs/measurements/quality.md      the table over all models

Without files, the rows are those of recipes/papers/quality/rows/equal_bytes.jsonl. Of rows of the same thing, the last
counts. Ratios, intervals and shares are computed from the losses and answers in the rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from recipes.papers.quality.quantized import KEYS, read_rows, stored_result
from recipes.papers.script import run_script
from surgery.core.errors import SurgeryError
from surgery.core.files import atomic_write
from surgery.eval.results.statistics import Units, wilson_interval
from surgery.eval.suites import perplexity as ppl

ROWS = Path(__file__).parent / "rows" / "equal_bytes.jsonl"  # results that belong to the repository
BEGIN, END = "<!-- bytes -->\n", "<!-- /bytes -->\n"
SHAPES = {"27m": "27M decoder", "1b": "1B"}
SHAPE_OF = {"pycode-27m": "27m"}  # shape with the sizes of a model
TITLES = {"pycode-27m": "27M decoder", "pycode-qwen3": "18M decoder"}
WAYS = ("", "fused", "packed", "multiplied out", "compiled", "kernel", "torchao", "torchao compiled")  # "": 16 bits
MAX_ERROR = 0.05  # relative; a way that differs more is not computing the same integers
Row = dict[str, Any]


def latest(rows: list[Row], keys: tuple[str, ...]) -> list[Row]:
    """Return the last row of each thing that was measured."""
    return list({str([row.get(key) for key in keys]): row for row in rows}.values())


def linears(row: Row) -> str:
    """Return the first cell of a row."""
    name = {"low_rank": "low rank", "btt": "BTT", "auto": "`auto`"}.get(row["linears"], row["linears"])
    return "dense" if row["keep"] == 1 else f"{name}, {row['keep']:.0%}"


def table(lines: list[list[str]]) -> str:
    """Return a Markdown table; the first line is its head."""
    head, *rest = lines
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rest])


# -- quality -------------------------------------------------------------------------------------------
def original_of(model: str, rows: list[Row]) -> Row:
    """Return the row of the dense model in 16 bits. Raises SurgeryError without one."""
    for row in rows:
        if row["model"] == model and row["keep"] == 1 and row["bits"] == 16:
            return row
    raise SurgeryError(f"there is no row of the original, {model} in 16 bits. Measure it: --only 'dense, 16'")


def quality_table(model: str, rows: list[Row], times: list[Row]) -> str:
    """Return the table of a model: rows by bytes, the largest first.

    Raises SurgeryError without a row of the original.
    """
    base = original_of(model, rows)
    wanted = [shape for shape in dict.fromkeys((SHAPE_OF.get(model), "1b")) if shape is not None]
    shapes = [shape for shape in wanted if any(row["shape"] == shape for row in times)]
    head = ["linears", "bits", "bytes", "of 16 bits", "perplexity, ratio", "needles, %"]
    lines = [[*head, *(f"decoding, {SHAPES[shape]}, ms" for shape in shapes)]]
    for row in sorted(rows, key=lambda row: -row["bytes"]):
        score = ppl.summarize(stored_result(row), stored_result(base))
        ratio = "1" if row is base else ppl.format_interval(score["ratio"], ".3f")
        cells = [linears(row), str(row["bits"]), f"{row['bytes']:,}", f"{row['bytes'] / base['bytes']:.3f}", ratio]
        cells.append(needle_cell(row))
        lines.append([*cells, *(fastest_cell(times, shape, row) for shape in shapes)])
    return table(lines)


def needle_cell(row: Row) -> str:
    """Format the share of needles found with Wilson's 95% interval."""
    answers = np.array([float(answer) for answer in row.get("answers", "")])
    if not len(answers):
        return ""
    low, high = wilson_interval(Units(answers, np.ones(len(answers))))
    return f"{100 * answers.mean():.1f} [{100 * low:.1f}, {100 * high:.1f}]"


# -- times ---------------------------------------------------------------------------------------------
def step_ms(row: Row) -> float | None:
    """Return ms of a step, captured in a graph if it could be; None if it was not measured or computes something
    else.
    """
    if row.get("error", 0.0) > MAX_ERROR:
        return None
    return row.get("graph_ms", row.get("eager_ms"))


def find_times(times: list[Row], shape: str, keep: float, bits: int) -> list[Row]:
    """Return the measured ways of a row in a shape, the fastest first.

    Linears of a structure are timed as low rank only.
    """
    found = [row for row in times if (row["shape"], row["keep"], row["bits"]) == (shape, keep, bits)]
    return sorted((row for row in found if step_ms(row) is not None), key=lambda row: step_ms(row) or 0.0)


def fastest_cell(times: list[Row], shape: str, row: Row) -> str:
    """Format the fastest way of a row: ms of a step, ratio to the original, and the way."""
    if row["keep"] < 1 and row["linears"] != "low_rank":
        return ""
    found, base = find_times(times, shape, row["keep"], row["bits"]), find_times(times, shape, 1.0, 16)
    if not found or not base:
        return ""
    way = f", {found[0]['way']}" if found[0]["way"] else ""
    return f"{time_cell(found[0], base[0])}{way}"


def time_cell(row: Row, base: Row, kind: str | None = None) -> str:
    """Format ms of a step and its ratio to the original. kind: "graph_ms" or "eager_ms"; None: the graph's, if there is
    one.
    """
    ms, first = (step_ms(row), step_ms(base)) if kind is None else (row.get(kind), base.get(kind))
    return "" if ms is None or first is None else f"{ms:.3g} ({ms / first:.2f})"


def times_table(shape: str, times: list[Row]) -> str:
    """Return the table of a shape: rows (linears, bits), a column for each way."""
    base = next(iter(find_times(times, shape, 1.0, 16)), None)
    if base is None:
        raise SurgeryError(
            f"there are no times of the original of the shape {shape}. Measure them again, without --only"
        )
    here = [row for row in times if row["shape"] == shape]
    ways = [way for way in WAYS if any(row["way"] == way and step_ms(row) is not None for row in here)]
    kind = "graph" if "graph_ms" in base else "eager"
    lines = [
        ["linears", "bits", *(way or "16 bits" for way in ways), f"as stored, {'eager' if kind == 'graph' else kind}"]
    ]
    order = sorted(dict.fromkeys((row["keep"], row["bits"]) for row in here), key=lambda one: (-one[0], -one[1]))
    for keep, bits in order:
        by_way = {row["way"]: row for row in find_times(times, shape, keep, bits)}
        name = "dense" if keep == 1 else f"low rank, {keep:.0%}"
        cells = [time_cell(by_way[way], base) if way in by_way else "" for way in ways]
        stored = next((by_way[way] for way in ("", "packed", "multiplied out") if way in by_way), None)
        lines.append([name, str(bits), *cells, time_cell(stored, base, "eager_ms") if stored else ""])
    return table(lines)


def missing_notes(times: list[Row]) -> list[str]:
    """Return a line for each way that was not measured, with the reason."""
    lines: dict[str, list[str]] = {}
    for row in times:
        reason = row.get("note") or (f"differs by {row['error']:.2g}" if row.get("error", 0.0) > MAX_ERROR else None)
        if reason:
            lines.setdefault(reason, []).append(
                f"{SHAPES.get(row['shape'], row['shape'])}, {linears(row)}, {row['bits']} bits, {row['way']}"
            )
    return [f"- Not measured: {'; '.join(names)}. {reason}" for reason, names in lines.items()]


# -- page ----------------------------------------------------------------------------------------------
def latest_rows(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Return (rows of quality, rows of times), the last of each thing that was measured."""
    quality = latest([row for row in rows if row["kind"] == "quality"], KEYS)
    times = latest([row for row in rows if row["kind"] == "times"], ("shape", "keep", "bits", "way"))
    return quality, times


def ratio_cell(row: Row, rows: list[Row]) -> str:
    """Format the ratio of a row's perplexity to that of the original of the same model."""
    base = original_of(row["model"], rows)
    return (
        "1"
        if row is base
        else ppl.format_interval(ppl.summarize(stored_result(row), stored_result(base))["ratio"], ".3f")
    )


def section(rows: list[Row]) -> str:
    """Return everything between the marks of the page: a table with a column of ratios for each model, and its
    conditions.
    """
    quality, times = latest_rows(rows)
    models = list(dict.fromkeys(row["model"] for row in quality))
    timed = any(row["shape"] == "1b" for row in times)
    head = ["linears", "bits", "bytes", *(f"ratio, {TITLES.get(model, model)}" for model in models)]
    lines = [[*head, *(["decoding, 1B, ms"] if timed else [])]]
    kinds: dict[tuple[str, int], list[Row]] = {}
    for row in quality:
        kinds.setdefault((linears(row), row["bits"]), []).append(row)
    share = {
        kind: f"{found[0]['bytes'] / original_of(found[0]['model'], quality)['bytes']:.2f}"
        for kind, found in kinds.items()
    }
    for kind in sorted(kinds, key=lambda kind: -float(share[kind])):
        cells = {row["model"]: ratio_cell(row, quality) for row in kinds[kind]}
        speed = [fastest_cell(times, "1b", kinds[kind][0])] if timed else []
        lines.append([kind[0], str(kind[1]), share[kind], *(cells.get(model, "") for model in models), *speed])
    about = "; ".join(dict.fromkeys(f"{row['scored']:,} tokens in windows of {row['length']:,}" for row in quality))
    if timed:
        first = next(row for row in times if row["shape"] == "1b")
        about += f". Decoding: {first['context']:,} tokens before it, {first['device']}, torch {first['torch']}"
    return f"{about}:\n\n{table(lines)}\n"


def all_tables(rows: list[Row]) -> str:
    """Return a table of each model, with bytes and needles, and of each shape, with the times of every way."""
    quality, times = latest_rows(rows)
    parts = []
    for model in dict.fromkeys(row["model"] for row in quality):
        here = [row for row in quality if row["model"] == model]
        parts += [f"{TITLES.get(model, model)}, {conditions(here)}:", quality_table(model, here, times)]
    for shape in dict.fromkeys(row["shape"] for row in times):
        first = next(row for row in times if row["shape"] == shape)
        about = f"{first['context']:,} tokens before it, {first['device']}, torch {first['torch']}, {first['date']}"
        parts += [f"A step of decoding, {SHAPES.get(shape, shape)}, {about}:", times_table(shape, times)]
    if not times:
        parts.append("Decoding times have not been measured.")
    notes = missing_notes(times)
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])]) + "\n"


def conditions(rows: list[Row]) -> str:
    """Return on what the rows of a model were measured, in words."""
    first = rows[0]
    asked = next((row for row in rows if row.get("answers")), None)
    text = f"{first['scored']:,} tokens in windows of {first['length']:,}"
    if asked is None:
        return text
    return f"{text}, {len(asked['answers'])} needles at {' and '.join(f'{n:,}' for n in asked['lengths'])} tokens"


def update_page(text: str, rows: list[Row], path: Path) -> str:
    """Return the page with the table between its marks. Raises SurgeryError if it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SurgeryError(f"{path} has no marks {BEGIN.strip()} and {END.strip()}. Give the page that has them")
    return f"{before}{BEGIN}{section(rows)}{END}{after}"


def main() -> None:
    """Print the tables, or write the first one into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="*", help="Files of rows. Default: those of the repository.")
    parser.add_argument("--write", type=Path, help="Page to write the table over all models into, between its marks.")
    arguments = parser.parse_args()
    rows = [row for path in arguments.rows or [ROWS] for row in read_rows(path)]
    if arguments.write is None:
        print(f"{section(rows)}\n{all_tables(rows)}")
        return
    text = update_page(arguments.write.read_text(encoding="utf-8"), rows, arguments.write)
    with atomic_write(arguments.write, "w") as file:
        file.write(text)
    print(arguments.write)


if __name__ == "__main__":
    run_script(main)
