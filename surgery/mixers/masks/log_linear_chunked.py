"""Log-linear attention in chunks of C = 2^c tokens, in T log T (Guo et al. 2025, section 3.3, eq. 5).

Inside a chunk the mask is formed explicitly. Above, a Fenwick tree over the chunks is processed level by level. Level l
pairs segments of 2^l chunks: queries in the right segment of a pair read the state of the left one, with the lambda of
level c + l + 1. The pair is then one segment of level l + 1. As segments grow, the `fade` (gates) and `read`
(transitions of the delta rule) of each query are extended to the start of its segment.

Rows may start at any position, with buckets from a cached state. Buckets of level >= c are missing left siblings: if
the first segment of a level is a right one, the bucket of that level is put before it. Buckets of level < c fall inside
the first chunk: the queries of that chunk read them individually, and they are added to the chunk's sum.

The state after the last token is what a query at the next position would read: level by level from c on, and sums over
that position's own chunk below c.

N chunks, n segments of a level, X chunks with queries, R = J C queries of a chunk, l buckets below c from the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.mixers.masks.base import MaskInputs
from surgery.mixers.masks.chunking import ChunkLayout, index_rowwise, log_decay_to_end, segsum
from surgery.mixers.masks.delta_rule import ChunkScores, chunk_scores


def bit_length(x: Tensor, bits: int) -> Tensor:
    """Return min(x.bit_length(), bits) of integers x >= 0."""
    return torch.bucketize(x, 2 ** torch.arange(bits, device=x.device), right=True)


def expand_like(x: Tensor, like: Tensor) -> Tensor:
    """Return x with axes of size 1 appended, as many axes as `like`."""
    return x.view(*x.shape, *[1] * (like.dim() - x.dim()))


@dataclass
class Segments:
    """The segments of one level.

    sum: state added by the segment, at its end. gate: product of its gates, <= 1. carry: product of its transitions
    under the delta rule, None for kernel scores.
    """

    sum_BnGFV: Tensor
    gate_BnG: Tensor
    carry_BnGFF: Tensor | None

    def pair(self, bucket_B1GFV: Tensor, odd_B: Tensor) -> tuple[Segments, Segments]:
        """Return (left, right) segments of the pairs.

        odd_B: rows whose first segment is a right one; their bucket becomes its left sibling. The gate and carry of a
        bucket are 1, because it is a state at the row's start.
        """
        ones = torch.ones_like(self.gate_BnG[:, :1])
        left_sum, right_sum = _pair_up(self.sum_BnGFV, bucket_B1GFV, torch.zeros_like(bucket_B1GFV), odd_B)
        left_gate, right_gate = _pair_up(self.gate_BnG, ones, ones, odd_B)
        left_carry = right_carry = None
        if self.carry_BnGFF is not None:
            eye = torch.eye(self.carry_BnGFF.shape[-1], dtype=ones.dtype, device=ones.device)
            eye = eye.expand_as(self.carry_BnGFF[:, :1])
            left_carry, right_carry = _pair_up(self.carry_BnGFF, eye, eye, odd_B)
        return Segments(left_sum, left_gate, left_carry), Segments(right_sum, right_gate, right_carry)

    def merge(self, right: Segments) -> Segments:
        """Return the pairs of self (left) and `right` as single segments."""
        passed, carry = self.sum_BnGFV, None
        if self.carry_BnGFF is not None and right.carry_BnGFF is not None:
            passed, carry = right.carry_BnGFF @ passed, right.carry_BnGFF @ self.carry_BnGFF
        total = torch.addcmul(right.sum_BnGFV, expand_like(right.gate_BnG, passed), passed)
        return Segments(total, self.gate_BnG * right.gate_BnG, carry)


def _pair_up(x: Tensor, before: Tensor, padding: Tensor, odd_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return (left, right) of the pairs of [before, x..] in odd rows and of [x.., padding] in even rows."""
    pairs = x.shape[1] // 2 + 1
    padded = torch.cat([before, x] + [padding] * (2 * pairs - x.shape[1]), dim=1)
    paired = torch.where(expand_like(odd_B, padded), padded[:, :-1], padded[:, 1:]).unflatten(1, (pairs, 2))
    return paired[:, :, 0], paired[:, :, 1]


@dataclass
class SegmentQueries:
    """Queries of X chunks, relative to the start of their segment.

    at_BX: number of the chunk, counted from position 0. fade_BXGC: product of gates from the segment's start to the
    token. read_BXGRF: queries after the transitions since the segment's start.
    """

    at_BX: Tensor
    fade_BXGC: Tensor
    read_BXGRF: Tensor

    def read(self, left: Segments, level: int, first_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (read of the left siblings (B, X, G, R, V), its gates (B, X, G, C)), and extend the queries in place
        to the start of their pairs. The gates are 0 for queries in left segments."""
        right_BX = (self.at_BX >> level) & 1 == 1
        pair_BX = (self.at_BX >> (level + 1)) - (first_B >> (level + 1)).unsqueeze(1)
        seen_BXGRV = self.read_BXGRF @ index_rowwise(left.sum_BnGFV, pair_BX)
        weight_BXGC = torch.where(expand_like(right_BX, self.fade_BXGC), self.fade_BXGC, 0)
        passed_BXG1 = torch.where(right_BX.unsqueeze(-1), index_rowwise(left.gate_BnG, pair_BX), 1).unsqueeze(-1)
        self.fade_BXGC = self.fade_BXGC * passed_BXG1
        if left.carry_BnGFF is not None:
            carried = self.read_BXGRF @ index_rowwise(left.carry_BnGFF, pair_BX)
            self.read_BXGRF = torch.where(expand_like(right_BX, carried), carried, self.read_BXGRF)
        return seen_BXGRV, weight_BXGC


@dataclass
class FenwickTree:
    """The chunks of one call. bits: c. write: keys after the gates and transitions up to the end of their chunk."""

    rows: MaskInputs
    bits: int
    layout: ChunkLayout
    scores: ChunkScores
    v_BNGCV: Tensor
    gates_BNGC: Tensor
    level_BNGJCL: Tensor
    write_BNGCF: Tensor

    @classmethod
    def from_inputs(
        cls, rows: MaskInputs, gates_BGT: Tensor, bits: int, layout: ChunkLayout | None = None
    ) -> FenwickTree:
        """Lay the tokens of one call out in chunks. layout: None for `ChunkLayout.block_aligned`."""
        if layout is None:
            layout = ChunkLayout.block_aligned(rows.start_B, rows.v_BGTV.shape[2], 1 << bits, 1 << bits)
        gates_BGT = gates_BGT.expand(rows.v_BGTV.shape[:3])
        q_BNGJCF = layout.to_chunks(rows.q_BGJTF, 3).permute(0, 3, 1, 2, 4, 5)
        k_BNGCF, v_BNGCV, gates_BNGC = (
            layout.to_chunks(x, 2).transpose(1, 2) for x in (rows.k_BGTF, rows.v_BGTV, gates_BGT)
        )
        beta = None if rows.beta_BGT is None else layout.to_chunks(rows.beta_BGT, 2).transpose(1, 2)
        level_BNGJCL = layout.to_chunks(rows.signals["level"], 1).permute(0, 1, 3, 4, 2, 5)
        scores = chunk_scores(q_BNGJCF, k_BNGCF, beta)
        write_BNGCF = scores.write_xCF * log_decay_to_end(gates_BNGC).exp().unsqueeze(-1)
        return cls(rows, bits, layout, scores, v_BNGCV, gates_BNGC, level_BNGJCL, write_BNGCF)

    def sweep(self, buckets_BLGFV: Tensor | None, levels: int) -> tuple[Tensor, Tensor | None]:
        """Return (out_BGJTV, buckets after the tokens, `levels` of them; None without buckets before)."""
        end_B = self.rows.start_B + self.rows.count_B
        segments = Segments(self.write_BNGCF.mT @ self.v_BNGCV, self.fade[..., -1], self.scores.carry())
        before = segments.sum_BnGFV[:, :0] if buckets_BLGFV is None else buckets_BLGFV
        out_BNGJCV, low_BlGFV = self._intra_chunk(), before[:, : self.bits]
        if low_BlGFV.shape[1]:
            out_BNGJCV[:, 0] += self._read_low_buckets(low_BlGFV)
            low_BlGFV = self._carry_low_buckets(low_BlGFV, segments)
            segments.sum_BnGFV[:, 0] += low_BlGFV.sum(1)
        before = F.pad(before, (0, 0, 0, 0, 0, 0, 0, levels - before.shape[1]))
        out, after = self._read_levels(segments, before, self._chunk_queries(), out_BNGJCV)
        after = [self._low_buckets_after(low_BlGFV, end_B), *after]
        return out, None if buckets_BLGFV is None else torch.cat(after, dim=1)[:, :levels]

    def sweep_by_chunk(self, buckets_BLGFV: Tensor | None, levels: int) -> tuple[Tensor, Tensor | None]:
        """Return (out_BGJTV, buckets after the tokens, `levels` of them; None without buckets before) of queries that
        read the state at the start of their chunk. Rows start and end at a chunk's border, so the buckets below c are
        zeros.
        """
        segments = Segments(self.write_BNGCF.mT @ self.v_BNGCV, self.fade[..., -1], self.scores.carry())
        before = segments.sum_BnGFV[:, :0] if buckets_BLGFV is None else buckets_BLGFV
        before = F.pad(before, (0, 0, 0, 0, 0, 0, 0, levels - before.shape[1]))
        q_BNGJCF = self.layout.to_chunks(self.rows.q_BGJTF, 3).permute(0, 3, 1, 2, 4, 5)
        queries = SegmentQueries(self._chunk_numbers(), torch.ones_like(self.gates_BNGC), q_BNGJCF.flatten(3, 4))
        zeros = self.v_BNGCV.new_zeros(*q_BNGJCF.shape[:5], self.v_BNGCV.shape[-1])
        out, after = self._read_levels(segments, before, queries, zeros)
        after = [torch.zeros_like(before[:, : self.bits]), *after]
        return out, None if buckets_BLGFV is None else torch.cat(after, dim=1)[:, :levels]

    def _read_levels(
        self, segments: Segments, before_BLGFV: Tensor, queries: SegmentQueries, out_BNGJCV: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return (out_BGJTV, the buckets from c on after the tokens), with what `queries` read added to out_BNGJCV."""
        end_B, first_B = self.rows.start_B + self.rows.count_B, self.layout.base_B
        end, after = self._end_query(segments, end_B), []
        for level, bucket_BGFV in enumerate(before_BLGFV[:, self.bits :].unbind(1)):
            left, right = segments.pair(bucket_BGFV.unsqueeze(1), (first_B >> level) & 1 == 1)
            seen_BNGRV, fade_BNGC = queries.read(left, level, first_B)
            weight_BNGJC = fade_BNGC.unsqueeze(3) * self._lambda(self.bits + level + 1)
            out_BNGJCV = out_BNGJCV + weight_BNGJC.unsqueeze(-1) * seen_BNGRV.unflatten(3, weight_BNGJC.shape[3:])
            seen_B1GFV, fade_B1G1 = end.read(left, level, first_B)
            after.append(seen_B1GFV * fade_B1G1.unsqueeze(-1))
            segments = left.merge(right)
        return self.layout.from_chunks(out_BNGJCV.permute(0, 2, 3, 1, 4, 5), 3), after

    @property
    def fade(self) -> Tensor:
        """Return the product of gates from the chunk's start to each token, (B, N, G, C)."""
        return self.gates_BNGC.cumsum(-1).exp()

    def _lambda(self, level: int) -> Tensor:
        return self.level_BNGJCL[..., min(level, self.level_BNGJCL.shape[-1] - 1)]

    def _lambdas(self, level_xCX: Tensor, lambdas: Tensor) -> Tensor:
        """Return lambda_xGJCX at the given levels, from `lambdas` (x, G, J, C, levels)."""
        index = level_xCX.clamp_max(lambdas.shape[-1] - 1)
        return lambdas.gather(-1, index.expand(*lambdas.shape[:-1], index.shape[-1]))

    def _intra_chunk(self) -> Tensor:
        """Return the output of each chunk from its own tokens, (B, N, G, J, C, V)."""
        at_C = torch.arange(1 << self.bits, device=self.v_BNGCV.device)
        lambda_BNGJCC = self._lambdas(bit_length(at_C.unsqueeze(1) ^ at_C, self.bits), self.level_BNGJCL)
        gates_BNG1CC = segsum(self.gates_BNGC).exp().unsqueeze(3)
        return (self.scores.inner_xJCC * lambda_BNGJCC * gates_BNG1CC) @ self.v_BNGCV.unsqueeze(3)

    def _chunk_numbers(self) -> Tensor:
        """Return the number of each chunk, counted from position 0, (B, N)."""
        return self.layout.base_B.unsqueeze(1) + torch.arange(self.layout.count, device=self.v_BNGCV.device)

    def _chunk_queries(self) -> SegmentQueries:
        return SegmentQueries(self._chunk_numbers(), self.fade, self.scores.read_xJCF.flatten(3, 4))

    def _end_query(self, segments: Segments, end_B: Tensor) -> SegmentQueries:
        """Return a query per feature at the position after the last token, which reads the new buckets."""
        at_B1 = (end_B >> self.bits).unsqueeze(1)
        here_B1 = at_B1 - self.layout.base_B.unsqueeze(1)
        through = segments.carry_BnGFF
        if through is None:
            eye = torch.eye(self.write_BNGCF.shape[-1], dtype=self.write_BNGCF.dtype, device=at_B1.device)
            through = eye.expand(*segments.gate_BnG.shape, -1, -1)
        return SegmentQueries(
            at_B1, index_rowwise(segments.gate_BnG, here_B1).unsqueeze(-1), index_rowwise(through, here_B1)
        )

    def _read_low_buckets(self, low_BlGFV: Tensor) -> Tensor:
        """Return what the queries of the first chunk read of the buckets below c, (B, G, J, C, V)."""
        level_BCl = self._level_of_low_buckets(self.rows.start_B, low_BlGFV.shape[1])
        lambda_BGJCl = self._lambdas(level_BCl[:, None, None], self.level_BNGJCL[:, 0])
        weight_BGJCl = lambda_BGJCl * self.fade[:, 0, :, None, :, None]
        seen_BlGJCV = self.scores.read_xJCF[:, 0].unsqueeze(1) @ low_BlGFV.unsqueeze(3)
        return torch.einsum("bgjcl,blgjcv->bgjcv", weight_BGJCl, seen_BlGJCV)

    def _level_of_low_buckets(self, start_B: Tensor, low: int) -> Tensor:
        """Return the level at which each slot of the first chunk reads bucket l of the state at `start`, (B, C, l)."""
        at_C = torch.arange(1 << self.bits, device=start_B.device)
        differs_BC1 = bit_length(at_C ^ (start_B % (1 << self.bits)).unsqueeze(1), self.bits).unsqueeze(2)
        return torch.maximum(differs_BC1, torch.arange(1, low + 1, device=start_B.device))

    def _carry_low_buckets(self, low_BlGFV: Tensor, segments: Segments) -> Tensor:
        """Return the buckets below c after the gates and transitions of the first chunk."""
        passed = low_BlGFV if segments.carry_BnGFF is None else segments.carry_BnGFF[:, :1] @ low_BlGFV
        return segments.gate_BnG[:, :1, :, None, None] * passed

    def _low_buckets_after(self, old_BlGFV: Tensor, end_B: Tensor) -> Tensor:
        """Return the buckets below c after the last token: sums over the tokens of its chunk, and over the old buckets
        if that chunk is also the first."""
        which_c = torch.arange(self.bits, device=end_B.device)
        here_B1 = ((end_B >> self.bits) - self.layout.base_B).unsqueeze(1)
        slot_B1 = (end_B % (1 << self.bits)).unsqueeze(1)
        at_C = torch.arange(1 << self.bits, device=end_B.device)
        into_BcC = bit_length(at_C ^ slot_B1, self.bits).unsqueeze(1) - 1 == which_c.unsqueeze(1)
        write_BcGCF = into_BcC[:, :, None, :, None] * index_rowwise(self.write_BNGCF, here_B1)
        new_BcGFV = write_BcGCF.mT @ index_rowwise(self.v_BNGCV, here_B1)
        old = old_BlGFV.shape[1]
        if not old:
            return new_BcGFV
        level_Bl = self._level_of_low_buckets(self.rows.start_B, old).take_along_dim(slot_B1.unsqueeze(2), 1).squeeze(1)
        into_Bcl = (level_Bl.unsqueeze(1) - 1 == which_c.unsqueeze(1)) & (here_B1 == 0).unsqueeze(2)
        return new_BcGFV + torch.einsum("bcl,blgfv->bcgfv", into_Bcl.to(old_BlGFV.dtype), old_BlGFV)
