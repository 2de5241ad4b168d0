"""Which functions of a checkpoint's mixers have GPU kernels for its shapes in training, found on a CPU.

Each mixer with another config or shape is built with random weights and called on a few tokens under autocast to
bfloat16, with queries, keys, values and hidden states in bfloat16, as training gives them. The kernels are asked whether
they accept these calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from surgery.core.dispatch import load_kernels, preview_kernels
from surgery.mixers import MIXERS, AttentionShape, MixerConfig
from surgery.mixers.base import MixerInputs

TOKENS = 128  # of the call: two chunks


def training_kernels(mixers: Iterable[tuple[str, MixerConfig, AttentionShape]]) -> list[dict[str, Any]]:
    """Return a row per mixer config and shape: `mixer`, the config's name; `layers`, their number; `kernels`, the
    functions that kernels compute; `references`, name -> reason of those that run their PyTorch reference.

    mixers: (path, config, shape). The list is empty without Triton, and has no row for mixers without such functions,
    nor for level weights of native layers, whose queries and keys a layer of transformers makes.
    """
    if not load_kernels():
        return []
    layers: dict[tuple[MixerConfig, AttentionShape], int] = {}
    for _, config, shape in mixers:
        if not config.replaces_attention:
            continue
        layers[config, shape] = layers.get((config, shape), 0) + 1
    rows = []
    for (config, shape), count in layers.items():
        calls = _previewed_calls(config, shape)
        if calls:
            kernels = [name for name, reason in calls.items() if reason is None]
            references = {name: reason for name, reason in calls.items() if reason is not None}
            rows.append({"mixer": config.name, "layers": count, "kernels": kernels, "references": references})
    return rows


def _previewed_calls(config: MixerConfig, shape: AttentionShape) -> dict[str, str | None]:
    """Return what `preview_kernels` collects in a forward pass of one mixer."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        mixer = MIXERS[config](config, shape).float().train()

        def tokens(*sizes: int) -> Tensor:
            return torch.randn(sizes, dtype=torch.bfloat16).requires_grad_()

        q_BHTK, k_BGTK = tokens(1, shape.heads, TOKENS, shape.key), tokens(1, shape.groups, TOKENS, shape.key)
        v_BGTV, x_BTD = tokens(1, shape.groups, TOKENS, shape.value), tokens(1, TOKENS, shape.dim)
        rope = (torch.ones(1, TOKENS, shape.rotary), torch.zeros(1, TOKENS, shape.rotary)) if shape.rotary else None
        inputs = MixerInputs(q_BHTK, k_BGTK, v_BGTV, x_BTD, rope=rope)
        with preview_kernels() as calls, torch.autocast("cpu", torch.bfloat16):
            mixer(inputs)
    return calls
