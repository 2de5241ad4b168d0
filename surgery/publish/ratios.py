"""Perplexities before and after as one ratio, which pages, tables and cards share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def perplexity_ratio(before: float, after: float, unit: str) -> float | None:
    """Return the ratio of the perplexities of two losses in nats per token; None for losses in another unit."""
    return math.exp(after - before) if unit.startswith("nats") and after - before < 500 else None


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
