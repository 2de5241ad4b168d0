"""BTT and Monarch linears on a GPU: kernels that replace `btt_linear`, forward and backward.

    z[n,b,c,s] = sum_d x[n,c,d] right[c,d,b,s]        y[n,b,a] = sum_cs z[n,b,c,s] left[b,c,s,a] + bias

dx is the same map with the cores exchanged. The gradients of the cores are products of z, recomputed, with dy, and of x
with dz:

    dz[n,b,c,s] = sum_a dy[n,b,a] left[b,c,s,a]       dx[n,c,d]      = sum_bs dz[n,b,c,s] right[c,d,b,s]
    dleft[b,c,s,a] = sum_n z[n,b,c,s] dy[n,b,a]       dright[c,d,b,s] = sum_n dz[n,b,c,s] x[n,c,d]

n: tokens; c, b: column and row blocks; d, a: their sizes; s: rank. Source: Qiu et al. 2024, Compute Better Spent (BTT).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.core.dispatch import DispatchedOp, register_kernel
from surgery.kernels.btt import plan
from surgery.kernels.btt.choice import is_chosen
from surgery.kernels.btt.decode import TOKENS_PER_PROGRAM, bind_decode, decode_btt
from surgery.kernels.btt.to_dense import MAX_BLOCK, DenseFunction, from_dense, to_dense
from surgery.kernels.custom_op import CustomOp
from surgery.structures.btt import btt_linear
from surgery.structures.btt_products import (
    backward_products,
    btt_products,
    cast_to_autocast,
    needs_gradients,
    supports_products,
)

DTYPES = {torch.float16, torch.bfloat16, torch.float32}

MAX_HELD_ELEMENTS = 2**28  # of z in a backward pass; more tokens are processed in several launches
DENSE_ADVANTAGE = (
    4  # the cores' gradients come from the dense one if the cores hold more than 1/4 of the dense elements
)


def accepts(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> bool:
    """Return whether the kernels compute this call: tensors of one floating-point dtype, or autocast."""
    dtype = x.dtype
    if dtype is right_cdbs.dtype is left_bcsa.dtype and (bias is None or bias.dtype is dtype):
        return dtype in DTYPES and x.numel() > 0
    dtypes = {dtype, right_cdbs.dtype, left_bcsa.dtype, dtype if bias is None else bias.dtype}
    return x.numel() > 0 and dtypes <= DTYPES and torch.is_autocast_enabled(x.device.type)


def bind_kernel(
    x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int
) -> Callable[..., Tensor] | None:
    """Return the function that runs all calls of a few tokens with the key of this one; None for other calls, and where
    x is copied.
    """
    x_NI = x.reshape(-1, x.shape[-1])
    if x_NI.shape[0] > TOKENS_PER_PROGRAM or x_NI.data_ptr() != x.data_ptr() or limit_strides(x_NI) is not x_NI:
        return None
    product = bind_decode(x, right_cdbs, left_bcsa, bias, out)
    if not needs_gradients(x, right_cdbs, left_bcsa, bias):
        return product

    def run(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Tensor:
        y: Tensor = BTTFunction.apply(x, right_cdbs, left_bcsa, bias, out, product)
        return y

    return run


@register_kernel(btt_linear, accepts=accepts, is_faster=is_chosen("kernel"), bind=bind_kernel)
def btt_linear_triton(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Return y (.., out); arguments as in `btt_linear`."""
    if torch.is_autocast_enabled(x.device.type):
        x, right_cdbs, left_bcsa, bias = cast_to_autocast(x, right_cdbs, left_bcsa, bias)
    x_NI = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if torch.compiler.is_compiling():
        y_NO, _ = BTT_OP(x_NI, right_cdbs, left_bcsa, bias, out)
        return y_NO if x.dim() == 2 else y_NO.view(*x.shape[:-1], out)
    x_NI = limit_strides(x_NI)
    right, left = right_cdbs.contiguous(), left_bcsa.contiguous()
    run: Any = BTTFunction.apply if needs_gradients(x, right_cdbs, left_bcsa, bias) else btt_product
    y_NO = run(x_NI, right, left, bias, out)
    return y_NO if x.dim() == 2 else y_NO.view(*x.shape[:-1], out)


def limit_strides(x_NI: Tensor) -> Tensor:
    """Return x, copied if a tile of it spans 2^31 elements or more: the last tokens of long sequences, whose rows lie a
    sequence apart, or a transposed matrix."""
    step_N, step_I = x_NI.stride()
    return x_NI if plan.MAX_TILE_TOKENS * step_N + x_NI.shape[1] * step_I < 2**31 else x_NI.contiguous()


def accepts_dense(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> bool:
    """Return whether the dense matrix can be built for this call."""
    return accepts(x, right_cdbs, left_bcsa, bias, out) and max(right_cdbs.shape[1], left_bcsa.shape[3]) <= MAX_BLOCK


@register_kernel(
    btt_linear,
    accepts=accepts_dense,
    is_faster=is_chosen("dense"),
    implementation="dense",
)
def btt_linear_dense(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Return y (.., out) by building the dense matrix and one dense product: for many tokens and high ranks."""
    w_OI = DenseFunction.apply(right_cdbs.contiguous(), left_bcsa.contiguous(), out, x.shape[-1])
    return F.linear(x, w_OI, bias)  # casts to the dtype of autocast


def accepts_products(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> bool:
    """Return whether two batched products compute this call."""
    return x.numel() > 0 and supports_products(x, right_cdbs, left_bcsa)


@register_kernel(btt_linear, accepts=accepts_products, is_faster=is_chosen("products"), implementation="products")
def btt_linear_products(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Return y (.., out) by two batched products of the library: for blocks and ranks that fill its tiles."""
    return btt_products(x, right_cdbs, left_bcsa, bias, out)


def btt_product(x_NI: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Return y_NO without a graph for gradients."""
    y_NO = x_NI.new_empty(x_NI.shape[0], out)
    if x_NI.shape[0] <= TOKENS_PER_PROGRAM:
        decode_btt(x_NI, right_cdbs, left_bcsa, bias, y_NO)
        return y_NO
    sides = plan.core_sides(right_cdbs.shape, left_bcsa.shape)
    plan.launch_ring(x_NI, right_cdbs, left_bcsa, bias, y_NO, sides)
    return y_NO


class BTTFunction(torch.autograd.Function):
    """y (.., out) of x (.., in), right, left, bias, out and a function of these that computes it, with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        right: Tensor,
        left: Tensor,
        bias: Tensor | None,
        out: int,
        product: Callable[..., Tensor] = btt_product,
    ) -> Tensor:
        """Return y (.., out). `btt_product` takes x as (N, in)."""
        ctx.save_for_backward(x, right, left)
        return product(x, right, left, bias, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that are needed."""
        x, right, left = ctx.saved_tensors
        x_NI, dy_NO = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        need_x, need_right, need_left, need_bias = ctx.needs_input_grad[:4]
        dbias = dy_NO.sum(0) if need_bias else None
        dx_NI, dright, dleft = kernel_gradients(x_NI, right, left, dy_NO, x=need_x, cores=need_right or need_left)
        return None if dx_NI is None else dx_NI.view(x.shape), dright, dleft, dbias, None, None


def kernel_gradients(
    x_NI: Tensor, right: Tensor, left: Tensor, dy_NO: Tensor, *, x: bool, cores: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, right and left by the kernels; None for x or for the cores where they are not
    wanted.
    """
    dy_NO = limit_strides(dy_NO)
    dx = torch.empty_like(x_NI) if x else None
    if not cores:
        dright = dleft = None
    elif uses_dense_gradient(x_NI, right, left, dy_NO):
        dright, dleft = from_dense(dy_NO.mT @ x_NI, right, left)
    else:
        return core_gradients(x_NI, right, left, dy_NO, dx)
    if dx is not None:
        input_gradient(dy_NO, right, left, dx)
    return dx, dright, dleft


def uses_dense_gradient(x_NI: Tensor, right: Tensor, left: Tensor, dy_NO: Tensor) -> bool:
    """Return whether the gradients of the cores are computed from that of the dense matrix, which costs less then."""
    dense = x_NI.shape[1] * dy_NO.shape[1]
    return max(right.shape[1], left.shape[3]) <= MAX_BLOCK and DENSE_ADVANTAGE * (right.numel() + left.numel()) > dense


def input_gradient(dy_NO: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, dx_NI: Tensor) -> None:
    """Write dx_NI, the transposed map of dy_NO."""
    sides = plan.core_sides(right_cdbs.shape, left_bcsa.shape).transposed()
    plan.launch_ring(dy_NO, left_bcsa, right_cdbs, None, dx_NI, sides)


def core_gradients(
    x_NI: Tensor, right: Tensor, left: Tensor, dy_NO: Tensor, dx_NI: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return (dx, dright, dleft) from z and dz, computed for so many tokens at a time that z has at most
    MAX_HELD_ELEMENTS.
    """
    (c, _, b, s), N = right.shape, x_NI.shape[0]
    size = max(64, MAX_HELD_ELEMENTS // (b * c * s) // 64 * 64)
    if size >= N:
        dright, dleft = plan.launch_gradients(x_NI, right, left, dy_NO, dx_NI, exact=False)
        return dx_NI, dright.to(right.dtype), dleft.to(left.dtype)
    dright, dleft = (torch.zeros_like(core, dtype=torch.float32) for core in (right, left))
    for n in range(0, N, size):
        dx = None if dx_NI is None else dx_NI[n : n + size]
        parts = plan.launch_gradients(x_NI[n : n + size], right, left, dy_NO[n : n + size], dx, exact=True)
        dright += parts[0]
        dleft += parts[1]
    return dx_NI, dright.to(right.dtype), dleft.to(left.dtype)


# -- torch.compile -----------------------------------------------------------------------------------------------------
def _op_forward(x_NI: Tensor, right: Tensor, left: Tensor, bias: Tensor | None, out: int) -> tuple[Tensor, Tensor]:
    """Return y_NO and an empty tensor."""
    with torch.no_grad():
        y_NO = btt_linear(x_NI, right, left, bias, out)
    return y_NO.contiguous(), x_NI.new_empty(0)


def _op_fake(x_NI: Tensor, right: Tensor, left: Tensor, bias: Tensor | None, out: int) -> tuple[Tensor, Tensor]:
    return x_NI.new_empty(x_NI.shape[0], out), x_NI.new_empty(0)


def _op_backward(dy_NO: Tensor, _: Tensor, *operands: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, right, left and the bias, by the implementation that a call with gradients runs.

    operands: the inputs.
    """
    x_NI, right, left, bias, out = operands
    inputs = [t.detach().requires_grad_() for t in (x_NI, right.contiguous(), left.contiguous())]
    with torch.enable_grad():
        selected = cast(DispatchedOp, btt_linear).select_kernel(*inputs, bias, out)
    implementation = "reference" if selected is None else selected.implementation
    dbias = None if bias is None else dy_NO.sum(0)
    x_NI, right, left = (t.detach() for t in inputs)
    if implementation == "kernel":
        return *kernel_gradients(limit_strides(x_NI), right, left, dy_NO, x=True, cores=True), dbias
    if implementation == "dense":
        dcores = from_dense(dy_NO.mT @ x_NI, right, left)
        return dy_NO @ to_dense(right, left, out, x_NI.shape[1]), *dcores, dbias
    return *backward_products(x_NI, right, left, dy_NO, z=None, need=(True, True, True)), dbias


BTT_OP = CustomOp(
    "btt", "Tensor x, Tensor right, Tensor left, Tensor? bias, int out", _op_forward, _op_backward, _op_fake
)
