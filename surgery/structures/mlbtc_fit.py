"""Levels of an MLBTC matrix, and their fit in a metric: block descent over levels, and allocation of rank by exchange.

    levels = make_levels((1, 2, (4, 4)), out, in_)
    fit = best_fit(lambda: LevelDescent(weight_OI, metric, levels), starts, limits, costs, exchange=True)

Each step fits one level and keeps the others fixed. A block along the diagonal gets its exact minimum, as in
`mlr_fit.py`. A grid is projected like a BTT matrix, and afterwards improved by its alternating least squares, with what
the other levels leave as its target.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.structures.base import MuP
from surgery.structures.btt import BTT, BTTLinear, Order, btt_dense, btt_linear, rows_in_order, strided_btt_linear
from surgery.structures.metric import Metric
from surgery.structures.mlr import add_level, level_product
from surgery.structures.mlr_fit import Descent, block_size

LevelSpec = int | tuple[int, ...]


@dataclass(frozen=True)
class DiagonalLevel:
    """p blocks along the diagonal of an (out, in_) matrix, each of rank r: L_k R_k^T with P_L = P_R = I.

    Cores: left (1, O, r), right (r, I).
    """

    blocks: int
    out: int
    in_: int

    def __post_init__(self) -> None:
        p = self.blocks
        if not 1 <= p <= min(self.out, self.in_) or any((p - 1) * block_size(n, p) >= n for n in (self.out, self.in_)):
            raise SurgeryError(
                f"mlbtc, out={self.out}, in={self.in_}: a level of {p} blocks would have an empty block. Use fewer "
                "blocks"
            )

    @property
    def limit(self) -> int:
        """The rank that a whole block can have, min(o, i)."""
        return min(block_size(self.out, self.blocks), block_size(self.in_, self.blocks))

    @property
    def unit(self) -> int:
        """The number of elements that a rank of 1 stores."""
        return self.out + self.in_

    @property
    def is_complete(self) -> bool:
        """Whether the level alone can be any matrix."""
        return self.blocks == 1

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of left and right."""
        return (1, self.out, rank), (rank, self.in_)

    def product(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return the product (..., O) of the level with x (..., I)."""
        return level_product(x, self.blocks, left[0], right)

    def add_to(self, dense_OI: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the matrix of the level to a dense matrix (O, I), in place."""
        add_level(dense_OI, self.blocks, left[0], right)

    def fans(self, rank: int) -> tuple[MuP, MuP]:
        """Return the fans of left, of one output, and of right, of one block."""
        return MuP(rank, self.out), MuP(block_size(self.in_, self.blocks), rank)


@dataclass(frozen=True)
class GridLevel:
    """A b x c grid of blocks of rank s, as in BTT: p = c, p' = b, r = b s, r' = c s, and P_R swaps the indices of b and
    c.

    P_L is the identity, or the order of the outputs if `order` is strided. most: largest s. Cores: left (b, c, s, a),
    right (c, d, b, s).
    """

    grid: tuple[int, int]
    out: int
    in_: int
    order: Order
    most: int | None = None

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise SurgeryError(
                f"mlbtc: the largest rank of the grid {list(self.grid)} must be 1 or more (got {self.most}). Leave it "
                "out, or use 1"
            )
        BTTLinear.resolve(self.config(1), self.out, self.in_)

    def config(self, rank: int) -> BTT:
        """Return the config of the level as a BTT matrix."""
        return BTT(self.grid, rank, self.order)

    @property
    def limit(self) -> int:
        """The rank that a block can have, min(a, d) or `most`."""
        full = BTTLinear.full_rank(self.config(1), self.out, self.in_)
        return full if self.most is None else min(full, self.most)

    @property
    def unit(self) -> int:
        """The number of elements that a rank of 1 stores."""
        return BTTLinear.params(self.config(1), self.out, self.in_)

    @property
    def is_complete(self) -> bool:
        """Whether the level alone can be any matrix."""
        return self.limit == BTTLinear.full_rank(self.config(1), self.out, self.in_)

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of left and right."""
        shapes = BTTLinear.shapes(self.config(rank), self.out, self.in_)
        return shapes["weight"], shapes["right"]

    def product(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return the product (..., O) of the level with x (..., I)."""
        run: Any = btt_linear if self.order == "contiguous" else strided_btt_linear
        y: Tensor = run(x, right, left, None, self.out)
        return y

    def add_to(self, dense_OI: Tensor, left: Tensor, right: Tensor) -> None:
        """Add the matrix of the level to a dense matrix (O, I), in place."""
        dense_OI += rows_in_order(btt_dense(right, left), self.grid[0], self.order)[: self.out, : self.in_]

    def fans(self, rank: int) -> tuple[MuP, MuP]:
        """Return the fans of left, of one row of blocks, and of right, of one column of blocks."""
        (b, c), (a, d) = self.grid, BTTLinear.block_shape(self.config(rank), self.out, self.in_)
        return MuP(c * rank, a), MuP(d, b * rank)


Level = DiagonalLevel | GridLevel


def make_levels(specs: Sequence[LevelSpec], out: int, in_: int, order: Order) -> tuple[Level, ...]:
    """Return the levels of an (out, in_) matrix.

    specs: of each level the number of blocks p, a grid (b, c), or (b, c, s) with the largest rank s. Raises
    SurgeryError if a level does not fit the matrix.
    """
    levels: list[Level] = []
    for spec in specs:
        if isinstance(spec, int):
            levels.append(DiagonalLevel(spec, out, in_))
        else:
            levels.append(GridLevel((spec[0], spec[1]), out, in_, order, spec[2] if len(spec) > 2 else None))
    return tuple(levels)


class LevelDescent(Descent):
    """An MLBTC matrix during its fit; see Descent. grids: level -> its BTT matrix.

    Modules are replaced, never changed.
    """

    def __init__(self, weight_OI: Tensor, metric: Metric, levels: Sequence[Level]):
        counts = [level.blocks if isinstance(level, DiagonalLevel) else 1 for level in levels]
        super().__init__(weight_OI, metric, counts)
        self.kinds = tuple(levels)
        self.grids: dict[int, BTTLinear] = {}

    def copy(self) -> LevelDescent:
        """Return an independent copy; factors and modules are shared."""
        other = super().copy()
        other.grids = dict(self.grids)
        return other

    def fit_level(self, level: int, rank: int) -> None:
        """Fit a level once: every block along the diagonal to its exact minimum, a grid by projection or by one sweep.

        A sweep that raises the error, by rounding, is undone.
        """
        if isinstance(kind := self.kinds[level], DiagonalLevel):
            super().fit_level(level, rank)
            return
        old, target_OI = self.grids.get(level), self.grid_target(level)
        if not rank:
            self.place_grid(level, None)
        elif old is None or old.config.rank != rank:
            new: Any = BTTLinear.project(target_OI, kind.config(rank), self.metric)
            if self.weight_OI.is_meta:  # one step is counted for all, most of which are sweeps
                new.sweep(target_OI, self.metric)
            self.place_grid(level, new)
        else:
            before, new = self.error(), copy.deepcopy(old)
            if new.sweep(target_OI, self.metric) is None:
                new = BTTLinear.project(target_OI, kind.config(rank), self.metric)
            self.place_grid(level, new)
            if self.error() > before:
                self.place_grid(level, old)

    def grid_target(self, level: int) -> Tensor:
        """Return the matrix (O, I) that a grid should be, with all other levels fixed."""
        old = self.grids.get(level)
        return self.gap_OI.clone() if old is None else self.gap_OI + old.dense()

    def place_grid(self, level: int, linear: Any | None) -> None:
        """Replace the matrix of a grid, or remove it, and bring the gap up to date."""
        change_OI = torch.zeros_like(self.weight_OI) if linear is None else linear.dense()
        if old := self.grids.pop(level, None):
            change_OI = change_OI - old.dense()
        if linear is not None:
            self.grids[level] = linear
        self.change_gap(change_OI)

    def tails(self, level: int) -> list[float]:
        """Return tail[r], the part of the squared error that a level of rank r leaves if all other levels stay as they
        are.
        """
        kind = self.kinds[level]
        if isinstance(kind, DiagonalLevel):
            return super().tails(level)
        return BTTLinear.block_tails(self.grid_target(level), kind.config(1), self.metric)

    def block_target(self) -> Tensor:
        """Return the matrix (O, I) that the blocks along the diagonal together should be: what the grids leave."""
        target_OI = self.weight_OI.clone()
        for grid in self.grids.values():
            target_OI -= grid.dense()
        return target_OI

    def read_cores(self, level: int, left: Tensor, right: Tensor) -> None:
        """Take the cores of a level, of any kind."""
        kind = self.kinds[level]
        if isinstance(kind, DiagonalLevel):
            self.read_level(level, left[0], right)
            return
        self.ranks[level] = left.shape[2]
        cores = {"weight": left.clone(), "right": right.clone()}
        self.place_grid(level, BTTLinear.from_cores(kind.config(left.shape[2]), self.gap_OI.shape, cores))

    def level_cores(self, level: int) -> tuple[Tensor, Tensor]:
        """Return the cores left and right of a level, of any kind."""
        if level in self.grids:
            return self.grids[level].weight.data, self.grids[level].right.data
        left_Or, right_rI = self.level_factors(level)
        return left_Or[None], right_rI
