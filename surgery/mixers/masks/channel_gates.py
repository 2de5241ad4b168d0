"""Log-linear attention of Kimi delta attention, whose log-gates g differ from key channel to key channel (Kimi Team
2025, "Kimi Linear", arXiv 2510.26692, eq. 1; levels as in log_linear.py).

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_(t-1) + beta_t k_t v_t^T          (F, V), for each bucket
    o_t = sum_l lambda_t^(l) S_t^(l)^T q_t

Gates by channel do not commute with the delta rule, so they are no mask and belong to the scores. In a chunk of C tokens
with G_i = g_1 + .. + g_i, (X Y)_ij = sum_f x_i[f] y_j[f] exp(G_i - G_j)[f] for j <= i and P = (I + Diag(beta)
strictly_lower(K K))^-1 Diag(beta), every bucket S at the start of the chunk becomes, and is read as,

    S' = A S,  A = Diag(exp G_C) - (k exp(G_C - G))^T P (k exp G)                  (F, F)
    o  = R S,  R = q exp G - (Q K) P (k exp G)                                     (C, F)

and the chunk's own tokens write U = (k exp(G_C - G))^T P v, and read (Q K) P v. No exponent is positive. Chunks lie
within blocks (`Hierarchical.block`), whose tokens share the first lambda, so that only whole blocks enter the buckets.
There is no kernel.

Letters: B rows, G heads, N chunks, C tokens of a chunk, L buckets, F key dims, V value dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.masks.log_linear import merge_buckets
from surgery.mixers.padding import shift_rows

CHUNK = 32  # tokens; scores by channel take C F elements a token


@dataclass
class Chunks:
    """What chunks do with a state at their start (see the module), and their own outputs and sums."""

    transition_BGNFF: Tensor
    read_BGNCF: Tensor
    own_BGNCV: Tensor
    written_BGNFV: Tensor

    @classmethod
    def from_tokens(
        cls, q_BGNCF: Tensor, k_BGNCF: Tensor, v_BGNCV: Tensor, beta_BGNC: Tensor, gate_BGNCF: Tensor
    ) -> Chunks:
        """Compute them. Tokens without k, v, beta and gate do nothing."""
        size = k_BGNCF.shape[3]
        total_BGNCF = gate_BGNCF.cumsum(3)
        later_CC = torch.ones(size, size, dtype=torch.bool, device=k_BGNCF.device).triu(1)
        apart_BGNCCF = total_BGNCF.unsqueeze(4) - total_BGNCF.unsqueeze(3)
        keys_BGNCCF = apart_BGNCCF.masked_fill(later_CC.unsqueeze(-1), float("-inf")).exp() * k_BGNCF.unsqueeze(3)
        scores_BGNCC = (keys_BGNCCF @ q_BGNCF.unsqueeze(5)).squeeze(5)
        delta_BGNCC = beta_BGNC.unsqueeze(4) * (keys_BGNCCF @ k_BGNCF.unsqueeze(5)).squeeze(5).tril(-1)
        seen_BGNCF = k_BGNCF * total_BGNCF.exp()
        right_BGNCX = beta_BGNC.unsqueeze(4) * torch.cat([v_BGNCV, seen_BGNCF], dim=-1)
        eye_CC = torch.eye(size, dtype=k_BGNCF.dtype, device=k_BGNCF.device)
        solved_BGNCX = torch.linalg.solve_triangular(eye_CC + delta_BGNCC, right_BGNCX, upper=False, unitriangular=True)
        new_BGNCV, forgotten_BGNCF = solved_BGNCX.split([v_BGNCV.shape[-1], k_BGNCF.shape[-1]], dim=-1)
        end_BGN1F = total_BGNCF[:, :, :, -1:]
        keys_BGNFC = (k_BGNCF * (end_BGN1F - total_BGNCF).exp()).mT
        return cls(
            transition_BGNFF=torch.diag_embed(end_BGN1F.squeeze(3).exp()) - keys_BGNFC @ forgotten_BGNCF,
            read_BGNCF=q_BGNCF * total_BGNCF.exp() - scores_BGNCC @ forgotten_BGNCF,
            own_BGNCV=scores_BGNCC @ new_BGNCV,
            written_BGNFV=keys_BGNFC @ new_BGNCV,
        )


def log_linear_channels(
    q_BGTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor,
    gate_BTGF: Tensor,
    level_BTGL: Tensor,
    *,
    start_B: Tensor,
    count_B: Tensor,
    buckets_BLGFV: Tensor | None,
    levels: int,
    block: int,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """Return (out_BGTV, the state after the tokens, or None without a state before).

    The state is that of `HierarchicalMask`: with a block of more than one token the sum of the unfinished block first,
    then the buckets of whole blocks, of which there are `levels` at the end. level_BTGL: lambdas. chunk: tokens, at most.
    """
    length, shared = q_BGTF.shape[2], block > 1
    size = min(chunk, block, 1 << (length - 1).bit_length())
    shift_B = start_B % size  # chunks begin at multiples of their size
    whole = length if buckets_BLGFV is None else length + size - 1
    whole = -(-whole // size) * size

    def chunks(x: Tensor, dim: int) -> Tensor:
        """Return (B, .., N, C, ..) of a tensor with tokens along `dim`."""
        padding = [0] * (2 * (x.dim() - 1 - dim)) + [0, whole - length]
        chunks_BN: Tensor = shift_rows(F.pad(x, padding), -shift_B, dim).unflatten(dim, (-1, size))
        return chunks_BN

    rows = Chunks.from_tokens(
        chunks(q_BGTF, 2), chunks(k_BGTF, 2), chunks(v_BGTV, 2), chunks(beta_BGT, 2), chunks(gate_BTGF.movedim(1, 2), 2)
    )
    level_BGNCL = chunks(level_BTGL.movedim(1, 2), 2)
    which_L = torch.arange(1, levels + 1, device=start_B.device).clamp_max(level_BGNCL.shape[-1] - 1)
    first_BGNC1, level_BGNCL = level_BGNCL[..., :1], level_BGNCL[..., which_L]

    inner_BGFV = torch.zeros_like(rows.written_BGNFV[:, :, 0])
    outer_BLGFV = inner_BGFV.new_zeros(len(inner_BGFV), levels, *inner_BGFV.shape[1:])
    if buckets_BLGFV is not None:
        before = buckets_BLGFV.to(inner_BGFV.dtype)
        inner_BGFV = before[:, 0] if shared else inner_BGFV
        outer_BLGFV = F.pad(before[:, shared:], (0, 0, 0, 0, 0, 0, 0, levels + shared - before.shape[1]))
    begin_B, end_B, outs = start_B - shift_B, start_B + count_B, []
    for n in range(whole // size):
        transition_BGFF, read_BGCF = rows.transition_BGNFF[:, :, n], rows.read_BGNCF[:, :, n]
        inner_BGCV = rows.own_BGNCV[:, :, n] + read_BGCF @ inner_BGFV
        seen_BLGCV = level_BGNCL[:, :, n].movedim(-1, 1).unsqueeze(-1) * (read_BGCF.unsqueeze(1) @ outer_BLGFV)
        outs.append(first_BGNC1[:, :, n] * inner_BGCV + seen_BLGCV.sum(1))
        inner_BGFV = transition_BGFF @ inner_BGFV + rows.written_BGNFV[:, :, n]
        outer_BLGFV = transition_BGFF.unsqueeze(1) @ outer_BLGFV
        last_B = begin_B + (n + 1) * size
        done_B = (last_B % block == 0) & (last_B <= end_B) & (last_B > start_B)
        outer_BLGFV = merge_buckets(outer_BLGFV, inner_BGFV, (last_B - 1) // block, done_B.long(), levels)
        inner_BGFV = inner_BGFV.masked_fill(done_B[:, None, None, None], 0)
    out_BGTV = shift_rows(torch.cat(outs, dim=2), shift_B, 2)[:, :, :length]
    if buckets_BLGFV is None:
        return out_BGTV, None
    return out_BGTV, torch.cat([inner_BGFV.unsqueeze(1), outer_BLGFV], dim=1) if shared else outer_BLGFV
