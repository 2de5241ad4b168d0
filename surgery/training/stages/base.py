"""The interface of a training stage: which parameters train, on how many tokens, with which loss.

    stage = STAGES[config](config)
    stage.prepare(models, roles)           once, before the optimizer is created: adds new parameters
    stage.begin_step(step, seed)           before the losses of each step
    stage.losses(models, batch)            {part: sum over counted positions}, and `total`, the loss to minimize
    stage.count_positions(examples)                number of counted positions, known before the forward
    stage.finish(models, roles, folder)    removes or merges what the stage added

B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from surgery.core.config import Count, Real, StrictModel
from surgery.core.registry import Registry
from surgery.planning.renamed import renew_stage, warn_renamed
from surgery.training.optim import OptimizerConfig, Schedule, select_parameters

Batch = dict[str, Tensor]
Roles = dict[str, tuple[str, ...]]  # path of a linear, original or converted -> its roles
IGNORE_INDEX = -100
READOUT = "readout"  # folder of the result for tensors that a stage keeps beside the checkpoint


class StageConfig(StrictModel):
    """Keys that all stages share.

    length: tokens per row. tokens: positions to train on (rows x length). batch: rows per step, over all devices. rows:
    rows per forward on one device; batch must be a multiple of rows x devices. rate: peak learning rate. rates: peak
    rates for some kinds of parameters (see optim.PARAMETER_KINDS) instead of `rate`. trains: kinds, roles, or paths
    with * and ?. clip: maximum gradient norm. ema: decay of the weights' moving average. memory: `keep`
    or recompute (`checkpoint`) activations; `auto` measures the first rows on a GPU and keeps them where they fit, with
    fewer rows per forward if need be. compile: `layers` compiles each layer of student and teacher with torch.compile;
    `auto` does so where a CUDA graph runs the steps and there are enough of them. data: overrides the recipe's data.
    """

    name: ClassVar[str]
    kind: str
    length: Annotated[Count, Field(ge=8)] = 512
    tokens: Annotated[Count, Field(ge=1)]
    batch: Annotated[int, Field(ge=1)] = 32
    rows: Annotated[int, Field(ge=1)] = 8
    rate: Annotated[Real, Field(gt=0, allow_inf_nan=False)]
    rates: dict[str, Annotated[Real, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    schedule: Schedule = Schedule()
    optimiser: OptimizerConfig = OptimizerConfig()
    trains: tuple[str, ...] = ("new",)
    weight_norm: Literal["none", "cores"] = "none"
    clip: Annotated[Real, Field(gt=0)] | None = 1.0
    ema: Annotated[Real, Field(gt=0, lt=1)] | None = None
    memory: Literal["auto", "keep", "checkpoint"] = "auto"
    compile: Literal["auto", "none", "layers"] = "auto"
    data: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _renew_words(cls, data: Any) -> Any:
        """Translate the keys of older versions, with a warning for each."""
        notes: list[str] = []
        renewed = renew_stage(data, notes)
        warn_renamed(notes)
        return renewed

    @property
    def steps(self) -> int:
        """Number of optimizer steps: tokens / (batch x length), rounded up."""
        return max(1, -(-self.tokens // (self.batch * self.length)))


@dataclass
class StageModels:
    """The models of a stage.

    student: the bare model. run: the model to call, possibly wrapped for several devices. teacher: None if no stage
    needs one in memory. cache: a TeacherCache, or None.
    """

    student: Any
    run: Any
    teacher: Any = None
    cache: Any = None

    def teacher_output(self, batch: Batch, **options: Any) -> Any:
        """Run the teacher on the batch without gradients; the output is on the teacher's device."""
        device = next(self.teacher.parameters()).device
        with torch.no_grad():
            return self.teacher(**model_inputs({name: t.to(device) for name, t in batch.items()}), **options)


class Stage:
    """Base class of the stages; see the module for the order of calls."""

    config_type: ClassVar[type]
    can_checkpoint: ClassVar[bool] = True  # whether recomputing activations saves memory
    reads: ClassVar[str] = "ids"  # what its rows hold: token `ids`, or continuous `values`
    fits_new_models: ClassVar[bool] = False  # whether `surgery pretrain` may use it, which has no teacher

    def __init__(self, config: Any):
        self.config = config

    @property
    def needs_teacher(self) -> Literal["model", "logits", "nothing"]:
        """What the stage needs: the teacher `model`, its `logits` (a teacher cache suffices), or `nothing`."""
        return "nothing"

    @property
    def fits_cuda_graph(self) -> bool:
        """Whether the losses can be captured: no value is read back to the CPU, and steps differ only in tensors."""
        return False

    def prepare(self, models: StageModels, roles: Roles) -> None:
        """Add new parameters to the student. Raises SurgeryError if the stage does not fit the models."""

    def measure(self, models: StageModels, batch: Batch) -> None:
        """Measure scales on the first rows of the data, which are the same in every process and after a resume."""

    def begin_step(self, step: int, seed: int) -> None:
        """Change what differs from step to step. step: of the stage, from 0. seed: the recipe's."""

    def trained_parameters(self, models: StageModels, roles: Roles) -> set[str]:
        """Return the names of the parameters that this stage trains."""
        return select_parameters(models.student, self.config.trains, roles)

    def changed_parameters(self, models: StageModels, roles: Roles) -> set[str]:
        """Return the names of parameters, as before `prepare`, whose values differ after the stage."""
        return self.trained_parameters(models, roles)

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        """Return sums over counted positions (scalars): `total`, the loss to minimize, and detached parts for the
        log.
        """
        raise NotImplementedError

    def count_positions(self, examples: Batch) -> int:
        """Return the number of positions that the loss is a mean over."""
        return int((examples["labels"][..., 1:] != IGNORE_INDEX).sum())

    def finish(self, models: StageModels, roles: Roles, folder: Path | None) -> None:
        """Merge or remove what the stage added. folder: for files kept beside the checkpoint; None in processes that do
        not write.
        """


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Return the arguments of a model's call.

    Causal models with padding at the end need no attention mask; packed documents are separated by position_ids that
    restart at 0.
    """
    named: dict[str, Any] = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    return {**named, "use_cache": False}


def next_token_targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (whether a position predicts a counted token, bool; the token it predicts, or IGNORE_INDEX), both (B,
    T).
    """
    next_BT = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    counts_BT = next_BT != IGNORE_INDEX
    return counts_BT, next_BT


def skip_logits(model: Any) -> dict[str, Any]:
    """Return call options that avoid computing logits, for models that support it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


STAGES: Registry[Stage] = Registry("stage", "surgery.training.stages")
