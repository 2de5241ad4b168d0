"""--fail-below NAME=SHARE: how much of the base's quality must be left.

Of a metric where more is better (accuracy), the converted model must score at least SHARE x the base; of one where less is better
(perplexity, milliseconds) at most SHARE x the base. So ppl=1.05 allows five percent more perplexity, needle=0.95 a
loss of one needle in twenty. NAME is a suite (each of its tasks must hold) or a task; NAME:metric where the first metric is
not meant. What decides is the measured ratio; its interval stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.eval.results.compare import ComparisonRow

EXAMPLE = "for example --fail-below ppl=1.05 --fail-below needle=0.95"


@dataclass(frozen=True)
class Threshold:
    name: str
    metric: str | None
    share: float

    def __str__(self) -> str:
        return f"{self.name}{':' + self.metric if self.metric else ''}={self.share:g}"


@dataclass(frozen=True)
class ThresholdResult:
    """ratio: None where the base scores nothing or nothing was measured."""

    limit: str
    task: str
    metric: str
    ratio: float | None
    held: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_thresholds(given: Sequence[str], compared: bool) -> list[Threshold]:
    found = []
    for text in given:
        name, _, number = text.partition("=")
        name, _, metric = name.partition(":")
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if not name or not 0 < share < float("inf"):
            raise SurgeryError(f"--fail-below {text!r}: write NAME=SHARE of the base's score, {EXAMPLE}")
        found.append(Threshold(name, metric or None, share))
    if found and not compared:
        raise SurgeryError(f"--fail-below {given[0]} is a share of the base's score: --compare BASE")
    return found


def check_thresholds(
    limits: Sequence[Threshold], rows: Sequence[ComparisonRow], first: dict[str, str], broken: Sequence[str]
) -> list[ThresholdResult]:
    """first: suite -> its first metric. A limit of what broke is missed, not skipped."""
    found = []
    for limit in limits:
        meant = [r for r in rows if r.is_summary and limit.name in (r.suite, r.task, f"{r.suite}/{r.task}")]
        meant = [r for r in meant if (limit.metric or first[r.suite]) in (r.metric.name, r.metric.title)]
        if not meant and limit.name not in broken:
            names = sorted({f"{row.suite}" for row in rows} | {row.task for row in rows})
            raise SurgeryError(f"--fail-below {limit}: nothing of that name was measured; measured: {', '.join(names)}")
        found += [_check_row(limit, row) for row in meant] or [
            ThresholdResult(str(limit), limit.name, "-", None, False)
        ]
    return found


def _check_row(limit: Threshold, row: ComparisonRow) -> ThresholdResult:
    ratio = row.ratio.change if row.ratio else None
    held = ratio is not None and (ratio >= limit.share if row.metric.higher_is_better else ratio <= limit.share)
    where = "".join(f", {name} {value}" for name, value in row.group.items())
    return ThresholdResult(str(limit), row.task + where, row.metric.name, ratio, held)
