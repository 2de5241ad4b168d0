"""Times against the sequence length: the slope of their logarithms, and the length from which on one algorithm is
faster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from recipes.papers.experiments.scaling import PowerLaw, fit_power_law

Times = dict[int, float]  # length -> time, in any unit


def slope(times: Times, least: int = 0) -> PowerLaw | None:
    """Return the slope of log time over log length with its standard error, over lengths of `least` tokens or more;
    None below three.
    """
    points = [(float(length), value) for length, value in sorted(times.items()) if length >= least]
    if len(points) < 3:
        return None
    law = fit_power_law(points)
    return PowerLaw(-law.alpha, law.error)


def faster_from(times: Times, rival: Times) -> int | None:
    """Return the length from which on `times` are below the rival's at every length that both have; None if not at the
    longest.
    """
    found = None
    for length in sorted(set(times) & set(rival), reverse=True):
        if times[length] >= rival[length]:
            break
        found = length
    return found


def words(length: int | None, times: Times, rival: Times) -> str:
    """Return `faster_from` in words."""
    both = sorted(set(times) & set(rival))
    if not both:
        return "no common length"
    if length is None:
        return f"nowhere up to {both[-1]:,}"
    return f"from {length:,}" if length > both[0] else f"at every length from {length:,}"


def least_times(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Return the least processor time in seconds of each call, run in turns so that other load affects all alike."""
    found = [math.inf] * len(calls)
    for _ in range(repeats):
        for i, call in enumerate(calls):
            began = time.process_time()
            call()
            found[i] = min(found[i], time.process_time() - began)
    return found
