"""Plot validation curves of several healing runs: one panel per conversion, one line per initialization and seed.

With --by tokens, the lines are labelled by the length of training instead.

python -m recipes.papers.healing.plot FIGURE.png ROWS.json ..          rows written by run.py --json
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from recipes.papers.script import run_script

COLORS = {"calibrated": "#1f6feb", "copied": "#d1495b"}
MAX_RATIO = 10  # upper limit of the plot, times the original's perplexity: higher starts would hide how the ends differ
LABELS = {"calibrated": "calibrated start", "copied": "copy-init"}


def load_curves(paths: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """Return recipe -> its rows with a curve, in the order of the files."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        for row in json.loads(path.read_text(encoding="utf-8")):
            if row.get("curve"):
                found.setdefault(row["recipe"], []).append(row)
    return found


def original_loss(paths: list[Path]) -> float | None:
    """Return the original model's loss on the validation rows, in nats per token."""
    rows = [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))]
    losses = [row["validation"]["original"]["loss"] for row in rows if (row.get("validation") or {}).get("original")]
    return float(losses[0]) if losses else None


def line_styles(rows: list[dict[str, Any]], by: str) -> list[tuple[str | None, str]]:
    """Return (label, color) of each line; repeated labels are None."""
    if by == "start":
        labelled = [(LABELS[row["start"]], COLORS[row["start"]]) for row in rows]
    else:
        totals = [f"{row['training']['tokens'] / 1e6:.1f}M tokens" for row in rows]
        colours = {label: f"C{i}" for i, label in enumerate(dict.fromkeys(totals))}
        labelled = [(label, colours[label]) for label in totals]
    before = [[label for label, _ in labelled[:i]] for i in range(len(labelled))]
    return [(None if label in seen else label, colour) for (label, colour), seen in zip(labelled, before)]


def draw_panel(
    axes: Any, name: str, rows: list[dict[str, Any]], base: float | None, by: str, aim: float | None
) -> None:
    """Draw the curves of one conversion."""
    for row, (label, colour) in zip(rows, line_styles(rows, by)):
        tokens, losses = zip(*row["curve"])
        seen = [math.exp(min(loss, 20.0)) for loss in losses]
        axes.plot([t / 1e6 for t in tokens], seen, color=colour, marker=".", label=label)
    axes.set(title=Path(name).stem, xlabel="tokens, millions", ylabel="perplexity", yscale="log")
    if base is not None:
        axes.axhline(math.exp(base), color="black", linestyle="--", linewidth=1, label="original")
        axes.set_ylim(0.9 * math.exp(base), MAX_RATIO * math.exp(base))
        if aim is not None:
            axes.axhline(aim * math.exp(base), color="grey", linestyle=":", label=f"x {aim:g}")
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize="small")


def draw(
    found: dict[str, list[dict[str, Any]]], base: float | None, out: Path, by: str = "start", aim: float | None = None
) -> None:
    """Draw all panels and write the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(found))
    lines = -(-len(found) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (name, rows) in enumerate(found.items()):
        draw_panel(figure.add_subplot(lines, columns, place + 1), name, rows, base, by, aim)
    figure.savefig(str(out), dpi=110)


def main() -> None:
    """Draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="Image file to write.")
    parser.add_argument("rows", type=Path, nargs="+", help="Files that run.py --json wrote.")
    parser.add_argument(
        "--by",
        choices=("start", "tokens"),
        default="start",
        help="Label lines by initialization or by training tokens. Default: start.",
    )
    parser.add_argument("--aim", type=float, help="Draw a line at this multiple of the original's perplexity.")
    arguments = parser.parse_args()
    found = load_curves(arguments.rows)
    draw(found, original_loss(arguments.rows), arguments.out, arguments.by, arguments.aim)
    print(f"{arguments.out}: {sum(map(len, found.values()))} curves of {len(found)} conversions")


if __name__ == "__main__":
    run_script(main)
