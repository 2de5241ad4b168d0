"""Window dropout: softmax branches of linear mixers that are switched off in some training steps.

A student with softmax over near tokens may learn to ignore its linear branch (Benfeghoul et al. 2025, arXiv 2510.05901,
which drops the window on a schedule). In each step the softmax branch of each mixer is off with probability

    p = share * (1 - step / steps)

so that training ends with the model as it is used. Mixers draw independently; the draws depend on the recipe's seed and
on the step only, so that processes agree and a resumed run repeats them.
"""

from __future__ import annotations

from typing import Any

import torch

from surgery.core.errors import SurgeryError
from surgery.mixers.linear import LinearMixer


class WindowDropout:
    """Switches the softmax branches of a student's linear mixers for one step at a time.

    share: probability at the first step. steps: number of steps of the stage.
    """

    def __init__(self, student: Any, share: float, steps: int):
        self.share, self.steps = share, steps
        self.mixers = [m for m in student.modules() if isinstance(m, LinearMixer) and m.near_weight_H is not None]
        if not self.mixers:
            raise SurgeryError(
                "stage distill: window_dropout switches the softmax branch of linear mixers, and the student has none "
                "with window or "
                "sinks. Set window_dropout to 0, or convert with a recipe such as log-linear."
            )

    def draw(self, step: int, seed: int) -> list[float]:
        """Return 1 for every mixer whose softmax branch is on in this step (counted from 0), else 0."""
        generator = torch.Generator().manual_seed((1_000_003 * seed + step) % 2**32)
        off = torch.rand(len(self.mixers), generator=generator) < self.share * (1 - step / self.steps)
        return (~off).float().tolist()

    def begin_step(self, step: int, seed: int) -> None:
        """Switch the branches for a step.

        The switches are tensors on the mixers' devices, which a CUDA graph reads anew.
        """
        for mixer, on in zip(self.mixers, self.draw(step, seed)):
            if mixer.near_switch is None:
                assert mixer.near_weight_H is not None
                mixer.near_switch = torch.ones((), device=mixer.near_weight_H.device)
            mixer.near_switch.fill_(on)

    def end(self) -> None:
        """Switch all branches on."""
        for mixer in self.mixers:
            mixer.near_switch = None
