"""Fitting of MLR matrices in a metric: block descent, and allocation of rank to levels by exchange.

    descent = best_descent(weight_OI, metric, [(3, 2, 1)], limits=[32, 16, 8], exchange=True)
    descent.ranks, descent.error()

Block descent fits the blocks of one level and keeps the other levels fixed. With E the remaining error, (k, k) the place
of the block and a metric (C, G), the squared error tr(G (E - X) C (E - X)^T) of a block X depends on E only by

    T = G_kk^-1 (G E C)_kk C_kk^-1

and the best block of rank r is the best approximation of T in the metric (C_kk, G_kk). All blocks of a level are fitted
in one batch, and one after the other only where that would raise the error. Parshakova et al. 2023, "Factor
fitting, rank allocation, and partitioning in multilevel low rank matrices", name both problems, the fit and the
allocation of rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from surgery.core.repeats import repeated
from surgery.structures import linalg
from surgery.structures.base import balance_factors, exact_factors
from surgery.structures.btt import zero_pad
from surgery.structures.low_rank import leading_eigenvectors, orthonormalize, tail_energies
from surgery.structures.metric import Metric, inner_product, inverse_size, spd_factor

WARM_SIZE = 128  # rows or columns of a block, the fewer of both, from which its old factors start the new ones
OVERSAMPLING = 8  # random directions beside them
TRIAL_SWEEPS = 2  # sweeps after an exchange of rank
LAST_SWEEPS = 20  # most sweeps at the final ranks


@dataclass(frozen=True)
class Search:
    """How thoroughly ranks are searched for.

    start_sweeps: at each starting allocation. near: the first start takes part in the exchange if its squared error is
    at most this many times the least. tries: exchanges that are tried before the search stops. exchanges: most that are
    accepted. min_gain: part of the error by which an exchange must lower it. last_gain: part of the squared error below
    which the last sweeps stop.
    """

    start_sweeps: int = 3
    near: float = math.inf
    tries: int = 6
    exchanges: int = 8
    min_gain: float = 1e-4
    last_gain: float = 1e-2


THOROUGH = Search()
# Of an MLR matrix that starts from ranks which fall by half from level to level, near those that are found.
MLR_SEARCH = Search(start_sweeps=1, near=1.25, tries=2, exchanges=4, min_gain=1e-3, last_gain=2e-3)
FEW_RANKS = 10  # an MLR matrix of fewer ranks, each of which is a large part, is searched thoroughly

DescentT = TypeVar("DescentT", bound="Descent")


def block_size(n: int, blocks: int) -> int:
    """Return the size of a block of n rows or columns, rounded up."""
    return -(-n // blocks)


@dataclass(frozen=True)
class BlockRoots:
    """Cholesky factors L of the diagonal blocks of a moment (C or G), one for each block of a level.

    lower, inverse: L and L^-1 (p, n, n); of a diagonal moment (p, n, 1), its square root and the reciprocal; None: the
    identity.
    """

    lower: Tensor | None = None
    inverse: Tensor | None = None

    @classmethod
    def of(cls, moment: Tensor | None, count: int, size: int) -> BlockRoots:
        """Return the roots of `count` blocks of `size` rows of a moment (N, N) or its diagonal (N,)."""
        if moment is None:
            return cls()
        if moment.dim() == 1:
            root = moment[: count * size].view(count, size, 1).sqrt()
            return cls(root, 1 / root)
        lower = spd_factor(diagonal_blocks(moment, count, size, size).contiguous())
        eye = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower)
        return cls(lower, linalg.solve_triangular(lower, eye, upper=False))

    @property
    def is_full(self) -> bool:
        """Whether the moment is a matrix, and not a diagonal or the identity."""
        return self.lower is not None and self.lower.shape[1] == self.lower.shape[2]

    def whiten(self, x: Tensor, part: slice) -> Tensor:
        """Return L^T x (.., n, m) for the blocks of `part`."""
        if self.lower is None:
            return x
        return self.lower[part].mT @ x if self.is_full else self.lower[part] * x

    def solve(self, x: Tensor, part: slice) -> Tensor:
        """Return L^-1 x (.., n, m) for the blocks of `part`."""
        if self.inverse is None:
            return x
        return self.inverse[part] @ x if self.is_full else self.inverse[part] * x

    def unwhiten(self, x: Tensor, part: slice) -> Tensor:
        """Return L^-T x (.., n, m) for the blocks of `part`."""
        if self.inverse is None:
            return x
        return self.inverse[part].mT @ x if self.is_full else self.inverse[part] * x


def diagonal_blocks(matrix: Tensor, count: int, rows: int, columns: int) -> Tensor:
    """Return a view (p, o, i) of the p blocks of o x i along the diagonal of a matrix."""
    grid = matrix[: count * rows, : count * columns].unflatten(0, (count, rows)).unflatten(2, (count, columns))
    blocks: Tensor = grid.diagonal(dim1=0, dim2=2).movedim(-1, 0)
    return blocks


ALL = slice(None)  # all blocks of a level


@dataclass(frozen=True)
class Blocks:
    """The blocks of a level, left (p, o, r) right (p, r, i), and the factors u, v of the same blocks, whitened."""

    left: Tensor
    right: Tensor
    u: Tensor
    v: Tensor

    def among(self, count: int, part: slice) -> Blocks:
        """Return `count` blocks, which are zero outside of `part`."""
        tensors = [self.left, self.right, self.u, self.v]
        whole = Blocks(*(m.new_zeros(count, *m.shape[1:]) for m in tensors))
        return whole.with_part(part, self)

    def with_part(self, part: slice, new: Blocks) -> Blocks:
        """Return a copy with the blocks of `part` replaced; the smaller of both ranks is filled up with zeros."""
        rank = max(self.left.shape[2], new.left.shape[2])
        mine, theirs = self.first_ranks(rank), new.first_ranks(rank)
        for name in ("left", "right", "u", "v"):
            getattr(mine, name)[part] = getattr(theirs, name)
        return mine

    def first_ranks(self, rank: int) -> Blocks:
        """Return a copy with the first ranks of every block, filled up with zeros."""
        left, u = (zero_pad(m[:, :, :rank], m.shape[1], rank).clone() for m in (self.left, self.u))
        right, v = (zero_pad(m[:, :rank], rank, m.shape[2]).clone() for m in (self.right, self.v))
        return Blocks(left, right, u, v)


def leading_left(m: Tensor, rank: int, start: Tensor | None) -> Tensor:
    """Return orthonormal columns (p, o, rank) that span about the leading left singular vectors of m (p, o, i).

    start (p, o, s): columns that span about the same, from which a step of subspace iteration is made, with some random
    directions. Without it, and for small or nearly full ranks, the vectors are exact, by `eigh`.
    """
    m = m * inverse_size(m)
    n, width = m.shape[1], 0 if start is None else max(start.shape[2], rank) + OVERSAMPLING
    if start is None or n < WARM_SIZE or 2 * width > n:
        return leading_eigenvectors(m @ m.mT, rank)
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(m.shape[2], width - start.shape[2], generator=generator).to(m.device, m.dtype)
    norms = torch.linalg.vector_norm(start, dim=1, keepdim=True)
    start = torch.cat([start / torch.where(norms > 0, norms, 1.0), m @ mix], dim=2)
    q = orthonormalize(m @ (m.mT @ start))
    b = q.mT @ m
    return q @ leading_eigenvectors(b @ b.mT, rank)


class Descent:
    """An MLR matrix during its fit. weight_OI: the target. counts: number of blocks of each level. ranks: current rank
    of each level, at first 0.

    gap_OI: W - B. gap_c_OI: (W - B) C. factors: level -> its blocks. Matrices are filled up with
    zeros to whole blocks of every level, and moments with the identity.
    """

    def __init__(self, weight_OI: Tensor, metric: Metric, counts: Sequence[int]):
        self.weight_OI, self.metric, self.counts, self.ranks = weight_OI, metric, list(counts), [0] * len(counts)
        self._sizes = [max(p * block_size(n, p) for p in counts) for n in weight_OI.shape]
        self._gap = zero_pad(weight_OI, *self._sizes).clone()
        c_II = metric.c_II
        self._gap_c = self._gap if c_II is None else zero_pad(metric.times_c(weight_OI), *self._sizes).clone()
        self._g = None if metric.g_OO is None else fill_up(metric.g_OO, self._sizes[0])
        width = self._sizes[1]
        self._c = None if c_II is None else metric.compute_once(("mlr", width), lambda: fill_up(c_II, width))
        self._roots: dict[int, tuple[BlockRoots, BlockRoots]] = {}
        self.factors: dict[int, Blocks] = {}

    def copy(self: DescentT) -> DescentT:
        """Return an independent copy; factors are shared, because they are replaced, never changed."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._gap = self._gap.clone()
        other._gap_c = other._gap if self._gap_c is self._gap else self._gap_c.clone()
        other.factors, other.ranks = dict(self.factors), list(self.ranks)
        return other

    @property
    def gap_OI(self) -> Tensor:
        """W - B, a view."""
        return self._gap[: self.weight_OI.shape[0], : self.weight_OI.shape[1]]

    @property
    def gap_c_OI(self) -> Tensor:
        """(W - B) C, a view."""
        return self._gap_c[: self.weight_OI.shape[0], : self.weight_OI.shape[1]]

    def change_gap(self, change_OI: Tensor) -> None:
        """Subtract a change of B (O, I) from the gap."""
        self.gap_OI.sub_(change_OI)
        if self.metric.c_II is not None:
            self.gap_c_OI.sub_(change_OI @ self.metric.c_II)

    def error(self) -> float:
        """Return the squared error in the metric."""
        weighed, g_OO = self._gap_c, self._g
        if g_OO is not None:
            weighed = g_OO[:, None] * weighed if g_OO.dim() == 1 else g_OO @ weighed
        return inner_product(weighed, self._gap)

    def block_shape(self, level: int) -> tuple[int, int]:
        """Return rows and columns of a block of a level."""
        out, in_ = self.weight_OI.shape
        return block_size(out, self.counts[level]), block_size(in_, self.counts[level])

    def block_roots(self, level: int) -> tuple[BlockRoots, BlockRoots]:
        """Return the roots of the blocks G_kk and C_kk of a level. They are computed once for all copies of a fit, and
        those of C once for all matrices with the same C.
        """
        p, (o, i) = self.counts[level], self.block_shape(level)
        if p not in self._roots:
            c_roots = self.metric.compute_once(("mlr roots", p, i), lambda: BlockRoots.of(self._c, p, i))
            self._roots[p] = BlockRoots.of(self._g, p, o), c_roots
        return self._roots[p]

    def gradient(self, level: int, part: slice = ALL) -> Tensor:
        """Return the blocks (G (W - B) C)_kk (p, o, i) of a level."""
        p, (o, i), g_OO = self.counts[level], self.block_shape(level), self._g
        if g_OO is None or g_OO.dim() == 1:
            blocks = diagonal_blocks(self._gap_c, p, o, i)[part]
            return blocks if g_OO is None else g_OO[: p * o].view(p, o, 1)[part] * blocks
        columns = self._gap_c[:, : p * i].unflatten(1, (p, i)).movedim(1, 0)[part]
        gradient: Tensor = g_OO[: p * o].unflatten(0, (p, o))[part] @ columns
        return gradient

    def whitened_target(self, level: int, part: slice = ALL) -> Tensor:
        """Return T^T X R for the matrices X that the blocks should be, with all others fixed, and the roots T T^T =
        G_kk, R R^T = C_kk.
        """
        g_roots, c_roots = self.block_roots(level)
        if self.counts[level] == 1:
            target = c_roots.whiten(g_roots.whiten(self.gap_OI[None], part).mT, part).mT
        else:
            target = c_roots.solve(g_roots.solve(self.gradient(level, part), part).mT, part).mT
        if old := self.factors.get(level):
            target = target + old.u[part] @ old.v[part]
        return target

    def best_blocks(self, level: int, rank: int, target: Tensor, part: slice = ALL) -> Blocks:
        """Return the blocks of this rank that are the best ones in the metric for whitened targets (p, o, i)."""
        g_roots, c_roots = self.block_roots(level)
        if rank >= min(target.shape[1:]):
            u, v = exact_factors(target)
        else:
            old, tall = self.factors.get(level), target.shape[1] > target.shape[2]
            start = None if old is None else old.v[part].mT if tall else old.u[part]
            u = leading_left(target.mT if tall else target, rank, start)
            u, v = (target @ u, u.mT) if tall else (u, u.mT @ target)
        return Blocks(g_roots.unwhiten(u, part), c_roots.unwhiten(v.mT, part).mT, u, v)

    def place(self, level: int, part: slice, new: Blocks) -> None:
        """Replace the blocks of `part`, and bring the gap up to date.

        The other blocks of the level stay; the smaller of both ranks is filled up with zeros.
        """
        old = self.factors.get(level)
        if old is None:
            self.factors[level] = new if part == ALL else new.among(self.counts[level], part)
            self._subtract(level, part, new.left, new.right)
            return
        self.factors[level] = new if part == ALL else old.with_part(part, new)
        left, right = torch.cat([new.left, -old.left[part]], dim=2), torch.cat([new.right, old.right[part]], dim=1)
        self._subtract(level, part, left, right)

    def remove(self, level: int) -> None:
        """Remove all blocks of a level."""
        if old := self.factors.pop(level, None):
            self._subtract(level, ALL, -old.left, old.right)

    def _subtract(self, level: int, part: slice, left: Tensor, right: Tensor) -> None:
        """Subtract the blocks left right, placed along the diagonal, from the gap."""
        p, (o, i) = self.counts[level], self.block_shape(level)
        diagonal_blocks(self._gap, p, o, i)[part].sub_(left @ right)
        if self._c is not None:
            moved = right @ self._c[: p * i].unflatten(0, (p, i))[part]
            self._gap_c[: p * o].unflatten(0, (p, o))[part].sub_(left @ moved)

    def error_change(self, level: int, target: Tensor, new: Blocks) -> float:
        """Return by how much the squared error changes if all blocks of a level with full C and G are replaced at once;
        target: of the level, whitened.
        """
        p, (o, i), old = self.counts[level], self.block_shape(level), self.factors.get(level)
        assert self._g is not None and self._c is not None
        left, right, change = new.left, new.right, new.u @ new.v
        if old is not None:
            left, right = torch.cat([left, -old.left], dim=2), torch.cat([right, old.right], dim=1)
            target, change = target - old.u @ old.v, change - old.u @ old.v
        # Entries (k, k') of the grids of blocks: left_k'^T G left_k and right_k C right_k'^T, each (r, r).
        g_left = self._g[: p * o, : p * o].unflatten(1, (p, o)).movedim(1, 0) @ left
        by_g = left.mT @ g_left.unflatten(1, (p, o))
        right_c = right @ self._c[: p * i, : p * i].unflatten(0, (p, i))
        by_c = right_c.unflatten(2, (p, i)).movedim(2, 1) @ right.mT
        return float((by_g * by_c.mT).sum() - 2 * (target * change).sum())

    def are_coupled(self, level: int) -> bool:
        """Whether the best block of a level depends on its other blocks.

        They share no row and no column, so it does only by the entries of both G and C off the diagonal blocks.
        """
        coupled = self._c is not None and self._g is not None and self._g.dim() == 2
        return coupled and self.counts[level] > 1

    def fit_level(self, level: int, rank: int) -> None:
        """Fit every block of a level once; rank 0 removes the level.

        All blocks take their best values at once. Where they are coupled and that would raise the error, they take them
        one after the other, each step the exact minimum over its block.
        """
        if not rank:
            self.remove(level)
            return
        target = self.whitened_target(level)
        new = self.best_blocks(level, rank, target)
        if not self.are_coupled(level) or self.error_change(level, target, new) <= 0 or self._gap.is_meta:
            self.place(level, ALL, new)
            return
        for k in range(self.counts[level]):
            self.fit_block(level, k, rank)
        self.factors[level] = self.factors[level].first_ranks(rank)

    def fit_block(self, level: int, k: int, rank: int) -> None:
        """Replace block k of a level by the best one of this rank with all others fixed."""
        part = slice(k, k + 1)
        self.place(level, part, self.best_blocks(level, rank, self.whitened_target(level, part), part))

    def tails(self, level: int) -> list[float]:
        """Return tail[r], the part of the squared error that a level of rank r leaves if all other levels stay as they
        are.
        """
        tails: list[float] = tail_energies(self.whitened_target(level)).sum(0).tolist()
        return tails

    def block_target(self) -> Tensor:
        """Return the matrix (O, I) that all blocks of all levels together should be."""
        return self.weight_OI

    def sweep(self, ranks: Sequence[int]) -> None:
        """Fit every level once, the first ones first."""
        for level, rank in enumerate(ranks):
            if rank or self.ranks[level]:
                self.fit_level(level, rank)
        self.ranks = list(ranks)

    def solve_left(self) -> None:
        """Solve for the left factors of all levels at once, rows that lie in the same blocks together.

        The optimum if G is diagonal or the identity: then every row has its own least squares, in which G drops out.
        """
        out, weight_OI, c_II = self.weight_OI.shape[0], self.block_target(), self.metric.c_II
        old = {level: self.level_factors(level) for level in self.factors}
        new = {level: left_Or.clone() for level, (left_Or, _) in old.items()}
        sizes = {level: self.block_shape(level) for level in old}
        bounds = sorted({min(k * o, out) for level, (o, _) in sizes.items() for k in range(self.counts[level] + 1)})
        for start, stop in itertools.pairwise(bounds):
            parts = []
            for level, (o, i) in sizes.items():
                columns = slice(start // o * i, (start // o + 1) * i)
                part_rI = torch.zeros_like(old[level][1])
                part_rI[:, columns] = old[level][1][:, columns]
                parts.append(part_rI)
            right_RI = torch.cat(parts)
            weighed_RI = right_RI if c_II is None else right_RI @ c_II
            gram = spd_factor(weighed_RI @ right_RI.mT, (1e-6, 1e-4, 1e-2))
            left_OR = linalg.cholesky_solve((weight_OI[start:stop] @ weighed_RI.mT).mT.contiguous(), gram).mT
            for level, left_Or in zip(sizes, left_OR.split([len(part) for part in parts], dim=1)):
                new[level][start:stop] = left_Or
        for level, left_Or in new.items():
            self.read_level(level, left_Or, old[level][1])

    def read_level(self, level: int, left_Or: Tensor, right_rI: Tensor) -> None:
        """Take the factors of all blocks of a level, as `level_factors` returns them."""
        p, (o, i), rank = self.counts[level], self.block_shape(level), left_Or.shape[1]
        left = zero_pad(left_Or, p * o, rank).view(p, o, rank).clone()
        right = zero_pad(right_rI, rank, p * i).view(rank, p, i).movedim(1, 0).clone()
        g_roots, c_roots = self.block_roots(level)
        u, v = g_roots.whiten(left, ALL), c_roots.whiten(right.mT, ALL).mT
        self.ranks[level] = rank
        self.place(level, ALL, Blocks(left, right, u, v))

    def level_factors(self, level: int) -> tuple[Tensor, Tensor]:
        """Return the factors left (O, r) and right (r, I) of a level, of about equal norms within each block."""
        out, in_ = self.weight_OI.shape
        if level not in self.factors:
            return self.weight_OI.new_zeros(out, 0), self.weight_OI.new_zeros(0, in_)
        left, right = balance_factors(self.factors[level].left, self.factors[level].right)
        return left.flatten(0, 1)[:out], right.movedim(0, 1).flatten(1)[:, :in_]


def fill_up(moment: Tensor, size: int) -> Tensor:
    """Return a moment (N, N) or its diagonal (N,) as one of `size` rows, filled up with the identity."""
    missing = size - moment.shape[0]
    if not missing:
        return moment
    ones = moment.new_ones(missing)
    return torch.cat([moment, ones]) if moment.dim() == 1 else torch.block_diag(moment, ones.diag())


def expected_sweeps(starts: Sequence[Sequence[int]], exchange: bool, search: Search = THOROUGH) -> int:
    """Return the number of sweeps of a fit whose exchanges are each accepted at the first try.

    The gains cost one sweep.
    """
    exchanges = 2 * search.exchanges * (TRIAL_SWEEPS + 1) if exchange else 0
    return search.start_sweeps * len(starts) + exchanges + LAST_SWEEPS


def best_descent(
    weight_OI: Tensor, metric: Metric, starts: Sequence[Sequence[int]], limits: Sequence[int], exchange: bool
) -> Descent:
    """Return the best fit of an MLR matrix found from the starting ranks; arguments as in `best_fit`."""
    counts = [2**level for level in range(len(limits))]
    search = THOROUGH if sum(starts[0]) < FEW_RANKS else MLR_SEARCH
    return best_fit(lambda: Descent(weight_OI, metric, counts), starts, limits, [1] * len(limits), exchange, search)


@torch.no_grad()
def best_fit(
    begin: Callable[[], DescentT],
    starts: Sequence[Sequence[int]],
    limits: Sequence[int],
    costs: Sequence[int],
    exchange: bool,
    search: Search = THOROUGH,
) -> DescentT:
    """Return the best fit found from the starting ranks.

    begin: returns a new fit, whose ranks are 0. limits, costs: largest rank of each level, and stored elements of a
    unit of it, in any unit. exchange: move rank between levels while that lowers the error. The result costs no more
    than the first start.

    On the meta device, where there is no error to go by, one sweep of the first start stands for all sweeps of a fit.
    """
    exchange = exchange and len(limits) > 1
    fit = begin()
    if fit.weight_OI.is_meta:
        with repeated(expected_sweeps(starts, exchange, search)):
            fit.sweep(starts[0])
        return fit
    fits = []
    for ranks in starts:
        fits.append(fit.copy())
        for _ in range(search.start_sweeps if sum(rank > 0 for rank in ranks) > 1 else 1):
            fits[-1].sweep(ranks)
    best = min(fits, key=lambda fit: fit.error())
    if exchange:
        # From the first start, rank on every level, as well, if its error is near: from rank on level 1 alone the
        # exchange often ends in a local minimum.
        near = best is not fits[0] and fits[0].error() <= search.near * best.error()
        fits = [fits[0], best] if near else [best]
        budget = total_cost(starts[0], costs)
        best = min((exchange_ranks(fit, limits, costs, budget, search) for fit in fits), key=lambda fit: fit.error())
    if sum(rank > 0 for rank in best.ranks) > 1:
        before = best.error()
        for _ in range(LAST_SWEEPS):
            best.sweep(best.ranks)
            before, last = best.error(), before
            if before > last * (1 - search.last_gain):
                break
    return best


def total_cost(ranks: Sequence[int], costs: Sequence[int]) -> int:
    """Return the cost of all ranks, in the unit of `costs`."""
    return sum(rank * cost for rank, cost in zip(ranks, costs))


def exchange_ranks(
    fit: DescentT,
    limits: Sequence[int],
    costs: Sequence[int] | None = None,
    budget: int | None = None,
    search: Search = THOROUGH,
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
    tails = [fit.tails(level) for level in range(len(limits))]
    while amount and accepted < search.exchanges:
        exchanges = _exchanges(fit.ranks, tails, limits, costs, budget, amount)[: search.tries]
        better = _first_better(fit, exchanges, search.min_gain, failed)
        if better is not None:
            fit, accepted, failed = better, accepted + 1, set()
            tails = [fit.tails(level) for level in range(len(limits))]
        elif amount < min(costs):  # only single ranks were moved
            break
        else:
            amount //= 2
    return fit


def _exchanges(
    ranks: Sequence[int],
    tails: Sequence[Sequence[float]],
    limits: Sequence[int],
    costs: Sequence[int],
    budget: int,
    amount: int,
) -> list[tuple[int, ...]]:
    """Return the ranks after each exchange of about `amount` between two levels that is possible, the most promising
    first.

    ranks, tails: of each level. One level gets ranks of that cost, at least one, and another gives as many as the
    budget then lacks. Gain and loss are estimates, because other levels stay as they are.
    """
    total = total_cost(ranks, costs)

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


def _first_better(
    fit: DescentT, exchanges: list[tuple[int, ...]], min_gain: float, failed: set[tuple[int, ...]]
) -> DescentT | None:
    """Return a refitted copy with the first ranks that lower the error, or None.

    Ranks that do not are added to `failed`.
    """
    before = fit.error()
    for ranks in exchanges:
        if ranks in failed:
            continue
        trial = fit.copy()
        for _ in range(TRIAL_SWEEPS):
            trial.sweep(ranks)
        if trial.error() < before * (1 - min_gain):
            return trial
        failed.add(ranks)
    return None
