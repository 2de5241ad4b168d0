"""The learning rate of a run by short trials: each of the recipe's `rates_to_try` trains a share of the tokens, and the
rate with the lowest cross-entropy on validation text is used for the whole run.

OUT-rates/rate-0.0001.json      {"key": what the trial depends on, "loss": nats per token, or "stopped": why there is none}
OUT-rates/rate-0.0001           the trained checkpoint of a trial, removed once its loss is written

A trial is an ordinary run with the schedule of its own number of tokens, from the same weights, data order and seed as
the others. An interrupted trial continues from its last checkpoint.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from surgery.core.errors import SurgeryError
from surgery.core.files import REPORT_NAME, atomic_write, partial_path, read_json
from surgery.core.progress import Progress, is_main_process
from surgery.training.guard import TrainingStopped
from surgery.training.recipe import HealingRecipe, stage_data_config

Train = Callable[[HealingRecipe, Path, bool], dict[str, Any]]  # recipe, output folder, resume -> record of the run


def trials_folder(out: Path) -> Path:
    """Return the folder of the trials of a run that writes `out`."""
    return out.with_name(out.name + "-rates")


def set_rate(recipe: HealingRecipe, rate: float) -> HealingRecipe:
    """Return the recipe with `rate` in its last stage; all other rates keep their proportion to it."""
    factor = rate / recipe.stages[-1].rate
    stages = [
        stage.model_copy(
            update={"rate": stage.rate * factor, "rates": {kind: value * factor for kind, value in stage.rates.items()}}
        )
        for stage in recipe.stages
    ]
    stages[-1] = stages[-1].model_copy(update={"rate": rate})
    return recipe.model_copy(update={"stages": tuple(stages)})


def trial_recipe(recipe: HealingRecipe, rate: float) -> HealingRecipe:
    """Return the recipe of a trial: a share of the tokens, at least a step of each stage, judged by the last state."""
    recipe = set_rate(recipe, rate)
    stages = tuple(
        stage.model_copy(update={"tokens": max(stage.batch * stage.length, round(recipe.trial_share * stage.tokens))})
        for stage in recipe.stages
    )
    return recipe.model_copy(update={"stages": stages, "rates_to_try": (), "deliver": "last", "evaluate": 0})


def search_rates(
    recipe: HealingRecipe,
    out: Path,
    train: Train,
    key: Callable[[HealingRecipe], str],
    resume: bool,
    progress: Progress,
) -> tuple[HealingRecipe, list[dict[str, Any]]]:
    """Run the trials that are missing. Return the recipe with the best rate, and {"rate", "loss", "tokens"} of each.

    train: runs a recipe. key: what the result of a recipe depends on. resume: whether results of an earlier call may
    be used. Every process must call it.
    """
    folder = trials_folder(out)
    check_trials(recipe, folder, resume)
    finished = {rate: _read_trial(folder, rate) for rate in recipe.rates_to_try}  # before any process writes
    tried = []
    for rate in recipe.rates_to_try:
        trial, entry = trial_recipe(recipe, rate), finished[rate]
        if entry is not None and entry.get("key") != key(trial):
            raise SurgeryError(
                f"{folder} has a trial of rate {rate:g} with another recipe, model or data. Remove the folder, or use the "
                "arguments that it was begun with."
            )
        if entry is None or not {"loss", "stopped"} & entry.keys():
            entry = _run_trial(trial, rate, folder, train, key(trial))
        tokens = sum(stage.tokens for stage in trial.stages)
        found = f"{entry['loss']:.4f} nats per token of validation text" if "loss" in entry else entry["stopped"]
        progress.say(f"rate {rate:g}, {tokens:,} tokens: {found}")
        tried.append({"rate": rate, "loss": entry.get("loss"), "tokens": tokens})
    best = best_rate(tried)
    progress.say(f"training with rate {best:g}, the best of {len(tried)}{_edge(tried, best)}")
    return set_rate(recipe, best), tried


def check_trials(recipe: HealingRecipe, folder: Path, resume: bool) -> None:
    """Raise SurgeryError if trials cannot be compared, or if those of an unfinished run would be mixed in."""
    data = stage_data_config(recipe, recipe.stages[-1])
    if data is not None and not data.validation:
        raise SurgeryError(
            "rates_to_try chooses the rate by validation text, and the recipe has none. Set data.validation, for example "
            "0.02."
        )
    if is_main_process() and folder.exists() and not resume:
        raise SurgeryError(
            f"{folder} has the trials of an unfinished run. Add --resume to continue it, or remove the folder."
        )


def best_rate(tried: Sequence[dict[str, Any]]) -> float:
    """Return the rate with the lowest loss, the first of equal ones."""
    whole = [trial for trial in tried if trial["loss"] is not None]
    if not whole:
        rates = ", ".join(f"{trial['rate']:g}" for trial in tried)
        raise SurgeryError(f"training stopped at every rate of rates_to_try ({rates}). Give lower ones.")
    return float(min(whole, key=lambda trial: trial["loss"])["rate"])


def _edge(tried: Sequence[dict[str, Any]], best: float) -> str:
    rates = [trial["rate"] for trial in tried]
    if best not in (min(rates), max(rates)):
        return ""
    end, other = ("lowest", "lower") if best == min(rates) else ("highest", "higher")
    return f"; it is the {end} of them, and a {other} one may be better"


def _read_trial(folder: Path, rate: float) -> dict[str, Any] | None:
    """Return the entry of a trial, or None without one. Raises SurgeryError for a file that holds no entry."""
    path = folder / f"rate-{rate:g}.json"
    if not path.is_file():
        return None
    entry = read_json(path)
    is_whole = (
        isinstance(entry, dict) and isinstance(entry.get("key"), str) and isinstance(entry.get("stopped", ""), str)
    )
    loss = entry.get("loss", 0.0) if is_whole else None
    if isinstance(loss, bool) or not isinstance(loss, (int, float)) or not math.isfinite(loss):
        raise SurgeryError(f"{path} is damaged. Remove it; the trial of this rate is run again.")
    return dict(entry)


def _run_trial(trial: HealingRecipe, rate: float, folder: Path, train: Train, key: str) -> dict[str, Any]:
    """Train one trial and write its result. Return {"key", "loss"} or {"key", "stopped"}."""
    out = folder / f"rate-{rate:g}"
    entry: dict[str, Any] = {"key": key}
    _write_trial(folder, rate, entry)
    was_trained = out.is_dir()  # and the process ended before the loss was written
    try:
        if was_trained:
            record = read_json(out / REPORT_NAME)["training"][-1]
        else:
            record = train(trial, out, True)
        loss = (record["validation"]["after"] or {}).get("loss")
        if loss is None:
            raise SurgeryError(
                "rates_to_try chooses the rate by validation text, and its share of the data is empty. Set data.validation "
                "to a larger share or to a file."
            )
        if math.isfinite(loss):
            entry["loss"] = loss
        else:
            entry["stopped"] = f"the validation loss after training is {loss}"
    except TrainingStopped as error:
        entry["stopped"] = str(error)
    except SurgeryError:
        if not partial_path(out).exists() and not was_trained:  # refused before any training
            _remove_trial(folder, rate)
        raise
    _write_trial(folder, rate, entry)
    if is_main_process() and not was_trained:  # other processes may still read what was trained earlier
        for path in (out, partial_path(out)):
            shutil.rmtree(path, ignore_errors=True)
    return entry


def _remove_trial(folder: Path, rate: float) -> None:
    """Remove the entry of a trial, and the folder if it is the only one, so that the next call begins anew."""
    if is_main_process():
        (folder / f"rate-{rate:g}.json").unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _write_trial(folder: Path, rate: float, entry: dict[str, Any]) -> None:
    if is_main_process():
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / f"rate-{rate:g}.json", "w") as file:
            json.dump(entry, file)
