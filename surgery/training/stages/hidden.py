"""Every layer's output drawn to the teacher's, along the student's own path.

    loss = mean over layers of |h - h*|^2 / |h*|^2

Errors of lower layers reach upper ones here, unlike in `align`, so that upper layers learn to make up for them. The scale is
that of the first rows of the data, one number a layer. The last layer is seen behind the model's last norm.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.training.stages.base import (
    STAGES,
    Batch,
    Models,
    Roles,
    Stage,
    StageConfig,
    inputs_of,
    valid_BT1,
    without_head,
)


class Hidden(StageConfig):
    name: ClassVar[str] = "hidden"


@STAGES.register(Hidden)
class HiddenStage(Stage):
    config: Hidden

    def __init__(self, config: Any):
        super().__init__(config)
        self.scales: list[Tensor] = []

    @property
    def needs_teacher(self) -> Literal["model"]:
        return "model"

    def trains(self, models: Models, roles: Roles) -> set[str]:
        """Not the head, which no loss here sees."""
        student = models.student
        head = next((path for path, m in student.named_modules() if m is student.get_output_embeddings()), "")
        names = {name for name in super().trains(models, roles) if not name.startswith(f"{head}.")}
        if not names:
            raise SurgeryError(
                f"stage hidden: trains {', '.join(self.config.trains)} selects the head alone, which it does not reach"
            )
        return names

    def counted(self, example: Batch) -> int:
        return int(example["valid"].sum())

    @torch.no_grad()
    def measure(self, models: Models, batch: Batch) -> None:
        valid = valid_BT1(batch)
        for h in self._taught(models, batch):
            squares = h.float().square() * valid.to(h.device)
            self.scales.append((squares.sum() / (valid.sum() * h.shape[-1])).clamp_min(1e-12))

    def losses(self, models: Models, batch: Batch) -> dict[str, Tensor]:
        theirs, valid = self._taught(models, batch), valid_BT1(batch)
        ours = models.run(**inputs_of(batch), **without_head(models.student), output_hidden_states=True)
        each = []
        for h, target, scale in zip(ours.hidden_states[1:], theirs, self.scales):
            gap = h.float() - target.to(h.device).float()
            each.append((gap.square() * valid).mean(-1).sum() / scale.to(h.device))
        total = torch.stack(each).mean()
        return {"total": total, "last_layer": each[-1].detach()}

    def _taught(self, models: Models, batch: Batch) -> tuple[Tensor, ...]:
        """Without the embeddings."""
        answer = models.taught(batch, **without_head(models.teacher), output_hidden_states=True)
        return answer.hidden_states[1:]
