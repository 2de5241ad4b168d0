"""Language models from scratch: is the log-linear mask better than its linear mask, and more so at late positions? (Guo
et al. 2025, "Log-Linear Attention", Figure 5, Table 3)

python -m recipes.papers.experiments.language run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.language show [rows.jsonl ..] [--plot language.png]

Decoders over the characters of Python source, with heads and states of 32 dimensions, and a causal convolution of width
3 before every mixer, softmax too. All methods see the same rows in the same order for each seed. The state of a
log-linear model grows with the logarithm of the length; `ssd_wide` and `gdn_wide` have heads of twice the size and so
twice the state of the linear models.
"""

from __future__ import annotations

import torch

from recipes.papers.experiments.characters import draw
from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.recall import CORE, FAMILIES, attention_keys
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
    paired_difference,
)
from recipes.papers.experiments.text import perplexity, train_text
from recipes.papers.experiments.verdicts import ANY, DIVERGED, Comparison, Verdict, below, decide, has_diverged
from recipes.papers.script import run_script

HEAD = 32  # dimensions of a head and of its state
WIDE = {"ssd_wide": "ssd", "gdn_wide": "gdn"}
METHODS = (*CORE, *WIDE)
PAPER = "the paper: T = 16,384, 800M parameters, 50B tokens of long texts"
SETTINGS = (
    Setting(
        "cpu", "cpu", (32,), CORE, (3e-3, 1e-2, 3e-2, 1e-1), 3, 400, 8, 64, 2,
        {"text": "surgery", "characters": 1_000_000, "held_out": 512, "convolution": 3, "late": 16, "levels": 7},
    ),
    Setting(
        "gpu_512", "gpu", (128,), CORE, (1e-3, 3e-3, 9e-3, 2.7e-2), 4, 2000, 8, 512, 4,
        {"text": "packages", "characters": 24_000_000, "held_out": 2048, "convolution": 3, "late": 128, "levels": 10},
    ),
    Setting(
        "gpu", "gpu", (256,), METHODS, (1e-3, 3e-3, 9e-3), 3, 5000, 8, 2048, 8,
        {"text": "packages", "characters": 48_000_000, "held_out": 512, "convolution": 3, "late": 128, "levels": 12},
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (32,), METHODS, (1e-2,), 1, 2, 2, 32, 1,
    {"text": "surgery", "characters": 50_000, "held_out": 4, "convolution": 3, "mlp": 1, "late": 16, "levels": 6},
)  # fmt: skip


def heads(cell: Cell) -> int:
    """Return the number of attention heads."""
    return max(1, cell.width // HEAD // (2 if cell.method in WIDE else 1))


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    keys = attention_keys(WIDE.get(cell.method, cell.method), setting.options["levels"])
    return train_text(setting, cell, runs, device, keys, heads(cell))


# -- results --------------------------------------------------------------------------------------------
def by_octave(best: BestRows, a: str, b: str, late: int) -> dict[int, Difference]:
    """Return loss(a) - loss(b) in each octave that ends behind position `late`, by the end of the octave."""
    pairs = [(row, best[b, w, s]) for (m, w, s), row in best.items() if m == a and (b, w, s) in best]
    ends = [end for end in pairs[0][0]["by_position"] if int(end) > late]
    return {int(e): difference([x["by_position"][e] - y["by_position"][e] for x, y in pairs]) for e in ends}


def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "the log-linear mask has a lower loss at every position, most at late ones".

    Only the last octave can contradict it.
    """
    best = best_rows(rows, setting)
    if has_diverged(best, setting):
        return DIVERGED
    comparisons, besides, lacking = [], [], []
    for a, b in FAMILIES:
        octaves = by_octave(best, a, b, setting.options["late"])
        first, last = octaves[min(octaves)], octaves[max(octaves)]
        comparisons += [
            Comparison(f"{a} - {b} to position {end:,}", found, below(0.0), None if found is last else ANY)
            for end, found in octaves.items()
        ]
        besides.append(f"{a} - {b} at all positions: {paired_difference(best, a, b, 'loss')}")
        if last.mean >= first.mean:
            lacking.append(f"{a} does not gain with the position")
    return decide(
        setting, best, comparisons, {name for pair in FAMILIES for name in pair}, missed=[PAPER],
        lacking="; ".join(lacking), besides=besides,
    )  # fmt: skip


def table(rows: list[Row], setting: Setting) -> list[list[str]]:
    """Return the table: held-out loss (mean ± standard error), of the last octave too, perplexity, state and
    compute.
    """
    best = best_rows(rows, setting)
    half = f"positions {setting.length // 2:,} on"
    lines = [["mixer", "width", "nats per character", "perplexity", half, "best rate", "state", "MACs"]]
    for cell in setting.cells:
        own = [
            row for (m, w, _), row in best.items() if (m, w) == (cell.method, cell.width) and row["loss"] is not None
        ]
        if own:
            mean, error = mean_and_error([row["loss"] for row in own])
            last = mean_and_error([row["by_position"][str(setting.length)] for row in own])[0]
            cells = [f"{mean:.4f} ± {error:.4f}", f"{perplexity(mean):.3f}", f"{last:.4f}", edge_mark(own)]
            lines.append([cell.method, str(cell.width), *cells, f"{own[0]['state']:,}", f"{own[0]['macs']:,}"])
    return lines


EXPERIMENT = Experiment(
    name="language",
    title="Language models from scratch: loss by position",
    source="Log-Linear Attention, Figure 5, Table 3",
    claim="the log-linear mask has a lower loss than its linear mask, most at late positions",
    rule=(
        "in both families log-linear minus linear < 0 in every octave of late positions (from 128 on in the GPU "
        "settings); only the last octave can contradict. Also: the mean is lower in the last of them than in the "
        "first"
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
