"""Drawing with Python's own generator: of random() alone, whose sequence Python promises from release to release."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


def drawn(rng: Random, items: Sequence[int], count: int) -> list[int]:
    """`count` of them, without replacement."""
    pool = list(items)
    for i in range(count):
        j = i + int(rng.random() * (len(pool) - i))
        pool[i], pool[j] = pool[j], pool[i]
    return pool[:count]
