"""What `surgery bench --out` wrote, into the places that speak of speed.

    python -m surgery.bench.publish linear.json attention.json decode.json model.json

Several of one kind (some rivals each) count as one. kernels/measured.json, which way is fastest where (kernels/measured.py), from the first three; docs/performance.md between
its <!-- bench --> marks, all of it. Run from a clone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from surgery.bench.shown import EXPLAINED, conditions, markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE, TABLE = ROOT / "docs/performance.md", ROOT / "kernels/measured.json"
BEGIN, END = "<!-- bench -->\n", "<!-- /bench -->\n"


def merged(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result for each kind: several runs of one (some rivals each) as one, the first run's row where two have it."""
    kinds: dict[str, dict[str, Any]] = {}
    for result in results:
        one = kinds.setdefault(result["kind"], {**result, "rows": []})
        known = {(row["table"], row["x"], row["rival"]) for row in one["rows"] if row["ms"]}
        one["rows"] += [row for row in result["rows"] if (row["table"], row["x"], row["rival"]) not in known]
        one["complete"] &= result["complete"]
    for one in kinds.values():
        got = {(row["table"], row["x"], row["rival"]) for row in one["rows"] if row["ms"]}
        one["rows"] = [row for row in one["rows"] if row["ms"] or (row["table"], row["x"], row["rival"]) not in got]
    return list(kinds.values())


def measured(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of kernels/measured.py: what each op took in each way, and what it replaces."""
    rows = []
    for result in results:
        for table in dict.fromkeys(row["table"] for row in result["rows"]):
            for x in dict.fromkeys(row["x"] for row in result["rows"] if row["table"] == table):
                heat = [row for row in result["rows"] if (row["table"], row["x"]) == (table, x) and row["ms"]]
                rows += _of_one(heat, kind_of(table))
    first = results[0]
    return {"device": first["device"], "date": first["date"], "versions": first["versions"], "rows": rows}


def kind_of(table: str) -> str:
    """forward, backward (with forward), step."""
    if table.startswith("decode"):
        return "step"
    return "backward" if table.endswith("backward") else "forward"


def _of_one(heat: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """One heat's rows, an op and its options each. The original's time is that of the fastest that torch has."""
    original = min((row["ms"] for row in heat if row.get("op") == "original"), default=None)
    found: dict[str, dict[str, Any]] = {}
    for row in heat:
        if row.get("op") in (None, "original"):
            continue
        sizes = {**{k: v for k, v in row["sizes"].items() if k in NAMED}, **row["options"]}
        entry = {"op": row["op"], "pass": kind, "sizes": sizes, **({"original": rounded(original)} if original else {})}
        found.setdefault(json.dumps(entry), entry)[row["way"]] = rounded(row["ms"])
    return list(found.values())


NAMED = ("tokens", "inputs", "outputs", "batch", "heads", "context")


def rounded(ms: float) -> float:
    return float(f"{ms:.3g}")


def page(text: str, results: list[dict[str, Any]]) -> str:
    """The page's text with these results between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"{PAGE} has no marks {BEGIN.strip()} .. {END.strip()}"
    sections = [f"## {result['kind'].capitalize()}\n\n{markdown(result)}" for result in results]
    return f"{before}{BEGIN}\n{EXPLAINED.capitalize()}.\n\n" + "\n".join(sections) + f"\n{END}{after}"


def main(paths: list[str]) -> None:
    results = merged([json.loads(Path(path).read_text(encoding="utf-8")) for path in paths])
    of_ops = [result for result in results if result["kind"] != "model"]
    table = measured(of_ops)
    rows = ",\n  ".join(json.dumps(row) for row in table.pop("rows"))
    TABLE.write_text(json.dumps(table, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n', encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(f"{TABLE}\n{PAGE}\n{conditions(results[0])[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
