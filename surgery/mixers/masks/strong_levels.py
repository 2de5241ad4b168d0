"""Levels of log-linear attention under strong admissibility (Guo et al. 2025, "Log-Linear Attention", appendix B.4).

A query at position t reads the token s < t at the first level at which s and t lie in the same block or in neighboring
blocks:

    level(t, s) = 1 + min {k : floor(t / 2^k) - floor(s / 2^k) <= 1}      level(t, t) = 0

The appendix has two figures and no formula for the levels; this one equals the recursive division that they show.
Weak admissibility (log_linear.py) asks for the same block. After n >= 1 tokens there is one bucket for each level l = 1
.. bit_length(n), and all of them hold tokens: bucket l holds the positions from start_l to start_(l-1) - 1, where
start_l = (floor(n / 2^(l-1)) - 1) 2^(l-1) and start_0 = n. These are 2^(l-2) or 2^(l-1) tokens for l > 1, and one token
for l = 1. A bucket of position n lies within one bucket of every later position, so the buckets are a state: each
passes whole into the bucket of its first token's level.

The chunked form goes through the chunks in order, in T (C + log T): queries read the tokens of their own chunk by the
definition and the buckets at the start of the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.mixers.masks.base import MaskInputs, slice_tokens
from surgery.mixers.masks.chunking import log_decay_to_end, segsum
from surgery.mixers.masks.delta_rule import chunk_scores
from surgery.mixers.masks.log_linear_chunked import bit_length


def strong_level(t: Tensor, s: Tensor) -> Tensor:
    """Return level(t, s) of positions, broadcast against each other; 0 where s >= t."""
    # For a distance d, only k = bit_length(d) - 1 and k + 1 can be the first: 2^k <= d < 2^(k+1).
    k = bit_length((t - s).clamp_min(1), 62) - 1
    return torch.where(s < t, 1 + k + ((t >> k) - (s >> k) > 1), 0)


def bucket_starts(seen_B: Tensor, count: int) -> Tensor:
    """Return the position of the first token of each of `count` buckets after seen_B tokens, (B, count); 0 for empty
    buckets.
    """
    k = torch.arange(count, device=seen_B.device)
    return ((seen_B.unsqueeze(1) >> k) - 1).clamp_min(0) << k


def move_buckets(buckets_BLGFV: Tensor, token_BGFV: Tensor, start_B: Tensor, count_B: Tensor, size: int) -> Tensor:
    """Return the buckets after one token, `size` of them. Rows without a token (count_B = 0) do not change."""
    end_B1 = (start_B + count_B).unsqueeze(1)
    from_BL = strong_level(end_B1, bucket_starts(start_B, buckets_BLGFV.shape[1]))
    own_B1 = strong_level(end_B1, start_B.unsqueeze(1))
    moved = collect_sums(from_BL, buckets_BLGFV, size)
    return moved + collect_sums(own_B1, token_BGFV.unsqueeze(1), size)


def collect_sums(level_BN: Tensor, sums_BNGFV: Tensor, size: int) -> Tensor:
    """Return the buckets of levels 1 .. size, (B, size, G, F, V): sums of the N given terms of each level.

    Level 0 is dropped.
    """
    into_BLN = level_BN.unsqueeze(1) == torch.arange(1, size + 1, device=level_BN.device).unsqueeze(1)
    return torch.einsum("bln,bngfv->blgfv", into_BLN.to(sums_BNGFV.dtype), sums_BNGFV)


def strong_chunks(
    rows: MaskInputs, gates_BGT: Tensor, buckets_BLGFV: Tensor | None, chunk: int, levels: int
) -> tuple[Tensor, Tensor | None]:
    """Return (out_BGJTV, buckets after the tokens, `levels` of them; None without buckets before).

    rows: in float32 or float64, with the signal `level` (B, T, G, J, lambdas). gates_BGT: log-gates, 0 for padding; B
    and G may be 1. buckets_BLGFV: state before the tokens, None: the tokens are the first, and no state is returned.
    chunk: tokens per chunk.
    """
    batch, groups, length, values = rows.v_BGTV.shape
    gates_BGT = gates_BGT.expand(batch, groups, length)
    now = rows.v_BGTV.new_zeros(batch, levels, groups, rows.k_BGTF.shape[-1], values)
    if buckets_BLGFV is not None:
        now[:, : buckets_BLGFV.shape[1]] = buckets_BLGFV
    outs = []
    for first in range(0, length, chunk):
        strong_chunk = StrongChunk(slice_tokens(rows, first, first + chunk), gates_BGT[:, :, first : first + chunk])
        out_BGJCV, after = strong_chunk.sweep(now if first or buckets_BLGFV is not None else None, levels)
        outs.append(out_BGJCV)
        now = after
    return torch.cat(outs, 3), None if buckets_BLGFV is None else now


@dataclass
class StrongChunk:
    """The tokens of one chunk. gates_BGC: log-gates."""

    rows: MaskInputs
    gates_BGC: Tensor

    def sweep(self, buckets_BLGFV: Tensor | None, levels: int) -> tuple[Tensor, Tensor]:
        """Return (out_BGJCV, buckets after the chunk, `levels` of them). buckets: before the chunk, None for empty
        ones.
        """
        rows, end_B1 = self.rows, (self.rows.start_B + self.rows.count_B).unsqueeze(1)
        scores = chunk_scores(rows.q_BGJTF, rows.k_BGTF, rows.beta_BGT)
        at_BC = rows.start_B.unsqueeze(1) + torch.arange(rows.v_BGTV.shape[2], device=end_B1.device)
        lambda_BGJCC = self._lambdas(strong_level(at_BC.unsqueeze(2), at_BC.unsqueeze(1)))
        gates_BG1CC = segsum(self.gates_BGC).exp().unsqueeze(2)
        out = (scores.inner_xJCC * lambda_BGJCC * gates_BG1CC) @ rows.v_BGTV.unsqueeze(2)
        write_BGCF = scores.write_xCF * log_decay_to_end(self.gates_BGC).exp().unsqueeze(-1)
        into_BLC = strong_level(end_B1, at_BC).unsqueeze(1) == torch.arange(
            1, levels + 1, device=end_B1.device
        ).unsqueeze(1)
        after = (into_BLC[:, :, None, :, None] * write_BGCF.unsqueeze(1)).mT @ rows.v_BGTV.unsqueeze(1)
        if buckets_BLGFV is None:
            return out, after
        starts_BL = bucket_starts(rows.start_B, buckets_BLGFV.shape[1])
        lambda_BGJCL = self._lambdas(strong_level(at_BC.unsqueeze(2), starts_BL.unsqueeze(1)))
        weight_BGJCL = lambda_BGJCL * self.gates_BGC.cumsum(-1).exp()[:, :, None, :, None]
        seen_BLGJCV = scores.read_xJCF.unsqueeze(1) @ buckets_BLGFV.unsqueeze(3)
        out = out + torch.einsum("bgjcl,blgjcv->bgjcv", weight_BGJCL, seen_BLGJCV)
        carry = scores.carry()
        passed = buckets_BLGFV if carry is None else carry.unsqueeze(1) @ buckets_BLGFV
        passed = self.gates_BGC.sum(-1).exp()[:, None, :, None, None] * passed
        return out, after + collect_sums(strong_level(end_B1, starts_BL), passed, levels)

    def _lambdas(self, level_BCX: Tensor) -> Tensor:
        """Return lambda_BGJCX of each token at the given levels."""
        level_BGJCL = self.rows.signals["level"].movedim(1, 3)
        index_BCX = level_BCX.clamp_max(level_BGJCL.shape[-1] - 1)[:, None, None]
        return level_BGJCL.gather(-1, index_BCX.expand(*level_BGJCL.shape[:-1], index_BCX.shape[-1]))
