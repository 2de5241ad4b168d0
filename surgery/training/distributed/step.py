"""How gradients become a step: gathered over its forwards, clipped, descended. Accelerate's way here, DeepSpeed's engine in
surgery/training/distributed/deepspeed.py.

    optimizer_step.set_rates(factor)
    with optimizer_step.forward(last): optimizer_step.backward(loss)      each forward of a step; last: after it gradients are whole
    norm = optimizer_step.step()                                   of the gradient, before clipping
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
    """run: the model as it is called; clip: the norm's limit; skip: leave bad steps out and go on. can_rerun: whether a batch
    can be run again outside of it, to find who is to blame for a bad step."""

    can_rerun = True

    def __init__(
        self, accelerator: Any, run: Any, optimiser: Any, groups: list[ParameterGroup], layout: BatchLayout, clip: float | None, skip: bool
    ):  # fmt: skip
        self.accelerator, self.run, self.optimiser, self.layout, self.clip = accelerator, run, optimiser, layout, clip
        self.inner = getattr(optimiser, "optimizer", optimiser)
        self.names = [group.names for group in groups]
        self.parameters = self._parameters(groups)
        self._setup(skip)

    def _parameters(self, groups: list[ParameterGroup]) -> dict[str, Tensor]:
        """By name, as they are now: FSDP2 puts others in their place."""
        return {n: p for names, g in zip(self.names, self.inner.param_groups) for n, p in zip(names, g["params"])}

    def _setup(self, skip: bool) -> None:
        self.nonfinite_guard = NonFiniteGuard(self.optimiser, skip, self.accelerator.device)
        self.optimizer_state: Any = TorchOptimizerState(self.inner, self.names)
        self.accelerator.gradient_accumulation_steps = self.layout.accumulation_steps

    @property
    def uses_loss_scale(self) -> bool:
        """Whether infinite gradients are how a loss scale is found."""
        return self.accelerator.scaler is not None

    # -- a step --------------------------------------------------------------------------------------
    def set_rates(self, factor: float) -> None:
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
        self.accelerator.backward(loss * (self.layout.accumulation_steps * self.layout.world))

    def step(self) -> Tensor | None:
        norm = self.clip_gradients()
        if norm is None or self.uses_loss_scale or self.nonfinite_guard.check_step(norm):
            self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return None if norm is None else norm.detach()

    def clip_gradients(self) -> Tensor | None:
        limit = self.clip if self.clip is not None else float("inf")
        parameters = list(self.parameters.values())
        if (
            self.nonfinite_guard.checks_each_step
        ):  # Accelerate's would compare the list with the model's parameters, number by number
            self.accelerator.unscale_gradients()
            norm: Any = torch.nn.utils.clip_grad_norm_(parameters, limit)
        else:
            norm = self.accelerator.clip_grad_norm_(parameters, limit)
        if norm is None or isinstance(norm, float):
            return None
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def clear_found_inf(self) -> None:
        if getattr(self.nonfinite_guard.inner, "found_inf", None) is not None:
            self.nonfinite_guard.inner.found_inf = None

    # -- the loss scale ------------------------------------------------------------------------------
    def scaler_state(self) -> dict[str, Any] | None:
        """Its state, of JSON's types; None where there is none."""
        return self.accelerator.scaler.state_dict() if self.uses_loss_scale else None

    def restore_scale(self, state: dict[str, Any]) -> None:
        if self.uses_loss_scale:
            self.accelerator.scaler.load_state_dict(state)
