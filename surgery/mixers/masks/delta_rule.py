"""The scores A of linear-type attention, O = (A . M) V, as an algebra of chunks of C tokens.

    kernel   A_ts = q_t . k_s
    delta    A_ts = q_t . (I - beta_t k_t k_t^T) .. (I - beta_s+1 k_s+1 k_s+1^T) beta_s k_s      (s <= t)

Either is, for each chunk: `inner`, A inside the chunk; `read`, its queries as states carried to the chunk's start
see them; `write`, its keys as they stand in a state at the chunk's end; and `carry`, what the chunk does to states
that pass through it. Without a mask, S' = carry S + write^T V and O = read S + inner V.

Delta in WY form (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule", eqs. 10-11):
T = (I + tril(diag(beta) K K^T, -1))^-1 diag(beta); inner = tril(Q K^T) T, write = T^T K, read = Q - inner K,
carry = I - K^T T K. Gates are numbers, they commute with all of this and so belong to M.
Axes: x any leading ones, J query heads of a group, C tokens of the chunk, F features, V values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class ChunkScores:
    """inner_xJCC is lower triangular; keys_xCF: k of the delta rule, None for kernel scores (the carry is I)."""

    inner_xJCC: Tensor
    read_xJCF: Tensor
    write_xCF: Tensor
    keys_xCF: Tensor | None = None

    def carry(self) -> Tensor | None:
        """carry_xFF, None for the identity."""
        if self.keys_xCF is None:
            return None
        eye_FF = torch.eye(self.keys_xCF.shape[-1], dtype=self.keys_xCF.dtype, device=self.keys_xCF.device)
        return eye_FF - self.write_xCF.mT @ self.keys_xCF


def chunk_scores(q_xJCF: Tensor, k_xCF: Tensor, beta_xC: Tensor | None) -> ChunkScores:
    """Of every chunk at once; beta None: kernel scores."""
    qk_xJCC = (q_xJCF @ k_xCF.mT.unsqueeze(-3)).tril()
    if beta_xC is None:
        return ChunkScores(qk_xJCC, q_xJCF, k_xCF)
    t_xCC = householder(k_xCF, beta_xC)
    inner_xJCC = qk_xJCC @ t_xCC.unsqueeze(-3)
    return ChunkScores(inner_xJCC, q_xJCF - inner_xJCC @ k_xCF.unsqueeze(-3), t_xCC.mT @ k_xCF, k_xCF)


def householder(k_xCF: Tensor, beta_xC: Tensor) -> Tensor:
    """T_xCC = (I + tril(diag(beta) K K^T, -1))^-1 diag(beta), by a triangular solve."""
    kk_xCC = (beta_xC.unsqueeze(-1) * (k_xCF @ k_xCF.mT)).tril(-1)
    return torch.linalg.solve_triangular(kk_xCC, torch.diag_embed(beta_xC), upper=False, unitriangular=True)


def dense_scores(q_BGJTF: Tensor, k_BGTF: Tensor, beta_BGT: Tensor | None) -> Tensor:
    """A_BGJTT over whole sequences. Kernel scores are not triangular (M is where it must be); the delta rule's are."""
    if beta_BGT is None:
        return q_BGJTF @ k_BGTF.mT.unsqueeze(-3)
    return chunk_scores(q_BGJTF, k_BGTF, beta_BGT).inner_xJCC
