"""One best rate at all widths for MLR attention? (Kuang et al. 2025, "Customizing the Inductive
Biases of Softmax Attention", Figure 5)

python -m recipes.papers.experiments.rate_transfer run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.rate_transfer show [rows.jsonl ..] [--plot rate_transfer.png]

Character-level decoders over Python source with heads of one size, at muP rates of base width 64: W_Q and W_K of MLR
attention at the rate of their fan-in, the factors of bilinear scores by eqs. 36 to 38. Every width trains all seeds at
all rates. The best rate of a seed is the vertex of a parabola through its lowest loss and the neighbors, in log2 of the
rate; its shift is that of the widest model minus that of the narrowest, for each seed, over log2 of the ratio of their
widths: -1 for a rate in proportion to 1 / width. The figure has softmax, the baseline, and MLR attention, of eight
levels on OpenWebText at widths of 512 to 1,024 and T = 256. Bilinear scores, whose rates the paper derives and does not
show, are trained besides and decide nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from recipes.papers.experiments.characters import ranks_of
from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.sweep import (
    Cell,
    Difference,
    Row,
    Setting,
    at_edge,
    best_rate,
    best_rows,
    difference,
    mean_and_error,
    seeds_at,
    tried_rates,
)
from recipes.papers.experiments.text import train_text
from recipes.papers.experiments.verdicts import DIVERGED, Comparison, Verdict, decide, has_diverged
from recipes.papers.mup.tables import parabola_vertex
from recipes.papers.script import run_script

HEAD = 32  # dimensions of an attention head
SAME = 0.5  # share of the shift of a rate in proportion to 1 / width, below which best rates count as one
METHODS = ("softmax", "mlr", "bilinear_mlr", "bilinear_btt")
SETTINGS = (
    Setting(
        "cpu", "cpu", (32, 64), ("softmax", "mlr", "bilinear_btt"), (7.5e-4, 3e-3, 1.2e-2, 4.8e-2, 1.92e-1), 3, 150, 8, 32, 2,
        {"text": "surgery", "characters": 1_000_000, "held_out": 256, "mlp": 2}, every_rate=True,
    ),
    Setting(
        "gpu_128", "gpu", (64, 256), ("softmax", "mlr"), (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), 5, 1000, 16, 128, 4,
        {"text": "packages", "characters": 24_000_000, "held_out": 1024}, every_rate=True,
    ),
    Setting(
        "gpu", "gpu", (64, 128, 256, 512), METHODS, (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), 3, 1500, 16, 256, 4,
        {"text": "packages", "characters": 24_000_000, "held_out": 1024}, every_rate=True,
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (32, 64), METHODS, (1e-2,), 2, 2, 2, 16, 1,
    {"text": "surgery", "characters": 50_000, "held_out": 8, "mlp": 1}, every_rate=True,
)  # fmt: skip


def heads(cell: Cell) -> int:
    """Return the number of attention heads."""
    return max(1, cell.width // HEAD)


def attention_keys(setting: Setting, cell: Cell) -> dict[str, Any] | None:
    """Return the recipe keys of a method's attention; None: softmax.

    Levels of MLR: half of what is left of the head for each.
    """
    shared = {"base": "own", "norm": "qk"}
    if cell.method == "softmax":
        return None
    if cell.method == "bilinear_btt":
        return {"mixer": "bilinear_btt", "rank": 1, **shared}
    if cell.method == "bilinear_mlr":
        return {"mixer": "bilinear_mlr", "ranks": [HEAD // 8, HEAD // 16, HEAD // 16], **shared}
    ranks = ranks_of(HEAD)
    extents = [max(1, setting.length >> level) for level in range(1, len(ranks))]
    return {"mixer": "mlr", "form": "nested", "ranks": ranks, "extents": extents}


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    return train_text(setting, cell, runs, device, attention_keys(setting, cell), heads(cell))


# -- results --------------------------------------------------------------------------------------------
def losses_by_seed(rows: list[Row], setting: Setting, cell: Cell) -> dict[int, list[float]]:
    """Return seed -> losses at the ascending rates that were tried, of complete seeds; infinite where a run diverged."""
    found = {
        (row["seed"], row["rate"]): math.inf if row["loss"] is None else row["loss"]
        for row in rows
        if (row["setting"], row["method"], row["width"]) == (setting.name, *cell)
    }
    rates = tried_rates(rows, setting, cell)
    if not rates:
        return {}
    return {seed: [found[seed, rate] for rate in rates] for seed in seeds_at(rows, setting, cell, rates)}


def best_rates(rows: list[Row], setting: Setting, cell: Cell) -> list[float]:
    """Return log2 of the best rate of each seed."""
    rates = [math.log2(rate) for rate in tried_rates(rows, setting, cell)]
    return [parabola_vertex(rates, losses) for losses in losses_by_seed(rows, setting, cell).values()]


def shift(rows: list[Row], setting: Setting, method: str) -> Difference:
    """Return the shift of the best rate from the narrowest to the widest model over seeds: octaves for each octave of
    width.
    """
    cells = [cell for cell in setting.cells if cell.method == method]  # ascending widths
    first, last = (best_rates(rows, setting, cell) for cell in (cells[0], cells[-1]))
    octaves = math.log2(cells[-1].width / cells[0].width)
    return difference([(b - a) / octaves for a, b in zip(first, last)])


def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "MLR attention has one best rate at all widths". Bilinear scores, which the figure does not
    have, decide nothing.
    """
    best = best_rows(rows, setting)
    if has_diverged(best, setting):
        return DIVERGED
    found = {method: shift(rows, setting, method) for method in setting.methods}
    softmax, missed = found["softmax"], []
    if not -SAME < softmax.low <= softmax.high < SAME:
        missed.append("softmax does not keep its rate, as it does in the paper")
    return decide(
        setting, best, [Comparison("shift of mlr", found["mlr"], (-SAME, SAME))], ("softmax", "mlr"), missed=missed,
        besides=[f"shift of {method}: {value}" for method, value in found.items() if method != "mlr"],
    )  # fmt: skip


def table(rows: list[Row], setting: Setting) -> list[list[str]]:
    """Return the table: log2 of the best rate (mean ± standard error) and the loss at the best rate of the grid."""
    lines = [["attention", "width", "log2 of the best rate", "nats per character", "MACs"]]
    for cell in setting.cells:
        found = best_rates(rows, setting, cell)
        rate = best_rate(rows, setting, cell)
        own = [
            row
            for row in rows
            if (row["setting"], row["method"], row["width"], row["rate"]) == (setting.name, *cell, rate)
            and row["loss"] is not None
        ]
        if found and own and rate is not None:
            where, loss = mean_and_error(found), mean_and_error([row["loss"] for row in own])
            edge = " (edge)" if at_edge(rows, setting, cell) else ""
            lines.append(
                [*map(str, cell), f"{where[0]:.2f} ± {where[1]:.2f}{edge}", f"{loss[0]:.4f} ± {loss[1]:.4f}", f"{own[0]['macs']:,}"]
            )  # fmt: skip
    return lines


def draw(axes: Any, rows: list[Row], setting: Setting) -> None:
    """Draw the loss against the rate at every width, of softmax and MLR attention, and of the bilinear scores."""
    for cell in setting.cells:
        losses = list(losses_by_seed(rows, setting, cell).values())
        if losses:
            means = [sum(column) / len(column) for column in zip(*losses)]
            axis = axes[1 if cell.method.startswith("bilinear") else 0]
            axis.plot(
                tried_rates(rows, setting, cell), means, marker="o", markersize=3, label=f"{cell.method} {cell.width}"
            )
    for axis in axes:
        axis.set(xlabel="base rate", ylabel="nats per character", xscale="log")
        if axis.lines:
            axis.legend(fontsize=6)


EXPERIMENT = Experiment(
    name="rate_transfer",
    title="One best rate at all widths for MLR attention",
    source="Customizing, Figure 5",
    claim="the best base rate of MLR attention is the same at all widths",
    rule=(
        "shift of log2 of the best rate from the narrowest to the widest model, by seed, for each doubling of the "
        "width (-1: a rate in proportion to 1 / width): MLR attention's lies within ±0.5. Baseline: so does "
        "softmax's. Bilinear scores, which the figure does not have, decide nothing"
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
