"""`surgery finetune`: run the stages of a healing recipe on a checkpoint and write the healed checkpoint.

Healing is recovery distillation: further training of a converted model, usually towards the original.

OUT.partial/journal.jsonl   fingerprint of the run and baseline losses
OUT.partial/checkpoints/    training checkpoints, see checkpoints.py
OUT.partial/log.jsonl       training log; curve.png is its plot
OUT-rates                   trials of the rates to try, see rate_search.py; removed when the run is complete
OUT                         the healed checkpoint, written next to it and renamed when complete
"""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from surgery.core.digests import content_digest
from surgery.core.dispatch import record_references, reference_warning
from surgery.core.errors import SurgeryError
from surgery.core.files import check_no_unknown_files, explain_disk_errors, partial_path
from surgery.core.journal import JOURNAL_NAME, Journal, check_absent, check_output_path, read_start
from surgery.core.progress import Progress, is_main_process
from surgery.core.version import WORK_VERSION
from surgery.planning.renamed import renew_healing_recipe
from surgery.training import models as model_loading
from surgery.training.best_state import BEST
from surgery.training.checkpoints import CheckpointManager
from surgery.training.data.recipe import GeneratedText
from surgery.training.distributed.accelerator import end_process_group
from surgery.training.distributed.launch import check_gpus, run_workers
from surgery.training.export import ADAPTER, MERGED
from surgery.training.logging import CURVE_NAME, LOG_NAME, end_trackers
from surgery.training.optim import adamw8bit_class
from surgery.training.rate_search import search_rates, trials_folder
from surgery.training.recipe import HealingRecipe, parse_healing_recipe, stage_data_config
from surgery.training.runner import StageRunner
from surgery.training.stages import STAGES
from surgery.training.stages.base import READOUT

# What a run writes into its work folder; `surgery` and `wandb` are of trackers.
WORK_FILES = (
    *("journal*.jsonl", "lock", LOG_NAME, CURVE_NAME, f"{ADAPTER}/*", f"{MERGED}/*", f"{READOUT}/*"),
    *(f"{name}/**" for name in ("checkpoints", BEST, "tokens", "surgery", "wandb", "healed", "healed.partial")),
)
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
    gpus: int | None = None,
    sharding: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    show: Any = lambda parts: None,
) -> dict[str, Any]:
    """Heal the checkpoint `name` (a folder or Hub id) and return the record that OUT/surgery_report.json lists under
    `training`.

    out: NAME-healed by default. teacher: the original model, for stages that distill. resume: continue from the last
    checkpoint in OUT.partial. skip_bad_steps: skip steps with NaN or infinite gradients instead of stopping. track:
    tensorboard, wandb, trackio or none. show: called with the tables to display. sharding: of several processes: ddp
    (replicas), fsdp2 (weights, gradients and optimizer states sharded) or auto. gpus: start this number of processes, one
    GPU each; their tables are not shown. Every process of `accelerate launch` calls this function; the first one writes.
    Raises SurgeryError if recipe, data, model and teacher do not fit
    together, before any training.
    """
    out = Path(out) if out is not None else Path(name).with_name(Path(name).name + "-healed")
    recipe = place_generated_text(recipe, out)
    check_run(out, name, recipe, teacher, resume)
    if teacher is not None:
        write_generated_text(recipe, teacher, device, trust_remote_code, progress)
    if workers := check_gpus(gpus, device):
        flags = {"--resume": resume, "--skip-bad-steps": skip_bad_steps, "--trust-remote-code": trust_remote_code}
        given = {"--teacher": teacher, "--track": track, "--device": device, "--sharding": sharding}
        words = [flag for flag, is_set in flags.items() if is_set]
        words += [f"{option}={value}" for option, value in given.items() if value is not None]
        return finetune_in_workers(name, recipe, out, words, workers)
    progress = progress or Progress()
    train = partial(
        _run_stages, name, teacher=teacher, trust=trust_remote_code, skip=skip_bad_steps, device=device,
        progress=progress, sharding=sharding,
    )  # fmt: skip
    if not recipe.rates_to_try:
        record = train(recipe, out, resume, track=track, show=show)
        end_process_group()
        return record
    source = model_loading.open_trainable(name, trust_remote_code)
    recipe, tried = search_rates(
        recipe, out, partial(train, track="none", show=lambda parts: None),
        lambda trial: json.dumps(_fingerprint(source, trial), sort_keys=True), resume, progress,
    )  # fmt: skip
    record = train(recipe, out, resume, track=track, show=show, rates_tried=tried)
    end_process_group()
    if is_main_process():
        shutil.rmtree(trials_folder(out), ignore_errors=True)
    return record


def _run_stages(
    name: str, recipe: HealingRecipe, out: Path, resume: bool, *, teacher: str | None, **settings: Any
) -> dict[str, Any]:
    """Run the stages of a recipe, write `out` and return the record. settings: further arguments of StageRunner."""
    source = model_loading.open_trainable(name, settings["trust"])
    run = StageRunner(source, recipe, out, teacher=teacher, **settings)
    work = partial_path(out)
    try:
        with explain_disk_errors(work, RESUME_HINT), ExitStack() as stack:
            if run.main:
                check_no_unknown_files(work, WORK_FILES)
                run.journal = stack.enter_context(_open_journal(source, recipe, work, resume))
                check_absent(out)  # another run may have written it since check_run
            run.accelerator.wait_for_everyone()
            stack.enter_context(record_references(partial(_say_reference, run.progress)))
            return run.run()
    except KeyboardInterrupt:
        if run.main:
            latest = CheckpointManager(work / "checkpoints", 1).latest()
            status = f"The last checkpoint is {latest}" if latest else "There is no checkpoint yet"
            run.progress.say(f"{status}.")
        raise
    except SurgeryError:
        has_output = any((work / name).exists() for name in ("checkpoints", LOG_NAME))
        if run.journal is not None and run.journal.created and not has_output:
            shutil.rmtree(work, ignore_errors=True)  # the run failed before any training
        raise
    finally:
        end_trackers(run.accelerator)


def _say_reference(progress: Progress, name: str, reason: str) -> None:
    progress.say(f"warning: {reference_warning(name, reason)}")


def finetune_in_workers(name: str, recipe: HealingRecipe, out: Path, words: list[str], count: int) -> dict[str, Any]:
    """Run `surgery finetune` in `count` processes on this machine and return its record. words: further options."""
    with tempfile.TemporaryDirectory(prefix="surgery-recipe-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(recipe.model_dump_json(), encoding="utf-8")  # JSON is YAML
        printed = run_workers(
            ["finetune", name, "--recipe", str(path), f"--out={out}", "--json", *words], count, capture=True
        )
    record: dict[str, Any] = json.loads(printed)
    return record


def check_run(out: Path, name: str, recipe: HealingRecipe, teacher: str | None, resume: bool) -> None:
    """Raise SurgeryError for mistakes that show before a model is opened: output path, missing teacher, missing
    data.
    """
    if is_main_process():  # others may come here when the first one has begun to write
        check_output_path(out, resume, "run")
    for stage in recipe.stages:
        if stage.optimiser.name == "adamw8bit":
            adamw8bit_class()
        wants = STAGES[stage](stage).needs_teacher
        if wants == "model" and teacher is None:
            instead = (
                " A teacher cache holds logits only, which this stage does not take." if recipe.teacher.cache else ""
            )
            raise SurgeryError(
                f"stage {stage.kind} needs a teacher. Give the model that {name} was converted from: --teacher "
                f"SRC.{instead}"
            )
        if wants == "logits" and teacher is None and recipe.teacher.cache is None:
            raise SurgeryError(
                f"stage {stage.kind} needs a teacher. Give --teacher SRC, or --set teacher.cache=DIR for a teacher "
                "cache."
            )
        data = stage_data_config(recipe, stage)
        if data is not None and teacher is None and any(source.generated is not None for source in data.sources):
            raise SurgeryError("generated text is written by the teacher, and there is none. Give --teacher SRC.")
        if data is None:
            raise SurgeryError(
                "no data to train on. Give --data (a file, folder or Hub id), or set data.sources in the recipe."
            )


def place_generated_text(recipe: HealingRecipe, out: Path) -> HealingRecipe:
    """Return the recipe with a folder beside `out` as the path of every generated source that has none."""
    folder = str(out.with_name(out.name + "-text"))

    def placed(data: dict[str, Any]) -> dict[str, Any]:
        sources = data.get("sources")
        if isinstance(sources, dict):
            sources = [sources]
        if not isinstance(sources, (list, tuple)):
            return data
        lacks = [isinstance(s, dict) and s.get("generated") not in (None, False) and not s.get("path") for s in sources]
        return {**data, "sources": [{**s, "path": folder} if lack else s for s, lack in zip(sources, lacks)]}

    stages = tuple(stage.model_copy(update={"data": placed(stage.data)}) for stage in recipe.stages)
    return recipe.model_copy(update={"data": placed(recipe.data), "stages": stages})


def write_generated_text(
    recipe: HealingRecipe, teacher: str, device: str | None, trust: bool, progress: Progress | None
) -> None:
    """Let the teacher write the text of the recipe's generated sources: as many tokens as the stages read of each."""
    from surgery.training.data.write_text import write_teacher_text

    wanted: dict[tuple[str, GeneratedText], tuple[int, int]] = {}
    for stage in recipe.stages:
        data = stage_data_config(recipe, stage)
        for source in data.sources if data is not None else ():
            if source.generated is None or data is None:
                continue
            share = source.weight / sum(other.weight for other in data.sources)
            tokens, length = wanted.get((source.path, source.generated), (0, 0))
            wanted[source.path, source.generated] = (tokens + round(stage.tokens * share), max(length, stage.length))
    for (path, config), (tokens, length) in wanted.items():
        write_teacher_text(
            Path(path),
            teacher,
            config,
            max(1, tokens),
            length,
            device=device,
            trust_remote_code=trust,
            progress=progress,
        )


def data_digest(recipe: HealingRecipe) -> dict[str, str]:
    """Return path -> digest of file names and contents, for all local training and validation data of the stages.

    Hub data sets are identified by their id and revision, which are in the recipe.
    """
    digests: dict[str, str] = {}
    for config in (stage_data_config(recipe, stage) for stage in recipe.stages):
        held_out = config.validation if config is not None and not isinstance(config.validation, float) else ()
        for source in (*config.sources, *held_out) if config is not None else ():
            if source.path not in digests and Path(source.path).exists():
                digests[source.path] = content_digest(Path(source.path))
    return digests


def _journal_recipe(recipe: HealingRecipe) -> str:
    """Return what a resumed run's recipe must have in common with that of the run that began."""
    stages = tuple(
        stage.model_copy(update={"memory": "keep" if stage.memory == "auto" else stage.memory})
        for stage in recipe.stages
    )
    left_out = {"description", "log", "checkpoints", "teacher", "cuda_graph"}
    left_out |= set() if recipe.rates_to_try else {"rates_to_try", "trial_share"}  # unknown to earlier versions
    return recipe.model_copy(update={"stages": stages}).model_dump_json(
        exclude={**dict.fromkeys(left_out, True), "stages": {"__all__": {"compile"}}}
    )


def renew_fingerprint(start: dict[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of a run's journal with its recipe in today's words; unchanged if it has no recipe of any
    version.
    """
    try:
        renewed, notes = renew_healing_recipe(json.loads(start["recipe"]))
        return {**start, "recipe": _journal_recipe(parse_healing_recipe(renewed))} if notes else start
    except (KeyError, TypeError, ValueError, AttributeError, SurgeryError):
        return start


def _open_journal(source: Any, recipe: HealingRecipe, work: Path, resume: bool) -> Journal:
    """Return the journal of a run. Raises SurgeryError if checkpoints are there whose settings it does not say."""
    if resume and read_start(work) is None and CheckpointManager(work / "checkpoints", 1).latest():
        raise SurgeryError(
            f"{work / JOURNAL_NAME} is missing or damaged, so nothing says with which recipe, model and data the "
            f"checkpoints in {work} were trained. Remove that folder to start again"
        )
    return Journal(work, _fingerprint(source, recipe), resume, what="run", renew=renew_fingerprint)


def _fingerprint(source: Any, recipe: HealingRecipe) -> dict[str, Any]:
    """Return what a run depends on."""
    return {
        "source": source.fingerprint(),
        "weights_digest": source.weights_digest(),
        "data_digest": data_digest(recipe),
        "recipe": _journal_recipe(recipe),
        "version": WORK_VERSION,
    }
