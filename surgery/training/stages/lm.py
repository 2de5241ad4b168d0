"""Language-model training: next-token cross-entropy, without a teacher."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from surgery.training.linear_loss import LossWeights, Targets
from surgery.training.output_head import model_loss
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


def next_token_loss(run: Any, batch: Batch) -> Tensor:
    """Run a model; return the sum of its cross-entropy over counted positions, in nats (a scalar)."""
    counts_BT, next_BT = next_token_targets(batch)
    targets = Targets(counts_BT.flatten().float(), next_BT.flatten().clamp_min(0))
    return model_loss(run, model_inputs(batch), targets, LossWeights(ce_weight=1.0)).total


@STAGES.register(LMConfig)
class LMStage(Stage):
    """Trains the student on the text itself."""

    fits_new_models: ClassVar[bool] = True

    def losses(self, models: StageModels, batch: Batch) -> dict[str, Tensor]:
        """Return `total` and `ce`, the same cross-entropy in nats, summed over counted positions."""
        total = next_token_loss(models.run, batch)
        return {"total": total, "ce": total.detach()}
