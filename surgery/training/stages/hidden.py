"""Every layer's output drawn to the teacher's, along the student's own path.

    loss = mean over layers of |h - h*|^2 / |h*|^2

Errors of lower layers reach upper ones here, unlike in `align`, so that upper layers learn to make up for them. The scale is
that of the first rows of the data, one number a layer. The last layer is seen behind the model's last norm.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.training.stages.base import STAGES, Batch, Roles, StageConfig, StageModels, model_inputs, skip_logits
from surgery.training.stages.match_hidden import TeacherStage, mean_square, relative_error_sum, valid_mask_BT1


class HiddenConfig(StageConfig):
    name: ClassVar[str] = "hidden"


@STAGES.register(HiddenConfig)
class HiddenStage(TeacherStage):
    config: HiddenConfig

    def __init__(self, config: Any):
        super().__init__(config)
        self.sizes: list[Tensor] = []

    def trained_parameters(self, models: StageModels, roles: Roles) -> set[str]:
        """Not the head, which no loss here sees."""
        student = models.student
        head = next((path for path, m in student.named_modules() if m is student.get_output_embeddings()), "")
        names = {name for name in super().trained_parameters(models, roles) if not name.startswith(f"{head}.")}
        if not names:
            raise SurgeryError(
                f"stage hidden: trains {', '.join(self.config.trains)} selects the head alone, which it does not reach"
            )
        return names

    @torch.no_grad()
    def measure(self, models: StageModels, batch: Batch) -> None:
        valid = valid_mask_BT1(batch)
        self.sizes = [mean_square(h, valid) for h in self._teacher_states(models, batch)]

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        theirs, valid = self._teacher_states(models, batch), valid_mask_BT1(batch)
        ours = models.run(**model_inputs(batch), **skip_logits(models.student), output_hidden_states=True)
        layers = zip(ours.hidden_states[1:], theirs, self.sizes)
        each = [relative_error_sum(h, target, valid, size) for h, target, size in layers]
        total = torch.stack(each).mean()
        return {"total": total, "last_layer": each[-1].detach()}

    def _teacher_states(self, models: StageModels, batch: Batch) -> tuple[Tensor, ...]:
        """Without the embeddings."""
        answer = models.teacher_output(batch, **skip_logits(models.teacher), output_hidden_states=True)
        return answer.hidden_states[1:]
