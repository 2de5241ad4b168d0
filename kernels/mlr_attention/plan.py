"""What the kernels of MLR attention are compiled for: levels, widths and tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton


class AttentionTiles(NamedTuple):
    """M queries, N keys; registers of a thread, at most."""

    M: int
    N: int
    warps: int
    stages: int
    registers: int | None = None
    hold: bool = False  # whether q stays in registers, for zones to mask
    run: int = 3  # key tiles of a zone that a walk of its own pays for


class MLRPlan(NamedTuple):
    """What the kernels are compiled for."""

    ranks: tuple[int, ...]
    extents: tuple[int, ...]  # of levels 2 .. L
    nested: bool
    window: int | None
    softcap: float | None
    scaling: float
    holes: bool

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(sum(self.ranks[:level]) for level in range(len(self.ranks) + 1))

    def merge_levels(self, slots: int) -> tuple[MLRPlan, int]:
        """With levels that every pair has as one, as in prompts up to their extents; and how many are gone."""
        reach = min(slots, self.window or slots)
        if self.nested:  # blocks begin at position 0, which slots need not where some hold nothing
            reach = slots if not self.holes else 1 << 62
        gone = sum(extent >= reach for extent in self.extents)
        ranks = (sum(self.ranks[: gone + 1]), *self.ranks[gone + 1 :])
        return self._replace(ranks=ranks, extents=self.extents[gone:]), gone

    def walks(self) -> list[tuple[int, int, int]]:
        """(A, B, last zone) of both walks of the forward: far zones with the width of the first level, and the others
        with that of all dims. A third width between them was measured to cost more than it saves."""
        far, full = split_width(self.cuts[1]), split_width(self.cuts[-1])
        if sum(far) == sum(full):
            return [(0, 0, 0), (*full, len(self.ranks))]
        return [(*far, sum(cut <= sum(far) for cut in self.cuts[1:])), (*full, len(self.ranks))]

    def crossing(self, M: int, N: int) -> int:
        """How many levels may begin in one tile, at most."""
        if self.nested:
            return sum(bool(extent % M or extent % N) for extent in self.extents)
        spans = [(-extent, M + N - extent) for extent in self.extents]  # where low_l begins, of tiles that meet it
        return max((sum(a <= start < b for a, b in spans) for start, _ in spans), default=0)

    def halves(self) -> tuple[int, int, int]:
        """(A, B, last zone of at most A dims) of the backward, which makes gradients of A and of B dims apart; both of
        64 or more, which are made faster than narrower ones."""
        a = max(16, triton.next_power_of_2(self.cuts[-1]))
        if self.cuts[1] > a // 2 or a < 128 or len(self.ranks) == 1:
            return a, 0, 0
        return a // 2, a // 2, sum(cut <= a // 2 for cut in self.cuts[1:])


def split_width(dims: int) -> tuple[int, int]:
    """dims as A + B, powers of two that a matrix product takes."""
    units = -(-dims // 16)
    a = 1 << (units.bit_length() - 1)
    b = triton.next_power_of_2(units - a) if units > a else 0
    return (32 * a, 0) if a == b else (16 * a, 16 * b)


def forward_tiles(dtype: torch.dtype, dims: int, plan: MLRPlan) -> AttentionTiles:
    """The fastest on one H200 (2026-11-21, triton 3.6, bfloat16) of 1,024 to 16,384 tokens."""
    if dtype == torch.float32:
        return AttentionTiles(64, 32, 4, 1)
    if dims > 64:
        return AttentionTiles(128, 64, 8, 3) if dims <= 128 else AttentionTiles(64, 32, 4, 2)
    return (
        AttentionTiles(64, 64, 4, 3, 168, True, 1)
        if plan.crossing(64, 64)
        else AttentionTiles(128, 64, 8, 3, 128, plan.nested)
    )


def backward_tiles(dtype: torch.dtype, dims: int, plan: MLRPlan) -> tuple[AttentionTiles, AttentionTiles]:
    """For queries, for keys. Registers bounded, one level gains by more programs at a time, several lose by spilling."""
    if dtype == torch.float32:
        return (AttentionTiles(32, 32, 4, 1),) * 2
    if dims <= 64:
        return AttentionTiles(64, 64, 4, 3, 168 if len(plan.ranks) == 1 else None), AttentionTiles(64, 64, 4, 3)
    return (AttentionTiles(64, 64, 4, 2) if dims <= 128 else AttentionTiles(32, 32, 4, 1),) * 2
