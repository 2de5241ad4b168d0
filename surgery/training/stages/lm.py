"""Language-model training: next-token cross-entropy, without a teacher."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from surgery.training.stages.base import (
    IGNORE_INDEX,
    STAGES,
    Batch,
    Stage,
    StageConfig,
    StageModels,
    model_inputs,
    next_token_targets,
)


class LMConfig(StageConfig):
    """Keys of an `lm` stage: those of all stages."""

    name: ClassVar[str] = "lm"


def cross_entropy(logits_BTV: Tensor, next_BT: Tensor, weight_BT: Tensor | None = None) -> Tensor:
    """Return the sum of the cross-entropy over counted positions, in nats (a scalar). weight_BT: of the positions;
    None: 1.
    """
    logits_NV, next_N = logits_BTV.flatten(0, 1).float(), next_BT.flatten()
    if weight_BT is None:
        return nn.functional.cross_entropy(logits_NV, next_N, ignore_index=IGNORE_INDEX, reduction="sum")
    ce_N = nn.functional.cross_entropy(logits_NV, next_N, ignore_index=IGNORE_INDEX, reduction="none")
    return (ce_N * weight_BT.flatten()).sum()


@STAGES.register(LMConfig)
class LMStage(Stage):
    """Trains the student on the text itself."""

    fits_new_models: ClassVar[bool] = True

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        """Return `total` and `ce`, the same cross-entropy in nats, summed over counted positions."""
        _, next_BT = next_token_targets(batch)
        total = cross_entropy(models.run(**model_inputs(batch)).logits, next_BT)
        return {"total": total, "ce": total.detach()}
