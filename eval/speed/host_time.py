"""Time of the CPU per eager call: what a call takes to start where a GPU waits for it, as with one token.

A burst of calls is timed by the clock until the last one has been started. On a GPU the device is idle when a burst
begins and nothing waits for it inside; a burst is short, so that its launches fit into the device's queue.
Implementations take turns, and the least mean of a burst counts, because other load only adds time.
"""

from __future__ import annotations

import time

import torch

from surgery.core.dispatch import use_kernels
from surgery.eval.speed.timer import Benchmark, BenchmarkCase, Call, ResultRow, TimedImplementation

BURST, TURNS = 20, 24  # calls of a burst; bursts of each implementation


def measure_host_time(benchmark: Benchmark, case: BenchmarkCase) -> list[ResultRow]:
    """Return the rows of a case with `host`. `host_us` and, as milliseconds, `ms` are the time of the CPU per call."""
    rows: list[ResultRow] = []
    calls: list[tuple[TimedImplementation, Call, ResultRow]] = []
    with torch.set_grad_enabled(case.host == "grad"):
        for implementation in case.implementations:
            row: ResultRow = {"table": case.table, "x": case.x, "sizes": case.sizes, "rival": implementation.name}
            rows.append(row | {"ms": None, "host_us": None, "host": case.host})
            if time.monotonic() > benchmark.deadline:
                rows[-1]["note"] = "time limit"
            elif (call := benchmark.prepare(implementation, rows[-1])) is not None:
                calls.append((implementation, call, rows[-1]))
        for turn in range(TURNS):
            for implementation, call, row in calls:
                if turn == 0 or time.monotonic() < benchmark.deadline:
                    with use_kernels(implementation.choice):
                        us = _burst_us(call, benchmark.device)
                    row["host_us"], row["runs"] = min(us, row["host_us"] or us), turn + 1
    for _, _, row in calls:
        row["ms"] = row["host_us"] / 1e3
    return rows


def _burst_us(call: Call, device: torch.device) -> float:
    """Return the microseconds of the CPU per call of one burst."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(BURST):
        call()
    return (time.perf_counter() - start) / BURST * 1e6
