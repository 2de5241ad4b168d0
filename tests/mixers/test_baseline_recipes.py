"""Recipes of baselines: layers in turn, frozen block mixing, and states of equal size."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from surgery.mixers import MIXERS, AttentionShape, MixerInputs
from surgery.planning.recipe import load_recipe

SHAPE = AttentionShape(dim=256, heads=4, groups=2, key=64, value=64, scaling=0.125)


def config_of(name: str, *keys: str, shape: AttentionShape = SHAPE):
    return load_recipe(name, list(keys)).attention.config_for(shape, 0, 1)


def test_windows_and_all_tokens_take_turns():
    attention = load_recipe("alternating-window").attention
    kept = attention.hybrid.fixed_layers([SimpleNamespace(index=i) for i in range(8)])
    assert kept == {1, 3, 5, 7}
    config = config_of("alternating-window")
    assert (config.name, config.window, config.sinks) == ("window", 256, 0)


@pytest.mark.parametrize("length", [4096, 6000, 8191])
def test_states_are_of_equal_size(length):
    """In numbers of each key/value head: 13 x 64 x 64."""
    sizes = {
        name: MIXERS[config](config, SHAPE).cost(config, SHAPE, length).cache
        for name in ("log-linear-mamba2", "log-linear-gdn", "window-equal-state", "ssd-equal-state")
        for config in [config_of(name)]
    }
    assert set(sizes.values()) == {SHAPE.groups * 13 * 64 * 64}, sizes


def test_the_formula_for_other_heads_is_the_docs_one():
    shape = replace(SHAPE, key=32, value=32)
    n = 13 * 32 * 32 // 64
    keys = {"window-equal-state": f"attention.window={n + 1}", "ssd-equal-state": f"attention.features.features={n}"}
    configs = [
        config_of("log-linear-mamba2", shape=shape),
        *(config_of(name, key, shape=shape) for name, key in keys.items()),
    ]
    assert n == 208 and len({MIXERS[c].cost(c, shape, 5000).cache for c in configs}) == 1


def test_frozen_block_mixing_is_not_trained():
    """The matrix is stored and in no optimizer; a step of all parameters changes other tensors and not the matrix."""
    torch.manual_seed(0)
    shape = replace(SHAPE, dim=16, key=8, value=8)
    frozen, learned = (
        MIXERS[c](c, shape)
        for c in (config_of(n, "attention.mask.block=4", shape=shape) for n in ("mhla-frozen", "mhla"))
    )
    names = {name for name, _ in learned.named_parameters()} - {name for name, _ in frozen.named_parameters()}
    assert names == {"mask.weight_GJMM"} and "mask.weight_GJMM" in frozen.state_dict()
    before = {name: t.clone() for name, t in frozen.state_dict().items()}
    sizes = [(4, 12, 8), (2, 12, 8), (2, 12, 8), (12, 16)]
    inputs = MixerInputs(*(torch.randn(2, *size) for size in sizes))
    optimizer = torch.optim.SGD(frozen.parameters(), lr=0.1)
    F.mse_loss(frozen.mix(inputs)[0], torch.randn(2, 4, 12, 8)).backward()
    optimizer.step()
    changed = {name for name, t in frozen.state_dict().items() if not torch.equal(t, before[name])}
    assert changed and "mask.weight_GJMM" not in changed
