"""Perplexities before and after as one ratio with its interval, which pages, tables and cards share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Z_95 = 1.96  # standard errors of a 95% interval
MIN_SAMPLES = 5  # fewest held-out samples for a standard error, as in `surgery eval`: fewer tell too little about it


@dataclass(frozen=True)
class Ratio:
    """Perplexity of the converted model divided by that of the base. low, high: 95% interval, None if unknown."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """As in the tables of `surgery compare`: "x 1.216 [1.1, 1.34]"."""
        unknown = self.low is None or self.high is None
        return format_ratio(self.value) + ("" if unknown else f" [{self.low:.4g}, {self.high:.4g}]")


def held_out_ratio(held: Mapping[str, Any] | None) -> Ratio | None:
    """Return the ratio of the perplexities on the held-out text of a conversion; None without such losses, and for
    losses in another unit than nats. held: `held_out` of a report.
    """
    if not held or not str(held["unit"]).startswith("nats"):
        return None
    change, error = held["converted"] - held["original"], held_out_error(held)
    ends = () if error is None else (change - Z_95 * error, change + Z_95 * error)
    return None if change >= 500 else Ratio(math.exp(change), *(math.exp(min(end, 700.0)) for end in ends))


def held_out_error(held: Mapping[str, Any]) -> float | None:
    """Return the standard error of the difference of held-out losses; None if it is unknown or of too few samples."""
    error: float | None = held.get("difference_se")
    return None if 0 < held.get("samples", 0) < MIN_SAMPLES else error


def held_out_size(held: Mapping[str, Any]) -> str:
    """Return ", 254 tokens in 2 samples, too few for an interval" for `held_out` of a report, "" if it is unknown."""
    samples = held.get("samples", 0)
    if not samples:
        return ""
    few = ", too few for an interval" if samples < MIN_SAMPLES else ""
    return f", {held['tokens']:,} tokens in {samples} sample{'s' * (samples > 1)}{few}"


def format_ratio(ratio: float) -> str:
    """Format the ratio of two perplexities as in the tables of `surgery eval`: "x 1.216"."""
    return f"x {ratio:.4g}"


def before_storage(report: Mapping[str, Any]) -> str:
    """Return ", before its linears were stored in 4 bits" for values of a report that were measured before `surgery
    quantize`, else "".
    """
    storage = report.get("storage")
    bits = storage.get("bits") if isinstance(storage, Mapping) else None
    return f", before its linears were stored in {bits} bits" if bits in (8, 4, "4 or 8") else ""
