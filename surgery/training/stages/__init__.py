"""What can be trained towards: a file for each kind of stage."""

from surgery.training.stages.base import STAGES, Batch, StageModels, Stage, StageConfig

__all__ = ["STAGES", "Batch", "StageModels", "Stage", "StageConfig"]
