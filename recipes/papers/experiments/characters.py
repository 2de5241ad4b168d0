"""Character language models: does MLR attention match softmax with less compute? (Kuang et al. 2025, "Customizing the
Inductive Biases of Softmax Attention", Figures 4 and 13)

python -m recipes.papers.experiments.characters run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.characters show [rows.jsonl ..] [--plot characters.png]

Heads have 64 dimensions. `mlr` is the paper's form, nested blocks of T / 2^(l-1) tokens; `mlr_sliding` has sliding
extents of the same numbers of tokens. `window` is a sliding window of T / 8 tokens in every layer, `global_window` has
full attention in the first layer and in the middle one, and windows elsewhere. Differences from the paper: Python
source in place of OpenWebText, RoPE, no layer norm of queries and keys, rates by muP at base width 64. Losses are
compared at equal MACs, on the line between the measured widths of the rival in loss against log MACs, for each seed;
points outside of the measured range are left out.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.sweep import (
    BestRows,
    Cell,
    Difference,
    Row,
    Setting,
    best_rows,
    difference,
    edge_mark,
    mean_and_error,
)
from recipes.papers.experiments.text import train_text
from recipes.papers.experiments.verdicts import DIVERGED, Comparison, Verdict, below, decide, has_diverged
from recipes.papers.script import run_script

HEAD = 64
RANKS = (32, 8, 6, 4, 4, 4, 4, 2)
CORE = ("softmax", "window", "global_window", "mlr")
METHODS = (*CORE, "mlr_sliding")
CLOSE = 0.002  # nats per character within which losses count as equal
PAPER = "the paper: T = 1,024, widths 256 to 768, 100,000 steps, OpenWebText"
SETTINGS = (
    Setting(
        "cpu", "cpu", (16, 32), CORE, (3.3e-4, 1e-3, 3e-3, 9e-3, 2.7e-2), 3, 500, 8, 64, 2,
        {"text": "surgery", "characters": 1_000_000, "held_out": 512, "mlp": 2},
    ),
    Setting(
        "gpu_256", "gpu", (64, 128), CORE, (1e-3, 3e-3, 9e-3, 2.7e-2), 4, 2000, 16, 256, 4,
        {"text": "packages", "characters": 24_000_000, "held_out": 4096},
    ),
    Setting(
        "gpu", "gpu", (128, 256), METHODS, (1e-3, 3e-3, 9e-3), 3, 3000, 16, 1024, 6,
        {"text": "packages", "characters": 24_000_000, "held_out": 1024},
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (16,), METHODS, (1e-2,), 1, 2, 2, 16, 2,
    {"text": "surgery", "characters": 50_000, "held_out": 8, "mlp": 1},
)  # fmt: skip


def heads(cell: Cell) -> int:
    """Return the number of attention heads."""
    return max(1, cell.width // HEAD)


def attention_keys(setting: Setting, cell: Cell) -> dict[str, Any] | None:
    """Return the recipe keys of a method's attention; None: softmax."""
    length = setting.length
    window = {"mixer": "window", "window": max(2, length // 8)}
    if cell.method == "window":
        return window
    if cell.method == "global_window":
        whole = [0, setting.layers // 2] if setting.layers > 2 else [0]
        return {**window, "hybrid": {"layers": whole}}
    if cell.method == "softmax":
        return None
    ranks = ranks_of(cell.width // heads(cell))
    extents = [max(1, length >> level) for level in range(1, len(ranks))]
    return {
        "mixer": "mlr",
        "form": "sliding" if cell.method == "mlr_sliding" else "nested",
        "ranks": ranks,
        "extents": extents,
    }


def ranks_of(size: int) -> list[int]:
    """Return the ranks of a head of `size` dimensions: the paper's for 64, else half of what is left for each level."""
    if size == HEAD:
        return list(RANKS)
    ranks: list[int] = []
    while sum(ranks) < size and len(ranks) < len(RANKS):
        ranks.append(max(1, (size - sum(ranks)) // 2))
    return ranks


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    return train_text(setting, cell, runs, device, attention_keys(setting, cell), heads(cell))


# -- results --------------------------------------------------------------------------------------------
def at_equal_macs(
    best: BestRows, method: str, rival: str, macs: str = "macs", relative: bool = False
) -> Difference | None:
    """Return loss(method) - loss(rival) at the method's MACs, over seeds and widths; None without a point in the
    rival's range.

    macs: the key of rows that holds the compute. relative: as a share of the rival's loss.
    """
    found = []
    for (m, _, seed), row in best.items():
        curve = sorted((r[macs], r["loss"]) for (n, _, s), r in best.items() if (n, s) == (rival, seed))
        theirs = loss_at(curve, row[macs]) if m == method else None
        if theirs is not None:
            found.append((row["loss"] - theirs) / (theirs if relative else 1.0))
    return difference(found) if found else None


def loss_at(curve: list[tuple[int, float]], macs: int) -> float | None:
    """Return the loss at a compute, on the line between neighbors (MACs, loss) in log MACs; None outside of their
    range.
    """
    for (low, first), (high, last) in pairwise(curve):
        if low <= macs <= high:
            share = math.log(macs / low) / math.log(high / low)
            return (1 - share) * first + share * last
    return None


def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "MLR attention is below softmax and windows at equal compute"."""
    best = best_rows(rows, setting)
    if has_diverged(best, setting):
        return DIVERGED
    comparisons = [
        Comparison(f"mlr - {rival}", at_equal_macs(best, "mlr", rival), below(bound), below(CLOSE))
        for rival, bound in (("softmax", CLOSE), ("window", 0.0), ("global_window", 0.0))
    ]
    return decide(setting, best, comparisons, CORE, missed=[PAPER])


def table(rows: list[Row], setting: Setting) -> list[list[str]]:
    """Return the table: held-out loss (mean ± standard error), of the second half of positions too, and compute."""
    best = best_rows(rows, setting)
    far = str(setting.length)
    lines = [
        [
            "attention",
            "width",
            "nats per character",
            f"positions {setting.length // 2:,} on",
            "best rate",
            "state",
            "MACs",
        ]
    ]
    for cell in setting.cells:
        own = [
            row for (m, w, _), row in best.items() if (m, w) == (cell.method, cell.width) and row["loss"] is not None
        ]
        if own:
            mean, error = mean_and_error([row["loss"] for row in own])
            last = mean_and_error([row["by_position"][far] for row in own])[0]
            cells = [f"{mean:.4f} ± {error:.4f}", f"{last:.4f}", edge_mark(own)]
            lines.append([cell.method, str(cell.width), *cells, f"{own[0]['state']:,}", f"{own[0]['macs']:,}"])
    return lines


def draw(axes: Any, rows: list[Row], setting: Setting) -> None:
    """Draw loss against MACs, and against the position at the largest width."""
    best = {key: row for key, row in best_rows(rows, setting).items() if row["loss"] is not None}
    for method in setting.methods:
        own = [row for (m, _, _), row in best.items() if m == method]
        sizes = sorted({row["macs"] for row in own})
        means = [mean_and_error([row["loss"] for row in own if row["macs"] == macs]) for macs in sizes]
        axes[0].errorbar(sizes, [m for m, _ in means], [e for _, e in means], marker="o", label=method)
        wide = [row["by_position"] for (m, w, _), row in best.items() if (m, w) == (method, max(setting.widths))]
        if wide:
            axes[1].plot(
                [int(t) for t in wide[0]], [mean_and_error([r[t] for r in wide])[0] for t in wide[0]], label=method
            )
    axes[0].set(xlabel="MACs per character", ylabel="nats per character", xscale="log")
    axes[0].legend(fontsize=7)
    axes[1].set(xlabel=f"position, width {max(setting.widths)}", xscale="log")


EXPERIMENT = Experiment(
    name="characters",
    title="Character language models: MLR attention",
    source="Customizing, Figures 4, 13",
    claim="MLR attention is below softmax, sliding windows, and global and window layers in turn at equal compute",
    rule=(
        "losses at equal MACs, by seed: mlr minus softmax < 0.002 nats per character, mlr minus window < 0, mlr "
        "minus global_window < 0; above 0.002 contradicts"
    ),
    settings=SETTINGS,
    smoke=SMOKE,
    heads=heads,
    train=train,
    verdict=verdict,
    table=table,
    draw=draw,
)

if __name__ == "__main__":
    run_script(lambda: main(EXPERIMENT))
