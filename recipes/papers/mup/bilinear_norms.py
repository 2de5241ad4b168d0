"""Held-out loss of small GPT-2 models trained with bilinear attention scores instead of q . k (base `own`), one row per
norm.

Each row has the best of several base learning rates.

python -m recipes.papers.mup.bilinear_norms --text calibration.txt --held heldout.txt [--seeds 2] [--steps 200] [--only qk] [--flat]

--flat trains the factors at the base rate, independent of their fan-in. The models are
character-level, with two layers of width 64 and four heads of 16. A step of AdamW, with a cosine schedule, takes 8
windows of 32 characters. Every score gets the same batches. The loss is in nats per character.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.papers.mup.models import SweepSizes, make_config
from recipes.papers.script import run_script
from surgery.planning.recipe import validate_recipe
from surgery.training.optim import make_groups, make_optimizer, parameter_infos
from surgery.training.pretrain.initialize import make_model, plan_new_model
from surgery.training.recipe import parse_healing_recipe

WIDTH, SIZES = 64, SweepSizes(layers=2, head=16, length=32, rows=8)
MLR, BTT = {"mixer": "bilinear_mlr", "ranks": [8, 4, 2]}, {"mixer": "bilinear_btt", "rank": 1}
FORMS: dict[str, dict[str, Any] | None] = {
    "softmax(q . k)": None,
    **{f"MLR 8|4|2, {norm}": {**MLR, "base": "own", "norm": norm} for norm in ("none", "layer")},
    **{f"MLR 8|4|2, qk, C = {scale:g}": {**MLR, "base": "own", "norm": "qk", "scale": scale} for scale in (1.0, 8.0)},
    **{f"BTT rank 1, {norm}": {**BTT, "base": "own", "norm": norm} for norm in ("none", "layer")},
    **{f"BTT rank 1, qk, C = {scale:g}": {**BTT, "base": "own", "norm": "qk", "scale": scale} for scale in (1.0, 8.0)},
}


def make_bilinear_gpt2(attention: dict[str, Any] | None, vocabulary: int, seed: int) -> Any:
    """Return a small GPT-2 with a bilinear mixer, or with its own attention."""
    config, plan = make_config(WIDTH, vocabulary, SIZES), None
    if attention is not None:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            plan = plan_new_model(
                Path(folder), validate_recipe({"structure": "dense", "attention": attention}, "attention")
            )
    return make_model(config, plan, SIZES.embedding_std, seed)


def train_model(model: Any, ids: Tensor, rate: float, steps: int, seed: int, flat: bool) -> Any:
    """Train a model at a base rate and return it. flat: train factors at the base rate, independent of their fan-in."""
    keys = {"kind": "lm", "trains": ["all"], "rate": rate, "length": SIZES.length, "batch": SIZES.rows}
    keys |= {"tokens": steps * SIZES.rows * SIZES.length, "optimiser": {"base_width": WIDTH}}
    stage = parse_healing_recipe({"stages": [keys]}).stages[0]
    groups = make_groups(model, set(parameter_infos(model)), stage)
    for group in groups:
        group.rate = rate if flat and group.kind == "mixers" else group.rate
    optimiser = make_optimizer(groups, stage.optimiser)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        starts = torch.randint(len(ids) - SIZES.length, (SIZES.rows,), generator=generator)
        batch = torch.stack([ids[i : i + SIZES.length] for i in starts])
        for param_group in optimiser.param_groups:
            param_group["lr"] = (
                param_group["peak"] * min(1.0, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * step / steps))
            )
        optimiser.zero_grad()
        model(batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return model


@torch.no_grad()
def held_out_loss(model: Any, ids: Tensor) -> float:
    """Return the loss in nats per character over adjacent windows."""
    rows = ids[: len(ids) // SIZES.length * SIZES.length].view(-1, SIZES.length)
    return float(model.eval()(rows, labels=rows, use_cache=False).loss)


def result_rows(
    text: str, held: str, *, seeds: int, steps: int, log2_rates: list[float], only: str, flat: bool
) -> Iterator[dict[str, Any]]:
    """Return the result rows of all forms and rates."""
    vocabulary = sorted(set(text))
    number = {c: i for i, c in enumerate(vocabulary)}
    ids, held_ids = (torch.tensor([number[c] for c in t if c in number]) for t in (text, held))
    for name, attention in ((n, a) for n, a in FORMS.items() if only in n):
        found: dict[float, list[float]] = {}
        for rate in log2_rates:
            runs = (make_bilinear_gpt2(attention, len(vocabulary), s) for s in range(seeds))
            found[rate] = [
                held_out_loss(train_model(m, ids, 2**rate, steps, s, flat), held_ids) for s, m in enumerate(runs)
            ]
        means = {rate: statistics.fmean(losses) for rate, losses in found.items()}
        best = min(means, key=lambda rate: means[rate] if means[rate] == means[rate] else math.inf)
        yield {"form": name, "log2 rate": best, "losses": found[best], "means": means}


def main() -> None:
    """Print the table row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="Train on this text.")
    parser.add_argument("--held", type=Path, required=True, help="Score the first 16,384 characters of this text.")
    parser.add_argument("--seeds", type=int, default=2, help="Runs of each score and rate. Default: 2.")
    parser.add_argument("--steps", type=int, default=200, help="Steps of each run. Default: 200.")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[-7.0, -6.0, -5.0], help="log2 of the base rates. Default: -7 -6 -5."
    )
    parser.add_argument("--only", default="", help="Train only scores whose name contains this, e.g. qk.")
    parser.add_argument(
        "--flat", action="store_true", help="Train factors at the base rate, independent of their fan-in."
    )
    given = parser.parse_args()
    text, held = given.text.read_text(encoding="utf-8"), given.held.read_text(encoding="utf-8")[:16_384]
    print("| score | log2 of the best rate | held-out loss | all rates |\n| --- | --- | --- | --- |")
    for row in result_rows(
        text,
        held,
        seeds=given.seeds,
        steps=given.steps,
        log2_rates=given.rates,
        only=given.only,
        flat=given.flat,
    ):
        losses = row["losses"]
        error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
        means = ", ".join(f"{mean:.3f}" for mean in row["means"].values())
        print(
            f"| {row['form']} | {row['log2 rate']:g} | {statistics.fmean(losses):.3f} ± {error:.3f} | {means} |",
            flush=True,
        )


if __name__ == "__main__":
    run_script(main)
