"""The protocol of a stage: what is trained, on how much, towards what.

    stage = STAGES[config](config)
    stage.prepare(models, roles)           once, before the optimiser is made: new parameters
    stage.losses(models, batch)            {part: sum over what counts}, and `total`, the weighted sum to descend
    stage.count_positions(examples)                how many positions of some examples count, known before they are run
    stage.finish(models, roles, folder)    what must not outlive the stage

B batch, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from surgery.core.config import Count, Real, StrictModel
from surgery.core.registry import Registry
from surgery.training.optim import OptimizerConfig, Schedule, select_parameters

Batch = dict[str, Tensor]
Roles = dict[str, tuple[str, ...]]  # path of a linear, or of what stands in its place -> its roles
IGNORE_INDEX = -100


class StageConfig(StrictModel):
    """What every stage says. tokens: positions to train on (rows x length); batch: rows of a step, over all devices;
    rows: of one forward on one device, batch being a multiple of rows x devices. rates: of some kinds of parameters
    (see optim.PARAMETER_KINDS), in place of `rate`. trains: kinds, roles, or paths with * and ?; data: over the recipe's."""

    name: ClassVar[str]
    kind: str
    length: Annotated[Count, Field(ge=8)] = 512
    tokens: Annotated[Count, Field(ge=1)]
    batch: Annotated[int, Field(ge=1)] = 32
    rows: Annotated[int, Field(ge=1)] = 8
    rate: Annotated[Real, Field(gt=0)]
    rates: dict[str, Annotated[Real, Field(ge=0)]] = Field(default_factory=dict)
    schedule: Schedule = Schedule()
    optimiser: OptimizerConfig = OptimizerConfig()
    trains: tuple[str, ...] = ("new",)
    weight_norm: Literal["none", "cores"] = "none"
    clip: Annotated[Real, Field(gt=0)] | None = 1.0
    ema: Annotated[Real, Field(gt=0, lt=1)] | None = None
    memory: Literal["keep", "checkpoint"] = "keep"
    data: dict[str, Any] = Field(default_factory=dict)

    @property
    def steps(self) -> int:
        return max(1, -(-self.tokens // (self.batch * self.length)))


@dataclass
class StageModels:
    """student: the model, nobody's wrapper; run: what is called (it may be wrapped for many devices); teacher: None
    where no stage asks for one in memory. cache: teacher's stored targets, or None."""

    student: Any
    run: Any
    teacher: Any = None
    cache: Any = None

    def teacher_output(self, batch: Batch, **options: Any) -> Any:
        """The teacher's answer, on the student's device."""
        device = next(self.teacher.parameters()).device
        with torch.no_grad():
            return self.teacher(**model_inputs({name: t.to(device) for name, t in batch.items()}), **options)


class Stage:
    config_type: ClassVar[type]

    def __init__(self, config: Any):
        self.config = config

    @property
    def needs_teacher(self) -> Literal["model", "logits", "nothing"]:
        """logits: a cache of them will do."""
        return "nothing"

    def prepare(self, models: StageModels, roles: Roles) -> None:
        pass

    def measure(self, models: StageModels, batch: Batch) -> None:
        """Look at the first rows of the data, the same ones in every process and after a resume."""

    def trained_parameters(self, models: StageModels, roles: Roles) -> set[str]:
        """Names of the parameters that learn."""
        return select_parameters(models.student, self.config.trains, roles)

    def changed_parameters(self, models: StageModels, roles: Roles) -> set[str]:
        """Of the student as it is before `prepare`, the parameters that will be others after the stage."""
        return self.trained_parameters(models, roles)

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        raise NotImplementedError

    def count_positions(self, examples: Batch) -> int:
        return int((examples["labels"][..., 1:] != IGNORE_INDEX).sum())

    def finish(self, models: StageModels, roles: Roles, folder: Path | None) -> None:
        """folder: where what is kept beside the checkpoint goes, of the one process that writes."""


def model_inputs(batch: Batch) -> dict[str, Any]:
    """What the models are called with. Padding is at the end and models look back only, so no mask is needed; where
    documents are packed, positions that restart tell them apart."""
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}


def next_token_targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """(which positions predict something that counts, (B, T) bool; what they predict, (N,))."""
    next_BT = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    counts_BT = next_BT != IGNORE_INDEX
    return counts_BT, next_BT


def skip_logits(model: Any) -> dict[str, Any]:
    """Options of a call whose logits nobody reads."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


STAGES: Registry[Stage] = Registry("stage", "surgery.training.stages")
