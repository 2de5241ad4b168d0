"""BTT's map as two batched matrix products that read and write their operands in place.

    z[n,b,c,s] = sum_d x[n,c,d] right[c,d,b,s]        one product for each column block c: (N, d) times (d, b s)
    y[n,b,a] = sum_cs z[n,b,c,s] left[b,c,s,a]        one product for each row block b: (N, c s) times (c s, a)

x, y, dx and dy are read and written as views: column block c of x is a matrix (N, d) whose rows lie c d elements apart,
which BLAS and cuBLAS take as a leading dimension. Only z has two orders: the first product has (b, s) in its columns,
the second one (c, s) in its rows. There are two layouts of z:

    tokens last, (b, s, c, N)     rows (b, s) of a column block and rows (s, c) of a row block both have one stride, so both
                                  products use z in place; left is copied into the order (b, s, c, a)
    tokens first, (b, N, c, s)    z is copied between the products, and the cores are used in place

A copy of z moves N b c s elements and a copy of left a b c s elements, so tokens last is for many tokens. The backward
pass consists of four products on the same views. Source: Qiu et al. 2024, Compute Better Spent, section 2, eq. 2 (BTT).

n, N: tokens; b, c: row and column blocks; a, d: their sizes; s: rank; J = (b, s); K = (s, c) with tokens last, else (c,
s).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

# z has its tokens last if there are more than this many tokens per row of a block. On a GPU the number of copied
# elements decides. On a CPU, where products of transposed matrices are slower, it saved time for blocks of up to 64
# rows (one thread of an AMD EPYC, float32 and bfloat16, dimensions 384 to 2,048).
TOKENS_LAST_CPU, TOKENS_LAST_GPU, LARGEST_BLOCK_CPU = 3, 1, 64

PLAIN = (Tensor, nn.Parameter)  # types of tensors: subclasses compute in their own way


def supports_products(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor) -> bool:
    """Return whether `btt_products` computes this call.

    The tensors are plain ones of one floating-point dtype, or autocast casts them. No function transform or
    forward-mode differentiation is active, and no graph is being traced.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if type(x) not in PLAIN or type(right_cdbs) not in PLAIN or type(left_bcsa) not in PLAIN:
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


def btt_call_key(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Hashable | None:
    """Return what the selection of a kernel for `btt_linear` depends on; None for a call whose selection is not kept.

    Those are calls that `supports_products` refuses, under autocast, torch.jit.trace (whose sizes are tensors), torch.func
    or forward_ad, with operands of several dtypes or devices, with cores that are not contiguous, and on other devices than CPUs and GPUs.
    """
    dtype, device, on_gpu = x.dtype, x.get_device(), x.is_cuda
    if not (
        supports_products(x, right_cdbs, left_bcsa)
        and dtype is right_cdbs.dtype is left_bcsa.dtype
        and device == right_cdbs.get_device() == left_bcsa.get_device()
        and (bias is None or (type(bias) in PLAIN and bias.dtype is dtype and bias.get_device() == device))
        and right_cdbs.is_contiguous()
        and left_bcsa.is_contiguous()
        and (on_gpu or x.is_cpu)
        and not torch.is_autocast_enabled("cuda" if on_gpu else "cpu")
        and torch._C._get_tracing_state() is None
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
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
        device,
        needs_gradients(x, right_cdbs, left_bcsa, bias),
        on_gpu and torch.cuda.is_current_stream_capturing(),
    )


def btt_products(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int) -> Tensor:
    """Return B x + bias (..., out) for x (..., in); arguments as in `surgery.structures.btt.btt_linear`."""
    if torch.is_autocast_enabled("cpu" if x.is_cpu else x.device.type):
        x, right_cdbs, left_bcsa, bias = cast_to_autocast(x, right_cdbs, left_bcsa, bias)
    y: Tensor
    if needs_gradients(x, right_cdbs, left_bcsa, bias):
        y = ProductsFunction.apply(x, right_cdbs, left_bcsa, bias, out)  # type: ignore[no-untyped-call]
    else:
        y, _ = forward_products(x, right_cdbs, left_bcsa, bias, out)
    return y


def puts_tokens_last(tokens: int, a: int, on_gpu: bool) -> bool:
    """Return whether z gets the layout with tokens last, for row blocks of `a` rows."""
    if on_gpu:
        return tokens > a * TOKENS_LAST_GPU
    return tokens > a * TOKENS_LAST_CPU and a <= LARGEST_BLOCK_CPU


def forward_products(
    x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor, bias: Tensor | None, out: int
) -> tuple[Tensor, Tensor]:
    """Return y (..., out) and z in its layout, without a graph for gradients."""
    (c, d, _, _), (b, _, _, a), in_ = right_cdbs.shape, left_bcsa.shape, x.shape[-1]
    if x.numel() == in_ == c * d and out == b * a:
        y, z = row_products(x, right_cdbs, left_bcsa)
    else:
        x_NI = x.reshape(-1, in_)
        N = x_NI.shape[0]
        tokens_last = puts_tokens_last(N, a, x.is_cuda)
        z = first_product(split_columns(x_NI, c, d), right_cdbs, tokens_last)
        y = x.new_empty(*x.shape[:-1], b * a)
        z_bNK, left_bKa = rows_of_z(z, tokens_last), rows_of_left(left_bcsa, tokens_last)
        torch.bmm(z_bNK, left_bKa, out=y.view(N, b, a).transpose(0, 1))
        y = y if b * a == out else y[..., :out]
    if bias is not None:
        y.add_(bias)
    return y, z


def row_products(x: Tensor, right_cdbs: Tensor, left_bcsa: Tensor) -> tuple[Tensor, Tensor]:
    """Return y (..., b a) and z (b, 1, K) of one row x (..., c d) in as few operations as possible: here each of them
    takes longer to start than to compute."""
    (c, d, b, s), a = right_cdbs.shape, left_bcsa.shape[3]
    J, K = b * s, c * s
    z_c1J = torch.bmm(x.reshape(c, 1, d), right_cdbs.reshape(c, d, J))
    z_b1K = torch.as_strided_copy(z_c1J, (b, c, s), (s, J, 1)).view(b, 1, K)  # rows (c, s) of the columns (b, s)
    y = x.new_empty((*x.shape[:-1], b * a))
    torch.bmm(z_b1K, left_bcsa.reshape(b, K, a), out=y.view(b, 1, a))
    return y, z_b1K


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
    """y (..., out) of x (..., in), right, left, bias and out, with gradients.

    z is kept for the backward pass if it has no more elements than x and y together, and computed again otherwise.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, right: Tensor, left: Tensor, bias: Tensor | None, out: int) -> Tensor:
        """Return y."""
        y, z = forward_products(x, right, left, bias, out)
        keeps_z = ctx.needs_input_grad[2] and z.numel() <= x.numel() + y.numel()
        ctx.save_for_backward(x, right, left, z if keeps_z else None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that are needed. Under create_graph they are differentiable themselves."""
        x, right, left, z = ctx.saved_tensors
        need, x_NI, dy_NO = ctx.needs_input_grad, x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dbias = dy_NO.sum(0) if need[3] else None
        compute = differentiable_gradients if torch.is_grad_enabled() else backward_products
        dx_NI, dright, dleft = compute(x_NI, right, left, dy_NO, z=z, need=need)
        return None if dx_NI is None else dx_NI.view(x.shape), dright, dleft, dbias, None


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
