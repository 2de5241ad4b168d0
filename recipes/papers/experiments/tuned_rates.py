"""Rates that know the structure, after tuning: a ViT with dense attention and BTT in its MLPs only (Qiu et al. 2024,
"Compute Better Spent", Figure 3)

python -m recipes.papers.experiments.tuned_rates run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.tuned_rates show [rows.jsonl ..] [--plot tuned_rates.png]

The models and the task of `vision`, with one base rate for all parameters. `aware`: each core has the rate of its own
fan-in; `naive`: that of the dense layer in its place, so that no base rate fits both attention and MLPs. Both start
from the same parameters and see the same rows.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.scaling import table, train_classifiers
from recipes.papers.experiments.sweep import Cell, Row, Setting, best_rows, mean_and_error, paired_difference
from recipes.papers.experiments.verdicts import DIVERGED, Comparison, Verdict, above, decide, has_diverged
from recipes.papers.experiments.vision import BLOCKS, LARGE, SIZES, PatchTransformer, heads, make_vit
from recipes.papers.script import run_script

METHODS = ("aware", "naive")
PAPER = "the paper: width 1,024, CIFAR-10"
SETTINGS = (
    Setting("cpu", "cpu", (64,), METHODS, (6e-4, 1.8e-3, 5.4e-3, 1.62e-2, 4.86e-2), 4, 300, 32, 8, BLOCKS, SIZES),
    Setting(
        "gpu_short", "gpu", (256, 1024), METHODS, (3e-4, 9e-4, 2.7e-3, 8.1e-3, 2.43e-2, 7.29e-2), 5, 1500, 128, 16, BLOCKS,
        {**LARGE, "held_out": 16384},
    ),
    Setting("gpu", "gpu", (256, 1024), METHODS, (1e-4, 3e-4, 9e-4, 2.7e-3, 8.1e-3, 2.43e-2), 4, 4000, 256, 16, BLOCKS, LARGE),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (16,), METHODS, (1e-2,), 2, 2, 4, 4, 1,
    {"dims": 16, "classes": 4, "teacher": 8, "held_out": 8, "head": 16},
)  # fmt: skip


def make_model(setting: Setting, cell: Cell, seed: int) -> PatchTransformer:
    """Return the ViT with BTT in its MLPs only."""
    return make_vit(setting, Cell("btt", cell.width), seed, attention="dense")


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    return train_classifiers(setting, cell, runs, device, make_model, naive=cell.method == "naive")


# -- results --------------------------------------------------------------------------------------------
def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "rates that know the structure are ahead, each at its best base rate"."""
    best = best_rows(rows, setting)
    if has_diverged(best, setting):
        return DIVERGED
    comparisons = [
        Comparison(
            f"naive - aware at width {width}", paired_difference(best, "naive", "aware", "loss", [width]), above(0.0)
        )
        for width in setting.widths
    ]
    return decide(setting, best, comparisons, METHODS, missed=[PAPER])


def draw(axes: Any, rows: list[Row], setting: Setting) -> None:
    """Draw loss and error against the base rate, of seed 0 at all rates and of all seeds at the best one."""
    own = [row for row in rows if row["setting"] == setting.name and row["loss"] is not None]
    for cell in setting.cells:
        mine = [row for row in own if (row["method"], row["width"]) == tuple(cell)]
        rates = sorted({row["rate"] for row in mine})
        for axis, key in zip(axes, ("loss", "error")):
            means = [mean_and_error([row[key] for row in mine if row["rate"] == rate])[0] for rate in rates]
            axis.plot(rates, means, marker="o", label=f"{cell.method} {cell.width}")
            axis.set(xlabel="base rate", ylabel={"loss": "nats", "error": "error"}[key], xscale="log")
    axes[0].legend(fontsize=7)


EXPERIMENT = Experiment(
    name="tuned_rates",
    title="ViT with BTT in its MLPs: rates that know the structure",
    source="Compute Better Spent, Figure 3",
    claim="rates that know the structure give a lower loss even if each rule has its best base rate",
    rule=("held-out loss by seed, each rule at its best base rate: naive minus aware > 0 at every width"),
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
