"""The command `surgery teacher-cache`; imports nothing heavy before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.cli import options
from surgery.cli.console import progress, show
from surgery.core.errors import SurgeryError
from surgery.core.files import check_no_links, size_text

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
    """Store the teacher's top-k log-probabilities for the text of a recipe's distill stage, so that training needs no teacher in memory.

    surgery teacher-cache SRC --recipe quick --data corpus.jsonl --out CACHE
    surgery finetune OUT --recipe quick --data corpus.jsonl --set teacher.cache=CACHE
    """
    from surgery.training.recipe import load_healing_recipe

    all_overrides = [
        *(overrides or []),
        *([f"data.sources={json.dumps([{'path': data}])}"] if data is not None else []),
    ]
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
    """Write the cache for the recipe's first stage that trains on the teacher's logits.

    Args:
        name: the teacher, a local folder or a Hub id.
        top_k: log-probabilities stored at each position.
        examples: sequences to store; None: the recipe's data.rows, else all that the stage trains on.

    Returns the index of the cache. Raises SurgeryError if no stage trains on logits or the recipe names no data.
    """
    import torch

    from surgery.calibration.data import load_tokenizer
    from surgery.core.device import choose_device
    from surgery.training.data.dataset import make_data
    from surgery.training.models import DTYPES, check_length, load_causal_lm, open_trainable
    from surgery.training.recipe import stage_data_config
    from surgery.training.stages import STAGES
    from surgery.training.teacher_cache.write_read import write_teacher_cache

    check_no_links(out)
    stage = next((s for s in recipe.stages if STAGES[s](s).needs_teacher == "logits"), None)
    if stage is None:
        raise SurgeryError(
            "the recipe has no stage that trains on the teacher's logits. Use a recipe with a stage of kind distill"
        )
    config = stage_data_config(recipe, stage)
    if config is None:
        raise SurgeryError(
            "the recipe names no data. Give --data (a file, a folder or a Hub id), or set data.sources in the recipe"
        )
    source, place = open_trainable(name, trust_remote_code), choose_device(device or recipe.teacher.device)
    auto = torch.float32 if place.type == "cpu" else torch.bfloat16
    model = load_causal_lm(source, DTYPES.get(recipe.teacher.dtype, auto), trust_remote_code)
    check_length(model, stage.length)
    training_data = make_data(config, load_tokenizer(source.folder, trust_remote_code), stage.length, recipe.seed)
    count = examples or config.rows or stage.steps * stage.batch
    return write_teacher_cache(
        model.to(place), training_data, out, top_k, count, stage.rows, resume=resume, teacher=name, progress=progress,
        weights=source.digest(),
    )  # fmt: skip
