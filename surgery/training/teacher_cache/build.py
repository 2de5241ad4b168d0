"""Write the teacher cache of a recipe: the teacher's top-k log-probabilities for the text of the first stage that
trains on them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from surgery.calibration.data import load_tokenizer
from surgery.core.device import choose_device
from surgery.core.errors import SurgeryError
from surgery.core.files import check_no_links
from surgery.training.data.dataset import make_data
from surgery.training.models import DTYPES, check_length, load_causal_lm, open_trainable
from surgery.training.recipe import HealingRecipe, stage_data_config
from surgery.training.stages import STAGES
from surgery.training.teacher_cache.write_read import write_teacher_cache


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
    source, teacher_device = open_trainable(name, trust_remote_code), choose_device(device or recipe.teacher.device)
    auto = torch.float32 if teacher_device.type == "cpu" else torch.bfloat16
    model = load_causal_lm(source, DTYPES.get(recipe.teacher.dtype, auto), trust_remote_code)
    check_length(model, stage.length)
    training_data = make_data(config, load_tokenizer(source.folder, trust_remote_code), stage.length, recipe.seed)
    count = examples or config.rows or stage.steps * stage.batch
    return write_teacher_cache(
        model.to(teacher_device), training_data, out, top_k, count, stage.rows, resume=resume, teacher=name, progress=progress,
        weights=source.digest(),
    )  # fmt: skip
