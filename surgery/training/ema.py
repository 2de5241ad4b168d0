"""A running mean of the weights: mean = decay mean + (1 - decay) weights, after every step."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.training.sharding import alike, local


class RunningMean:
    """Begins slowly, so that the first weights do not stay in it: decay is at most (1 + step) / (10 + step)."""

    def __init__(self, parameters: dict[str, Tensor], decay: float):
        self.parameters, self.decay = parameters, decay
        self.means = {name: alike(p) for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        means, now = ([local(t) for t in some.values()] for some in (self.means, self.parameters))
        torch._foreach_lerp_(means, now, 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Weights and means change places."""
        for name, p in self.parameters.items():
            ours, mean = local(p), local(self.means[name])
            held = ours.clone()
            ours.copy_(mean)
            mean.copy_(held)
