"""The inputs that all steps of one conversion share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.meta_model import MetaModel
from surgery.core.distributed import DistContext
from surgery.core.progress import Progress
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.targets import Plan

NON_LAYER = "rest"  # name of the shard of all tensors outside the layers, as files and journals spell it
DEPTH_NAME = "depth.safetensors"  # the linear that is fitted again before removed layers, in OUT.partial
EXPERTS_NAME = "experts.safetensors"  # the routers without the rows of removed experts, in OUT.partial


@dataclass(frozen=True)
class ConversionContext:
    """Shared inputs of a conversion, built once by `surgery.conversion.convert`. Trials use a copy made with
    `dataclasses.replace`.

    model: the source model on the meta device.  plan: the linears and attention modules to replace.
    recipe: the validated recipe.  data: the calibration samples, None for a data-free conversion.
    runner: runs the model layer by layer.  work_dir: OUT.partial.  dist: the processes that share the conversion.
    device: where layers run and matrices are fitted.  progress: messages and progress bars.
    """

    model: MetaModel
    plan: Plan
    recipe: ConversionRecipe
    data: CalibrationSet | None
    runner: LayerRunner
    work_dir: Path
    dist: DistContext
    device: torch.device
    progress: Progress

    @property
    def samples(self) -> CalibrationSet:
        """The calibration samples, for steps that run only with calibration."""
        assert self.data is not None
        return self.data

    @cached_property
    def shard_of(self) -> dict[str, str]:
        """The name of the layer shard of each parameter of the source: the path of its layer, or NON_LAYER."""
        layers = self.plan.layout.layers
        return {
            parameter: next((path for path in layers if parameter.startswith(f"{path}.")), NON_LAYER)
            for parameter in self.model.keys
        }

    @property
    def grams_dir(self) -> Path:
        """The folder of the output Gram matrices, one file for each layer."""
        return self.work_dir / "curvature"

    @property
    def aligned_dir(self) -> Path:
        """The folder of the aligned attention modules, one file for each layer."""
        return self.work_dir / "aligned"

    @property
    def shards_dir(self) -> Path:
        """The folder of the layer shards: one file for each finished layer, and one for all other tensors."""
        return self.work_dir / "pieces"

    @property
    def fitted_dir(self) -> Path:
        """The folder of the layers as they were fitted, before the training of the whole model."""
        return self.work_dir / "fitted"
