"""The command `surgery pretrain`; imports nothing heavy before it runs."""

from __future__ import annotations

import json

import typer

from surgery.cli import options
from surgery.cli.console import progress, show
from surgery.cli.eval import command_words
from surgery.cli.finetune import data_override, print_result


def pretrain(
    context: typer.Context,
    recipe: options.PretrainName,
    out: options.PretrainedOut,
    data: options.TrainingData = None,
    model: options.NewModel = None,
    tokenizer: options.NewTokenizer = None,
    overrides: options.Overrides = None,
    tiny: options.Tiny = False,
    resume: options.ResumeTraining = False,
    skip_bad_steps: options.SkipBadSteps = False,
    track: options.Track = None,
    device: options.Device = None,
    gpus: options.Gpus = None,
    plugins: options.Plugins = None,
    as_json: options.Json = False,
) -> None:
    """Train a model with structured layers from scratch, with muP learning rates.

    surgery pretrain --recipe gpt2-btt --data corpus.jsonl --out OUT
    """
    from surgery.training.data.prefetch import limit_tokenizer_threads
    from surgery.training.distributed.launch import check_gpus, run_workers
    from surgery.training.logging import last_line, result_table
    from surgery.training.pretrain.model_config import load_config_keys
    from surgery.training.pretrain.pretrain import pretrain as run
    from surgery.training.pretrain.recipe import load_pretrain_recipe

    limit_tokenizer_threads()
    all_overrides = [f"model={json.dumps(load_config_keys(model))}"] if model is not None else []
    all_overrides += overrides or []
    all_overrides += data_override(data)
    all_overrides += [f"tokenizer.path={json.dumps(tokenizer)}"] if tokenizer is not None else []
    loaded = load_pretrain_recipe(recipe, all_overrides, tiny)
    if workers := check_gpus(gpus, device):
        run_workers(command_words(context)[1:], workers)
        return
    record = run(
        loaded,
        out,
        resume=resume,
        skip_bad_steps=skip_bad_steps,
        track=track,
        device=device,
        progress=progress(as_json),
        show=(lambda parts: None) if as_json else show,
    )
    print_result(record, as_json, [*result_table(record, UNTRAINED_LABELS), last_line(record, "trained checkpoint")])


UNTRAINED_LABELS = (("before", "untrained"), ("after", "trained"))
