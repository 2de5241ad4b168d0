"""Shared parts of the stages that match internal tensors of student and teacher.

loss = |a - b|^2 / |b|^2        summed over tokens, averaged over features; |b|^2 is measured once, on the first rows of the data
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.training.stages.base import Batch, Roles, Stage, StageModels


class TeacherStage(Stage):
    """A stage that needs the teacher model in memory and counts every token."""

    @property
    def needs_teacher(self) -> Literal["model"]:
        """The teacher model in memory."""
        return "model"

    def prepare(self, models: StageModels, roles: Roles) -> None:
        """Raise SurgeryError if student and teacher have different numbers of layers: they are matched one by one."""
        ours, theirs = (
            getattr(model.config.get_text_config(), "num_hidden_layers", None)
            for model in (models.student, models.teacher)
        )
        if ours != theirs:
            raise SurgeryError(
                f"stage {self.config.name}: the student has {ours} layers and the teacher {theirs}, and this loss matches "
                "them one by one. Use kind: distill, which matches logits (recipe linears or auto)."
            )

    def count_positions(self, examples: Batch) -> int:
        """Return the number of tokens, without padding."""
        return int(examples["valid"].sum())


def valid_mask_BT1(batch: Batch) -> Tensor:
    """Return 1.0 at tokens and 0.0 at padding, (B, T, 1)."""
    return batch["valid"].unsqueeze(-1).float()


def mean_square(target_BTX: Tensor, valid: Tensor) -> Tensor:
    """Return the mean square over tokens and features, at least 1e-12 (a scalar)."""
    valid = valid.to(target_BTX.device)
    squares = target_BTX.float().square() * valid
    return (squares.sum() / (valid.sum() * target_BTX.shape[-1])).clamp_min(1e-12)


def relative_error_sum(ours_BTX: Tensor, target_BTX: Tensor, valid: Tensor, size: Tensor) -> Tensor:
    """Return the sum over tokens of the mean squared difference, divided by `size`, in float32 (a scalar)."""
    gap_BTX = ours_BTX.float() - target_BTX.to(ours_BTX.device).float()
    return (gap_BTX.square() * valid).mean(-1).sum() / size.to(ours_BTX.device)
