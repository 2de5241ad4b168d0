"""The best state of a run by held-out cross-entropy, on disk beside the checkpoints.

WORK/best/stage-01-step-0000250/     a checkpoint without an optimiser; its notes: {"validation": nats per token}

There is one at a time: a new one is whole before the one before it is removed, so a kill leaves one of them. A run that
goes on after a kill judges again what it trains again, and finds the state that is there already no worse. The start is
the source checkpoint, of which nothing is saved.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

from surgery.training.checkpoints import CheckpointManager, TrainPosition, TrainState

BEST = "best"


class Best(CheckpointManager):
    """folder: WORK/best; rank, wait: as of Checkpoints."""

    def __init__(self, folder: Path, rank: int = 0, wait: Any = lambda: None):
        super().__init__(folder, 1, rank, wait)

    def latest(self) -> Path | None:
        """The folder of the best state, None where none is saved."""
        return min(self.list_all(), key=lambda folder: (self.loss(folder), folder.name), default=None)

    def loss(self, folder: Path) -> float:
        """Nats per token of validation text."""
        return float(self.read_position(folder).notes["validation"])

    def see(self, loss: float | None, start: float | None, at: TrainPosition, held: TrainState) -> None:
        """Save a state that is better than the start and than all before it. Every process calls, with the same loss."""
        saved = self.latest()
        others = [start if start is not None else math.inf, self.loss(saved) if saved else math.inf]
        if loss is not None and all(better(loss, other) for other in others):
            notes = {"validation": loss}
            self.save(TrainPosition(at.stage, at.step, at.examples, at.tokens, notes), TrainState(held.parameters))

    def _prune(self) -> None:
        best = self.latest()
        for old in self.list_all():
            if old != best:
                gone = old.with_name(old.name + ".tmp")
                os.replace(old, gone)
                shutil.rmtree(gone, ignore_errors=True)


def better(loss: float, other: float) -> bool:
    """Any number is better than none."""
    return loss < other or (math.isfinite(loss) and not math.isfinite(other))
