"""MQAR: does the log-linear mask recall more than its linear mask? (Guo et al. 2025, "Log-Linear Attention", Table 2
and Figure 9)

python -m recipes.papers.experiments.recall run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.recall show [rows.jsonl ..] [--plot recall.png]

Two layers without MLP, a causal convolution of width 3 before every mixer (softmax too), states and heads of 16
dimensions for Mamba-2 (here `ssd`), two heads for Gated DeltaNet (one at width 16). Rows are drawn afresh at every
step: key-value pairs, then random tokens among which each key appears once more; its next token is the value. The head
is computed at those positions alone. Accuracy is of all queries of held-out rows, by number of pairs and by distance.
`linear` and `tree` (the hierarchical mask without gates) are controls. `ssd_wide` doubles the state of `ssd` in each
head, `window` caches as many numbers as `ssd`.

A log-linear form starts as its linear mask, with lambda = 1 for all tokens and levels. With the option `warm_up` of a
setting, lambda stays 1 in that share of the steps, in which both forms are one model, and is trained afterwards.
`run --lengthen 8` doubles the steps, up to eight times those of the setting, until softmax and the linear masks answer
as much as in the paper, and then trains all methods with that number; rows of each number of steps are kept, as of a
setting `gpu@10000`.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.models import RecallModel, make_decoder
from recipes.papers.experiments.sweep import (
    BestRows,
    Cell,
    Row,
    Setting,
    best_rows,
    edge_mark,
    finite_or_none,
    mean_and_error,
    paired_difference,
)
from recipes.papers.experiments.training import pick, seeds_of, train_stack
from recipes.papers.experiments.verdicts import UNDECIDED, Comparison, Verdict, above, decide
from recipes.papers.script import run_script
from recipes.papers.training.compute import count_compute, state_size
from recipes.papers.training.stacked import Batch, StackedTraining, causal_mask
from surgery.training.data.generated import IGNORE_INDEX, VALIDATION_SEED, MQARTask

TREE: dict[str, Any] = {"name": "hierarchical", "levels": 9}
INPUTS = ("input_ids", "query", "target")
SHARED = {"mixer": "linear", "output_gate": "value", "norm": "rms", "rope": "drop"}
ATTENTION: dict[str, dict[str, Any] | None] = {
    "softmax": None,
    "softmax_nope": {"mixer": "softmax", "rope": "drop"},
    "window": {"mixer": "window"},  # its size is that of the state of ssd
    "linear": {**SHARED, "mask": "ones"},
    "tree": {**SHARED, "mask": {**TREE, "gates": "ones"}},
    "ssd": {**SHARED, "mask": "gates"},
    "ssd_wide": {**SHARED, "mask": "gates"},
    "log_linear_ssd": {**SHARED, "mask": TREE},
    "gdn": {**SHARED, "mask": "gates", "scores": "delta"},
    "log_linear_gdn": {**SHARED, "mask": TREE, "scores": "delta"},
}
FAMILIES = (("log_linear_ssd", "ssd"), ("log_linear_gdn", "gdn"))
CORE = ("softmax", "ssd", "log_linear_ssd", "gdn", "log_linear_gdn")
BASELINES = ("softmax", *(plain for _, plain in FAMILIES))
HEAD = 16  # dimensions of a head and of its state, for Mamba-2
SOFTMAX_FLOOR = 0.99  # the paper's Transformer answers 99% or more
RATES = (3e-4, 1e-3, 3e-3, 1e-2)  # at width 64; linears of width d take 64 / d times as much
WARM_UP = 0.25  # share of the steps in which settings with `warm_up` keep lambda at 1
BINS = (8, 16, 32, 64, 128, 256, 512, 1024)  # upper ends of the distances

SETTINGS = (
    Setting(
        "cpu", "cpu", (16,), CORE, (3e-3, 1e-2, 3e-2), 4, 1500, 32, 16, 2,
        {"vocabulary": 64, "pairs": (2, 4), "held_out": 1024},
    ),
    Setting(
        "gpu_64", "gpu", (16, 32, 64), CORE, (1e-3, 3e-3, 1e-2, 3e-2), 5, 4000, 128, 64, 2,
        {"vocabulary": 512, "pairs": (4, 8, 16), "held_out": 4096, "levels": 7},
    ),
    Setting(
        "gpu_64_warm", "gpu", (16, 32, 64), CORE, (1e-3, 3e-3, 1e-2, 3e-2), 5, 4000, 128, 64, 2,
        {"vocabulary": 512, "pairs": (4, 8, 16), "held_out": 4096, "levels": 7, "warm_up": WARM_UP},
    ),
    Setting(
        "gpu_32_warm", "gpu", (32,), CORE, (1e-3, 3e-3, 1e-2, 3e-2), 5, 8000, 128, 64, 2,
        {"vocabulary": 512, "pairs": (4, 8, 16), "held_out": 4096, "levels": 7, "warm_up": WARM_UP},
    ),
    Setting(
        "gpu", "gpu", (16, 32, 64), tuple(ATTENTION), RATES, 5, 5000, 128, 128, 2,
        {"vocabulary": 8192, "pairs": (4, 8, 16, 32), "held_out": 2000},
    ),
    Setting(
        "gpu_256", "gpu", (32,), CORE, RATES, 3, 5000, 128, 256, 2,
        {"vocabulary": 8192, "pairs": (64,), "held_out": 2000},
    ),
    Setting(
        "gpu_warm", "gpu", (16, 32, 64), CORE, RATES, 5, 5000, 128, 128, 2,
        {"vocabulary": 8192, "pairs": (4, 8, 16, 32), "held_out": 2000, "warm_up": WARM_UP},
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (16,), ("ssd", "log_linear_ssd"), (1e-2,), 2, 3, 4, 16, 2,
    {"vocabulary": 16, "pairs": (2,), "held_out": 8},
)  # fmt: skip


def heads(cell: Cell) -> int:
    """Return the number of attention heads of a method at a width."""
    if cell.method.endswith("gdn"):
        return 1 if cell.width == HEAD else 2
    if cell.method == "ssd_wide":
        return max(1, cell.width // HEAD // 2)
    return max(1, cell.width // HEAD)


def attention_keys(method: str, levels: int) -> dict[str, Any] | None:
    """Return the recipe keys of a method. levels: of hierarchical masks; higher ones share the last lambda, so
    bit_length(T - 1) + 1 levels are all trained by rows of T tokens."""
    keys = ATTENTION[method]
    if keys is None or not isinstance(keys.get("mask"), dict):
        return keys
    return {**keys, "mask": {**keys["mask"], "levels": levels}}


def make_recall_model(setting: Setting, cell: Cell, seed: int) -> RecallModel:
    """Return the model of a method at a width."""
    attention = attention_keys(cell.method, setting.options.get("levels", TREE["levels"]))
    if cell.method == "window":
        attention = {
            "mixer": "window",
            "window": HEAD // 2 + 1,
        }  # keys and values of HEAD / 2 tokens: HEAD x HEAD numbers
    model = make_decoder(
        attention, width=cell.width, layers=setting.layers, heads=heads(cell), length=setting.length,
        vocabulary=setting.options["vocabulary"], seed=seed, convolution=3,
    )  # fmt: skip
    return RecallModel(model)


def make_task(setting: Setting) -> MQARTask:
    """Return the task of a setting."""
    sizes = setting.options
    layout = sizes.get("layout", "pairs_first")
    return MQARTask(vocabulary=sizes["vocabulary"], pairs=sizes["pairs"], layout=layout)


def logits_of(call: Any, batch: Batch) -> Tensor:
    """Return logits (B, P, V) at the queries."""
    ids_BT = batch["input_ids"]
    logits_BPV: Tensor = call(ids_BT, batch["query"], causal_mask(ids_BT.shape[1], ids_BT.device))
    return logits_BPV


def recall_loss(call: Any, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the values over all queries, in nats."""
    logits_NV, target_N = logits_of(call, batch).flatten(0, 1).float(), batch["target"].flatten()
    total = nn.functional.cross_entropy(logits_NV, target_N, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (target_N >= 0).sum()


def query_losses(call: Any, batch: Batch) -> Tensor:
    """Return (2, B, P): whether the value is the likeliest token, and its cross-entropy in nats; 0 where there is no
    query.
    """
    logits_BPV, target_BP = logits_of(call, batch).float(), batch["target"]
    right_BP = (logits_BPV.argmax(-1) == target_BP).float()
    nll_BP = -logits_BPV.log_softmax(-1).gather(-1, target_BP.clamp_min(0).unsqueeze(-1))[..., 0]
    return torch.stack([right_BP, nll_BP * (target_BP >= 0)])


def train_recall(
    setting: Setting,
    runs: list[tuple[float, int]],
    models: dict[int, RecallModel],
    task: MQARTask,
    device: torch.device,
    factors: dict[str, float] | None = None,
) -> StackedTraining:
    """Return the trained stack. models: by seed. factors: on the rates of parameters; None: those of muP."""

    def rows_of(seed: int, first: int, rows: int) -> Batch:
        return pick(task.batch(seed, first, rows, setting.length, device), INPUTS)

    numbers = 2 * task.vocabulary + 2 * setting.length
    lambdas = [name for name, _ in models[runs[0][1]].named_parameters() if ".mask.level." in name]
    return train_stack(
        setting, runs, models, rows_of, device, loss=recall_loss, row_numbers=numbers, factors=factors,
        held=lambdas, held_steps=round(setting.options.get("warm_up", 0) * setting.steps) if lambdas else 0,
    )  # fmt: skip


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    task = make_task(setting)
    models = {seed: make_recall_model(setting, cell, seed) for seed in seeds_of(runs)}
    stack = train_recall(setting, runs, models, task, device)
    scores = score(stack, setting, task, len(runs), device)
    compute, state = (
        count_compute(models[runs[0][1]].model, setting.length),
        state_size(models[runs[0][1]].model, setting.length),
    )
    shared = {"parameters": sum(stack.sizes), "macs": compute.body, "macs_with_head": compute.total, "state": state}
    keys = {"setting": setting.name, "method": cell.method, "width": cell.width}
    return [{**keys, "rate": rate, "seed": seed, **own, **shared} for (rate, seed), own in zip(runs, scores)]


def score(
    stack: StackedTraining,
    setting: Setting,
    task: MQARTask,
    runs: int,
    device: torch.device,
    times: int = 1,
) -> list[dict[str, Any]]:
    """Return loss and accuracy of each run over held-out rows: of all queries, by number of pairs and by distance.

    times: length of the rows in lengths of training rows; longer rows are fewer, so that the number of tokens is the
    same.
    """
    length, at_once = times * setting.length, max(1, setting.rows // times)
    held_out = max(1, setting.options["held_out"] // times)
    found, targets, gaps, pairs = [], [], [], []
    for first in range(0, held_out, at_once):
        batch = task.batch(VALIDATION_SEED, first, min(at_once, held_out - first), length, device)
        expanded = {n: batch[n].expand(runs, *batch[n].shape) for n in INPUTS}
        found.append(stack.map(query_losses, expanded).cpu())
        targets.append(batch["target"].cpu())
        gaps.append(batch["gap"].cpu())
        pairs.append(batch["pairs"].cpu()[:, None].expand_as(targets[-1]))
    right_MBP, nll_MBP = torch.cat(found, 2).unbind(1)
    asked_BP, gap_BP, pairs_BP = torch.cat(targets) >= 0, torch.cat(gaps), torch.cat(pairs)

    def mean(values_BP: Tensor, where_BP: Tensor) -> float:
        return float(values_BP[where_BP].double().mean())

    rows_of = []
    for right_BP, nll_BP in zip(right_MBP, nll_MBP):
        shown = [p for p in setting.options["pairs"] if bool((pairs_BP == p).any())]
        by_pairs = {str(p): round(mean(right_BP, asked_BP & (pairs_BP == p)), 5) for p in shown}
        by_gap, low = {}, 0
        for high in BINS:
            inside_BP = asked_BP & (gap_BP > low) & (gap_BP <= high)
            if bool(inside_BP.any()):
                by_gap[str(high)] = round(mean(right_BP, inside_BP), 5)
            low = high
        own = {"loss": finite_or_none(mean(nll_BP, asked_BP)), "accuracy": round(mean(right_BP, asked_BP), 5)}
        rows_of.append({**own, "by_pairs": by_pairs, "by_gap": by_gap})
    return rows_of


# -- results --------------------------------------------------------------------------------------------
# Width -> mean accuracy in % and standard deviation in the paper; no deviation: at least that much.
PAPER: dict[str, dict[int, tuple[float, float | None]]] = {
    "softmax": {16: (99, None), 32: (99, None), 64: (99, None)},
    "ssd": {16: (46.9, 2.3), 32: (75.1, 4.9), 64: (89.6, 6.1)},
    "log_linear_ssd": {16: (55.9, 9.1), 32: (76.5, 4.8), 64: (92.9, 2.7)},
    "gdn": {16: (38.4, 1.0), 32: (79.0, 2.1), 64: (99, None)},
    "log_linear_gdn": {16: (40.0, 1.4), 32: (84.4, 1.2), 64: (99, None)},
}


def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "at a state of equal width the log-linear mask answers more"."""
    best, compared = best_rows(rows, setting), [method for pair in FAMILIES for method in pair]
    if not {"softmax", *compared} <= set(setting.methods):
        return Verdict(UNDECIDED, f"the setting `{setting.name}` does not have softmax and both families")
    comparisons = [Comparison(f"{a} - {b}", paired_difference(best, a, b, "accuracy"), above(0.0)) for a, b in FAMILIES]
    lowest = min(min(_accuracies(best, "softmax", width)) for width in setting.widths)
    short = f"softmax answers {100 * lowest:.1f}%, so training is too short" if lowest < SOFTMAX_FLOOR else ""
    rises = all(_rises(best, setting, method) for method in compared)
    return decide(
        setting, best, comparisons, compared, missed=missed_baselines(rows, setting), invalid=short,
        lacking="" if rises else "accuracy does not rise with the width",
    )  # fmt: skip


def missed_baselines(rows: list[Row], setting: Setting) -> list[str]:
    """Return which of softmax and the linear masks answer less than in the paper, with both figures."""
    best, missed = best_rows(rows, setting), []
    for method in BASELINES:
        for width in setting.widths:
            if own := _accuracies(best, method, width):
                mean, paper = 100 * mean_and_error(own)[0], PAPER[method][width][0]
                if mean < paper:
                    missed.append(f"{method} {width} answers {mean:.1f}% (paper: {paper:g}%)")
    return missed


def _printed(method: str, width: int) -> str:
    mean, deviation = PAPER.get(method, {}).get(width, (None, None))
    return "" if mean is None else f"{mean:g} ({deviation})" if deviation else f">= {mean:g}"


def _accuracies(best: BestRows, method: str, width: int) -> list[float]:
    return [row["accuracy"] for (m, w, _), row in best.items() if (m, w) == (method, width)]


def _rises(best: BestRows, setting: Setting, method: str) -> bool:
    means = [mean_and_error(_accuracies(best, method, width))[0] for width in setting.widths]
    return all(a < b for a, b in pairwise(means))


def table(rows: list[Row], setting: Setting) -> list[list[str]]:
    """Return the table: accuracy in % (mean ± standard error), states and compute."""
    best = best_rows(rows, setting)
    lines = [["model", "width", "accuracy, %", "paper, %", "best rate", "state", "MACs"]]
    for method in setting.methods:
        for width in setting.widths:
            own = {seed: row for (m, w, seed), row in best.items() if (m, w) == (method, width)}
            if own:
                mean, error = mean_and_error([100 * row["accuracy"] for row in own.values()])
                one = next(iter(own.values()))
                cells = [
                    f"{mean:.1f} ± {error:.1f}",
                    _printed(method, width) if setting.name.partition("@")[0] in ("gpu", "gpu_warm") else "",
                ]
                cells += [edge_mark([one]), f"{one['state']:,}", f"{one['macs']:,}"]
                lines.append([method, str(width), *cells])
    return lines


def draw(axes: Any, rows: list[Row], setting: Setting) -> None:
    """Draw accuracy against width, and against distance at the largest width."""
    best = best_rows(rows, setting)
    for method in setting.methods:
        points = [
            (w, mean_and_error(_accuracies(best, method, w))) for w in setting.widths if _accuracies(best, method, w)
        ]
        if not points:
            continue
        axes[0].errorbar([w for w, _ in points], [m for _, (m, _) in points], [e for _, (_, e) in points], label=method)
        gaps = defaultdict(list)
        for (m, w, _), row in best.items():
            if (m, w) == (method, max(setting.widths)):
                for gap, value in row["by_gap"].items():
                    gaps[int(gap)].append(value)
        axes[1].plot(sorted(gaps), [mean_and_error(gaps[g])[0] for g in sorted(gaps)], label=method)
    axes[0].set_xlabel("width")
    axes[0].set_ylabel("accuracy")
    axes[0].legend(fontsize=7)
    axes[1].set_xlabel(f"distance in tokens, width {max(setting.widths)}")


EXPERIMENT = Experiment(
    name="recall",
    title="MQAR: log-linear against linear",
    source="Log-Linear Attention, Table 2, Figure 9",
    claim="at a state of equal width the log-linear mask answers more",
    rule=(
        "log-linear minus linear > 0 in both families. Also: accuracy rises with the width. Baselines: softmax "
        "answers 99% (else undecided), and the linear masks what the paper prints for their width"
    ),
    settings=SETTINGS,
    smoke=SMOKE,
    heads=heads,
    train=train,
    verdict=verdict,
    table=table,
    draw=draw,
    baselines=BASELINES,
    missed=missed_baselines,
)

if __name__ == "__main__":
    run_script(lambda: main(EXPERIMENT))
