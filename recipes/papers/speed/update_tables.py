"""Update kernels/tuning.json and docs/measurements/performance.md from files written by `surgery bench --out`.

    python -m recipes.papers.speed.update_tables linear.json attention.json decode.json model.json
    python -m recipes.papers.speed.update_tables --add compressed.json
    python -m recipes.papers.speed.update_tables speed.json

Several files of one kind are merged. The first three kinds determine kernels/tuning.json, the fastest implementation by
op and size (kernels/tuning.py); all go between the <!-- bench --> marks of docs/measurements/performance.md. What the
files do not measure stays as it was: rows of the table, sections of the page. Linears of `--sizes compressed` have a
section of their own. The page has the sizes and cells that recipes/papers/speed/page_tables.py names, and leaves out
implementations that a row "as chosen" stands for; kernels/tuning.json has all times. `--add` changes kernels/tuning.json alone, for results of a few sizes whose tables should not
replace the page's. Run from a clone.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from recipes.papers.script import run_script
from recipes.papers.speed.page_tables import LEGEND, page_section
from surgery.eval.speed.serve_tables import conditions
from surgery.eval.speed.tables import format_conditions
from surgery.planning.measured_times import tuning_tables

ROOT = Path(__file__).resolve().parents[3]
PAGE, TABLE = ROOT / "docs/measurements/performance.md", ROOT / "kernels/tuning.json"
WHOLE = ("speed", "serve")  # kinds whose files are not merged: the last of each kind and dtype is shown
CHOSEN, WAYS = ", as chosen", ("kernel", "reference", "multiplied out")  # ends of the names of implementations
BEGIN, END = "<!-- bench -->\n", "<!-- /bench -->\n"


def merge_results(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge results of the same kind, dtype and section of the page; the first run's row wins."""
    kinds: dict[str, dict[str, Any]] = {}
    for result in results:
        one = kinds.setdefault(heading(result), {**result, "rows": [], "processes": 0})
        one["processes"] += 1
        known = {(row["table"], row["x"], row["rival"]) for row in one["rows"] if row["ms"]}
        one["rows"] += [row for row in result["rows"] if (row["table"], row["x"], row["rival"]) not in known]
        one["complete"] &= result["complete"]
    for title, one in kinds.items():
        dates = sorted({r.get("date", "") for r in results if heading(r) == title})
        one["date"] = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        got = {(row["table"], row["x"], row["rival"]) for row in one["rows"] if row["ms"]}
        one["rows"] = [row for row in one["rows"] if row["ms"] or (row["table"], row["x"], row["rival"]) not in got]
    return list(kinds.values())


def keep_unmeasured(tables: list[dict[str, Any]], old: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tables with the rows of the old ones that they do not measure.

    Old rows of the same device and versions join a table, others stay in a table of their own, before it. Rows of other
    devices all stay.
    """
    kept = []
    for before in old:
        same = [t for t in tables if all(t[name] == before[name] for name in ("device", "dtype"))]
        measured = {_row_key(row) for table in same for row in table["rows"]}
        rows = [row for row in before["rows"] if _row_key(row) not in measured]
        joined = next((t for t in same if all(t[name] == before[name] for name in ("device", "versions"))), None)
        if joined is None:
            kept += [{**before, "rows": rows}] if rows else []
        elif rows:
            dates = sorted({date for t in (before, joined) for date in t["date"].split(" to ")})
            joined["date"] = " to ".join(dict.fromkeys((dates[0], dates[-1])))
            joined["rows"] = [*rows, *joined["rows"]]
    return [*kept, *tables]


def _row_key(row: dict[str, Any]) -> str:
    return json.dumps([row["op"], row["pass"], row["sizes"]], sort_keys=True)


def format_json(tables: list[dict[str, Any]]) -> str:
    """Format as JSON with one line per row."""
    parts = []
    for table in tables:
        head = json.dumps({name: value for name, value in table.items() if name != "rows"})
        rows = ",\n  ".join(json.dumps(row) for row in table["rows"])
        parts.append(f'{head[:-1]}, "rows": [\n  {rows}\n ]}}')
    return '{"tables": [\n ' + ",\n ".join(parts) + "\n]}\n"


def shown_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the page's tables: of each structure the row "as chosen", named without these words, if it was
    measured, else the kernel, and other implementations that are faster than the kernel at some size.
    """
    times = {(row["table"], row["rival"], row["x"]): row["ms"] for row in rows if row["ms"]}
    chosen = {(row["table"], row["rival"].removesuffix(CHOSEN)) for row in rows if row["rival"].endswith(CHOSEN)}
    useful = set()  # (table, comparison) that is faster than the kernel at some size, or is the only one there
    for (table, rival, x), ms in times.items():
        if ms < times.get((table, f"{rival.rpartition(', ')[0]}, kernel", x), float("inf")):
            useful.add((table, rival))
    shown = []
    for row in rows:
        table, rival = row["table"], row["rival"]
        base, _, way = rival.rpartition(", ")
        if rival.endswith(CHOSEN):
            shown.append({**row, "rival": rival.removesuffix(CHOSEN)})
        elif way not in WAYS or ((table, base) not in chosen and (way == "kernel" or (table, rival) in useful)):
            shown.append(row)
    return shown


def update_page(text: str, results: list[dict[str, Any]]) -> str:
    """Return the page with these results between its marks. Sections of kinds that the results lack stay."""
    before, _, rest = text.partition(BEGIN)
    between, mark, after = rest.partition(END)
    assert mark, f"{PAGE} has no marks {BEGIN.strip()} .. {END.strip()}"
    old = [part for part in re.split(r"^(?=## )", between, flags=re.MULTILINE) if part.startswith("## ")]
    sections = {part.partition("\n")[0]: part.rstrip("\n") + "\n" for part in old}
    for result in results:
        rows = result["rows"] if result["kind"] in WHOLE else shown_rows(result["rows"])
        sections[f"## {heading(result)}"] = f"## {heading(result)}\n\n{page_section({**result, 'rows': rows})}"
    return f"{before}{BEGIN}\n{LEGEND}\n\n" + "\n".join(sections.values()) + f"\n{END}{after}"


def heading(result: dict[str, Any]) -> str:
    """Return a result's section title."""
    kind = result["kind"].capitalize() + (", compressed" if result.get("sizes") == "compressed" else "")
    return kind if result["dtype"] == "bfloat16" else f"{kind}, {result['dtype']}"


def main(arguments: list[str]) -> None:
    """Update table and page from these result files; after --add the table alone."""
    only_table, paths = "--add" in arguments, [path for path in arguments if path != "--add"]
    if not paths or any(path.startswith("-") for path in paths):
        raise SystemExit("usage: python -m recipes.papers.speed.update_tables [--add] FILE.json ..")
    read = [json.loads(Path(path).read_text(encoding="utf-8")) for path in paths]
    if len(devices := sorted({result["device"] for result in read})) > 1:
        raise SystemExit(f"the files must be of one device (got {', '.join(devices)})")
    whole = {heading(result): result for result in read if result["kind"] in WHOLE}
    results = [*merge_results([result for result in read if result["kind"] not in WHOLE]), *whole.values()]
    of_ops = [result for result in results if result["kind"] not in ("model", *WHOLE)]
    old = json.loads(TABLE.read_text(encoding="utf-8"))["tables"]
    TABLE.write_text(format_json(keep_unmeasured(tuning_tables(of_ops), old)), encoding="utf-8")
    if not only_table:
        PAGE.write_text(update_page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    changed = [TABLE] if only_table else [TABLE, PAGE]
    about = conditions(results[0]) if results[0]["kind"] in WHOLE else format_conditions(results[0])[0]
    print("\n".join([*map(str, changed), about]))


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
