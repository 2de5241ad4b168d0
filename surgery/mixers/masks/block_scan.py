"""Sums of blocks mixed by their distance alone, K(d) = sum_r a_r exp(-lambda_r d), in time linear in the blocks (TBM).

    causal      mixed_n = sum_m<n  K(n - m) X_m = sum_r a_r E_r,n      E_r,n+1 = e^(-lambda_r) (E_r,n + X_n)
    both ways   mixed_n = sum_m K(|n - m|) X_m: a causal sweep from either end, the block itself once

X_n = sum of k v^T over block n; E is the state that enters a block, its gate applied, and S_n = E_n + X_n leaves it.
R components; M blocks; a for each query head, lambda for each key/value head. K(0) X_n of a causal block is not mixed:
inside a block attention is causal too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.op import op


@op
def block_scan(
    sum_BGMFV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    first_BRGFV: Tensor | None = None,
    count_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(mixed_BGJMFV, S of the last block (B, R, G, F, V)), causal. first: E_0, zeros where None. From the count-th block
    on (None: M) nothing is mixed and states stay: those rows are zeros; S of count 0 is E_0."""
    batch, groups, _, features, values = sum_BGMFV.shape
    gate_RG11 = torch.exp(-rate_RG)[:, :, None, None]
    enters = first_BRGFV
    if enters is None:
        enters = gate_RG11.new_zeros(batch, len(rate_RG), groups, features, values)
    mixed, last = [], enters
    for n, sum_BGFV in enumerate(sum_BGMFV.unbind(2)):
        mixed_BGJFV = torch.einsum("rgj,brgfv->bgjfv", weight_RGJ, enters)
        leaves = enters + sum_BGFV.unsqueeze(1)
        if count_B is not None:
            here_B = (n < count_B)[:, None, None, None, None]
            mixed_BGJFV, leaves = torch.where(here_B, mixed_BGJFV, 0), torch.where(here_B, leaves, last)
        mixed.append(mixed_BGJFV)
        enters, last = gate_RG11 * leaves, leaves
    return torch.stack(mixed, 3).to(sum_BGMFV.dtype), last


@op
def block_scan_both(sum_BGMFV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor) -> Tensor:
    """mixed_BGJMFV, both ways."""
    dtype, sum_BGMFV = sum_BGMFV.dtype, sum_BGMFV.to(torch.promote_types(sum_BGMFV.dtype, torch.float32))
    out = torch.zeros_like(sum_BGMFV[:, :, None])
    for weight_GJ, rate_G in zip(weight_RGJ, rate_RG):
        gate_G11 = torch.exp(-rate_G)[:, None, None]
        back = _sweep(sum_BGMFV.flip(2), gate_G11).flip(2)
        both_BGMFV = _sweep(sum_BGMFV, gate_G11) + back - sum_BGMFV
        out = out + weight_GJ[:, :, None, None, None] * both_BGMFV.unsqueeze(2)
    return out.to(dtype)


def _sweep(sum_BGMFV: Tensor, gate_G11: Tensor) -> Tensor:
    """S_n = gate S_n-1 + sum_n."""
    states = [sum_BGMFV[:, :, 0]]
    for n in range(1, sum_BGMFV.shape[2]):
        states.append(torch.addcmul(sum_BGMFV[:, :, n], gate_G11, states[-1]))
    return torch.stack(states, 2)
