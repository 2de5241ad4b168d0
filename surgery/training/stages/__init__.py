"""What can be trained towards: a file for each kind of stage."""

from surgery.training.stages.base import STAGES, Batch, Stage, StageConfig, StageModels

__all__ = ["STAGES", "Batch", "Stage", "StageConfig", "StageModels"]
