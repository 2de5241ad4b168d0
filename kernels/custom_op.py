"""Kernels as torch sees them while it compiles a model: one node forwards and one backwards, of known shapes.

    SSD = Opaque("ssd", "Tensor q, .., Tensor? first, int chunk", forward, backward, made)
    out, last = SSD(q, .., first, chunk)

forward(*inputs) -> two tensors; backward(d_one, d_two, *inputs) -> a gradient or None for each input; made(*inputs) -> empty
tensors like forward's. Backwards starts from the inputs alone. Eagerly an autograd.Function is called by itself: a node
costs the host some hundred microseconds that a compiled model does not pay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class CustomOp:
    """`schema`: the inputs, as torch.library writes them."""

    def __init__(
        self, name: str, schema: str, forward: Callable[..., Pair], backward: Callable[..., Any],
        made: Callable[..., Pair],
    ):  # fmt: skip
        library: Any = torch.library
        node = library.custom_op(f"surgery::{name}", forward, mutates_args=(), schema=f"({schema}) -> (Tensor, Tensor)")
        back = library.custom_op(
            f"surgery::{name}_backward",
            lambda d_one, d_two, *inputs: _complete_grads(backward(d_one, d_two, *inputs), inputs),
            mutates_args=(),
            schema=f"(Tensor d_one, Tensor d_two, {schema}) -> Tensor[]",
        )
        node.register_fake(made)
        back.register_fake(lambda d_one, d_two, *inputs: _complete_grads([None] * len(inputs), inputs))

        def saved(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *output)
            ctx.rest = inputs

        def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            *held, one, two = ctx.saved_tensors
            inputs = [x if x is not None else y for x, y in zip(held, ctx.rest)]
            given = [torch.zeros_like(x) if d is None else d for d, x in zip(grads, (one, two))]
            made_here = iter(back(*given, *inputs))
            found = [next(made_here) if _is_float(x) else None for x in inputs]
            return tuple(found)

        node.register_autograd(gradients, setup_context=saved)
        self.node = node

    def __call__(self, *inputs: Any) -> Pair:
        return self.node(*inputs)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _complete_grads(grads: Any, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Of every input that has one, in its dtype and dense: what was promised."""
    pairs = [(d, x) for d, x in zip(grads, inputs) if _is_float(x)]
    return [
        torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if d is None
        else d.to(x.dtype).expand(x.shape).contiguous()
        for d, x in pairs
    ]
