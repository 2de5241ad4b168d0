"""What the stages share that draw something inside the student to the same thing inside the teacher.

|a - b|^2 / |b|^2        summed over tokens, a mean over numbers; |b|^2 that of the first rows of the data
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from surgery.training.stages.base import Batch, Stage


class TeacherStage(Stage):
    """A stage that needs the teacher itself, and counts every token."""

    @property
    def needs_teacher(self) -> Literal["model"]:
        return "model"

    def count_positions(self, examples: Batch) -> int:
        return int(examples["valid"].sum())


def valid_mask_BT1(batch: Batch) -> Tensor:
    """1 at tokens, 0 at padding."""
    return batch["valid"].unsqueeze(-1).float()


def mean_square(target_BTX: Tensor, valid: Tensor) -> Tensor:
    """Its mean square over tokens."""
    valid = valid.to(target_BTX.device)
    squares = target_BTX.float().square() * valid
    return (squares.sum() / (valid.sum() * target_BTX.shape[-1])).clamp_min(1e-12)


def relative_error_sum(ours_BTX: Tensor, target_BTX: Tensor, valid: Tensor, size: Tensor) -> Tensor:
    """The sum over tokens, in float32."""
    gap_BTX = ours_BTX.float() - target_BTX.to(ours_BTX.device).float()
    return (gap_BTX.square() * valid).mean(-1).sum() / size.to(ours_BTX.device)
