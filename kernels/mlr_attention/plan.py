"""Plans of MLR attention's launches: levels, widths, tiles, and the arguments that the kernels share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor


class AttentionTiles(NamedTuple):
    """Tile of M queries and N keys, and how it is compiled.

    registers: the limit per thread, None for the compiler's choice. hold: whether q stays in registers over all zones.
    run: the fewest key tiles that make a zone; shorter zones are processed with the remaining tiles.
    """

    M: int
    N: int
    warps: int
    stages: int
    registers: int | None = None
    hold: bool = False
    run: int = 3


class ZoneWidths(NamedTuple):
    """Width A + B of the products in the zones up to `last_zone` that no narrower width covers; powers of two, B may be
    0.
    """

    A: int
    B: int
    last_zone: int


class MLRPlan(NamedTuple):
    """Compile-time description of a score. ranks: dimensions per level. extents: of levels 2 ..

    L. nested: the form of the extents. holes: whether rows have padding in front.
    """

    ranks: tuple[int, ...]
    extents: tuple[int, ...]
    nested: bool
    window: int | None
    softcap: float | None
    scaling: float
    holes: bool

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first dimension of each level, and the number of dimensions."""
        return tuple(sum(self.ranks[:level]) for level in range(len(self.ranks) + 1))

    def merge_levels(self, slots: int) -> tuple[MLRPlan, int]:
        """Return the plan with all levels that are near in every pair of so many slots merged into the first one, and
        how many were merged."""
        reach = min(slots, self.window or slots)
        if self.nested:  # a block begins at position 0, and with padding any position may be in the first slot
            reach = slots if not self.holes else 1 << 62
        merged = sum(extent >= reach for extent in self.extents)
        ranks = (sum(self.ranks[: merged + 1]), *self.ranks[merged + 1 :])
        return self._replace(ranks=ranks, extents=self.extents[merged:]), merged

    def walks(self) -> tuple[ZoneWidths, ZoneWidths]:
        """Return the forward's two widths: of zones with the first level's dimensions, and of the others with all
        dimensions. A third width between them was measured to cost more than it saves."""
        far, full = split_width(self.cuts[1]), split_width(self.cuts[-1])
        if sum(far) == sum(full):
            return ZoneWidths(0, 0, 0), ZoneWidths(*full, len(self.ranks))
        return ZoneWidths(*far, sum(cut <= sum(far) for cut in self.cuts[1:])), ZoneWidths(*full, len(self.ranks))

    def crossing(self, M: int, N: int) -> int:
        """Return how many levels may begin in one tile of M queries and N keys, at most."""
        if self.nested:
            return sum(bool(extent % M or extent % N) for extent in self.extents)
        spans = [(-extent, M + N - extent) for extent in self.extents]  # where low_l begins, of tiles that meet it
        return max((sum(a <= start < b for a, b in spans) for start, _ in spans), default=0)

    def halves(self) -> ZoneWidths:
        """Return the backward's width, whose gradients of A and of B dimensions are computed apart: zones up to
        `last_zone` need the first A alone. Both are 64 or more, which is faster than narrower products."""
        a = max(16, triton.next_power_of_2(self.cuts[-1]))
        if self.cuts[1] > a // 2 or a < 128 or len(self.ranks) == 1:
            return ZoneWidths(a, 0, 0)
        return ZoneWidths(a // 2, a // 2, sum(cut <= a // 2 for cut in self.cuts[1:]))


@dataclass(frozen=True)
class AttentionInputs:
    """One call of the kernels.

    q_BHTR, k_BGSR, v_BGSV: rows aligned as by `align_rows`. biases_HZ: per head the sum of biases below level z, z = 0
    .. L, or None. ends: positions in each row, (B,) or (1,) where rows are alike. plan: the score.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    biases: Tensor | None
    ends: Tensor
    plan: MLRPlan

    def part(self, rows: slice) -> AttentionInputs:
        """Return the call of some rows of the batch."""
        ends = self.ends if len(self.ends) == 1 else self.ends[rows]
        return replace(self, q=self.q[rows], k=self.k[rows], v=self.v[rows], ends=ends)

    def scalars(self) -> tuple[float, int, int, int, int, int]:
        """Return (scaling, window, T, S, heads, heads per group), as the kernels take them."""
        H, G = self.q.shape[1], self.v.shape[1]
        return self.plan.scaling, self.plan.window or 0, self.q.shape[2], self.v.shape[2], H, H // G

    def strides(self, *gradients: Tensor) -> tuple[int, ...]:
        """Return the strides of rows, heads and tokens of q, k, v and the gradients, and that of ends."""
        tensors = (self.q, self.k, self.v, *gradients)
        return *(step for x in tensors for step in x.stride()[:3]), 0 if self.ends.shape[0] == 1 else 1

    def options(self, tiles: AttentionTiles) -> dict[str, Any]:
        """Return the compile-time constants that all three kernels share."""
        plan, V = self.plan, self.v.shape[-1]
        return {
            "EXTENTS": (0, *plan.extents),
            "CUTS": plan.cuts,
            "L": len(plan.ranks),
            "HOLES": plan.holes,
            "WINDOWED": plan.window is not None,
            "NESTED": plan.nested,
            "BIASED": self.biases is not None,
            "CAP": plan.softcap or 0.0,
            "CROSSING": plan.crossing(tiles.M, tiles.N),
            "R": self.q.shape[-1],
            "V": V,
            "M": tiles.M,
            "N": tiles.N,
            "DV": max(16, triton.next_power_of_2(V)),
            "PRECISION": "tf32x3" if self.q.dtype == torch.float32 else None,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
            **({} if tiles.registers is None else {"maxnreg": tiles.registers}),
        }


def split_width(dims: int) -> tuple[int, int]:
    """Return (A, B) with A + B >= dims: powers of two that a matrix product takes, or 0 for B."""
    units = -(-dims // 16)
    a = 1 << (units.bit_length() - 1)
    b = triton.next_power_of_2(units - a) if units > a else 0
    return (32 * a, 0) if a == b else (16 * a, 16 * b)


def forward_tiles(dtype: torch.dtype, dims: int, plan: MLRPlan) -> AttentionTiles:
    """Return the forward's tile for keys or values of `dims` dimensions, whichever are wider: the fastest on one H200
    (2026-11-21, Triton 3.6, bfloat16) from 1,024 to 16,384 tokens."""
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
    """Return the tiles of `mlr_queries` and of `mlr_keys`.

    A limit of registers lets more programs run at a time: with one level that is faster, with several levels registers
    spill.
    """
    if dtype == torch.float32:
        return (AttentionTiles(32, 32, 4, 1),) * 2
    if dims <= 64:
        return AttentionTiles(64, 64, 4, 3, 168 if len(plan.ranks) == 1 else None), AttentionTiles(64, 64, 4, 3)
    return (AttentionTiles(64, 64, 4, 2) if dims <= 128 else AttentionTiles(32, 32, 4, 1),) * 2
