"""Segments of a Fenwick tree, a level at a time, and the queries that read them (Guo et al. 2025, section 3.3).

Level l pairs segments of 2^l chunks: queries in the right one read the left one's state; then the pair is one segment
of the next level. So that a reader need not know what lies between, its `fade` (gates) and `read` (transitions, of the
delta rule) are carried to the start of its segment as segments grow.

Rows start anywhere. The buckets a row brings along are just the left siblings it lacks: where its first segment of a
level is a right one, the row's bucket of that level is put before it.      n segments, X chunks that read, R queries
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def bit_length(x: Tensor, bits: int) -> Tensor:
    """min(int.bit_length, bits) of integers >= 0."""
    return torch.bucketize(x, 2 ** torch.arange(bits, device=x.device), right=True)


def pick(x_BN: Tensor, index_BX: Tensor) -> Tensor:
    """Of each row the entries of that index."""
    row_B1 = torch.arange(len(x_BN), device=x_BN.device).unsqueeze(1)
    return x_BN[row_B1, index_BX]


def spread(x: Tensor, like: Tensor) -> Tensor:
    """With axes behind, up to those of `like`."""
    return x.view(*x.shape, *[1] * (like.dim() - x.dim()))


@dataclass
class Segments:
    """One level: sums at their segments' ends, gates over segments (numbers <= 1), transitions or None."""

    sum_BnGFV: Tensor
    gate_BnG: Tensor
    carry_BnGFF: Tensor | None

    def paired(self, bucket_B1GFV: Tensor, odd_B: Tensor) -> tuple[Segments, Segments]:
        """(left, right) of the pairs; the rows of which the first segment is a right one have their bucket before it.
        What was carried in a bucket is carried to the row's start already."""
        ones = torch.ones_like(self.gate_BnG[:, :1])
        left_sum, right_sum = _paired(self.sum_BnGFV, bucket_B1GFV, torch.zeros_like(bucket_B1GFV), odd_B)
        left_gate, right_gate = _paired(self.gate_BnG, ones, ones, odd_B)
        left_carry = right_carry = None
        if self.carry_BnGFF is not None:
            eye = torch.eye(self.carry_BnGFF.shape[-1], dtype=ones.dtype, device=ones.device)
            eye = eye.expand_as(self.carry_BnGFF[:, :1])
            left_carry, right_carry = _paired(self.carry_BnGFF, eye, eye, odd_B)
        return Segments(left_sum, left_gate, left_carry), Segments(right_sum, right_gate, right_carry)

    def then(self, right: Segments) -> Segments:
        """Each pair as one segment."""
        passed, carry = self.sum_BnGFV, None
        if self.carry_BnGFF is not None and right.carry_BnGFF is not None:
            passed, carry = right.carry_BnGFF @ passed, right.carry_BnGFF @ self.carry_BnGFF
        total = torch.addcmul(right.sum_BnGFV, spread(right.gate_BnG, passed), passed)
        return Segments(total, self.gate_BnG * right.gate_BnG, carry)


def _paired(x: Tensor, before: Tensor, nothing: Tensor, odd_B: Tensor) -> tuple[Tensor, Tensor]:
    """[before, x..] of odd rows, [x.., nothing] of even ones, in pairs: (left, right)."""
    pairs = x.shape[1] // 2 + 1
    every = torch.cat([before, x] + [nothing] * (2 * pairs - x.shape[1]), dim=1)
    even = torch.where(spread(odd_B, every), every[:, :-1], every[:, 1:]).unflatten(1, (pairs, 2))
    return even[:, :, 0], even[:, :, 1]


@dataclass
class Reader:
    """Queries of some chunks, carried to the starts of their segments. at_BX: chunks, counted from position 0."""

    at_BX: Tensor
    fade_BXGC: Tensor
    read_BXGRF: Tensor

    def reads(self, left: Segments, level: int, first_B: Tensor) -> tuple[Tensor, Tensor]:
        """What they see of the left siblings, (B, X, G, R, V), and how much of it is left, (B, X, G, C): zero where
        they are in left segments themselves. Carries them on to the pairs' starts."""
        right_BX = (self.at_BX >> level) & 1 == 1
        pair_BX = (self.at_BX >> (level + 1)) - (first_B >> (level + 1)).unsqueeze(1)
        seen_BXGRV = self.read_BXGRF @ pick(left.sum_BnGFV, pair_BX)
        weight_BXGC = torch.where(spread(right_BX, self.fade_BXGC), self.fade_BXGC, 0)
        passed_BXG1 = torch.where(right_BX.unsqueeze(-1), pick(left.gate_BnG, pair_BX), 1).unsqueeze(-1)
        self.fade_BXGC = self.fade_BXGC * passed_BXG1
        if left.carry_BnGFF is not None:
            carried = self.read_BXGRF @ pick(left.carry_BnGFF, pair_BX)
            self.read_BXGRF = torch.where(spread(right_BX, carried), carried, self.read_BXGRF)
        return seen_BXGRV, weight_BXGC
