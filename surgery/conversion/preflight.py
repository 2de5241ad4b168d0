"""Preflight checks of a conversion: calibration samples, free disk space, and the fingerprint that a resumed journal
must match.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from surgery.calibration.data import CalibrationSet
from surgery.checkpoint.source import CheckpointSource
from surgery.core.config import fields_at_default
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.files import partial_path, size_text
from surgery.core.version import WORK_VERSION
from surgery.planning.recipe import ConversionRecipe
from surgery.planning.renamed import changed_choice, renew_recipe
from surgery.planning.targets import Plan, TimeTarget

GIVE_CALIBRATION = "Give --calibration FILE"  # what to do about missing calibration text, on the command line
# Keys of recipes that are younger than the first journals: left out at their default, so that conversions begun before
# them go on.
ADDED_RULE_KEYS = ("order", "levels", "ranks", "cores", "share")
ADDED_KEYS = ("round_ranks", "depth", "experts", "towers", "tune", "speed", "generated_tokens", *ADDED_RULE_KEYS)


def check_far_context(inputs: dict[str, Tensor], recipe: ConversionRecipe) -> None:
    """Raise SurgeryError if layers are to be ranked by distant context and the windows of text are too short for
    any.
    """
    hybrid = recipe.attention.hybrid if recipe.attention else None
    if hybrid is None or not hybrid.is_measured or hybrid.of_heads:
        return
    from surgery.conversion.restored import NEAR  # the choice of layers is imported by conversions that make it

    length, near = inputs["input_ids"].shape[1] if "input_ids" in inputs else None, NEAR.window + NEAR.sinks
    if length is not None and length <= near:
        raise SurgeryError(
            f"attention.hybrid choose_by: {hybrid.choose_by} ranks layers by what is more than {NEAR.window} tokens back, and "
            "the windows of the "
            f"calibration text have {length} tokens. Set length above {near}, or attention.hybrid.choose_by to every"
        )


def check_needs_no_calibration(recipe: ConversionRecipe, hint: str = GIVE_CALIBRATION) -> None:
    """Raise SurgeryError if the recipe measures something on calibration text. hint: how the caller gives the text."""
    if recipe.generated_tokens:
        raise SurgeryError(
            f"generated_tokens are continuations of the calibration text, and there is none. {hint}, or set "
            "generated_tokens to 0"
        )
    if recipe.depth is not None and recipe.depth.is_measured:
        raise SurgeryError(
            f"depth chooses the layers on calibration text, and there is none. {hint}, or name the layers, for example "
            'depth: {remove: "18:26"}'
        )
    if recipe.experts is not None:
        raise SurgeryError(
            f"experts chooses those that stay by what they add on calibration text, and there is none. {hint}, or leave "
            "experts out"
        )
    if recipe.attention and recipe.attention.hybrid and recipe.attention.hybrid.is_measured:
        raise SurgeryError(
            f"attention.hybrid choose_by: {recipe.attention.hybrid.choose_by} needs calibration text, and there is none. "
            f"{hint}, or set attention.hybrid.choose_by to every"
        )


def _left_out_keys(recipe: ConversionRecipe) -> dict[str, Any]:
    """Return the keys that a journal leaves out, as pydantic's `exclude`: those added at their default, also in
    rules.
    """
    left_out: dict[str, Any] = dict.fromkeys(
        ("description", "aim", "cost", "calibration", *fields_at_default(recipe, ADDED_KEYS)), True
    )
    rules = {index: fields_at_default(rule, ADDED_RULE_KEYS) for index, rule in enumerate(recipe.rules)}
    return left_out | {"rules": {index: names for index, names in rules.items() if names}}


def _journal_recipe(recipe: ConversionRecipe) -> str:
    return recipe.model_dump_json(exclude=_left_out_keys(recipe))


def journal_fingerprint(
    source: CheckpointSource, recipe: ConversionRecipe, data: CalibrationSet | None, time: TimeTarget | None = None
) -> dict[str, Any]:
    """Return the values that must be equal when a conversion is resumed. data: the calibration samples. time: the
    plan's, with `speed`.
    """
    return {
        "source": source.fingerprint(),
        "weights_digest": source.weights_digest(),
        "recipe": _journal_recipe(recipe),
        "version": WORK_VERSION,
        "seed": recipe.seed,
        "calibration": data.digest() if data else None,
        **({} if time is None else {"measured_times": time.digest}),
    }


def renew_fingerprint(work_dir: Path, start: dict[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of a journal with its recipe in today's words.

    Raises SurgeryError for a conversion in which an older version chose something in another way than this one: what it
    has finished would not agree with the rest.
    """
    try:
        written = json.loads(start["recipe"])
        renewed, _ = renew_recipe(written)
        recipe = ConversionRecipe.model_validate(renewed)
    except (KeyError, TypeError, ValueError, AttributeError, SurgeryError):
        return start  # not a recipe of any version: it differs from this one
    changed = changed_choice(written) if start.get("calibration") is not None else None
    if changed is not None:
        raise SurgeryError(
            f"{work_dir} was begun by an older version with {changed}, which chose in another way than this version. "
            "Remove that folder to "
            "start again, or finish it with the older version"
        )
    return {**start, "recipe": _journal_recipe(recipe)}


def check_same_inputs(dist: DistContext, fingerprint: dict[str, Any]) -> None:
    """Raise SurgeryError unless all processes read the same inputs: machines may have different files under one
    path.
    """
    fingerprints = dist.gather(fingerprint)
    for rank, theirs in enumerate(fingerprints):
        if unlike := [key for key, value in theirs.items() if value != fingerprints[0][key]]:
            raise SurgeryError(
                f"process {rank} has another {unlike[0]} than process 0. All processes must read the same files"
            )


def check_disk_space(source: CheckpointSource, plan: Plan, recipe: ConversionRecipe, out: Path) -> None:
    """Raise SurgeryError if the conversion would write more bytes than are free, files of an interrupted run included.

    The estimate adds the tensors that stay (in the stored dtype), the structured ones in float32, the Gram matrices,
    sampled text, and the aligned attention of a hybrid whose layers are chosen by restoring them. Tuning of the whole
    model doubles it.
    """
    unchanged = (
        sum(t.nbytes_read for t in source.tensors.values())
        - sum(4 * target.numel for target in plan.replaced_targets()) // 2
    )
    needed = max(unchanged, 0) + sum(int(4 * target.uniform_budget()) for target in plan.replaced_targets())
    needed += 16 * recipe.generated_tokens  # token ids, in parts and as a whole
    if recipe.calibration and recipe.curvature != "none":
        limit = recipe.fitted_tokens // 4 if recipe.curvature == "auto" else 2**62
        needed += sum(4 * (target.out**2 if target.out <= limit else target.out) for target in plan.replaced_targets())
    hybrid = recipe.attention.hybrid if recipe.attention else None
    if hybrid is not None and hybrid.softmax is not None and hybrid.choose_by == "restored":
        attention = {target.output for target in plan.attention_targets.values()}
        inside = tuple(f"{target.path}." for target in plan.attention_targets.values())
        needed += sum(
            4 * linear.out * linear.in_
            for linear in plan.layout.linears
            if linear.path in attention or linear.path.startswith(inside)
        )
    if recipe.calibration and recipe.epochs.model:
        needed *= 2  # the layers before and after the training of the whole model
    work_dir = partial_path(out)
    free = shutil.disk_usage(work_dir if work_dir.exists() else out.parent).free
    free += sum(file.stat().st_size for file in work_dir.rglob("*") if file.is_file())
    if needed > free:
        raise SurgeryError(
            f"{out.parent} has {size_text(free)} free, the conversion writes up to {size_text(needed)}. "
            "Free some space, or choose --out on another disk"
        )
