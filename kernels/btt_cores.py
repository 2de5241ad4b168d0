"""Gradients of BTT's cores from the gradient of the dense matrix, G = dy^T x: (b a, c d).

    dleft[b,c,s,a] = sum_d right[c,d,b,s] G[b,a,c,d]        dright[c,d,b,s] = sum_a G[b,a,c,d] left[b,c,s,a]

For ranks at which pairing z with dy and x would cost more than G does: then G is one product of the library, whatever
the rank, and this reads it once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 128  # blocks that a program holds


@triton.jit
def cores_kernel(
    g, right, left, dright, dleft, IN, OUT, C, D, B, S, A, g_o, g_i,
    BD: tl.constexpr, BA: tl.constexpr, BS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (C * B, tiles of s)."""
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


def from_dense(g_OI: Tensor, right_cdbs: Tensor, left_bcsa: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of right and left."""
    (c, d, b, s), a = right_cdbs.shape, left_bcsa.shape[3]
    dright, dleft = torch.empty_like(right_cdbs), torch.empty_like(left_bcsa)
    BS = min(64, max(16, triton.next_power_of_2(s)))
    cores_kernel[(c * b, triton.cdiv(s, BS))](
        g_OI, right_cdbs, left_bcsa, dright, dleft, g_OI.shape[1], g_OI.shape[0], c, d, b, s, a, *g_OI.stride(),
        BD=max(16, triton.next_power_of_2(d)), BA=max(16, triton.next_power_of_2(a)), BS=BS,
        PRECISION="tf32x3" if g_OI.dtype == torch.float32 else "tf32", num_warps=4, num_stages=1,
    )  # fmt: skip
    return dright, dleft
