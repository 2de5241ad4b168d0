"""Time of the CPU per eager call: what a call takes to start where a GPU waits for it, as with one token.

A burst of calls is timed by the clock, until the last one has been started; on a GPU the device is idle when a burst begins, and nobody
waits for it inside. Implementations take turns, and the least mean of a burst counts, because other load only adds time.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from surgery.core.dispatch import use_kernels
from surgery.eval.speed.timer import Benchmark, BenchmarkCase, Call, ResultRow

BURST, TURNS = 40, 12  # calls of a burst, which a GPU's queue of launches holds; bursts of each implementation
UNIT = "us"  # of the cells of these rows in tables


def measure_host_time(benchmark: Benchmark, case: BenchmarkCase) -> list[ResultRow]:
    """Return the rows of a case with `host`: in `ms` the milliseconds of the CPU per call."""
    rows: list[ResultRow] = []
    calls: list[tuple[Any, Call, ResultRow]] = []
    with torch.set_grad_enabled(case.host == "grad"):
        for implementation in case.implementations:
            row = {"table": case.table, "x": case.x, "sizes": case.sizes, "rival": implementation.name}
            rows.append(row | {"ms": None, "unit": UNIT})
            if time.monotonic() > benchmark.deadline:
                rows[-1]["note"] = "time limit"
            elif (call := benchmark.prepare(implementation, rows[-1])) is not None:
                calls.append((implementation.choice, call, rows[-1]))
        for _ in range(TURNS):
            for choice, call, row in calls:
                with use_kernels(choice):
                    ms = _burst_ms(call, benchmark.device)
                row["ms"], row["runs"] = min(ms, row["ms"] or ms), row.get("runs", 0) + 1
    return rows


def _burst_ms(call: Call, device: torch.device) -> float:
    """Return the milliseconds of the CPU per call of one burst."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(BURST):
        call()
    return (time.perf_counter() - start) / BURST * 1e3
