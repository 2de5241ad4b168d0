"""Needles from scratch: does the log-linear mask find one fact among distractors farther back than its linear mask?
(Guo et al. 2025, "Log-Linear Attention", Table 4)

python -m recipes.papers.experiments.needles run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.needles show [rows.jsonl ..] [--plot needles.png]

In place of pretrained models on S-NIAH and MK-NIAH, small models are trained on key-value pairs scattered among
distractors, each key asked once at the end of the row: one pair is a single needle, several pairs are needles with
several keys. Models, heads and states are those of `recall`. Rows of 2, 4 and 8 times the length of training have the
same number of pairs and more distractors.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.recall import (
    CORE,
    FAMILIES,
    heads,
    make_recall_model,
    make_task,
    score,
    train_recall,
)
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
from recipes.papers.experiments.training import seeds_of
from recipes.papers.experiments.verdicts import UNDECIDED, Comparison, Verdict, above, decide
from recipes.papers.script import run_script
from recipes.papers.training.compute import count_compute, state_size

TIMES = (1, 2, 4, 8)  # lengths of scored rows, in lengths of training rows
SOFTMAX_FLOOR = 0.99
SETTINGS = (
    Setting(
        "cpu", "cpu", (16,), CORE, (1e-3, 3e-3, 1e-2, 3e-2), 4, 1500, 32, 32, 2,
        {"vocabulary": 64, "pairs": (1, 2, 4), "layout": "scattered", "held_out": 1024, "levels": 6},
    ),
    Setting(
        "gpu_128", "gpu", (32,), CORE, (1e-3, 3e-3, 1e-2, 3e-2), 5, 5000, 64, 128, 2,
        {"vocabulary": 512, "pairs": (1, 2, 4, 8), "layout": "scattered", "held_out": 4096, "levels": 8},
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (16,), ("ssd", "log_linear_ssd"), (1e-2,), 1, 2, 4, 16, 1,
    {"vocabulary": 16, "pairs": (1, 2), "layout": "scattered", "held_out": 64, "levels": 5},
)  # fmt: skip


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    task, models = make_task(setting), {seed: make_recall_model(setting, cell, seed) for seed in seeds_of(runs)}
    stack = train_recall(setting, runs, models, task, device)
    found = {times: score(stack, setting, task, len(runs), device, times) for times in TIMES}
    first = models[runs[0][1]].model
    longest = setting.length * max(TIMES)
    shared = {
        "parameters": sum(stack.sizes),
        "macs": count_compute(first, setting.length).body,
        "state": state_size(first, longest),
    }
    keys = {"setting": setting.name, "method": cell.method, "width": cell.width}
    return [
        {
            **keys,
            "rate": rate,
            "seed": seed,
            "loss": found[1][run]["loss"],
            "accuracy": found[1][run]["accuracy"],
            "by_length": {str(times): own[run]["accuracy"] for times, own in found.items()},
            "by_pairs": {str(times): own[run]["by_pairs"] for times, own in found.items()},
            **shared,
        }
        for run, (rate, seed) in enumerate(runs)
    ]


# -- results --------------------------------------------------------------------------------------------
def mean_accuracy(row: Row) -> float:
    """Return the mean accuracy over all lengths."""
    return sum(row["by_length"].values()) / len(row["by_length"])


def over_lengths(best: BestRows, a: str, b: str) -> Difference:
    """Return mean accuracy(a) - mean accuracy(b), paired by seed."""
    return difference(
        [
            mean_accuracy(row) - mean_accuracy(best[b, w, s])
            for (m, w, s), row in best.items()
            if m == a and (b, w, s) in best
        ]
    )


def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "the log-linear mask finds more needles over all lengths"."""
    best, compared = best_rows(rows, setting), {name for pair in FAMILIES for name in pair}
    if not compared <= set(setting.methods):
        return Verdict(UNDECIDED, f"the setting `{setting.name}` does not have both families")
    comparisons = [Comparison(f"{a} - {b}", over_lengths(best, a, b), above(0.0)) for a, b in FAMILIES]
    softmax = mean_and_error([row["accuracy"] for (m, _, _), row in best.items() if m == "softmax"])[0]
    short = f"softmax answers {100 * softmax:.1f}%, so training is too short" if softmax < SOFTMAX_FLOOR else ""
    return decide(setting, best, comparisons, compared, missed=[short] if short else [], invalid=short)


def table(rows: list[Row], setting: Setting) -> list[list[str]]:
    """Return the table: accuracy in % (mean ± standard error) by length, single needles at the longest rows, and
    states.
    """
    best = best_rows(rows, setting)
    single = f"one pair, {setting.length * max(TIMES):,} tokens"
    lines = [["mixer", *(f"{setting.length * t:,} tokens" for t in TIMES), single, "best rate", "state"]]
    for cell in setting.cells:
        own = [row for (m, w, _), row in best.items() if (m, w) == (cell.method, cell.width)]
        if own:
            cells = [_percent([row["by_length"][str(t)] for row in own]) for t in TIMES]
            fewest = str(min(setting.options["pairs"]))
            cells.append(_percent([row["by_pairs"][str(max(TIMES))][fewest] for row in own]))
            lines.append([cell.method, *cells, edge_mark(own), f"{own[0]['state']:,}"])
    return lines


def _percent(shares: list[float]) -> str:
    mean, error = mean_and_error([100 * share for share in shares])
    return f"{mean:.1f} ± {error:.1f}"


def draw(axes: Any, rows: list[Row], setting: Setting) -> None:
    """Draw accuracy against the length: of all questions, and of rows with one pair."""
    best, fewest = best_rows(rows, setting), str(min(setting.options["pairs"]))
    for method in setting.methods:
        own = [row for (m, _, _), row in best.items() if m == method]
        if own:
            tokens = [setting.length * t for t in TIMES]
            every = [mean_and_error([row["by_length"][str(t)] for row in own])[0] for t in TIMES]
            one = [mean_and_error([row["by_pairs"][str(t)][fewest] for row in own])[0] for t in TIMES]
            axes[0].plot(tokens, every, "o-", label=method)
            axes[1].plot(tokens, one, "o-", label=method)
    for axis, label in zip(axes, ("tokens, all questions", "tokens, one pair")):
        axis.set(xscale="log", xlabel=label)
    axes[0].set_ylabel("accuracy")
    axes[0].legend(fontsize=7)


EXPERIMENT = Experiment(
    name="needles",
    title="Needles from scratch",
    source="Log-Linear Attention, Table 4",
    claim="the log-linear mask finds more needles than its linear mask, over all lengths",
    rule=(
        "accuracy averaged over rows of 1, 2, 4 and 8 times the length of training: log-linear minus linear > 0 "
        "in both families. Baseline: softmax answers 99% at the length of training (else undecided)"
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
