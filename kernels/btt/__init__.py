"""BTT and Monarch linears on a GPU: kernels that replace `btt_linear`, forward and backward.

    z[n,b,c,s] = sum_d x[n,c,d] right[c,d,b,s]        y[n,b,a] = sum_cs z[n,b,c,s] left[b,c,s,a] + bias

dx is the same map with the cores exchanged. The gradients of the cores are products of z, recomputed, with dy, and of x with dz:

    dz[n,b,c,s] = sum_a dy[n,b,a] left[b,c,s,a]       dx[n,c,d]      = sum_bs dz[n,b,c,s] right[c,d,b,s]
    dleft[b,c,s,a] = sum_n z[n,b,c,s] dy[n,b,a]       dright[c,d,b,s] = sum_n dz[n,b,c,s] x[n,c,d]

n: tokens; c, b: column and row blocks; d, a: their sizes; s: rank. Source: Qiu et al. 2024, Compute Better Spent (BTT).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.core.dispatch import register_kernel
from surgery.kernels.btt import plan
from surgery.kernels.btt.decode import TOKENS_PER_PROGRAM, decode_btt
from surgery.kernels.btt.to_dense import MAX_BLOCK, DenseFunction, from_dense
from surgery.kernels.tuning import (
    IMPLEMENTATIONS,
    CallReader,
    Implementation,
    TuningQuery,
    is_fastest,
    named_sizes,
    three_tensor_key,
    training_pass,
)
from surgery.structures.btt import btt_linear

DTYPES = {torch.float16, torch.bfloat16, torch.float32}

# Rules for sizes that were not measured, from one H200, bfloat16, 2026-11-21, dimensions 1,024 to 11,008, ranks 1 to 16. A multiplication
# of the kernel takes KERNEL_SLOWDOWN times as long as one of a dense product; building the dense matrix takes as long as the dense
# product of DENSE_BUILD_ROWS rows. With large blocks the library's batched products are faster up to LARGE_BLOCK_ROWS rows, and blocks
# smaller than MIN_BLOCK cost as much as those of that size.
KERNEL_SLOWDOWN, DENSE_BUILD_ROWS, LARGE_BLOCK_ROWS, MIN_BLOCK = 5.6, 500, 4096, 32
TOO_LARGE_BLOCK = 512  # with larger blocks the reference is faster at any number of rows

MAX_HELD_ELEMENTS = 2**28  # of z in a backward pass; more tokens are processed in several launches
DENSE_ADVANTAGE = (
    4  # the cores' gradients come from the dense one if the cores hold more than 1/4 of the dense elements
)


def accepts(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> bool:
    """Return whether the kernels compute this call: tensors of one floating-point dtype, or autocast."""
    dtypes = {x.dtype, right_cdbs.dtype, left_bcsa.dtype, x.dtype if bias is None else bias.dtype}
    return x.numel() > 0 and dtypes <= DTYPES and (len(dtypes) == 1 or torch.is_autocast_enabled(x.device.type))


def tuning_query(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> TuningQuery:
    """Return the sizes of the call under which kernels/tuning.json lists its timings."""
    (c, d, b, s), in_ = right_cdbs.shape, x.shape[-1]
    at = named_sizes(tokens=x.numel() // in_, inputs=in_, outputs=out, rank=s, rows=b, columns=c)
    implementations: tuple[Implementation, ...] = (
        IMPLEMENTATIONS if max(d, left_bcsa.shape[3]) <= MAX_BLOCK else ("kernel", "reference")
    )
    return TuningQuery(training_pass(x, right_cdbs, left_bcsa), at, x, implementations)


CALL_READER = CallReader(tuning_query, three_tensor_key)


def is_faster_by_rule(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> bool:
    """Return whether the kernel is expected to be faster where nothing was measured: faster than the dense matrix, or than the
    reference where blocks are too large for building the dense matrix."""
    (c, d, b, s), a, in_ = right_cdbs.shape, left_bcsa.shape[3], x.shape[-1]
    rows, dense = x.numel() // in_, in_ * out
    if rows <= TOKENS_PER_PROGRAM:
        return True
    if max(a, d) > MAX_BLOCK:
        return rows >= LARGE_BLOCK_ROWS and min(a, d) >= MIN_BLOCK and max(a, d) <= TOO_LARGE_BLOCK
    return (
        rows * (KERNEL_SLOWDOWN * b * c * s * (max(a, MIN_BLOCK) + max(d, MIN_BLOCK)) - dense)
        < DENSE_BUILD_ROWS * dense
    )


@register_kernel(btt_linear, accepts=accepts, is_faster=is_fastest("btt", CALL_READER, otherwise=is_faster_by_rule))
def btt_linear_triton(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Return y (.., out); arguments as in `btt_linear`."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, right_cdbs, left_bcsa = x.to(dtype), right_cdbs.to(dtype), left_bcsa.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    x_NI = limit_strides(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
    inputs = x_NI, right_cdbs.contiguous(), left_bcsa.contiguous(), bias
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        y_NO = BTTFunction.apply(*inputs, out)
    else:
        y_NO = btt_product(*inputs, out)
    return y_NO if x.dim() == 2 else y_NO.view(*x.shape[:-1], out)


def limit_strides(x_NI: Tensor) -> Tensor:
    """Return x, copied if a tile of it spans 2^31 elements or more: the last tokens of long sequences, whose rows lie a sequence
    apart, or a transposed matrix."""
    step_N, step_I = x_NI.stride()
    return x_NI if plan.MAX_TILE_TOKENS * step_N + x_NI.shape[1] * step_I < 2**31 else x_NI.contiguous()


def accepts_dense(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> bool:
    """Return whether the dense matrix can be built for this call."""
    return accepts(x, right_cdbs, left_bcsa, bias, out) and max(right_cdbs.shape[1], left_bcsa.shape[3]) <= MAX_BLOCK


@register_kernel(
    btt_linear,
    accepts=accepts_dense,
    is_faster=is_fastest("btt", CALL_READER, "dense", lambda *args: not is_faster_by_rule(*args)),
    implementation="dense",
)
def btt_linear_dense(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Return y (.., out) by building the dense matrix and one dense product: for many tokens and high ranks."""
    w_OI = DenseFunction.apply(right_cdbs.contiguous(), left_bcsa.contiguous(), out, x.shape[-1])
    return F.linear(x, w_OI, bias)  # casts to the dtype of autocast


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
    """y_NO of x_NI, right, left, bias and out, with gradients."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, right: Tensor, left: Tensor, bias: Tensor | None, out: int) -> Tensor:
        """Return y_NO."""
        ctx.save_for_backward(x_NI, right, left)
        return btt_product(x_NI, right, left, bias, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that are needed."""
        x_NI, right, left = ctx.saved_tensors
        dy_NO = limit_strides(dy_NO)
        need_x, need_right, need_left, need_bias, _ = ctx.needs_input_grad
        dx = torch.empty_like(x_NI) if need_x else None
        dbias = dy_NO.sum(0) if need_bias else None
        if not (need_right or need_left):
            dright = dleft = None
        elif uses_dense_gradient(x_NI, right, left, dy_NO):
            dright, dleft = from_dense(dy_NO.mT @ x_NI, right, left)
        else:
            return *core_gradients(x_NI, right, left, dy_NO, dx), dbias, None
        if dx is not None:
            input_gradient(dy_NO, right, left, dx)
        return dx, dright, dleft, dbias, None


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
    """Return (dx, dright, dleft) from z and dz, computed for so many tokens at a time that z has at most MAX_HELD_ELEMENTS."""
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
