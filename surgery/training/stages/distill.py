"""Knowledge distillation: match the student's next-token distribution to the teacher's.

    loss = kl_weight * T^2 KL(p_T || q_T) + ce_weight * CE        p: teacher, q: student, both at temperature T

top_k: the teacher's k most likely tokens individually, all others as one event (the KL of the coarser distributions, a
lower bound of the full KL). The teacher is a model in memory, or a cache of its top-k log-probabilities at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from surgery.core.config import Real
from surgery.core.errors import SurgeryError
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
from surgery.training.stages.lm import cross_entropy
from surgery.training.top_k import log_remaining_mass, top_k_log_probs

MAX_LOGITS = 2**25  # logits compared at a time


class DistillConfig(StageConfig):
    """Keys of a `distill` stage; see the module for the loss. top_k: None uses the whole vocabulary."""

    name: ClassVar[str] = "distill"
    temperature: Annotated[Real, Field(gt=0)] = 1.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    kl_weight: Annotated[Real, Field(ge=0)] = 1.0
    ce_weight: Annotated[Real, Field(ge=0)] = 0.0


def kl_divergence(student_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student) over the whole vocabulary, (N,), in nats."""
    q_NV = (student_NV.float() / temperature).log_softmax(-1)
    p_NV = (teacher_NV.float() / temperature).log_softmax(-1)
    return torch.nn.functional.kl_div(q_NV, p_NV, reduction="none", log_target=True).sum(-1)


def top_k_kl_divergence(
    student_NV: Tensor, tokens_NK: Tensor, top_NK: Tensor, rest_N: Tensor, temperature: float
) -> Tensor:
    """Return KL(teacher || student) over k tokens and the rest as one event, (N,), in nats. top, rest: teacher's log-probabilities."""
    q_NV = student_NV.float() / temperature
    q_NK = q_NV.gather(-1, tokens_NK) - q_NV.logsumexp(-1, keepdim=True)
    left_N = log_remaining_mass(q_NK)
    return (top_NK.exp() * (top_NK - q_NK)).sum(-1) + rest_N.exp() * (rest_N - left_N)


@STAGES.register(DistillConfig)
class DistillStage(Stage):
    """Trains the student on the teacher's logits, from a model in memory or a teacher cache."""

    config: DistillConfig

    @property
    def needs_teacher(self) -> Literal["logits"]:
        """The teacher's logits; a teacher cache suffices."""
        return "logits"

    def prepare(self, models: StageModels, roles: Roles) -> None:
        """Raise SurgeryError for a teacher cache with another temperature than 1."""
        if models.cache is not None and self.config.temperature != 1:
            raise SurgeryError(
                f"stage distill: temperature must be 1 with a teacher cache (got {self.config.temperature:g}). Cached targets "
                "have temperature 1; set it to 1, or give --teacher without a cache."
            )

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        """Return `total`, `kl` and, with ce_weight, `ce`, in nats, summed over counted positions."""
        counts_BT, next_BT = next_token_targets(batch)
        targets = self._targets(models, batch)
        logits_BTV = models.run(**model_inputs(batch)).logits
        kl = self._kl(logits_BTV, targets, counts_BT) * self.config.temperature**2
        parts = {"kl": kl.detach()}
        total = self.config.kl_weight * kl
        if self.config.ce_weight:
            ce = cross_entropy(logits_BTV, next_BT)
            parts["ce"], total = ce.detach(), total + self.config.ce_weight * ce
        return {"total": total, **parts}

    def _targets(self, models: StageModels, batch: Batch) -> tuple[Tensor, ...]:
        """Return the teacher's (logits,) or (tokens, log-probabilities, rest), each (B, T, ..)."""
        device = batch["input_ids"].device
        if models.cache is not None:
            rows = zip(batch["index"].tolist(), batch["input_ids"].cpu())
            stored = [models.cache.targets(index, ids_T) for index, ids_T in rows]
            tokens, top, rest = (torch.stack([t[i] for t in stored]).to(device) for i in range(3))
            k = self.config.top_k or top.shape[-1]
            top = top.float()[..., :k]
            return tokens.long()[..., :k], top, rest.float() if k >= stored[0][1].shape[-1] else log_remaining_mass(top)
        logits_BTV = models.teacher_output(batch).logits
        if self.config.top_k is None:
            return (logits_BTV.to(device),)
        return tuple(t.to(device) for t in top_k_log_probs(logits_BTV, self.config.top_k, self.config.temperature))

    def _kl(self, logits_BTV: Tensor, targets: tuple[Tensor, ...], counts_BT: Tensor) -> Tensor:
        """Return the sum of the KL in chunks of rows, recomputed in the backward pass so that log-probabilities are not stored."""
        student, others = logits_BTV.flatten(0, 1), [t.flatten(0, 1) for t in targets]
        if len(others) == 1 and others[0].shape[-1] != student.shape[-1]:  # embeddings padded differently
            size = min(others[0].shape[-1], student.shape[-1])
            student, others = student[:, :size], [others[0][:, :size]]
        rows = max(1, MAX_LOGITS // student.shape[-1])
        weight_N = counts_BT.flatten().float()
        parts = zip(student.split(rows), weight_N.split(rows), *(t.split(rows) for t in others))
        sums = [self._checkpointed_kl_sum(part) if len(student) > rows else self._kl_sum(*part) for part in parts]
        return torch.stack(sums).sum()

    def _checkpointed_kl_sum(self, part: tuple[Any, ...]) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self._kl_sum, *part, use_reentrant=False)

    def _kl_sum(self, student_NV: Tensor, weight_N: Tensor, *targets: Tensor) -> Tensor:
        kl: Callable[..., Tensor] = kl_divergence if len(targets) == 1 else top_k_kl_divergence
        return (kl(student_NV, *targets, self.config.temperature) * weight_N).sum()
