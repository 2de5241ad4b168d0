"""One stage, step after step, through Accelerate: devices, precision, accumulation.

The device is asked for numbers only when the log is written; between looks losses and norms stay where they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surgery.training.batches import StepBatch, to_device, iter_steps
from surgery.training.checkpoints import CheckpointManager, TrainState, TrainPosition
from surgery.training.data.prefetch import PREFETCH_TOKENS, prefetch
from surgery.training.distributed.accelerator import optimizer_step_class, batch_layout
from surgery.training.guard import MAX_CONSECUTIVE_SKIPS, DivergenceDetector, diagnose_bad_step, defer_interrupt, bad_step_error
from surgery.training.logging import TrainingLog
from surgery.training.optim import ParameterGroup, WeightEMA
from surgery.training.recipe import HealingRecipe
from surgery.training.stages import Batch, StageModels, Stage


@dataclass
class LoopContext:
    """What a stage runs in. report: told every line of the log; validate: nats per token, or None; evaluate: steps
    between two looks at validation text, 0 for none; judge: given that loss, where it was measured, and the weights."""

    accelerator: Any
    recipe: HealingRecipe
    data: Any
    log: TrainingLog
    checkpoints: CheckpointManager
    report: Callable[[dict[str, Any]], None]
    validate: Callable[[StageModels], float | None]
    skip_bad_steps: bool = False
    evaluate: int = 0
    judge: Callable[[float | None, TrainPosition, TrainState], None] = lambda *given: None
    earlier: dict[str, Tensor] = field(default_factory=dict)  # trained by stages before this one
    steps_before: int = 0


class TrainingLoop:
    def __init__(
        self, setting: LoopContext, stage: Stage, models: StageModels, groups: list[ParameterGroup], optimiser: Any, at: TrainPosition
    ):
        self.setting, self.stage, self.models, self.at = setting, stage, models, at
        self.accelerator, self.config = setting.accelerator, stage.config
        self.shares = batch_layout(self.accelerator, self.config)
        self.descent = optimizer_step_class(self.accelerator)(
            self.accelerator, models.run, optimiser, groups, self.shares, self.config.clip, setting.skip_bad_steps
        )
        parameters = self.descent.parameters
        self.ema = WeightEMA(parameters, self.config.ema) if self.config.ema else None
        means = self.ema.means if self.ema else {}
        self.held = TrainState({**setting.earlier, **parameters}, self.descent.memory, means)
        guard = setting.recipe.guard
        self.divergence = DivergenceDetector(guard.diverged, guard.patience, at.notes.get("best"))
        self.losses: list[dict[str, Tensor]] = []
        self.norms: list[Tensor] = []
        self.seconds, self.waited, self.positions, self.skipped = 0.0, 0.0, 0, 0
        self.last: list[StepBatch] = []
        self.saved = at.step  # the step of the latest checkpoint

    # -- the loop ------------------------------------------------------------------------------------
    def run(self) -> TrainPosition:
        """To the stage's end."""
        self._resume()
        state = self.at.notes.get("data")
        steps = lambda: iter_steps(self.setting.data, self.at.examples, self.shares, self.stage.counted, state)  # noqa: E731
        ahead = max(4, PREFETCH_TOKENS // (self.config.batch * self.config.length))
        self.models.run.train()
        alone = self.accelerator.num_processes == 1
        with ExitStack() as stack:
            ready = stack.enter_context(prefetch(steps, min(ahead, self.config.steps), self.accelerator.device))
            interrupted = stack.enter_context(defer_interrupt(alone))
            began = time.perf_counter()
            while self.at.step < self.config.steps:
                self._step(self._next(ready))
                if self._due(self.setting.recipe.log):
                    self._look(began)
                    began = time.perf_counter()
                began = self._pause(began)
                if interrupted:
                    self._interrupted(began)
        self._end()
        return self.at

    def _next(self, ready: Iterator[StepBatch]) -> StepBatch:
        asked = time.perf_counter()
        step = next(ready, None)
        self.waited += time.perf_counter() - asked
        if step is None:
            raise self._data_ended()
        return step

    def _due(self, every: int) -> bool:
        return bool(every) and (self.at.step % every == 0 or self.at.step == self.config.steps)

    def _step(self, step: StepBatch) -> None:
        self.descent.rates(self.config.schedule.factor(self.at.step, self.config.steps))
        totals: dict[str, Any] = {}
        for number, batch in enumerate(step.batches, 1):
            with self.descent.forward(number == len(step.batches)):
                parts = self._losses(to_device(batch, self.accelerator.device), step.counted)
                for name, part in parts.items():
                    totals[name] = totals.get(name, 0) + part.detach()
        norm = self.descent.step()
        if norm is not None:
            self.norms.append(norm)
        self.losses.append(totals)
        self.last.append(step)
        if self.ema is not None:
            self.ema.update(self.at.step)
        self.positions += self.config.batch * self.config.length
        self.at.step, self.at.examples = self.at.step + 1, self.at.examples + self.config.batch
        self.at.tokens += step.tokens
        self.at.notes["data"] = step.after

    def _losses(self, batch: Batch, counted: int) -> dict[str, Tensor]:
        """Shares of the step's mean over all that counts; backwards too."""
        sums = self.stage.losses(self.models, batch)
        parts = {name: part / counted for name, part in sums.items()}
        self.descent.backward(parts["total"])
        return parts

    # -- looking -------------------------------------------------------------------------------------
    def _look(self, began: float) -> None:
        """Read what has gathered on the device, write it down, stop where it is bad."""
        names = list(self.losses[0])
        table = torch.stack([torch.stack([parts[n].float() for n in names]) for parts in self.losses])
        table = self.accelerator.reduce(table, reduction="sum")
        norms = torch.stack([n.float() for n in self.norms]).tolist() if self.norms else [0.0] * len(table)
        rows, steps = table.tolist(), self.last
        self.losses, self.norms, self.last = [], [], []
        self.seconds += time.perf_counter() - began
        good = self._judged(rows, norms, steps, names.index("total"))
        line = self._line({n: _mean(row[i] for row in good) for i, n in enumerate(names)}, norms)
        self._remember(line)
        if self.accelerator.is_main_process:
            self.setting.log.add(line)
        self.setting.report(line)
        if self.divergence.diverged(line["loss"]):
            what = f"the loss runs away from {self.divergence.best:g}"
            raise self._stopped(what, self.at.step, line["loss"], steps[-1])
        self.at.notes["best"] = self.divergence.best

    def _remember(self, line: dict[str, Any]) -> None:
        notes = self.at.notes
        notes.setdefault("first_loss", line["loss"])
        notes["last_loss"] = line["loss"]
        notes["seconds"] = notes.get("seconds", 0.0) + self.seconds
        notes["positions"] = notes.get("positions", 0) + self.positions
        self.positions, self.seconds, self.waited = 0, 0.0, 0.0

    def _judged(self, rows: list[list[float]], norms: list[float], steps: list[StepBatch], total: int) -> list[list[float]]:
        """Rows of the good steps; SurgeryError at the first bad one, unless those are skipped."""
        bad = [i for i, (row, norm) in enumerate(zip(rows, norms)) if not _is_finite(row[total]) or not _is_finite(norm)]
        if self.descent.scaled:  # infinite norms are how a scaler finds its scale
            bad = [i for i in bad if not _is_finite(rows[i][total])]
        if bad and not self.setting.skip_bad_steps:
            first = self.at.step - len(rows) + bad[0] + 1
            raise self._stopped("the loss or its gradient is no number", first, rows[bad[0]][total], steps[bad[0]])
        self.skipped = self.skipped + len(bad) if len(bad) == len(rows) else 0
        if self.skipped >= MAX_CONSECUTIVE_SKIPS:
            raise self._stopped(f"{self.skipped} bad steps one after the other", self.at.step, float("nan"), steps[-1])
        if bad and self.accelerator.is_main_process:
            self.setting.report({"skipped": [self.at.step - len(rows) + i + 1 for i in bad]})
        return [row for i, row in enumerate(rows) if i not in bad] or rows[:1]

    def _line(self, means: dict[str, float], norms: list[float]) -> dict[str, Any]:
        parts = {name: value for name, value in means.items() if name != "total"}
        device = self.accelerator.device
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return {
            "stage": self.at.stage,
            "kind": self.config.kind,
            "step": self.at.step,
            "steps": self.config.steps,
            "total_steps": self.setting.steps_before + self.at.step,
            "tokens": self.at.tokens,
            "loss": means["total"],
            **parts,
            "rate": self.descent.rate,
            "gradient_norm": _mean(norms),
            "tokens_per_second": round(self.positions / max(self.seconds, 1e-9), 1),
            "waited": round(self.waited / max(self.seconds, 1e-9), 4),
            "seconds_left": round((self.config.steps - self.at.step) * self.seconds * self.config.batch * self.config.length / max(1, self.positions)),
            "memory": memory,
        }  # fmt: skip

    def _stopped(self, what: str, step: int, loss: float, bad: StepBatch) -> Exception:
        self.descent.forget_bad()

        def again() -> None:
            for batch in bad.batches:
                self.stage.losses(self.models, to_device(batch, self.accelerator.device))["total"].backward()

        alone = self.accelerator.num_processes == 1 and self.descent.again
        blame = diagnose_bad_step(self.models.student, again) if alone else ""
        return bad_step_error(what, self.config.kind, step, loss, blame, self.setting.checkpoints.latest(), self.config.rate)

    # -- between steps -------------------------------------------------------------------------------
    def _pause(self, began: float) -> float:
        """Validation and checkpoints; their time is not the loop's. When the clock starts again."""
        recipe, done = self.setting.recipe, self.at.step == self.config.steps
        every = self.setting.evaluate
        checked = bool(every) and self.at.step % every == 0 and not done
        saved = bool(recipe.checkpoint) and self.at.step % recipe.checkpoint == 0 and not done
        if not (checked or saved):
            return began
        if self.losses and saved:  # what is kept must be good
            self._look(began)
        else:
            self.seconds += time.perf_counter() - began
        if checked:
            self._validated()
        if saved:
            self._save()
        return time.perf_counter()

    def _interrupted(self, began: float) -> None:
        if self.losses:
            self._look(began)
        self._save()
        raise KeyboardInterrupt

    def _validated(self) -> None:
        loss = self.setting.validate(self.models)
        self.models.run.train()
        if loss is None:
            return
        line = {"stage": self.at.stage, "kind": self.config.kind, "step": self.at.step, "tokens": self.at.tokens}
        line |= {"total_steps": self.setting.steps_before + self.at.step, "validation": loss}
        if self.accelerator.is_main_process:
            self.setting.log.add(line)
        self.setting.report(line)
        self.setting.judge(loss, self.at, self.held)

    def _save(self) -> None:
        if self.saved == self.at.step:  # a second one would remove the first before it takes its place
            return
        if (scale := self.descent.scale()) is not None:
            self.at.notes["scaler"] = scale
        self.setting.checkpoints.save(self.at, self.held)
        self.saved = self.at.step

    def _resume(self) -> None:
        folder = self.setting.checkpoints.latest()
        if folder is None or self.at.step == 0:
            return
        self.setting.checkpoints.restore(folder, self.held)
        if "scaler" in self.at.notes:
            self.descent.restore_scale(self.at.notes["scaler"])

    def _end(self) -> None:
        """The running mean takes the weights' place."""
        if self.ema is not None:
            self.ema.swap()

    def _data_ended(self) -> Exception:
        from surgery.core.errors import SurgeryError

        return SurgeryError(
            f"stage {self.config.kind}: the data ended after {self.at.examples} rows of {self.config.length} tokens, the "
            f"stage wants {self.config.steps * self.config.batch}; leave out data.epochs, or set "
            f"tokens={self.at.examples * self.config.length}"
        )


def _mean(values: Any) -> float:
    found = list(values)
    return sum(found) / max(1, len(found))


def _is_finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
