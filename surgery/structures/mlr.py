"""MLR, multi-level low rank: W = sum_l diag(L[l,1] R[l,1], .., L[l,p] R[l,p]), with p = 2^(l-1) blocks on level l.

    o,i: one block, ceil(O / p) x ceil(I / p) (the last one may be smaller)   r_l: rank of the blocks of level l, 0 allowed

Level 1 is low rank, and every further level adds pairs of low-rank blocks along the diagonal. A unit of rank stores O +
I elements on every level. Kuang et al. 2025, "Customizing the Inductive Biases of Softmax Attention", eq. 4, after
Parshakova et al. 2023, "Factor fitting, rank allocation, and partitioning in multilevel low rank matrices".

The fit, with exact steps for single blocks and an exchange of rank between levels, is in `mlr_fit.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.structures.base import STRUCTURES, MuP, Rank, StructureConfig, StructuredLinear, curve_ranks
from surgery.structures.btt import zero_pad
from surgery.structures.metric import Metric
from surgery.structures.mlr_fit import Descent, best_descent, block_size

DEFAULT_LEVELS = 4
CURVE_POINTS = 6  # ranks of `rank_error_curve`, which fits the matrix at each of them


@dataclass(frozen=True)
class MLR(StructureConfig):
    """Config of a multi-level low-rank matrix.

    levels: number of levels L; None: 4, or as many as the matrix has rows and columns for. ranks: r_1 .. r_L; None:
    `project` chooses them, and a matrix without a fit spreads the rank evenly. rank: the sum of `ranks`.
    """

    name: ClassVar[str] = "mlr"
    levels: int | None = None
    ranks: tuple[int, ...] | None = None
    rank: Rank = None


def most_levels(out: int, in_: int) -> int:
    """Return the largest number of levels without an empty block."""
    levels = 1
    while all((2**levels - 1) * block_size(n, 2**levels) < n for n in (out, in_)):
        levels += 1
    return levels


def rank_limits(levels: int, out: int, in_: int) -> list[int]:
    """Return the rank that a whole block of each level can have, min(o, i)."""
    return [min(block_size(out, 2**level), block_size(in_, 2**level)) for level in range(levels)]


def spread_evenly(rank: int, limits: list[int]) -> tuple[int, ...]:
    """Return ranks with the sum `rank`, as equal as their limits allow; coarse levels get the remainder."""
    ranks = [0] * len(limits)
    while (unspent := rank - sum(ranks)) > 0:
        open_levels = [level for level, limit in enumerate(limits) if ranks[level] < limit]
        share = max(1, unspent // len(open_levels))
        for level in open_levels:
            ranks[level] += min(share, limits[level] - ranks[level], rank - sum(ranks))
    return tuple(ranks)


@STRUCTURES.register(MLR)
class MLRLinear(StructuredLinear):
    """MLR linear layer. Cores: `weight` (1, O, R) holds the left factors of all levels side by side, `right<l>` (r_l,
    I) the right factors of level l; R is the sum of the ranks. Levels of rank 0 have no core."""

    weight: Tensor

    @classmethod
    def resolve(cls, config: Any, out: int, in_: int) -> Any:
        """Return the config with `levels` as a number and `rank` as the sum of given `ranks`.

        SurgeryError if they do not fit.
        """
        most = most_levels(out, in_)
        level_count = len(config.ranks) if config.ranks and config.levels is None else config.levels
        levels = min(DEFAULT_LEVELS, most) if level_count is None else level_count
        if not 1 <= levels <= most:
            raise SurgeryError(
                f"{config} cannot divide a matrix of out={out}, in={in_}: {levels} levels; use 1 to {most}"
            )
        if config.ranks is None:
            return replace(config, levels=levels)
        limits = rank_limits(levels, out, in_)
        if len(config.ranks) != levels or not all(0 <= r <= limit for r, limit in zip(config.ranks, limits)):
            raise SurgeryError(
                f"mlr, out={out}, in={in_}: ranks must be {levels} numbers from 0 to {limits}, one for each level "
                f"(got {list(config.ranks)}). Set levels to the number of ranks"
            )
        total = sum(config.ranks)
        if total < 1 or config.rank not in (None, total) or total > min(out, in_):
            raise SurgeryError(
                f"{config}, out={out}, in={in_}: the sum of ranks is {total}; it must be the rank, and 1 to "
                f"{min(out, in_)}"
            )
        return replace(config, levels=levels, rank=total, ranks=tuple(config.ranks))

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return the smallest rank that represents every (out, in) matrix exactly: that of level 1 alone."""
        return min(out, in_)

    @classmethod
    def level_ranks(cls, config: Any, out: int, in_: int) -> tuple[int, ...]:
        """Return the rank of each level of a config whose rank is a number."""
        if config.ranks is not None:
            return tuple(config.ranks)
        config = cls.resolve(config, out, in_)
        return spread_evenly(config.rank, rank_limits(config.levels, out, in_))

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every core (layout in the class docstring)."""
        ranks = cls.level_ranks(config, out, in_)
        rights = {f"right{level}": (r, in_) for level, r in enumerate(ranks, 1) if r}
        return {"weight": (1, out, sum(ranks)), **rights}

    @classmethod
    def params(cls, config: Any, out: int, in_: int) -> int:
        """Return the number of stored elements, which does not depend on the levels."""
        return int(config.rank * (out + in_))

    @classmethod
    def project(cls, weight_OI: Tensor, config: Any, metric: Metric | None = None) -> StructuredLinear:
        """Return the best fit that block descent in the metric finds; exact at full rank.

        There is no closed form beyond one level. Without given `ranks`, the descent starts from ranks that fall by half from
        level to level and from each level alone, and exchanges rank between levels while that lowers the error. The result is never worse than
        low rank.
        """
        out, in_ = weight_OI.shape
        metric, config = metric or Metric(), cls.resolve(config, out, in_)
        limits = rank_limits(config.levels, out, in_)
        if config.ranks is None and config.rank >= min(out, in_):
            config = replace(config, ranks=(min(out, in_), *[0] * (config.levels - 1)))
        starts = [config.ranks] if config.ranks else starting_ranks(config.rank, limits)
        return cls._from_descent(best_descent(weight_OI, metric, starts, limits, config.ranks is None), config)

    @classmethod
    def _from_descent(cls, descent: Descent, config: Any) -> StructuredLinear:
        out, in_ = descent.weight_OI.shape
        config = replace(config, ranks=tuple(descent.ranks), rank=sum(descent.ranks))
        factors = {level: descent.level_factors(level) for level, rank in enumerate(config.ranks) if rank}
        cores = {f"right{level + 1}": right_rI for level, (_, right_rI) in factors.items()}
        cores["weight"] = torch.cat([left_Or for left_Or, _ in factors.values()], dim=1)[None]
        return cls.from_cores(config, (out, in_), cores)

    @classmethod
    def rank_error_curve(
        cls, weight_OI: Tensor, config: Any, metric: Metric, steps: int = CURVE_POINTS
    ) -> list[tuple[Any, float]]:
        """Return (config, squared error in the metric) at about `steps` ranks, cheapest first.

        Ranks that store more than the dense matrix are left out, except for the full rank. Each point is a fit from the
        best of the starting ranks, without exchange; the configs name these ranks.
        """
        out, in_ = weight_OI.shape
        config = cls.resolve(config, out, in_)
        full, limits = min(out, in_), rank_limits(config.levels, out, in_)
        ranks = [*curve_ranks(max(1, min(full, out * in_ // (out + in_))), min(steps, CURVE_POINTS)), full]
        curve = []
        for rank in [config.rank] if config.ranks else dict.fromkeys(ranks):
            starts = [(full, *[0] * (config.levels - 1))] if rank >= full else starting_ranks(rank, limits)
            fit = best_descent(weight_OI, metric, [config.ranks] if config.ranks else starts, limits, exchange=False)
            curve.append((replace(config, rank=rank, ranks=tuple(fit.ranks)), max(0.0, fit.error())))
        return curve

    @torch.no_grad()
    def sweep(self, weight_OI: Tensor, metric: Metric) -> float | None:
        """Run one sweep in the metric, in place: all left factors by least squares, then each block by an exact step.

        With a full G rows of different blocks depend on each other, and only the steps of single blocks are made.
        Returns the squared error that is left, or None if `project` is already optimal (one level, or full rank).
        """
        ranks = self.level_ranks(self.config, self.out_features, self.in_features)
        if ranks[0] >= min(weight_OI.shape) or not any(ranks[1:]):
            return None
        descent = Descent(weight_OI, metric, [2**level for level in range(len(ranks))])
        for p, left_Or, right_rI in self._levels():
            descent.read_level(p.bit_length() - 1, left_Or.data, right_rI.data)
        if metric.g_OO is None or metric.g_OO.dim() == 1:
            descent.solve_left()
        descent.sweep(ranks)
        for p, left_Or, right_rI in self._levels():
            for core, factor in zip((left_Or, right_rI), descent.level_factors(p.bit_length() - 1)):
                core.data.copy_(factor)
        return descent.error()

    def _levels(self) -> list[tuple[int, Tensor, Tensor]]:
        """Return (blocks p, left (O, r), right (r, I)) of each level that has a rank."""
        levels, start = [], 0
        for level, r in enumerate(self.level_ranks(self.config, self.out_features, self.in_features)):
            if r:
                left_Or = self.weight[0, :, start : start + r]
                levels.append((2**level, left_Or, getattr(self, f"right{level + 1}")))
            start += r
        return levels

    def product(self, x: Tensor) -> Tensor:
        """Return B x (..., O) without the bias, for x (..., I)."""
        first, *others = self._levels()
        y = level_product(x, *first)
        for level in others:
            y = y + level_product(x, *level)
        return y

    def dense(self) -> Tensor:
        """Return B as a dense matrix (O, I)."""
        dense_OI = self.weight.new_zeros((self.out_features, self.in_features))
        for level in self._levels():
            add_level(dense_OI, *level)
        return dense_OI

    def macs(self) -> int:
        """Return multiply-accumulates per token."""
        return self.config.rank * (self.out_features + self.in_features)  # type: ignore[no-any-return]

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of each core.

        The outputs sum over the ranks of all levels, so the left factors are one layer; a right factor reads one block.
        """
        right = {
            f"right{level}": MuP(block_size(self.in_features, 2 ** (level - 1)), r)
            for level, r in enumerate(self.level_ranks(self.config, self.out_features, self.in_features), 1)
            if r
        }
        return {**right, "weight": MuP(self.config.rank, self.out_features)}


def add_level(dense_OI: Tensor, blocks: int, left_Or: Tensor, right_rI: Tensor) -> None:
    """Add the matrix of one level to a dense matrix (O, I), in place."""
    o, i = (block_size(n, blocks) for n in dense_OI.shape)
    for k in range(blocks):
        rows, columns = slice(k * o, (k + 1) * o), slice(k * i, (k + 1) * i)
        dense_OI[rows, columns] += left_Or[rows] @ right_rI[:, columns]


def level_product(x: Tensor, blocks: int, left_Or: Tensor, right_rI: Tensor) -> Tensor:
    """Return the product (..., O) of one level with x (..., I)."""
    if blocks == 1:
        return F.linear(F.linear(x, right_rI), left_Or)
    (out, rank), in_ = left_Or.shape, right_rI.shape[1]
    o, i = block_size(out, blocks), block_size(in_, blocks)
    if blocks * i != in_:
        x = F.pad(x, (0, blocks * i - in_))
    right_rpi = zero_pad(right_rI, rank, blocks * i).view(rank, blocks, i)
    left_por = zero_pad(left_Or, blocks * o, rank).reshape(blocks, o, rank)
    z_Npr = torch.einsum("npi,rpi->npr", x.reshape(-1, blocks, i), right_rpi)
    y_Npo = torch.einsum("npr,por->npo", z_Npr, left_por)
    return y_Npo.reshape(*x.shape[:-1], blocks * o)[..., :out]


def halved_ranks(rank: int, limits: list[int]) -> tuple[int, ...]:
    """Return ranks with the sum `rank` of which each level has about half of the one before; level 1 gets the
    remainder.
    """
    shares = [2.0**-level for level in range(len(limits))]
    ranks = [min(limit, int(rank * share / sum(shares))) for share, limit in zip(shares, limits)]
    return rank - sum(ranks[1:]), *ranks[1:]


def starting_ranks(rank: int, limits: list[int]) -> list[tuple[int, ...]]:
    """Return the ranks from which the exchange starts: each level half of the one before, and each level alone as far
    as its limit allows.
    """
    starts = [halved_ranks(rank, limits)]
    for level, limit in enumerate(limits):
        level_rank = min(rank, limit)
        ranks = [0] * len(limits)
        ranks[level] = level_rank
        ranks[0] += rank - level_rank
        starts.append(tuple(ranks))
    return list(dict.fromkeys(starts))
