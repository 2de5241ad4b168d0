"""Table of docs/measurements/quality.md: candidates for `auto` at equal stored bytes, by the output error on held-out
rows.

python -m recipes.papers.quality.candidates SRC --calibration FILE [--keep 0.5] [--layer 0 --layer 3] [--family NAME] [--json OUT]
    [--text FILE --swap FAMILY]

    low rank, pivoted       the structures that `auto` has; pivoted low rank stores r (O + I - r) values and a position of each row
    btt                     a grid of blocks after alternating least squares; variants are grids
    .. + sparse             low rank, or pivoted low rank, plus single elements; variants are the share of the bytes of the elements
    sparse                  single elements alone
    pivoted + pattern       pivoted low rank plus n of every m neighboring inputs of each row, the largest patterns that fit
    low rank + btt          the structure mlbtc, levels [1, [4, 4]]; variants are the share of the low rank
    btt, clustered          btt 4x4 with inputs, or inputs and outputs, ordered so that correlated channels share a block
    .. allocated            a basis each for q, k, v and for gate, up; the bytes of a group are divided by the Fisher-weighted error
    .. shared               one right factor for the stacked matrices of a group, weighted by their Fisher
    .. spread               the bytes are divided over the matrices, or groups, of all measured layers as `surgery convert` divides them

Values are counted as bfloat16. A position of a row or column is counted as int32, as pivoted low rank stores it. Single
elements have an int16 column each and int32 row starts, or a bitmap of the matrix, whichever is smaller; n of m have
log2(m) bits each, or m bits together. Every fit minimizes tr((W - B) C (W - B)^T), with C of the original model's
inputs (independent calibration), and stores at most its share of the bytes of W; those of `spread` do so together.
`best` is the variant with the lowest held-out error, chosen for each matrix.

The predicted rise is sum_o G_oo (E C E^T)_oo / 2 in nats per token, with E = W - B, C of held-out rows and G_oo the
mean squared gradient at output o of the loss of labels drawn from the model. --swap puts the dense products of a family
into all layers and scores the model.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.papers.script import run_script
from surgery.architectures.linears import find_linears
from surgery.calibration.data import document_stream, text_windows
from surgery.core.device import choose_device
from surgery.eval.run import load
from surgery.eval.suite import EvalOptions
from surgery.eval.suites import perplexity as ppl
from surgery.planning.allocate import CostPoint, allocate_budget
from surgery.structures import STRUCTURES, Metric, linalg
from surgery.structures.btt import BTT, BTTLinear
from surgery.structures.low_rank import gram_tails, low_rank_factors, tail_energies
from surgery.structures.metric import damp_, spd_inverse
from surgery.structures.mlbtc import MLBTC, MLBTCLinear

VALUE, INDEX = 2, 4  # bytes of a bfloat16 value, and of the int32 position of a row or column
SWEEPS = 3
ALTERNATIONS = 4  # of low rank and single elements
GRIDS = ((2, 2), (4, 4), (8, 8), (4, 8), (8, 4), (2, 8), (16, 16), "sqrt")
SHARES = (0.1, 0.25, 0.5, 0.75)
PATTERNS = ((1, 4), (3, 8), (2, 4))  # n of every m neighboring inputs
ROLES = ("query", "key", "value", "output", "gate", "up", "down")


@dataclass(frozen=True)
class Problem:
    """One linear. weight_OI: W. metric: C of the fit rows, damped. held_II: C of the held-out rows. g_O: mean squared
    output gradients.
    """

    path: str
    layer: int
    role: str
    weight_OI: Tensor
    metric: Metric
    held_II: Tensor
    g_O: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Return (O, I)."""
        out, in_ = self.weight_OI.shape
        return out, in_

    def evaluate(self, dense_OI: Tensor) -> tuple[float, float]:
        """Return (relative output error, predicted rise of the loss in nats per token) on held-out rows."""
        gap_OI = self.weight_OI - dense_OI
        gap_O = ((gap_OI @ self.held_II) * gap_OI).sum(-1)
        energy = ((self.weight_OI @ self.held_II) * self.weight_OI).sum()
        return float((gap_O.sum() / energy).clamp_min(0).sqrt()), float((self.g_O * gap_O).sum() / 2)


@dataclass(frozen=True)
class Fit:
    """An approximation. variant: "" if the family has only one. size: stored bytes."""

    variant: str
    dense_OI: Tensor
    size: float


# -- stored bytes ------------------------------------------------------------------------------------------------
def dense_size(shape: tuple[int, int]) -> int:
    """Return the bytes of a dense matrix."""
    return VALUE * shape[0] * shape[1]


def low_rank_size(shape: tuple[int, int], rank: int) -> int:
    """Return the bytes of two factors."""
    return VALUE * rank * (shape[0] + shape[1])


def pivoted_size(shape: tuple[int, int], rank: int) -> int:
    """Return the bytes of pivoted low rank: its values, and a position of every output row."""
    out, in_ = shape
    return VALUE * rank * (out + in_ - rank) + INDEX * out if rank else 0


def sparse_size(shape: tuple[int, int], count: int) -> int:
    """Return the bytes of `count` single elements: values, and the smaller of columns with row starts and a bitmap."""
    out, in_ = shape
    columns = count * (2 if in_ <= 2**16 else 4) + INDEX * (out + 1)
    return VALUE * count + min(columns, -(-out * in_ // 8)) if count else 0


def pattern_size(shape: tuple[int, int], pattern: tuple[int, int]) -> float:
    """Return the bytes of n of every m inputs: values, and the smaller of n positions and a bitmap of m bits."""
    n, m = pattern
    return shape[0] * shape[1] / m * (VALUE * n + min(n * math.log2(m), m) / 8)


def largest(size: Callable[[int], int], limit: int, budget: float) -> int:
    """Return the largest n <= limit with size(n) <= budget, for a size that grows with n; 0 if none fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(middle) <= budget else (low, middle - 1)
    return low


RANK_SIZES = {"low rank": low_rank_size, "pivoted": pivoted_size}


def largest_rank(kind: str, shape: tuple[int, int], budget: float) -> int:
    """Return the largest rank of a kind within the budget."""
    return largest(lambda rank: RANK_SIZES[kind](shape, rank), min(shape), budget)


# -- fits of one matrix ------------------------------------------------------------------------------------------
def low_rank(weight_OI: Tensor, rank: int, metric: Metric) -> Tensor:
    """Return the best matrix (O, I) of a rank in the metric; pivoting does not change it."""
    if rank == 0:
        return torch.zeros_like(weight_OI)
    left_OR, right_RI = low_rank_factors(weight_OI, rank, metric)
    return left_OR @ right_RI


def fit_rank(kind: str) -> Any:
    """Return the fit of low rank with the storage of a kind."""

    def fit(problem: Problem, budget: float) -> Iterator[Fit]:
        rank = largest_rank(kind, problem.shape, budget)
        dense_OI = low_rank(problem.weight_OI, rank, problem.metric)
        yield Fit("", dense_OI, RANK_SIZES[kind](problem.shape, rank))

    return fit


def fit_structure(weight_OI: Tensor, config: Any, metric: Metric) -> Tensor:
    """Return the dense matrix (O, I) of a structure after its projection and SWEEPS sweeps."""
    linear = STRUCTURES[config].project(weight_OI, config, metric)
    for _ in range(SWEEPS):
        if linear.sweep(weight_OI, metric) is None:
            break
    return linear.dense().detach()


def btt_config(grid: Any, shape: tuple[int, int], budget: float) -> BTT | None:
    """Return BTT of the largest rank within a budget in bytes, None if rank 1 does not fit."""
    config = BTTLinear.resolve(BTT(grid, 1), *shape)
    rank = largest(
        lambda s: VALUE * BTTLinear.params(BTT(config.blocks, s), *shape), BTTLinear.full_rank(config, *shape), budget
    )
    return BTT(config.blocks, rank) if rank else None


def fit_btt(problem: Problem, budget: float) -> Iterator[Fit]:
    """Yield a fit for every grid."""
    for grid in GRIDS:
        config = btt_config(grid, problem.shape, budget)
        if config is not None:
            dense_OI = fit_structure(problem.weight_OI, config, problem.metric)
            name = grid if isinstance(grid, str) else f"{grid[0]}x{grid[1]}"
            yield Fit(name, dense_OI, VALUE * BTTLinear.params(config, *problem.shape))


def fit_low_rank_btt(problem: Problem, budget: float) -> Iterator[Fit]:
    """Yield low rank plus BTT 4x4, with several shares of the bytes for the low rank."""
    out, in_ = shape = problem.shape
    for share in SHARES[1:]:
        rank = largest_rank("low rank", shape, share * budget)
        grid = btt_config((4, 4), shape, budget - low_rank_size(shape, rank))
        if not rank or grid is None:
            continue
        config = MLBTCLinear.resolve(MLBTC((1, (4, 4)), (rank, int(grid.rank or 0))), out, in_)
        size = VALUE * MLBTCLinear.params(config, out, in_)
        yield Fit(f"{share:.0%} low rank", fit_structure(problem.weight_OI, config, problem.metric), size)


# -- single elements ---------------------------------------------------------------------------------------------
def solve_elements(target_OI: Tensor, mask_OI: Tensor, start_OI: Tensor, metric: Metric, steps: int = 6) -> Tensor:
    """Return S (O, I), zero outside the mask, that minimizes tr((T - S)

    C (T - S)^T), by conjugate gradients for each row.

    start_OI: values to begin with, zero outside the mask.
    """
    c_II = metric.c_II if metric.c_II is not None else torch.eye(target_OI.shape[1], dtype=target_OI.dtype)
    scale_I = 1 / c_II.diagonal()
    s_OI = start_OI
    residual = mask_OI * ((target_OI - s_OI) @ c_II)
    step = moved = residual * scale_I
    energy = (residual * moved).sum(-1, keepdim=True)
    for _ in range(steps):
        product = mask_OI * (step @ c_II)
        size = energy / (step * product).sum(-1, keepdim=True).clamp_min(1e-30)
        s_OI, residual = s_OI + size * step, residual - size * product
        moved = residual * scale_I
        energy, before = (residual * moved).sum(-1, keepdim=True), energy
        step = moved + energy / before.clamp_min(1e-30) * step
    return s_OI


def largest_elements(score_OI: Tensor, count: int) -> Tensor:
    """Return a mask (O, I), 1 at the `count` largest scores."""
    mask = torch.zeros(score_OI.numel(), dtype=score_OI.dtype)
    mask[score_OI.flatten().topk(count).indices] = 1
    return mask.view_as(score_OI)


def largest_of_pattern(score_OI: Tensor, pattern: tuple[int, int]) -> Tensor:
    """Return a mask (O, I), 1 at the n largest scores of every m neighboring inputs."""
    score_OGm = score_OI.unflatten(-1, (-1, pattern[1]))
    chosen = score_OGm.topk(pattern[0], dim=-1).indices
    return torch.zeros_like(score_OGm).scatter_(-1, chosen, 1.0).flatten(-2)


def low_rank_and_elements(
    weight_OI: Tensor, rank: int, choose: Callable[[Tensor], Tensor], metric: Metric, alternations: int = ALTERNATIONS
) -> Tensor:
    """Return L + S (O, I), L of a rank and S within the mask choose(scores), by alternations in the metric.

    Elements of W - L are kept where leaving one out would raise the error most if the others made up for it, E^2 /
    (C^-1)_ii (optimal brain surgeon, Hassibi & Stork 1993). The result of the alternation with the smallest error is
    returned.
    """
    moment_II = metric.c_II
    cost_I = (
        torch.ones(weight_OI.shape[1])
        if moment_II is None
        else metric.compute_once("removal", lambda: spd_inverse(moment_II).diagonal().reciprocal())
    )
    s_OI, best, least = torch.zeros_like(weight_OI), weight_OI, math.inf
    for _ in range(alternations if rank else 1):
        l_OI = low_rank(weight_OI - s_OI, rank, metric)
        gap_OI = weight_OI - l_OI
        mask_OI = choose(gap_OI.square() * cost_I)
        s_OI = solve_elements(gap_OI, mask_OI, gap_OI * mask_OI, metric)
        error = metric.squared_norm(gap_OI - s_OI)
        if error < least:
            best, least = l_OI + s_OI, error
    return best


def fit_elements(kind: str, shares: Sequence[float] = SHARES) -> Any:
    """Return the fit of low rank, with the storage of a kind, plus single elements with these shares of the bytes."""

    def fit(problem: Problem, budget: float) -> Iterator[Fit]:
        shape = problem.shape
        for share in shares:
            count = largest(lambda n: sparse_size(shape, n), problem.weight_OI.numel(), share * budget)
            rank = largest_rank(kind, shape, budget - sparse_size(shape, count)) if share < 1 else 0
            choose = partial(largest_elements, count=count)
            dense_OI = low_rank_and_elements(problem.weight_OI, rank, choose, problem.metric)
            size = RANK_SIZES[kind](shape, rank) + sparse_size(shape, count)
            yield Fit(f"{share:.0%} sparse" if share < 1 else "", dense_OI, size)

    return fit


def fit_pattern(problem: Problem, budget: float) -> Iterator[Fit]:
    """Yield pivoted low rank plus n of every m inputs."""
    for pattern in PATTERNS:
        size = pattern_size(problem.shape, pattern)
        if problem.shape[1] % pattern[1] == 0 and size <= budget:
            rank = largest_rank("pivoted", problem.shape, budget - size)
            choose = partial(largest_of_pattern, pattern=pattern)
            dense_OI = low_rank_and_elements(problem.weight_OI, rank, choose, problem.metric)
            yield Fit(f"{pattern[0]} of {pattern[1]}", dense_OI, size + pivoted_size(problem.shape, rank))


# -- orders of channels ------------------------------------------------------------------------------------------
def cluster_order(moment_XX: Tensor, parts: int) -> Tensor:
    """Return an order (X,) of channels in which `parts` equal blocks hold correlated channels.

    Blocks are halved by the second eigenvector of the normalized Laplacian of |correlation|, again and again (spectral
    bisection).
    """
    scale = moment_XX.diagonal().clamp_min(1e-30).rsqrt()
    weight_XX = (moment_XX * scale[:, None] * scale).abs()

    def halve(rows: Tensor, count: int) -> Tensor:
        if count == 1:
            return rows
        part = weight_XX[rows][:, rows]
        degree = part.sum(-1).rsqrt()
        vector = linalg.eigh(part * degree[:, None] * degree)[1][:, -2] * degree
        ordered, middle = rows[vector.argsort()], len(rows) * (count // 2) // count
        return torch.cat([halve(ordered[:middle], count // 2), halve(ordered[middle:], count - count // 2)])

    return halve(torch.arange(len(moment_XX)), parts)


def fit_clustered(problem: Problem, budget: float) -> Iterator[Fit]:
    """Yield BTT 4x4 with ordered inputs, and with ordered inputs and outputs, each with the indices counted and
    without.
    """
    w_OI, c_II, (out, in_) = problem.weight_OI, problem.metric.c_II, problem.shape
    assert c_II is not None
    columns = problem.metric.compute_once("order", lambda: cluster_order(c_II, 4))
    metric = problem.metric.compute_once("ordered", lambda: Metric(c_II[columns][:, columns].contiguous()))
    outputs = cluster_order(w_OI @ c_II @ w_OI.mT, 4)
    fitted: dict[Any, Tensor] = {}
    for name, rows, indices in (("inputs", torch.arange(out), in_), ("inputs and outputs", outputs, in_ + out)):
        for label, size in ((name, INDEX * indices), (f"{name}, index free", 0)):
            config = btt_config((4, 4), problem.shape, budget - size)
            if config is None:
                continue
            if (name, config) not in fitted:
                ordered_OI = fit_structure(w_OI[rows][:, columns].contiguous(), config, metric)
                fitted[name, config] = ordered_OI[rows.argsort()][:, columns.argsort()]
            yield Fit(label, fitted[name, config], VALUE * BTTLinear.params(config, out, in_) + size)


# -- groups of matrices that read one input ----------------------------------------------------------------------
def stack_weighted(group: Sequence[Problem]) -> tuple[Tensor, list[float]]:
    """Return the stacked matrices (X, I) of a group, each times the root of its mean Fisher, and these roots."""
    scales = [float(problem.g_O.mean()) ** 0.5 for problem in group]
    return torch.cat([scale * problem.weight_OI for scale, problem in zip(scales, group)]), scales


def rank_errors(weight_OI: Tensor, metric: Metric) -> Tensor:
    """Return the squared error in the metric of the best matrix of each rank, 0 to min(O, I)."""
    wide = weight_OI.shape[0] <= weight_OI.shape[1]
    tail = gram_tails(metric.left_gram(weight_OI)) if wide else tail_energies(metric.whiten(weight_OI))
    return tail.double()


def fit_shared(kind: str) -> Any:
    """Return the fit of one low-rank matrix to the stacked matrices of a group, with the storage of a kind."""

    def fit(group: Sequence[Problem], budget: float) -> list[Fit]:
        stacked_XI, scales = stack_weighted(group)
        shape = len(stacked_XI), stacked_XI.shape[1]
        rank = largest_rank(kind, shape, budget)
        dense_XI = low_rank(stacked_XI, rank, group[0].metric)
        size = RANK_SIZES[kind](shape, rank)
        parts = dense_XI.split([len(problem.weight_OI) for problem in group])
        return [
            Fit("", part / scale, size * len(part) / len(dense_XI)) for part, scale in zip(parts, scales, strict=True)
        ]

    return fit


def fit_allocated(kind: str) -> Any:
    """Return the fit of a low-rank matrix each; ranks minimize the error of the group, weighted as in `fit_shared`."""

    def fit(group: Sequence[Problem], budget: float) -> list[Fit]:
        errors, sizes = [], []
        for problem in group:
            errors.append(rank_errors(problem.weight_OI, problem.metric) * float(problem.g_O.mean()))
            of_rank = [RANK_SIZES[kind](problem.shape, rank) for rank in range(len(errors[-1]))]
            sizes.append(torch.tensor(of_rank, dtype=torch.float64))
        ranks = allocate_ranks(errors, sizes, budget)
        fits = [low_rank(problem.weight_OI, rank, problem.metric) for problem, rank in zip(group, ranks)]
        return [Fit("", dense_OI, float(size[rank])) for dense_OI, size, rank in zip(fits, sizes, ranks)]

    return fit


def allocate_ranks(errors: Sequence[Tensor], sizes: Sequence[Tensor], budget: float) -> list[int]:
    """Return the rank of each matrix that minimizes the sum of errors[rank] + price * sizes[rank], at the lowest price
    within the budget.

    The bytes that are left go to single ranks, in turn.
    """

    def ranks_at(price: float) -> list[int]:
        return [int((error + price * size).argmin()) for error, size in zip(errors, sizes)]

    def total(ranks: Sequence[int]) -> float:
        return sum(float(size[rank]) for size, rank in zip(sizes, ranks))

    low, high = -60.0, 60.0  # log2 of the price
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if total(ranks_at(2**middle)) <= budget else (middle, high)
    ranks, moved = ranks_at(2**high), True
    while moved:
        moved = False
        for at, size in enumerate(sizes):
            more = [rank + (at == k) for k, rank in enumerate(ranks)]
            if more[at] < len(size) and total(more) <= budget:
                ranks, moved = more, True
    return ranks


# -- budgets over the whole model --------------------------------------------------------------------------------
def cost_points(unit: Sequence[Problem]) -> list[CostPoint]:
    """Return (bytes, expected rise of the loss) of a matrix or of a group with one right factor: dense, and of each
    rank that is smaller.
    """
    stacked_XI, _ = stack_weighted(unit)
    shape = len(stacked_XI), stacked_XI.shape[1]
    errors = rank_errors(stacked_XI, unit[0].metric).tolist()
    points = [CostPoint(pivoted_size(shape, rank), error / 2) for rank, error in enumerate(errors) if rank]
    return [CostPoint(dense_size(shape), 0.0), *(point for point in points if point.params < dense_size(shape))]


def fit_spread(groups: Sequence[Sequence[Problem]], keep: float, shared: bool) -> dict[str, Fit]:
    """Return a fit for each path, pivoted low rank or dense, with the bytes of all groups together divided by
    `allocate_budget`.

    shared: one right factor for each group, which is dense as a whole or not at all; else a factor for each matrix.
    """
    units = list(groups) if shared else [[problem] for group in groups for problem in group]
    budget = keep * sum(dense_size(problem.shape) for unit in units for problem in unit)
    sizes = allocate_budget({unit[0].path: cost_points(unit) for unit in units}, budget)
    found: dict[str, Fit] = {}
    for unit in units:
        size = sizes[unit[0].path]
        if size == sum(dense_size(problem.shape) for problem in unit):
            fits = [Fit("", problem.weight_OI, dense_size(problem.shape)) for problem in unit]
        else:
            fits = fit_shared("pivoted")(unit, size)
        found |= {problem.path: fit for problem, fit in zip(unit, fits, strict=True)}
    return found


FAMILIES: dict[str, Callable[[Problem, float], Iterator[Fit]]] = {
    "low rank": fit_rank("low rank"),
    "pivoted": fit_rank("pivoted"),
    "btt": fit_btt,
    "low rank + sparse": fit_elements("low rank"),
    "pivoted + sparse": fit_elements("pivoted"),
    "sparse": fit_elements("low rank", (1.0,)),
    "pivoted + pattern": fit_pattern,
    "low rank + btt": fit_low_rank_btt,
    "btt, clustered": fit_clustered,
}
GROUP_FAMILIES: dict[str, Callable[[Sequence[Problem], float], list[Fit]]] = {
    "low rank, allocated": fit_allocated("low rank"),
    "low rank, shared": fit_shared("low rank"),
    "pivoted, allocated": fit_allocated("pivoted"),
    "pivoted, shared": fit_shared("pivoted"),
}
SPREAD_FAMILIES = {"pivoted, spread": False, "pivoted, shared, spread": True}  # whether groups share a right factor


# -- statistics of the model -------------------------------------------------------------------------------------
class Statistics:
    """Sums of x x^T by the linear that reads x first, and of squared output gradients by linear."""

    def __init__(self, model: Any, layers: Sequence[int] | None):
        found = [info for info in find_linears(model).linears if info.index is not None]
        self.linears = {i.path: i for i in found if layers is None or i.index in layers}
        if any(info.transposed or info.fused for info in self.linears.values()):
            raise SystemExit("candidates: the model has fused linears. Use one with a linear for each matrix")
        self.model, self.leaders = model, dict[str, str]()
        self.last: tuple[Any, str] = (None, "")

    @torch.no_grad()
    def moments(self, windows_NT: Tensor) -> dict[str, Tensor]:
        """Return E[x x^T] (I, I) over windows, by the path of the first linear that reads x."""
        sums: dict[str, Tensor] = {}

        def record(path: str) -> Any:
            def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                if self.last[0] is args[0]:
                    self.leaders[path] = self.last[1]
                    return
                self.leaders[path], self.last = path, (args[0], path)
                rows_NI = args[0].flatten(0, -2)
                sums[path] = sums.get(path, 0) + rows_NI.mT @ rows_NI / windows_NT.numel()

            return hook

        handles = [self.model.get_submodule(path).register_forward_pre_hook(record(path)) for path in self.linears]
        for rows in windows_NT.split(1):
            self.model(rows.to(self.model.device))
        for handle in handles:
            handle.remove()
        self.last = (None, "")
        return sums

    def gradients(self, windows_NT: Tensor) -> dict[str, Tensor]:
        """Return E[g^2] (O,) of each linear, g the gradient of the summed loss of labels drawn from the model."""
        sums: dict[str, Tensor] = {}

        def record(path: str) -> Any:
            def keep(g: Tensor) -> None:
                sums[path] = sums.get(path, 0) + g.flatten(0, -2).square().sum(0) / windows_NT.numel()

            return lambda _, args, y: y.register_hook(keep) and None

        handles = [self.model.get_submodule(path).register_forward_hook(record(path)) for path in self.linears]
        generator = torch.Generator().manual_seed(0)
        for rows in windows_NT.split(1):
            logits = self.model(rows.to(self.model.device)).logits.flatten(0, -2).float()
            drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
            nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum").backward()
        for handle in handles:
            handle.remove()
        self.model.zero_grad()
        return sums


def make_groups(
    model: Any, windows_NT: Tensor, layers: Sequence[int] | None, holdout: float, fisher: int
) -> list[list[Problem]]:
    """Return the linears of the layers, those with one input together. fisher: number of windows for the gradients."""
    held = max(1, round(holdout * len(windows_NT)))
    statistics = Statistics(model, layers)
    fit, out = statistics.moments(windows_NT[:-held]), statistics.moments(windows_NT[-held:])
    gradients = statistics.gradients(windows_NT[:fisher])
    metrics: dict[str, Metric] = {}
    for path, c_II in fit.items():
        damp_(c_II, 0.01)
        metrics[path] = Metric(c_II.cpu())
    groups: dict[str, list[Problem]] = defaultdict(list)
    for path, info in statistics.linears.items():
        leader, weight_OI = statistics.leaders[path], model.get_submodule(path).weight.detach().float().cpu()
        role = " ".join(role.rpartition(".")[2] for role in info.roles) or path.rpartition(".")[2]
        metric, held_II = metrics[leader], out[leader].cpu()
        problem = Problem(path, info.index or 0, role, weight_OI, metric, held_II, gradients[path].cpu())
        groups[leader].append(problem)
    return list(groups.values())


# -- the table ---------------------------------------------------------------------------------------------------
def fit_group(
    group: Sequence[Problem], keep: float, family: str, spread: Mapping[str, dict[str, Fit]] | None = None
) -> list[list[Fit]]:
    """Return the variants of a family for each matrix of a group. spread: family -> path -> fit, of families over the
    whole model.
    """
    if family in SPREAD_FAMILIES:
        return [[(spread or {})[family][problem.path]] for problem in group]
    budgets = [keep * dense_size(problem.shape) for problem in group]
    if family in FAMILIES:
        return [list(FAMILIES[family](problem, budget)) for problem, budget in zip(group, budgets)]
    if len(group) == 1:  # a matrix that shares its input with no other has a basis of its own
        return [list(FAMILIES[family.partition(",")[0]](group[0], budgets[0]))]
    return [[fit] for fit in GROUP_FAMILIES[family](group, sum(budgets))]


def measure_group(
    group: Sequence[Problem],
    keep: float,
    families: Sequence[str],
    swapped: dict[str, dict[str, Tensor]],
    spread: Mapping[str, dict[str, Fit]],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each matrix, family and variant. swapped: family -> path -> the best dense matrix, filled for its
    families.

    spread: see `fit_group`.
    """
    for family in families:
        began = time.perf_counter()
        for problem, fits in zip(group, fit_group(group, keep, family, spread)):
            rows: list[dict[str, Any]] = []
            for fit in fits:
                error, rise = problem.evaluate(fit.dense_OI)
                row = {"family": family, "variant": fit.variant, "keep": keep, "path": problem.path}
                row |= {"layer": problem.layer, "role": problem.role, "numel": problem.weight_OI.numel()}
                rows.append(row | {"size": fit.size, "error": error, "rise": rise})
            yield from rows
            # Variants with a free index only show what the index costs.
            counted = [k for k, row in enumerate(rows) if "free" not in row["variant"]]
            if counted:
                best = min(counted, key=lambda k: rows[k]["error"])
                if len(rows) > 1:
                    yield rows[best] | {"variant": "best", "of": rows[best]["variant"]}
                if family in swapped:
                    swapped[family][problem.path] = fits[best].dense_OI
        print(f"  {group[0].path} {family}: {time.perf_counter() - began:.1f} s", flush=True)


def format_table(rows: Sequence[dict[str, Any]], keep: float) -> Iterator[str]:
    """Yield the lines of the table of one share: mean relative errors by role, their mean over parameters, and the
    predicted rise.
    """
    mine = [row for row in rows if row["keep"] == keep]
    roles = [role for role in ROLES if any(row["role"] == role for row in mine)]
    yield f"| {keep:.0%} of the bytes | variant | " + " | ".join([*roles, "mean", "rise, nats", "bytes"]) + " |"
    yield "| --- " * (len(roles) + 5) + "|"
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in mine:
        cells[row["family"], row["variant"]].append(row)
    matrices = len({row["path"] for row in mine})
    for (family, variant), found in cells.items():
        errors = []
        for role in roles:
            of_role = [row["error"] for row in found if row["role"] == role]
            errors.append(f"{sum(of_role) / len(of_role):.3f}" if of_role else "")
        numel = sum(row["numel"] for row in found)
        mean = sum(row["numel"] * row["error"] for row in found) / numel
        rise, size = sum(row["rise"] for row in found), sum(row["size"] for row in found) / (VALUE * numel)
        note = "" if len(found) == matrices else f" ({len(found)} of {matrices} matrices)"
        cells_of_row = [family, variant + note, *errors, f"{mean:.4f}", f"{rise:.4f}", f"{size:.1%}"]
        yield f"| {' | '.join(cells_of_row)} |"


def score_swapped(
    model: Any, tokenizer: Any, options: EvalOptions, base: Any, swapped: dict[str, dict[str, Tensor]], keep: float
) -> Iterator[dict[str, Any]]:
    """Yield the perplexity of the model with the dense matrices of each family in place of its own, which are put back.

    Ratios are to the original and to the first family.
    """
    first = None
    for family, matrices in swapped.items():
        originals = {}
        for path, dense_OI in matrices.items():
            weight = model.get_submodule(path).weight
            originals[path] = weight.data
            weight.data = dense_OI.to(weight)
        result = ppl.measure(model, tokenizer, options)
        for path, weight_OI in originals.items():
            model.get_submodule(path).weight.data = weight_OI
        first = first or result
        row = {"family": family, "keep": keep, **ppl.summarize(result, base)}
        yield row | {"to_first": ppl.summarize(result, first)["ratio"]}


def main() -> None:
    """Measure every linear of the layers, print the tables, and score swapped models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    every = [*FAMILIES, *GROUP_FAMILIES, *SPREAD_FAMILIES]
    add("source", help="Checkpoint to measure.")
    add("--calibration", required=True, help="Calibration text.")
    add("--keep", type=float, action="append", help="Share of the bytes to keep. Repeatable. Default: 0.5.")
    add("--layer", type=int, action="append", help="Number of a layer to measure. Repeatable. Default: all.")
    add("--family", choices=every, action="append", help="Family to measure. Repeatable. Default: all.")
    add("--tokens", type=int, default=16384, help="Tokens of each text. Default: %(default)s.")
    add("--length", type=int, default=1024, help="Length of the windows in tokens. Default: %(default)s.")
    add("--holdout", type=float, default=0.125, help="Share of the windows that are held out. Default: %(default)s.")
    add("--fisher", type=int, default=4, help="Windows for the gradients. Default: %(default)s.")
    add("--text", help="Text to score swapped models on.")
    add("--swap", choices=every, action="append", help="Family to score in the whole model. Repeatable. Default: none.")
    add("--device", default="cpu", help="Device of the model; fits are on the CPU. Default: %(default)s.")
    add("--json", type=Path, help="Write the rows to this file.")
    arguments = parser.parse_args()
    if bool(arguments.swap) != bool(arguments.text) or (arguments.swap and arguments.layer):
        parser.error("--swap needs --text, and all layers (no --layer)")
    model, tokenizer = load(arguments.source, choose_device(arguments.device), "float32", False)
    stream = document_stream(arguments.calibration)
    windows_NT = text_windows(stream, tokenizer, arguments.tokens, arguments.length, arguments.calibration)
    groups = make_groups(model.float().eval(), windows_NT, arguments.layer, arguments.holdout, arguments.fisher)
    rows: list[dict[str, Any]] = []
    swapped_rows: list[dict[str, Any]] = []
    families = list(dict.fromkeys([*(arguments.family or every), *(arguments.swap or [])]))
    for keep in arguments.keep or [0.5]:
        swapped: dict[str, dict[str, Tensor]] = {family: {} for family in arguments.swap or []}
        spread = {name: fit_spread(groups, keep, SPREAD_FAMILIES[name]) for name in families if name in SPREAD_FAMILIES}
        for group in groups:
            rows += measure_group(group, keep, families, swapped, spread)
        print("\n".join(format_table(rows, keep)), flush=True)
        if swapped:
            options = EvalOptions(text=arguments.text, tokens=arguments.tokens, length=arguments.length)
            base = ppl.measure(model, tokenizer, options)
            print(f"original: {ppl.summarize(base)['perplexity']:.4g}", flush=True)
            for row in score_swapped(model, tokenizer, options, base, swapped, keep):
                swapped_rows.append(row)
                print(format_swapped(row), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({"matrices": rows, "models": swapped_rows}, indent=1))


def format_swapped(row: dict[str, Any]) -> str:
    """Format the score of a swapped model as a row of a table."""
    ratios = " | ".join(ppl.format_interval(row[key]) for key in ("ratio", "to_first"))
    return f"| {row['keep']:.0%} | {row['family']} | {row['perplexity']:.4g} ± {row['se']:.2g} | {ratios} |"


if __name__ == "__main__":
    run_script(main)
