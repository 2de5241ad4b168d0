"""Scaling laws of MLPs by structure: is the exponent of BTT larger than that of dense layers? (Qiu et al. 2024,
"Compute Better Spent", Figures 1b, 1c, 4 to 6)

python -m recipes.papers.experiments.scaling run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.scaling show [rows.jsonl ..] [--plot scaling.png]

Three residual blocks h + W_2 gelu(W_1 LN(h)) with W_1 (4 d, d), after an input layer (dense for low rank, else of the
structure) and before a dense classifier. The task is not the paper's CIFAR but the class that a fixed random network
gives an input with variance 1 / k in dimension k (`teacher` of surgery/training/data/generated.py). Rows never repeat,
so the error of held-out rows is that of training. `tt_c2_r16` is a tensor train of two cores and rank 16, as in the
paper's MLPs. Every core has the rate of its fan-in; `btt_naive` has the rate of the dense layer in its place; the input
layer's rate is 0.1 times that of the others. The error is fitted by E ~ C^-alpha over widths and seeds, C: MACs of all
layers for one row. The comparison at equal compute interpolates between measured widths and never extrapolates, because
the law bends at small widths.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.sweep import (
    BestRows,
    Cell,
    Difference,
    Row,
    Setting,
    best_rows,
    edge_mark,
    finite_or_none,
    mean_and_error,
)
from recipes.papers.experiments.training import seeds_of, train_stack
from recipes.papers.experiments.verdicts import ANY, UNDECIDED, Comparison, Verdict, above, decide
from recipes.papers.script import run_script
from recipes.papers.training.compute import linear_macs
from recipes.papers.training.stacked import Batch
from recipes.papers.training.values import TeacherTask
from surgery.structures import STRUCTURES, StructuredLinear
from surgery.structures.base import MuP, config_from_dict
from surgery.training.data.generated import VALIDATION_SEED
from surgery.training.pretrain.initialize import initialize_module, zero_output

BASE_WIDTH, BLOCKS, INPUT_RATE = 64, 3, 0.1
MATCHED = 2  # dense widths, from the smallest on, that the comparison at equal compute leaves out
DENSE_GPU = (64, 128, 256, 512, 1024)
WIDE_GPU = (256, 512, 1024, 2048, 4096, 8192)
PAPER = "the paper: CIFAR-10 and CIFAR-100"
SETTINGS = (
    Setting(
        "cpu", "cpu", (16, 32, 64, 128), ("dense", "btt"), (1e-3, 4e-3, 1.6e-2, 6.4e-2, 2.56e-1), 3, 400, 256, 1, BLOCKS,
        {"dims": 64, "classes": 16, "teacher": 64, "held_out": 4096, "widths": {"btt": (32, 64, 128, 256)}},
    ),
    Setting(
        "gpu_short", "gpu", (64, 128, 256, 512), ("dense", "btt"), (1e-3, 3e-3, 9e-3, 2.7e-2, 8.1e-2), 4, 1500, 512, 1, BLOCKS,
        {"dims": 3072, "classes": 64, "teacher": 256, "held_out": 32768, "widths": {"btt": (256, 512, 1024, 2048)}},
    ),
    Setting(
        "gpu", "gpu", DENSE_GPU, ("dense", "btt", "btt_naive", "btt_4", "monarch", "low_rank", "kronecker", "tt_c2_r16"),
        (1e-3, 3e-3, 9e-3, 2.7e-2, 8.1e-2), 2, 4000, 1024, 1, BLOCKS,
        {"dims": 3072, "classes": 64, "teacher": 256, "held_out": 65536,
         "widths": {**dict.fromkeys(("btt", "btt_naive", "low_rank", "btt_4", "kronecker", "tt_c2_r16"), WIDE_GPU),
                    "monarch": (112, 224, 448, 912, 1824)}},
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (16,), ("dense", "btt", "btt_naive", "btt_4", "monarch", "low_rank", "kronecker", "tt_c2_r16"), (1e-2,), 1, 2, 8, 1, 1,
    {"dims": 8, "classes": 4, "teacher": 8, "held_out": 16},
)  # fmt: skip


def heads(cell: Cell) -> int:
    """Return 0: the models have no attention."""
    return 0


def core_keys(method: str) -> dict[str, Any]:
    """Return the recipe keys of "btt_c3_r1" (block tensor train of 3 cores and rank 1) or "tt_c2_r16" (tensor train).

    KeyError for other names.
    """
    found = re.fullmatch(r"(btt|tt)_c(\d)_r(\d+)", method)
    if found is None:
        raise KeyError(method)
    kind = {"btt": "block_tensor_train", "tt": "tensor_train"}[found[1]]
    return {"structure": kind, "cores": int(found[2]), "rank": int(found[3])}


def make_linear(method: str, in_: int, out: int) -> nn.Module:
    """Return a linear of a method, initialized by muP."""
    root = round(math.sqrt(min(in_, out)))
    keys: dict[str, Any] = {
        "btt": {"structure": "btt", "blocks": "sqrt", "rank": 1},
        "btt_4": {"structure": "btt", "blocks": "sqrt", "rank": 4},
        "monarch": {"structure": "btt", "blocks": [4, 4], "rank": max(1, min(in_, out) // 16)},
        "monarch_16": {"structure": "btt", "blocks": [16, 16], "rank": max(1, min(in_, out) // 256)},
        "low_rank": {"structure": "low_rank", "rank": root},
        "low_rank_tenth": {"structure": "low_rank", "rank": max(1, round(0.1 * min(in_, out)))},
        "kronecker": {"structure": "kronecker", "rank": 1},
    }
    keys["btt_naive"] = keys["btt"]
    if method == "dense":
        linear: Any = nn.Linear(in_, out)
    else:
        config = config_from_dict(keys.get(method) or core_keys(method))
        kind = STRUCTURES[config]
        linear = kind(in_, out, kind.resolve(config, out, in_))
    initialize_module(linear)
    return linear


class ResidualMLP(nn.Module):
    """The model of a method at a width: input layer, residual blocks, classifier."""

    def __init__(self, method: str, width: int, inputs: int, classes: int, blocks: int, seed: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            self.input = make_linear("dense" if method == "low_rank" else method, inputs, width)
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks + 1))
            self.up = nn.ModuleList(make_linear(method, width, 4 * width) for _ in range(blocks))
            self.down = nn.ModuleList(make_linear(method, 4 * width, width) for _ in range(blocks))
            self.classifier = nn.Linear(width, classes)
            for linear in (*self.down, self.classifier):
                zero_output(linear)

    def forward(self, x_BI: Tensor) -> Tensor:
        """Return the logits (B, classes)."""
        h_BD = self.input(x_BI)
        for norm, up, down in zip(self.norms, self.up, self.down):
            h_BD = h_BD + down(nn.functional.gelu(up(norm(h_BD))))
        return self.classifier(self.norms[-1](h_BD))

    def macs(self) -> int:
        """Return the MACs of one row."""
        return sum(linear_macs(module) for module in self.modules())


def rate_factors(model: nn.Module, naive: bool) -> dict[str, float]:
    """Return parameter -> factor on the base rate: 64 / fan-in of matrices, 1 of others. naive: the fan-in of the dense
    layer.
    """
    factors = {name: 1.0 for name, _ in model.named_parameters()}
    for path, module in model.named_modules():
        if isinstance(module, StructuredLinear):
            fans = module.mup()
        elif isinstance(module, nn.Linear):
            fans = {"weight": MuP(module.in_features, module.out_features)}
        else:
            continue
        for leaf, mup in fans.items():
            fan_in = module.in_features if naive else mup.fan_in
            factors[f"{path}.{leaf}"] = BASE_WIDTH / fan_in * (INPUT_RATE if path == "input" else 1.0)
    return factors


def make_task(setting: Setting) -> TeacherTask:
    """Return the task of a setting."""
    sizes = setting.options
    return TeacherTask(dims=sizes["dims"], classes=sizes["classes"], width=sizes["teacher"])


def class_loss(call: Any, batch: Batch) -> Tensor:
    """Return the mean cross-entropy in nats."""
    return nn.functional.cross_entropy(call(batch["values"][:, 0]).float(), batch["labels"][:, 0])


def loss_and_error(call: Any, batch: Batch) -> Tensor:
    """Return (2,): mean cross-entropy in nats and share of wrong classes."""
    logits_BC, labels_B = call(batch["values"][:, 0]).float(), batch["labels"][:, 0]
    wrong = (logits_BC.argmax(-1) != labels_B).float().mean()
    return torch.stack([nn.functional.cross_entropy(logits_BC, labels_B), wrong])


def make_mlp(setting: Setting, cell: Cell, seed: int) -> ResidualMLP:
    """Return the model of a cell."""
    sizes = setting.options
    return ResidualMLP(cell.method, cell.width, sizes["dims"], sizes["classes"], setting.layers, seed)


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    return train_classifiers(setting, cell, runs, device, make_mlp, naive=cell.method == "btt_naive")


def train_classifiers(
    setting: Setting,
    cell: Cell,
    runs: list[tuple[float, int]],
    device: torch.device,
    make: Callable[[Setting, Cell, int], Any],
    *,
    naive: bool = False,
) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows. make(setting, cell, seed): a model of rows (B,
    dims) with `macs()`.

    naive: cores have the rate of the dense layer in their place.
    """
    task = make_task(setting)
    models = {seed: make(setting, cell, seed) for seed in seeds_of(runs)}
    first = models[runs[0][1]]

    def rows_of(seed: int, first: int, rows: int) -> Batch:
        return task.batch(seed, first, rows, 1, device)

    factors = rate_factors(first, naive)
    stack = train_stack(setting, runs, models, rows_of, device, loss=class_loss, row_numbers=task.dims, factors=factors)
    found, count = torch.zeros(len(runs), 2, device=device), setting.options["held_out"] // setting.rows
    for i in range(count):
        batch = task.batch(VALIDATION_SEED, i * setting.rows, setting.rows, 1, device)
        found += stack.map(loss_and_error, {n: t.expand(len(runs), *t.shape) for n, t in batch.items()}) / count
    keys = {"setting": setting.name, "method": cell.method, "width": cell.width}
    shared = {"parameters": sum(stack.sizes), "macs": first.macs()}
    return [
        {**keys, "rate": rate, "seed": seed, "loss": finite_or_none(loss), "error": round(error, 6), **shared}
        for (rate, seed), (loss, error) in zip(runs, found.tolist())
    ]


# -- results --------------------------------------------------------------------------------------------
class PowerLaw(NamedTuple):
    """E ~ C^-alpha, with the standard error of alpha."""

    alpha: float
    error: float


def fit_power_law(points: list[tuple[float, float]]) -> PowerLaw:
    """Return the least-squares fit of log E on log C over points (C, E), at least three of two different C."""
    x, y = [math.log(c) for c, _ in points], [math.log(max(e, 1e-9)) for _, e in points]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((v - mean_x) ** 2 for v in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / spread
    level = mean_y - slope * mean_x
    residual = sum((b - level - slope * a) ** 2 for a, b in zip(x, y)) / (len(x) - 2)
    return PowerLaw(-slope, math.sqrt(residual / spread))


def power_laws(rows: list[Row], setting: Setting) -> dict[str, PowerLaw]:
    """Return the fit of every method with at least three points of two widths."""
    best, laws = best_rows(rows, setting), {}
    for method in setting.methods:
        points = [(row["macs"], row["error"]) for (m, _, _), row in best.items() if m == method]
        if len(points) > 2 and len({c for c, _ in points}) > 1:
            laws[method] = fit_power_law(points)
    return laws


def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "the exponent of BTT is larger than that of dense layers, and its error lower at equal
    compute". Only the opposite of both contradicts it.
    """
    laws, best = power_laws(rows, setting), best_rows(rows, setting)
    if not {"dense", "btt"} <= set(laws):
        return Verdict(UNDECIDED, f"the sweep `{setting.name}` has too few widths")
    dense, btt = laws["dense"], laws["btt"]
    points = sum(method in ("dense", "btt") for method, _, _ in best)
    error = math.hypot(btt.error, dense.error)
    gap = Difference(btt.alpha - dense.alpha, error, math.nan, math.nan, points, "points", lost=4)
    curves = {method: mean_errors(best, method) for method in ("dense", "btt")}
    pairs = [
        (theirs, ours)
        for macs, theirs in curves["dense"][MATCHED:]
        if (ours := interpolate(curves["btt"], macs)) is not None
    ]
    lower, count = sum(ours <= theirs for theirs, ours in pairs), len(pairs)
    where = f"BTT at or below dense at {lower} of {count} widths whose compute lies within BTT's"
    alphas = f"alpha of BTT {btt.alpha:.3f} ± {btt.error:.3f}, dense {dense.alpha:.3f} ± {dense.error:.3f}"
    comparison = Comparison("alpha of BTT - dense", gap, above(0.0), ANY if lower or not count else None)
    return decide(
        setting, best, [comparison], ("dense", "btt"), missed=[PAPER], besides=[alphas, where],
        lacking="" if count and lower == count else where,
    )  # fmt: skip


def mean_errors(best: BestRows, method: str) -> list[tuple[float, float]]:
    """Return (MACs, mean error over seeds) of a method, by ascending MACs."""
    sizes = sorted({row["macs"] for (m, _, _), row in best.items() if m == method})
    own = [row for (m, _, _), row in best.items() if m == method]
    return [(macs, mean_and_error([row["error"] for row in own if row["macs"] == macs])[0]) for macs in sizes]


def interpolate(curve: list[tuple[float, float]], macs: float) -> float | None:
    """Return the error at a compute, on the line between the measured neighbors in log-log; None outside of the
    measured range.
    """
    for (low, first), (high, last) in pairwise(curve):
        if low <= macs <= high:
            share = math.log(macs / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(max(first, 1e-9)) + share * math.log(max(last, 1e-9)))
    return None


def table(rows: list[Row], setting: Setting) -> list[list[str]]:
    """Return the table: error in % (mean ± standard error) by structure and width, and alpha."""
    best, laws = best_rows(rows, setting), power_laws(rows, setting)
    lines = [["structure", "width", "MACs", "parameters", "error, %", "best rate", "alpha"]]
    for cell in setting.cells:
        own = [row for (m, w, _), row in best.items() if (m, w) == (cell.method, cell.width)]
        if own:
            mean, error = mean_and_error([100 * row["error"] for row in own])
            law = laws.get(cell.method)
            lines.append(
                [cell.method, str(cell.width), f"{own[0]['macs']:,}", f"{own[0]['parameters']:,}", f"{mean:.2f} ± {error:.2f}",
                 edge_mark(own), f"{law.alpha:.3f} ± {law.error:.3f}" if law else ""]
            )  # fmt: skip
    return lines


def draw(axes: Any, rows: list[Row], setting: Setting) -> None:
    """Draw error and loss against compute."""
    best = best_rows(rows, setting)
    for method in setting.methods:
        own = sorted(
            (row["macs"], row["error"], row["loss"] or math.nan) for (m, _, _), row in best.items() if m == method
        )
        for axis, column in zip(axes, (1, 2)):
            axis.plot([p[0] for p in own], [p[column] for p in own], "o", label=method, markersize=4)
            axis.set(xscale="log", yscale="log", xlabel="MACs", ylabel=("", "error", "nats")[column])
    axes[0].legend(fontsize=7)


EXPERIMENT = Experiment(
    name="scaling",
    title="Scaling of MLPs by structure",
    source="Compute Better Spent, Figures 1b, 1c, 4 to 6",
    claim="the exponent of BTT is larger than that of dense layers, and its error lower at equal compute",
    rule=(
        "exponent of BTT minus that of dense layers > 0, by the standard errors of both fits. Also: its error is "
        "at or below theirs at every dense width above the two smallest whose compute lies within BTT's. Only the "
        "opposite of both contradicts"
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
