"""Fitting of MLR matrices in a metric: block descent, and allocation of rank to levels by exchange.

    descent = best_descent(weight_OI, metric, [(3, 2, 1)], limits=[32, 16, 8], exchange=True)
    descent.ranks, descent.error()

Block descent fits one block at a time and keeps the others fixed. With E the remaining error, (k, k) the place of the
block and a metric (C, G), the squared error tr(G (E - X) C (E - X)^T) of a block X depends on E only by

    T = G_kk^-1 (G E C)_kk C_kk^-1

and the best block of rank r is the best approximation of T in the metric (C_kk, G_kk). Parshakova et al. 2023, "Factor
fitting, rank allocation, and partitioning in multilevel low rank matrices", name both problems, the fit and the
allocation of rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from surgery.core.repeats import repeated
from surgery.structures import linalg
from surgery.structures.low_rank import low_rank_factors, tail_energies
from surgery.structures.metric import Metric, inner_product, spd_factor

START_SWEEPS = 3  # sweeps at each starting allocation
TRIAL_SWEEPS = 2  # sweeps after an exchange of rank
LAST_SWEEPS, LAST_GAIN = 20, 1e-2  # most sweeps at the final ranks; they stop when one lowers the squared error by less
TRIES = 6  # exchanges that are tried before the search stops
EXCHANGES = 8  # most exchanges that are accepted
MIN_GAIN = 1e-4  # an exchange must lower the squared error by this fraction


DescentT = TypeVar("DescentT", bound="Descent")


def block_size(n: int, blocks: int) -> int:
    """Return the size of a block of n rows or columns, rounded up."""
    return -(-n // blocks)


class Descent:
    """An MLR matrix during its fit. weight_OI: the target. ranks: current rank of each level, at first 0.

    gap_OI: W - B. gap_c_OI: (W - B) C. counts: number of blocks of each level. blocks: (level, k) -> left (o, r) and
    right (r, i) factors; r is less than the level's rank where the block is smaller.
    """

    def __init__(self, weight_OI: Tensor, metric: Metric, levels: int):
        self.weight_OI, self.metric, self.ranks = weight_OI, metric, [0] * levels
        self.counts = [2**level for level in range(levels)]
        self.gap_OI, self.gap_c_OI = weight_OI.clone(), metric.times_c(weight_OI).clone()
        self.blocks: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def copy(self: DescentT) -> DescentT:
        """Return an independent copy; factors are shared, because they are replaced, never changed."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.gap_OI, other.gap_c_OI = self.gap_OI.clone(), self.gap_c_OI.clone()
        other.blocks, other.ranks = dict(self.blocks), list(self.ranks)
        return other

    def error(self) -> float:
        """Return the squared error in the metric."""
        weighed, g_OO = self.gap_c_OI, self.metric.g_OO
        if g_OO is not None:
            weighed = g_OO[:, None] * weighed if g_OO.dim() == 1 else g_OO @ weighed
        return inner_product(weighed, self.gap_OI)

    def spans(self, level: int, k: int) -> tuple[slice, slice]:
        """Return the rows and the columns of block k of a level."""
        sizes = [block_size(n, self.counts[level]) for n in self.gap_OI.shape]
        rows, columns = (
            slice(k * size, min((k + 1) * size, n)) for size, n in zip(sizes, self.gap_OI.shape, strict=True)
        )
        return rows, columns

    def block_metric(self, rows: slice, columns: slice) -> tuple[Metric, Tensor | None]:
        """Return the metric (C_kk, G_kk) of a block, and the Cholesky factor of C_kk or None. Both are kept with C."""
        c_II, g_OO = self.metric.c_II, self.metric.g_OO
        g_kk = None if g_OO is None else g_OO[rows] if g_OO.dim() == 1 else g_OO[rows, rows]
        if c_II is None:
            return Metric(None, g_kk), None

        def parts() -> tuple[Tensor, Tensor, dict[object, object]]:
            c_kk = c_II[columns, columns].contiguous()
            return c_kk, spd_factor(c_kk), {}

        c_kk, factor, cache = self.metric.compute_once(("mlr block", columns.start, columns.stop), parts)
        return Metric(c_kk, g_kk, cache), factor

    def target(self, level: int, k: int) -> tuple[Tensor, Metric]:
        """Return the matrix T (o, i) that the block should be, with all other blocks fixed, and the block's metric."""
        rows, columns = self.spans(level, k)
        whole = self.counts[level] == 1  # then T = E
        metric, factor = (self.metric, None) if whole else self.block_metric(rows, columns)
        g_OO = self.metric.g_OO
        if whole:
            target = self.gap_OI
        elif g_OO is None or g_OO.dim() == 1:
            target = self.gap_c_OI[rows, columns]
        else:
            gradient = g_OO[rows] @ self.gap_c_OI[:, columns]
            target = linalg.cholesky_solve(gradient, spd_factor(g_OO[rows, rows]))
        if factor is not None:
            target = linalg.cholesky_solve(target.mT.contiguous(), factor).mT
        if old := self.blocks.get((level, k)):
            target = target + old[0] @ old[1]
        return target.contiguous(), metric

    def place(self, level: int, k: int, factors: tuple[Tensor, Tensor] | None) -> None:
        """Replace a block by the product of factors, or remove it, and bring the gap up to date."""
        rows, columns = self.spans(level, k)
        change = torch.zeros_like(self.gap_OI[rows, columns])
        if old := self.blocks.pop((level, k), None):
            change -= old[0] @ old[1]
        if factors is not None:
            change += factors[0] @ factors[1]
            self.blocks[level, k] = factors
        self.gap_OI[rows, columns] -= change
        if self.metric.c_II is None:
            self.gap_c_OI[rows, columns] -= change
        else:
            self.gap_c_OI[rows] -= change @ self.metric.c_II[columns]

    def sweep(self, ranks: Sequence[int]) -> None:
        """Fit every level once, the first ones first."""
        for level, rank in enumerate(ranks):
            if rank or self.ranks[level]:
                self.fit_level(level, rank)
        self.ranks = list(ranks)

    def fit_level(self, level: int, rank: int) -> None:
        """Fit every block of a level once. Each step is the exact minimum over that block.

        On the meta device the first block of a level stands for all of them.
        """
        steps = 1 if self.gap_OI.is_meta else self.counts[level]
        with repeated(self.counts[level] / steps):
            for k in range(steps):
                self.fit_block(level, k, rank)

    def fit_block(self, level: int, k: int, rank: int) -> None:
        """Replace a block by the best one of this rank with all others fixed; rank 0 removes it."""
        factors = None
        if rank:
            target, metric = self.target(level, k)
            factors = low_rank_factors(target, rank, metric)
        self.place(level, k, factors)

    def tails(self, level: int) -> list[float]:
        """Return tail[r], the part of the squared error that a level of rank r leaves if all other levels stay as they
        are.
        """
        squares: list[float] = []
        for k in range(self.counts[level]):
            target, metric = self.target(level, k)
            tail = tail_energies(metric.whiten(target)).tolist()
            squares += [0.0] * (len(tail) - len(squares))  # a last block may be smaller than the others
            squares = [square + (tail[r] if r < len(tail) else 0.0) for r, square in enumerate(squares)]
        return squares

    def block_target(self) -> Tensor:
        """Return the matrix (O, I) that all blocks of all levels together should be."""
        return self.weight_OI

    def solve_left(self) -> None:
        """Solve for the left factors of all levels at once, rows that lie in the same blocks together.

        The optimum if G is diagonal or the identity: then every row has its own least squares, in which G drops out.
        """
        metric, spans, weight_OI = self.metric, {key: self.spans(*key) for key in self.blocks}, self.block_target()
        bounds = sorted({bound for rows, _ in spans.values() for bound in (rows.start, rows.stop)})
        new_left = {key: left.clone() for key, (left, _) in self.blocks.items()}
        for start, stop in itertools.pairwise(bounds):
            keys = [key for key, (rows, _) in spans.items() if rows.start <= start and stop <= rows.stop]
            right_RI = self.gap_OI.new_zeros(sum(self.blocks[key][1].shape[0] for key in keys), self.gap_OI.shape[1])
            places, at = [], 0
            for key in keys:
                right = self.blocks[key][1]
                places.append(slice(at, at + right.shape[0]))
                right_RI[places[-1], spans[key][1]] = right
                at += right.shape[0]
            weighed_RI = right_RI if metric.c_II is None else right_RI @ metric.c_II
            gram = spd_factor(weighed_RI @ right_RI.mT, (1e-6, 1e-4, 1e-2))
            left_OR = linalg.cholesky_solve((weight_OI[start:stop] @ weighed_RI.mT).mT.contiguous(), gram).mT
            for key, columns in zip(keys, places):
                first = spans[key][0].start
                new_left[key][start - first : stop - first] = left_OR[:, columns]
        for key, left in new_left.items():
            self.place(*key, (left, self.blocks[key][1]))

    def read_level(self, level: int, left_Or: Tensor, right_rI: Tensor) -> None:
        """Take the factors of all blocks of a level, as `level_factors` returns them."""
        self.ranks[level] = left_Or.shape[1]
        for k in range(self.counts[level]):
            rows, columns = self.spans(level, k)
            self.place(level, k, (left_Or[rows].clone(), right_rI[:, columns].clone()))

    def level_factors(self, level: int) -> tuple[Tensor, Tensor]:
        """Return the factors left (O, r) and right (r, I) of a level; blocks of a smaller rank are filled up with
        zeros.
        """
        (out, in_), rank = self.gap_OI.shape, self.ranks[level]
        left_Or, right_rI = self.gap_OI.new_zeros(out, rank), self.gap_OI.new_zeros(rank, in_)
        for k in range(self.counts[level]):
            if block := self.blocks.get((level, k)):
                rows, columns = self.spans(level, k)
                left_Or[rows, : block[0].shape[1]], right_rI[: block[1].shape[0], columns] = block
        return left_Or, right_rI


def expected_sweeps(starts: Sequence[Sequence[int]], exchange: bool) -> int:
    """Return the number of sweeps of a fit whose exchanges are each accepted at the first try.

    The gains cost one sweep.
    """
    exchanges = 2 * EXCHANGES * (TRIAL_SWEEPS + 1) if exchange else 0
    return START_SWEEPS * len(starts) + exchanges + LAST_SWEEPS


def best_descent(
    weight_OI: Tensor, metric: Metric, starts: Sequence[Sequence[int]], limits: Sequence[int], exchange: bool
) -> Descent:
    """Return the best fit of an MLR matrix found from the starting ranks; arguments as in `best_fit`."""
    return best_fit(lambda: Descent(weight_OI, metric, len(limits)), starts, limits, [1] * len(limits), exchange)


@torch.no_grad()
def best_fit(
    begin: Callable[[], DescentT],
    starts: Sequence[Sequence[int]],
    limits: Sequence[int],
    costs: Sequence[int],
    exchange: bool,
) -> DescentT:
    """Return the best fit found from the starting ranks.

    begin: returns a new fit, whose ranks are 0. limits, costs: largest rank of each level, and stored elements of a
    unit of it, in any unit. exchange: move rank between levels while that lowers the error. The result costs no more
    than the first start.

    On the meta device, where there is no error to go by, one sweep of the first start stands for all sweeps of a fit.
    """
    exchange = exchange and len(limits) > 1
    fit = begin()
    if fit.gap_OI.is_meta:
        with repeated(expected_sweeps(starts, exchange)):
            fit.sweep(starts[0])
        return fit
    fits = []
    for ranks in starts:
        fits.append(begin())
        for _ in range(START_SWEEPS if sum(rank > 0 for rank in ranks) > 1 else 1):
            fits[-1].sweep(ranks)
    best = min(fits, key=lambda fit: fit.error())
    if exchange:
        # From the first start, an even spread, as well: from rank on level 1 alone the exchange often ends in a local
        # minimum.
        fits = [best] if best is fits[0] else [fits[0], best]
        budget = total_cost(starts[0], costs)
        best = min((exchange_ranks(fit, limits, costs, budget) for fit in fits), key=lambda fit: fit.error())
    if sum(rank > 0 for rank in best.ranks) > 1:
        before = best.error()
        for _ in range(LAST_SWEEPS):
            best.sweep(best.ranks)
            before, last = best.error(), before
            if before > last * (1 - LAST_GAIN):
                break
    return best


def total_cost(ranks: Sequence[int], costs: Sequence[int]) -> int:
    """Return the cost of all ranks, in the unit of `costs`."""
    return sum(rank * cost for rank, cost in zip(ranks, costs))


def exchange_ranks(
    fit: DescentT, limits: Sequence[int], costs: Sequence[int] | None = None, budget: int | None = None
) -> DescentT:
    """Return the fit after exchanges of rank between two levels, each accepted only if the refitted error falls.

    limits, costs: as in `best_fit`; by default every unit of rank costs 1. budget: most that all ranks may cost, by
    default what they cost. Pairs are tried in the order of estimated gain minus loss. The amount that is moved begins
    at a sixteenth of the cost and is halved when none of the best pairs lowers the error.
    """
    costs = [1] * len(limits) if costs is None else costs
    total = total_cost(fit.ranks, costs)
    budget = total if budget is None else budget
    amount, accepted = 1 << max(0, (total // 16).bit_length() - 1), 0
    failed: set[tuple[int, ...]] = set()
    while amount and accepted < EXCHANGES:
        better = _first_better(fit, _exchanges(fit, limits, costs, budget, amount), failed)
        if better is not None:
            fit, accepted, failed = better, accepted + 1, set()
        elif amount < min(costs):  # only single ranks were moved
            break
        else:
            amount //= 2
    return fit


def _exchanges(
    fit: Descent, limits: Sequence[int], costs: Sequence[int], budget: int, amount: int
) -> list[tuple[int, ...]]:
    """Return the ranks after each exchange of about `amount` between two levels that is possible, the most promising
    first.

    One level gets ranks of that cost, at least one, and another gives as many as the budget then lacks. Gain and loss
    are estimates, because other levels stay as they are.
    """
    total, ranks, tails = total_cost(fit.ranks, costs), fit.ranks, [fit.tails(level) for level in range(len(limits))]

    def tail(level: int, rank: int) -> float:
        return tails[level][min(rank, len(tails[level]) - 1)]

    gains = []
    for up, down in itertools.permutations(range(len(limits)), 2):
        more = max(1, amount // costs[up])
        fewer = max(0, -(-(total + more * costs[up] - budget) // costs[down]))
        if ranks[up] + more > limits[up] or fewer > ranks[down]:
            continue
        gain = tail(up, ranks[up]) - tail(up, ranks[up] + more)
        loss = tail(down, ranks[down] - fewer) - tail(down, ranks[down])
        after = list(ranks)
        after[up], after[down] = ranks[up] + more, ranks[down] - fewer
        gains.append((gain - loss, up, down, tuple(after)))
    return list(dict.fromkeys(after for *_, after in sorted(gains, reverse=True)))


def _first_better(fit: DescentT, exchanges: list[tuple[int, ...]], failed: set[tuple[int, ...]]) -> DescentT | None:
    """Return a refitted copy with the first ranks that lower the error, or None.

    Ranks that do not are added to `failed`.
    """
    before = fit.error()
    for ranks in exchanges[:TRIES]:
        if ranks in failed:
            continue
        trial = fit.copy()
        for _ in range(TRIAL_SWEEPS):
            trial.sweep(ranks)
        if trial.error() < before * (1 - MIN_GAIN):
            return trial
        failed.add(ranks)
    return None
