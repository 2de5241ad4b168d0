"""The training loop of one stage, on Accelerate (devices, mixed precision, gradient accumulation).

Losses and gradient norms stay on the device between log entries, so that steps do not synchronize with the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surgery.core.parallel_compile import cache_folder, compile_kernels
from surgery.training.batches import StepBatch, iter_steps, to_device
from surgery.training.checkpoints import CheckpointManager, TrainPosition, TrainState
from surgery.training.cuda_graph import capture_micro_batch
from surgery.training.data.prefetch import PREFETCH_TOKENS, prefetch
from surgery.training.distributed.accelerator import batch_layout, optimizer_step_class
from surgery.training.guard import (
    MAX_CONSECUTIVE_SKIPS,
    DivergenceDetector,
    bad_step_error,
    defer_interrupt,
    diagnose_bad_step,
)
from surgery.training.logging import TrainingLog
from surgery.training.optim import ParameterGroup, WeightEMA
from surgery.training.recipe import HealingRecipe
from surgery.training.stages import Batch, Stage, StageModels


@dataclass
class LoopContext:
    """What all stages of a run share.

    report: called with every log entry. validate: returns the validation loss in nats per token, or None without
    validation text. skip_bad_steps: skip steps with NaN or infinite gradients. evaluate: steps between two evaluations
    on validation text, 0 for none. after_evaluation: called with validation loss, position and training state. earlier:
    parameters that earlier stages trained, by name; they are saved too. steps_before: steps of earlier stages.
    """

    accelerator: Any
    recipe: HealingRecipe
    data: Any
    log: TrainingLog
    checkpoints: CheckpointManager
    report: Callable[[dict[str, Any]], None]
    validate: Callable[[StageModels], float | None]
    skip_bad_steps: bool = False
    evaluate: int = 0
    after_evaluation: Callable[[float | None, TrainPosition, TrainState], None] = lambda *args: None
    earlier: dict[str, Tensor] = field(default_factory=dict)
    steps_before: int = 0


class TrainingLoop:
    """Trains one stage from position `at` to its last step.

    models.run is the prepared model; groups and optimiser are those of the parameters that the stage trains.
    """

    def __init__(
        self,
        context: LoopContext,
        stage: Stage,
        models: StageModels,
        groups: list[ParameterGroup],
        optimiser: Any,
        at: TrainPosition,
    ):
        self.context, self.stage, self.models, self.at = context, stage, models, at
        self.accelerator, self.config = context.accelerator, stage.config
        self.layout = batch_layout(self.accelerator, self.config)
        self.optimizer_step = optimizer_step_class(self.accelerator)(
            self.accelerator, models.run, optimiser, groups, layout=self.layout, clip=self.config.clip,
            skip=context.skip_bad_steps,
        )  # fmt: skip
        parameters = self.optimizer_step.parameters
        self.ema = WeightEMA(parameters, self.config.ema) if self.config.ema else None
        means = self.ema.means if self.ema else {}
        self.train_state = TrainState({**context.earlier, **parameters}, self.optimizer_step.optimizer_state, means)
        guard = context.recipe.guard
        self.divergence = DivergenceDetector(guard.diverged, guard.patience, at.notes.get("best"))
        captures = context.recipe.cuda_graph
        self.captured = capture_micro_batch(self.accelerator, stage, models, self.optimizer_step) if captures else None
        self.losses: list[dict[str, Tensor]] = []
        self.norms: list[Tensor] = []
        self.seconds, self.waited, self.positions, self.skipped = 0.0, 0.0, 0, 0
        self.recent_steps: list[StepBatch] = []
        self.due_save = at.step  # the step of the latest checkpoint
        self.has_compiled = False

    # -- the loop ------------------------------------------------------------------------------------
    def run(self) -> TrainPosition:
        """Train to the end of the stage and return the position there. Raises SurgeryError on bad steps or divergence,
        KeyboardInterrupt after Ctrl-C (with a checkpoint written)."""
        self._resume()
        state = self.at.notes.get("data")
        steps = lambda: iter_steps(self.context.data, self.at.examples, self.layout, self.stage.count_positions, state)  # noqa: E731
        ahead = max(4, PREFETCH_TOKENS // (self.config.batch * self.config.length))
        self.models.run.train()
        single_process = self.accelerator.num_processes == 1
        with ExitStack() as stack:
            if self.captured is not None:
                stack.enter_context(self.captured.on_stream())
            ready = stack.enter_context(prefetch(steps, min(ahead, self.config.steps), self.accelerator.device))
            interrupted = stack.enter_context(defer_interrupt(single_process))
            began = time.perf_counter()
            while self.at.step < self.config.steps:
                step = self._next(ready)
                if not self.recent_steps and not self.has_compiled:
                    began = self._compile_kernels(step.batches[0], began)
                self._step(step)
                if self._is_due(self.context.recipe.log):
                    self._log_steps(began)
                    began = time.perf_counter()
                began = self._validate_and_save(began)
                if interrupted:
                    self._save_and_stop(began)
        self._apply_ema()
        return self.at

    def _next(self, ready: Iterator[StepBatch]) -> StepBatch:
        start = time.perf_counter()
        step = next(ready, None)
        self.waited += time.perf_counter() - start
        if step is None:
            raise self._data_ended_error()
        return step

    def _compile_kernels(self, batch: Batch, began: float) -> float:
        """Compile the GPU kernels of a micro-batch in parallel, before the first step; its results are dropped.

        Return the new start of the step timer: the time is reported, and is not training time.
        """
        self.has_compiled = True
        if not self.stage.fits_cuda_graph:  # other stages may keep what they compute
            return began
        device = self.accelerator.device

        def run() -> None:
            with self.accelerator.autocast():  # with communication, or FSDP2 would keep the gradients for the next step
                self.stage.losses(self.models, to_device(batch, device))["total"].backward()

        compiled = compile_kernels(run, device)
        if device.type == "cuda":
            self.optimizer_step.inner.zero_grad(set_to_none=True)
        now = time.perf_counter()
        if compiled:
            self.context.report({"compiled": compiled, "seconds": now - began, "folder": cache_folder()})
        return now

    def _is_due(self, every: int) -> bool:
        return bool(every) and (self.at.step % every == 0 or self.at.step == self.config.steps)

    def _step(self, step: StepBatch) -> None:
        self.optimizer_step.set_rates(self.config.schedule.factor(self.at.step, self.config.steps))
        self.stage.begin_step(self.at.step, self.context.recipe.seed)
        totals: dict[str, Any] = {}
        for number, batch in enumerate(step.batches, 1):
            with self.optimizer_step.forward(number == len(step.batches)):
                parts = self._losses(batch, step.num_counted)
                for name, loss_part in parts.items():
                    totals[name] = totals.get(name, 0) + loss_part.detach()
        norm = self.optimizer_step.step()
        if norm is not None:
            self.norms.append(norm)
        self.losses.append(totals)
        self.recent_steps.append(step)
        if self.ema is not None:
            self.ema.update(self.at.step)
        self.positions += self.config.batch * self.config.length
        self.at.step, self.at.examples = self.at.step + 1, self.at.examples + self.config.batch
        self.at.tokens += step.tokens
        self.at.notes["data"] = step.data_state

    def _losses(self, batch: Batch, num_counted: int) -> dict[str, Tensor]:
        """Return this micro-batch's parts of the mean loss over the step, after their backward pass."""
        captured = None if self.captured is None else self.captured(batch, num_counted)
        if captured is not None:
            return captured
        sums = self.stage.losses(self.models, to_device(batch, self.accelerator.device))
        parts = {name: loss_sum / num_counted for name, loss_sum in sums.items()}
        self.optimizer_step.backward(parts["total"])
        return parts

    # -- logging -------------------------------------------------------------------------------------
    def _log_steps(self, began: float) -> None:
        """Read the losses and norms since the last log entry, write the entry, and stop on bad steps or divergence."""
        names = list(self.losses[0])
        table = torch.stack([torch.stack([parts[n].float() for n in names]) for parts in self.losses])
        table = self.accelerator.reduce(table, reduction="sum")
        norms = torch.stack([n.float() for n in self.norms]).tolist() if self.norms else [0.0] * len(table)
        rows, steps = table.tolist(), self.recent_steps  # waits for the GPU
        self.losses, self.norms, self.recent_steps = [], [], []
        self.seconds += time.perf_counter() - began
        good = self._check_losses(rows, norms, steps, names.index("total"))
        line = self._log_entry({n: _mean(row[i] for row in good) for i, n in enumerate(names)}, norms)
        self._update_notes(line)
        if self.accelerator.is_main_process:
            self.context.log.add(line)
        self.context.report(line)
        if self.divergence.update(line["loss"]):
            what = f"the loss diverged, its best value was {self.divergence.best:g}"
            raise self._stop_error(what, self.at.step, line["loss"], steps[-1])
        self.at.notes["best"] = self.divergence.best

    def _update_notes(self, line: dict[str, Any]) -> None:
        notes = self.at.notes
        notes.setdefault("first_loss", line["loss"])
        notes["last_loss"] = line["loss"]
        notes["seconds"] = notes.get("seconds", 0.0) + self.seconds
        notes["positions"] = notes.get("positions", 0) + self.positions
        self.positions, self.seconds, self.waited = 0, 0.0, 0.0

    def _check_losses(
        self, rows: list[list[float]], norms: list[float], steps: list[StepBatch], total: int
    ) -> list[list[float]]:
        """Return the rows of steps with finite loss and gradient.

        Raises SurgeryError at the first other one, unless such steps are skipped, or if MAX_CONSECUTIVE_SKIPS were
        skipped in a row.
        """
        bad = [
            i for i, (row, norm) in enumerate(zip(rows, norms)) if not _is_finite(row[total]) or not _is_finite(norm)
        ]
        if self.optimizer_step.uses_loss_scale:  # infinite norms are expected while the scale adapts
            bad = [i for i in bad if not _is_finite(rows[i][total])]
        if bad and not self.context.skip_bad_steps:
            first = self.at.step - len(rows) + bad[0] + 1
            raise self._stop_error(
                "the loss or its gradient is NaN or infinite", first, rows[bad[0]][total], steps[bad[0]]
            )
        self.skipped = self.skipped + len(bad) if len(bad) == len(rows) else 0
        if self.skipped >= MAX_CONSECUTIVE_SKIPS:
            raise self._stop_error(
                f"{self.skipped} consecutive steps with NaN or infinite gradients",
                self.at.step,
                float("nan"),
                steps[-1],
            )
        if bad and self.accelerator.is_main_process:
            self.context.report({"skipped": [self.at.step - len(rows) + i + 1 for i in bad]})
        return [row for i, row in enumerate(rows) if i not in bad] or rows[:1]

    def _log_entry(self, means: dict[str, float], norms: list[float]) -> dict[str, Any]:
        parts = {name: value for name, value in means.items() if name != "total"}
        device = self.accelerator.device
        # What the allocator holds, pools of graphs included: max_memory_allocated would leave them out.
        memory = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
        return {
            "stage": self.at.stage,
            "kind": self.config.kind,
            "step": self.at.step,
            "steps": self.config.steps,
            "total_steps": self.context.steps_before + self.at.step,
            "tokens": self.at.tokens,
            "loss": means["total"],
            **parts,
            "rate": self.optimizer_step.rate,
            "gradient_norm": _mean(norms),
            "tokens_per_second": round(self.positions / max(self.seconds, 1e-9), 1),
            "waited": round(self.waited / max(self.seconds, 1e-9), 4),
            "seconds_left": round((self.config.steps - self.at.step) * self.seconds * self.config.batch * self.config.length / max(1, self.positions)),
            "memory": memory,
        }  # fmt: skip

    def _stop_error(self, what: str, step: int, loss: float, bad: StepBatch) -> Exception:
        self.optimizer_step.clear_found_inf()

        def rerun_batch() -> None:
            for batch in bad.batches:
                self.stage.losses(self.models, to_device(batch, self.accelerator.device))["total"].backward()

        can_rerun = self.accelerator.num_processes == 1 and self.optimizer_step.can_rerun
        blame = diagnose_bad_step(self.models.student, rerun_batch) if can_rerun else ""
        latest = self.context.checkpoints.latest()
        return bad_step_error(what, self.config.kind, step, loss, blame=blame, latest=latest, rate=self.config.rate)

    # -- between steps -------------------------------------------------------------------------------
    def _validate_and_save(self, began: float) -> float:
        """Evaluate and save where due. Return the new start of the step timer: neither counts as training time."""
        recipe, done = self.context.recipe, self.at.step == self.config.steps
        every = self.context.evaluate
        due_validation = bool(every) and self.at.step % every == 0 and not done
        due_save = bool(recipe.checkpoint) and self.at.step % recipe.checkpoint == 0 and not done
        if not (due_validation or due_save):
            return began
        if self.losses and due_save:  # never save a state with non-finite losses
            self._log_steps(began)
        else:
            self._synchronize()
            self.seconds += time.perf_counter() - began
        if due_validation:
            self._validate()
        if due_save:
            self._save()
        return time.perf_counter()

    def _synchronize(self) -> None:
        """Wait for the GPU, so that steps that are queued count as training time, and not as time of what follows."""
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize(self.accelerator.device)

    def _save_and_stop(self, began: float) -> None:
        if self.losses:
            self._log_steps(began)
        self._save()
        raise KeyboardInterrupt

    def _validate(self) -> None:
        loss = self.context.validate(self.models)
        self.models.run.train()
        if loss is None:
            return
        line = {"stage": self.at.stage, "kind": self.config.kind, "step": self.at.step, "tokens": self.at.tokens}
        line |= {"total_steps": self.context.steps_before + self.at.step, "validation": loss}
        if self.accelerator.is_main_process:
            self.context.log.add(line)
        self.context.report(line)
        self.context.after_evaluation(loss, self.at, self.train_state)

    def _save(self) -> None:
        if self.due_save == self.at.step:  # writing it again would first remove the good one
            return
        if (scale := self.optimizer_step.scaler_state()) is not None:
            self.at.notes["scaler"] = scale
        self.context.checkpoints.save(self.at, self.train_state)
        self.due_save = self.at.step

    def _resume(self) -> None:
        folder = self.context.checkpoints.latest()
        if folder is None or self.at.step == 0:
            return
        self.context.checkpoints.restore(folder, self.train_state)
        if "scaler" in self.at.notes:
            self.optimizer_step.restore_scale(self.at.notes["scaler"])

    def _apply_ema(self) -> None:
        """Replace the weights by their exponential moving average."""
        if self.ema is not None:
            self.ema.swap()

    def _data_ended_error(self) -> Exception:
        from surgery.core.errors import SurgeryError

        return SurgeryError(
            f"stage {self.config.kind}: the data ended after {self.at.examples} rows of {self.config.length} tokens, "
            "but the "
            f"stage needs {self.config.steps * self.config.batch} rows. Leave out data.epochs, or set "
            f"tokens={self.at.examples * self.config.length}."
        )


def _mean(values: Any) -> float:
    numbers = list(values)
    return sum(numbers) / max(1, len(numbers))


def _is_finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
