"""Scores A of linear attention O = (A . M) V, for kernel scores and the delta rule, in chunks of C tokens.

    kernel   A_ts = q_t . k_s
    delta    A_ts = q_t . (I - beta_t k_t k_t^T) .. (I - beta_s+1 k_s+1 k_s+1^T) beta_s k_s      (s <= t)

Both rules are four matrices per chunk. With the state S (F, V) at the start of the chunk and without a mask,

    O = read S + inner V,   S' = carry S + write^T V

Delta rule in WY form (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule", eqs. 10-11):
T = (I + tril(diag(beta) K K^T, -1))^-1 diag(beta); inner = tril(Q K^T) T, write = T^T K, read = Q - inner K,
carry = I - K^T T K. Gates are scalars and commute with these matrices, so they are part of M. Guo et al. 2025, section
2 and its table, print T_K with I - L and the causal mask as 1{i <= j}; their text, like this code, has L - I and
s <= t.
Axes: x any leading axes, J query heads per key/value head, C tokens of the chunk, F features, V values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class ChunkScores:
    """Matrices of one or more chunks, see the module's docstring. inner_xJCC is lower triangular.

    keys_xCF: keys of the delta rule, from which `carry` is formed; None for kernel scores, whose carry is the identity.
    """

    inner_xJCC: Tensor
    read_xJCF: Tensor
    write_xCF: Tensor
    keys_xCF: Tensor | None = None

    def carry(self) -> Tensor | None:
        """Return carry_xFF, or None for the identity."""
        if self.keys_xCF is None:
            return None
        eye_FF = torch.eye(self.keys_xCF.shape[-1], dtype=self.keys_xCF.dtype, device=self.keys_xCF.device)
        return eye_FF - self.write_xCF.mT @ self.keys_xCF


def chunk_scores(q_xJCF: Tensor, k_xCF: Tensor, beta_xC: Tensor | None) -> ChunkScores:
    """Return the matrices of all chunks. beta_xC: step sizes of the delta rule, or None for kernel scores."""
    qk_xJCC = (q_xJCF @ k_xCF.mT.unsqueeze(-3)).tril()
    if beta_xC is None:
        return ChunkScores(qk_xJCC, q_xJCF, k_xCF)
    t_xCC = wy_factor(k_xCF, beta_xC)
    inner_xJCC = qk_xJCC @ t_xCC.unsqueeze(-3)
    return ChunkScores(inner_xJCC, q_xJCF - inner_xJCC @ k_xCF.unsqueeze(-3), t_xCC.mT @ k_xCF, k_xCF)


def wy_factor(k_xCF: Tensor, beta_xC: Tensor) -> Tensor:
    """Return T_xCC = (I + tril(diag(beta) K K^T, -1))^-1 diag(beta), by a triangular solve."""
    kk_xCC = (beta_xC.unsqueeze(-1) * (k_xCF @ k_xCF.mT)).tril(-1)
    t_xCC: Tensor = torch.linalg.solve_triangular(kk_xCC, torch.diag_embed(beta_xC), upper=False, unitriangular=True)
    return t_xCC


def dense_scores(q_BGJTF: Tensor, k_BGTF: Tensor, beta_BGT: Tensor | None, block: int | None = None) -> Tensor:
    """Return A_BGJTT of whole sequences. Kernel scores are not triangular: causality is part of M.

    block: queries read the state at the start of their block of that many tokens; None: the state after their own
    token.
    """
    if beta_BGT is None:
        return q_BGJTF @ k_BGTF.mT.unsqueeze(-3)
    if block is None:
        return chunk_scores(q_BGJTF, k_BGTF, beta_BGT).inner_xJCC
    at_T = torch.arange(k_BGTF.shape[2], device=k_BGTF.device)
    written_TT = at_T < (at_T // block * block).unsqueeze(1)
    seen_BGJTT = torch.where(written_TT, q_BGJTF @ k_BGTF.mT.unsqueeze(-3), 0)
    return seen_BGJTT @ wy_factor(k_BGTF, beta_BGT).unsqueeze(-3)
