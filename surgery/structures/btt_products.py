"""BTT's map as two batched matrix products that read and write their operands in place.

    z[n,b,c,s] = sum_d x[n,c,d] right[c,d,b,s]        one product for each column block c: (N, d) times (d, b s)
    y[n,b,a] = sum_cs z[n,b,c,s] left[b,c,s,a]        one product for each row block b: (N, c s) times (c s, a)

x, y, dx and dy are read and written as views: column block c of x is a matrix (N, d) whose rows lie c d elements apart, which
BLAS and cuBLAS take as a leading dimension. Only z has two orders: the first product has (b, s) in its columns, the second one
(c, s) in its rows. There are two layouts of z:

    tokens last, (b, s, c, N)     rows (b, s) of a column block and rows (s, c) of a row block both have one stride, so both
                                  products use z in place; left is copied into the order (b, s, c, a)
    tokens first, (b, N, c, s)    z is copied between the products, and the cores are used in place

A copy of z moves N b c s elements and a copy of left a b c s elements, so tokens last is for many tokens. The backward pass consists of
four products on the same views. Source: Qiu et al. 2024, Compute Better Spent, section 2, eq. 2 (BTT).

n, N: tokens; b, c: row and column blocks; a, d: their sizes; s: rank; J = (b, s); K = (s, c) with tokens last, else (c, s).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

# z has its tokens last if there are more than this many tokens per row of a block. On a GPU the number of copied elements decides. On a
# CPU, where products of transposed matrices are slower, it saved time for blocks of up to 64 rows (one thread of an AMD EPYC, float32 and
# bfloat16, dimensions 384 to 2,048).
TOKENS_LAST_CPU, TOKENS_LAST_GPU, LARGEST_BLOCK_CPU = 3, 1, 64


def supports_products(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor) -> bool:
    """Return whether `btt_products` computes this call.

    The tensors are plain ones of one floating-point dtype, or autocast casts them. No function transform or forward-mode
    differentiation is active, and no graph is being traced.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    for tensor in (x, right_cdbs, left_bcsa):
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return False
    if x.dtype == right_cdbs.dtype == left_bcsa.dtype:
        return x.is_floating_point()
    return torch.is_autocast_enabled(x.device.type)


def cast_to_autocast(
    x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the operands in the dtype of autocast on the device of x."""
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), right_cdbs.to(dtype), left_bcsa.to(dtype), None if bias is None else bias.to(dtype)


def needs_gradients(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None) -> bool:
    """Return whether autograd records a call."""
    return torch.is_grad_enabled() and (
        x.requires_grad
        or right_cdbs.requires_grad
        or left_bcsa.requires_grad
        or (bias is not None and bias.requires_grad)
    )


def btt_products(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Return B x + bias (..., out) for x (..., in); arguments as in `surgery.structures.btt.btt_linear`."""
    if torch.is_autocast_enabled(x.device.type):
        x, right_cdbs, left_bcsa, bias = cast_to_autocast(x, right_cdbs, left_bcsa, bias)
    x_NI = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y_NO: Tensor
    if needs_gradients(x, right_cdbs, left_bcsa, bias):
        y_NO = ProductsFunction.apply(x_NI, right_cdbs, left_bcsa, bias, out)  # type: ignore[no-untyped-call]
    else:
        y_NO, _ = forward_products(x_NI, right_cdbs, left_bcsa, bias, out)
    return y_NO if x.dim() == 2 else y_NO.view(*x.shape[:-1], out)


def puts_tokens_last(tokens: int, a: int, on_gpu: bool) -> bool:
    """Return whether z gets the layout with tokens last, for row blocks of `a` rows."""
    if on_gpu:
        return tokens > a * TOKENS_LAST_GPU
    return tokens > a * TOKENS_LAST_CPU and a <= LARGEST_BLOCK_CPU


def forward_products(
    x_NI: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int
) -> tuple[Tensor, Tensor]:
    """Return y (N, out) and z in its layout, without a graph for gradients."""
    (c, d, _, _), (b, _, _, a), N = right_cdbs.shape, left_bcsa.shape, x_NI.shape[0]
    tokens_last = puts_tokens_last(N, a, x_NI.is_cuda)
    z = first_product(split_columns(x_NI, c, d), right_cdbs, tokens_last)
    z_bNK, left_bKa = rows_of_z(z, tokens_last), rows_of_left(left_bcsa, tokens_last)
    if N == 1:
        y_NO = torch.bmm(z_bNK, left_bKa).view(1, b * a)
    else:
        y_NO = x_NI.new_empty(N, b * a)
        torch.bmm(z_bNK, left_bKa, out=y_NO.view(N, b, a).transpose(0, 1))
    if b * a != out:
        y_NO = y_NO[:, :out]
    if bias is not None:
        y_NO.add_(bias)
    return y_NO, z


def split_columns(x_NI: Tensor, count: int, size: int) -> Tensor:
    """Return x (N, count, size), padded with zeros if count * size exceeds its width; a view otherwise."""
    if x_NI.shape[1] != count * size:
        x_NI = F.pad(x_NI, (0, count * size - x_NI.shape[1]))
    return x_NI.view(x_NI.shape[0], count, size)


def first_product(x_Ncd: Tensor, right_cdbs: Tensor, tokens_last: bool) -> Tensor:
    """Return z, (b, s, c, N) with tokens last, else (b, N, c, s)."""
    (c, d, b, s), N = right_cdbs.shape, x_Ncd.shape[0]
    right_cdJ = right_cdbs.reshape(c, d, b * s)
    if not tokens_last:
        return torch.bmm(x_Ncd.transpose(0, 1), right_cdJ).view(c, N, b, s).permute(2, 1, 0, 3).contiguous()
    z_bscN = x_Ncd.new_empty(b, s, c, N)
    torch.bmm(right_cdJ.mT, x_Ncd.permute(1, 2, 0), out=z_bscN.view(b * s, c, N).transpose(0, 1))
    return z_bscN


def rows_of_z(z: Tensor, tokens_last: bool) -> Tensor:
    """Return z as one matrix for each row block, a view (b, N, K)."""
    return z.flatten(1, 2).mT if tokens_last else z.flatten(2)


def columns_of_z(z: Tensor, tokens_last: bool) -> Tensor:
    """Return z as one matrix for each column block, (c, N, J): a view with tokens last, else a copy."""
    if tokens_last:
        return z.flatten(0, 1).permute(1, 2, 0)
    return z.permute(2, 1, 0, 3).flatten(2)


def rows_of_left(left_bcsa: Tensor, tokens_last: bool) -> Tensor:
    """Return left as one matrix for each row block, (b, K, a): a copy with tokens last, else a view."""
    return (left_bcsa.transpose(1, 2) if tokens_last else left_bcsa).flatten(1, 2)


class ProductsFunction(torch.autograd.Function):
    """y (N, out) of x (N, in), right, left, bias and out, with gradients.

    z is kept for the backward pass if it has no more elements than x and y together, and computed again otherwise.
    """

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, right: Tensor, left: Tensor, bias: Tensor | None, out: int) -> Tensor:
        """Return y_NO."""
        y_NO, z = forward_products(x_NI, right, left, bias, out)
        keeps_z = ctx.needs_input_grad[2] and z.numel() <= x_NI.numel() + y_NO.numel()
        ctx.save_for_backward(x_NI, right, left, z if keeps_z else None)
        return y_NO

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that are needed. Under create_graph they are differentiable themselves."""
        x_NI, right, left, z = ctx.saved_tensors
        return *product_gradients(x_NI, right, left, dy_NO, z=z, need=ctx.needs_input_grad), None


def product_gradients(
    x_NI: Tensor, right: Tensor, left: Tensor, dy_NO: Tensor, *, z: Tensor | None, need: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, right, left and the bias, None for those not in `need`, differentiable in grad mode. z: as in
    `backward_products`."""
    dbias = dy_NO.sum(0) if need[3] else None
    compute = differentiable_gradients if torch.is_grad_enabled() else backward_products
    return *compute(x_NI, right, left, dy_NO, z=z, need=need), dbias


def backward_products(
    x_NI: Tensor,
    right_cdbs: Tensor,
    left_bcsa: Tensor,
    dy_NO: Tensor,
    *,
    z: Tensor | None,
    need: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, right and left, None for those not in `need`. z: that of the forward pass, or None."""
    (c, d, b, s), a, (N, in_) = right_cdbs.shape, left_bcsa.shape[3], x_NI.shape
    tokens_last = puts_tokens_last(N, a, x_NI.is_cuda)
    x_Ncd, dy_Nba = split_columns(x_NI, c, d), split_columns(dy_NO, b, a)
    dx_NI, dright, dleft = None, None, None
    if need[2]:
        z = first_product(x_Ncd, right_cdbs, tokens_last) if z is None else z
        dleft_bKa = torch.bmm(rows_of_z(z, tokens_last).mT, dy_Nba.transpose(0, 1))
        dleft = dleft_bKa.view(b, s, c, a).transpose(1, 2) if tokens_last else dleft_bKa.view(b, c, s, a)
    if not (need[0] or need[1]):
        return None, None, dleft
    left_bKa = rows_of_left(left_bcsa, tokens_last)
    if tokens_last:
        dz = torch.bmm(left_bKa, dy_Nba.permute(1, 2, 0)).view(b, s, c, N)
    else:
        dz = torch.bmm(dy_Nba.transpose(0, 1), left_bKa.mT).view(b, N, c, s)
    dz_cNJ = columns_of_z(dz, tokens_last)
    if need[0]:
        dx_NI = x_NI.new_empty(N, c * d)
        right_cJd = right_cdbs.reshape(c, d, b * s).mT
        torch.bmm(dz_cNJ, right_cJd, out=dx_NI.view(N, c, d).transpose(0, 1))
        dx_NI = dx_NI if c * d == in_ else dx_NI[:, :in_]
    if need[1]:
        dright = torch.bmm(x_Ncd.permute(1, 2, 0), dz_cNJ).view(c, d, b, s)
    return dx_NI, dright, dleft


def differentiable_gradients(
    x_NI: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, dy_NO: Tensor, **_: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, right and left as functions that autograd can differentiate again."""
    (c, d, b), a = right_cdbs.shape[:3], left_bcsa.shape[3]
    x_Ncd, dy_Nba = split_columns(x_NI, c, d), split_columns(dy_NO, b, a)
    dz_Nbcs = torch.einsum("nba,bcsa->nbcs", dy_Nba, left_bcsa)
    z_Nbcs = torch.einsum("ncd,cdbs->nbcs", x_Ncd, right_cdbs)
    dx_NI = torch.einsum("nbcs,cdbs->ncd", dz_Nbcs, right_cdbs).flatten(1)[:, : x_NI.shape[1]]
    dright = torch.einsum("ncd,nbcs->cdbs", x_Ncd, dz_Nbcs)
    return dx_NI, dright, torch.einsum("nbcs,nba->bcsa", z_Nbcs, dy_Nba)
