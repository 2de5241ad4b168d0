"""Where else the log goes: TensorBoard, wandb, trackio, through Accelerate. Nothing of theirs is asked for or stored
but what their own packages keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surgery.errors import SurgeryError
from surgery.storage import is_disk
from surgery.training.checkpoints import Position
from surgery.training.recipe import HealingRecipe

PROJECT = "surgery"
TRACKERS = ("tensorboard", "wandb", "trackio")
HELP = {
    "tensorboard": "pip install tensorboard",
    "wandb": "run wandb login, or set WANDB_MODE=offline",
    "trackio": "see trackio's page for where it writes",
}


def tracker(name: str | None) -> list[str]:
    """What Accelerate is to log with. None: TensorBoard where it is installed."""
    if name == "none":
        return []
    from accelerate.utils import imports

    here = {n: getattr(imports, f"is_{n}_available", lambda: False)() for n in TRACKERS}
    if name is None:
        return ["tensorboard"] if here["tensorboard"] else []
    if name not in TRACKERS:
        raise SurgeryError(f"--track {name!r}: choose one of {', '.join(TRACKERS)}, none")
    if not here[name]:
        raise SurgeryError(f"--track {name}: the package {name} is not installed; pip install {name}, or --track none")
    return [name]


def start_trackers(accelerator: Any, recipe: HealingRecipe, out: Path, at: Position) -> None:
    """A run by the name of OUT. One that is resumed goes on: TensorBoard forgets steps that are taken again."""
    if not accelerator.log_with:
        return
    (chosen,) = (str(getattr(name, "value", name)) for name in accelerator.log_with)
    begun = sum(stage.steps for stage in recipe.stages[: at.stage]) + at.step
    options = {
        "tensorboard": {"purge_step": begun + 1} if begun else {},
        "wandb": {"name": out.name, "dir": str(accelerator.project_dir)},
        "trackio": {"name": out.name},
    }
    try:
        accelerator.init_trackers(
            PROJECT, config=None if begun else told(recipe), init_kwargs={chosen: options[chosen]}
        )
    except Exception as error:  # of many kinds, from many libraries
        accelerator.trackers = []
        if is_disk(error):
            raise
        what = " ".join(str(error).split())[:200]
        raise SurgeryError(
            f"--track {chosen} does not start: {type(error).__name__}: {what}; {HELP[chosen]}, or --track none"
        ) from None


def end_trackers(accelerator: Any) -> None:
    """What was logged is written out; a second call does nothing."""
    for one in accelerator.trackers:
        one.finish()
    accelerator.trackers = []


def told(recipe: HealingRecipe) -> dict[str, Any]:
    """What a run is compared by, plain numbers and words."""
    flat: dict[str, Any] = {"seed": recipe.seed, "precision": recipe.precision}
    for number, stage in enumerate(recipe.stages):
        for key in ("kind", "length", "tokens", "batch", "rate"):
            flat[f"stage {number + 1}/{key}"] = getattr(stage, key)
    return flat
