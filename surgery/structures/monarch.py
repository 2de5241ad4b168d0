"""Monarch matrices: BTT of block rank 1, or the published form (Dao et al. 2022, "Monarch", section 3.1).

A Monarch matrix is a block-diagonal matrix times a permutation times another block-diagonal matrix. In block form every
a x d block is an outer product, so it stores (1/a + 1/d) O I elements, and the budget determines the block grid.

Published Monarch matrices have b blocks in each factor, with small b (b = 4 in Dao et al. and in Qiu et al. 2024,
appendix E.2). The intermediate vector has m = min(O, I) elements, m / b^2 for each pair of blocks, so such a matrix is
BTT on the grid b x b of rank m / b^2. It stores m (O + I) / b elements, 2 / b of those of a square matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.structures.base import STRUCTURES, StructureConfig, min_keep
from surgery.structures.btt import BTTLinear, Order
from surgery.structures.metric import Metric


@dataclass(frozen=True)
class Monarch(StructureConfig):
    """Config of a Monarch matrix.

    blocks: one of
        (b, c)      a grid
        b           the published form, with b blocks in each factor; the rank follows from b
        "budget"    the largest grid within the budget, with the squarest blocks among equals
        "sqrt"      as in BTT
    rank: 1, or "full" for blocks of one row, which represent any matrix exactly.
    order: as in BTT.
    """

    name: ClassVar[str] = "monarch"
    blocks: tuple[int, int] | int | Literal["budget", "sqrt"] = "budget"
    rank: Literal["full"] | int | None = None
    order: Order = "contiguous"


@STRUCTURES.register(Monarch)
class MonarchLinear(BTTLinear):
    """Monarch linear layer: a BTTLinear with s = 1, or with the rank of the published form."""

    @classmethod
    def resolve(cls, config: Any, out: int, in_: int) -> Any:
        """Return the config with `blocks` as numbers. SurgeryError if they cannot tile an (out, in) matrix."""
        if config.rank == "full":
            return replace(config, blocks=(out, 1), rank=1)
        if isinstance(config.blocks, int):
            b = config.blocks
            if config.rank is not None or not 2 <= b <= min(out, in_):
                raise SurgeryError(
                    f"{config} cannot tile a matrix of out={out}, in={in_}: blocks given as one number must be 2 to "
                    f"{min(out, in_)}, without a rank. Use for example blocks: 4"
                )
            return replace(config, blocks=(b, b), rank=published_rank(b, out, in_))
        if config.rank not in (None, 1) and not is_published(config, out, in_):
            raise SurgeryError(f"{config}: rank must be 1 or full. Use structure btt for rank {config.rank}")
        if config.blocks == "budget":
            return replace(config, rank=1)
        return replace(super().resolve(config, out, in_), rank=config.rank or 1)

    @classmethod
    def fit(cls, config: Any, out: int, in_: int, budget: float) -> Any:
        """Return the config of the largest grid within `budget` stored elements.

        SurgeryError if the smallest exceeds it.
        """
        config = cls.resolve(config, out, in_)
        if config.blocks != "budget":
            return config
        grids = [replace(config, blocks=grid) for grid in block_grids(out, in_)]
        fitting = [g for g in grids if cls.params(g, out, in_) <= budget]
        if not fitting:
            least = min(cls.params(g, out, in_) for g in grids)
            raise SurgeryError(
                f"monarch cannot represent a {out} x {in_} matrix within {int(budget):,} parameters: "
                f"its smallest grid stores {least:,}. Raise keep to {min_keep(least, out, in_)} or more"
            )
        return max(fitting, key=lambda g: (cls.params(g, out, in_), -_squareness_gap(g, out, in_)))

    @classmethod
    def rank_error_curve(
        cls, weight_OI: Tensor, config: Any, metric: Metric, steps: int = 12
    ) -> list[tuple[Any, float]]:
        """Return (config, squared error in the metric) at about `steps` block grids, cheapest first."""
        out, in_ = weight_OI.shape
        config = cls.resolve(config, out, in_)
        grids = block_grids(out, in_) if config.blocks == "budget" else [config.blocks]
        by_size: dict[int, Any] = {}  # size -> grid; the squarest blocks come last and win
        for option in sorted((replace(config, blocks=g) for g in grids), key=lambda o: -_squareness_gap(o, out, in_)):
            by_size[cls.params(option, out, in_)] = option
        chosen = [by_size[size] for size in sorted(by_size) if size <= out * in_]
        stride = max(1, len(chosen) // steps)
        return [(o, cls.block_tails(weight_OI, o, metric)[o.rank]) for o in chosen[::stride]]


def published_rank(b: int, out: int, in_: int) -> int:
    """Return the block rank of a published Monarch matrix with b blocks in each factor, min(O, I) / b^2 rounded up."""
    return -(-min(out, in_) // b**2)


def is_published(config: Any, out: int, in_: int) -> bool:
    """Return whether the config is that of a published Monarch matrix, which `resolve` makes of a number of blocks."""
    grid = config.blocks
    return (
        isinstance(grid, tuple | list) and grid[0] == grid[1] > 1 and config.rank == published_rank(grid[0], out, in_)
    )


def block_sizes(n: int) -> list[int]:
    """Return the divisors of n from 2 on.

    If none is 8 or less (n is prime, say), sizes 2 to 16 that need padding come first.
    """
    sizes = [k for k in range(2, n + 1) if n % k == 0]
    return sizes if sizes and sizes[0] <= 8 else [*range(2, min(n, 17)), *sizes]


def block_grids(out: int, in_: int) -> list[tuple[int, int]]:
    """Return all block grids (b, c) with blocks of at least 2 x 2, because smaller blocks save nothing."""
    return [(-(-out // a), -(-in_ // d)) for a in block_sizes(out) for d in block_sizes(in_)]


def _squareness_gap(config: Any, out: int, in_: int) -> float:
    a, d = BTTLinear.block_shape(config, out, in_)
    return max(a / d, d / a)
