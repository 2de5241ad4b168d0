"""Buckets smaller than a chunk, at the ends of rows that resume from a state: plain torch on one chunk of each row.

Small buckets that a row resumes from lie in its first chunk. The queries of that chunk read them one by one, and they
pass through the chunk. Small buckets behind a row are sums over its last chunk alone
(surgery/mixers/masks/log_linear_chunked.py: `_read_low_buckets`, `_carry_low_buckets` and `_low_buckets_after`).
Gradients are torch's own.

Suffixes: C slots of the chunk, l buckets smaller than a chunk, c the same behind the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from surgery.mixers.masks.chunking import log_decay_to_end
from surgery.mixers.masks.delta_rule import ChunkScores, chunk_scores
from surgery.mixers.masks.log_linear_chunked import bit_length


class RowTokens(NamedTuple):
    """Inputs of a call that resumes from buckets. start_B: position of each row's first token; count_B: tokens of the
    row. cu_seqlens: borders (B + 1,) if the rows are pieces that lie one after another in one row of tokens.
    """

    q_BGJTF: Tensor
    k_BGTF: Tensor
    v_BGTV: Tensor
    beta_BGT: Tensor
    gates_BGT: Tensor
    level_BTGJL: Tensor
    start_B: Tensor
    count_B: Tensor
    cu_seqlens: Tensor | None = None


@dataclass(frozen=True)
class BoundaryChunk:
    """One chunk of each row.

    Attributes:
        token_BC: the token in each slot, T if the slot has none; of the row of all pieces, if they lie in one.
        slot_B: slot of the row's first token, or the slot behind its last one.
        bits: log2 of the chunk.
        packed: whether the rows are pieces of one row of tokens.
    """

    scores: ChunkScores
    v_BGCV: Tensor
    gates_BGC: Tensor
    level_BGJCL: Tensor
    token_BC: Tensor
    slot_B: Tensor
    bits: int
    packed: bool

    @classmethod
    def from_tokens(
        cls, rows: RowTokens, at_B: Tensor, slot_B: Tensor, bits: int
    ) -> BoundaryChunk:  # fmt: skip
        """Gather the chunk of absolute number at_B of each row."""
        at_BC = (at_B << bits).unsqueeze(1) + torch.arange(1 << bits, device=at_B.device) - rows.start_B.unsqueeze(1)
        length = rows.v_BGTV.shape[2]
        place_BC = at_BC if rows.cu_seqlens is None else at_BC + rows.cu_seqlens[:-1].unsqueeze(1)
        token_BC = torch.where((at_BC >= 0) & (at_BC < rows.count_B.unsqueeze(1)), place_BC, length)
        q, k, v, beta, gates = (_gather_tokens(x, token_BC, -2 if x.dim() > 3 else -1) for x in rows[:5])
        level_BCGJL = _gather_tokens(rows.level_BTGJL, token_BC, 1)
        level_BGJCL, packed = level_BCGJL.permute(0, 2, 3, 1, 4), rows.cu_seqlens is not None
        return cls(chunk_scores(q, k, beta), v, gates, level_BGJCL, token_BC, slot_B, bits, packed)

    @property
    def fade_BGC(self) -> Tensor:
        """The gates from the chunk's start up to each slot."""
        return self.gates_BGC.cumsum(-1).exp()

    def read_levels(self, low: int) -> Tensor:
        """Return the level (B, C, l) at which a slot reads bucket l of the state at the row's start, for `low`
        buckets.
        """
        at_C = torch.arange(1 << self.bits, device=self.slot_B.device)
        differs_BC1 = bit_length(at_C ^ self.slot_B.unsqueeze(1), self.bits).unsqueeze(2)
        return torch.maximum(differs_BC1, torch.arange(1, low + 1, device=self.slot_B.device))

    def read_buckets(self, low_BlGFV: Tensor, length: int) -> Tensor:
        """Return what the tokens read of the buckets, (B, G, J, T, V), zeros outside the chunks; (1, G, J, T, V) of pieces of
        one row. length: T."""
        index_BCl = self.read_levels(low_BlGFV.shape[1]).clamp_max(self.level_BGJCL.shape[-1] - 1)
        shape = (*self.level_BGJCL.shape[:-1], index_BCl.shape[-1])
        lambda_BGJCl = self.level_BGJCL.gather(-1, index_BCl[:, None, None].expand(shape))
        seen_BlGJCV = self.scores.read_xJCF.unsqueeze(1) @ low_BlGFV.unsqueeze(3)
        weight_BGJCl = lambda_BGJCl * self.fade_BGC[:, :, None, :, None]
        seen_BGJCV = torch.einsum("bgjcl,blgjcv->bgjcv", weight_BGJCl, seen_BlGJCV)
        token_BC = self.token_BC
        if self.packed:
            seen_BGJCV = seen_BGJCV.movedim(0, 2).flatten(2, 3).unsqueeze(0)
            token_BC = token_BC.reshape(1, -1)
        every = seen_BGJCV.new_zeros(*seen_BGJCV.shape[:3], length + 1, seen_BGJCV.shape[-1])
        index = token_BC[:, None, None, :, None].expand_as(seen_BGJCV)
        return every.scatter_add(3, index, seen_BGJCV)[..., :length, :]

    def carry_buckets(self, low_BlGFV: Tensor) -> Tensor:
        """Return the buckets of the row's start after the gates and transitions of the chunk, (B, l, G, F, V)."""
        carry = self.scores.carry()
        passed = low_BlGFV if carry is None else carry.unsqueeze(1) @ low_BlGFV
        return self.fade_BGC[:, None, :, -1, None, None] * passed

    def buckets_after(self) -> Tensor:
        """Return the buckets of the chunk's own tokens that a query at `slot` would read, (B, bits, G, F, V)."""
        at_C = torch.arange(1 << self.bits, device=self.slot_B.device)
        bit_BC = bit_length(at_C ^ self.slot_B.unsqueeze(1), self.bits) - 1
        into_BcC = bit_BC.unsqueeze(1) == torch.arange(self.bits, device=self.slot_B.device).unsqueeze(1)
        write_BGCF = self.scores.write_xCF * log_decay_to_end(self.gates_BGC).exp().unsqueeze(-1)
        return (into_BcC[:, :, None, :, None] * write_BGCF.unsqueeze(1)).mT @ self.v_BGCV.unsqueeze(1)


def _gather_tokens(x: Tensor, token_BC: Tensor, dim: int) -> Tensor:
    """Take tokens of each row along `dim`, zeros for the index T; in float32 or wider."""
    x = x.movedim(dim, 1)
    x, here = x.expand(len(token_BC), *x.shape[1:]), token_BC < x.shape[1]
    row_B1 = torch.arange(len(token_BC), device=x.device).unsqueeze(1)
    taken = x[row_B1, token_BC.clamp_max(x.shape[1] - 1)].to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(here.view(*here.shape, *[1] * (x.dim() - 2)), taken, 0).movedim(1, dim)


def final_buckets(first: BoundaryChunk, low_BlGFV: Tensor, end_B: Tensor, at_B: Tensor) -> Tensor:
    """Return the buckets behind the last token that hold the small buckets of the row's start, (B, bits, G, F, V).

    They are zeros for rows that go beyond their first chunk, at_B. low: the small buckets at the chunk's end. end_B:
    position behind the last token.
    """
    slot_B = end_B % (1 << first.bits)
    level_Bl = first.read_levels(low_BlGFV.shape[1]).take_along_dim(slot_B[:, None, None], 1).squeeze(1)
    which_c1 = torch.arange(first.bits, device=end_B.device).unsqueeze(1)
    into_Bcl = (level_Bl.unsqueeze(1) - 1 == which_c1) & (end_B >> first.bits == at_B)[:, None, None]
    return torch.einsum("bcl,blgfv->bcgfv", into_Bcl.to(low_BlGFV.dtype), low_BlGFV)
