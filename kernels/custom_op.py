"""Kernels as PyTorch custom operators, which torch.compile keeps as one node of its graph forwards and one backwards.

    SSD_OP = CustomOp("ssd", "Tensor q, .., Tensor? first, int chunk", forward, backward, fake)
    out, last = SSD_OP(q, .., first, chunk)

Outside of torch.compile, kernels are called through an autograd.Function of their own: an operator costs some hundred
microseconds of the host at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class CustomOp:
    """The operator surgery::{name} and its gradient.

    schema: the inputs, in the syntax of torch.library. forward(*inputs) returns two tensors. backward(d_one, d_two,
    *inputs) returns for each input a gradient or None; it gets no results of the forward but recomputes them.
    fake(*inputs) returns empty tensors with the shapes and dtypes of forward's.
    """

    def __init__(
        self, name: str, schema: str, forward: Callable[..., Pair], backward: Callable[..., Any],
        fake: Callable[..., Pair],
    ):  # fmt: skip
        library: Any = torch.library
        node = library.custom_op(f"surgery::{name}", forward, mutates_args=(), schema=f"({schema}) -> (Tensor, Tensor)")
        back = library.custom_op(
            f"surgery::{name}_backward",
            lambda d_one, d_two, *inputs: _complete_grads(backward(d_one, d_two, *inputs), inputs),
            mutates_args=(),
            schema=f"(Tensor d_one, Tensor d_two, {schema}) -> Tensor[]",
        )
        node.register_fake(fake)
        back.register_fake(lambda d_one, d_two, *inputs: _complete_grads([None] * len(inputs), inputs))

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
            ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs), *output)
            ctx.inputs = inputs

        def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            *tensors, one, two = ctx.saved_tensors
            inputs = [x if x is not None else y for x, y in zip(tensors, ctx.inputs)]
            filled = [torch.zeros_like(x) if d is None else d for d, x in zip(grads, (one, two))]
            computed = iter(back(*filled, *inputs))
            return tuple(next(computed) if _is_float(x) else None for x in inputs)

        node.register_autograd(gradients, setup_context=setup_context)
        self.node = node

    def __call__(self, *inputs: Any) -> Pair:
        """Call the operator."""
        return self.node(*inputs)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _complete_grads(grads: Any, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Return a contiguous gradient of every floating-point input in the input's dtype, as the operator's schema
    promises.
    """
    pairs = [(d, x) for d, x in zip(grads, inputs) if _is_float(x)]
    return [
        torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if d is None
        else d.to(x.dtype).expand(x.shape).contiguous()
        for d, x in pairs
    ]
