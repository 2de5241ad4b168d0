"""MQAR with block mixing: does a Toeplitz matrix of blocks recall more than a dense one? (FARS 2026, "Toeplitz Block
Mixing for Scalable Multi-Head Linear Attention", Tables 2 and 3, Figure 2)

python -m recipes.papers.experiments.block_mixing run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.block_mixing show [rows.jsonl ..] [--plot block_mixing.png]

Pairs are scattered among distractors, and every key comes once more at the end of the row (layout `scattered` of
surgery/training/data/generated.py). Layers have no MLP and a causal convolution of width 3 before every mixer, softmax
too. Linear mixers have elu features, normalised, without RoPE.

    linear                  mask of ones
    retnet, ssd             one decay per head; gates that depend on the input
    mhla_frozen, mhla       dense matrix over blocks, fixed or learned; initially it falls linearly with the distance
    mhla_random             dense, learned, from normal logits
    tbm_R                   R exponentials over blocks, learned
    tbm_8_near              from the exponentials nearest the initial matrix of `mhla`
    tbm_8_frozen            at their initial values

Floors: a value drawn from all values, and one drawn from those in the row. A run either learns to recall, with at least
twice the second floor, or does not; the tables have the share of seeds that do and the accuracy of these. Rows of 2, 4
and 8 times the length of training are scored where the mask has no maximum length. R^2 of learned dense matrices is
that of a fit by 8 exponentials (surgery/mixers/masks/toeplitz_fit.py), at the start and at the end; a high value at the
start says nothing about what was learned, so the distance that the matrix moved and the share of the movement that is
Toeplitz are listed too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.models import RecallModel, make_decoder, make_stage
from recipes.papers.experiments.recall import make_task, score, train_recall
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
from recipes.papers.experiments.training import seeds_of, trained_model
from recipes.papers.experiments.verdicts import ANY, Comparison, Verdict, above, decide
from recipes.papers.mup.models import rate_factors
from recipes.papers.script import run_script
from recipes.papers.training.compute import count_compute
from surgery.mixers.masks.block_mixing import Blocks, BlocksMask
from surgery.mixers.masks.toeplitz_block_mixing import ToeplitzBlocksMask
from surgery.mixers.masks.toeplitz_fit import fit_heads

HEAD = 64  # dimensions of a head
COMPONENTS = 8  # exponentials of the fit
TIMES = (2, 4, 8)  # lengths of scored rows, in lengths of training rows
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
METHODS = (
    "softmax", "linear", "retnet", "ssd", "mhla_frozen", "mhla", "mhla_random", "tbm_1", "tbm_4", "tbm_8", "tbm_16", "tbm_8_near",
    "tbm_8_frozen",
)  # fmt: skip
CORE = ("softmax", "mhla_frozen", "mhla", "tbm_1", "tbm_8", "tbm_8_near")
PRINTED = "the paper: T = 8,192, where no model answers above chance"
SETTINGS = (
    Setting(
        "cpu", "cpu", (32,), CORE, (3e-3, 1e-2, 3e-2, 1e-1), 4, 1500, 32, 64, 2,
        {"vocabulary": 64, "pairs": (4,), "layout": "scattered", "block": 4, "held_out": 1024},
    ),
    Setting(
        "gpu_128", "gpu", (128,), METHODS, RATES, 5, 2500, 32, 128, 2,
        {"vocabulary": 256, "pairs": (8,), "layout": "scattered", "block": 4, "held_out": 2048},
    ),
    Setting(
        "gpu", "gpu", (256,), METHODS, (3e-4, 1e-3, 3e-3), 5, 4000, 32, 1024, 4,
        {"vocabulary": 1024, "pairs": (16,), "layout": "scattered", "block": 32, "held_out": 2048},
    ),
    Setting(
        "gpu_64_pairs", "gpu", (256,), ("mhla_frozen", "mhla", "tbm_8"), (3e-4, 1e-3, 3e-3), 5, 4000, 32, 1024, 4,
        {"vocabulary": 1024, "pairs": (64,), "layout": "scattered", "block": 32, "held_out": 2048},
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (16,), ("softmax", "mhla_frozen", "mhla", "tbm_1", "tbm_8", "tbm_8_frozen"), (1e-2,), 1, 2, 4, 16, 1,
    {"vocabulary": 16, "pairs": (2,), "layout": "scattered", "block": 2, "held_out": 8},
)  # fmt: skip


def heads(cell: Cell) -> int:
    """Return the number of attention heads."""
    return max(1, cell.width // HEAD)


def attention_keys(setting: Setting, method: str) -> dict[str, Any] | None:
    """Return the recipe keys of a method's attention; None: softmax with RoPE."""
    block = setting.options["block"]
    masks: dict[str, Any] = {"linear": "ones", "retnet": "decay", "ssd": "gates"}
    if method == "softmax":
        return None
    if method.startswith("mhla"):
        weights = "frozen" if method == "mhla_frozen" else "learned"
        mask: Any = {"name": "blocks", "block": block, "count": -(-setting.length // block), "weights": weights}
    elif method.startswith("tbm"):
        mask = {"name": "toeplitz_blocks", "block": block, "components": int(method.split("_")[1])}
    else:
        mask = masks[method]
    return {"mixer": "linear", "features": "elu", "normalise": True, "rope": "drop", "mask": mask}


def make_block_model(setting: Setting, cell: Cell, seed: int) -> RecallModel:
    """Return the model of a method at a width."""
    model = make_decoder(
        attention_keys(setting, cell.method), width=cell.width, layers=setting.layers, heads=heads(cell), length=setting.length,
        vocabulary=setting.options["vocabulary"], seed=seed, convolution=3,
    )  # fmt: skip
    if cell.method == "mhla_random":
        generator = torch.Generator().manual_seed(seed)
        for mask in masks_of(model, BlocksMask):
            nn.init.normal_(mask.weight_GJMM, generator=generator)
    if cell.method == "tbm_8_near":
        start_at_mhla(model, setting)
    return RecallModel(model)


def start_at_mhla(model: nn.Module, setting: Setting) -> None:
    """Set Toeplitz masks to the exponentials nearest the initial dense matrix of MHLA."""
    block = setting.options["block"]
    for mask in masks_of(model, ToeplitzBlocksMask):
        dense = BlocksMask(Blocks(block=block, count=-(-setting.length // block)), mask.shape)
        fit = fit_heads(dense.matrix().detach(), mask.config.components)
        scale = fit.kernel(torch.zeros(1)).mean().clamp_min(1e-9)
        mask.initialize((fit.amplitude / scale).movedim(-1, 0).float(), fit.rate[:, 0].mT.float())


def masks_of(model: nn.Module, kind: type) -> list[Any]:
    """Return the masks of a kind."""
    return [module for module in model.modules() if isinstance(module, kind)]


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    task, models = make_task(setting), {seed: make_block_model(setting, cell, seed) for seed in seeds_of(runs)}
    first = models[runs[0][1]]
    factors = rate_factors(first, make_stage(setting.steps, base_width=64))
    if cell.method == "tbm_8_frozen":
        factors = {name: 0.0 if ".mixer.mask." in name else f for name, f in factors.items()}
    stack = train_recall(setting, runs, models, task, device, factors)
    scores = score(stack, setting, task, len(runs), device)
    longer: dict[int, list[dict[str, Any]]] = {}
    if not cell.method.startswith("mhla"):
        longer = {times: score(stack, setting, task, len(runs), device, times) for times in TIMES}
    values, pairs = setting.options["vocabulary"] // 4, max(setting.options["pairs"])
    shared = {
        "parameters": sum(stack.sizes),
        "macs": count_compute(first.model, setting.length).body,
        "floors": [round(1 / values, 5), round(1 / pairs, 5)],
    }
    keys = {"setting": setting.name, "method": cell.method, "width": cell.width}
    rows = []
    for run, (rate, seed) in enumerate(runs):
        own = {**scores[run], "by_length": {str(times): found[run]["accuracy"] for times, found in longer.items()}}
        if cell.method in ("mhla", "mhla_random"):
            own |= compare_matrices(make_block_model(setting, cell, seed), stack, run)
        rows.append({**keys, "rate": rate, "seed": seed, **own, **shared})
    return rows


def compare_matrices(start: RecallModel, stack: Any, run: int) -> dict[str, float]:
    """Return how the dense matrices W of a run changed, as means over heads and layers.

    r2_start, r2_end: of the fit of W by exponentials. moved: |W - W_0| / |W_0|. r2_moved: share of W - W_0 that is
    Toeplitz.
    """
    before = torch.stack([mask.matrix().detach() for mask in masks_of(start, BlocksMask)]).flatten(0, 1)
    trained = trained_model(stack, run, start)
    after = torch.stack([mask.matrix().detach() for mask in masks_of(trained, BlocksMask)]).flatten(0, 1)
    moved = torch.linalg.matrix_norm(after - before) / torch.linalg.matrix_norm(before)
    found = {
        "r2_start": fit_heads(before, COMPONENTS).r2.mean(),
        "r2_end": fit_heads(after, COMPONENTS).r2.mean(),
        "moved": moved.mean(),
        "r2_moved": toeplitz_share(after - before).mean(),
    }
    return {name: round(float(value), 5) for name, value in found.items()}


def toeplitz_share(w_XMM: Tensor) -> Tensor:
    """Return the share (..) of the squares of lower triangular matrices (.., M, M) that the means of their diagonals
    explain.
    """
    size, explained = w_XMM.shape[-1], torch.zeros(w_XMM.shape[:-2])
    for distance in range(size):
        explained += (size - distance) * w_XMM.diagonal(-distance, -2, -1).mean(-1).square()
    return explained / w_XMM.tril().square().sum((-2, -1)).clamp_min(1e-30)


# -- results --------------------------------------------------------------------------------------------
def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "Toeplitz mixing recalls more than dense mixing, which recalls more than frozen mixing".

    The paper's models answer less than chance, so no run reaches what it reports in a way that says anything.
    """
    best = best_rows(rows, setting)
    comparisons = [
        Comparison(f"{a} - {b}", paired_difference(best, a, b, "accuracy"), above(0.0), fair)
        for a, b, fair in (("tbm_8", "mhla", None), ("mhla", "mhla_frozen", ANY))
    ]
    floor = learned_from(setting)
    low = max(mean_and_error(_accuracies(best, m))[0] for m in ("tbm_8", "mhla")) < floor
    return decide(
        setting, best, comparisons, ("tbm_8", "mhla", "mhla_frozen"), missed=[PRINTED], besides=_others(best, floor),
        invalid=f"neither answers {100 * floor:.0f}%, twice the share of a value drawn from the row" if low else "",
    )  # fmt: skip


def learned_from(setting: Setting) -> float:
    """Return the accuracy from which on a run has learned to recall: twice the share of a value drawn from the row."""
    return 2 / max(setting.options["pairs"])


def learned(best: BestRows, method: str, floor: float) -> tuple[str, str]:
    """Return (seeds that learn, of how many; their mean accuracy in %, empty without one) of a method in words."""
    own = _accuracies(best, method)
    high = [100 * accuracy for accuracy in own if accuracy >= floor]
    return f"{len(high)} of {len(own)}", f"{mean_and_error(high)[0]:.1f}" if high else ""


def _others(best: BestRows, floor: float) -> list[str]:
    """Return the share of seeds that learn and the paper's other comparisons in words."""
    found: list[tuple[str, Difference | None]] = [
        (f"{a} - {b}", paired_difference(best, a, b, "accuracy"))
        for a, b in (("tbm_1", "tbm_8"), ("tbm_8", "tbm_8_frozen"), ("tbm_8_near", "tbm_8"))
    ]
    long = [row["by_length"]["8"] - row["accuracy"] for (m, _, _), row in best.items() if m == "tbm_8"]
    found.append(("tbm_8 at 8 times the length", difference(long)))
    shares = [(m, *learned(best, m, floor)) for m in ("tbm_8", "mhla", "mhla_frozen")]
    words = [f"{m} learns in {seeds} seeds" + (f", which answer {mean}%" if mean else "") for m, seeds, mean in shares]
    return words + [f"{name}: {value}" for name, value in found if value is not None]


def _accuracies(best: BestRows, method: str) -> list[float]:
    return [row["accuracy"] for (m, _, _), row in best.items() if m == method]


def table(rows: list[Row], setting: Setting) -> list[list[str]]:
    """Return the table: accuracy in % (mean ± standard error), of all seeds and of those that learn, by length, and how
    Toeplitz the learned matrices are.
    """
    best = best_rows(rows, setting)
    lines = [
        [
            "mixer",
            "accuracy, %",
            "seeds that learn",
            "their accuracy, %",
            *(f"{t}x length" for t in TIMES),
            "R^2 start, end",
            "moved (Toeplitz share)",
            "best rate",
        ]
    ]
    for method in setting.methods:
        own = [row for (m, _, _), row in best.items() if m == method]
        if own:
            mean, error = mean_and_error([100 * a for a in _accuracies(best, method)])
            longer = [f"{100 * _mean(own, 'by_length', str(t)):.1f}" if own[0]["by_length"] else "" for t in TIMES]
            fit = moved = ""
            if "r2_end" in own[0]:
                fit = f"{_mean(own, 'r2_start'):.3f}, {_mean(own, 'r2_end'):.3f}"
                moved = f"{_mean(own, 'moved'):.3f} ({_mean(own, 'r2_moved'):.2f})"
            runs = learned(best, method, learned_from(setting))
            lines.append([method, f"{mean:.1f} ± {error:.1f}", *runs, *longer, fit, moved, edge_mark(own)])
    floors = [row["floors"] for row in best.values()]
    if floors:
        words = ["drawn from all values", "drawn from the row's values"]
        lines += [[name, f"{100 * floor:.1f}", *[""] * 8] for name, floor in zip(words, floors[0])]
    return lines


def _mean(rows: list[Row], *path: str) -> float:
    return mean_and_error([row[path[0]] if len(path) == 1 else row[path[0]][path[1]] for row in rows])[0]


def draw(axes: Any, rows: list[Row], setting: Setting) -> None:
    """Draw accuracy by method, and against the length of the rows."""
    best = best_rows(rows, setting)
    shown = [m for m in setting.methods if _accuracies(best, m)]
    points = [mean_and_error(_accuracies(best, m)) for m in shown]
    axes[0].errorbar([p[0] for p in points], shown, xerr=[p[1] for p in points], fmt="o")
    for value in next((row["floors"] for row in best.values()), ()):
        axes[0].axvline(value, linestyle=":", color="gray")
    axes[0].set_xlabel("accuracy")
    for method in shown:
        own = [row for (m, _, _), row in best.items() if m == method and row["by_length"]]
        if own:
            means = [_mean(own, "accuracy"), *(_mean(own, "by_length", str(t)) for t in TIMES)]
            axes[1].plot((1, *TIMES), means, "o-", label=method)
    axes[1].set_xscale("log", base=2)
    axes[1].set_xlabel("length / length in training")
    axes[1].legend(fontsize=6)


EXPERIMENT = Experiment(
    name="block_mixing",
    title="MQAR with block mixing",
    source="Toeplitz Block Mixing, Tables 2, 3, Figure 2",
    claim="Toeplitz mixing of blocks recalls more than dense mixing, which recalls more than frozen mixing",
    rule=(
        "tbm_8 - mhla > 0, and mhla - mhla_frozen > 0, which cannot contradict. Undecided if neither answers "
        "twice the share of a value drawn from the row. R, frozen exponentials, start and length decide nothing"
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
