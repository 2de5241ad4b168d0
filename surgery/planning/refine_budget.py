"""Epochs of `refine: auto`, and the estimated time of a refinement.

The estimate counts multiply-accumulates and divides them by a fixed speed of each kind of device. It reads no clock, and `auto` counts
BUDGET_THREADS threads on every CPU, so that the epochs of a conversion depend on the kind of device alone. The other steps are
estimated by surgery.conversion.estimation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surgery.planning.recipe import RefineRecipe
from surgery.planning.targets import LinearTarget, Plan
from surgery.structures import STRUCTURES

BUDGET_SECONDS = {"cpu": 300.0, "cuda": 540.0}  # of a whole conversion with `auto`
BUDGET_THREADS = 2  # threads of a CPU for which `auto` chooses epochs, whatever number the machine has
# Multiply-accumulates per second, in float32: on a CPU of each thread.
SPEED = {"cpu": 8e9, "cuda": 15e12}
MAX_EPOCHS = 20
RATES = (1e-3, 3e-3, 1e-2, 3e-2)  # movement of a tensor per step, relative to its root mean square
TRIAL_STEPS = 8  # Adam steps of the trial of one rate
BATCH_TOKENS = 1024  # tokens of one step, in whole rows
# From so many tokens on, a step has LARGE_FACTOR times as many, and a trial as many more steps: a short one tells little about a long training.
LARGE_TEXT, LARGE_FACTOR = 2**16, 4


@dataclass(frozen=True)
class EpochSeconds:
    """Estimated seconds of one epoch of each part of a refinement. trials: of the rates, in epochs."""

    layers: float
    model: float
    trials: float

    def total(self, epochs: RefineRecipe) -> float:
        """Return the estimated seconds of a refinement."""
        return sum(
            seconds * (count + self.trials)
            for seconds, count in ((self.layers, epochs.layers), (self.model, epochs.model))
            if count
        )


def epoch_seconds(plan: Plan, tokens: int, device: str, threads: int) -> EpochSeconds:
    """Return the estimated seconds of an epoch. tokens: of the calibration text. device: `cpu` or `cuda`.

    A step costs three forward passes of the converted linears, and turns the gradients and steps of cores that have
    coordinates of their own (`step_coordinates`). That of the whole model has also five products with the head's matrix.
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


def text_factor(tokens: int) -> int:
    """Return the factor on the tokens of a step and on the steps of a trial, for a text of so many tokens."""
    return LARGE_FACTOR if tokens >= LARGE_TEXT else 1


def step_order(target: LinearTarget) -> int:
    """Return the order of the matrices of a target's `step_coordinates`, 0 if it has none."""
    return (
        0 if target.preview is None else STRUCTURES[target.preview].step_order(target.preview, target.out, target.in_)
    )


def coordinate_values(plan: Plan) -> int:
    """Return the number of elements of the matrices of all `step_coordinates`."""
    return sum(2 * step_order(target) ** 2 for target in plan.replaced_targets())


def budget_seconds(device: str) -> float:
    """Return the seconds of a conversion with `auto` on `cpu` or `cuda`."""
    return BUDGET_SECONDS.get(device, BUDGET_SECONDS["cpu"])


def resolve_refine(plan: Plan, tokens: int, device: str, others: float) -> RefineRecipe:
    """Return the epochs of a recipe's `refine`, those of `auto` so that they fit into what the other steps leave of BUDGET_SECONDS.

    others: estimated seconds of the other steps, on a CPU with BUDGET_THREADS threads. The whole model comes first: at equal time it gains
    more than its layers one by one (docs/quality.md).
    """
    refine = plan.recipe.refine
    if refine is None:
        return RefineRecipe(layers=0, model=0)
    if refine != "auto":
        return refine
    seconds, budget = epoch_seconds(plan, tokens, device, BUDGET_THREADS), budget_seconds(device) - others
    model = _epochs_within(budget, seconds.model, seconds.trials)
    left = budget - seconds.total(RefineRecipe(layers=0, model=model))
    return RefineRecipe(layers=_epochs_within(left, seconds.layers, seconds.trials), model=model)


def epochs_in_words(found: dict[str, Any]) -> str:
    """Return a sentence on the epochs of a refinement and their estimated time. found: `RefineEstimate.to_dict()`."""
    norms, minutes = ", norms and biases too" if found.get("norms") else "", found["seconds"] / 60
    parts = (("layers", "of each layer"), ("model", "of the whole model"))
    epochs = [f"{found[key]} epoch{'s' if found[key] > 1 else ''} {of}" for key, of in parts if found[key]]
    text = f"refine: {' and '.join(epochs)} over the calibration text{norms}, estimated at {minutes:.1f} minutes on {found['where']}"
    if "budget" not in found:
        return text if epochs else "refine: no epochs"
    budget = f"the budget of refine: auto is {found['budget'] / 60:.0f} minutes for the whole conversion on {found['budget_where']}"
    advice = "Set epochs to refine anyway, for example refine={layers: 0, model: 3}"
    if found["other_seconds"] is None:
        return f"refine: no epochs, because the time of the other steps is unknown, and {budget}. {advice}"
    others = f"{found['other_seconds'] / 60:.1f} minutes"
    if epochs:
        return f"{text}; {budget}, of which the other steps take {others}"
    return f"refine: no epochs, because the other steps are estimated at {others}, and {budget}. {advice}"


def place_in_words(device: str, threads: int) -> str:
    """Return a device in words. device: `cpu` or `cuda`. threads: of a CPU."""
    return "one GPU" if device == "cuda" else f"{threads} thread{'s' if threads > 1 else ''}"


def _epochs_within(budget: float, seconds: float, trials: float) -> int:
    """Return the number of epochs of `seconds` each, with their trials, that fit into the budget, at most MAX_EPOCHS."""
    return max(0, min(MAX_EPOCHS, int(budget / max(seconds, 1e-9) - trials)))
