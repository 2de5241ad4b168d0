"""Estimated time of the epochs of `tune`.

Multiply-accumulates are counted and divided by a fixed speed of each kind of device; no clock is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from surgery.conversion.tune import BATCH_TOKENS, RATES, TRIAL_STEPS, text_factor
from surgery.conversion.tune_model import step_order
from surgery.planning.recipe import TuneRecipe
from surgery.planning.targets import Plan

# Multiply-accumulates per second, in float32: on a CPU of each thread.
SPEED = {"cpu": 8e9, "cuda": 15e12}


@dataclass(frozen=True)
class EpochSeconds:
    """Estimated seconds of one epoch of each part of a tuning. trials: of the rates, in epochs."""

    layers: float
    model: float
    trials: float

    def total(self, epochs: TuneRecipe) -> float:
        """Return the estimated seconds of a tuning."""
        return sum(
            seconds * (count + self.trials)
            for seconds, count in ((self.layers, epochs.layers), (self.model, epochs.model))
            if count
        )


def epoch_seconds(plan: Plan, tokens: int, device: str, threads: int) -> EpochSeconds:
    """Return the estimated seconds of an epoch. tokens: of the calibration text. device: `cpu` or `cuda`. threads: of a
    CPU.

    A step costs three forward passes of the converted linears, and turns the gradients and steps of cores that have
    coordinates of their own (`step_coordinates`). That of the whole model has also five products with the head's
    matrix.
    """
    replaced = plan.replaced_targets()
    inside = sum(linear.out * linear.in_ for linear in plan.layout.linears if linear.path != plan.layout.head)
    for target in replaced:
        if target.linear.path != plan.layout.head and target.preview is not None:
            inside += target.params(target.preview) - target.numel
    head = sum(linear.out * linear.in_ for linear in plan.layout.linears if linear.path == plan.layout.head)
    turned = sum(2 * step_order(t) * t.params(t.preview) for t in replaced if t.preview is not None)
    factor = text_factor(tokens)
    turned *= max(1, round(tokens / (factor * BATCH_TOKENS)))
    speed = SPEED.get(device, SPEED["cpu"]) * (1 if device == "cuda" else threads)
    trials = len(RATES) * TRIAL_STEPS * BATCH_TOKENS * factor**2 / tokens
    layers, model = 3 * tokens * inside + turned, tokens * (3 * inside + 5 * head) + turned
    return EpochSeconds(layers / speed, model / speed, trials)


def tuning_dict(plan: Plan, tokens: int, device: str, threads: int | None = None) -> dict[str, Any] | None:
    """Return the epochs of a plan's recipe, their estimated seconds and the device in words; None if it tunes nothing.

    tokens, device, threads: as in `epoch_seconds`; no threads: those of this process.
    """
    epochs = plan.recipe.epochs
    if not epochs.is_on:
        return None
    threads = 1 if device == "cuda" else threads or torch.get_num_threads()
    return {
        **epochs.model_dump(exclude_defaults=True, exclude={"layers", "model"}),
        "layers": epochs.layers,
        "model": epochs.model,
        "seconds": round(epoch_seconds(plan, tokens, device, threads).total(epochs)),
        "where": "one GPU" if device == "cuda" else f"{threads} thread{'s' if threads > 1 else ''}",
    }
