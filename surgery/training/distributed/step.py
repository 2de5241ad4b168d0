"""Optimizer steps through Accelerate: gradient accumulation, clipping, update. deepspeed.py has the same for ZeRO.

optimizer_step.set_rates(factor)
with optimizer_step.forward(last): optimizer_step.backward(loss)      once per micro-batch; last: the final one of the step
norm = optimizer_step.step()                                   gradient norm before clipping
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.training.batches import BatchLayout
from surgery.training.checkpoints import TorchOptimizerState
from surgery.training.guard import NonFiniteGuard
from surgery.training.optim import ParameterGroup, set_rate

BUCKET_BYTES = 64 * 2**20  # of gradients that are summed over the processes at once


class GradientReducer:
    """Sums the gradients of replicas over all processes, in flat buckets of one dtype.

    For models that DistributedDataParallel does not wrap, because a CUDA graph holds their forward and backward pass:
    its hooks would communicate inside. Gradients of a parameter that this process did not use count as zero.
    """

    def __init__(self, parameters: dict[str, Tensor]):
        self.parameters = parameters
        self.used: set[str] | None = None  # names of the parameters that have gradients on any process

    @torch.no_grad()
    def reduce_(self) -> None:
        """Overwrite every `.grad` with its sum over all processes."""
        used = self._used_parameters()
        if self.used is None:
            flags = torch.tensor([p.grad is not None for p in self.parameters.values()], dtype=torch.int32)
            flags = flags.to(next(iter(self.parameters.values())).device)
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
            self.used = {name for name, flag in zip(self.parameters, flags.tolist()) if flag}
        if extra := used - self.used:
            raise SurgeryError(
                f"{min(extra)} has a gradient that no process had in the first step of this stage. Set cuda_graph: "
                "false, which trains such models on several GPUs."
            )
        for name in self.used - used:
            self.parameters[name].grad = torch.zeros_like(self.parameters[name])
        for bucket in self._buckets():
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            torch.distributed.all_reduce(flat)
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view(g.shape) for part, g in zip(parts, bucket)])

    def _used_parameters(self) -> set[str]:
        return {name for name, p in self.parameters.items() if p.grad is not None}

    def _buckets(self) -> Iterator[list[Tensor]]:
        """Yield lists of gradients of one dtype, in the same order on every process."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            bucket: list[Tensor] = []
            size = 0
            for gradient in (g for g in gradients if g.dtype == dtype):
                if bucket and size + gradient.nbytes > BUCKET_BYTES:
                    yield bucket
                    bucket, size = [], 0
                bucket.append(gradient)
                size += gradient.nbytes
            yield bucket


def is_bare_replica(accelerator: Any, run: Any) -> bool:
    """Return whether `run` is one of several replicas and is not wrapped."""
    wrapped = isinstance(run, torch.nn.parallel.DistributedDataParallel)
    kind = accelerator.distributed_type.value
    return accelerator.num_processes > 1 and kind in ("MULTI_GPU", "MULTI_CPU") and not wrapped


class OptimizerStep:
    """One optimizer step over several micro-batches.

    run: the prepared (possibly wrapped) model; layout: rows per step, micro-batch and process; clip: maximum gradient
    norm, or None; skip: skip steps with NaN or infinite gradients. can_rerun: whether a batch can be run again for the
    diagnosis of a bad step. reducer: sums the gradients of replicas whose model is not wrapped, otherwise None.
    """

    can_rerun = True
    reducer: GradientReducer | None = None

    def __init__(
        self, accelerator: Any, run: Any, optimiser: Any, groups: list[ParameterGroup], *,
        layout: BatchLayout, clip: float | None, skip: bool,
    ):  # fmt: skip
        self.accelerator, self.run, self.optimiser, self.layout, self.clip = accelerator, run, optimiser, layout, clip
        self.inner = getattr(optimiser, "optimizer", optimiser)
        self.names = [group.names for group in groups]
        self.parameters = self._parameters(groups)
        self._setup(skip)

    def _parameters(self, groups: list[ParameterGroup]) -> dict[str, Tensor]:
        """Return the trained parameters by name, from the optimizer: FSDP2 replaces those of the groups by sharded
        ones.
        """
        return {n: p for names, g in zip(self.names, self.inner.param_groups) for n, p in zip(names, g["params"])}

    def _setup(self, skip: bool) -> None:
        self.nonfinite_guard = NonFiniteGuard(self.optimiser, skip, self.accelerator.device)
        self.optimizer_state: Any = TorchOptimizerState(self.inner, self.names)
        self.accelerator.gradient_accumulation_steps = self.layout.accumulation_steps
        self.reducer = GradientReducer(self.parameters) if is_bare_replica(self.accelerator, self.run) else None

    @property
    def uses_loss_scale(self) -> bool:
        """Whether fp16 loss scaling is active: then infinite gradients are expected while the scale adapts."""
        return self.accelerator.scaler is not None

    # -- a step --------------------------------------------------------------------------------------
    def set_rates(self, factor: float) -> None:
        """Set every learning rate to `factor` times its peak."""
        for group in self.inner.param_groups:
            set_rate(group, group["peak"] * factor)

    @property
    def rate(self) -> float:
        """The largest current learning rate of all groups."""
        return max(float(group["lr"]) for group in self.inner.param_groups)

    def set_rows(self, rows: int) -> None:
        """Set the rows per forward from the next step on; gradients of a step in progress must have been dropped."""
        self.layout = replace(self.layout, rows=rows)
        self.accelerator.gradient_accumulation_steps = self.layout.accumulation_steps
        self.accelerator.step = 0

    def forward(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch. last: whether it is the last one of the step.

        Replicas communicate their gradients in the last one; FSDP2 divides and adds those of each one.
        """
        return self.accelerator.accumulate(self.run)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`, this micro-batch's share of the mean over the global batch.

        Accelerate divides by the number of micro-batches, and wrapped models average over the processes; the factor
        here undoes that.
        """
        averaged = self.layout.world if self.reducer is None else 1
        self.accelerator.backward(loss * (self.layout.accumulation_steps * averaged))

    def step(self) -> Tensor | None:
        """Clip, update the parameters, clear the gradients; return the gradient norm before clipping."""
        if self.reducer is not None:
            self.reducer.reduce_()
        norm = self.clip_gradients()
        if norm is None or self.uses_loss_scale or self.nonfinite_guard.check_step(norm):
            self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return None if norm is None else norm.detach()

    def clip_gradients(self) -> Tensor | None:
        """Clip the gradients to norm `clip`; return their norm before clipping."""
        limit = self.clip if self.clip is not None else float("inf")
        parameters = list(self.parameters.values())
        if self.nonfinite_guard.checks_each_step:
            # Accelerate's clip_grad_norm_ would compare this list with the model's sharded parameters element by
            # element.
            self.accelerator.unscale_gradients()
            norm: Any = torch.nn.utils.clip_grad_norm_(parameters, limit)
        else:
            norm = self.accelerator.clip_grad_norm_(parameters, limit)
        if norm is None or isinstance(norm, float):
            return None
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def clear_found_inf(self) -> None:
        """Remove the flag that disables steps, so that the batch can be run again."""
        if getattr(self.nonfinite_guard.inner, "found_inf", None) is not None:
            self.nonfinite_guard.inner.found_inf = None

    # -- the loss scale ------------------------------------------------------------------------------
    def scaler_state(self) -> dict[str, Any] | None:
        """Return the state of the loss scaler as JSON data, None without loss scaling."""
        return self.accelerator.scaler.state_dict() if self.uses_loss_scale else None

    def restore_scale(self, state: dict[str, Any]) -> None:
        """Restore what `scaler_state` returned."""
        if self.uses_loss_scale:
            self.accelerator.scaler.load_state_dict(state)
