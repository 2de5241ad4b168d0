"""The dense matrix W (b a, c d) of BTT's cores, and the gradients of the cores from its gradient G = dy^T x.

    W[b,a,c,d] = sum_s right[c,d,b,s] left[b,c,s,a]
    dleft[b,c,s,a] = sum_d right[c,d,b,s] G[b,a,c,d]        dright[c,d,b,s] = sum_a G[b,a,c,d] left[b,c,s,a]

For ranks at which z costs more than W or G: products with W or G are the library's, whatever the rank, and W and G are
written and read once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_BLOCK = 128  # rows or columns of a block that fits a program


@triton.jit
def cores_kernel(
    g, right, left, dright, dleft, IN, OUT, C, D, B, S, A, g_o, g_i,
    BD: tl.constexpr, BA: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dright and dleft of g (OUT, IN). Grid: (C * B, tiles of S); a program computes one block for BS ranks."""
    c, b = tl.program_id(0) % C, tl.program_id(0) // C
    d = tl.arange(0, BD)
    a = tl.arange(0, BA)
    s = tl.program_id(1) * BS + tl.arange(0, BS)
    o, i = b * A + a, c * D + d
    inside = ((a < A) & (o < OUT))[:, None] & ((d < D) & (i < IN))[None, :]
    g_ad = tl.load(g + o.to(tl.int64)[:, None] * g_o + i[None, :] * g_i, mask=inside, other=0.0)
    at_ds = (c * D + d)[:, None] * (B * S) + (b * S + s)[None, :]
    at_sa = ((b * C + c) * S + s)[:, None] * A + a[None, :]
    inside_ds = (d < D)[:, None] & (s < S)[None, :]
    inside_sa = (s < S)[:, None] & (a < A)[None, :]
    r_ds = tl.load(right + at_ds, mask=inside_ds, other=0.0)
    l_sa = tl.load(left + at_sa, mask=inside_sa, other=0.0)
    dl_as = tl.dot(g_ad, r_ds, input_precision=PRECISION)
    dr_sd = tl.dot(l_sa, g_ad, input_precision=PRECISION)
    tl.store(dleft + at_sa, tl.trans(dl_as).to(dleft.dtype.element_ty), mask=inside_sa)
    tl.store(dright + at_ds, tl.trans(dr_sd).to(dright.dtype.element_ty), mask=inside_ds)


@triton.jit
def dense_kernel(
    right, left, w, IN, OUT, C, D, B, S, A, w_o,
    BD: tl.constexpr, BA: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute w (OUT, IN), whose rows have a stride of w_o. Grid: (C * B,); a program computes one block."""
    c, b = tl.program_id(0) % C, tl.program_id(0) // C
    d = tl.arange(0, BD)
    a = tl.arange(0, BA)
    w_ad = tl.zeros([BA, BD], tl.float32)
    for first in tl.range(0, S, BS):
        s = first + tl.arange(0, BS)
        at_sd = (c * D + d)[None, :] * (B * S) + (b * S + s)[:, None]
        at_as = ((b * C + c) * S + s)[None, :] * A + a[:, None]
        r_sd = tl.load(right + at_sd, mask=(d < D)[None, :] & (s < S)[:, None], other=0.0)
        l_as = tl.load(left + at_as, mask=(s < S)[None, :] & (a < A)[:, None], other=0.0)
        w_ad = tl.dot(l_as, r_sd, w_ad, input_precision=PRECISION)
    o, i = b * A + a, c * D + d
    inside = ((a < A) & (o < OUT))[:, None] & ((d < D) & (i < IN))[None, :]
    tl.store(w + o.to(tl.int64)[:, None] * w_o + i[None, :], w_ad.to(w.dtype.element_ty), mask=inside)


def tile_size(n: int) -> int:
    """Return the power of two that holds n, 16 or more."""
    return max(16, 1 << (n - 1).bit_length())


def to_dense(right_cdbs: Tensor, left_bcsa: Tensor, out: int, in_: int) -> Tensor:
    """Return w (out, in_): W without the rows and columns that pad its blocks."""
    (c, d, b, s), a = right_cdbs.shape, left_bcsa.shape[3]
    w_OI = right_cdbs.new_empty(out, in_)
    dense_kernel[(c * b,)](
        right_cdbs, left_bcsa, w_OI, in_, out, c, d, b, s, a, in_,
        BD=tile_size(d), BA=tile_size(a), BS=min(32, tile_size(s)), PRECISION="tf32x3" if w_OI.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return w_OI


class DenseFunction(torch.autograd.Function):
    """w (out, in_) of right, left, out and in_, with gradients of the cores."""

    @staticmethod
    def forward(ctx: Any, right_cdbs: Tensor, left_bcsa: Tensor, out: int, in_: int) -> Tensor:
        """Return w_OI."""
        ctx.save_for_backward(right_cdbs, left_bcsa)
        return to_dense(right_cdbs, left_bcsa, out, in_)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_OI: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of right and left."""
        return *from_dense(g_OI, *ctx.saved_tensors), None, None


def from_dense(g_OI: Tensor, right_cdbs: Tensor, left_bcsa: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dright, dleft) from the gradient of the dense matrix."""
    (c, d, b, s), a = right_cdbs.shape, left_bcsa.shape[3]
    dright, dleft = torch.empty_like(right_cdbs), torch.empty_like(left_bcsa)
    BS = min(64, tile_size(s))
    cores_kernel[(c * b, -(-s // BS))](
        g_OI, right_cdbs, left_bcsa, dright, dleft, g_OI.shape[1], g_OI.shape[0], c, d, b, s, a, *g_OI.stride(),
        BD=tile_size(d), BA=tile_size(a), BS=BS,
        PRECISION="tf32x3" if g_OI.dtype == torch.float32 else "tf32", num_warps=4, num_stages=1,
    )  # fmt: skip
    return dright, dleft
