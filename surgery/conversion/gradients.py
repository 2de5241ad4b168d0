"""Passes that go through the layers forward and back: one layer is one autograd function, loaded and run again in the
backward pass.

So memory holds one layer, its gradients and the inputs of all layers. What is done with the gradients is up to the
pass: the Fisher pass (surgery.conversion.fisher) sums their second moments, the tuning of the whole model
(surgery.conversion.tune_model) makes a step of Adam.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from surgery.calibration.layer_runner import LayerCall, LayerRunner, run_phases
from surgery.calibration.partition import Round
from surgery.conversion.streams import Layer


class LayerBackward:
    """The backward pass of one layer, a context around it.

    leaves: tensors whose gradients are asked for beside those of the layer's inputs; read after the forward of each
    chunk of rows.
    """

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []

    def __enter__(self) -> None:
        """Begin the backward pass."""

    def __exit__(self, *_: Any) -> None:
        """End the backward pass, also after an error."""

    def begin_rows(self, first: int, last: int) -> None:
        """Called before rows first:last run forward again."""

    def add(self, gradient_BTD: Tensor, of_leaves: list[Tensor | None]) -> None:
        """Take the gradients of the rows that just ran: of the layer's output, and of `leaves`."""

    def end_round(self, round_: Round) -> None:
        """Called after this process's rows of a round."""

    def finish(self) -> None:
        """Called after all rows, outside the context, while the layer's weights are still loaded."""


class GradientPass(ABC):
    """What a pass with gradients does at each layer. runner: runs the model."""

    runner: LayerRunner

    def forward_context(self, call: LayerCall) -> AbstractContextManager[Any]:
        """Return the context of the forward pass through a layer."""
        return nullcontext()

    @abstractmethod
    def backward_context(self, call: LayerCall) -> LayerBackward:
        """Return the context of the backward pass through a layer."""

    def stored_input(self, hidden_BTD: Tensor) -> Tensor:
        """Return the layer's input as it is kept until the backward pass."""
        return hidden_BTD

    def end_layer(self) -> None:  # noqa: B027  a pass may leave it as it is
        """Called after the backward pass of each layer, when its weights are unloaded."""

    def run_layer(self, layer: Layer) -> Any:
        """Return the layer's output, as an autograd function that runs the layer again in the backward pass."""
        hidden, spec, leaves = _flatten(layer.call)
        recomputed: Any = _RecomputedLayer
        return recomputed.apply(self, layer, spec, hidden, *leaves)


def _flatten(call: LayerCall) -> tuple[Tensor, TreeSpec, list[Any]]:
    """Return (hidden states, structure, leaves) of a call's arguments.

    The input of the first layer must require a gradient, so that autograd calls the backward of every layer.
    """
    leaves, spec = tree_flatten((call.args, call.kwargs))
    hidden = call.hidden_BTD
    return hidden if hidden.requires_grad else hidden.detach().requires_grad_(True), spec, leaves


class _RecomputedLayer(torch.autograd.Function):
    """A layer as one autograd function that keeps only its input."""

    @staticmethod
    def forward(ctx: Any, gradient_pass: GradientPass, layer: Layer, spec: Any, hidden: Tensor, *leaves: Any) -> Any:
        ctx.gradient_pass, ctx.layer, ctx.spec = gradient_pass, layer, spec
        # Of a layer's other arguments only the hidden states of another stack (the encoder's) need a gradient.
        ctx.leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
        ctx.hidden = gradient_pass.stored_input(hidden.detach())
        call = replace(layer.call, hidden_BTD=hidden.detach().clone())
        phases = [(0, len(hidden), gradient_pass.forward_context(call))]
        out = run_phases(call, phases, gradient_pass.runner, layer.streams.rows_at_once)
        ctx.mark_non_differentiable(*(t for t in _as_tuple(out)[1:] if isinstance(t, Tensor)))
        return out if isinstance(out, Tensor) else tuple(out)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor, *_: Any) -> Any:
        gradient_pass, call, runner = ctx.gradient_pass, ctx.layer.call, ctx.gradient_pass.runner
        backward = gradient_pass.backward_context(call)
        gradients: list[Tensor | None] = [None] * len(ctx.leaves)
        out_BTD = torch.zeros_like(grad_BTD)  # the hidden states may lie in a file
        runner.meta_model.load_module(call.path, call.device)
        with backward:
            step = ctx.layer.streams.step(ctx.hidden.shape[1])
            for round_ in runner.rounds(0, len(ctx.hidden)):
                for first, last in round_.chunks(step):
                    _backward_rows(ctx, backward, range(first, last), grad_BTD, out_BTD, gradients)
                backward.end_round(round_)
        backward.finish()
        runner.meta_model.unload_module(call.path)
        gradient_pass.end_layer()
        return (None, None, None, out_BTD, *gradients)


def _backward_rows(
    ctx: Any, backward: LayerBackward, rows: range, grad_BTD: Tensor, out_BTD: Tensor, gradients: list[Tensor | None]
) -> None:
    """Run rows of a layer forward and backward. out_BTD, gradients: of the hidden states and of the other arguments,
    completed here.
    """
    backward.begin_rows(rows.start, rows.stop)
    args, kwargs = tree_unflatten(ctx.leaves, ctx.spec)
    call = replace(ctx.layer.call, hidden_BTD=ctx.hidden, args=args, kwargs=kwargs)
    grad_rows_BTD = grad_BTD[rows.start : rows.stop]
    with torch.enable_grad():
        hidden, args, kwargs = call.rows(rows.start, rows.stop)
        hidden = hidden.float().requires_grad_(True)
        out = _as_tuple(call.run(hidden, args, kwargs))[0]
        arguments = [i for i, leaf in enumerate(ctx.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        sources = [hidden, *(ctx.leaves[i] for i in arguments), *backward.leaves]
        results = torch.autograd.grad(out, sources, grad_rows_BTD.to(out.device), allow_unused=True)
    out_BTD[rows.start : rows.stop] = results[0].to(out_BTD.device)
    for i, gradient in zip(arguments, results[1:]):
        if gradient is not None:
            before = gradients[i]
            gradients[i] = gradient if before is None else before + gradient
    backward.add(grad_rows_BTD, list(results[1 + len(arguments) :]))


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)
