"""Training stages: one file for each kind (lm, distill, align, hidden, lora, regress and classify)."""

from surgery.training.stages.base import STAGES, Batch, Stage, StageConfig, StageModels

__all__ = ["STAGES", "Batch", "Stage", "StageConfig", "StageModels"]
