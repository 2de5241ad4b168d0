"""Next-token cross-entropy."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from surgery.training.stages.base import IGNORED, STAGES, Batch, Models, Stage, StageConfig, inputs_of, targets_of


class LM(StageConfig):
    name: ClassVar[str] = "lm"


def cross_entropy(logits_BTV: Tensor, next_BT: Tensor) -> Tensor:
    """The sum over the positions that count, nats."""
    return nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1).float(), next_BT.flatten(), ignore_index=IGNORED, reduction="sum"
    )


@STAGES.register(LM)
class LMStage(Stage):
    def losses(self, models: Models, batch: Batch) -> dict[str, Tensor]:
        _, next_BT = targets_of(batch)
        total = cross_entropy(models.run(**inputs_of(batch)).logits, next_BT)
        return {"total": total, "ce": total.detach()}
