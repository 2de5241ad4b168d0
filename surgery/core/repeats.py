"""How often the operations of a block of code stand for themselves when they are counted on the meta device.

A fit of many equal sweeps runs one of them on the meta device, and says how many it stands for:

    with repeated(80):
        fit.sweep(ranks)

`surgery.conversion.estimation.counting` multiplies what it counts inside by that number. Outside an estimate the block
changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_times: ContextVar[float] = ContextVar("times", default=1.0)


def repeats() -> float:
    """Return how often a counted operation happens, 1.0 outside of `repeated`."""
    return _times.get()


@contextmanager
def repeated(times: float) -> Iterator[None]:
    """Say that the operations inside happen `times` times. Blocks inside of each other multiply."""
    token = _times.set(_times.get() * times)
    try:
        yield
    finally:
        _times.reset(token)


def sampled_steps(count: int, is_meta: bool) -> Iterator[int]:
    """Yield the steps 0, .., count - 1 of a loop; on the meta device its first and its last step alone.

    Each of these two stands for half of the steps. That is exact where the work of a step is a linear function of its
    number.
    """
    if not is_meta or count <= 2:
        yield from range(count)
        return
    for step in (0, count - 1):
        with repeated(count / 2):
            yield step
