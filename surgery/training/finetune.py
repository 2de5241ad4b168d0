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

from surgery.core.digests import content_digest
from surgery.core.errors import SurgeryError
from surgery.core.files import explain_disk_errors, partial_path
from surgery.core.journal import Journal, check_absent, check_output_path
from surgery.core.progress import Progress
from surgery.core.version import __version__
from surgery.training import models as model_loading
from surgery.training.checkpoints import CheckpointManager
from surgery.training.logging import LOG_NAME, end_trackers
from surgery.training.recipe import HealingRecipe, stage_data_config
from surgery.training.runner import StageRunner
from surgery.training.stages import STAGES

RESUME_HINT = "run the same command with --resume"


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
    check_run(out, name, recipe, teacher, resume)
    source = model_loading.open_trainable(name, trust_remote_code)
    run = StageRunner(
        source, recipe, out, teacher, trust_remote_code, skip_bad_steps, track, device, progress or Progress(), show
    )
    work = partial_path(out)
    try:
        with explain_disk_errors(work, RESUME_HINT), ExitStack() as stack:
            if run.main:
                run.journal = stack.enter_context(_open_journal(source, recipe, work, resume))
                check_absent(out)  # another run may have ended there meanwhile
            run.accelerator.wait_for_everyone()
            return run.run()
    except KeyboardInterrupt:
        if run.main:
            latest = CheckpointManager(work / "checkpoints", 1).latest()
            status = f"the last checkpoint is {latest}" if latest else "there is no checkpoint yet"
            run.progress.say(f"interrupted; {status}, and the same command with --resume goes on")
        raise
    except SurgeryError:
        has_output = any((work / name).exists() for name in ("checkpoints", LOG_NAME))
        if run.journal is not None and run.journal.created and not has_output:
            shutil.rmtree(work, ignore_errors=True)  # refused before anything was trained
        raise
    finally:
        end_trackers(run.accelerator)


def check_run(out: Path, name: str, recipe: HealingRecipe, teacher: str | None, resume: bool) -> None:
    """What can be known before anything is opened."""
    check_output_path(out, resume, "run")
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
        if stage_data_config(recipe, stage) is None:
            raise SurgeryError(
                "no data to train on; give --data FILE, a folder or a Hub id, or the recipe data.sources"
            )


def data_digest(recipe: HealingRecipe) -> dict[str, str]:
    """Path -> digest of the names and contents of its files, of all local training and validation data of the stages. A Hub
    data set is known by its id and revision, which are in the recipe."""
    found: dict[str, str] = {}
    for config in (stage_data_config(recipe, stage) for stage in recipe.stages):
        held_out = config.validation if config is not None and not isinstance(config.validation, float) else ()
        for source in (*config.sources, *held_out) if config is not None else ():
            if source.path not in found and Path(source.path).exists():
                found[source.path] = content_digest(Path(source.path))
    return found


def _open_journal(source: Any, recipe: HealingRecipe, work: Path, resume: bool) -> Journal:
    fingerprint = {
        "source": source.fingerprint(),
        "weights_digest": source.weights_digest(),
        "data_digest": data_digest(recipe),
        "recipe": recipe.model_dump_json(exclude={"description", "log", "keep", "teacher"}),
        "version": __version__,
    }
    return Journal(work, fingerprint, resume, what="run")
