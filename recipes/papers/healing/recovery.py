"""Table of attention conversions after healing: means over seeds, with the share of far context that each wins back.

python -m recipes.papers.healing.recovery ROWS.json OTHER.json .. --window sliding-window

    far recovery = 1 - ln(ratio of the conversion) / ln(ratio of the sliding window healed on as many tokens)

Files are those that `healing.run --json` writes. A cell has the mean ratio to the original's perplexity ± the standard
deviation over seeds, and the far recovery. needle-rank: share of right answers above guessing, of the original's share
above guessing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from recipes.papers.script import run_script
from surgery.core.errors import SurgeryError
from surgery.eval.suites.needle import FLOORS

Rows = list[dict[str, Any]]
GUESSED = FLOORS["needle-rank"]["accuracy"]


def ratios_by_length(row: dict[str, Any]) -> dict[str, float]:
    """Return length of the windows -> ratio to the original's perplexity; "" is the first length."""
    return {"": row["ratio"]["ratio"], **{n: x["ratio"]["ratio"] for n, x in row.get("lengths", {}).items()}}


def healed_rows(files: list[Rows]) -> dict[tuple[str, int], Rows]:
    """Return (recipe and what was overridden, tokens) -> the healed rows of all seeds, in the order of the files."""
    groups: dict[tuple[str, int], Rows] = {}
    for row in (row for rows in files for row in rows if "training" in row):
        changed = [*row.get("convert", []), *row.get("set", []), row.get("varied", "")]
        name = " ".join(part for part in (row["recipe"], *changed) if part)
        groups.setdefault((name, row["training"]["tokens"]), []).append(row)
    return groups


def window_losses(groups: dict[tuple[str, int], Rows], window: str) -> dict[int, dict[str, float]]:
    """Return tokens -> length -> mean log ratio of the sliding window, which is `window` with or without overrides.

    Raises SurgeryError if two of different overrides were healed on as many tokens.
    """
    losses: dict[int, dict[str, float]] = {}
    for (name, tokens), rows in groups.items():
        if name.split(" ")[0] != window:
            continue
        if tokens in losses:
            raise SurgeryError(
                f"the files have two kinds of {window} healed on {tokens:,} tokens, and far recovery compares with "
                "one; leave one out"
            )
        losses[tokens] = {
            n: statistics.fmean(math.log(ratios_by_length(row)[n]) for row in rows) for n in ratios_by_length(rows[0])
        }
    return losses


def format_ratio(ratios: list[float], lost: float | None) -> str:
    """Return mean ± deviation over seeds and, given what the window loses in nats, the far recovery."""
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    spread = f" ± {statistics.stdev(ratios):.3f}" if len(ratios) > 1 else ""
    return f"{mean:.3f}{spread}" + ("" if not lost else f", {100 * (1 - math.log(mean) / lost):.0f}%")


def format_needles(rows: Rows, original: dict[str, Any], length: str) -> str:
    """Return the mean share of right answers in percent and what it is of the original's, both above guessing."""
    share = statistics.fmean(row["ranked"][length]["accuracy"] for row in rows)
    base = original["ranked"][length]["accuracy"]
    return f"{100 * share:.0f} ({100 * (share - GUESSED) / (base - GUESSED):.0f}%)"


def table(files: list[Rows], window: str) -> str:
    """Return the Markdown table. window: recipe of the sliding window.

    Raises SurgeryError if no row is healed, or if the originals of the files differ, whose shares would mean nothing.
    """
    groups, original = healed_rows(files), files[0][0]
    if not groups:
        raise SurgeryError("the files have no healed rows: run healing.run without --only-convert")
    if not all(math.isclose(rows[0]["perplexity"], original["perplexity"], rel_tol=1e-5) for rows in files):
        raise SurgeryError(
            "the files are of different originals, texts or windows: their perplexities differ; give files of one"
        )
    lost = window_losses(groups, window)
    first = next(iter(groups.values()))[0]
    lengths, ranked, caches = ratios_by_length(first), first.get("ranked", {}), first.get("cache_bytes", {})
    head = ["conversion", "tokens", "seeds", *(f"ratio at {n}" if n else "ratio" for n in lengths)]
    head += [*(f"needle-rank at {n}, %" for n in ranked), *(f"cache at {n}" for n in caches)]
    lines = [head, ["---"] * len(head)]
    for (recipe, tokens), rows in groups.items():
        cells = [recipe, f"{tokens:,}", str(len(rows))]
        cells += [
            format_ratio([ratios_by_length(row)[n] for row in rows], lost.get(tokens, {}).get(n)) for n in lengths
        ]
        cells += [format_needles(rows, original, n) for n in ranked]
        cells += [f"{100 * rows[0]['cache_bytes'][n] / original['cache_bytes'][n]:.1f}%" for n in caches]
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+", help="Files of rows, of one original.")
    parser.add_argument(
        "--window", default="sliding-window", help="Recipe of the sliding window. Default: sliding-window."
    )
    arguments = parser.parse_args()
    try:
        print(table([json.loads(path.read_text(encoding="utf-8")) for path in arguments.rows], arguments.window))
    except (OSError, SurgeryError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    run_script(main)
