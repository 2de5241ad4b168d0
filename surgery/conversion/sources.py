"""Where a conversion reads the original: its modules on the meta device, its tensors, and the calibration samples.

FolderSource     a checkpoint: a local folder, a GGUF file (expanded to a folder), or a Hub id
LiveSource       a model in memory (surgery/conversion/live_source.py)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from surgery.architectures.positions import longest_input
from surgery.calibration.data import CalibrationSet, align_left, check_model_inputs, interleave, read_labels
from surgery.calibration.inputs import checkpoint_inputs
from surgery.calibration.layer_runner import LayerRunner
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.rounded import round_checkpoint
from surgery.checkpoint.source import open_checkpoint
from surgery.conversion.generated import check_can_generate
from surgery.conversion.preflight import GIVE_CALIBRATION, check_far_context, check_needs_no_calibration
from surgery.conversion.reached import keep_reached
from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, read_json
from surgery.core.progress import Progress
from surgery.planning.plan import make_plan
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.targets import Plan


@dataclass
class CalibrationInputs:
    """Calibration samples. tensors: the model's keyword arguments, (B, ..); label: what the report says of them.

    is_text: whether the text check can judge them. notes: warnings about the text, for the report.
    """

    tensors: dict[str, Tensor]
    label: str
    is_text: bool
    notes: list[str] = field(default_factory=list)


def read_texts(recipe: ConversionRecipe, read: Callable[[str, int], CalibrationInputs]) -> CalibrationInputs:
    """Return the calibration samples that a recipe names, several texts evenly mixed. read(path, tokens): reads one.

    Raises SurgeryError if it names several and one of them is no text.
    """
    several = [read(text.path, recipe.tokens_of(text)) for text in recipe.calibration_texts]
    if len(several) == 1:
        return several[0]
    for one in several:
        if not one.is_text or Path(one.label).is_dir():
            raise SurgeryError(
                f"calibration: of several texts each must be a text (got {one.label}). Give it alone, or leave it out"
            )
    notes = [note for one in several for note in one.notes]
    return CalibrationInputs(interleave([one.tensors for one in several]), recipe.calibration_label or "", True, notes)


class Source(Protocol):
    """The original of a conversion. `open` is called first, then `plan`, then `calibration`.

    calibration_hint: a sentence that says how the user gives calibration samples.
    """

    calibration_hint: str

    def open(self, progress: Progress) -> MetaModel:
        """Return the modules on the meta device with the locations of their tensors. No weight is read."""

    def plan(self, recipe: ConversionRecipe) -> Plan:
        """Return the plan of a recipe. Its recipe is the one that is converted with."""

    def calibration(self, recipe: ConversionRecipe) -> CalibrationInputs | None:
        """Return the calibration samples, None for a data-free conversion.

        Raises SurgeryError if they do not suit the model, or if the recipe needs samples and has none.
        """

    def keep_reached(self, plan: Plan, runner: LayerRunner, samples: CalibrationSet) -> tuple[Plan, LayerRunner]:
        """Run two rows; return the plan without what the samples do not reach, and a runner for it."""

    def original(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context manager of the whole original model, in evaluation mode on `device`."""

    def public_path(self, path: str) -> str:
        """Return the path of a module as the user knows it."""

    def naming_modules(self) -> AbstractContextManager[None]:
        """Return a context manager inside which errors have paths as the user knows them."""


class FolderSource:
    """A checkpoint. name: a local folder, a GGUF file, or a Hub id; revision: commit, branch or tag of a Hub id.

    dtype: into which weights are rounded as they are read; None: as stored.
    """

    calibration_hint = GIVE_CALIBRATION
    model: MetaModel

    def __init__(
        self, name: str, trust_remote_code: bool = False, revision: str | None = None, dtype: str | None = None
    ):
        self.name, self.trust_remote_code, self.revision, self.dtype = name, trust_remote_code, revision, dtype

    def open(self, progress: Progress) -> MetaModel:
        """Read config and tensor headers, and build the model on the meta device. See `Source.open`."""
        opened = open_checkpoint(self.name, self.trust_remote_code, revision=self.revision, progress=progress)
        self.model = MetaModel(round_checkpoint(opened, self.dtype), self.trust_remote_code)
        return self.model

    def plan(self, recipe: ConversionRecipe) -> Plan:
        """See `Source.plan`."""
        plan, report = make_plan(self.model, recipe), self.model.source.folder / REPORT_NAME
        if report.is_file():
            # Imported for checkpoints that a conversion wrote.
            from surgery.planning.stock_classes import check_tiny_kept

            check_tiny_kept(self.name, read_json(report), plan.targets)
        return plan

    def calibration(self, recipe: ConversionRecipe) -> CalibrationInputs | None:
        """Read the file, folder or Hub data set that the recipe names. See `Source.calibration`."""
        if recipe.calibration is None:
            check_needs_no_calibration(recipe)
            return None
        config, model = self.model.config, self.model.model

        def read(path: str, tokens: int) -> CalibrationInputs:
            notes = list[str]()
            tensors = checkpoint_inputs(
                path,
                self.model.source.folder,
                config,
                tokens,
                min(recipe.length, longest_input(model) or recipe.length),
                trust_remote_code=self.trust_remote_code,
                notes=notes,
            )
            if Path(path).is_dir():  # a processor may return more than the model reads
                taken = inspect.signature(model.forward).parameters
                tensors = {name: x for name, x in tensors.items() if name in taken}
            return CalibrationInputs(tensors, path, not path.endswith(".safetensors"), notes)

        inputs = read_texts(recipe, read)
        inputs.tensors = align_left(read_labels(inputs.tensors, model))
        check_model_inputs(inputs.tensors, model)
        check_far_context(inputs.tensors, recipe)
        check_can_generate(inputs.tensors, self.model, recipe)
        return inputs

    def keep_reached(self, plan: Plan, runner: LayerRunner, samples: CalibrationSet) -> tuple[Plan, LayerRunner]:
        """See `Source.keep_reached`."""
        return keep_reached(plan, runner, samples)

    @contextmanager
    def original(self, device: torch.device) -> Iterator[Any]:
        """Load the model: in the dtype of its files on a GPU, in float32 on a CPU. See `Source.original`."""
        from surgery.checkpoint.load_model import load_model

        dtype = "auto" if device.type == "cuda" else torch.float32
        model = load_model(self.model.source, dtype, self.trust_remote_code).to(device)
        yield model.eval()
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def public_path(self, path: str) -> str:
        """Return `path`: modules have the paths of the checkpoint's model."""
        return path

    def naming_modules(self) -> AbstractContextManager[None]:
        """See `Source.naming_modules`."""
        return nullcontext()
