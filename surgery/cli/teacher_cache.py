"""The command `surgery teacher-cache`; imports nothing heavy before it runs."""

from __future__ import annotations

import json

from surgery.cli import options
from surgery.cli.console import progress, show
from surgery.cli.finetune import data_override
from surgery.core.files import size_text


def teacher_cache(
    source: options.Source,
    recipe: options.HealingName,
    out: options.CacheOut,
    data: options.TrainingData = None,
    top_k: options.TopK = 64,
    examples: options.Examples = None,
    overrides: options.Overrides = None,
    tiny: options.Tiny = False,
    resume: options.ResumeCache = False,
    device: options.Device = None,
    trust_remote_code: options.TrustRemoteCode = False,
    plugins: options.Plugins = None,
    as_json: options.Json = False,
) -> None:
    """Store the teacher's top-k log-probabilities for the text of a recipe's distill stage, so that training needs no
    teacher in memory.

    surgery teacher-cache SRC --recipe attention --data corpus.jsonl --out CACHE
    surgery finetune OUT --recipe attention --data corpus.jsonl --set teacher.cache=CACHE
    """
    from surgery.training.auto_recipe import refuse_auto
    from surgery.training.recipe import load_healing_recipe
    from surgery.training.teacher_cache.build import build_teacher_cache

    refuse_auto(recipe)
    all_overrides = [*(overrides or []), *data_override(data)]
    index = build_teacher_cache(
        source,
        load_healing_recipe(recipe, all_overrides, tiny),
        out,
        top_k,
        examples,
        resume=resume,
        device=device,
        trust_remote_code=trust_remote_code,
        progress=progress(as_json),
    )
    if as_json:
        print(json.dumps(index, indent=2))
        return
    size = sum(shard["bytes"] for shard in index["shards"])
    show([f"{index['examples']:,} sequences of {index['length']:,} tokens, {size_text(size)}: {out}"])
