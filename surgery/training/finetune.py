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

from surgery.conversion import partial_of
from surgery.errors import SurgeryError
from surgery.journal import Journal
from surgery.progress import Progress
from surgery.training import models as opening
from surgery.training.checkpoints import Checkpoints
from surgery.training.healing import Healing
from surgery.training.log import LOG
from surgery.training.recipe import HealingRecipe, data_of
from surgery.training.stages import STAGES
from surgery.training.trackers import end_trackers
from surgery.version import __version__


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
    fresh = not work.exists()
    try:
        with ExitStack() as stack:
            if run.main:
                run.journal = stack.enter_context(_journal(source, recipe, work, resume))
            run.accelerator.wait_for_everyone()
            return run.everything()
    except KeyboardInterrupt:
        if run.main:
            latest = Checkpoints(work / "checkpoints", 1).latest()
            kept = f"the last checkpoint is {latest}" if latest else "there is no checkpoint yet"
            run.progress.say(f"interrupted; {kept}, and the same command with --resume goes on")
        raise
    except SurgeryError:
        if run.main and fresh and not any((work / name).exists() for name in ("checkpoints", LOG)):
            shutil.rmtree(work, ignore_errors=True)  # refused before anything was trained
        raise
    finally:
        end_trackers(run.accelerator)


def refuse(out: Path, name: str, recipe: HealingRecipe, teacher: str | None, resume: bool) -> None:
    """What can be known before anything is opened."""
    if out.exists():
        raise SurgeryError(f"{out} exists; choose another --out, or remove it")
    if not out.parent.is_dir():
        raise SurgeryError(f"{out.parent} is not a folder; make it first")
    if partial_of(out).exists() and not resume:
        raise SurgeryError(
            f"{partial_of(out)} holds an interrupted run; go on with --resume, or remove that folder to begin anew"
        )
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
    return Journal(work, begun, resume)
