"""Learning-rate schedules: step -> factor on the peak rate, a pure function, so that a resumed run needs no state."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from surgery.training.strict import Real, Strict

Share = Annotated[Real, Field(ge=0, le=1)]


class Schedule(Strict):
    """warmup: share of the steps over which the rate rises from 0. cosine falls to `floor` times the peak at the last
    step; constant stays; wsd (warm-up, stable, decay) stays and falls in a straight line over the last `decay` share."""

    name: Literal["cosine", "constant", "wsd"] = "cosine"
    warmup: Share = 0.02
    floor: Share = 0.1
    decay: Share = 0.2

    def factor(self, step: int, steps: int) -> float:
        """For step 0 .. steps - 1."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return (step + 1) / (rising + 1)
        done = (step - rising + 1) / max(1, steps - rising)
        if self.name == "cosine":
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2
        if self.name == "wsd" and self.decay and (left := (steps - step) / (self.decay * steps)) < 1:
            return self.floor + (1 - self.floor) * left
        return 1.0
