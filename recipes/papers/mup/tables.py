"""Results of recipes/papers/mup/run.py: the best base rate at every width, as a table and a plot."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Losses = dict[float, dict[int, float]]  # log2 of the base rate -> seed -> held-out loss


@dataclass(frozen=True)
class BestRate:
    """Best base rate (log2), its standard error over seeds, the lowest mean loss. edge: whether it lies at an end of
    the grid.
    """

    log2_rate: float
    error: float
    loss: float
    edge: bool


def load_losses(paths: list[Path]) -> dict[tuple[str, str, int], Losses]:
    """Return (structure, rule, width) -> losses by rate and seed."""
    found: dict[tuple[str, str, int], Losses] = defaultdict(lambda: defaultdict(dict))
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    for row in sorted((json.loads(line) for line in lines), key=_order):
        loss = math.inf if row["held_out"] is None else row["held_out"]
        found[row["structure"], row["rule"], row["width"]][row["log2_rate"]][row["seed"]] = loss
    return found


def _order(row: dict[str, Any]) -> tuple[bool, str, bool]:
    """Return a sort key: structures by name, dense last; structure-aware rates first."""
    return row["structure"] == "dense", row["structure"], row["rule"] != "mup"


def find_best(losses: Losses) -> BestRate:
    """Return the best rate: vertex of a parabola through the lowest mean loss and its neighbors; the error is over
    seeds.
    """
    rates, means, seeds = mean_losses(losses)
    each = [parabola_vertex(rates, [losses[r][seed] for r in rates]) for seed in seeds]
    where, lowest = parabola_vertex(rates, means), min(means)
    return BestRate(where, standard_error(each), lowest, means.index(lowest) in (0, len(rates) - 1))


def mean_losses(losses: Losses) -> tuple[list[float], list[float], set[int]]:
    """Return (ascending rates, mean losses, seeds), over the seeds that were run at every rate."""
    rates = sorted(losses)
    seeds = set.intersection(*(set(losses[r]) for r in rates))
    return rates, [sum(losses[r][s] for s in seeds) / max(1, len(seeds)) for r in rates], seeds


def parabola_vertex(rates: list[float], losses: list[float]) -> float:
    """Return the vertex of a parabola through the lowest loss and its neighbors; the rate itself at an end of the
    grid.
    """
    i = losses.index(min(losses))
    if i in (0, len(rates) - 1) or not math.isfinite(losses[i - 1] + losses[i + 1]):
        return rates[i]
    left, here, right = losses[i - 1 : i + 2]
    bend = left - 2 * here + right
    return rates[i] + (rates[i + 1] - rates[i]) * 0.5 * (left - right) / bend if bend > 0 else rates[i]


def standard_error(values: list[float]) -> float:
    """Return the standard error of a mean."""
    mean = sum(values) / len(values)
    spread = sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
    return math.sqrt(spread / len(values)) if len(values) > 1 else math.nan


def table_rows(found: dict[tuple[str, str, int], Losses]) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    table = []
    for structure, rule in dict.fromkeys((s, r) for s, r, _ in found):
        widths = sorted(w for s, r, w in found if (s, r) == (structure, rule))
        bests = {w: find_best(found[structure, rule, w]) for w in widths}
        first, last = bests[widths[0]], bests[widths[-1]]
        moved, error = last.log2_rate - first.log2_rate, math.hypot(first.error, last.error)
        lost = interpolate_loss(found[structure, rule, widths[-1]], first.log2_rate) - last.loss
        table.append(
            {"structure": structure, "rule": rule, "bests": bests, "moved": moved, "error": error, "lost": lost}
        )
    return table


def interpolate_loss(losses: Losses, log2_rate: float) -> float:
    """Return the mean loss at a rate, interpolated linearly between measured rates."""
    rates, means, _ = mean_losses(losses)
    at = dict(zip(rates, means))
    below = max((r for r in rates if r <= log2_rate), default=rates[0])
    above = min((r for r in rates if r >= log2_rate), default=rates[-1])
    share = 0.0 if above == below else (log2_rate - below) / (above - below)
    return at[below] if share == 0 else (1 - share) * at[below] + share * at[above]


def markdown(table: list[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    widths = sorted({w for row in table for w in row["bests"]})
    lines = ["| structure | rates | " + " | ".join(map(str, widths)) + " | moved | lost |"]
    lines.append("|" + " --- |" * (len(widths) + 4))
    for row in table:
        cells = [_cell(row["bests"].get(w)) for w in widths]
        values = [
            row["structure"],
            row["rule"],
            *cells,
            _pair(row["moved"], row["error"], "+"),
            f"{row['lost']:.4f}",
        ]
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines)


def _cell(found: BestRate | None) -> str:
    if found is None:
        return ""
    edge = " (edge)" if found.edge else ""
    return f"{_pair(found.log2_rate, found.error)}{edge}, {found.loss:.3f}"


def _pair(value: float, error: float, sign: str = "") -> str:
    return f"{value:{sign}.2f} ± {error:.2f}" if math.isfinite(error) else f"{value:{sign}.2f} (one seed)"


def show(paths: list[Path], plot: Path | None) -> None:
    """Print the table and write the plot."""
    found = load_losses(paths)
    print(markdown(table_rows(found)))
    if plot is not None:
        draw(found, plot)


def draw(found: dict[tuple[str, str, int], Losses], path: Path) -> None:
    """Draw loss against base rate, one panel per structure and rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    structures, rules = list(dict.fromkeys(s for s, _, _ in found)), list(dict.fromkeys(r for _, r, _ in found))
    shape: dict[str, Any] = {"figsize": (3.0 * len(structures), 2.8 * len(rules)), "sharex": True, "squeeze": False}
    figure, axes = pyplot.subplots(len(rules), len(structures), **shape)
    titles = {"mup": "structure-aware", "dense": "the dense layer's"}
    for i, rule in enumerate(rules):
        for j, structure in enumerate(structures):
            _panel(axes[i][j], {w: found[s, r, w] for s, r, w in sorted(found) if (s, r) == (structure, rule)})
            if (structure, rule) in {(s, r) for s, r, _ in found}:
                axes[i][j].set_title(f"{structure.replace('_', ' ')}, {titles.get(rule, rule)} rates", fontsize=9)
    for row in axes:
        row[0].set_ylabel("held-out loss, nats")
    for axis in axes[-1]:
        axis.set_xlabel("log2 of the base rate")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _panel(axis: Any, widths: dict[int, Losses]) -> None:
    from matplotlib import colormaps

    if not widths:
        axis.set_axis_off()
        return
    lowest = min(find_best(losses).loss for losses in widths.values())
    for i, (width, losses) in enumerate(sorted(widths.items())):
        rates, means, _ = mean_losses(losses)
        colour, there = colormaps["viridis"](0.9 - 0.85 * i / max(1, len(widths) - 1)), find_best(losses)
        axis.plot(rates, means, color=colour, label=str(width), linewidth=1.3)
        axis.plot([there.log2_rate], [there.loss], "o", color=colour, markersize=5)
    axis.set_ylim(lowest - 0.05, lowest + 0.6)
    axis.legend(fontsize=7, title="width", title_fontsize=7, loc="upper center")
