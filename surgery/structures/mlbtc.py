"""MLBTC, multi-level block tensor contraction: W = sum_l alpha_l P_L (+)_k' L[l,k'] P_R (+)_k R[l,k]^T.

A level is p blocks along the diagonal, each of rank r (P_L and P_R are the identity), or a b x c grid of blocks of rank
s, which is BTT. MLR is all levels of the first kind, with 1, 2, 4, .. blocks; BTT is one level of the second. Kuang et
al. 2025, "Customizing the Inductive Biases of Softmax Attention", definition 3.1, eq. 8, and appendix C.

A rank of 1 stores O + I elements in a level of blocks, and b c (a + d) in a grid of blocks of a x d, so levels share a
number of elements and not a number of ranks. alpha_l is part of the left factor of its level; `weight_norm: cores`
trains a scale of its own for each core, 1 at first, which is folded into the core when the training ends.

The fit is in `mlbtc_fit.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.structures.base import STRUCTURES, MuP, Rank, StructureConfig, StructuredLinear, curve_ranks
from surgery.structures.btt import BTTLinear, Order, sqrt_blocks
from surgery.structures.metric import Metric
from surgery.structures.mlbtc_fit import DiagonalLevel, GridLevel, Level, LevelDescent, make_levels
from surgery.structures.mlr_fit import best_fit, total_cost

CURVE_POINTS = 6  # ranks of `rank_error_curve`, which fits the matrix at each of them
MOST_LEVELS = 32


@dataclass(frozen=True)
class MLBTC(StructureConfig):
    """Config of an MLBTC matrix.

    levels: one entry for each level, or None for low rank and BTT, (1, (4, 4)). An entry is
        p              p blocks along the diagonal; 1 is low rank
        (b, c)         a grid of b x c blocks
        (b, c, s)      the same with a block rank of at most s
        "sqrt"         a grid of about the square root of each dimension
        "monarch"      the same with a block rank of at most 1
    ranks: rank of each level, 0 allowed; None: `project` chooses them, and a matrix without a fit spreads its size
    evenly over the levels. rank: size R; all levels together store about R (O + I) elements, as low rank of rank R
    does. order: order of the outputs of grids, as in BTT.
    """

    name: ClassVar[str] = "mlbtc"
    levels: tuple[int | tuple[int, int] | tuple[int, int, int] | Literal["sqrt", "monarch"], ...] | None = None
    ranks: tuple[int, ...] | None = None
    rank: Rank = None
    order: Order = "contiguous"


def resolve_level(level: Any, out: int, in_: int) -> Any:
    """Return a level with "sqrt" and "monarch" as grids in numbers."""
    if not isinstance(level, str):
        return tuple(level) if isinstance(level, Sequence) else level
    grid = (sqrt_blocks(out), sqrt_blocks(in_))
    return grid if level == "sqrt" else (*grid, 1)


def spread_cost(budget: int, costs: Sequence[int], limits: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """Return ranks that cost at most `budget`, about the same on each level; if none fits, `least` ranks of the
    cheapest level.

    costs, limits: cost of one rank and largest rank of each level. The remainder goes to the cheapest levels. A larger
    budget never gives a smaller total cost.
    """

    def even(share: int) -> list[int]:
        return [min(limit, share // cost) for cost, limit in zip(costs, limits)]

    low, high = 0, budget  # the largest share that all levels can have
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total_cost(even(middle), costs) <= budget else (low, middle - 1)
    ranks = even(low)
    for level in sorted(range(len(costs)), key=lambda level: costs[level]):
        unspent = budget - total_cost(ranks, costs)
        ranks[level] += min(limits[level] - ranks[level], unspent // costs[level])
    if not any(ranks):
        ranks[costs.index(min(costs))] = least
    return tuple(ranks)


@STRUCTURES.register(MLBTC)
class MLBTCLinear(StructuredLinear):
    """MLBTC linear layer. Cores of level l: `left<l>` and `right<l>`, with the shapes of its kind (`mlbtc_fit.py`); the
    left core of the first level that has a rank is `weight`. Levels of rank 0 have no cores."""

    weight: Tensor

    def __init__(self, in_features: int, out_features: int, config: Any, bias: bool = True, **factory: Any):
        config = self.resolve(config, out_features, in_features)
        ranks = self.level_ranks(config, out_features, in_features)
        config = self.with_ranks(config, ranks, out_features, in_features)
        self._levels = present_levels(config, out_features, in_features)
        super().__init__(in_features, out_features, config, bias, **factory)

    # -- sizes ---------------------------------------------------------------------------------------------
    @classmethod
    def resolve(cls, config: Any, out: int, in_: int) -> Any:
        """Return the config with `levels` as numbers and `rank` as the size of given `ranks`.

        SurgeryError if they do not fit.
        """
        entries = (1, (min(4, out), min(4, in_))) if config.levels is None else config.levels
        if not 1 <= len(entries) <= MOST_LEVELS:
            raise SurgeryError(
                f"mlbtc: levels must be 1 to {MOST_LEVELS} entries, for example [1, [4, 4]] (got {len(entries)})"
            )
        config = replace(config, levels=tuple(resolve_level(level, out, in_) for level in entries))
        levels = cls.levels(config, out, in_)
        if not any(level.is_complete for level in levels):
            raise SurgeryError(
                f"mlbtc, levels {list(config.levels)}: no combination of ranks holds every matrix. Add a level of one "
                "block, 1, or a grid "
                "without a largest rank, such as [4, 4]"
            )
        if config.ranks is None:
            return config
        limits = [level.limit for level in levels]
        if len(config.ranks) != len(levels) or not all(0 <= r <= most for r, most in zip(config.ranks, limits)):
            raise SurgeryError(
                f"mlbtc, out={out}, in={in_}: ranks must be {len(levels)} numbers from 0 to {limits}, one for each "
                "level (got "
                f"{list(config.ranks)})"
            )
        sized, full = cls.with_ranks(config, config.ranks, out, in_), cls.full_rank(config, out, in_)
        if not any(config.ranks) or sized.rank > full or config.rank not in (None, sized.rank):
            raise SurgeryError(
                f"mlbtc, out={out}, in={in_}: ranks {list(config.ranks)} store as many elements as a rank of "
                f"{sized.rank}. The rank must be "
                f"that or left out (got {config.rank}), and from 1 to {full}"
            )
        return sized

    @classmethod
    def levels(cls, config: Any, out: int, in_: int) -> tuple[Level, ...]:
        """Return the levels of a resolved config."""
        return make_levels(config.levels, out, in_, config.order)

    @classmethod
    def with_ranks(cls, config: Any, ranks: Sequence[int], out: int, in_: int) -> Any:
        """Return the config with these ranks and the size that follows from them."""
        cost = total_cost(ranks, [level.unit for level in cls.levels(config, out, in_)])
        return replace(config, ranks=tuple(ranks), rank=-(-cost // (out + in_)))

    @classmethod
    def full_ranks(cls, config: Any, out: int, in_: int) -> tuple[int, ...]:
        """Return the ranks of the smallest exact matrix: one level alone."""
        levels = cls.levels(config, out, in_)
        _, best = min((level.limit * level.unit, at) for at, level in enumerate(levels) if level.is_complete)
        return tuple(level.limit if at == best else 0 for at, level in enumerate(levels))

    @classmethod
    def full_rank(cls, config: Any, out: int, in_: int) -> int:
        """Return the smallest size that represents every (out, in) matrix exactly."""
        rank: int = cls.with_ranks(config, cls.full_ranks(config, out, in_), out, in_).rank
        return rank

    @classmethod
    def level_ranks(cls, config: Any, out: int, in_: int) -> tuple[int, ...]:
        """Return the rank of each level of a resolved config whose rank is a number."""
        if config.ranks is not None:
            return tuple(config.ranks)
        full = cls.full_ranks(config, out, in_)
        if config.rank >= cls.with_ranks(config, full, out, in_).rank:
            return full
        levels = cls.levels(config, out, in_)
        return spread_cost(
            config.rank * (out + in_), [level.unit for level in levels], [level.limit for level in levels]
        )

    @classmethod
    def shapes(cls, config: Any, out: int, in_: int) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every core of a resolved config (layout in the class docstring)."""
        config = replace(config, ranks=cls.level_ranks(config, out, in_))
        shapes: dict[str, tuple[int, ...]] = {}
        for at, level, names in present_levels(config, out, in_):
            shapes |= dict(zip(names, level.shapes(config.ranks[at])))
        return shapes

    @property
    def contracted(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        """The axes of cores that their product sums over, if not the last one: those of grids."""
        contractions: dict[str, tuple[int, ...]] = {}
        for _, level, (left, right) in self._levels:
            if isinstance(level, GridLevel):
                contractions |= {left: BTTLinear.contracted["weight"], right: BTTLinear.contracted["right"]}
        return contractions

    # -- fit -----------------------------------------------------------------------------------------------
    @classmethod
    def project(cls, weight_OI: Tensor, config: Any, metric: Metric | None = None) -> StructuredLinear:
        """Return the best fit that block descent over the levels in the metric finds; exact at full rank.

        There is no closed form beyond one level. Without given `ranks`, the descent starts from an even spread of the
        elements and from each level alone, and exchanges rank between levels while that lowers the error. The result
        stores no more than the even spread, and is never worse than one of its levels alone that stores as much.
        """
        out, in_ = weight_OI.shape
        config = cls.resolve(config, out, in_)
        ranks = cls.level_ranks(config, out, in_)
        exact = ranks == cls.full_ranks(config, out, in_)
        starts = [ranks] if config.ranks or exact else cls._starts(config, ranks, out, in_)
        fit = cls._best_fit(weight_OI, config, metric or Metric(), starts, exchange=len(starts) > 1)
        config = cls.with_ranks(config, fit.ranks, out, in_)
        cores: dict[str, Tensor] = {}
        for at, _, names in present_levels(config, out, in_):
            cores |= dict(zip(names, fit.level_cores(at)))
        return cls.from_cores(config, (out, in_), cores)

    @classmethod
    def _starts(cls, config: Any, ranks: tuple[int, ...], out: int, in_: int) -> list[tuple[int, ...]]:
        """Return the ranks from which the exchange starts: an even spread, and each level alone as far as its limit
        allows.
        """
        levels = cls.levels(config, out, in_)
        costs, limits = [level.unit for level in levels], [level.limit for level in levels]
        budget, starts = total_cost(ranks, costs), [ranks]
        for at, level in enumerate(levels):
            level_rank = min(level.limit, budget // level.unit)
            others = [0 if k == at else limit for k, limit in enumerate(limits)]
            rest = spread_cost(budget - level_rank * level.unit, costs, others, least=0)
            starts.append(tuple(level_rank if k == at else rank for k, rank in enumerate(rest)))
        return [start for start in dict.fromkeys(starts) if any(start)]

    @classmethod
    def _best_fit(
        cls, weight_OI: Tensor, config: Any, metric: Metric, starts: Sequence[tuple[int, ...]], exchange: bool
    ) -> LevelDescent:
        levels = cls.levels(config, *weight_OI.shape)
        costs, limits = [level.unit for level in levels], [level.limit for level in levels]
        return best_fit(lambda: LevelDescent(weight_OI, metric, levels), starts, limits, costs, exchange)

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
        full = cls.full_rank(config, out, in_)
        sizes = [*curve_ranks(max(1, min(full, out * in_ // (out + in_))), min(steps, CURVE_POINTS)), full]
        curve: dict[int, tuple[Any, float]] = {}
        for size in sizes if config.ranks is None else [config.rank]:
            sized = replace(config, rank=size)
            ranks = cls.level_ranks(sized, out, in_)
            starts = [ranks] if config.ranks or size >= full else cls._starts(sized, ranks, out, in_)
            fit = cls._best_fit(weight_OI, config, metric, starts, exchange=False)
            point = cls.with_ranks(config, fit.ranks, out, in_)
            if point.rank not in curve:
                curve[point.rank] = (point, max(0.0, fit.error()))
        return [curve[size] for size in sorted(curve)]

    @torch.no_grad()
    def sweep(self, weight_OI: Tensor, metric: Metric) -> float | None:
        """Run one sweep in the metric, in place: all left factors of diagonal blocks by least squares, then each level
        in turn.

        Returns the squared error that is left, or None if `project` is already optimal.
        """
        if len(self._levels) == 1:
            level, is_full = self._levels[0][1], self.config.ranks == self.full_ranks(self.config, *weight_OI.shape)
            is_closed_form = level.is_complete if isinstance(level, DiagonalLevel) else metric.c_II is None
            if is_full or is_closed_form:
                return None
        descent = LevelDescent(weight_OI, metric, self.levels(self.config, *weight_OI.shape))
        for at, _, (left, right) in self._levels:
            descent.read_cores(at, getattr(self, left).data, getattr(self, right).data)
        if descent.factors and (metric.g_OO is None or metric.g_OO.dim() == 1):
            descent.solve_left()
        descent.sweep(self.config.ranks)
        for at, _, names in self._levels:
            for name, core in zip(names, descent.level_cores(at)):
                getattr(self, name).data.copy_(core)
        return descent.error()

    # -- product -------------------------------------------------------------------------------------------
    def product(self, x: Tensor) -> Tensor:
        """Return B x (..., O) without the bias, for x (..., I)."""
        (_, first, (left, right)), *others = self._levels
        y = first.product(x, getattr(self, left), getattr(self, right))
        for _, level, (left, right) in others:
            y = y + level.product(x, getattr(self, left), getattr(self, right))
        return y

    def dense(self) -> Tensor:
        """Return B as a dense matrix (O, I)."""
        dense_OI = self.weight.new_zeros((self.out_features, self.in_features))
        for _, level, (left, right) in self._levels:
            level.add_to(dense_OI, getattr(self, left), getattr(self, right))
        return dense_OI

    def macs(self) -> int:
        """Return multiply-accumulates per token: every stored element is used once."""
        return self.params(self.config, self.out_features, self.in_features)

    def output_cores(self) -> list[str]:
        """Return the names of the left cores, whose products are summed to the output."""
        return [left for _, _, (left, _) in self._levels]

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of each core.

        An output sums over all levels, so the left cores are one layer: its fan-in is the sum of theirs.
        """
        fans = [(names, level.fans(self.config.ranks[at])) for at, level, names in self._levels]
        fan_in = sum(left.fan_in for _, (left, _) in fans)
        mups: dict[str, MuP] = {}
        for names, (left, right) in fans:
            mups |= dict(zip(names, (MuP(fan_in, left.fan_out), right)))
        return mups


def present_levels(config: Any, out: int, in_: int) -> tuple[tuple[int, Level, tuple[str, str]], ...]:
    """Return (index, level, names of its left and right core) of each level whose rank is not 0, of a config with
    ranks.
    """
    levels: list[tuple[int, Level, tuple[str, str]]] = []
    for at, level in enumerate(make_levels(config.levels, out, in_, config.order)):
        if config.ranks[at]:
            levels.append((at, level, (f"left{at + 1}" if levels else "weight", f"right{at + 1}")))
    return tuple(levels)
