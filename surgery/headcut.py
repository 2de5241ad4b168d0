"""Replacing the head: calibrated on what the converted layers finally give it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from surgery.batch import Batch
from surgery.calibrate import Moments
from surgery.curvature import load_grams
from surgery.fit import Judge, fit_cut
from surgery.grafts import Grafts, graft, stored_dtype
from surgery.planning import Plan
from surgery.recipe import Recipe
from surgery.shards import Entry
from surgery.skeleton import Skeleton
from surgery.weights import matrix_of


@torch.no_grad()
def convert_head(
    skeleton: Skeleton,
    plan: Plan,
    recipe: Recipe,
    budgets: dict[str, float],
    batch: Batch | None,
    final_BTD: Tensor | None,
    grams: Path,
    device: torch.device,
) -> Grafts:
    """Grafts of the head, empty where it is not cut. final_BTD: original rows, then converted."""
    grafts = Grafts()
    cuts = plan.of_layer("")
    for path, (cut, *_) in cuts.items():
        weight_OI = matrix_of(skeleton, cut, device)
        judge = Judge(damping=recipe.damping, sweeps=recipe.sweeps, stored=stored_dtype(skeleton, cut))
        if batch is not None and final_BTD is not None:
            judge.fit = _moments(cut.name, weight_OI, final_BTD, 0, batch.fit_rows, batch, recipe)
            rows = batch.fit_rows, batch.rows
            judge.held = partial(_moments, cut.name, weight_OI, final_BTD, *rows, batch, recipe)
            judge.gram = load_grams(grams / f"{path}.safetensors", device).get(cut.name)
        graft(skeleton, [cut], [fit_cut(cut, budgets[cut.name], weight_OI, judge)], device, grafts)
        grafts.entries += untied_entries(skeleton, path)
    return grafts


def _moments(
    name: str, weight_OI: Tensor, final_BTD: Tensor, first: int, last: int, batch: Batch, recipe: Recipe
) -> Moments:
    moments, mask_BT = Moments({name: (weight_OI, False)}), batch.head_mask()
    for row in range(first, last):
        real = slice(None) if mask_BT is None else mask_BT[row].bool()
        x0, x = (final_BTD[i][real].to(weight_OI.device).flatten(0, -2) for i in (row, row + batch.rows))
        moments.add(x if recipe.calibrate == "sequential" else x0, x0)
    return moments.means()


def untied_entries(skeleton: Skeleton, head: str) -> list[Entry]:
    """What was stored once for a tied pair, the input embedding or a bias, under each name that no longer
    shares it; the head's own weight is replaced."""
    pairs = [pair for pair in skeleton.tied.items() if any(name.startswith(f"{head}.") for name in pair)]
    wanted = dict.fromkeys(name for pair in pairs for name in pair if name != f"{head}.weight")
    return [Entry.copy(name, skeleton.info(name)) for name in wanted if name not in skeleton.keys]
