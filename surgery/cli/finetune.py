"""The command `surgery finetune`; imports nothing heavy before it runs."""

from __future__ import annotations

import json
from typing import Any

from surgery.cli import options
from surgery.cli.console import progress, show
from surgery.core.progress import speaks


def finetune(
    converted: options.Converted,
    recipe: options.HealingName,
    teacher: options.TeacherName = None,
    data: options.TrainingData = None,
    out: options.Healed = None,
    overrides: options.Overrides = None,
    tiny: options.Tiny = False,
    resume: options.ResumeTraining = False,
    skip_bad_steps: options.SkipBadSteps = False,
    track: options.Track = None,
    device: options.Device = None,
    trust_remote_code: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Heal a converted checkpoint by training; `accelerate launch -m surgery finetune ..` does it on many devices.

    surgery finetune OUT --teacher SRC --recipe quick --data corpus.jsonl --out HEALED
    """
    from surgery.training.data.prefetch import one_thread
    from surgery.training.finetune import finetune as run
    from surgery.training.logging import last_line, result_table
    from surgery.training.recipe import load_healing

    one_thread()
    given = [*(overrides or []), *reading(data)]
    record = run(
        converted,
        load_healing(recipe, given, tiny),
        out,
        teacher=teacher,
        resume=resume,
        skip_bad_steps=skip_bad_steps,
        track=track,
        device=device,
        trust_remote_code=trust_remote_code,
        progress=progress(as_json),
        show=(lambda parts: None) if as_json else show,
    )
    tell(record, as_json, [*result_table(record), last_line(record, "healed checkpoint")])


def reading(data: str | None) -> list[str]:
    """--data as an override of a recipe."""
    return [f"data.sources={json.dumps([{'path': data}])}"] if data is not None else []


def tell(record: dict[str, Any], as_json: bool, parts: list[Any]) -> None:
    """How a run ended: one process of them says it."""
    if speaks():
        print(json.dumps(record, indent=2)) if as_json else show(parts)
