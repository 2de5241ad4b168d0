"""The run that only compiles kernels: what it holds in memory, and with which layouts its backward pass runs."""

from __future__ import annotations

import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

from surgery.core.parallel_compile import ALIGNMENT, _dropped_activations


class Scaled(torch.autograd.Function):
    """x * factor, which records what its backward pass reads."""

    read: ClassVar[list[tuple[torch.Tensor, ...]]] = []

    @staticmethod
    def forward(ctx, x, factor, index):
        ctx.save_for_backward(x, factor, index)
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        Scaled.read.append(ctx.saved_tensors)
        return grad, None, None


@pytest.mark.parametrize("start", [0, 1, 8], ids=["first", "second", "aligned"])
def test_the_backward_pass_reads_tensors_of_the_saved_layout(start):
    """Kernels are compiled for strides and for the alignment of addresses, so these must be those of a true run."""
    x = torch.zeros(2, 7, 12, dtype=torch.bfloat16).flatten()[start : start + 84].view(12, 7).mT.requires_grad_()
    factor, index = nn.Parameter(torch.ones(7, 1)), torch.arange(7)
    with _dropped_activations():
        out = Scaled.apply(x, factor, index)
    out.sum().backward()
    read, kept, positions = Scaled.read.pop()
    assert (read.shape, read.stride(), read.dtype) == (x.shape, x.stride(), x.dtype)
    assert read.data_ptr() % ALIGNMENT == x.data_ptr() % ALIGNMENT and read.data_ptr() != x.data_ptr()
    assert kept.data_ptr() == factor.data_ptr() and torch.equal(positions, index)  # an index must lie within its table


def test_no_activation_is_kept():
    """Inputs of a chain of layers are freed as soon as the next layer has run."""
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    seen: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watch(layer, inputs):
        seen.append(weakref.ref(inputs[0]))
        alive.append(sum(ref() is not None for ref in seen))

    for layer in layers:
        layer.register_forward_pre_hook(watch)
    with _dropped_activations():
        layers(torch.randn(3, 8)).sum().backward()
    assert max(alive) <= 2
    assert all(p.grad is not None and p.grad.shape == p.shape for p in layers.parameters())
