"""Ctrl-C in a run: the step is ended and a checkpoint written, then the run stops; a second Ctrl-C does not wait.

Where several processes train together they would hear of it at different steps, so there the run stops where it is,
and its last checkpoint is what remains.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_one_waits(alone: bool) -> Iterator[list[int]]:
    """A list that is empty until somebody interrupts."""
    heard: list[int] = []
    if not alone or threading.current_thread() is not threading.main_thread():
        yield heard
        return

    def hear(number: int, frame: object) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(number)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)
