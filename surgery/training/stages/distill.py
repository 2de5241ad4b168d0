"""Knowledge distillation: match the student's next-token distribution to the teacher's.

    loss = kl_weight * T^2 KL(p_T || q_T) + ce_weight * CE        p: teacher, q: student, both at temperature T

direction: `reverse` takes KL(q_T || p_T), which keeps the student to the teacher's likely tokens (Gu et al. 2024, MiniLLM).
top_k: the teacher's k most likely tokens individually, all others as one event (the KL of the coarser distributions, a
lower bound of the full KL). The teacher is a model in memory, or a cache of its top-k log-probabilities at temperature
1. far_weight: tokens count more whose prediction needs distant context (surgery/training/stages/far_weight.py).
window_dropout: exact near attention is off in some steps (surgery/training/stages/window_dropout.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from torch import Tensor

from surgery.core.config import Count, Real
from surgery.core.errors import SurgeryError
from surgery.core.logit_rows import Direction
from surgery.training.linear_loss import Logits, LossWeights, Targets, divergence
from surgery.training.output_head import model_logits, model_loss
from surgery.training.stages.base import (
    STAGES,
    Batch,
    Roles,
    Stage,
    StageConfig,
    StageModels,
    model_inputs,
    next_token_targets,
)
from surgery.training.stages.far_weight import NearTeacher, token_weights
from surgery.training.stages.window_dropout import WindowDropout
from surgery.training.top_k import TopK, log_remaining_mass


class DistillConfig(StageConfig):
    """Keys of a `distill` stage (docs/finetune.md has the loss). top_k: None compares the whole vocabulary. direction:
    `forward` is KL(teacher || student), `reverse` KL(student || teacher).

    far_weight: multiply the loss of a token by 1 + far_weight * KL(teacher || teacher that sees near tokens only), in
    nats, divided by the mean over the row; 0 weights all tokens alike. far_window, far_sinks: number of last and of first
    tokens that are near. window_dropout: probability of a step without the softmax branch of linear mixers; it falls
    linearly to 0.
    """

    name: ClassVar[str] = "distill"
    temperature: Annotated[Real, Field(gt=0)] = 1.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    direction: Direction = "forward"
    kl_weight: Annotated[Real, Field(ge=0)] = 1.0
    ce_weight: Annotated[Real, Field(ge=0)] = 0.0
    far_weight: Annotated[Real, Field(ge=0)] = 0.0
    far_window: Annotated[Count, Field(ge=1)] = 64
    far_sinks: Annotated[Count, Field(ge=0)] = 4
    window_dropout: Annotated[Real, Field(ge=0, le=1)] = 0.0

    @model_serializer(mode="wrap")
    def _omit_unread_options(self, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields without far_* and window_dropout where they are 0 and without the usual direction, which
        keeps recipes in reports and journals as they were.
        """
        values: dict[str, Any] = to_dict(self)
        unread = [name for name in values if name.startswith("far_")] if not self.far_weight else []
        unread += [] if self.window_dropout else ["window_dropout"]
        unread += [] if self.direction == "reverse" else ["direction"]
        return {name: value for name, value in values.items() if name not in unread}

    @model_validator(mode="after")
    def _check_far_options(self) -> DistillConfig:
        unread = [name for name in ("far_window", "far_sinks") if name in self.model_fields_set]
        if unread and not self.far_weight:
            raise SurgeryError(
                f"stage distill: {unread[0]} is read only if far_weight is above 0. Set far_weight, for example to 1, "
                "or leave "
                f"{unread[0]} out."
            )
        if self.far_weight and self.far_window >= self.length:
            raise SurgeryError(
                f"stage distill: far_window {self.far_window} holds a whole row of {self.length} tokens, so no token "
                "is weighted. Set "
                "far_window below length, or far_weight to 0."
            )
        return self


@STAGES.register(DistillConfig)
class DistillStage(Stage):
    """Trains the student on the teacher's logits, from a model in memory or a teacher cache."""

    config: DistillConfig

    def __init__(self, config: Any):
        super().__init__(config)
        self.near_teacher: NearTeacher | None = None
        self.window_dropout: WindowDropout | None = None

    @property
    def needs_teacher(self) -> Literal["model", "logits"]:
        """The teacher's logits, for which a teacher cache suffices; with far_weight the model, which runs a second
        time.
        """
        return "model" if self.config.far_weight else "logits"

    @property
    def fits_cuda_graph(self) -> bool:
        """Yes: the switches of window_dropout are tensors."""
        return True

    def prepare(self, models: StageModels, roles: Roles) -> None:
        """Raise SurgeryError for a teacher cache with another temperature than 1, or a teacher that far_weight cannot
        cut.
        """
        if self.config.window_dropout:
            self.window_dropout = WindowDropout(models.student, self.config.window_dropout, self.config.steps)
        if self.config.far_weight:
            self.near_teacher = NearTeacher(models.teacher, self.config.far_window, self.config.far_sinks)
        elif models.cache is not None and self.config.temperature != 1:
            raise SurgeryError(
                f"stage distill: temperature must be 1 with a teacher cache (got {self.config.temperature:g}). Cached "
                "targets "
                "have temperature 1; set it to 1, or give --teacher without a cache."
            )

    def begin_step(self, step: int, seed: int) -> None:
        """Draw which softmax branches are on."""
        if self.window_dropout is not None:
            self.window_dropout.begin_step(step, seed)

    def finish(self, models: StageModels, roles: Roles, folder: Path | None) -> None:
        """Switch all softmax branches on."""
        if self.window_dropout is not None:
            self.window_dropout.end()

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        """Return `total`, `kl` and, with ce_weight, `ce`, in nats, summed over counted positions, by weight with
        far_weight.

        With far_weight also `far`, the divergence of the teacher without distant context from itself.
        """
        counts_BT, next_BT = next_token_targets(batch)
        parts: dict[str, Tensor] = {}
        weight_BT = counts_BT.float()
        teacher = None if models.cache is not None else self._teacher(models, batch)
        if self.near_teacher is not None and teacher is not None:
            gap_BT = self._far_gap(models, batch, teacher)
            parts["far"] = (gap_BT * counts_BT).sum()
            weight_BT = token_weights(gap_BT, counts_BT, self.config.far_weight)
        config = self.config
        targets = Targets(
            weight_BT.flatten(), next_BT.flatten().clamp_min(0), teacher, None if teacher else self._cached(models, batch),
            config.top_k,
        )  # fmt: skip
        weights = LossWeights(config.kl_weight, config.ce_weight, config.temperature, config.direction)
        sums = model_loss(models.run, model_inputs(batch), targets, weights)
        parts["kl"] = sums.kl
        if config.ce_weight:
            parts["ce"] = sums.ce
        return {"total": sums.total, **parts}

    def _teacher(self, models: StageModels, batch: Batch) -> Logits:
        """Run the teacher and return its logits."""
        return model_logits(lambda: models.teacher_output(batch), models.teacher, batch["input_ids"].shape)

    @torch.no_grad()
    def _far_gap(self, models: StageModels, batch: Batch, teacher: Logits) -> Tensor:
        """Return KL(teacher || teacher that sees near tokens only), (B, T) in nats."""
        assert self.near_teacher is not None
        ids_BT = batch["input_ids"]
        if self.near_teacher.window >= ids_BT.shape[1]:
            return torch.zeros(ids_BT.shape, device=ids_BT.device)
        position_BT = batch.get("position_ids")
        if position_BT is None:
            position_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        with self.near_teacher.cut(position_BT):
            near = self._teacher(models, batch)
        return divergence(near, teacher, ids_BT.device).view(ids_BT.shape)

    def _cached(self, models: StageModels, batch: Batch) -> TopK:
        """Return the targets of a teacher cache, of B x T tokens."""
        rows = zip(batch["index"].tolist(), batch["input_ids"].cpu())
        stored = [models.cache.targets(index, ids_T) for index, ids_T in rows]
        tokens, top, rest = (torch.cat([t[i] for t in stored]).to(batch["input_ids"].device) for i in range(3))
        k = self.config.top_k or top.shape[-1]
        top = top.float()[..., :k]
        return TopK(
            tokens.long()[..., :k], top, rest.float() if k >= stored[0][1].shape[-1] else log_remaining_mass(top)
        )
