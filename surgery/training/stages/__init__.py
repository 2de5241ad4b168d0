"""Training stages: one file for each kind (lm, distill, align, hidden and lora)."""

from surgery.training.stages.base import STAGES, Batch, Stage, StageConfig, StageModels

__all__ = ["STAGES", "Batch", "Stage", "StageConfig", "StageModels"]
