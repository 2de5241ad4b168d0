"""What is looked at before a conversion begins: the text, where it goes, whether the disk has room; and what a journal
must have been begun with."""

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
    """The calibration windows; notes: gets what is odd about the text."""
    if recipe.calibration is None:
        if recipe.attention and recipe.attention.hybrid and recipe.attention.hybrid.is_measured:
            raise SurgeryError(
                "attention.hybrid by sensitivity measures on text; give --calibration FILE, or --set attention.hybrid.by=every"
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
    source: CheckpointSource, recipe: ConversionRecipe, batch: CalibrationSet | None
) -> dict[str, Any]:
    return {
        "source": source.fingerprint(),
        "weights_digest": source.weights_digest(),
        "recipe": recipe.model_dump_json(exclude={"description", "calibration"}),
        "version": __version__,
        "seed": recipe.seed,
        "calibration": batch.digest() if batch else None,
    }


def check_same_inputs(ranks: DistContext, fingerprint: dict[str, Any]) -> None:
    """Machines may have different files under one path."""
    for rank, theirs in enumerate(ranks.gather(fingerprint)):
        if unlike := [key for key, value in theirs.items() if value != ranks.broadcast_object(fingerprint)[key]]:
            raise SurgeryError(f"process {rank} has another {unlike[0]} than process 0; all must read the same files")


def check_disk_space(source: CheckpointSource, plan: Plan, recipe: ConversionRecipe, out: Path) -> None:
    """Before starting: what is written at the peak, against what is free."""
    rest = source.nbytes - sum(4 * target.numel for target in plan.replaced_targets()) // 2
    needed = max(rest, 0) + sum(int(4 * target.uniform_budget()) for target in plan.replaced_targets())
    if recipe.calibration and recipe.curvature != "none":
        limit = recipe.tokens // 4 if recipe.curvature == "auto" else 2**62
        needed += sum(4 * (target.out**2 if target.out <= limit else target.out) for target in plan.replaced_targets())
    place = partial_path(out) if partial_path(out).exists() else out.parent
    free = shutil.disk_usage(place).free + sum(f.stat().st_size for f in partial_path(out).rglob("*") if f.is_file())
    if needed > free:
        raise SurgeryError(
            f"{out.parent} has {size_text(free)} free, the conversion writes up to {size_text(needed)}; "
            "free some, or choose --out on another disk"
        )
