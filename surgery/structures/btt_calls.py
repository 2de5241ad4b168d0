"""Calls of BTT's product with little Python: what decides how a call is computed, and the two products of one row.

At one token a call takes as long as the CPU needs to start it, so `btt_linear` decides once for all calls of one key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from surgery.structures.btt_products import needs_gradients, product_gradients

PLAIN = (Tensor, nn.Parameter)


def call_key(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Hashable | None:
    """Return what decides how `btt_linear` computes a call; None where a decision is not kept.

    Not kept are calls that are traced, transformed or cast by autocast, of subclasses of tensors, of several dtypes, of cores with gaps,
    and on other devices than CPUs and NVIDIA GPUs.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    dtype, on_gpu = x.dtype, x.is_cuda
    if not (
        type(x) in PLAIN
        and type(right_cdbs) in PLAIN
        and type(left_bcsa) in PLAIN
        and dtype is right_cdbs.dtype is left_bcsa.dtype
        and right_cdbs.is_contiguous()
        and left_bcsa.is_contiguous()
        and (bias is None or (type(bias) in PLAIN and bias.dtype is dtype))
        and (on_gpu or x.is_cpu)
        and not torch.is_autocast_enabled("cuda" if on_gpu else "cpu")
    ):
        return None
    return (
        x.shape,
        x.stride(),
        right_cdbs.shape,
        left_bcsa.shape,
        out,
        bias is None,
        dtype,
        x.get_device(),
        needs_gradients(x, right_cdbs, left_bcsa, bias),
        on_gpu and torch.cuda.is_current_stream_capturing(),
    )


def bind_row(
    x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int
) -> Callable[..., Tensor] | None:
    """Return the function that computes all calls of one row with the key of this one; None if they need padding or a copy."""
    (c, d, b, s), a, in_ = right_cdbs.shape, left_bcsa.shape[3], x.shape[-1]
    if not (x.numel() == in_ == c * d and out == b * a and x.is_contiguous() and x.is_floating_point()):
        return None
    J, K = b * s, c * s
    x_size, x_stride = (c, 1, d), (d, c * d, 1)
    right_size, right_stride = (c, d, J), (d * J, J, 1)
    z_size, z_stride = (b, c, s), (s, J, 1)
    left_size, left_stride = (b, K, a), (K * a, a, 1)
    y_size, product = (*x.shape[:-1], out), torch.bmm

    def products(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor) -> tuple[Tensor, Tensor]:
        z_c1J = product(x.as_strided(x_size, x_stride), right_cdbs.as_strided(right_size, right_stride))
        z_b1K = z_c1J.as_strided(z_size, z_stride).reshape(b, 1, K)
        return product(z_b1K, left_bcsa.as_strided(left_size, left_stride)).view(y_size), z_b1K

    def run(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, _: int) -> Tensor:
        y, _ = products(x, right_cdbs, left_bcsa)
        return y if bias is None else y.add_(bias)

    def run_with_gradients(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, _: int) -> Tensor:
        y: Tensor = RowFunction.apply(x, right_cdbs, left_bcsa, bias, products)  # type: ignore[no-untyped-call]
        return y

    return run_with_gradients if needs_gradients(x, right_cdbs, left_bcsa, bias) else run


class RowFunction(torch.autograd.Function):
    """y (.., out) of one row x (.., in), right, left, bias, and a function of the first three that returns y and z, with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        right: Tensor,
        left: Tensor,
        bias: Tensor | None,
        products: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return y."""
        y, z_b1K = products(x, right, left)
        ctx.save_for_backward(x, right, left, z_b1K)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that are needed. Under create_graph they are differentiable themselves."""
        x, right, left, z_b1K = ctx.saved_tensors
        dx, *rest = product_gradients(x.view(1, -1), right, left, dy.reshape(1, -1), z=z_b1K, need=ctx.needs_input_grad)
        return None if dx is None else dx.view(x.shape), *rest, None
