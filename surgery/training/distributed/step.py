"""How gradients become a step: gathered over its forwards, clipped, descended. Accelerate's way here, DeepSpeed's engine in
surgery/training/distributed/deepspeed.py.

    descent.rates(factor)
    with descent.forward(last): descent.backward(loss)      each forward of a step; last: after it gradients are whole
    norm = descent.step()                                   of the gradient, before clipping
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from surgery.training.batches import BatchLayout
from surgery.training.checkpoints import TorchOptimizerState
from surgery.training.guard import NonFiniteGuard
from surgery.training.optim import ParameterGroup


class OptimizerStep:
    """run: the model as it is called; clip: the norm's limit; skip: leave bad steps out and go on. again: whether a batch
    can be run again outside of it, to find who is to blame for a bad step."""

    again = True

    def __init__(
        self, accelerator: Any, run: Any, optimiser: Any, groups: list[ParameterGroup], shares: BatchLayout, clip: float | None, skip: bool
    ):  # fmt: skip
        self.accelerator, self.run, self.optimiser, self.shares, self.clip = accelerator, run, optimiser, shares, clip
        self.inner = getattr(optimiser, "optimizer", optimiser)
        self.names = [group.names for group in groups]
        self.parameters = self._parameters(groups)
        self._begin(skip)

    def _parameters(self, groups: list[ParameterGroup]) -> dict[str, Tensor]:
        """By name, as they are now: FSDP2 puts others in their place."""
        return {n: p for names, g in zip(self.names, self.inner.param_groups) for n, p in zip(names, g["params"])}

    def _begin(self, skip: bool) -> None:
        self.bad = NonFiniteGuard(self.optimiser, skip, self.accelerator.device)
        self.memory: Any = TorchOptimizerState(self.inner, self.names)
        self.accelerator.gradient_accumulation_steps = self.shares.forwards

    @property
    def scaled(self) -> bool:
        """Whether infinite gradients are how a loss scale is found."""
        return self.accelerator.scaler is not None

    # -- a step --------------------------------------------------------------------------------------
    def rates(self, factor: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = group["peak"] * factor

    @property
    def rate(self) -> float:
        """The largest."""
        return max(group["lr"] for group in self.inner.param_groups)

    def forward(self, last: bool) -> AbstractContextManager[Any]:
        return self.accelerator.accumulate(self.run)

    def backward(self, loss: Tensor) -> None:
        """loss: this forward's share of the whole batch's mean. Accelerate divides by the forwards of a step and by the
        processes, which is undone."""
        self.accelerator.backward(loss * (self.shares.forwards * self.shares.world))

    def step(self) -> Tensor | None:
        norm = self.clipped()
        if norm is None or self.scaled or self.bad.see(norm):
            self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return None if norm is None else norm.detach()

    def clipped(self) -> Tensor | None:
        limit = self.clip if self.clip is not None else float("inf")
        parameters = list(self.parameters.values())
        if self.bad.asks:  # Accelerate's would compare the list with the model's parameters, number by number
            self.accelerator.unscale_gradients()
            norm: Any = torch.nn.utils.clip_grad_norm_(parameters, limit)
        else:
            norm = self.accelerator.clip_grad_norm_(parameters, limit)
        if norm is None or isinstance(norm, float):
            return None
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def forget_bad(self) -> None:
        if getattr(self.bad.inner, "found_inf", None) is not None:
            self.bad.inner.found_inf = None

    # -- the loss scale ------------------------------------------------------------------------------
    def scale(self) -> dict[str, Any] | None:
        """Its state, of JSON's types; None where there is none."""
        return self.accelerator.scaler.state_dict() if self.scaled else None

    def restore_scale(self, state: dict[str, Any]) -> None:
        if self.scaled:
            self.accelerator.scaler.load_state_dict(state)
