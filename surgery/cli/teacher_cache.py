"""The command `surgery teacher-cache`; imports nothing heavy before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.cli import options
from surgery.cli.console import progress, show
from surgery.core.errors import SurgeryError
from surgery.core.files import refuse_links_in, size_text

if TYPE_CHECKING:
    from surgery.training.recipe import HealingRecipe


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
    as_json: options.Json = False,
) -> None:
    """Write down what a teacher says of the text of a recipe's distill stage, so that it need not be in memory.

    surgery teacher-cache SRC --recipe quick --data corpus.jsonl --out CACHE
    surgery finetune OUT --recipe quick --data corpus.jsonl --set teacher.cache=CACHE
    """
    from surgery.training.recipe import load_healing_recipe

    given = [*(overrides or []), *([f"data.sources={json.dumps([{'path': data}])}"] if data is not None else [])]
    index = build_teacher_cache(
        source,
        load_healing_recipe(recipe, given, tiny),
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
    show([f"{index['examples']:,} rows of {index['length']:,} tokens, {size_text(size)}: {out}"])


def build_teacher_cache(
    name: str,
    recipe: HealingRecipe,
    out: Path,
    top_k: int,
    examples: int | None,
    *,
    resume: bool,
    device: str | None,
    trust_remote_code: bool,
    progress: Any,
) -> dict[str, Any]:
    """The index of the cache for the recipe's first stage that learns from logits. examples: None for all its rows."""
    import torch

    from surgery.calibration.data import load_tokenizer
    from surgery.core.device import choose_device
    from surgery.training.data.dataset import make_data
    from surgery.training.models import DTYPES, check_length, load_causal_lm, open_trainable
    from surgery.training.recipe import stage_data_config
    from surgery.training.stages import STAGES
    from surgery.training.teacher_cache.write_read import write_teacher_cache

    refuse_links_in(out)
    stage = next((s for s in recipe.stages if STAGES[s](s).needs_teacher == "logits"), None)
    if stage is None:
        raise SurgeryError("the recipe has no stage that learns from logits; a cache is for stages of kind distill")
    config = stage_data_config(recipe, stage)
    if config is None:
        raise SurgeryError("no data to read; give --data FILE, a folder or a Hub id, or the recipe data.sources")
    source, place = open_trainable(name, trust_remote_code), choose_device(device or recipe.teacher.device)
    auto = torch.float32 if place.type == "cpu" else torch.bfloat16
    model = load_causal_lm(source, DTYPES.get(recipe.teacher.dtype, auto), trust_remote_code)
    check_length(model, stage.length)
    made = make_data(config, load_tokenizer(source.folder, trust_remote_code), stage.length, recipe.seed)
    count = examples or config.rows or stage.steps * stage.batch
    return write_teacher_cache(
        model.to(place), made, out, top_k, count, stage.rows, resume=resume, teacher=name, progress=progress,
        weights=source.digest(),
    )  # fmt: skip
