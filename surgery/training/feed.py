"""Examples to steps: each device's rows of every global batch, read ahead of the loop in a thread.

Every process reads all examples of a batch and runs its own, so that all know how many positions count in the whole
batch without asking each other: two processes weigh a step as one does.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from surgery.errors import SurgeryError
from surgery.training.stages import Batch

AHEAD = 2**21  # tokens: reading comes in bursts of a million


@dataclass
class Step:
    """batches: this process's, one a forward; counted: positions that count, tokens: trained on, in the whole batch.
    after: where the data goes on behind it, see Data.state."""

    batches: list[Batch]
    counted: int
    tokens: int
    after: dict[str, Any]


@dataclass(frozen=True)
class Shares:
    """batch rows of a step, `rows` a forward, over `world` processes, of which this is `rank`."""

    batch: int
    rows: int
    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, batch: int, rows: int, rank: int, world: int) -> Shares:
        if batch % world:
            raise SurgeryError(
                f"batch: {batch} rows cannot be shared evenly by {world} processes; use a multiple of {world}"
            )
        own = batch // world
        rows = min(rows, own)
        if own % rows:
            raise SurgeryError(
                f"batch: {batch} rows over {world} processes are {own} each, which forwards of {rows} rows do not make up; "
                f"set rows to a divisor of {own}"
            )
        return cls(batch, rows, rank, world)

    @property
    def forwards(self) -> int:
        return self.batch // self.world // self.rows


def stacked(examples: list[Batch], indices: list[int]) -> Batch:
    together = {name: torch.stack([example[name] for example in examples]) for name in examples[0]}
    return {**together, "index": torch.tensor(indices)}


def steps_of(
    data: Any,
    start: int,
    shares: Shares,
    counted: Callable[[Batch], int],
    state: dict[str, Any] | None = None,
    ready: Callable[[Batch], Batch] = lambda batch: batch,
) -> Iterator[Step]:
    """Steps from example `start` on, as long as whole batches last; state: where that is, so that nothing before it is
    read again. ready: what is done to a batch here, so that the loop need not."""
    if state is not None:
        data.restore(state)
    examples = iter(data.examples(start))
    while True:
        batch = [example for _, example in zip(range(shares.batch), examples)]
        if len(batch) < shares.batch:
            return
        own = list(range(shares.rank, shares.batch, shares.world))
        parts = [own[i : i + shares.rows] for i in range(0, len(own), shares.rows)]
        yield Step(
            [ready(stacked([batch[i] for i in part], [start + i for i in part])) for part in parts],
            max(1, sum(counted(example) for example in batch)),
            sum(data.tokens_of(example) for example in batch),
            data.state(),
        )
        start += shares.batch


class Ahead:
    """An iterator run in a thread, some items ahead; used as a context so that the thread ends with the loop."""

    def __init__(self, items: Iterator[Any], ahead: int):
        self.items, self.queue, self.over = items, queue.Queue[Any](ahead), threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Iterator[Any]:
        self.thread.start()
        return self._taken()

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.thread.join()

    def _read(self) -> None:
        try:
            for item in self.items:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:
            self._put((None, error))

    def _put(self, entry: Any) -> bool:
        while not self.over.is_set():
            try:
                self.queue.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _taken(self) -> Iterator[Any]:
        while True:
            item, error = self.queue.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item


def pinned_for(device: torch.device) -> Callable[[Batch], Batch]:
    """Into memory that a GPU copies from by itself; the same batch elsewhere."""
    if device.type != "cuda":
        return lambda batch: batch
    return lambda batch: {name: t.pin_memory() for name, t in batch.items()}


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Without waiting for the copy, where memory is pinned."""
    return {name: t.to(device, non_blocking=t.is_pinned()) for name, t in batch.items()}
