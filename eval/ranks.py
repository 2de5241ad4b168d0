"""The processes that share an evaluation: `accelerate launch -m surgery eval` starts them, each takes a share of the
samples, and all get every result. Alone there is one, and nothing of this costs anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    index: int = 0
    count: int = 1

    @property
    def main(self) -> bool:
        """Whether this one writes and talks."""
        return self.index == 0

    def gather(self, own: T) -> list[T]:
        """What every process has, in the order of processes, to all of them."""
        if self.count == 1:
            return [own]
        every: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(every, own)
        return every

    def agreed(self, own: T) -> T:
        """The first process's."""
        if self.count == 1:
            return own
        said = [own]
        torch.distributed.broadcast_object_list(said)
        return said[0]

    def all_or_none(self, do: Callable[[], T]) -> T:
        """do(), which must not communicate; where it fails in one process it fails in all, so that none waits."""
        result, error = None, None
        try:
            result = do()
        except Exception as found:
            error = found
        failed = [e for e in self.gather(error) if e is not None] if self.count > 1 else [error] if error else []
        if failed:
            raise error or failed[0]
        return result  # type: ignore[return-value]


def start_ranks(device: str | None) -> Ranks:
    """As `accelerate launch` (or torchrun) set them up."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu" or not torch.accelerator.is_available())
    return Ranks(state.process_index, state.num_processes)


def device_of(ranks: Ranks, device: str | None) -> str | None:
    """Each process its own GPU."""
    if ranks.count == 1 or device not in (None, "cuda"):
        return device
    from accelerate import PartialState

    return str(PartialState().device)
