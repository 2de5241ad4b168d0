"""The state of a run with the lowest validation loss, saved next to the checkpoints.

WORK/best/stage-01-step-0000250/     a checkpoint without optimizer state; its notes: {"validation": nats per token}

At most one is kept: a new one is complete before the previous one is removed, so a kill leaves one of them. The start
of a run is the source checkpoint and is not saved here.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

from surgery.training.checkpoints import CheckpointManager, TrainPosition, TrainState

BEST = "best"


class BestCheckpoint(CheckpointManager):
    """Saves the best state in WORK/best. rank, wait: as for CheckpointManager."""

    def __init__(self, folder: Path, rank: int = 0, wait: Any = lambda: None):
        super().__init__(folder, 1, rank, wait)

    def latest(self) -> Path | None:
        """Return the folder of the best state, or None if no state is saved."""
        return min(self.list_all(), key=lambda folder: (self.loss(folder), folder.name), default=None)

    def loss(self, folder: Path) -> float:
        """Return the validation loss of a saved state, in nats per token."""
        return float(self.read_position(folder).notes["validation"])

    def save_if_best(self, loss: float | None, start: float | None, at: TrainPosition, state: TrainState) -> None:
        """Save the state if its loss (nats per token) is below that of the start and of the saved state.

        Every process must call this method with the same loss.
        """
        saved = self.latest()
        others = [start if start is not None else math.inf, self.loss(saved) if saved else math.inf]
        if loss is not None and all(better(loss, other) for other in others):
            notes = {"validation": loss}
            self.save(TrainPosition(at.stage, at.step, at.examples, at.tokens, notes), TrainState(state.parameters))

    def _prune(self) -> None:
        best = self.latest()
        for old in self.list_all():
            if old != best:
                gone = old.with_name(old.name + ".tmp")
                os.replace(old, gone)
                shutil.rmtree(gone, ignore_errors=True)


def better(loss: float, other: float) -> bool:
    """Return whether `loss` is lower than `other`; a finite loss is better than NaN or infinity."""
    return loss < other or (math.isfinite(loss) and not math.isfinite(other))
