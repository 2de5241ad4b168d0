"""Files of `surgery bench linear --out` with times made from a formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES = ((32, 32), (16, 32), (48, 32), (32, 48))  # (out, in) of the linears of the tiny Llama
SLOWNESS = {"low_rank": 1.25, "btt": 1.5}  # milliseconds of a parameter, those of the dense matrix: 1


def row(shape: tuple[int, int], tokens: int, op: str, ms: float, **options: Any) -> dict[str, Any]:
    """Return one row of a file: of a prompt, or of a decoding step in a CUDA graph."""
    table = f"linear {shape[1]} -> {shape[0]}, forward" + (", CUDA graph" if tokens == 1 else "")
    sizes = {"tokens": tokens, "inputs": shape[1], "outputs": shape[0]}
    rest = {"options": options, "way": "reference", "rival": f"{op} {options}", "op": op, "ms": ms}
    return {"table": table, "x": tokens, "sizes": sizes, **rest}


def bench_result(shapes: Any = SHAPES, tokens: Any = (1, 64), slowness: Any = None, **changes: Any) -> dict[str, Any]:
    """Return the data of a file: milliseconds are parameters x tokens, times how much slower a structure's parameter
    is.
    """
    slow, rows = slowness or SLOWNESS, []
    for out, in_ in shapes:
        for count in tokens:
            rows.append(row((out, in_), count, "original", 1.0 * out * in_ * count))
            for rank in (4, 8):
                for op, blocks in (("low_rank", {}), ("btt", {"rows": 2, "columns": 2})):
                    if op in slow:
                        params = rank * (out + in_) * (2 if blocks else 1)
                        rows.append(row((out, in_), count, op, slow[op] * params * count, rank=rank, **blocks))
    head = {"kind": "linear", "device": "X1", "capability": None, "dtype": "bfloat16", "date": "2026-11-22"}
    return {**head, "versions": {}, "complete": True, "rows": rows, **changes}


def write_times(path: Path, **changes: Any) -> str:
    """Write a file of times and return its path."""
    path.write_text(json.dumps(bench_result(**changes)), encoding="utf-8")
    return str(path)
