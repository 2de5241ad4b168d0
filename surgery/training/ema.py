"""A running mean of the weights: mean = decay mean + (1 - decay) weights, after every step."""

from __future__ import annotations

import torch
from torch import Tensor


class RunningMean:
    """Begins slowly, so that the first weights do not stay in it: decay is at most (1 + step) / (10 + step)."""

    def __init__(self, parameters: dict[str, Tensor], decay: float):
        self.parameters, self.decay = parameters, decay
        self.means = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.means.values()), [p.detach() for p in self.parameters.values()], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Weights and means change places."""
        for name, p in self.parameters.items():
            held = p.detach().clone()
            p.copy_(self.means[name])
            self.means[name].copy_(held)
