"""Ops over chunks of tokens whose backward recomputes everything from the inputs: (out, state) of a few tensors and a
plan.

    SSD = ChunkedOp("ssd", "Tensor q, .., Tensor? first", "Tensor start, .., bool aligned", ssd_functions)
    out, last = SSD((q, .., first), (start, .., aligned))

Eager calls go through one autograd.Function, since a torch.library node costs the host some hundred microseconds;
inside torch.compile the op is a node of known output shapes (kernels/custom_op.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.kernels.custom_op import CustomOp

OptionalTensors = tuple[Tensor | None, ...]


class ChunkedFunctions(NamedTuple):
    """The functions of one op.

    `tensors` are its differentiable inputs and other tensors that belong to the rows; `geometry` are the arguments that
    say where rows and chunks lie.

    make_plan(tensors, *geometry) -> plan, an object with sizes, strides and tables that the other functions take.
    forward(tensors, plan) -> (out, state).
    backward(tensors, plan, d_out, d_state) -> for each of `tensors` its gradient or None.
    fake(tensors, *geometry) -> (out, state), empty tensors of the shapes, dtypes and strides of forward's.
    """

    make_plan: Callable[..., Any]
    forward: Callable[[Any, Any], tuple[Tensor, Tensor]]
    backward: Callable[[Any, Any, Tensor, Tensor], OptionalTensors]
    fake: Callable[..., tuple[Tensor, Tensor]]


class _ChunkedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, functions: ChunkedFunctions, plan: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.functions, ctx.plan = functions, plan
        ctx.save_for_backward(*tensors)
        return functions.forward(tensors, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> OptionalTensors:
        return None, None, *_input_gradients(ctx.functions, ctx.saved_tensors, ctx.plan, grads)


def _input_gradients(
    functions: ChunkedFunctions, tensors: OptionalTensors, plan: Any, grads: tuple[Tensor, ...]
) -> OptionalTensors:
    """Return each gradient in the dtype of its input."""
    gradients = functions.backward(tensors, plan, *grads)
    return tuple(None if d is None or x is None else d.to(x.dtype) for d, x in zip(gradients, tensors))


class ChunkedOp:
    """One op, called as op(tensors, geometry). `node` is the torch.library op, with the inputs (*tensors, *geometry).

    tensors, geometry: the schemas of the two groups of inputs, as torch.library writes them.
    """

    def __init__(self, name: str, tensors: str, geometry: str, functions: ChunkedFunctions):
        n_tensors, n_geometry = len(tensors.split(",")), len(geometry.split(","))
        self.functions = functions

        def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
            operands = inputs[:n_tensors]
            return functions.forward(operands, functions.make_plan(operands, *inputs[n_tensors:]))

        def backward(d_out: Tensor, d_state: Tensor, *inputs: Any) -> OptionalTensors:
            operands = inputs[:n_tensors]
            plan = functions.make_plan(operands, *inputs[n_tensors:])
            return *_input_gradients(functions, operands, plan, (d_out, d_state)), *[None] * n_geometry

        def fake(*inputs: Any) -> tuple[Tensor, Tensor]:
            return functions.fake(inputs[:n_tensors], *inputs[n_tensors:])

        self.node = CustomOp(name, f"{tensors}, {geometry}", forward, backward, fake).node

    def __call__(self, tensors: OptionalTensors, geometry: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return (out, state)."""
        if torch.compiler.is_compiling():
            outputs: tuple[Tensor, Tensor] = self.node(*tensors, *geometry)
            return outputs
        plan = self.functions.make_plan(tensors, *geometry)
        made: tuple[Tensor, Tensor] = _ChunkedFunction.apply(self.functions, plan, *tensors)
        return made
