"""Low-rank linears for a few tokens on a GPU: two launches of `matvec_kernel`, y = left (right x) + bias.

Without gradients.

PyTorch's product of one row with a wide matrix of few rows, as `right` is, takes two to three times as long as reading
it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.custom_op import CustomOp
from surgery.kernels.launch import CachedLaunch
from surgery.kernels.matvec.kernel import supports_early_launch
from surgery.kernels.matvec.plan import MatvecSizes, matvec_launch
from surgery.kernels.tuning import CallReader, TuningQuery, is_fastest, named_sizes, three_tensor_key, training_pass
from surgery.structures.base import is_exporting
from surgery.structures.btt_products import PLAIN, needs_gradients
from surgery.structures.low_rank import FEW_TOKENS, low_rank_linear

DTYPES = {torch.float16, torch.bfloat16, torch.float32}
MAX_ELEMENTS = 2**31  # of a factor, and between the first and the last of x: the kernel counts them in 32 bits


def accepts(x: Tensor, right_RI: Tensor, left_1OR: Tensor, bias: Tensor | None) -> bool:
    """Return whether the kernel computes this call: a few tokens, plain contiguous factors of one dtype, no
    gradients.
    """
    tensors = [x, right_RI, left_1OR] if bias is None else [x, right_RI, left_1OR, bias]
    if (
        not (x.is_cuda or x.is_cpu)
        or torch.is_autocast_enabled(x.device.type)
        or any(t.dtype is not x.dtype for t in tensors)
    ):
        return False
    if x.dtype not in DTYPES or not 0 < x.numel() <= FEW_TOKENS * x.shape[-1]:
        return False
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    if needs_gradients(x, right_RI, left_1OR, bias) or max(right_RI.numel(), left_1OR.numel(), extent) >= MAX_ELEMENTS:
        return False
    if torch.compiler.is_compiling():
        return not is_exporting()
    return (
        all(type(t) in PLAIN and t.device == x.device for t in tensors)
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
        and right_RI.is_contiguous()
        and left_1OR.is_contiguous()
    )


class _Shape(NamedTuple):
    """What a plan depends on. strides: of both axes of x."""

    tokens: int
    inputs: int
    rank: int
    outputs: int
    strides: tuple[int, int]
    bias: bool
    early: bool


@lru_cache(maxsize=4096)
def _plan(shape: _Shape) -> tuple[CachedLaunch, CachedLaunch]:
    N, I, R, O, (x_n, x_i), bias, early = shape  # noqa: E741
    near = MatvecSizes(N, I, I, R, R, R, x_n, x_i, 0, 1, I, R, 0, 0)
    far = MatvecSizes(N, R, R, O, O, O, R, 1, 0, 1, R, O, 0, 0)
    return matvec_launch(near, 1, first=early), matvec_launch(far, 1, bias=bias, second=early)


def _plan_of(
    x_NI: Tensor, right_RI: Tensor, left_1OR: Tensor, bias: Tensor | None
) -> tuple[CachedLaunch, CachedLaunch]:
    (N, I), (_, O, R) = x_NI.shape, left_1OR.shape  # noqa: E741
    strides = x_NI.stride(0), x_NI.stride(1)
    return _plan(_Shape(N, I, R, O, strides, bias is not None, supports_early_launch(x_NI.device)))


def bind_kernel(x: Tensor, right_RI: Tensor, left_1OR: Tensor, bias: Tensor | None) -> Callable[..., Tensor] | None:
    """Return the function that runs all calls with the key of this one; None where x is copied."""
    x_NI = x.reshape(-1, x.shape[-1])
    if x_NI.data_ptr() != x.data_ptr():
        return None
    plans, z_size = _plan_of(x_NI, right_RI, left_1OR, bias), (len(x_NI), len(right_RI))
    y_size = (*x.shape[:-1], left_1OR.shape[1])
    first = plans[0].bind(x, right_RI, x, x)
    second = plans[1].bind(x, left_1OR, x if bias is None else bias, x)

    def run(x: Tensor, right_RI: Tensor, left_1OR: Tensor, bias: Tensor | None) -> Tensor:
        z_NR, y = x.new_empty(z_size), x.new_empty(y_size)
        first(x, right_RI, z_NR, z_NR)
        second(z_NR, left_1OR, y if bias is None else bias, y)
        return y

    return run


def _query(x: Tensor, right_RI: Tensor, left_1OR: Tensor, bias: Tensor | None) -> TuningQuery:
    """Return the sizes of the call under which kernels/tuning.json lists its times."""
    (rank, in_), out = right_RI.shape, left_1OR.shape[1]
    sizes = named_sizes(tokens=x.numel() // in_, inputs=in_, outputs=out, rank=rank)
    return TuningQuery(training_pass(x, right_RI, left_1OR), sizes, x)


is_faster = is_fastest("low_rank", CallReader(_query, three_tensor_key))


@register_kernel(low_rank_linear, accepts=accepts, is_faster=is_faster, bind=bind_kernel)
def low_rank_linear_triton(x: Tensor, right_RI: Tensor, left_1OR: Tensor, bias: Tensor | None) -> Tensor:
    """Return y (.., O); arguments as in `low_rank_linear`."""
    if torch.compiler.is_compiling():
        return LOW_RANK_OP(x, right_RI, left_1OR, bias)[0]
    x_NI = x.reshape(-1, x.shape[-1])
    first, second = _plan_of(x_NI, right_RI, left_1OR, bias)
    z_NR, y_NO = x.new_empty(len(x_NI), len(right_RI)), x.new_empty(len(x_NI), left_1OR.shape[1])
    first(x_NI, right_RI, z_NR, z_NR)
    second(z_NR, left_1OR, y_NO if bias is None else bias, y_NO)
    return y_NO.view(*x.shape[:-1], left_1OR.shape[1])


# -- torch.compile -----------------------------------------------------------------------------------------------------
def _op_forward(x: Tensor, right: Tensor, left: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        y = low_rank_linear(x, right.contiguous(), left.contiguous(), bias)
    return y.contiguous(), x.new_empty(0)


def _op_fake(x: Tensor, right: Tensor, left: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(*x.shape[:-1], left.shape[1]), x.new_empty(0)


def _op_backward(dy: Tensor, _: Tensor, *operands: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, right, left and the bias. operands: the inputs."""
    x, right, left, bias = operands
    inputs = [t.detach().requires_grad_() for t in (x, right, left)]
    with torch.enable_grad():
        y = torch.nn.functional.linear(torch.nn.functional.linear(inputs[0], inputs[1]), inputs[2][0])
    return *torch.autograd.grad(y, inputs, dy), None if bias is None else dy.flatten(0, -2).sum(0)


LOW_RANK_OP = CustomOp(
    "low_rank", "Tensor x, Tensor right, Tensor left, Tensor? bias", _op_forward, _op_backward, _op_fake
)
