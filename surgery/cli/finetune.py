"""The command `surgery finetune`; imports nothing heavy before it runs."""

from __future__ import annotations

import json
from typing import Any

import typer

from surgery.cli import options
from surgery.cli.console import progress, show
from surgery.cli.eval import command_words
from surgery.core.progress import is_main_process


def finetune(
    context: typer.Context,
    converted: options.Converted,
    recipe: options.HealingName,
    teacher: options.TeacherName = None,
    data: options.TrainingData = None,
    out: options.HealedOut = None,
    overrides: options.Overrides = None,
    tiny: options.Tiny = False,
    resume: options.ResumeTraining = False,
    skip_bad_steps: options.SkipBadSteps = False,
    track: options.Track = None,
    device: options.Device = None,
    gpus: options.Gpus = None,
    sharding: options.Sharding = "auto",
    trust_remote_code: options.TrustRemoteCode = False,
    plugins: options.Plugins = None,
    as_json: options.Json = False,
) -> None:
    """Train a converted checkpoint to recover its quality (healing = recovery distillation).

    surgery finetune OUT --teacher SRC --recipe attention --data corpus.jsonl --out HEALED --gpus 4
    """
    from surgery.training.auto_recipe import load_recipe_of_run
    from surgery.training.data.prefetch import limit_tokenizer_threads
    from surgery.training.distributed.launch import check_gpus, run_workers
    from surgery.training.finetune import finetune as run
    from surgery.training.logging import last_line, result_table

    limit_tokenizer_threads()
    all_overrides = [*(overrides or []), *data_override(data)]
    loaded, reasons = load_recipe_of_run(recipe, converted, all_overrides, tiny, trust_remote_code)
    if workers := check_gpus(gpus, device):
        run_workers(command_words(context)[1:], workers)
        return
    if reasons and not as_json and is_main_process():
        show(reasons)
    record = run(
        converted,
        loaded,
        out,
        teacher=teacher,
        resume=resume,
        skip_bad_steps=skip_bad_steps,
        track=track,
        device=device,
        sharding=sharding,
        trust_remote_code=trust_remote_code,
        progress=progress(as_json),
        show=(lambda parts: None) if as_json else show,
    )
    print_result(record, as_json, [*result_table(record), last_line(record, "healed checkpoint")])


def data_override(data: str | None) -> list[str]:
    """Return --data as overrides of a training recipe, "key=value" strings."""
    from surgery.training.data.recipe import data_sources

    return [f"data.sources={json.dumps(data_sources(data))}"] if data is not None else []


def print_result(record: dict[str, Any], as_json: bool, parts: list[Any]) -> None:
    """Print the result of a run, on the main process only."""
    if is_main_process():
        print(json.dumps(record, indent=2)) if as_json else show(parts)
