"""Ctrl-C in a run: the step is ended and a checkpoint written, then the run stops; a second Ctrl-C does not wait.

Where several processes train together they would hear of it at different steps, so there the run stops where it is,
and its last checkpoint is what remains.

What happens when a step goes wrong: a gradient that is no number, or a loss that runs away.

A step with such a gradient changes nothing: the optimiser is told on the device (`found_inf`, which fused optimisers
read), without asking the device at every step. Unless bad steps are to be skipped, all steps after it change nothing
either, so that when the loop next looks, the model is still the one that made it, and running that batch again shows
which module it was.
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
    """A list that is empty until somebody interrupts."""
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


class NonFiniteGuard:
    """Watches the norms of the gradients. skip: leave bad steps out and go on."""

    def __init__(self, optimiser: Any, skip: bool, device: torch.device):
        self.inner = getattr(optimiser, "optimizer", optimiser)
        self.skip, self.sticky_flag = skip, torch.zeros((), device=device)
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        # With parameters spread over devices the fused kernels take no such flag; those runs ask at each step.
        self.checks_each_step = any_sharded(parameters)

    def check_step(self, norm: Tensor) -> bool:
        """Before the optimiser's step; whether it may be taken at all."""
        bad = (~torch.isfinite(norm.detach())).to(torch.float32).reshape(())
        if self.checks_each_step:
            return not bool(bad)
        if not self.skip:
            bad = self.sticky_flag = torch.maximum(self.sticky_flag, bad.to(self.sticky_flag.device))
        self.inner.found_inf = bad
        return True


class DivergenceDetector:
    """Looks at mean losses; the state is a few numbers, kept in checkpoints."""

    def __init__(self, factor: float, patience: int, best: float | None = None):
        self.factor, self.patience, self.best, self.num_over = factor, patience, best, 0

    def update(self, loss: float) -> bool:
        if self.best is None or loss < self.best:
            self.best = loss
        limit = self.best + max((self.factor - 1) * abs(self.best), 1.0)
        self.num_over = self.num_over + 1 if loss > limit else 0
        return self.num_over >= self.patience


def bad_step_error(what: str, stage: str, step: int, loss: float, blame: str, latest: Any, rate: float) -> SurgeryError:
    kept = f"The last good checkpoint is {latest}" if latest else "There is no checkpoint yet"
    return SurgeryError(
        f"stage {stage}, step {step}: {what} (loss {loss:g}, rate {rate:g}). {blame} {kept}; lower the rate (--set "
        f"stages.*.rate={rate / 3:.2g}) and begin anew, or go on with --resume --skip-bad-steps, which leaves such steps out"
    )


# -- whose fault ---------------------------------------------------------------------------------------------
@contextmanager
def record_activations(model: nn.Module) -> Iterator[dict[str, tuple[str, float]]]:
    """What comes by in forwards and backwards: "first" module (path, size) whose output, or "back" whose input gradient,
    is no number; "largest" (path, absolute value) of the finite outputs."""
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
    """The largest absolute number in a tensor, or in the first tensor of a tuple."""
    if isinstance(value, (tuple, list)):
        value = next((v for v in value if isinstance(v, Tensor)), None)
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return None
    return float(value.detach().abs().amax())


def diagnose_bad_step(model: nn.Module, rerun_batch: Callable[[], None]) -> str:
    """A sentence on the module that blew up, after running the batch again."""
    lost = sorted(n for n, p in model.named_parameters() if not bool(torch.isfinite(p.detach()).all()))
    if lost:
        return f"The parameter {lost[0]} holds numbers that are none."
    with record_activations(model) as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on hooks of modules whose inputs need no gradient
        try:
            rerun_batch()
        except RuntimeError as error:
            return f"Running the batch again fails: {' '.join(str(error).split())[:150]}."
    if "first" in seen:
        return f"The first activations that are no numbers are those of {seen['first'][0]}."
    path, size = seen.get("largest", ("", 0.0))
    largest = f"The largest activations, up to {size:.3g}, are those of {path}." if path else ""
    if "back" in seen:
        return f"Going back, the gradient is first no number at {seen['back'][0]}. {largest}"
    return largest
