"""The change of a model by level weights of 1, which is rounding: measured in every conversion that adds them.

    change = max |z' - z| / max |z|

z: logits of the original for random tokens, z': those of the original with level weights, in float32. Both run through
the layers together, one layer in memory at a time. A model without output embeddings is measured by its last hidden
states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.data import CalibrationSet, placeholder_tokens
from surgery.calibration.lm_head import ChunkedLMHead
from surgery.conversion.context import ConversionContext
from surgery.conversion.fisher import has_lm_head
from surgery.conversion.streams import Contexts, Layer, Stream, Streams, Visitor
from surgery.modeling.native import put_level_weights, remove_level_weights
from surgery.planning.native import NativeTarget

BLOCKS, MAX_TOKENS = 4, 512  # length of the text in blocks of the tree: queries read three levels; and its limit


@torch.no_grad()
def measure_level_weights(ctx: ConversionContext) -> dict[str, Any]:
    """Return the report's "native" entry: the change, and the tokens that it was measured on. Process 0 does this."""
    targets, layout = ctx.plan.native_targets, ctx.plan.layout
    text = CalibrationSet({"input_ids": _random_tokens(ctx)}, 1, 1)
    both = {"original": Stream(text.fit), "weighted": Stream(text.fit)}

    def visit(layer: Layer) -> Contexts:
        target = targets.get(layer.path)
        weighted = nullcontext() if target is None else _level_weights(ctx.model.module(target.path), target)
        return {"original": nullcontext(), "weighted": weighted}

    # Parameters are drawn before they are set to 0; a resumed conversion, which skips this, must draw as if they were not.
    with torch.random.fork_rng(devices=[ctx.device] if ctx.device.type == "cuda" else []):
        final = Streams(ctx.runner.single_process(), text, both).run(Visitor(visit))
    states = [final[name].flatten(0, -2).to(ctx.device) for name in both]
    parts = [(states[0], states[1])]
    if layout.head and has_lm_head(ctx.model):
        head = ChunkedLMHead(ctx.model, layout.head, layout.architecture, ctx.device)
        parts = [
            (head.logits(states[0], weight, bias), head.logits(states[1], weight, bias))
            for _, weight, bias in head.slices(len(states[0]))
        ]
    largest = max(float(before.abs().max()) for before, _ in parts)
    change = max(float((after - before).abs().max()) for before, after in parts)
    return {"change": change / max(largest, 1e-30), "tokens": text.inputs["input_ids"].numel()}


@contextmanager
def _level_weights(module: Any, target: NativeTarget) -> Iterator[None]:
    put_level_weights(module, target.config, target.shape)
    try:
        yield
    finally:
        remove_level_weights(module)


def _random_tokens(ctx: ConversionContext) -> Tensor:
    """Return token ids (1, T), seeded by the recipe, without those that stand for images or sound."""
    config = ctx.model.config.get_text_config()
    length = min(BLOCKS * max(target.config.block for target in ctx.plan.native_targets.values()), MAX_TOKENS)
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    ids_T = torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(ctx.recipe.seed))
    for token in placeholder_tokens(ctx.model.config):
        ids_T[ids_T == token] = 0
    return ids_T[None]
