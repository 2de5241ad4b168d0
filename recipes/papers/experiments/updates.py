"""Size of feature updates by width: do structure-aware rates keep it constant? (Qiu et al. 2024, "Compute Better
Spent", Figure 2a)

python -m recipes.papers.experiments.updates run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.updates show [rows.jsonl ..] [--plot updates.png]

An MLP with two hidden layers of d units (gelu, without biases) and a dense classifier, on the `teacher` task of
`scaling`. A method's name is that of its structure, at the rates of the fan-in of each core; with `_naive`, at those of
the dense layer in its place. The update is the root mean square of the change of the last features by one step, on 64
fixed inputs, averaged over all steps of a constant rate. It is fitted by update ~ d^slope for each seed. All methods
have one base rate, because its only effect is on the size of all updates.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.scaling import fit_power_law, make_linear, make_task, rate_factors
from recipes.papers.experiments.sweep import Cell, Row, Setting, best_rows, difference, finite_or_none, mean_and_error
from recipes.papers.experiments.training import seeds_of, train_stack
from recipes.papers.experiments.verdicts import UNDECIDED, Comparison, Verdict, below, decide
from recipes.papers.script import run_script
from recipes.papers.training.compute import linear_macs
from recipes.papers.training.stacked import Batch, StackedTraining
from surgery.structures import StructuredLinear
from surgery.training.data.generated import VALIDATION_SEED
from surgery.training.pretrain.initialize import zero_output

PROBES = 64  # inputs on which features are compared
FLAT, FALLING = 0.1, -0.25  # slopes
STRUCTURES = ("btt", "monarch", "low_rank", "kronecker")
METHODS = ("dense", *STRUCTURES, *(f"{name}_naive" for name in STRUCTURES))
SIZES = {"dims": 64, "classes": 16, "teacher": 64}
SETTINGS = (
    Setting("cpu", "cpu", (16, 64, 256, 1024), METHODS, (3e-3,), 3, 500, 64, 1, 2, SIZES),
    Setting("gpu", "gpu", (16, 64, 256, 1024, 4096), METHODS, (3e-3,), 3, 500, 256, 1, 2, SIZES),
)
SMOKE = Setting("smoke", "cpu", (16, 64), METHODS, (3e-3,), 2, 3, 4, 1, 2, {"dims": 16, "classes": 4, "teacher": 8})


def heads(cell: Cell) -> int:
    """Return 0: the models have no attention."""
    return 0


class TwoLayerMLP(nn.Module):
    """The model of a structure at a width. Without biases."""

    def __init__(self, structure: str, width: int, inputs: int, classes: int, seed: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            self.first = make_linear("dense" if structure == "low_rank" else structure, inputs, width)
            self.second = make_linear(structure, width, width)
            self.classifier = nn.Linear(width, classes)
            zero_output(self.classifier)
        for linear in (self.first, self.second, self.classifier):
            linear.register_parameter("bias", None)

    def features(self, x_BI: Tensor) -> Tensor:
        """Return the last features (B, D)."""
        return nn.functional.gelu(self.second(nn.functional.gelu(self.first(x_BI))))

    def forward(self, x_BI: Tensor, features: bool = False) -> Tensor:
        """Return the logits (B, classes), or the last features (B, D)."""
        h_BD = self.features(x_BI)
        return h_BD if features else self.classifier(h_BD)


def class_loss(call: Any, batch: Batch) -> Tensor:
    """Return the mean cross-entropy in nats."""
    return nn.functional.cross_entropy(call(batch["values"][:, 0]), batch["labels"][:, 0])


def last_features(call: Any, batch: Batch) -> Tensor:
    """Return the last features (B, D)."""
    h_BD: Tensor = call(batch["values"][:, 0], features=True)
    return h_BD


def make_mlp(setting: Setting, cell: Cell, seed: int) -> TwoLayerMLP:
    """Return the model of a cell."""
    sizes = setting.options
    return TwoLayerMLP(cell.method.removesuffix("_naive"), cell.width, sizes["dims"], sizes["classes"], seed)


class UpdateMeter:
    """Mean over steps of the root mean square of each run's change of the last features."""

    def __init__(self, probe: Batch, runs: int):
        self.batch = {name: tensor.expand(runs, *tensor.shape) for name, tensor in probe.items()}
        self.before: Tensor | None = None
        self.total = torch.zeros(runs, dtype=torch.float64, device=probe["values"].device)
        self.steps = 0

    def __call__(self, stack: StackedTraining, step: int) -> None:
        """Measure the features after a step."""
        after_MBD = stack.map(last_features, self.batch)
        if self.before is not None:
            self.total += (after_MBD - self.before).square().mean((1, 2)).sqrt().double()
            self.steps += 1
        self.before = after_MBD


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    task, models = make_task(setting), {seed: make_mlp(setting, cell, seed) for seed in seeds_of(runs)}
    first = models[runs[0][1]]
    meter = UpdateMeter(task.batch(VALIDATION_SEED, 0, PROBES, 1, device), len(runs))
    stack = train_stack(
        setting, runs, models, lambda seed, row, rows: task.batch(seed, row, rows, 1, device), device, loss=class_loss,
        row_numbers=task.dims, factors=rate_factors(first, cell.method.endswith("_naive")), floor=1.0, after_step=meter,
    )  # fmt: skip
    held = task.batch(VALIDATION_SEED, PROBES, 1024, 1, device)
    losses = stack.map(class_loss, {n: t.expand(len(runs), *t.shape) for n, t in held.items()}).tolist()
    updates = (meter.total / max(1, meter.steps)).tolist()
    macs = sum(linear_macs(m) for m in first.modules() if isinstance(m, (StructuredLinear, nn.Linear)))
    shared = {"parameters": sum(stack.sizes), "macs": macs}
    keys = {"setting": setting.name, "method": cell.method, "width": cell.width}
    return [
        {**keys, "rate": rate, "seed": seed, "loss": finite_or_none(loss), "update": float(f"{update:.6g}"), **shared}
        for (rate, seed), loss, update in zip(runs, losses, updates)
    ]


# -- results --------------------------------------------------------------------------------------------
def slopes(rows: list[Row], setting: Setting, method: str) -> list[float]:
    """Return the slope of log update on log width for each seed."""
    own = [row for row in rows if (row["setting"], row["method"]) == (setting.name, method)]
    found = []
    for seed in sorted({row["seed"] for row in own}):
        points = [(float(row["width"]), row["update"]) for row in own if row["seed"] == seed and row["update"] > 0]
        if len(points) > 2:
            found.append(-fit_power_law(points).alpha)
    return found


def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "updates are constant over the width at aware rates and fall at naive ones"."""
    aware, naive, dense = (slopes(rows, setting, method) for method in ("btt", "btt_naive", "dense"))
    if not aware or len(aware) != len(naive):
        return Verdict(UNDECIDED, f"the sweep `{setting.name}` has too few widths")
    comparisons = [
        Comparison("slope of BTT", difference(aware), (-FLAT, FLAT), (FALLING, -FALLING)),
        Comparison("slope at naive rates", difference(naive), below(FALLING), below(-FLAT)),
        Comparison("naive - aware", difference([a - b for a, b in zip(naive, aware)]), below(0.0)),
    ]
    flat = abs(fmean(dense)) < FLAT
    missed = [] if flat else [f"updates of dense layers are not constant: slope {fmean(dense):+.3f}"]
    return decide(setting, best_rows(rows, setting), comparisons, ("btt", "btt_naive"), missed=missed)


def table(rows: list[Row], setting: Setting) -> list[list[str]]:
    """Return the table: update by width, and the slope (mean ± standard error over seeds)."""
    lines = [["method", *(f"d = {width:,}" for width in setting.widths), "slope"]]
    for method in setting.methods:
        own = {w: _updates(rows, setting, method, w) for w in setting.widths}
        if any(own.values()):
            found = slopes(rows, setting, method)
            slope = "{:+.3f} ± {:.3f}".format(*mean_and_error(found)) if found else ""
            lines.append([method, *(f"{fmean(u):.3g}" if u else "" for u in own.values()), slope])
    return lines


def _updates(rows: list[Row], setting: Setting, method: str, width: int) -> list[float]:
    return [r["update"] for r in rows if (r["setting"], r["method"], r["width"]) == (setting.name, method, width)]


def draw(axes: Any, rows: list[Row], setting: Setting) -> None:
    """Draw the update against the width: aware rates on the left, naive ones on the right."""
    for method in setting.methods:
        axis = axes[1 if method.endswith("_naive") else 0]
        points = [(w, fmean(u)) for w in setting.widths if (u := _updates(rows, setting, method, w))]
        axis.plot([p[0] for p in points], [p[1] or math.nan for p in points], "o-", label=method)
    for axis in axes:
        axis.set(xscale="log", yscale="log", xlabel="width")
        axis.legend(fontsize=7)
    axes[0].set_ylabel("change of a feature by a step")


EXPERIMENT = Experiment(
    name="updates",
    title="Size of feature updates by width",
    source="Compute Better Spent, Figure 2a",
    claim="feature updates are constant over the width at structure-aware rates, and fall at the rates of dense layers",
    rule=(
        "slopes of log update on log width, by seed: BTT's within ±0.1 at its own rates (contradicted beyond "
        "±0.25), below -0.25 at those of dense layers (above -0.1), and the difference < 0. Baseline: the slope "
        "of dense layers is within ±0.1"
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
