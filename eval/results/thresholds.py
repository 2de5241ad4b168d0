"""--fail-below NAME=SHARE: fail if the converted model keeps too little of the base's quality.

For a metric where higher is better (accuracy), the converted model must score at least SHARE x the base; where lower is
better (perplexity, milliseconds), at most SHARE x the base. So ppl=1.05 allows 5% more perplexity, and needle=0.95
allows 5% fewer needles found. NAME is a suite (each of its tasks must pass) or a task; NAME:metric selects a metric
other than the first. The measured ratio decides; its interval is reported beside it.
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
    """One --fail-below option."""

    name: str
    metric: str | None
    share: float

    def __str__(self) -> str:
        return f"{self.name}{':' + self.metric if self.metric else ''}={self.share:g}"


@dataclass(frozen=True)
class ThresholdResult:
    """Whether a row passes a threshold. ratio: None if the base scores zero or nothing was measured."""

    limit: str
    task: str
    metric: str
    ratio: float | None
    held: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        return asdict(self)


def parse_thresholds(texts: Sequence[str], compared: bool) -> list[Threshold]:
    """Parse --fail-below options. compared: whether there is a base; raises SurgeryError if not."""
    thresholds = []
    for text in texts:
        name, _, number = text.partition("=")
        name, _, metric = name.partition(":")
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if not name or not 0 < share < float("inf"):
            raise SurgeryError(f"--fail-below {text!r} must be NAME=SHARE, a share of the base's score, {EXAMPLE}")
        thresholds.append(Threshold(name, metric or None, share))
    if thresholds and not compared:
        raise SurgeryError(
            f"--fail-below {texts[0]} is a share of the base's score. Give the base with --compare BASE."
        )
    return thresholds


def check_thresholds(
    limits: Sequence[Threshold], rows: Sequence[ComparisonRow], first: dict[str, str], broken: Sequence[str]
) -> list[ThresholdResult]:
    """Check thresholds against summary rows. first: suite -> main metric.

    A threshold on a suite that failed counts as missed.

    Raises SurgeryError if a threshold names nothing that was measured.
    """
    verdicts = []
    for limit in limits:
        meant = [r for r in rows if r.is_summary and limit.name in (r.suite, r.task, f"{r.suite}/{r.task}")]
        meant = [r for r in meant if (limit.metric or first[r.suite]) in (r.metric.name, r.metric.title)]
        if not meant and limit.name not in broken:
            names = sorted({f"{row.suite}" for row in rows} | {row.task for row in rows})
            raise SurgeryError(f"--fail-below {limit}: nothing of that name was measured; measured: {', '.join(names)}")
        verdicts += [_check_row(limit, row) for row in meant] or [
            ThresholdResult(str(limit), limit.name, "-", None, False)
        ]
    return verdicts


def _check_row(limit: Threshold, row: ComparisonRow) -> ThresholdResult:
    ratio = row.ratio.change if row.ratio else None
    held = ratio is not None and (ratio >= limit.share if row.metric.higher_is_better else ratio <= limit.share)
    where = "".join(f", {name} {value}" for name, value in row.group.items())
    return ThresholdResult(str(limit), row.task + where, row.metric.label, ratio, held)
