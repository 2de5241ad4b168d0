"""Loss and gradients of a micro-batch, captured in one CUDA graph.

Small models are bound by the time that the CPU takes to launch kernels. A graph launches teacher, student, loss and
backward pass at once; clipping and the optimizer run as always. The captured kernels are those of an ordinary step, on
static copies of the batch.

    captured = capture_micro_batch(accelerator, stage, models, optimizer_step)       None where a graph does not apply
    parts = captured(batch, num_counted)                                             as TrainingLoop._losses; gradients in `.grad`
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from surgery.mixers.common.packed_documents import one_document_per_row
from surgery.modeling.cuda_graph import is_on_one_gpu, record_graph
from surgery.modeling.graph_masks import masks_of_ordinary_calls
from surgery.training.batches import to_device
from surgery.training.distributed.step import OptimizerStep
from surgery.training.memory import release_cached_memory
from surgery.training.stages import Batch, Stage, StageModels

WARMUP_BATCHES = 3  # run without a graph, so that kernels are compiled and libraries have their workspaces


def capture_micro_batch(
    accelerator: Any, stage: Stage, models: StageModels, optimizer_step: OptimizerStep
) -> CapturedMicroBatch | None:
    """Return the callable that replaces a micro-batch's losses and backward pass, or None if a graph does not apply.

    It needs a `distill` stage, or an `lm` stage with texts of one length; one process or replicas that are not wrapped,
    student and teacher on one GPU each with the same device, no loss scale, activations that are kept and a teacher in
    memory if there is one: only then every value that a step reads lies at the same place in each step.
    """
    known = stage.fits_cuda_graph and type(optimizer_step) is OptimizerStep and not optimizer_step.uses_loss_scale
    single = accelerator.num_processes == 1 or optimizer_step.reducer is not None  # no communication inside
    single = single and models.run is models.student and models.cache is None
    if not (known and single and stage.config.memory == "keep" and is_on_one_gpu(models.student)):
        return None
    teacher = models.teacher
    if teacher is not None and not (is_on_one_gpu(teacher) and device_of(teacher) == device_of(models.student)):
        return None
    return CapturedMicroBatch(accelerator, stage, models, optimizer_step)


def device_of(model: Any) -> torch.device:
    """Return the device of the model's first parameter."""
    device: torch.device = next(model.parameters()).device
    return device


class CapturedMicroBatch:
    """A micro-batch's losses and backward pass, replayed from a graph after WARMUP_BATCHES ordinary ones."""

    def __init__(self, accelerator: Any, stage: Stage, models: StageModels, optimizer_step: OptimizerStep):
        self.accelerator, self.stage, self.models, self.optimizer_step = accelerator, stage, models, optimizer_step
        self.replay: Callable[[], None] | None = None
        self.static: Batch = {}
        self.share = torch.zeros(())
        self.parts: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.seen, self.disabled = 0, False
        self.stream = torch.cuda.Stream(accelerator.device) if accelerator.device.type == "cuda" else None

    @property
    def is_warming_up(self) -> bool:
        """Whether later batches will be faster: batches that a graph fits have come, and there is none yet."""
        return self.seen > 0 and self.replay is None and not self.disabled

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Run all steps on the stream of the capture, with the attention masks that the graph has.

        The ordinary steps before it then prepare the capture: none must be repeated on another stream, whose memory
        would lie beside that of the first, and compiled layers see no other arguments in the graph.
        """
        models = [model for model in (self.models.student, self.models.teacher) if model is not None]
        with masks_of_ordinary_calls(models):
            if self.stream is None:
                yield
                return
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                yield
            torch.cuda.current_stream().wait_stream(self.stream)

    def __call__(self, batch: Batch, num_counted: int) -> dict[str, Tensor] | None:
        """Return this micro-batch's parts of the mean loss over the step, after their backward pass.

        Returns None, with nothing done, if the batch must run without the graph: rows of several documents, another
        shape, or the first batches, which the caller runs on `plain_inputs`.
        """
        if self.disabled or not is_plain_batch(batch):
            return None
        self.seen += 1
        if self.seen <= WARMUP_BATCHES:
            return None
        if self.replay is None:
            self._capture(batch)
        if self.replay is None or any(self.static[name].shape != batch[name].shape for name in self.static):
            return None
        for name, tensor in self.static.items():
            tensor.copy_(batch[name], non_blocking=True)
        self.share.fill_(1.0 / num_counted)
        self.replay()
        self._accumulate()
        return {name: loss_part.clone() for name, loss_part in self.parts.items()}

    def release(self) -> None:
        """Free the memory of the graph; the next batch is captured anew."""
        self.replay, self.static, self.parts, self.gradients = None, {}, {}, {}

    def _capture(self, batch: Batch) -> None:
        """Capture the step on static copies of `batch`. If that fails, warn, and train without a graph."""
        with plain_inputs(batch, self.accelerator.device) as inputs:
            self.static = {name: t.clone() for name, t in inputs.items()}
        self.share = torch.ones((), device=self.accelerator.device)
        parameters = self.optimizer_step.parameters
        before = {name: p.grad for name, p in parameters.items()}
        random_state = torch.cuda.get_rng_state(self.static["input_ids"].device) if self.stream is not None else None
        try:
            with one_document_per_row():
                self.replay = record_graph(self._run_without_gradients, stream=self.stream)
            self.gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        except RuntimeError as error:
            self.disabled = True
            warnings.warn(
                f"the steps of stage {self.stage.config.kind} cannot be captured in a CUDA graph, so they run one by "
                f"one: {error}",
                stacklevel=2,
            )
        for name, parameter in parameters.items():
            parameter.grad = before[name]
        if self.disabled:
            if random_state is not None:
                restore_generator(self.static["input_ids"].device, random_state)
            self.release()
            release_cached_memory(self.accelerator.device)

    def _run_without_gradients(self) -> None:
        """Run the step with no gradients to add to: the graph makes its own."""
        for parameter in self.optimizer_step.parameters.values():
            parameter.grad = None
        self._run()

    def _run(self) -> None:
        sums = self.stage.losses(self.models, self.static)
        parts = {name: loss_part * self.share for name, loss_part in sums.items()}
        self.optimizer_step.backward(parts["total"])
        self.parts = {name: loss_part.detach() for name, loss_part in parts.items()}

    def _accumulate(self) -> None:
        """Add the graph's gradients to those of the step's earlier micro-batches, in few launches."""
        accumulates = self.optimizer_step.layout.accumulation_steps > 1
        sums: list[Tensor] = []
        added: list[Tensor] = []
        copies: list[Tensor] = []
        copied: list[Tensor] = []
        for name, gradient in self.gradients.items():
            parameter = self.optimizer_step.parameters[name]
            if parameter.grad is not None:
                sums.append(parameter.grad)
                added.append(gradient)
            elif accumulates:
                parameter.grad = torch.empty_like(gradient)
                copies.append(parameter.grad)
                copied.append(gradient)
            else:
                parameter.grad = gradient
        if sums:
            torch._foreach_add_(sums, added)
        if copies:
            torch._foreach_copy_(copies, copied)


def restore_generator(device: torch.device, random_state: Tensor) -> None:
    """Give a GPU's generator this state, after a capture that failed: it would refuse to draw numbers outside of one."""
    generator: Any = torch.cuda.default_generators[device.index or 0]
    if hasattr(generator, "graphsafe_set_state"):
        generator.graphsafe_set_state(torch.Generator(device=device).graphsafe_get_state())
    torch.cuda.set_rng_state(random_state, device)


@contextmanager
def plain_inputs(batch: Batch, device: torch.device) -> Iterator[Batch]:
    """Yield the batch on a device, as a graph takes it if every row is one document that begins at position 0.

    Without position_ids transformers counts from 0, and does not look for documents in them, which would wait for the
    GPU.
    """
    if not is_plain_batch(batch):
        yield to_device(batch, device)
        return
    with one_document_per_row():
        yield to_device({name: t for name, t in batch.items() if name not in ("position_ids", "index")}, device)


def is_plain_batch(batch: Batch) -> bool:
    """Return whether every row is one document that begins at position 0, on the CPU or from memory without
    synchronizing.
    """
    position_BT = batch.get("position_ids")
    if position_BT is None or position_BT.is_cuda:
        return False
    return bool((position_BT == torch.arange(position_BT.shape[1])).all())
