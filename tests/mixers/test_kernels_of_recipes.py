"""Kernels take what the shipped recipes' mixers compute, for the head dims of all families, with grouped-query attention.

The table: recipe x head dim -> functions that a kernel replaces in a training step under autocast, and in one token of
decoding in bfloat16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.slow import slow_where

from surgery.core.dispatch import DispatchedOp, load_kernels
from surgery.mixers import AttentionShape
from surgery.planning.recipe import load_recipe
from surgery.planning.shipped import read_recipes

from .test_autocast import one_layer, train_step

HEAD_DIMS = slow_where(lambda head_dim: head_dim in (96, 128), [64, 80, 96, 128, 256])
HEADS = (6, 2)
TREE, GATED = {"log_linear"}, {"semiseparable"}
FEATURES = {"linear_features"}
NEAR = {"local_attention"} | FEATURES
JOIN = {"join_and_gate"}  # not of normalised attention
TOKENS: dict[str, set[str]] = {  # functions of a training step
    "hybrid-25": TREE | NEAR | JOIN,
    "log-linear": TREE | NEAR | JOIN,
    "log-linear-gdn": TREE | FEATURES,
    "log-linear-mamba2": TREE | FEATURES,
    "gated-deltanet": GATED | NEAR | JOIN,
    "lolcats": GATED | NEAR,
    "tbm": {"toeplitz_causal"} | NEAR,
    "hedgehog": GATED | FEATURES,
    "linear-attention": GATED,
    "deltanet": GATED | FEATURES,
    "retnet": GATED | FEATURES,
    "ssd": GATED | FEATURES,
    "ssd-equal-state": GATED,
    "block-diagonal-mask": GATED | FEATURES,
    "mhla": {"blocks_from_zero"} | FEATURES,
    "mhla-frozen": {"blocks_from_zero"} | FEATURES,
    "mhla-elu": {"blocks_from_zero"},
    "tbm-elu": {"toeplitz_causal"},
    "alternating-window": {"attend"},
    "mlr-cache-60": {"attend"},
    "mlr-nested": {"attend"},
    "window-equal-state": {"attend"},
}
FEATURES_BY_PYTORCH = {"linear-attention", "ssd-equal-state", "mhla-elu", "tbm-elu"}  # feature maps without a kernel
NO_KERNEL = {
    "bilinear-btt",
    "bilinear-mlbtc",
    "bilinear-mlr",
    "sliding-window",
}  # added scores, or PyTorch's own attention
NO_KERNEL |= {"toeplitz-mask", "input-toeplitz-mask", "fourier-mask"}  # products by FFT
NO_KERNEL |= {"banded-mask", "dilated-mask"}  # products of neighboring chunks
NO_STEP_KERNEL = {"mhla", "mhla-elu", "mhla-frozen"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Collect the functions that a kernel may replace, outermost first, and whether a kernel takes the call."""
    if not load_kernels():
        pytest.skip("needs Triton")
    made: list[tuple[str, bool]] = []
    run, depth = DispatchedOp.__call__, 0

    def record(op: DispatchedOp, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        name = op.reference.__name__
        given = args
        if name in TREE | GATED | {"toeplitz_causal", "blocks_from_zero"}:  # on a GPU, in bfloat16 (to_matmul_dtype)
            given = (*(t.bfloat16() for t in args[:3]), *args[3:])
        taken = any(kernel.accepts(*given, **kwargs) for kernel in op.kernels)
        if depth == 0:  # a reference inside of a call that a kernel takes is not run on a GPU
            made.append((name, taken))
        depth += taken
        try:
            return run(op, *args, **kwargs)
        finally:
            depth -= taken

    monkeypatch.setattr(DispatchedOp, "__call__", record)
    return made


def layer(recipe: str, head_dim: int) -> Any:
    attention = load_recipe(recipe).attention
    assert attention is not None
    shape = AttentionShape(84, *HEADS, head_dim, head_dim, head_dim**-0.5, rotary=head_dim)
    return one_layer(attention.config_for(shape, 0, 1), head_dim, HEADS)


def test_every_recipe_is_in_the_table() -> None:
    mixers = {name for name in read_recipes(every=True) if load_recipe(name).attention is not None}
    assert mixers == {*TOKENS, *NO_KERNEL}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("recipe", TOKENS)
def test_kernels_take_a_training_step(recipe: str, head_dim: int, calls: list[tuple[str, bool]]) -> None:
    model = layer(recipe, head_dim)
    train_step(model)
    others = {"linear_features"} if recipe in FEATURES_BY_PYTORCH else set()
    assert dict(calls) == {**dict.fromkeys(TOKENS[recipe], True), **dict.fromkeys(others, False)}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("recipe", [name for name in TOKENS if name not in NO_STEP_KERNEL])
@torch.no_grad()
def test_kernels_take_a_decoding_step(recipe: str, head_dim: int, calls: list[tuple[str, bool]]) -> None:
    model = layer(recipe, head_dim).eval().bfloat16()
    past = model(torch.zeros(2, 80, dtype=torch.int64), use_cache=True).past_key_values
    calls.clear()
    model(torch.zeros(2, 1, dtype=torch.int64), past_key_values=past, use_cache=True)
    # Mixers without a fused step go through `one_token`'s reference, whose operations have kernels.
    left = {name for name, taken in calls if not taken}
    assert calls and left <= {"one_token"} and (left == set() or any(taken for _, taken in calls))
