"""What a run leaves in the checkpoint's report."""

from __future__ import annotations

from typing import Any

from surgery.devices import device_name
from surgery.training.best import better
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


def delivered(recipe: HealingRecipe, start: float | None, notes: dict[str, Any]) -> dict[str, Any]:
    """Which state a run handed back. state: "start", "last", or that of a step; start, loss, last: nats per token of
    validation text, of what the run began with, of what it handed back, and of the state after the last step; worse:
    whether it handed back something worse than it began with. notes: of the last checkpoint."""
    chosen, loss, last = notes["delivered"], notes["after"], notes["last"]
    worse = start is not None and loss is not None and better(start, loss)
    told = {"asked": recipe.deliver, "state": chosen, "start": start, "loss": loss, "last": last, "worse": worse}
    if chosen not in ("start", "last"):
        number, step = (int(part) for part in chosen.split("-")[1::2])
        told["state"] = f"step {step:,} of stage {number + 1}" if step else f"end of stage {number}"
    return {**told, "says": _sentence(told)}


def _sentence(told: dict[str, Any]) -> str:
    if told["loss"] is None:
        return (
            "the state after the last step: there is no validation text to judge states by; keep some with data.validation, "
            "for example 0.02"
        )
    figures = f"{told['loss']:.4f} nats per token of validation text"
    began = "" if told["start"] is None else f"the start {told['start']:.4f}, "
    if told["state"] == "start":
        return (
            f"the start, unchanged: no state of this run was better than its {figures} (the last step "
            f"{told['last']:.4f}); lower the rate, or train on other text"
        )
    if told["worse"]:
        why = "deliver: last was asked for; " if told["asked"] == "last" else ""
        return (
            f"the state after the last step, WORSE than what the run began with: {figures}, the start {told['start']:.4f}; {why}"
            "lower the rate, or train on other text"
        )
    if told["state"] == "last":
        return f"the state after the last step: {figures} ({began.removesuffix(', ')})".replace(" ()", "")
    return f"the best state, {told['state']}: {figures} ({began}the last step {told['last']:.4f})"


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
