"""Group examples into steps: each process's rows of every global batch.

Every process iterates over all examples of a batch and runs its own, so that all processes know without communication
how many positions count in the global batch: the loss is the same mean for any number of processes.
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
    """Data of one optimizer step.

    batches: of this process, one per forward. num_counted: positions in the loss, over the global batch. tokens: tokens
    trained on, over the global batch. data_state: TrainingData.state after this step.
    """

    batches: list[Batch]
    num_counted: int
    tokens: int
    data_state: dict[str, Any]

    def pin_memory(self) -> StepBatch:
        """Move the tensors to pinned memory; torch's DataLoader calls this."""
        self.batches = [{name: t.pin_memory() for name, t in batch.items()} for batch in self.batches]
        return self


@dataclass(frozen=True)
class BatchLayout:
    """How a global batch of `batch` rows is divided: `rows` per forward, over `world` processes; this process is
    `rank`.
    """

    batch: int
    rows: int
    rank: int = 0
    world: int = 1

    @classmethod
    def create(cls, batch: int, rows: int, rank: int, world: int) -> BatchLayout:
        """Validate the division; raises SurgeryError if it is not even.

        A process of several runs fewer rows per forward where `rows` does not divide its share of the batch.
        """
        if batch % world:
            counts = [str(n) for n in range(1, min(batch, 64) + 1) if batch % n == 0]
            raise SurgeryError(
                f"batch must be a multiple of {world}, the number of processes (got {batch}). Train on "
                f"{' or '.join([', '.join(counts[:-1]), counts[-1]] if counts[1:] else counts)} devices, or set batch to "
                f"{batch // world * world or world} or {batch // world * world + world}."
            )
        rows_per_process = batch // world
        rows = min(rows, rows_per_process)
        if world > 1:
            rows = max(n for n in range(1, rows + 1) if rows_per_process % n == 0)
        if rows_per_process % rows:
            raise SurgeryError(
                f"rows must divide {rows_per_process}, the rows of a batch of {batch} on each of {world} processes "
                f"(got {rows}). "
                f"Set rows to a divisor of {rows_per_process}."
            )
        return cls(batch, rows, rank, world)

    @property
    def accumulation_steps(self) -> int:
        """Forwards per step on each process."""
        return self.batch // self.world // self.rows


def stack_examples(examples: list[Batch], indices: list[int]) -> Batch:
    """Stack examples into a batch; `index` (B,) holds their indices in the data."""
    together = {name: torch.stack([example[name] for example in examples]) for name in examples[0]}
    return {**together, "index": torch.tensor(indices)}


def iter_steps(
    data: Any,
    start: int,
    layout: BatchLayout,
    count_positions: Callable[[Batch], int],
    state: dict[str, Any] | None = None,
) -> Iterator[StepBatch]:
    """Yield steps from example `start` on, until the data has no full batch left.

    count_positions: counts the positions of stacked examples. state: the TrainingData.state at `start`, to avoid
    reading the data before it again.
    """
    if state is not None:
        data.restore(state)
    examples = iter(data.examples(start))
    indices = list(range(layout.rank, layout.batch, layout.world))
    parts = [indices[i : i + layout.rows] for i in range(0, len(indices), layout.rows)]
    while True:
        batch = [example for _, example in zip(range(layout.batch), examples)]
        if len(batch) < layout.batch:
            return
        targets = {name: torch.stack([example[name] for example in batch]) for name in ("labels", "valid")}
        yield StepBatch(
            [
                stack_examples([batch[i] for i in forward_indices], [start + i for i in forward_indices])
                for forward_indices in parts
            ],
            max(1, count_positions(targets)),
            data.count_tokens(targets),
            data.state(),
        )
        start += layout.batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to `device`, asynchronously from pinned memory."""
    return {name: t.to(device, non_blocking=device.type == "cuda" and t.is_pinned()) for name, t in batch.items()}
