"""Training steps of recipes/papers/experiments can be recorded as CUDA graphs: they read no value of a tensor on the
host.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.papers.experiments import (
    block_mixing,
    characters,
    cores,
    forecasting,
    language,
    rate_transfer,
    recall,
    series_tokens,
    structured_head,
    tuned_rates,
    updates,
    vision,
    weight_norm,
)
from recipes.papers.experiments.sweep import Cell
from recipes.papers.training.stacked import StackedTraining

# Operations that copy a value to the host, or create a tensor from host data.
HOST = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "is_nonzero")


class HostReads(TorchDispatchMode):
    """Names of the operations of a block that a CUDA graph cannot contain."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in func.__name__ for name in HOST):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class SecondStep(Exception):
    """Ends a run behind its second step."""


@pytest.mark.parametrize(
    "module",
    [
        recall,
        block_mixing,
        characters,
        language,
        updates,
        weight_norm,
        cores,
        vision,
        tuned_rates,
        structured_head,
        rate_transfer,
        forecasting,
        series_tokens,
    ],
    ids=lambda m: m.__name__,
)
def test_steps_read_nothing_on_the_host(module, monkeypatch):
    """The second step of every method, as it would be recorded."""
    reads, plain, steps = HostReads(), StackedTraining._step, []

    def step(stack, batch):
        steps.append(stack)
        if len(steps) % 2:
            return plain(stack, batch)
        with monkeypatch.context() as patch, reads:
            patch.setattr("surgery.mixers.masks.block_mixing.is_recording", lambda tensor: True)
            plain(stack, batch)
        raise SecondStep

    monkeypatch.setattr(StackedTraining, "_step", step)
    setting = module.SMOKE
    methods = recall.ATTENTION if module is recall else setting.methods
    for method in methods:
        cell = Cell(method, max(setting.widths))
        with pytest.raises(SecondStep):
            module.train(setting, cell, [(1e-2, 0)], torch.device("cpu"))
    assert not reads.found and len(steps) == 2 * len(methods)
