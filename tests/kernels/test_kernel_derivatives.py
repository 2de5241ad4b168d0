"""Gradients of gradients: kernels have none, and say so instead of leaving their part out."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch

pytest.importorskip("triton")

import surgery.kernels
from surgery.core.dispatch import load_kernels, use_kernels
from surgery.mixers.masks.semiseparable import semiseparable

pytestmark = pytest.mark.usefixtures("loops_of_tensors")


def kernel_functions():
    """Every autograd.Function of the kernels."""
    load_kernels()
    found = set()
    for info in pkgutil.walk_packages(surgery.kernels.__path__, "surgery.kernels."):
        members = inspect.getmembers(importlib.import_module(info.name), inspect.isclass)
        found |= {
            x
            for _, x in members
            if issubclass(x, torch.autograd.Function) and x.__module__.startswith("surgery.kernels")
        }
    return sorted(found, key=lambda function: function.__qualname__)


@pytest.mark.parametrize("function", kernel_functions(), ids=lambda function: function.__name__)
def test_every_backward_may_be_differentiated_once(function):
    assert function.backward.__code__ is torch.autograd.function.once_differentiable(lambda ctx: None).__code__


def test_a_second_derivative_is_refused():
    """A penalty on a gradient would otherwise have the gradient of its other terms alone."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 1, 5, 16, requires_grad=True), torch.randn(1, 1, 5, 16), torch.randn(1, 1, 5, 16)
    with use_kernels("kernel"):
        out, _ = semiseparable(q, k, v, None, -torch.rand(1, 1, 1, 5), None, first_BRGFV=None, chunk=32)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (dq.square().sum() + q.square().sum()).backward()
