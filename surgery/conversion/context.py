"""The inputs that all steps of one conversion share, and the layout of the rows that it runs through the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surgery.calibration.data import CalibrationSet
from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.meta_model import MetaModel
from surgery.core.distributed import DistContext
from surgery.core.progress import Progress
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.targets import Plan


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


@dataclass(frozen=True)
class RowGroups:
    """Ranges of rows in one batch that runs through the original model and through converted variants of it.

    original: all samples, through the original layers: first those to fit, then the held-out ones.
    converted: for each variant its rows, either all samples or only the held-out ones.
    held_out: the held-out rows of `original`.
    """

    original: range
    converted: tuple[range, ...]
    held_out: range

    @classmethod
    def for_conversion(cls, data: CalibrationSet) -> RowGroups:
        """Return the layout of a conversion: one variant, which runs all samples."""
        rows = data.rows
        return cls(range(rows), (range(rows, 2 * rows),), range(data.n_fit, rows))

    @classmethod
    def for_trial(cls, data: CalibrationSet, variants: int) -> RowGroups:
        """Return the layout of a trial: each variant runs the held-out samples only."""
        held = data.rows - data.n_fit
        starts = [data.rows + i * held for i in range(variants)]
        return cls(range(data.rows), tuple(range(s, s + held) for s in starts), range(data.n_fit, data.rows))

    @property
    def fit(self) -> range:
        """The rows of `original` that matrices are fitted to."""
        return range(self.original.start, self.held_out.start)

    @property
    def converted_offset(self) -> int:
        """The distance from a row of `original` to the same sample in the converted variant of a conversion."""
        return self.converted[0].start - self.original.start

    def converted_row(self, row: int) -> int:
        """Return the row of the converted variant with the same sample as `row` of `original`."""
        return row + self.converted_offset

    def sample(self, row: int) -> int:
        """Return the index of the calibration sample in `row`, for the layout of a conversion."""
        return row if row in self.original else row - self.converted_offset

    def inputs(self, data: CalibrationSet) -> dict[str, Tensor]:
        """Return the model's keyword arguments for the whole batch."""
        starts = [0 if len(rows) == len(self.original) else self.held_out.start for rows in self.converted]
        return {name: torch.cat([x, *[x[start:] for start in starts]]) for name, x in data.inputs.items()}


def rows_of(x_BTD: Tensor, rows: range) -> Tensor:
    """Return a view of these rows of the batch, (B, T, D)."""
    return x_BTD[rows.start : rows.stop]
