"""Quality against cost: points with intervals, and the Pareto front, the models that no other model beats in both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CostPoint:
    """Cost and quality of a model, each with its 95% interval, or None."""

    cost: float
    cost_interval: tuple[float, float] | None
    quality: float
    quality_interval: tuple[float, float] | None


@dataclass(frozen=True)
class ParetoChart:
    """Points by model.

    Attributes:
        cost, quality: labels of the axes; less cost is better.
        higher_is_better: of the quality.
        front: models on the Pareto front by rising cost.
    """

    cost: str
    quality: str
    higher_is_better: bool
    points: Mapping[str, CostPoint]
    front: list[str]


def pareto_front(points: Mapping[str, CostPoint], higher_is_better: bool) -> list[str]:
    """Return the models that no other model equals or beats in both cost and quality, by rising cost.

    Values decide, not intervals. Of models with equal cost and quality all are on the front. NaN is never on it.
    """

    def better(a: CostPoint, b: CostPoint) -> bool:
        quality = a.quality >= b.quality if higher_is_better else a.quality <= b.quality
        return a.cost <= b.cost and quality and (a.cost, a.quality) != (b.cost, b.quality)

    finite = {name: p for name, p in points.items() if math.isfinite(p.cost) and math.isfinite(p.quality)}
    front = [name for name, point in finite.items() if not any(better(other, point) for other in finite.values())]
    return sorted(front, key=lambda name: (finite[name].cost, name))
