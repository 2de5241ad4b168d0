"""RoPE of one token for mixers that rotate q and k themselves (`rope: window` and `both`), in one launch.

rotated = x cos + (-x_second, x_first) sin      of the first R dims of each head, in the half-split form
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.kernel_tensors import unit_last_stride
from surgery.kernels.ssd.layout import power_of_two


@triton.jit
def rotate_heads(
    q, k, cos, sin, near, far, sqb, sqh, skb, skg, scb, ssb,
    H: tl.constexpr, KV: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BOTH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store near (B, H + KV, K), the rotated heads of q and k, and if BOTH far (B, H + KV, 2 K), each head before and
    after it. Grid: B x (H + KV). q (B, H, K), k (B, KV, K), cos and sin (B, R); s and two letters is a stride along
    rows (b) or heads.
    """
    b = (tl.program_id(0) // (H + KV)).to(tl.int64)
    h = tl.program_id(0) % (H + KV)
    kk_K = tl.arange(0, BK)
    inside_K, turns_K = kk_K < K, kk_K < R
    other_K = tl.where(kk_K < R // 2, kk_K + R // 2, kk_K - R // 2)
    if h < H:
        at = q + b * sqb + h.to(tl.int64) * sqh
        x_K, y_K = tl.load(at + kk_K, mask=inside_K, other=0.0), tl.load(at + other_K, mask=turns_K, other=0.0)
    else:
        at = k + b * skb + (h - H).to(tl.int64) * skg
        x_K, y_K = tl.load(at + kk_K, mask=inside_K, other=0.0), tl.load(at + other_K, mask=turns_K, other=0.0)
    wide_K, y_K = x_K.to(tl.float32), tl.where(kk_K < R // 2, -1.0, 1.0) * y_K.to(tl.float32)
    cos_K = tl.load(cos + b * scb + kk_K, mask=turns_K, other=1.0).to(near.dtype.element_ty).to(tl.float32)
    sin_K = tl.load(sin + b * ssb + kk_K, mask=turns_K, other=0.0).to(near.dtype.element_ty).to(tl.float32)
    rotated_K = (wide_K * cos_K + y_K * sin_K).to(near.dtype.element_ty)
    head = b * (H + KV) + h
    tl.store(near + head * K + kk_K, rotated_K, mask=inside_K)
    if BOTH:
        tl.store(far + head * 2 * K + kk_K, x_K, mask=inside_K)
        tl.store(far + head * 2 * K + K + kk_K, rotated_K, mask=inside_K)


def rotate_token(
    q_BHK: Tensor, k_BGK: Tensor, rope: tuple[Tensor, Tensor], both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (far_q, far_k, near_q, near_k): the forms that the states and the softmax read, (B, H, F), (B, KV, F), (B,
    H, K) and (B, KV, K). rope: cos and sin of the token, (1 or B, 1, R)."""
    (batch, heads, key), groups = q_BHK.shape, k_BGK.shape[1]
    cos_BR, sin_BR = (unit_last_stride(t[:, 0]).expand(batch, -1) for t in rope)
    near = torch.empty(batch, heads + groups, key, dtype=q_BHK.dtype, device=q_BHK.device)
    far = near.new_empty(batch, heads + groups, 2 * key) if both else near
    rotate_heads[(batch * (heads + groups),)](
        q_BHK, k_BGK, cos_BR, sin_BR, near, far, *q_BHK.stride()[:2], *k_BGK.stride()[:2], cos_BR.stride(0),
        sin_BR.stride(0), H=heads, KV=groups, K=key, R=cos_BR.shape[-1], BOTH=both, BK=power_of_two(key), num_warps=1,
    )  # fmt: skip
    if not both:
        return q_BHK, k_BGK, near[:, :heads], near[:, heads:]
    return far[:, :heads], far[:, heads:], near[:, :heads], near[:, heads:]
