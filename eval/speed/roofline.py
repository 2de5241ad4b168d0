"""Roofline: lower bounds of run times from memory traffic and arithmetic.

Time >= max(bytes / copy bandwidth, FLOP / matrix product rate), both rates measured in the same process. Inputs are
read once and outputs written once.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from surgery.eval.speed.timer import Benchmark, ResultRow, WorkEstimate


def measure_ceilings(benchmark: Benchmark, dtype: torch.dtype) -> dict[str, float]:
    """Return copy: bytes read and written per second; rate: FLOP/s of a square matrix product."""
    gpu = benchmark.device.type == "cuda"
    nbytes, width = (2**29, 8192) if gpu else (2**22, 512)
    source = torch.randn(nbytes // dtype.itemsize, device=benchmark.device).to(dtype)
    target, square = torch.empty_like(source), torch.randn(width, width, device=benchmark.device).to(dtype)
    copy = median_ms(benchmark, lambda: target.copy_(source))
    product = median_ms(benchmark, lambda: square @ square)
    return {"copy": 2 * nbytes / copy * 1e3, "rate": 2 * width**3 / product * 1e3}


def median_ms(benchmark: Benchmark, call: Any) -> float:
    """Return the median of seven runs after two warm-up runs, in ms."""
    times = [benchmark._time_ms(call) for _ in range(9) if time.monotonic() < benchmark.deadline][2:] or [
        benchmark._time_ms(call)
    ]
    return sorted(times)[len(times) // 2]


def add_floor(row: ResultRow, work: WorkEstimate | None, limits: dict[str, float]) -> None:
    """Add the lower bound in ms, and the share of its speed that was reached, to a row."""
    if work is not None and row["ms"] is not None:
        row["floor"] = max(work.bytes / limits["copy"], work.flops / limits["rate"]) * 1e3
        row["fraction"] = row["floor"] / row["ms"]


def linear_work(tokens: int, in_: int, out: int, params: int, back: bool, width: int) -> WorkEstimate:
    """Return the work of a linear. params: stored parameters; width: bytes per element.

    Backward reads x, dy and the cores, and writes their gradients.
    """
    once = (tokens * (in_ + out) + params) * width
    return WorkEstimate(once + (tokens * (2 * in_ + out) + 2 * params) * width, 6 * tokens * params) if back else WorkEstimate(
        once, 2 * tokens * params
    )  # fmt: skip


def softmax_work(
    batch: int, heads: int, tokens: int, key: float, value: int, *, back: bool, width: int
) -> WorkEstimate:
    """Return the work of causal softmax attention. key: score dimensions of the average pair.

    Backward recomputes the scores and four more products (Dao et al. 2022): 2.5 times the forward.
    """
    moved = batch * heads * tokens * 2 * (64 + value) * width
    flops = batch * heads * tokens**2 * (key + value)
    return WorkEstimate(3 * moved, 3.5 * flops) if back else WorkEstimate(moved, flops)


def window_work(
    batch: int, heads: int, tokens: int, window: int, key: int, value: int, *, back: bool, width: int
) -> WorkEstimate:
    """Return the work of softmax attention over the last `window` tokens.

    Outputs are float32. Backward as in `softmax_work`.
    """
    moved = batch * heads * tokens * ((2 * key + value) * width + 4 * value)
    flops = 2 * batch * heads * tokens * min(window, tokens) * (key + value)
    return WorkEstimate(3 * moved, 3.5 * flops) if back else WorkEstimate(moved, flops)


def linear_attention_work(
    batch: int, heads: int, groups: int, tokens: int, key: int, value: int, *, back: bool, width: int, extra: int,
    reads: float = 1,
) -> WorkEstimate:  # fmt: skip
    """Return the work of linear attention.

    q, k of `groups` heads, v and o of all heads, `extra` float32 values per token and head (gates, levels). A token
    writes one state and reads `reads` of them. Backward adds twice the bytes and operations.
    """
    elements = batch * tokens * (2 * groups * key + 2 * heads * value)
    moved = elements * width + batch * tokens * heads * extra * 4
    flops = 2 * batch * heads * tokens * key * value * (1 + reads)
    return WorkEstimate(3 * moved, 3 * flops) if back else WorkEstimate(moved, flops)


def log_linear_reads(tokens: int) -> float:
    """Return the mean number of states that a token reads under a log-linear mask: that of its chunk of 64 tokens, and
    at half the levels above chunks a bucket.
    """
    return 1 + ((tokens - 1) // 64).bit_length() / 2
