"""The command `surgery pretrain`; imports nothing heavy before it runs."""

from __future__ import annotations

import json

from surgery.cli import options
from surgery.cli.console import progress, show
from surgery.cli.finetune import reading, tell


def pretrain(
    recipe: options.PretrainName,
    out: options.Pretrained,
    data: options.TrainingData = None,
    model: options.NewModel = None,
    tokenizer: options.NewTokenizer = None,
    overrides: options.Overrides = None,
    tiny: options.Tiny = False,
    resume: options.ResumeTraining = False,
    skip_bad_steps: options.SkipBadSteps = False,
    track: options.Track = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Train a model with structured layers from scratch, with muP; `accelerate launch -m surgery pretrain ..` on many devices.

    surgery pretrain --recipe gpt2-btt --data corpus.jsonl --out OUT
    """
    from surgery.training.data.prefetch import one_thread
    from surgery.training.logging import last_line, result_table
    from surgery.training.pretrain.model_config import keys_of_config
    from surgery.training.pretrain.pretrain import pretrain as run
    from surgery.training.pretrain.recipe import load_pretrain

    one_thread()
    given = [f"model={json.dumps(keys_of_config(model))}"] if model is not None else []
    given += overrides or []
    given += reading(data)
    given += [f"tokenizer.path={json.dumps(tokenizer)}"] if tokenizer is not None else []
    record = run(
        load_pretrain(recipe, given, tiny),
        out,
        resume=resume,
        skip_bad_steps=skip_bad_steps,
        track=track,
        device=device,
        progress=progress(as_json),
        show=(lambda parts: None) if as_json else show,
    )
    tell(record, as_json, [*result_table(record, UNTRAINED), last_line(record, "trained checkpoint")])


UNTRAINED = (("before", "untrained"), ("after", "trained"))
