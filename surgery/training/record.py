"""What a run leaves in the checkpoint's report."""

from __future__ import annotations

from typing import Any

from surgery.devices import device_name
from surgery.training.checkpoints import Position
from surgery.training.devices import precision_of, spread
from surgery.training.recipe import HealingRecipe
from surgery.training.validation import perplexity
from surgery.version import __version__


def stage_record(kind: str, at: Position) -> dict[str, Any]:
    """tokens: trained on, exactly; positions: rows times length."""
    speed = at.notes["positions"] / max(at.notes["seconds"], 1e-9)
    told = {"kind": kind, "steps": at.step, "tokens": at.tokens, "positions": at.notes["positions"]}
    told |= {"first_loss": at.notes["first_loss"], "last_loss": at.notes["last_loss"]}
    return {**told, "seconds": round(at.notes["seconds"], 2), "tokens_per_second": round(speed, 1)}


def scores(losses: dict[str, float | None]) -> dict[str, Any]:
    return {k: None if v is None else {"loss": v, "perplexity": perplexity(v)} for k, v in losses.items()}


def circumstances(recipe: HealingRecipe, accelerator: Any) -> dict[str, Any]:
    import torch
    import transformers

    return {
        "surgery": __version__,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "recipe": recipe.model_dump(mode="json"),
        "processes": accelerator.num_processes,
        "spread": spread(accelerator) or accelerator.distributed_type.value,
        "device": device_name(accelerator.device),
        "precision": precision_of(accelerator, recipe.precision),
    }
