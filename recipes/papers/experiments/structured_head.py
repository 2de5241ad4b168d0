"""GPT-2 with BTT in all linears and the head: is it below dense GPT-2 at equal compute, and is the head the reason?
(Qiu et al. 2024, "Compute Better Spent", Figure 9)

python -m recipes.papers.experiments.structured_head run --setting cpu [--out rows.jsonl] [--minutes 30]
python -m recipes.papers.experiments.structured_head show [rows.jsonl ..] [--plot structured_head.png]

Decoders over Python source. A token is two characters, so that the vocabulary has 97^2 = 9,409 words and the head has a
share of the compute as in the paper; the setting `cpu` takes the number of a character modulo 32, so that there are
1,024 words. `dense` and `btt` see the same rows for each seed, and are scored on the same held-out rows, in nats per
token. Compute is counted with the head and without it, embeddings cost nothing; losses are compared at equal MACs, on
the line between the measured widths of the dense model in loss against log MACs, for each seed. The paper gives its BTT
models 6 or 12 heads of 64 dimensions at widths of 1,024 to 2,560, so that queries have fewer dimensions than the
width, which GPT-2 of transformers does not allow. Here heads have 64 dimensions at every width (16 in the setting
`cpu`), so wider models have more of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recipes.papers.experiments.characters import at_equal_macs
from recipes.papers.experiments.driver import Experiment, main
from recipes.papers.experiments.sweep import (
    Cell,
    Row,
    Setting,
    best_rows,
    edge_mark,
    finite_or_none,
    mean_and_error,
)
from recipes.papers.experiments.text import VOCABULARY, CodeRows
from recipes.papers.experiments.training import seeds_of, train_stack
from recipes.papers.experiments.verdicts import DIVERGED, Comparison, Verdict, below, decide, has_diverged
from recipes.papers.mup.models import SweepSizes, make_gpt2
from recipes.papers.script import run_script
from recipes.papers.training.compute import count_compute
from recipes.papers.training.stacked import Batch, StackedTraining, causal_mask

METHODS = ("dense", "btt")
PAPER = "the paper: T = 512, 124M parameters, 600,000 steps, OpenWebText"
SETTINGS = (
    Setting(
        "cpu", "cpu", (16, 32, 64), METHODS, (6.7e-4, 2e-3, 6e-3, 1.8e-2, 5.4e-2), 3, 200, 8, 32, 2,
        {"text": "surgery", "characters": 1_000_000, "held_out": 256, "head": 16, "rank": 2, "classes": 32, "widths": {"btt": (32, 64)}},
    ),
    Setting(
        "gpu_short", "gpu", (128, 192, 256), METHODS, (1e-3, 3e-3, 9e-3, 2.7e-2), 4, 1500, 16, 128, 6,
        {"text": "packages", "characters": 24_000_000, "held_out": 2048, "head": 64, "rank": 4, "classes": VOCABULARY, "widths": {"btt": (256, 384, 512)}},
    ),
    Setting(
        "gpu", "gpu", (128, 192, 256), METHODS, (1e-3, 3e-3, 9e-3, 2.7e-2), 3, 3000, 32, 128, 6,
        {"text": "packages", "characters": 24_000_000, "held_out": 2048, "head": 64, "rank": 4, "classes": VOCABULARY, "widths": {"btt": (256, 384, 512, 768)}},
    ),
)  # fmt: skip
SMOKE = Setting(
    "smoke", "cpu", (16,), METHODS, (1e-2,), 1, 2, 2, 8, 1,
    {"text": "surgery", "characters": 50_000, "held_out": 4, "head": 16, "rank": 2, "classes": 16},
)  # fmt: skip


def heads(cell: Cell) -> int:
    """Return the number of attention heads of 64 dimensions, by which the GPU setting is counted."""
    return max(1, cell.width // 64)


def make_model(setting: Setting, cell: Cell, seed: int) -> Any:
    """Return the GPT-2 of a cell, initialized by muP."""
    btt = {"structure": "btt", "blocks": "sqrt", "rank": setting.options["rank"]}
    keys = {**btt, "rules": [{"match": "head", **btt}]} if cell.method == "btt" else None
    sizes = SweepSizes(layers=setting.layers, head=setting.options["head"], length=setting.length)
    return make_gpt2("dense", cell.width, setting.options["classes"] ** 2, sizes, seed, keys)


def words(ids_BT: Tensor, classes: int) -> Tensor:
    """Return the words (B, T / 2) of characters (B, T), taken modulo `classes`."""
    return ids_BT[:, 0::2] % classes * classes + ids_BT[:, 1::2] % classes


def word_loss(call: Any, batch: Batch) -> Tensor:
    """Return the mean loss in nats per word."""
    ids_BT = batch["words"]
    mask = causal_mask(ids_BT.shape[1] - 1, ids_BT.device)
    logits_BTV = call(ids_BT[:, :-1], attention_mask=mask, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())


def train(setting: Setting, cell: Cell, runs: list[tuple[float, int]], device: torch.device) -> list[Row]:
    """Train runs (rate, seed) of one cell at once and return their rows."""
    rows = CodeRows(setting.options["text"], setting.options["characters"], device)
    models = {seed: make_model(setting, cell, seed) for seed in seeds_of(runs)}
    first, classes = models[runs[0][1]], setting.options["classes"]
    characters = 2 * setting.length + 1  # rows of one character more, which makes T + 1 words

    def rows_of(seed: int, start: int, count: int) -> Batch:
        return {"words": words(rows.batch(seed, start, count, characters)["ids"], classes)}

    compute = count_compute(first, setting.length)
    stack = train_stack(setting, runs, models, rows_of, device, loss=word_loss, row_numbers=characters)
    held_NT = words(rows.held_out(characters, setting.options["held_out"]), classes)
    losses = score(stack, setting, held_NT, len(runs))
    shared = {"parameters": sum(stack.sizes), "macs": compute.body, "macs_with_head": compute.total}
    keys = {"setting": setting.name, "method": cell.method, "width": cell.width}
    return [
        {**keys, "rate": rate, "seed": seed, "loss": finite_or_none(loss), **shared}
        for (rate, seed), loss in zip(runs, losses)
    ]


def score(stack: StackedTraining, setting: Setting, ids_NT: Tensor, runs: int) -> list[float]:
    """Return the held-out loss of each run in nats per word."""
    total_M = torch.zeros(runs, device=ids_NT.device)
    for part_BT in ids_NT.split(setting.rows):
        total_M += len(part_BT) * stack.map(word_loss, {"words": part_BT.expand(runs, *part_BT.shape)})
    found: list[float] = (total_M / len(ids_NT)).tolist()
    return found


# -- results --------------------------------------------------------------------------------------------
def verdict(rows: list[Row], setting: Setting) -> Verdict:
    """Return the verdict on "BTT is below dense at equal compute with the head, and about equal without it"."""
    best = best_rows(rows, setting)
    if has_diverged(best, setting):
        return DIVERGED
    whole, body = (at_equal_macs(best, "btt", "dense", macs) for macs in ("macs_with_head", "macs"))
    close = whole is not None and body is not None and abs(body.mean) < abs(whole.mean) / 2
    return decide(
        setting, best, [Comparison("btt - dense at equal MACs with the head", whole, below(0.0))], METHODS,
        missed=[PAPER], besides=[f"without it: {body or 'no common compute'}"],
        lacking="" if close else "the difference without the head is not less than half as large",
    )  # fmt: skip


def table(rows: list[Row], setting: Setting) -> list[list[str]]:
    """Return the table: held-out loss (mean ± standard error), and compute with the head and without it."""
    best = best_rows(rows, setting)
    lines = [["linears and head", "width", "nats per word", "best rate", "parameters", "MACs", "MACs with the head"]]
    for cell in setting.cells:
        own = [
            row for (m, w, _), row in best.items() if (m, w) == (cell.method, cell.width) and row["loss"] is not None
        ]
        if own:
            mean, error = mean_and_error([row["loss"] for row in own])
            counts = [f"{own[0][key]:,}" for key in ("parameters", "macs", "macs_with_head")]
            lines.append([*map(str, cell), f"{mean:.4f} ± {error:.4f}", edge_mark(own), *counts])
    return lines


def draw(axes: Any, rows: list[Row], setting: Setting) -> None:
    """Draw the loss against MACs with the head and without it."""
    best = {key: row for key, row in best_rows(rows, setting).items() if row["loss"] is not None}
    for axis, key in zip(axes, ("macs_with_head", "macs")):
        for method in setting.methods:
            own = [row for (m, _, _), row in best.items() if m == method]
            sizes = sorted({row[key] for row in own})
            means = [mean_and_error([row["loss"] for row in own if row[key] == macs]) for macs in sizes]
            axis.errorbar(sizes, [m for m, _ in means], [e for _, e in means], marker="o", label=method)
        axis.set(xlabel=f"MACs per word, {'with' if key != 'macs' else 'without'} the head", xscale="log")
    axes[0].set_ylabel("nats per word")
    axes[0].legend(fontsize=7)


EXPERIMENT = Experiment(
    name="structured_head",
    title="GPT-2 with BTT in all linears and the head",
    source="Compute Better Spent, Figure 9",
    claim="BTT is below dense at equal compute with the head, and about equal without it",
    rule=(
        "losses at equal MACs, by seed: btt minus dense < 0 with the head. Also: the mean difference without it "
        "is less than half as large"
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
