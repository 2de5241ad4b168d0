"""Preflight checks of a conversion: calibration inputs, free disk space, and the fingerprint that a resumed journal must match."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from surgery.calibration.data import CalibrationSet, calibration_inputs, check_model_inputs
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.source import CheckpointSource
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path, size_text
from surgery.core.version import __version__
from surgery.planning.plan import Plan
from surgery.planning.recipe import ConversionRecipe


def load_calibration(
    source: CheckpointSource, meta_model: MetaModel, recipe: ConversionRecipe, notes: list[str] | None = None
) -> CalibrationSet | None:
    """Return the calibration samples, or None for a data-free conversion. Notes about the text are appended to `notes`.

    Raises SurgeryError if the inputs do not suit the model, or if the recipe needs a text and has none.
    """
    if recipe.calibration is None:
        if recipe.attention and recipe.attention.hybrid and recipe.attention.hybrid.is_measured:
            raise SurgeryError(
                "attention.hybrid by: sensitivity is measured on calibration text, and there is none. Give --calibration FILE, "
                "or --set attention.hybrid.by=every"
            )
        return None
    inputs = calibration_inputs(
        recipe.calibration,
        source.folder,
        meta_model.config,
        recipe.tokens,
        recipe.length,
        trust_remote_code=meta_model.trust_remote_code,
        notes=[] if notes is None else notes,
    )
    check_model_inputs(inputs, meta_model.model)
    return CalibrationSet.from_inputs(inputs, recipe.holdout)


def journal_fingerprint(
    source: CheckpointSource, recipe: ConversionRecipe, data: CalibrationSet | None
) -> dict[str, Any]:
    """Return the values that must be equal when a conversion is resumed. data: the calibration samples."""
    return {
        "source": source.fingerprint(),
        "weights_digest": source.weights_digest(),
        "recipe": recipe.model_dump_json(exclude={"description", "calibration"}),
        "version": __version__,
        "seed": recipe.seed,
        "calibration": data.digest() if data else None,
    }


def check_same_inputs(dist: DistContext, fingerprint: dict[str, Any]) -> None:
    """Raise SurgeryError unless all processes read the same inputs: machines may have different files under one path."""
    fingerprints = dist.gather(fingerprint)
    for rank, theirs in enumerate(fingerprints):
        if unlike := [key for key, value in theirs.items() if value != fingerprints[0][key]]:
            raise SurgeryError(
                f"process {rank} has another {unlike[0]} than process 0. All processes must read the same files"
            )


def check_disk_space(source: CheckpointSource, plan: Plan, recipe: ConversionRecipe, out: Path) -> None:
    """Raise SurgeryError if the conversion would write more bytes than are free, files of an interrupted run included.

    The estimate adds the tensors that stay (in the stored dtype), the structured ones in float32, and the Gram matrices.
    """
    unchanged = source.nbytes - sum(4 * target.numel for target in plan.replaced_targets()) // 2
    needed = max(unchanged, 0) + sum(int(4 * target.uniform_budget()) for target in plan.replaced_targets())
    if recipe.calibration and recipe.curvature != "none":
        limit = recipe.tokens // 4 if recipe.curvature == "auto" else 2**62
        needed += sum(4 * (target.out**2 if target.out <= limit else target.out) for target in plan.replaced_targets())
    work_dir = partial_path(out)
    free = shutil.disk_usage(work_dir if work_dir.exists() else out.parent).free
    free += sum(file.stat().st_size for file in work_dir.rglob("*") if file.is_file())
    if needed > free:
        raise SurgeryError(
            f"{out.parent} has {size_text(free)} free, the conversion writes up to {size_text(needed)}. "
            "Free some space, or choose --out on another disk"
        )
