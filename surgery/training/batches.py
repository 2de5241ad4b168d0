"""Examples to steps: each device's rows of every global batch.

Every process goes over all examples of a batch and runs its own, so that all know how many positions count in the
whole batch without asking each other: two processes weigh a step as one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from surgery.core.errors import SurgeryError
from surgery.training.stages import Batch


@dataclass
class StepBatch:
    """batches: this process's, one a forward; num_counted: positions that count, tokens: trained on, in the whole batch.
    data_state: where the data goes on behind it, see TrainingData.state."""

    batches: list[Batch]
    num_counted: int
    tokens: int
    data_state: dict[str, Any]

    def pin_memory(self) -> StepBatch:
        """In memory that a GPU copies from by itself; torch's DataLoader calls this."""
        self.batches = [{name: t.pin_memory() for name, t in batch.items()} for batch in self.batches]
        return self


@dataclass(frozen=True)
class BatchLayout:
    """batch rows of a step, `rows` a forward, over `world` processes, of which this is `rank`."""

    batch: int
    rows: int
    rank: int = 0
    world: int = 1

    @classmethod
    def create(cls, batch: int, rows: int, rank: int, world: int) -> BatchLayout:
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
    def accumulation_steps(self) -> int:
        return self.batch // self.world // self.rows


def stack_examples(examples: list[Batch], indices: list[int]) -> Batch:
    together = {name: torch.stack([example[name] for example in examples]) for name in examples[0]}
    return {**together, "index": torch.tensor(indices)}


def iter_steps(
    data: Any,
    start: int,
    layout: BatchLayout,
    count_positions: Callable[[Batch], int],
    state: dict[str, Any] | None = None,
) -> Iterator[StepBatch]:
    """Steps from example `start` on, as long as whole batches last; state: where that is, so that nothing before it is
    read again. count_positions: of many examples, stacked."""
    if state is not None:
        data.restore(state)
    examples = iter(data.examples(start))
    own = list(range(layout.rank, layout.batch, layout.world))
    parts = [own[i : i + layout.rows] for i in range(0, len(own), layout.rows)]
    while True:
        batch = [example for _, example in zip(range(layout.batch), examples)]
        if len(batch) < layout.batch:
            return
        targets = {name: torch.stack([example[name] for example in batch]) for name in ("labels", "valid")}
        yield StepBatch(
            [stack_examples([batch[i] for i in part], [start + i for i in part]) for part in parts],
            max(1, count_positions(targets)),
            data.count_tokens(targets),
            data.state(),
        )
        start += layout.batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Without waiting for the copy, where memory is pinned."""
    return {name: t.to(device, non_blocking=device.type == "cuda" and t.is_pinned()) for name, t in batch.items()}
