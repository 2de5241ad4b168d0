"""Update kernels/tuning.json and docs/measurements/performance.md from files written by `surgery bench --out`.

    python -m surgery.eval.speed.update_tables linear.json attention.json decode.json model.json
    python -m surgery.eval.speed.update_tables --add compressed.json

Several files of one kind are merged. The first three kinds determine kernels/tuning.json, the fastest implementation by op and
size (kernels/tuning.py); all go between the <!-- bench --> marks of docs/measurements/performance.md. What the files do not measure stays
as it was: rows of the table, sections of the page. Linears of `--sizes compressed` have a section of their own. `--add` changes
kernels/tuning.json alone, for results of a few sizes whose tables should not replace the page's. Run from a clone.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.eval.speed.tables import CELL_LEGEND, format_conditions, markdown
from surgery.publish.speed_notes import LINEAR_OPS, check_measured_times

ROOT = Path(__file__).resolve().parents[2]
PAGE, TABLE = ROOT / "docs/measurements/performance.md", ROOT / "kernels/tuning.json"
MAX_FILE_BYTES = 50_000_000
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


def tuning_tables(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tables of kernels/tuning.py, one per dtype: times of each op's implementations and of what it replaces."""
    tables: dict[str, dict[str, Any]] = {}
    for result in results:
        head = {name: result[name] for name in ("device", "capability", "dtype", "date", "versions")}
        head["capability"] = head["capability"] or []
        into = tables.setdefault(result["dtype"], {**head, "rows": []})["rows"]
        for table in dict.fromkeys(row["table"] for row in result["rows"]):
            for x in dict.fromkeys(row["x"] for row in result["rows"] if row["table"] == table):
                case = [row for row in result["rows"] if (row["table"], row["x"]) == (table, x) and row["ms"]]
                into += _case_rows(case, pass_of_table(table), launch_times(result["rows"], pass_of_table(table), x))
    return list(tables.values())


def read_measured_times(path: Path) -> dict[str, Any]:
    """Return the times of linears in a file of `surgery bench linear --out`, as a table of kernels/tuning.py. Raises SurgeryError if it is damaged."""
    if not path.is_file():
        raise SurgeryError(f"{path} does not exist. Measure this machine with: surgery bench linear --out {path.name}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise SurgeryError(f"{path} must have at most {MAX_FILE_BYTES:,} bytes (got {path.stat().st_size:,})")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        table = tuning_tables([result])[0] if result["kind"] == "linear" else None
        linears = [row for row in table["rows"] if row["op"] in LINEAR_OPS] if table else []
        return check_measured_times(table and {**table, "rows": linears}, str(path))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise SurgeryError(
            f"{path} is no file of `surgery bench linear --out` ({type(error).__name__}: {str(error)[:100]}). Write it again"
        ) from None


def keep_unmeasured(tables: list[dict[str, Any]], old: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tables with the rows of the old ones that they do not measure. Old rows of the same device and versions join a
    table, others stay in a table of their own, before it."""
    kept = []
    for before in old:
        same = [t for t in tables if all(t[name] == before[name] for name in ("capability", "dtype"))]
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


def launch_times(rows: list[dict[str, Any]], kind: str, x: int) -> dict[str, float]:
    """Return the CPU's launch time of each implementation in ms: the least over sizes of at least x.

    Larger sizes launch no less, and a busy CPU only adds time.
    """
    found: dict[str, float] = {}
    for row in rows:
        if row["x"] >= x and "launch" in row and pass_of_table(row["table"]) == kind:
            found[row["rival"]] = min(row["launch"], found.get(row["rival"], row["launch"]))
    return found


def format_json(tables: list[dict[str, Any]]) -> str:
    """Format as JSON with one line per row."""
    parts = []
    for table in tables:
        head = json.dumps({name: value for name, value in table.items() if name != "rows"})
        rows = ",\n  ".join(json.dumps(row) for row in table["rows"])
        parts.append(f'{head[:-1]}, "rows": [\n  {rows}\n ]}}')
    return '{"tables": [\n ' + ",\n ".join(parts) + "\n]}\n"


def pass_of_table(table: str) -> str:
    """Return forward, backward (with forward) or step (decoding); captured, captured step: inside a CUDA graph."""
    if table.startswith("decode"):
        return "captured step" if table.endswith("graph") else "step"
    if table.endswith("graph"):
        return "captured"
    return "backward" if table.endswith("backward") else "forward"


def _case_rows(case: list[dict[str, Any]], kind: str, launches: dict[str, float]) -> list[dict[str, Any]]:
    """Return a case's rows, one per op and options.

    The original's time is that of torch's fastest. Without a CUDA graph a call takes at least its launch time.
    """
    least = {} if "captured" in kind else launches
    took = {row["rival"]: max(row["ms"], least.get(row["rival"], 0.0)) for row in case}
    original = min((took[row["rival"]] for row in case if row.get("op") == "original"), default=None)
    found: dict[str, dict[str, Any]] = {}
    for row in case:
        if row.get("op") in (None, "original"):
            continue
        sizes = {**{k: v for k, v in row["sizes"].items() if k in SIZE_NAMES}, **row["options"]}
        entry = {
            "op": row["op"],
            "pass": kind,
            "sizes": sizes,
            **({"original": round_ms(original)} if original else {}),
        }
        found.setdefault(json.dumps(entry), entry)[row["way"]] = round_ms(took[row["rival"]])
    return list(found.values())


SIZE_NAMES = ("tokens", "inputs", "outputs", "lanes", "context")  # lanes: heads of all rows


def round_ms(ms: float) -> float:
    """Round milliseconds for the table."""
    return float(f"{ms:.3g}")


def update_page(text: str, results: list[dict[str, Any]]) -> str:
    """Return the page with these results between its marks. Sections of kinds that the results lack stay."""
    before, _, rest = text.partition(BEGIN)
    between, mark, after = rest.partition(END)
    assert mark, f"{PAGE} has no marks {BEGIN.strip()} .. {END.strip()}"
    old = [part for part in re.split(r"^(?=## )", between, flags=re.MULTILINE) if part.startswith("## ")]
    sections = {part.partition("\n")[0]: part.rstrip("\n") + "\n" for part in old}
    sections |= {f"## {heading(result)}": f"## {heading(result)}\n\n{markdown(result)}" for result in results}
    return f"{before}{BEGIN}\n{CELL_LEGEND.capitalize()}.\n\n" + "\n".join(sections.values()) + f"\n{END}{after}"


def heading(result: dict[str, Any]) -> str:
    """Return a result's section title."""
    kind = result["kind"].capitalize() + (", compressed" if result.get("sizes") == "compressed" else "")
    return kind if result["dtype"] == "bfloat16" else f"{kind}, {result['dtype']}"


def main(arguments: list[str]) -> None:
    """Update table and page from these result files; after --add the table alone."""
    only_table, paths = "--add" in arguments, [path for path in arguments if path != "--add"]
    if not paths or any(path.startswith("-") for path in paths):
        raise SystemExit("usage: python -m surgery.eval.speed.update_tables [--add] FILE.json ..")
    results = merge_results([json.loads(Path(path).read_text(encoding="utf-8")) for path in paths])
    of_ops = [result for result in results if result["kind"] != "model"]
    old = json.loads(TABLE.read_text(encoding="utf-8"))["tables"]
    TABLE.write_text(format_json(keep_unmeasured(tuning_tables(of_ops), old)), encoding="utf-8")
    if not only_table:
        PAGE.write_text(update_page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    changed = [TABLE] if only_table else [TABLE, PAGE]
    print("\n".join([*map(str, changed), format_conditions(results[0])[0]]))


if __name__ == "__main__":
    main(sys.argv[1:])
