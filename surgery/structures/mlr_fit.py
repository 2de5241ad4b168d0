"""Fitting of MLR matrices in a metric: block descent, and allocation of rank to levels by exchange.

    descent = best_descent(weight_OI, metric, [(3, 2, 1)], limits=[32, 16, 8], exchange=True)
    descent.ranks, descent.error()

Block descent fits one block at a time and keeps the others fixed. With E the remaining error, (k, k) the place of the block and
a metric (C, G), the squared error tr(G (E - X) C (E - X)^T) of a block X depends on E only by

    T = G_kk^-1 (G E C)_kk C_kk^-1

and the best block of rank r is the best approximation of T in the metric (C_kk, G_kk). Parshakova et al. 2023, "Factor fitting,
rank allocation, and partitioning in multilevel low rank matrices", name both problems, the fit and the allocation of rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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


def block_size(n: int, blocks: int) -> int:
    """Return the size of a block of n rows or columns, rounded up."""
    return -(-n // blocks)


class Descent:
    """An MLR matrix during its fit. weight_OI: the target. ranks: current rank of each level, at first 0.

    gap_OI: W - B. gap_c_OI: (W - B) C. blocks: (level, k) -> left (o, r) and right (r, i) factors; r is less than the level's rank
    where the block is smaller.
    """

    def __init__(self, weight_OI: Tensor, metric: Metric, levels: int):
        self.weight_OI, self.metric, self.levels, self.ranks = weight_OI, metric, levels, [0] * levels
        self.gap_OI, self.gap_c_OI = weight_OI.clone(), metric.times_c(weight_OI).clone()
        self.blocks: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def copy(self) -> Descent:
        """Return an independent copy; factors are shared, because they are replaced, never changed."""
        other = object.__new__(Descent)
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
        sizes = [block_size(n, 2**level) for n in self.gap_OI.shape]
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
        whole = level == 0  # then T = E
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
        """Fit every block of every level once, coarse levels first. Each step is the exact minimum over that block.

        On the meta device the first block of a level stands for all of them.
        """
        for level, rank in enumerate(ranks):
            if not rank and not self.ranks[level]:
                continue
            steps = 1 if self.gap_OI.is_meta else 2**level
            with repeated(2**level / steps):
                for k in range(steps):
                    self.fit_block(level, k, rank)
        self.ranks = list(ranks)

    def fit_block(self, level: int, k: int, rank: int) -> None:
        """Replace a block by the best one of this rank with all others fixed; rank 0 removes it."""
        factors = None
        if rank:
            target, metric = self.target(level, k)
            factors = low_rank_factors(target, rank, metric)
        self.place(level, k, factors)

    def gains(self, level: int, step: int, limit: int) -> tuple[float, float]:
        """Return by how much the squared error falls with `step` more ranks of a level, and rises with `step` fewer.

        Other levels stay as they are, so both are estimates. Impossible changes gain minus infinity and cost infinity.
        """
        rank, up, down = self.ranks[level], 0.0, 0.0
        for k in range(2**level):
            target, metric = self.target(level, k)
            tail = tail_energies(metric.whiten(target))
            at = [float(tail[min(max(r, 0), len(tail) - 1)]) for r in (rank - step, rank, rank + step)]
            up, down = up + at[1] - at[2], down + at[0] - at[1]
        return (up if rank + step <= limit else float("-inf")), (down if rank >= step else float("inf"))

    def solve_left(self) -> None:
        """Solve for the left factors of all levels at once, rows that lie in the same blocks together.

        The optimum if G is diagonal or the identity: then every row has its own least squares, in which G drops out.
        """
        metric, spans = self.metric, {key: self.spans(*key) for key in self.blocks}
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
            left_OR = linalg.cholesky_solve((self.weight_OI[start:stop] @ weighed_RI.mT).mT.contiguous(), gram).mT
            for key, place in zip(keys, places):
                first = spans[key][0].start
                new_left[key][start - first : stop - first] = left_OR[:, place]
        for key, left in new_left.items():
            self.place(*key, (left, self.blocks[key][1]))

    def read_factors(self, ranks: Sequence[int], cores: dict[str, Tensor]) -> None:
        """Take the factors of a module's cores `weight` (1, O, R) and `right<l>` (r_l, I)."""
        self.ranks, at = list(ranks), 0
        for level, rank in enumerate(ranks):
            for k in range(2**level if rank else 0):
                rows, columns = self.spans(level, k)
                left, right = cores["weight"].data[0, rows, at : at + rank], cores[f"right{level + 1}"].data
                self.place(level, k, (left.clone(), right[:, columns].clone()))
            at += rank

    def write_factors(self, cores: dict[str, Tensor]) -> None:
        """Write the factors into cores, which are overwritten; blocks of a smaller rank are filled up with zeros."""
        for core in cores.values():
            core.zero_()
        starts = [sum(self.ranks[:level]) for level in range(self.levels)]
        for (level, k), (left, right) in self.blocks.items():
            rows, columns = self.spans(level, k)
            cores["weight"][0, rows, starts[level] : starts[level] + left.shape[1]] = left
            cores[f"right{level + 1}"][: right.shape[0], columns] = right


def expected_sweeps(starts: Sequence[Sequence[int]], exchange: bool) -> int:
    """Return the number of sweeps of a fit whose exchanges are each accepted at the first try. The gains cost one sweep."""
    exchanges = 2 * EXCHANGES * (TRIAL_SWEEPS + 1) if exchange else 0
    return START_SWEEPS * len(starts) + exchanges + LAST_SWEEPS


@torch.no_grad()
def best_descent(
    weight_OI: Tensor, metric: Metric, starts: Sequence[Sequence[int]], limits: Sequence[int], exchange: bool
) -> Descent:
    """Return the best fit found from the starting ranks. exchange: move rank between levels while that lowers the error.

    On the meta device, where there is no error to go by, one sweep of the first start stands for all sweeps of a fit.
    """
    if weight_OI.is_meta:
        fit = Descent(weight_OI, metric, len(limits))
        with repeated(expected_sweeps(starts, exchange and len(limits) > 1)):
            fit.sweep(starts[0])
        return fit
    fits = []
    for ranks in starts:
        fits.append(Descent(weight_OI, metric, len(limits)))
        for _ in range(START_SWEEPS if sum(rank > 0 for rank in ranks) > 1 else 1):
            fits[-1].sweep(ranks)
    best = min(fits, key=lambda fit: fit.error())
    if exchange and len(limits) > 1:
        # From the first start, an even spread, as well: from rank on level 1 alone the exchange often ends in a local minimum.
        fits = [best] if best is fits[0] else [fits[0], best]
        best = min((exchange_ranks(fit, limits) for fit in fits), key=lambda fit: fit.error())
    if sum(rank > 0 for rank in best.ranks) > 1:
        before = best.error()
        for _ in range(LAST_SWEEPS):
            best.sweep(best.ranks)
            before, last = best.error(), before
            if before > last * (1 - LAST_GAIN):
                break
    return best


def exchange_ranks(fit: Descent, limits: Sequence[int]) -> Descent:
    """Return the fit after exchanges of rank between two levels, each accepted only if the refitted error falls.

    Pairs are tried in the order of estimated gain minus cost. The step begins at a sixteenth of the rank and is halved when none
    of the best pairs lowers the error.
    """
    step, accepted = 1 << max(0, (sum(fit.ranks) // 16).bit_length() - 1), 0
    while step and accepted < EXCHANGES:
        if (better := _first_better(fit, limits, step)) is None:
            step //= 2
        else:
            fit, accepted = better, accepted + 1
    return fit


def _first_better(fit: Descent, limits: Sequence[int], step: int) -> Descent | None:
    """Return a refitted copy after the first exchange of `step` ranks that lowers the error, or None."""
    gains = [fit.gains(level, step, limit) for level, limit in enumerate(limits)]
    pairs = [(gains[up][0] - gains[down][1], up, down) for up in range(len(limits)) for down in range(len(limits))]
    possible = sorted((pair for pair in pairs if pair[1] != pair[2] and pair[0] > float("-inf")), reverse=True)
    before = fit.error()
    for _, up, down in possible[:TRIES]:
        ranks = list(fit.ranks)
        ranks[up], ranks[down] = ranks[up] + step, ranks[down] - step
        trial = fit.copy()
        for _ in range(TRIAL_SWEEPS):
            trial.sweep(ranks)
        if trial.error() < before * (1 - MIN_GAIN):
            return trial
    return None
