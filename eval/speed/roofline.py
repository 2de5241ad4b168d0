"""What a run must cost at least: bytes over the copy bandwidth and operations over the matrix rate, both measured in
the same process. Bytes: what comes in is read once and what goes out is written once."""

from __future__ import annotations

import time
from typing import Any

import torch

from surgery.eval.speed.timer import Benchmark, ResultRow, WorkEstimate


def measure_ceilings(benchmark: Benchmark, dtype: torch.dtype) -> dict[str, float]:
    """copy: bytes read and written a second; rate: floating-point operations a second of a square product."""
    gpu = benchmark.device.type == "cuda"
    numbers, width = (2**29, 8192) if gpu else (2**22, 512)
    source = torch.randn(numbers // dtype.itemsize, device=benchmark.device).to(dtype)
    target, square = torch.empty_like(source), torch.randn(width, width, device=benchmark.device).to(dtype)
    copy = median_ms(benchmark, lambda: target.copy_(source))
    product = median_ms(benchmark, lambda: square @ square)
    return {"copy": 2 * numbers / copy * 1e3, "rate": 2 * width**3 / product * 1e3}


def median_ms(benchmark: Benchmark, call: Any) -> float:
    """The median of seven after two."""
    times = [benchmark._time_ms(call) for _ in range(9) if time.monotonic() < benchmark.deadline][2:] or [
        benchmark._time_ms(call)
    ]
    return sorted(times)[len(times) // 2]


def add_floor(row: ResultRow, work: WorkEstimate | None, limits: dict[str, float]) -> None:
    """Adds the floor in ms and the share of its speed that was reached."""
    if work is not None and row["ms"] is not None:
        row["floor"] = max(work.bytes / limits["copy"], work.flops / limits["rate"]) * 1e3
        row["fraction"] = row["floor"] / row["ms"]


def linear_work(tokens: int, in_: int, out: int, numbers: int, back: bool, width: int) -> WorkEstimate:
    """A linear of that many stored numbers, each used once a token. Backward reads x, dy and the cores, and writes
    dx and theirs."""
    once = (tokens * (in_ + out) + numbers) * width
    return WorkEstimate(once + (tokens * (2 * in_ + out) + 2 * numbers) * width, 6 * tokens * numbers) if back else WorkEstimate(
        once, 2 * tokens * numbers
    )  # fmt: skip


def softmax_work(batch: int, heads: int, tokens: int, key: float, value: int, back: bool, width: int) -> WorkEstimate:
    """Causal. key: score dims of the average pair. Backward computes scores anew and four more products
    (Dao et al. 2022): 2.5 times the forward."""
    moved = batch * heads * tokens * 2 * (64 + value) * width
    flops = batch * heads * tokens**2 * (key + value)
    return WorkEstimate(3 * moved, 3.5 * flops) if back else WorkEstimate(moved, flops)


def linear_attention_work(
    batch: int, heads: int, groups: int, tokens: int, key: int, value: int, back: bool, width: int, extra: int
) -> WorkEstimate:
    """q, k of `groups` heads and v of all in, o out, `extra` float32 numbers a token and head (gates, levels); the state
    written and read once a token. Backward: twice the bytes and operations again."""
    numbers = batch * tokens * (2 * groups * key + 2 * heads * value)
    moved = numbers * width + batch * tokens * heads * extra * 4
    flops = 4 * batch * heads * tokens * key * value
    return WorkEstimate(3 * moved, 3 * flops) if back else WorkEstimate(moved, flops)
