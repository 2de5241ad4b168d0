"""Error curves of structures that are fitted by sweeps, corrected by fits at a few of their sizes (`probed` of
allocations.py).

    corrected(n) = curve(n) exp(r(n))        n: parameters

`rank_error_curve` takes the errors from spectra, which ignore what sweeps gain. A probe fits the matrix by `project`
and sweeps of `sweep`, in the metric of the curve, and measures r = log(error of the fit / curve). r is linear in log n
between probes and constant outside. Two probes lie near half of the matrix's uniform budget and near the whole of it;
more are spread evenly over the curve.

It is no part of `surgery convert`, because it made more conversions worse than better (docs/measurements/quality.md).
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from torch import Tensor

from surgery.planning.allocate import CostPoint
from surgery.planning.targets import LinearTarget
from surgery.structures import STRUCTURES, Metric, StructuredLinear

Curve = list[tuple[Any, float]]  # (config, squared error), cheapest first


class Probe(NamedTuple):
    """A measured size of a curve. params: stored elements. ratio: log(error of the fit / error of the curve)."""

    params: int
    ratio: float


def probed_points(target: LinearTarget, weight_OI: Tensor, metric: Metric, sweeps: int, probes: int) -> list[CostPoint]:
    """Return what `fisher.cost_points` returns, from corrected curves; without `round_ranks` and `speed`."""
    found = [CostPoint(target.numel, 0.0)]
    for config in target.configs:
        cls = STRUCTURES[config]
        curve = cls.rank_error_curve(weight_OI, cls.resolve(config, target.out, target.in_), metric)
        measured = probe_curve(target, curve, weight_OI, metric, sweeps, probes)
        points = [CostPoint(_size(target, step), error / 2) for step, error in curve]
        found += [point for point in correct_curve(points, measured) if point.params < target.numel]
    return found


def probe_curve(
    target: LinearTarget, curve: Curve, weight_OI: Tensor, metric: Metric, sweeps: int, probes: int
) -> list[Probe]:
    """Return the probes of a curve, smallest first; [] if the closed form is optimal."""
    if STRUCTURES[curve[0][0]].sweep is StructuredLinear.sweep:
        return []
    sizes = {i: _size(target, config) for i, (config, error) in enumerate(curve) if error > 0}
    sizes = {i: size for i, size in sizes.items() if size < target.numel}
    wanted = [share * target.uniform_budget() for share in (0.5, 1.0)]
    if probes == 2:
        chosen = {min(sizes, key=lambda i: abs(math.log(sizes[i] / budget))) for budget in wanted if sizes}
    else:
        chosen = {*list(sizes)[:: max(1, len(sizes) // probes)], *list(sizes)[-1:]}
    found = []
    for i in sorted(chosen):
        config, error = curve[i]
        fitted = fit_error(config, weight_OI, metric, sweeps)
        if fitted is not None:
            # At most a million times less than the curve, so that an exact fit has a logarithm.
            found.append(Probe(sizes[i], math.log(max(fitted / error, 1e-6))))
    return found


def fit_error(config: Any, weight_OI: Tensor, metric: Metric, sweeps: int) -> float | None:
    """Return the squared error of a fit after so many sweeps, or None if its closed form is optimal."""
    linear, error = STRUCTURES[config].project(weight_OI, config, metric), None
    for _ in range(sweeps):
        left = linear.sweep(weight_OI, metric)
        if left is None:
            break
        error = left
    return error


def correct_curve(points: list[CostPoint], probes: list[Probe]) -> list[CostPoint]:
    """Return the corrected points of a curve. Their errors never rise, and equal those of the fits at the probes.

    Where a larger fit is worse than a smaller one, it gets the error of the smaller one.
    """
    if not probes:
        return points
    scaled = {point.params: point.error * math.exp(_ratio(point.params, probes)) for point in points}
    least, corrected = math.inf, []
    for point in points:
        # Where the ratio rises, a point before a probe could fall below it.
        floor = next((scaled[probe.params] for probe in probes if probe.params >= point.params), 0.0)
        least = min(least, max(scaled[point.params], floor))
        corrected.append(CostPoint(point.params, least))
    return corrected


def _ratio(size: int, probes: list[Probe]) -> float:
    if size <= probes[0].params:
        return probes[0].ratio
    for a, b in itertools.pairwise(probes):
        if size <= b.params:
            return a.ratio + (b.ratio - a.ratio) * math.log(size / a.params) / math.log(b.params / a.params)
    return probes[-1].ratio


def _size(target: LinearTarget, config: Any) -> int:
    return int(STRUCTURES[config].params(config, target.out, target.in_))
