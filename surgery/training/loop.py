"""The training loop of one stage, on Accelerate (devices, mixed precision, gradient accumulation).

Losses and gradient norms stay on the device between log entries, so that steps do not synchronize with the host.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.core.parallel_compile import cache_folder, compile_kernels
from surgery.training.batches import StepBatch, iter_steps, to_device
from surgery.training.checkpoints import CheckpointManager, TrainPosition, TrainState
from surgery.training.compiled_layers import (
    compilation_settings,
    is_worth_compiling,
    restore_layers,
    try_compiled,
    without_compilation,
)
from surgery.training.cuda_graph import CapturedMicroBatch, capture_micro_batch, is_plain_batch, plain_inputs
from surgery.training.data.prefetch import PREFETCH_TOKENS, prefetch
from surgery.training.distributed.accelerator import batch_layout, optimizer_step_class, sharding_name
from surgery.training.guard import (
    MAX_CONSECUTIVE_SKIPS,
    DivergenceDetector,
    bad_step_error,
    defer_interrupt,
    diagnose_bad_step,
)
from surgery.training.logging import TrainingLog
from surgery.training.memory import (
    MemoryChoice,
    MemoryNeed,
    available_memory,
    choose,
    measure_need,
    read_choice,
    reduce_choice,
    release_cached_memory,
    split_rows,
)
from surgery.training.models import disable_gradient_checkpointing, enable_gradient_checkpointing
from surgery.training.optim import ParameterGroup, WeightEMA
from surgery.training.recipe import HealingRecipe
from surgery.training.stages import Batch, Stage, StageModels

UNCAPTURED = (
    "cuda_graph: true is not used in this stage. It needs one GPU per process, a distill or lm stage, activations that "
    "are kept, and the teacher in memory; without FSDP2, DeepSpeed or fp16"
)


@dataclass
class LoopContext:
    """What all stages of a run share.

    report: called with every log entry. validate: returns the validation loss in nats per token, or None without
    validation text. skip_bad_steps: skip steps with NaN or infinite gradients. evaluate: steps between two evaluations
    on validation text, 0 for none. limit_validation: called with the number of tokens of a step's forward pass.
    after_evaluation: called with validation loss, position and training state. earlier: parameters that earlier stages
    trained, by name; they are saved too. steps_before: steps of earlier stages. began: time.perf_counter() at the start of
    the run, from which the time until full speed is counted.
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
    limit_validation: Callable[[int], None] = lambda tokens: None
    after_evaluation: Callable[[float | None, TrainPosition, TrainState], None] = lambda *args: None
    earlier: dict[str, Tensor] = field(default_factory=dict)
    steps_before: int = 0
    began: float = field(default_factory=time.perf_counter)


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
        self.captured: CapturedMicroBatch | None = None  # from the first step on
        self.choice = MemoryChoice("keep", self.layout.rows)
        self.losses: list[dict[str, Tensor]] = []
        self.norms: list[Tensor] = []
        self.seconds, self.waited, self.positions, self.skipped = 0.0, 0.0, 0, 0
        self.recent_steps: list[StepBatch] = []
        self.due_save = at.step  # the step of the latest checkpoint
        self.is_ready, self.at_full_speed = False, False
        self.compiled = False  # whether torch.compile runs the layers, of rows of one document each

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
            ready = stack.enter_context(prefetch(steps, min(ahead, self.config.steps), self.accelerator.device))
            interrupted = stack.enter_context(defer_interrupt(single_process))
            began = time.perf_counter()
            while self.at.step < self.config.steps:
                step = self._next(ready)
                if not self.is_ready:
                    self._get_ready(step, stack)
                    began = time.perf_counter()
                self._step(step)
                if not self.at_full_speed and self.accelerator.device.type == "cuda":
                    self._note_full_speed()
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

    # -- before the first step, and when memory runs out -----------------------------------------------
    def _get_ready(self, step: StepBatch, stack: ExitStack) -> None:
        """Compile kernels, decide what `memory: auto` means, and prepare the capture. None of it is training time."""
        self.is_ready = True
        self.stage.begin_step(self.at.step, self.context.recipe.seed)
        choice = self._known_choice()
        if choice is None:
            self._compile_kernels(split_rows(step.batches[:1], 1)[0])
            choice = self._measure_choice(step.batches[0])
            self.at.notes["memory"] = asdict(choice)
            self.context.report({"note": f"memory: {choice}"})
        self._use_choice(choice)
        if self.context.recipe.cuda_graph:
            self.captured = capture_micro_batch(self.accelerator, self.stage, self.models, self.optimizer_step)
            if self.captured is None and self.accelerator.device.type == "cuda":
                self.context.report({"note": UNCAPTURED})
        if self.captured is not None:
            stack.enter_context(self.captured.steps())
        batch = split_rows(step.batches[:1], choice.rows)[0]
        self._compile_kernels(batch)
        if self._compiles_layers():
            self._compile_layers(batch, stack)

    def _compile_kernels(self, batch: Batch) -> None:
        """Compile the GPU kernels of a micro-batch in parallel, before the first step; its results are dropped."""
        if not self.stage.fits_cuda_graph:  # other stages may keep what they compute
            return
        began = time.perf_counter()
        compiled = compile_kernels(lambda: self._run_and_drop(batch), self.accelerator.device)
        if compiled:
            seconds = time.perf_counter() - began
            self.context.report({"compiled": compiled, "seconds": seconds, "folder": cache_folder()})

    def _run_and_drop(self, batch: Batch) -> None:
        """Run the forward and backward pass of a micro-batch and drop its gradients."""
        # Without communication FSDP2 would keep the gradients for the next step.
        sharded = bool(sharding_name(self.accelerator))
        try:
            with nullcontext() if sharded else self.accelerator.no_sync(self.models.run), self._inputs(batch) as inputs:
                self.stage.losses(self.models, inputs)["total"].backward()
        finally:
            self.optimizer_step.inner.zero_grad(set_to_none=True)

    @contextmanager
    def _inputs(self, batch: Batch) -> Iterator[Batch]:
        """Yield a micro-batch on the device, in the form of the captured graph or of compiled layers if there are any.

        Compiled mixers take one document a row, so rows of several run without compilation.
        """
        device = self.accelerator.device
        if self.captured is None and not self.compiled:
            yield to_device(batch, device)
            return
        with ExitStack() as stack:
            if self.compiled and not is_plain_batch(batch):
                stack.enter_context(without_compilation(self._models()))
            yield stack.enter_context(plain_inputs(batch, device))

    def _models(self) -> list[Any]:
        return [model for model in (self.models.student, self.models.teacher) if model is not None]

    def _compiles_layers(self) -> bool:
        if self.config.compile != "auto":
            return self.config.compile == "layers"
        return self.captured is not None and is_worth_compiling(self._models(), self.config.tokens)

    def _compile_layers(self, batch: Batch, stack: ExitStack) -> None:
        """Compile the layers of student and teacher, on a micro-batch whose results are dropped, until `stack` ends."""
        models, device = self._models(), self.accelerator.device
        if sharding_name(self.accelerator):
            warnings.warn("compile: layers is for models that are not sharded; the layers run without", stacklevel=2)
            return
        stack.enter_context(compilation_settings(models))
        began = time.perf_counter()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                self.compiled = True
                self.compiled = try_compiled(models, lambda: self._run_and_drop(batch))
            except torch.OutOfMemoryError:  # the step runs with less
                pass
        if self.compiled:
            self.context.report({"note": f"layers compiled in {time.perf_counter() - began:.1f} s"})
            for model in models:
                stack.callback(restore_layers, model)

    def _known_choice(self) -> MemoryChoice | None:
        """Return how the activations of a step are held, or None if that must be measured.

        A resumed run goes on as it was. On a CPU activations are kept; sharded models are large, so theirs are
        recomputed.
        """
        rows, memory = self.layout.rows, self.config.memory
        if (stored := read_choice(self.at.notes.get("memory"), rows)) is not None:
            return stored
        if memory != "auto":
            return MemoryChoice(memory, rows)
        if self.accelerator.device.type != "cuda":
            return MemoryChoice("keep", rows)
        if sharding_name(self.accelerator):
            return MemoryChoice("checkpoint" if self.stage.can_checkpoint else "keep", rows)
        return None

    def _measure_choice(self, batch: Batch) -> MemoryChoice:
        """Return the choice that fits, by the memory that one and two rows of `batch` take. All processes agree."""
        device = self.accelerator.device
        trained = sum(p.nbytes for p in self.optimizer_step.parameters.values())
        states = 0 if self.optimizer_step.inner.state else self.config.optimiser.states * trained

        def run(rows: int) -> None:
            self._run_and_drop({name: tensor[:rows] for name, tensor in batch.items()})

        def measure(memory: str) -> MemoryNeed | None:
            with self._checkpointing(memory == "checkpoint"):
                return measure_need(run, self.layout.rows, device)

        with torch.random.fork_rng([device]):
            release_cached_memory(device)
            available = available_memory(device) - states - trained  # gradients of earlier micro-batches
            choice = choose(measure, self.layout.rows, self.config.length, available, self.stage.can_checkpoint)
        release_cached_memory(device)
        torch.cuda.reset_peak_memory_stats(device)
        if self.accelerator.num_processes > 1:
            code = torch.tensor([[choice.memory == "keep", choice.rows]], device=device, dtype=torch.long)
            kept, least = self.accelerator.gather(code).amin(0).tolist()
            choice = MemoryChoice("keep" if kept else "checkpoint", least)
        return choice

    @contextmanager
    def _checkpointing(self, on: bool) -> Iterator[None]:
        if on:
            enable_gradient_checkpointing(self.models.student)
        try:
            yield
        finally:
            if on:
                disable_gradient_checkpointing(self.models.student)

    def _use_choice(self, choice: MemoryChoice) -> None:
        """Hold activations as chosen from the next forward on."""
        if choice.memory == "checkpoint":
            enable_gradient_checkpointing(self.models.student)
        self.choice = choice
        if choice.rows != self.optimizer_step.layout.rows:
            self.optimizer_step.set_rows(choice.rows)
        self.stage.config = self.config = self.config.model_copy(update={"memory": choice.memory})
        self.context.limit_validation(choice.rows * self.config.length)

    def _use_less_memory(self, why: str) -> None:
        """Drop what the step in progress made, and choose what needs less memory for it and all later ones.

        Raises SurgeryError if nothing is left to try, or with several processes, of which the others went on.
        """
        self.optimizer_step.inner.zero_grad(set_to_none=True)
        self._release_graph()
        choice = reduce_choice(self.choice, self.stage.can_checkpoint)
        if choice is None or self.accelerator.num_processes > 1 or not self.optimizer_step.can_rerun:
            raise SurgeryError(
                f"stage {self.config.kind}: memory ran out in step {self.at.step + 1} ({self.choice}): {why} "
                f"{self._memory_advice()}"
            )
        self._use_choice(choice)
        self.at.notes["memory"] = asdict(choice)
        self.captured = None  # the capture is for activations that are kept
        self.context.report(
            {"note": f"memory ran out in step {self.at.step + 1}; going on from the step before: {choice}"}
        )

    def _memory_advice(self) -> str:
        if self.choice.memory == "keep" and self.stage.can_checkpoint:
            return "Set memory: checkpoint."
        if self.choice.rows > 1:
            return f"Set rows below {self.choice.rows}."
        return "Set length lower, or train fewer parameters (trains)."

    def _release_graph(self) -> None:
        if self.captured is not None:
            self.captured.release()
        release_cached_memory(self.accelerator.device)

    def _note_full_speed(self) -> None:
        """Report the time from the start of the run to the end of the first step at full speed: the first replayed one
        with a CUDA graph, otherwise the first step.
        """
        if self.captured is not None and self.captured.is_warming_up:
            return
        self.at_full_speed = True
        self._synchronize()
        seconds = round(time.perf_counter() - self.context.began, 1)
        self.at.notes["full_speed"] = seconds
        self.context.report({"note": f"at full speed {seconds:.1f} s after the start"})

    def _is_due(self, every: int) -> bool:
        return bool(every) and (self.at.step % every == 0 or self.at.step == self.config.steps)

    def _step(self, step: StepBatch) -> None:
        """Run one step. If its forward or backward pass runs out of memory, run it again with less."""
        while True:
            random_states = _random_states(self.accelerator.device)
            try:
                totals = self._run_micro_batches(step)
                break
            except torch.OutOfMemoryError as error:
                why = str(error).partition(". ")[0] + "."
            _restore_random_states(random_states, self.accelerator.device)
            self._use_less_memory(why)  # outside of the handler: the error refers to the step's tensors
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

    def _run_micro_batches(self, step: StepBatch) -> dict[str, Any]:
        """Accumulate the gradients of a step; return the parts of its loss."""
        self.optimizer_step.set_rates(self.config.schedule.factor(self.at.step, self.config.steps))
        self.stage.begin_step(self.at.step, self.context.recipe.seed)
        batches = step.batches if self.choice.rows == self.layout.rows else split_rows(step.batches, self.choice.rows)
        totals: dict[str, Any] = {}
        for number, batch in enumerate(batches, 1):
            with self.optimizer_step.forward(number == len(batches)):
                parts = self._losses(batch, step.num_counted)
                for name, loss_part in parts.items():
                    totals[name] = totals.get(name, 0) + loss_part.detach()
        return totals

    def _losses(self, batch: Batch, num_counted: int) -> dict[str, Tensor]:
        """Return this micro-batch's parts of the mean loss over the step, after their backward pass."""
        captured = None if self.captured is None else self.captured(batch, num_counted)
        if captured is not None:
            return captured
        with self._inputs(batch) as inputs:
            sums = self.stage.losses(self.models, inputs)
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
        needs_room = False
        try:
            loss = self.context.validate(self.models)
        except torch.OutOfMemoryError:
            if self.captured is None:
                raise
            needs_room = True
        if needs_room:  # the next step is captured again
            self._release_graph()
            loss = self.context.validate(self.models)
        if self.captured is not None and self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()  # a replayed step uses the graph's memory alone, so this would lie idle beside it
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
        return SurgeryError(
            f"stage {self.config.kind}: the data ended after {self.at.examples} rows of {self.config.length} tokens, "
            "but the "
            f"stage needs {self.config.steps * self.config.batch} rows. Leave out data.epochs, or set "
            f"tokens={self.at.examples * self.config.length}."
        )


def _random_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a step draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _restore_random_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def _mean(values: Any) -> float:
    numbers = list(values)
    return sum(numbers) / max(1, len(numbers))


def _is_finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
