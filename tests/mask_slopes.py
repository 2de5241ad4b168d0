"""How the masks' cost grows, on one thread: `python tests/mask_slopes.py [mask ..]`.

Prints seconds of `chunked` at T = 2K .. 64K with the slope of log time over log T, and for the hierarchical mask
the time of a step and the bytes of the state after 2^10 .. 2^20 tokens. One head of 16 features and 16 values.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import linear_regression

import torch

from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Mask, Rows

SHAPE = AttentionShape(dim=8, heads=1, groups=1, key=16, value=16, scaling=1.0)


def best(call: Callable[[], object], seconds: float) -> float:
    """The least processor time of one call."""
    found, until = [], time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < until:
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


def rows(mask: Mask, length: int, scores: str, start: int = 0) -> Rows:
    q, k, v = torch.randn(1, 1, 1, length, 16), torch.randn(1, 1, length, 16), torch.randn(1, 1, length, 16)
    beta = torch.rand(1, 1, length) if scores == "delta" else None
    k = torch.nn.functional.normalize(k, dim=-1)
    return Rows(q, k, v, beta, torch.tensor([start]), torch.tensor([length]), mask.signals(torch.randn(1, length, 8)))


def chunked(mask: Mask, scores: str) -> None:
    lengths = [2**n for n in range(11, 17)]
    seconds = [best(partial(mask.chunked, rows(mask, n, scores), None, 64), 1.0) for n in lengths]
    slope = linear_regression([math.log(n) for n in lengths], [math.log(s) for s in seconds]).slope
    shown = " ".join(f"{1e3 * s:.1f}" for s in seconds)
    print(f"{mask.config.name:16} {scores:7} ms at 2K .. 64K: {shown}   slope {slope:.3f}", flush=True)


def steps(mask: Mask, scores: str) -> None:
    for bits in range(10, 21, 2):
        state = {"buckets": torch.randn(1, bits, 1, 16, 16)}
        last = rows(mask, 1, scores, 2**bits - 2)  # every bucket but one is full
        micro = 1e6 * best(partial(mask.step, last, state), 0.5)
        bytes_ = state["buckets"].nbytes
        print(f"{mask.config.name:16} {scores:7} step at 2^{bits}: {micro:.0f} us, {bytes_:,} bytes", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for name in sys.argv[1:] or ["ones", "gates", "toeplitz_blocks", "hierarchical", "toeplitz"]:
        mask = MASKS[MASKS.config_type(name)](MASKS.config_type(name)(), SHAPE)
        for scores in ["kernel", "delta"] if mask.bounded else ["kernel"]:
            chunked(mask, scores)
            if name == "hierarchical":
                steps(mask, scores)
