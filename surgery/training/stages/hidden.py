"""Match the output of every layer to the teacher's (hidden-state distillation), on the student's own activations.

    loss = mean over layers of |h - h*|^2 / |h*|^2

Unlike in `align`, errors of lower layers reach upper layers, which learn to compensate for them. |h*|^2 is measured on
the first rows of the data, one number per layer. The last layer is compared after the model's final norm.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.training.stages.base import STAGES, Batch, Roles, StageConfig, StageModels, model_inputs, skip_logits
from surgery.training.stages.match_hidden import TeacherStage, mean_square, relative_error_sum, valid_mask_BT1


class HiddenConfig(StageConfig):
    """Keys of a `hidden` stage: those of all stages."""

    name: ClassVar[str] = "hidden"


@STAGES.register(HiddenConfig)
class HiddenStage(TeacherStage):
    """Trains the student so that its hidden states match the teacher's."""

    config: HiddenConfig

    def __init__(self, config: Any):
        super().__init__(config)
        self.sizes: list[Tensor] = []

    def trained_parameters(self, models: StageModels, roles: Roles) -> set[str]:
        """Return the selected parameters without those of the output head, which this loss does not depend on."""
        student = models.student
        head = next((path for path, m in student.named_modules() if m is student.get_output_embeddings()), "")
        names = {name for name in super().trained_parameters(models, roles) if not name.startswith(f"{head}.")}
        if not names:
            raise SurgeryError(
                f"stage hidden: trains {', '.join(self.config.trains)} selects the output head only, which this loss "
                "does not depend on. Try trains: [new]."
            )
        return names

    @torch.no_grad()
    def measure(self, models: StageModels, batch: Batch) -> None:
        """Measure the mean squares of the teacher's hidden states."""
        valid = valid_mask_BT1(batch)
        self.sizes = [mean_square(h, valid) for h in self._teacher_states(models, batch)]

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        """Return `total` and the loss of the last layer, summed over tokens."""
        theirs, valid = self._teacher_states(models, batch), valid_mask_BT1(batch)
        ours = models.run(**model_inputs(batch), **skip_logits(models.student), output_hidden_states=True)
        layers = zip(ours.hidden_states[1:], theirs, self.sizes)
        layer_losses = [relative_error_sum(h, target, valid, size) for h, target, size in layers]
        total = torch.stack(layer_losses).mean()
        return {"total": total, "last_layer": layer_losses[-1].detach()}

    def _teacher_states(self, models: StageModels, batch: Batch) -> tuple[Tensor, ...]:
        """Return the teacher's hidden states, one (B, T, D) per layer, without the embeddings."""
        answer = models.teacher_output(batch, **skip_logits(models.teacher), output_hidden_states=True)
        return answer.hidden_states[1:]
