"""Tokenised series: does a decoder with MLR attention reach the loss of softmax with less compute? (Kuang et al. 2025,
"Customizing the Inductive Biases of Softmax Attention", Figure 15)

python -m recipes.papers.experiments.series_tokens run --setting cpu [--data ETTh1.csv] [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.series_tokens show [rows.jsonl ..] [--plot series_tokens.png]

Rows are series of random kernels (KernelSynth) as tokens: values over the mean |x| of the context, in uniform bins on
[-15, 15]. The context is the first 8/9 of a row, as in rows of 512 and 64 tokens. With --data, the columns of ETTh1 are
scored too; nothing trains on them. The paper trains Chronos, an encoder-decoder with the position biases of T5, which
mixers do not take. Here the model is a decoder with learned positions and next-token loss, which changes the model and
not the claim: MLR attention, with its 32 | 10 | 8 | 8 | 4 | 2 score dimensions of a head in nested blocks of T /
2^(l-1) tokens, takes fewer MACs. Heads have 64 dimensions, or the whole width if it is smaller.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.models import make_decoder, make_stage
from recipes.papers.experiments.series import (
    PositionedEmbedding,
    kernel_bank,
    mlr_keys,
    read_csv,
    tokens,
    unbiased_levels,
    without_rotation,
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
    finite_or_none,
    mean_and_error,
)
from recipes.papers.experiments.text import position_losses, text_loss
from recipes.papers.experiments.training import seeds_of, train_stack
from recipes.papers.experiments.verdicts import DIVERGED, Comparison, Verdict, below, decide, has_diverged
from recipes.papers.mup.models import rate_factors
from recipes.papers.script import run_script
from recipes.papers.training.compute import count_compute, state_size
from recipes.papers.training.stacked import Batch, StackedTraining
from surgery.training.data.generated import integers

HEAD = 64
RANKS = (32, 10, 8, 8, 4, 2)
METHODS = ("softmax", "mlr")
CLOSE = 0.005  # relative difference of losses within which they count as equal
LONG = 2  # series of the bank in lengths of a row
PAPER = "the paper: Chronos on its own data"
SETTINGS = (
    Setting(
        "cpu", "cpu", (32, 64), METHODS, (1e-3, 3e-3, 9e-3, 2.7e-2, 8.1e-2), 5, 250, 8, 144, 2,
        {"bins": 254, "series": 4000, "held_out": 256, "mlp": 2},
    ),
    Setting(
        "gpu", "gpu", (128, 256, 384), METHODS, (1e-3, 3e-3, 9e-3), 3, 800, 32, 576, 4,
        {"bins": 4094, "series": 8000, "held_out": 1024, "mlp": 4},
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (16,), METHODS, (1e-2,), 2, 2, 2, 18, 1,
    {"bins": 30, "series": 80, "held_out": 4, "mlp": 1},
)  # fmt: skip


def heads(cell: Cell) -> int:
    """Return the number of attention heads."""
    return max(1, cell.width // HEAD)


def context(length: int) -> int:
    """Return the number of tokens of a row whose mean |x| is its scale."""
    return length * 8 // 9


class SeriesRows:
    """Rows of training and held-out rows on a device, tokens (B, T + 1). real: rows of a file, None without one."""

    def __init__(self, setting: Setting, device: torch.device):
        sizes, self.length = setting.options, setting.length
        self.bins = sizes["bins"]
        self.bank_NT = kernel_bank(sizes["series"], LONG * self.length, 0, device)
        self.training = round(0.95 * len(self.bank_NT))
        held_out = self.bank_NT[self.training :].unfold(1, self.length + 1, self.length + 1).flatten(0, 1)
        self.held_out = self.tokens(held_out[: sizes["held_out"]])
        self.real = None
        if (path := sizes.get("data")) is not None:
            columns_CN = load_columns(path, self.length + 1).T.to(device)
            parts = columns_CN.unfold(1, self.length + 1, self.length + 1).flatten(0, 1)
            every = max(1, len(parts) // sizes["held_out"])
            self.real = self.tokens(parts[::every][: sizes["held_out"]])

    def tokens(self, values_BT: Tensor) -> Tensor:
        """Return the tokens (B, T + 1) of values."""
        return tokens(values_BT, context(self.length), self.bins)

    def batch(self, seed: int, first: int, rows: int) -> Batch:
        """Return ids (B, T + 1) of random series from random places on."""
        row_B = torch.arange(first, first + rows, device=self.bank_NT.device)
        which_B1 = integers(seed, row_B, 0, 1, self.training)
        start_B1 = integers(seed, row_B, 1, 1, (LONG - 1) * self.length)
        at_BT = start_B1 + torch.arange(self.length + 1, device=row_B.device)
        return {"ids": self.tokens(self.bank_NT[which_B1, at_BT])}


@lru_cache(maxsize=1)
def load_columns(path: str, rows: int) -> Tensor:
    """Return the columns (N, 7) of a file."""
    return read_csv(Path(path), rows)


def make_model(setting: Setting, cell: Cell, seed: int) -> Any:
    """Return the decoder of a method."""
    size = cell.width // heads(cell)
    attention = mlr_keys(RANKS, size, setting.length) if cell.method == "mlr" else {"mixer": "softmax", "rope": "drop"}
    model = make_decoder(
        attention, width=cell.width, layers=setting.layers, heads=heads(cell), length=setting.length, vocabulary=setting.options["bins"],
        seed=seed, mlp=setting.options["mlp"] * cell.width, embedding_std=0.5,
    )  # fmt: skip
    return without_rotation(model)


def add_positions(model: Any, length: int, seed: int) -> Any:
    """Return the decoder, changed in place to add learned positions to its embeddings."""
    model.model.embed_tokens = PositionedEmbedding(model.model.embed_tokens, length, seed)
    return model


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    rows = SeriesRows(setting, device)
    models = {seed: make_model(setting, cell, seed) for seed in seeds_of(runs)}
    first = models[runs[0][1]]
    compute, state = count_compute(first, setting.length), state_size(first, setting.length)
    for seed, model in models.items():
        add_positions(model, setting.length, seed)
    stack = train_stack(
        setting, runs, models, rows.batch, device, loss=text_loss, row_numbers=setting.length,
        factors=unbiased_levels(first, rate_factors(first, make_stage(setting.steps, base_width=64))),
    )  # fmt: skip
    shared = {"parameters": sum(stack.sizes), "macs": compute.body, "macs_with_head": compute.total, "state": state}
    keys = {"setting": setting.name, "method": cell.method, "width": cell.width}
    made = score(stack, rows.held_out, setting, len(runs))
    real = None if rows.real is None else score(stack, rows.real, setting, len(runs))
    return [
        {**keys, "rate": rate, "seed": seed, "loss": made[i][0], "forecast": made[i][1],
         "real": real and real[i][0], "real_forecast": real and real[i][1], **shared}
        for i, (rate, seed) in enumerate(runs)
    ]  # fmt: skip


def score(
    stack: StackedTraining, ids_NT: Tensor, setting: Setting, runs: int
) -> list[tuple[float | None, float | None]]:
    """Return (loss of all tokens, loss of the tokens behind the context) of each run, in nats per token."""
    total_MT = torch.zeros(runs, setting.length, device=ids_NT.device)
    for part_BT in ids_NT.split(setting.rows):
        total_MT += len(part_BT) * stack.map(position_losses, {"ids": part_BT.expand(runs, *part_BT.shape)})
    loss_MT = (total_MT / len(ids_NT)).double().cpu()
    behind = context(setting.length) - 1
    return [(finite_or_none(float(own.mean())), finite_or_none(float(own[behind:].mean()))) for own in loss_MT]


# -- results --------------------------------------------------------------------------------------------
def relative(best: BestRows, width: int, metric: str = "loss") -> Difference | None:
    """Return loss(mlr) / loss(softmax) - 1 over pairs of equal seed; None without the metric."""
    pairs = [
        (row.get(metric), best["softmax", w, seed].get(metric))
        for (m, w, seed), row in best.items()
        if (m, w) == ("mlr", width) and ("softmax", w, seed) in best
    ]
    ratios = [a / b - 1 for a, b in pairs if a is not None and b is not None]
    return difference(ratios) if pairs and len(ratios) == len(pairs) else None


def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "the same loss with fewer MACs"."""
    best = best_rows(rows, setting)
    if has_diverged(best, setting):
        return DIVERGED
    comparisons, besides, more = [], [], []
    for width in setting.widths:
        if (gap := relative(best, width)) is None:
            return DIVERGED
        comparisons.append(Comparison(f"mlr / softmax - 1 at width {width}", gap, below(CLOSE)))
        share = best["mlr", width, 0]["macs"] / best["softmax", width, 0]["macs"]
        besides.append(f"{share:.3f} of the MACs at width {width}")
        more += [str(width)] if share >= 1 else []
        if (real := relative(best, width, "real")) is not None:
            besides.append(f"on the file {real}")
    lacking = f"as many MACs or more at width {', '.join(more)}" if more else ""
    return decide(setting, best, comparisons, setting.methods, missed=[PAPER], lacking=lacking, besides=besides)


def table(rows: list[Row], setting: Setting) -> list[list[str]]:
    """Return the table: nats per token (mean ± standard error) of held-out series and of the file, and compute."""
    best = best_rows(rows, setting)
    lines = [
        ["attention", "width", "nats per token", "behind the context", "ETTh1", "behind the context", "best rate", "state", "MACs"]
    ]  # fmt: skip
    for cell in setting.cells:
        own = [row for (m, w, _), row in best.items() if (m, w) == tuple(cell) and row["loss"] is not None]
        if own:
            cells = [_mean(own, metric) for metric in ("loss", "forecast", "real", "real_forecast")]
            cells += [edge_mark(own), f"{own[0]['state']:,}", f"{own[0]['macs']:,}"]
            lines.append([cell.method, str(cell.width), *cells])
    return lines


def _mean(rows: list[Row], metric: str) -> str:
    values = [value for row in rows if (value := row.get(metric)) is not None]
    if len(values) < len(rows):
        return ""
    mean, error = mean_and_error(values)
    return f"{mean:.4f} ± {error:.4f}"


def draw(axes: Any, rows: list[Row], setting: Setting) -> None:
    """Draw the loss on held-out series, and on the file, against MACs."""
    best = best_rows(rows, setting)
    for axis, metric, label in zip(axes, ("loss", "real"), ("series of kernels", "ETTh1")):
        for method in setting.methods:
            own = [row for (m, _, _), row in best.items() if m == method and row.get(metric) is not None]
            sizes = sorted({row["macs"] for row in own})
            means = [mean_and_error([row[metric] for row in own if row["macs"] == macs]) for macs in sizes]
            axis.errorbar(sizes, [m for m, _ in means], [e for _, e in means], marker="o", label=method)
        axis.set(xlabel=f"MACs per token, {label}", ylabel="nats per token", xscale="log")
    axes[0].legend(fontsize=7)


EXPERIMENT = Experiment(
    name="series_tokens",
    title="Tokenised series: MLR attention",
    source="Customizing, Figure 15",
    claim="MLR attention reaches the held-out loss of softmax with fewer MACs at every size",
    rule=(
        "ratio of the losses of held-out series of random kernels, by seed: mlr / softmax - 1 < 0.005 at every "
        "width. Also: with fewer MACs. ETTh1's columns decide nothing"
    ),
    settings=SETTINGS,
    smoke=SMOKE,
    heads=heads,
    train=train,
    verdict=verdict,
    table=table,
    draw=draw,
    data="Path of ETTh1.csv, whose columns are scored too. Default: only series of random kernels.",
)

if __name__ == "__main__":
    run_script(lambda: main(EXPERIMENT))
