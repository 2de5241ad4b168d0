"""Who was measured to be fastest: rows of measured.json, one for each op, pass and size.

    choice("btt_mvm", tokens=512, inputs=4096, outputs=4096, rank=4)  ->  "kernel", "reference" or "dense"

`surgery bench` writes the rows (surgery.bench.table). The row nearest in log space speaks for sizes that were not measured, on
the device named there and, for want of others, on every other. Without a row the kernel is taken.
"""

from __future__ import annotations

import json
import math
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

TABLE = Path(__file__).with_name("measured.json")
WAYS: tuple[Literal["kernel", "reference", "dense"], ...] = ("kernel", "reference", "dense")


@cache
def table() -> dict[str, Any]:
    """{"device": .., "rows": [{"op", "pass", "sizes": {name: number}, "kernel": ms, "reference": ms, "dense": ms}]}"""
    return json.loads(TABLE.read_text(encoding="utf-8"))


@lru_cache(maxsize=4096)
def choice(op: str, back: bool = False, **sizes: int) -> Literal["kernel", "reference", "dense"]:
    row = nearest(op, back, **sizes)
    if row is None:
        return "kernel"
    return min((way for way in WAYS if row.get(way)), key=lambda way: row[way], default="kernel")


@lru_cache(maxsize=4096)
def nearest(op: str, back: bool = False, **sizes: int) -> dict[str, Any] | None:
    """The measured row whose sizes are nearest; sizes that only one of the two has do not count."""
    rows = [row for row in table()["rows"] if row["op"] == op and (row["pass"] == "backward") == back]
    return min(rows, key=lambda row: _distance(row["sizes"], sizes), default=None)


def _distance(one: dict[str, int], other: dict[str, int]) -> float:
    return sum(math.log(max(n, 1) / max(other[name], 1)) ** 2 for name, n in one.items() if name in other)
