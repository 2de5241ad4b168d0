"""Train the runs of one cell of an experiment as a stack, on rows that are a pure function of (seed, row)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from recipes.papers.experiments.models import make_stage
from recipes.papers.experiments.sweep import TURNS, Setting
from recipes.papers.mup.models import rate_factors
from recipes.papers.training.stacked import Batch, RunFunction, StackedTraining

NUMBERS_AT_ONCE = 2**23  # random numbers of the rows that are made together
STEPS_AT_ONCE = 32

BatchFn = Callable[[int, int, int], Batch]  # (seed, first row, number of rows) -> tensors (rows, ..)


def seeds_of(runs: Sequence[tuple[float, int]]) -> list[int]:
    """Return the seeds of runs (rate, seed), each once: runs of one seed start from one model."""
    return sorted({seed for _, seed in runs})


def train_stack(
    setting: Setting,
    runs: Sequence[tuple[float, int]],
    models: Mapping[int, nn.Module],
    batch_of: BatchFn,
    device: torch.device,
    *,
    loss: RunFunction,
    row_numbers: int,
    factors: Mapping[str, float] | None = None,
    base_width: int = 64,
    floor: float = 0.0,
    after_step: Callable[[StackedTraining, int], None] | None = None,
    held: Collection[str] = (),
    held_steps: int = 0,
) -> StackedTraining:
    """Return the trained stack of runs (rate, seed).

    models: seed -> initialized model. row_numbers: random numbers in a row, which bounds the rows that are made
    together. factors: parameter -> factor on the rate; None: those of a recipe with `base_width`. floor: share of the
    rate at the last step; 1: no decay. after_step: called with the stack and the step. held: names of parameters that stay
    at their initial values in the first `held_steps` steps.
    """
    if device.type == "cuda":  # return what earlier stacks held: other processes may share the GPU
        gc.collect()
        torch.cuda.empty_cache()
    stage = make_stage(setting.steps, base_width=base_width, floor=floor)
    factors = rate_factors(models[runs[0][1]], stage) if factors is None else factors
    rates = [{name: rate * f for name, f in factors.items()} for rate, _ in runs]
    stack = StackedTraining(
        [models[seed] for _, seed in runs], rates, stage.optimiser, stage.clip, device, setting.graph, loss=loss,
        held=held if held_steps else (),
    )  # fmt: skip
    seeds = sorted(models)
    which = torch.tensor([seeds.index(seed) for _, seed in runs], device=device)
    steps = max(1, min(STEPS_AT_ONCE, NUMBERS_AT_ONCE // (setting.rows * row_numbers)))
    made: list[Batch] = []
    for step in range(setting.steps):
        if step % steps == 0:
            count = min(steps, setting.steps - step) * setting.rows
            made = [batch_of(seed, step * setting.rows, count) for seed in seeds]
        if held_steps and step == held_steps:
            stack.release()
        start = step % steps * setting.rows
        batch = {n: torch.stack([m[n][start : start + setting.rows] for m in made])[which] for n in made[0]}
        stack.step(batch, stage.schedule.factor(step, setting.steps))
        if after_step is not None:
            after_step(stack, step)
        TURNS.pass_on()
    return stack


@torch.no_grad()
def trained_model(stack: StackedTraining, run: int, model: nn.Module) -> nn.Module:
    """Return `model`, changed in place to the parameters of a run."""
    for name, leaf in zip(stack.names, stack.leaves):
        model.get_parameter(name).copy_(leaf[run])
    return model


def pick(batch: Batch, names: Sequence[str]) -> Batch:
    """Return the named tensors of a batch."""
    return {name: batch[name] for name in names}
