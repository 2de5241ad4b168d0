"""Guards of the training loop: deferred Ctrl-C, NaN or infinite gradients, and divergence of the loss.

Ctrl-C: the current step finishes and a checkpoint is written, then the run stops; a second Ctrl-C stops immediately.
With several processes the signal would arrive at different steps, so there the run stops at once and keeps its last
checkpoint.

Non-finite gradients: the step changes no parameter. The flag stays on the device (`found_inf`, which fused optimizers
read), so that no step synchronizes with the host. Unless bad steps are skipped, the flag also disables all later steps:
when the loop next reads the losses, the model is still the one that produced the bad gradient, and running the batch
again shows in which module it arose.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.core.errors import SurgeryError
from surgery.training.sharded_tensors import any_sharded


@contextmanager
def defer_interrupt(single_process: bool) -> Iterator[list[int]]:
    """Yield a list that stays empty until SIGINT arrives; a second SIGINT raises KeyboardInterrupt.

    A no-op with several processes.
    """
    signals: list[int] = []
    if not single_process or threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def handler(number: int, frame: object) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, before)


MAX_CONSECUTIVE_SKIPS = 10


class TrainingStopped(SurgeryError):
    """Training that cannot go on at its rate: a loss that diverged, or NaN or infinite gradients."""


def reads_found_inf(optimiser: Any) -> bool:
    """Return whether the optimizer skips a step on the device where its `found_inf` is 1."""
    return bool(optimiser.defaults.get("fused")) or hasattr(type(optimiser), "found_inf")


class NonFiniteGuard:
    """Disables optimizer steps whose gradient norm is NaN or infinite.

    skip: disable only the bad step (True), or also all steps after it (False).
    """

    def __init__(self, optimiser: Any, skip: bool, device: torch.device):
        self.inner = getattr(optimiser, "optimizer", optimiser)
        self.skip, self.sticky_flag = skip, torch.zeros((), device=device)
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        # Fused kernels ignore the flag for sharded parameters, and other optimizers have none, so such runs synchronize
        # at each step instead.
        self.checks_each_step = any_sharded(parameters) or not reads_found_inf(self.inner)

    def check_step(self, norm: Tensor) -> bool:
        """Return whether the optimizer may step, given the gradient norm (a scalar tensor). Call before each step."""
        bad = (~torch.isfinite(norm.detach())).to(torch.float32).reshape(())
        if self.checks_each_step:
            return not bool(bad)
        if not self.skip:
            bad = self.sticky_flag = torch.maximum(self.sticky_flag, bad.to(self.sticky_flag.device))
        self.inner.found_inf = bad
        return True


class DivergenceDetector:
    """Detects a diverging loss: above factor * best (and at least 1 nat above) for `patience` consecutive updates.

    best: the lowest mean loss so far, in nats; it is saved in checkpoints.
    """

    def __init__(self, factor: float, patience: int, best: float | None = None):
        self.factor, self.patience, self.best, self.num_over = factor, patience, best, 0

    def update(self, loss: float) -> bool:
        """Record a mean loss; return whether training has diverged."""
        if self.best is None or loss < self.best:
            self.best = loss
        limit = self.best + max((self.factor - 1) * abs(self.best), 1.0)
        self.num_over = self.num_over + 1 if loss > limit else 0
        return self.num_over >= self.patience


def bad_step_error(
    what: str, stage: str, step: int, loss: float, *, blame: str, latest: Any, rate: float
) -> SurgeryError:
    """Return the error that stops a run. blame: diagnosis of the step, or ""; latest: folder of the last good
    checkpoint.
    """
    checkpoint = f"The last good checkpoint is {latest}" if latest else "There is no checkpoint yet"
    return TrainingStopped(
        f"stage {stage}, step {step}: {what} (loss {loss:g}, rate {rate:g}). {blame} {checkpoint}. Lower the rate "
        "(--set "
        f"stages.*.rate={rate / 3:.2g}) and start again, or continue with --resume --skip-bad-steps, which skips such "
        "steps."
    )


# -- diagnosis ---------------------------------------------------------------------------------------------
@contextmanager
def record_activations(model: nn.Module) -> Iterator[dict[str, tuple[str, float]]]:
    """Record activations with hooks and yield the record.

    "first": (path, absolute value) of the first module with a NaN or infinite output. "back": the same for the first
    leaf module with a non-finite input gradient. "largest": (path, absolute value) of the largest finite output.
    """
    seen: dict[str, tuple[str, float]] = {}
    handles = []

    def make_forward_hook(path: str) -> Callable[..., None]:
        def hook(_: Any, args: Any, output: Any) -> None:
            size = _max_abs(output)
            if size is None:
                return
            if size != size or size == float("inf"):
                seen.setdefault("first", (path, size))
            elif size > seen.get("largest", ("", -1.0))[1]:
                seen["largest"] = (path, size)

        return hook

    def make_backward_hook(path: str) -> Callable[..., None]:
        def hook(_: Any, grad_input: Any, grad_output: Any) -> None:
            size, size_out = _max_abs(grad_input), _max_abs(grad_output)
            if size is not None and not _is_finite(size) and (size_out is None or _is_finite(size_out)):
                seen.setdefault("back", (path, size))

        return hook

    for path, module in model.named_modules():
        if path:
            handles.append(module.register_forward_hook(make_forward_hook(path)))
            if not next(module.children(), None):
                handles.append(module.register_full_backward_hook(make_backward_hook(path)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _is_finite(size: float) -> bool:
    return size == size and size != float("inf")


def _max_abs(value: Any) -> float | None:
    """Return the largest absolute value of a tensor, or of the first tensor in a tuple or list."""
    if isinstance(value, (tuple, list)):
        value = next((v for v in value if isinstance(v, Tensor)), None)
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return None
    return float(value.detach().abs().amax())


def diagnose_bad_step(model: nn.Module, rerun_batch: Callable[[], None]) -> str:
    """Run the batch again with hooks and return a sentence that names the module where NaN or infinity first
    appears.
    """
    lost = sorted(n for n, p in model.named_parameters() if not bool(torch.isfinite(p.detach()).all()))
    if lost:
        return f"The parameter {lost[0]} contains NaN or infinity."
    with record_activations(model) as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on hooks of modules whose inputs need no gradient
        try:
            rerun_batch()
        except RuntimeError as error:
            return f"Running the batch again failed: {' '.join(str(error).split())[:150]}."
    if "first" in seen:
        return f"The first NaN or infinite activations are in {seen['first'][0]}."
    path, size = seen.get("largest", ("", 0.0))
    largest = f"The largest activations, up to {size:.3g}, are in {path}." if path else ""
    if "back" in seen:
        return f"In the backward pass the gradient first becomes NaN or infinite at {seen['back'][0]}. {largest}"
    return largest
