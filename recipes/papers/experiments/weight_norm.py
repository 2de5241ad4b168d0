"""Norms of structured cores: do they keep the features of a deep BTT decoder bounded? (Qiu et al. 2024, "Compute Better
Spent", section 5.1, Figure 7)

python -m recipes.papers.experiments.weight_norm run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.weight_norm show [rows.jsonl ..] [--plot weight_norm.png]

A character-level decoder over Python source, all linears but the head BTT of rank 4, at a constant rate. `none` trains
the cores, `cores` bounds the root mean square of each by its initial one times a learned factor
(surgery/training/weight_norm.py). The root mean square of the input of the last norm is measured at twenty times of
training; growth is the slope of its logarithm over the second half, in e-folds per half.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.models import make_decoder, make_stage
from recipes.papers.experiments.scaling import fit_power_law
from recipes.papers.experiments.sweep import (
    Cell,
    Row,
    Setting,
    best_rows,
    difference,
    mean_and_error,
    paired_difference,
)
from recipes.papers.experiments.text import VOCABULARY, CodeRows, score_text, text_loss
from recipes.papers.experiments.training import seeds_of, train_stack
from recipes.papers.experiments.verdicts import UNDECIDED, Comparison, Verdict, above, below, decide, has_diverged
from recipes.papers.mup.models import rate_factors
from recipes.papers.script import run_script
from recipes.papers.training.compute import count_compute
from recipes.papers.training.stacked import Batch, StackedTraining, causal_mask
from surgery.training.weight_norm import add_core_norms

BTT = {"structure": "btt", "blocks": "sqrt", "rank": 4}
TIMES = 20  # measurements of a run
CLOSE = 0.002  # nats per character within which losses count as equal
PAPER = "the paper: GPT-2, OpenWebText"
SETTINGS = (
    Setting(
        "cpu", "cpu", (64,), ("none", "cores"), (1.9e-4, 7.5e-4, 3e-3, 1.2e-2), 4, 600, 8, 32, 4,
        {"text": "surgery", "characters": 1_000_000, "held_out": 256, "mlp": 2},
    ),
    Setting(
        "gpu_128", "gpu", (128,), ("none", "cores"), (2.5e-4, 1e-3, 4e-3, 1.6e-2), 4, 3000, 16, 128, 8,
        {"text": "packages", "characters": 24_000_000, "held_out": 2048, "mlp": 4},
    ),
    Setting(
        "gpu", "gpu", (128,), ("none", "cores"), (2.5e-4, 1e-3, 4e-3, 1.6e-2), 4, 6000, 32, 128, 12,
        {"text": "packages", "characters": 24_000_000, "held_out": 2048, "mlp": 4},
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (16,), ("none", "cores"), (1e-2,), 2, 4, 2, 16, 1,
    {"text": "surgery", "characters": 50_000, "held_out": 4, "mlp": 1},
)  # fmt: skip


def heads(cell: Cell) -> int:
    """Return the number of attention heads."""
    return max(1, cell.width // 64)


class RecordingNorm(nn.Module):
    """A norm that keeps its input while `recording`, so that a training step leaves no reference to its graph."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm
        self.last: Tensor | None = None
        self.recording = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized rows."""
        if self.recording:
            self.last = x
        return self.norm(x)


def make_deep_model(setting: Setting, cell: Cell, seed: int) -> Any:
    """Return the decoder without core norms; its last norm records its input."""
    model = make_decoder(
        None, width=cell.width, layers=setting.layers, heads=heads(cell), length=setting.length, vocabulary=VOCABULARY, seed=seed,
        mlp=setting.options["mlp"] * cell.width, embedding_std=0.5, structure=BTT,
    )  # fmt: skip
    model.model.norm = RecordingNorm(model.model.norm)
    return model


def norm_cores(model: Any, factors: dict[str, float]) -> dict[str, float]:
    """Add core norms in place; return the factors on the rates by the new names: the bound itself is not trained."""
    add_core_norms(model, set(factors))
    found = {}
    for name, _ in model.named_parameters():
        plain = name.replace(".parametrizations.", ".").removesuffix(".original")
        found[name] = 0.0 if name.endswith(".0.size") else factors.get(plain, 1.0)
    return found


class FeatureMeter:
    """Root mean square of the input of the last norm, of each run, at TIMES even steps of training."""

    def __init__(self, ids_BT: Tensor, runs: int, steps: int):
        self.batch = {"ids": ids_BT.expand(runs, *ids_BT.shape)}
        self.at = {round((i + 1) * steps / TIMES) - 1 for i in range(TIMES)}
        self.found: dict[int, list[float]] = {}

    def __call__(self, stack: StackedTraining, step: int) -> None:
        """Measure after a step, if it is one of the times."""
        if step in self.at:
            norm: Any = stack.model.model.norm

            def size(call: Any, batch: Batch) -> Tensor:
                ids_BT = batch["ids"]
                call(ids_BT, attention_mask=causal_mask(ids_BT.shape[1], ids_BT.device), use_cache=False)
                x_BTD, norm.last = norm.last, None
                return x_BTD.float().square().mean().sqrt()

            norm.recording = True
            self.found[step + 1] = stack.map(size, self.batch).tolist()
            norm.recording = False


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    rows = CodeRows(setting.options["text"], setting.options["characters"], device)
    models = {seed: make_deep_model(setting, cell, seed) for seed in seeds_of(runs)}
    first = models[runs[0][1]]
    macs = count_compute(first, setting.length).body
    factors = rate_factors(first, make_stage(setting.steps, base_width=64))
    if cell.method == "cores":
        named = [norm_cores(model, factors) for model in models.values()]
        factors = named[0]
    meter = FeatureMeter(rows.held_out(setting.length, setting.rows)[:, :-1], len(runs), setting.steps)
    stack = train_stack(
        setting, runs, models, lambda seed, start, count: rows.batch(seed, start, count, setting.length), device,
        loss=text_loss, row_numbers=setting.length, factors=factors, floor=1.0, after_step=meter,
    )  # fmt: skip
    keys = {"setting": setting.name, "method": cell.method, "width": cell.width}
    shared = {"parameters": sum(stack.sizes), "macs": macs}
    return [
        {
            **keys,
            "rate": rate,
            "seed": seed,
            **own,
            "rms": {str(step): _finite(values[run]) for step, values in meter.found.items()},
            **shared,
        }
        for run, ((rate, seed), own) in enumerate(zip(runs, score_text(stack, setting, rows, len(runs))))
    ]


def _finite(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


# -- results --------------------------------------------------------------------------------------------
def growth(row: Row) -> float:
    """Return the growth of a run: the slope of log RMS over the second half of training times the length of that
    half.
    """
    points = [(int(step), value) for step, value in row["rms"].items()]
    half = max(step for step, _ in points) / 2
    late = [(math.exp(step / half), math.inf if value is None else value) for step, value in points if step >= half]
    if len(late) < 3 or any(not 0 < value < math.inf for _, value in late):
        return math.inf
    return -fit_power_law(late).alpha


def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "features grow without core norms and not with them, and the loss is no worse"."""
    best = {key: {**row, "growth": growth(row)} for key, row in best_rows(rows, setting).items()}
    if has_diverged(best, setting) or any(math.isinf(row["growth"]) for row in best.values()):
        return Verdict(UNDECIDED, "a run at the best rate diverged, or has too few measurements")
    none, cores = (
        difference([r["growth"] for (m, _, _), r in best.items() if m == method]) for method in ("none", "cores")
    )
    comparisons = [
        Comparison("growth without norms", none, above(0.0)),
        Comparison("cores - none in growth", paired_difference(best, "cores", "none", "growth"), below(0.0)),
        Comparison("cores - none in loss", paired_difference(best, "cores", "none", "loss"), below(CLOSE)),
    ]
    return decide(
        setting, best, comparisons, ("none", "cores"), missed=[PAPER], besides=[f"growth with norms {cores}"],
        lacking="features grow with norms too" if cores.low > 0 else "",
    )  # fmt: skip


def table(rows: list[Row], setting: Setting) -> list[list[str]]:
    """Return the table: loss at the best rate, RMS at the middle and the end, for every rate with seed 0 too."""
    best = best_rows(rows, setting)
    lines = [["norms", "rate", "seeds", "nats per character", "RMS, middle", "RMS, end", "growth"]]
    for method in setting.methods:
        own = [row for (m, _, _), row in best.items() if m == method]
        others = [r for r in rows if (r["setting"], r["method"], r["seed"]) == (setting.name, method, 0)]
        lines += [_line(method, [r], "") for r in others if own and r["rate"] != own[0]["rate"]]
        if own:
            lines.append(_line(method, own, " (best, edge)" if own[0]["edge"] else " (best)"))
    return lines


def _line(method: str, rows: list[Row], mark: str) -> list[str]:
    steps = [int(step) for step in rows[0]["rms"]]
    middle = min(steps, key=lambda step: abs(step - max(steps) / 2))

    def mean(values: list[float | None], form: str = ".3g") -> str:
        known = [value for value in values if value is not None and math.isfinite(value)]
        if len(known) < len(values):
            return "diverged"
        average, error = mean_and_error(known)
        return f"{average:{form}}" + (f" ± {error:.2g}" if len(known) > 1 else "")

    sizes = [mean([row["rms"][str(step)] for row in rows]) for step in (middle, max(steps))]
    loss, grown = mean([row["loss"] for row in rows], ".4f"), mean([growth(row) for row in rows])
    return [method, f"{rows[0]['rate']:g}{mark}", str(len(rows)), loss, *sizes, grown]


def draw(axes: Any, rows: list[Row], setting: Setting) -> None:
    """Draw the RMS against the step: the best rates on the left, the largest rate on the right."""
    best = best_rows(rows, setting)
    largest = [r for r in rows if r["setting"] == setting.name and r["rate"] == max(setting.rates) and r["seed"] == 0]
    for axis, shown in zip(axes, (list(best.values()), largest)):
        for row in shown:
            color = {"none": "C0", "cores": "C1"}[row["method"]]
            label = row["method"] if row["seed"] == 0 else None
            points = [(int(step), value) for step, value in row["rms"].items() if value is not None]
            axis.plot([p[0] for p in points], [p[1] for p in points], color=color, label=label)
        axis.set(xlabel="step", yscale="log")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("RMS before the last norm")


EXPERIMENT = Experiment(
    name="weight_norm",
    title="Norms of structured cores in a deep BTT decoder",
    source="Compute Better Spent, Figure 7",
    claim="without norms the features grow without bound; with them they stay bounded, and the loss is no worse",
    rule=(
        "growth of the features (e-folds over the second half of training) at the best rates: > 0 without norms, "
        "cores minus none < 0, and cores minus none in the loss < 0.002 nats. Also: the plain interval with norms "
        "reaches 0"
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
