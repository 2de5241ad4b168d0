"""`surgery finetune`: the stages of a recipe, one after the other, and the healed checkpoint.

OUT.partial/journal.jsonl   what it was begun with, what was measured
OUT.partial/checkpoints/    see checkpoints.py
OUT.partial/log.jsonl       and curve.png
OUT                         the healed checkpoint, made beside and renamed
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.core.files import disk_errors, partial_of
from surgery.core.journal import Journal, refuse_existing, refuse_out
from surgery.core.progress import Progress
from surgery.core.version import __version__
from surgery.training import models as opening
from surgery.training.checkpoints import Checkpoints
from surgery.training.logging import LOG, end_trackers
from surgery.training.recipe import HealingRecipe, data_of
from surgery.training.runner import Healing
from surgery.training.stages import STAGES

RESUME = "run the same command with --resume"


def finetune(
    name: str,
    recipe: HealingRecipe,
    out: str | Path | None = None,
    *,
    teacher: str | None = None,
    resume: bool = False,
    skip_bad_steps: bool = False,
    track: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    show: Any = lambda parts: None,
) -> dict[str, Any]:
    """Heal the checkpoint `name`; the record, as written into OUT/surgery_report.json. Every process of `accelerate
    launch` calls this; the first one writes."""
    out = Path(out) if out is not None else Path(name).with_name(Path(name).name + "-healed")
    refuse(out, name, recipe, teacher, resume)
    source = opening.opened(name, trust_remote_code)
    run = Healing(
        source, recipe, out, teacher, trust_remote_code, skip_bad_steps, track, device, progress or Progress(), show
    )
    work = partial_of(out)
    try:
        with disk_errors(work, RESUME), ExitStack() as stack:
            if run.main:
                run.journal = stack.enter_context(_journal(source, recipe, work, resume))
                refuse_existing(out)  # another run may have ended there meanwhile
            run.accelerator.wait_for_everyone()
            return run.everything()
    except KeyboardInterrupt:
        if run.main:
            latest = Checkpoints(work / "checkpoints", 1).latest()
            kept = f"the last checkpoint is {latest}" if latest else "there is no checkpoint yet"
            run.progress.say(f"interrupted; {kept}, and the same command with --resume goes on")
        raise
    except SurgeryError:
        begun = any((work / name).exists() for name in ("checkpoints", LOG))
        if run.journal is not None and run.journal.made and not begun:
            shutil.rmtree(work, ignore_errors=True)  # refused before anything was trained
        raise
    finally:
        end_trackers(run.accelerator)


def refuse(out: Path, name: str, recipe: HealingRecipe, teacher: str | None, resume: bool) -> None:
    """What can be known before anything is opened."""
    refuse_out(out, resume, "run")
    for stage in recipe.stages:
        wants = STAGES[stage](stage).needs_teacher
        if wants == "model" and teacher is None:
            raise SurgeryError(
                f"stage {stage.kind} learns from the original: --teacher SRC, what {name} was converted from"
            )
        if wants == "logits" and teacher is None and recipe.teacher.cache is None:
            raise SurgeryError(
                f"stage {stage.kind} wants --teacher SRC, or --set teacher.cache=DIR with stored targets"
            )
        if data_of(recipe, stage) is None:
            raise SurgeryError(
                "no data to train on; give --data FILE, a folder or a Hub id, or the recipe data.sources"
            )


def _journal(source: Any, recipe: HealingRecipe, work: Path, resume: bool) -> Journal:
    begun = {
        "source": source.fingerprint(),
        "recipe": recipe.model_dump_json(exclude={"description", "log", "keep", "teacher"}),
        "version": __version__,
    }
    return Journal(work, begun, resume, what="run")
