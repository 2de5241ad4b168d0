"""`surgery pretrain`: initialize a model with structured layers and train it from scratch with `finetune`.

OUT.blank       the initial checkpoint: config, tokenizer, weights; removed at the end
OUT.partial     see finetune.py
OUT             a checkpoint like those that `convert` writes
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from contextlib import ExitStack
from glob import escape
from pathlib import Path
from typing import Any

from surgery.checkpoint.source import open_converted_checkpoint
from surgery.conversion.report import totals
from surgery.core.errors import SurgeryError
from surgery.core.files import (
    REPORT_NAME,
    check_no_links,
    check_no_unknown_files,
    exclusive_lock,
    explain_disk_errors,
    follow_umask,
    partial_path,
    read_json,
    write_json,
)
from surgery.core.progress import Progress, is_main_process
from surgery.core.version import WORK_VERSION, __version__
from surgery.modeling.auto_classes import write_shims
from surgery.planning.targets import Plan
from surgery.structures import STRUCTURES
from surgery.training.finetune import RESUME_HINT, check_run, finetune
from surgery.training.pretrain.initialize import make_model, plan_new_model
from surgery.training.pretrain.model_config import make_config
from surgery.training.pretrain.recipe import PretrainRecipe
from surgery.training.pretrain.tokenizer import make_tokenizer
from surgery.training.recipe import stage_data_config

MARKER_NAME = "blank.json"  # in OUT.blank: identifies the recipe
TIMEOUT_SECONDS = 3600.0  # how long other processes wait for the main one


def pretrain(
    recipe: PretrainRecipe,
    out: str | Path,
    *,
    resume: bool = False,
    skip_bad_steps: bool = False,
    track: str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    show: Any = lambda parts: None,
) -> dict[str, Any]:
    """Train a new model and return the record that OUT/surgery_report.json lists under `training`.

    resume: continue from the last checkpoint in OUT.partial. skip_bad_steps: skip steps with NaN or infinite gradients
    instead of stopping. Every process of `accelerate launch` calls this function; the first one writes.
    """
    out = Path(out)
    check_run(out, f"the model in {out}", recipe.training, None, resume)
    blank = out.with_name(out.name + ".blank")
    check_no_links(blank)
    check_no_links(partial_path(blank))
    with explain_disk_errors(out, RESUME_HINT), ExitStack() as stack:
        if is_main_process():  # finetune locks OUT.partial; this lock guards OUT.blank
            stack.enter_context(exclusive_lock(out.parent, f"pretraining of {out.name}", f"{out.name}.lock"))
        _ensure_initial_checkpoint(recipe, blank)
        try:
            record = finetune(
                str(blank), recipe.training, out, resume=resume, skip_bad_steps=skip_bad_steps, track=track, device=device,
                progress=progress, show=show,
            )  # fmt: skip
        except SurgeryError:
            if is_main_process() and not partial_path(out).exists():
                shutil.rmtree(blank, ignore_errors=True)
            raise
        if is_main_process():
            shutil.rmtree(blank, ignore_errors=True)
        return record


def _ensure_initial_checkpoint(recipe: PretrainRecipe, blank: Path) -> None:
    """Write OUT.blank in the main process, complete or not at all; the others wait.

    One left by an interrupted run of the same recipe is used again.
    """
    marker = {"recipe": recipe_digest(recipe), "version": WORK_VERSION}
    began = time.monotonic()
    while not _is_initial(blank, marker):
        if is_main_process():
            shutil.rmtree(blank, ignore_errors=True)
            work = partial_path(blank)
            shutil.rmtree(work, ignore_errors=True)
            try:
                write_initial_checkpoint(recipe, work)
                files = sorted(path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file())
                write_json(work / MARKER_NAME, {**marker, "files": files})
                os.replace(work, blank)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        elif time.monotonic() - began > TIMEOUT_SECONDS:
            raise SurgeryError(
                f"{blank} was not written by the process of rank 0 within {TIMEOUT_SECONDS / 60:.0f} minutes."
            )
        else:
            time.sleep(0.5)


def _is_initial(blank: Path, expected: dict[str, Any]) -> bool:
    """Return whether the checkpoint in `blank` was made from this recipe.

    Raises SurgeryError if other files were added to the folder, because they would be copied into the result.
    """
    marker = blank / MARKER_NAME
    try:
        stored = read_json(marker) if marker.is_file() else None
    except SurgeryError:
        return False
    if not isinstance(stored, dict) or {key: stored.get(key) for key in expected} != expected:
        return False
    files = stored.get("files")
    if not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        return False
    check_no_unknown_files(blank, {escape(name) for name in (*files, MARKER_NAME)})
    return True


def recipe_digest(recipe: PretrainRecipe) -> str:
    """Return a SHA-256 of everything that determines the initial weights."""
    new = recipe.new.model_dump(mode="json")
    new["tokenizer"]["vocabulary"] = new["tokenizer"].pop("vocab_size")  # the name until 0.1: interrupted runs go on
    identity = [new, recipe.training.data, recipe.training.seed]
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


# -- the initial checkpoint -----------------------------------------------------------------------
def write_initial_checkpoint(recipe: PretrainRecipe, folder: Path) -> None:
    """Write a checkpoint of an initialized, untrained model into `folder`, which must not exist."""
    data = stage_data_config(recipe.training, recipe.training.stages[0])
    assert data is not None, "checked by check_run"
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(recipe.new.tokenizer, data)
    config = make_config(recipe.new.model, tokenizer)
    config.save_pretrained(folder)
    plan = plan_new_model(folder, recipe.structure) if recipe.structure is not None else None
    model = make_model(config, plan, recipe.new.embedding_std, recipe.training.seed, recipe.new.low_rank_start)
    model.save_pretrained(folder)
    follow_umask(*folder.glob("*.safetensors"))
    tokenizer.save_pretrained(folder)
    config_data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if plan is not None:
        write_shims(folder, config_data, model)
        write_json(folder / "config.json", config_data)
        write_json(folder / REPORT_NAME, initial_report(plan, folder, recipe))


def initial_report(plan: Plan, folder: Path, recipe: PretrainRecipe) -> dict[str, Any]:
    """Return a report like that of `convert`, so that `inspect` shows the structures.

    Errors are None: there are no original weights to compare with.
    """
    stored = open_converted_checkpoint(str(folder))
    records = [_module_record(target) for target in plan.replaced_targets()]
    counts = totals(records, stored, list(stored.tensors.values()))
    saved = counts["replaced_params_before"] - counts["replaced_params_after"]
    counts |= {"params_before": counts["params_after"] + saved, "bytes_before": counts["bytes_after"] + 4 * saved}
    return {
        "surgery": __version__,
        "source": {"name": plan.source, "revision": None, "fingerprint": None},
        "model_type": plan.model_type,
        "recipe": recipe.new.model_dump(mode="json"),
        "seed": recipe.training.seed,
        "notes": list(plan.notes),
        "calibration": None,
        "allocation": {"kept": "as in the recipe"},
        "held_out": None,
        "totals": counts,
        "modules": records,
        "mixers": [
            {"name": path, "errors": {}}
            for targets in (plan.attention_targets, plan.native_targets)
            for path in (target.path for target in targets.values())
        ],
        "hybrid": None,
        "time": {"seconds": {"total": 0.0}, "layers": {}, "device": "cpu"},
        "memory": {"peak_rss": None},
    }


def _module_record(target: Any) -> dict[str, Any]:
    structure = STRUCTURES[target.preview]
    macs = target.macs(structure(target.in_, target.out, target.preview, bias=False, device="meta"))
    record = {"name": target.name, "roles": target.roles}
    record |= {"shape": [target.out, target.in_], "structure": target.preview.to_dict(), "error": None}
    record |= {"params_before": target.numel, "params_after": target.structure_params(target.preview)}
    return {**record, "macs_before": target.numel, "macs_after": macs}
