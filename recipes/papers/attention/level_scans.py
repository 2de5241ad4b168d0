"""Log-linear Mamba-2 by repeated scans of Mamba-2, one for each level: the naive form of Guo et al. 2025, "Log-Linear
Attention", Figure 4.

    o_t = lambda_t0 (q_t . k_t) v_t + sum_(l >= 1) lambda_tl q_t S_tl

Level l >= 1 of token t is the bucket of 2^(l-1) tokens that ends where the second half of its block of 2^l tokens
begins, if t lies in that half (eqs. 3 and 4). So a level is one SSD scan over blocks of 2^l tokens as sequences of their
own, in which first halves write and second halves read. Many value heads over one query and key (MVA) are G heads with
q and k expanded. A plain-torch reference; the mixer has one algorithm for all levels (section 3.3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.masks.semiseparable import semiseparable


def level_scans(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, gates_BGT: Tensor, lambda_BGJTL: Tensor, chunk: int = 64
) -> Tensor:
    """Return out_BGJTV of sequences that begin at position 0. gates_BGT: log-gates; lambda: L > log2(T - 1) + 1 levels."""
    length = v_BGTV.shape[2]
    own_BGJT1 = (q_BGJTF * k_BGTF.unsqueeze(2)).sum(-1, keepdim=True)
    out_BGJTV = lambda_BGJTL[..., :1] * own_BGJT1 * v_BGTV.unsqueeze(2)
    for level in range(1, (length - 1).bit_length() + 1):
        size = 2**level
        token_T = torch.arange(length, device=v_BGTV.device)
        writes_T1 = (token_T % size < size // 2).unsqueeze(1)
        scan = semiseparable(
            blocks(q_BGJTF, 3, size), blocks(k_BGTF * writes_T1, 2, size), blocks(v_BGTV * writes_T1, 2, size), None,
            blocks(gates_BGT.unsqueeze(1), 3, size), None, first_BRGFV=None, chunk=min(chunk, size),
        )[0]  # fmt: skip
        read_BGJTV = scan.unflatten(0, (len(v_BGTV), -1)).movedim(1, 3).flatten(3, 4)[:, :, :, :length]
        out_BGJTV = out_BGJTV + lambda_BGJTL[..., level, None] * read_BGJTV.masked_fill(writes_T1, 0)
    return out_BGJTV


def blocks(x: Tensor, dim: int, size: int) -> Tensor:
    """Return x (B, .., T, ..) in blocks of `size` tokens as rows, (B N, .., size, ..), with zeros behind the last token.
    dim: axis of T.
    """
    padding = -x.shape[dim] % size
    x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, padding))
    return x.unflatten(dim, (-1, size)).movedim(dim, 1).flatten(0, 1)
