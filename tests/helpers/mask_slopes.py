"""Measure how the cost of masks grows with the sequence length, on one thread: `python tests/helpers/mask_slopes.py
[mask ..]`.

Prints seconds of `chunked` at T = 2K .. 64K with the slope of log time over log T, and for the hierarchical mask
the time of a step and the bytes of the state after 2^10 .. 2^20 tokens. One head of 16 features and 16 values.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import linear_regression

import torch

from surgery.mixers.base import AttentionShape
from surgery.mixers.masks.base import MASKS, Mask, MaskInputs

SHAPE = AttentionShape(dim=8, heads=1, groups=1, key=16, value=16, scaling=1.0)


def least_times(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Return the least CPU time of each call, run alternately so that other load affects all."""
    found, until = [math.inf] * len(calls), time.perf_counter() + seconds
    while time.perf_counter() < until:
        for i, call in enumerate(calls):
            began = time.process_time()
            call()
            found[i] = min(found[i], time.process_time() - began)
    return found


def random_rows(mask: Mask, length: int, scores: str, start: int = 0) -> MaskInputs:
    q, k, v = torch.randn(1, 1, 1, length, 16), torch.randn(1, 1, length, 16), torch.randn(1, 1, length, 16)
    beta = torch.rand(1, 1, length) if scores == "delta" else None
    k = torch.nn.functional.normalize(k, dim=-1)
    return MaskInputs(
        q, k, v, beta, torch.tensor([start]), torch.tensor([length]), mask.signals(torch.randn(1, length, 8))
    )


def print_chunked(mask: Mask, scores: str) -> None:
    """Print times of the chunked form and the slope of their logarithms."""
    lengths = [2**n for n in range(11, 17)]
    seconds = least_times([partial(mask.chunked, random_rows(mask, n, scores), None, 64) for n in lengths], 10.0)
    slope = linear_regression([math.log(n) for n in lengths], [math.log(s) for s in seconds]).slope
    shown = " ".join(f"{1e3 * s:.1f}" for s in seconds)
    print(f"{mask.config.name:16} {scores:7} ms at 2K .. 64K: {shown}   slope {slope:.3f}", flush=True)


def print_steps(mask: Mask, scores: str) -> None:
    """Print step times at positions where all buckets but the first are full."""
    bits = range(10, 21, 2)
    states = [{"buckets": torch.randn(1, n, 1, 16, 16)} for n in bits]
    calls = [partial(mask.step, random_rows(mask, 1, scores, 2**n - 2), state) for n, state in zip(bits, states)]
    for n, state, seconds in zip(bits, states, least_times(calls, 3.0)):
        print(f"  step at 2^{n}: {1e6 * seconds:.0f} us, {state['buckets'].nbytes:,} bytes", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for name in sys.argv[1:] or ["ones", "gates", "toeplitz_blocks", "hierarchical", "toeplitz"]:
        mask = MASKS[MASKS.config_type(name)](MASKS.config_type(name)(), SHAPE)
        for scores in ["kernel", "delta"] if mask.has_bounded_state else ["kernel"]:
            print_chunked(mask, scores)
            if name == "hierarchical":
                print_steps(mask, scores)
