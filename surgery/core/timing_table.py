"""Tables of measured times, the format of kernels/tuning.json: the fields that rows have, and the distance between
sizes.

{"device": .., "capability": [9, 0], "dtype": .., "rows": [{"op", "pass", "sizes": {name: integer}, "kernel",
"reference", "dense", "products", "original"}]}; times are milliseconds.
"""

from __future__ import annotations

import math
from typing import Any, Literal

Implementation = Literal["kernel", "reference", "dense", "products", "original"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("kernel", "reference", "dense", "products")
MAX_DISTANCE = math.log(8.0)


def has_names(table: dict[str, Any]) -> bool:
    """Return whether a table has the texts and lists that describe it. Raises KeyError if one is missing."""
    texts = all(isinstance(table[name], str) for name in ("device", "dtype"))
    return texts and all(isinstance(table[name], list) for name in ("capability", "rows"))


def is_complete_row(row: dict[str, Any]) -> bool:
    """Return whether a row has an op, a pass, whole sizes and valid times."""
    counts = row["sizes"].values() if isinstance(row["sizes"], dict) else (None,)
    times = [
        row[implementation] for implementation in (*IMPLEMENTATIONS, "original") if row.get(implementation) is not None
    ]
    named = isinstance(row["op"], str) and isinstance(row["pass"], str)
    return named and all(type(n) is int and n < 2**62 for n in counts) and all(_is_time(ms) for ms in times)


def _is_time(ms: Any) -> bool:
    return type(ms) in (int, float) and 0 < ms < 1e12


def distance(one: dict[str, int], other: dict[str, int]) -> float:
    """Return the Euclidean distance of log sizes: 0.7 is a factor of two in one size.

    Sizes that only one of the two has are ignored.
    """
    return math.hypot(*(math.log(max(n, 1) / max(other[name], 1)) for name, n in one.items() if name in other))
