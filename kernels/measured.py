"""Which way was measured to be fastest: rows of measured.json, one for each op, pass and size.

    choice("btt", "forward", tokens=512, inputs=4096, outputs=4096, rank=4)  ->  "kernel", "reference" or "dense"

ms of the kernel, of the reference it stands in for, of the matrix multiplied out (BTT: "dense"), and of the original that
all of them replace (a dense linear, SDPA: another function, so never the choice). `surgery bench` measures
the rows and surgery.bench.publish writes them. The row nearest in log space speaks for sizes that were not measured, and, for want
of others, on every device. Without a row the kernel is taken.
"""

from __future__ import annotations

import json
import math
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

TABLE = Path(__file__).with_name("measured.json")
Way = Literal["kernel", "reference", "dense"]
WAYS: tuple[Way, ...] = ("kernel", "reference", "dense")


@cache
def table() -> dict[str, Any]:
    """{"device": .., "rows": [{"op", "pass", "sizes": {name: number}, "kernel": ms, "reference": ms, "dense": ms,
    "original": ms}]}, a pass being forward, backward (with its forward) or step."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


@lru_cache(maxsize=4096)
def choice(op: str, pass_: str = "forward", **sizes: int) -> Way:
    row = nearest(op, pass_, **sizes)
    if row is None:
        return "kernel"
    return min((way for way in WAYS if row.get(way)), key=lambda way: row[way], default="kernel")


@lru_cache(maxsize=4096)
def nearest(op: str, pass_: str = "forward", **sizes: int) -> dict[str, Any] | None:
    """The measured row whose sizes are nearest; sizes that only one of the two has do not count."""
    rows = [row for row in table()["rows"] if (row["op"], row["pass"]) == (op, pass_)]
    return min(rows, key=lambda row: distance(row["sizes"], sizes), default=None)


def distance(one: dict[str, int], other: dict[str, int]) -> float:
    """Root of the summed squares of log ratios: 0.7 is a factor of two in one size."""
    return math.hypot(*(math.log(max(n, 1) / max(other[name], 1)) for name, n in one.items() if name in other))
