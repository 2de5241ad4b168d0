"""Calibration rows that the original model writes itself (`generated_tokens`): more text to fit to, where only a little
was given.

A row begins with a few tokens of the calibration text, and the original samples the rest from its own distribution, at
temperature 1. On such rows the logits of the original are the exact target of a distillation. Liu et al. 2023,
"LLM-QAT: Data-Free Quantization Aware Training" (arXiv 2305.17888); Williams et al. 2024, "Self-calibration for
Language Model Quantization and Pruning" (arXiv 2410.17170).

Held-out rows stay those of the given text. The original is in memory while it samples.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.data import CalibrationSet, check_model_inputs
from surgery.calibration.sampling import sample_continuations
from surgery.checkpoint.meta_model import MetaModel
from surgery.checkpoint.safetensors_io import TensorSource, read_header, read_tensor, write_shard
from surgery.conversion.context import ConversionContext
from surgery.conversion.score import predicts_next_token
from surgery.core.digests import hash_file
from surgery.core.errors import SurgeryError
from surgery.core.journal import Journal
from surgery.core.progress import Progress
from surgery.planning.recipe import ConversionRecipe

GENERATED_NAME = "generated.safetensors"  # in OUT.partial
PART_NAME = "generated-{}.safetensors"  # rows that were sampled together
PROMPT_TOKENS = 16  # of the calibration text that a row begins with, at most a quarter of the row
MAX_PREFIX = 4  # tokens that begin every window, such as BOS, and begin every sampled row too
# Bytes of keys and values of the rows that are sampled together. They are fixed, because the rows depend on them.
CACHE_BYTES = {"cpu": 2**30, "cuda": 2**34}
MAX_TOGETHER = 512  # rows
SEED_STEP = 1_000_003  # between the seeds of batches


def check_can_generate(inputs: dict[str, Tensor], meta_model: MetaModel, recipe: ConversionRecipe) -> None:
    """Raise SurgeryError if the recipe has `generated_tokens` and the model cannot continue the calibration inputs."""
    if not recipe.generated_tokens:
        return
    name, model = type(meta_model.model).__name__, meta_model.model
    if (
        not (set(inputs) <= {"input_ids", "attention_mask"} and predicts_next_token(meta_model))
        or not model.can_generate()
    ):
        raise SurgeryError(
            f"generated_tokens needs a model that continues text, and text to continue (got {name} and the inputs "
            f"{', '.join(sorted(inputs))}). "
            "Leave generated_tokens out, and give a longer calibration text"
        )
    length = inputs["input_ids"].shape[1]
    if recipe.generated_tokens < length:
        raise SurgeryError(
            f"generated_tokens must make at least one window of {length} tokens (got {recipe.generated_tokens:,}). Set "
            "more, or a smaller length"
        )


def generated_rows(
    ctx: ConversionContext, journal: Journal, original: Callable[[torch.device], AbstractContextManager[Any]]
) -> Tensor:
    """Return the sampled token ids (N, T) of the recipe's `generated_tokens`; those of an interrupted run are read from
    its files.

    original: returns a context manager of the original model on a device. Process 0 samples.
    """
    file, entry = ctx.work_dir / GENERATED_NAME, journal.find("generated")

    def make() -> tuple[Tensor, str]:
        if entry is not None and file.is_file() and hash_file(file) == entry["sha256"]:
            found_NT = read_rows(file, ctx.samples, ctx.recipe.generated_tokens)
            check_model_inputs({"input_ids": found_NT}, ctx.model.model)
            return found_NT, entry["sha256"]
        ctx.progress.say("loading the original, to sample more calibration text from it")
        with original(ctx.device) as model:
            rows_NT = sample_rows(model, ctx.samples, ctx.recipe, ctx.device, ctx.work_dir, ctx.progress)
        return rows_NT, write_shard(file, [TensorSource.from_tensor("input_ids", rows_NT)])

    rows_NT, sha256 = ctx.dist.on_main(make)
    if entry is None:
        journal.add("generated", sha256=sha256)
    elif entry["sha256"] != sha256:
        raise SurgeryError(
            f"{file} was lost or changed, and this machine samples other text, so finished steps do not fit it. Remove "
            f"{ctx.work_dir} "
            "to start again"
        )
    return rows_NT


def read_rows(file: Path, samples: CalibrationSet, tokens: int) -> Tensor:
    """Return the rows of a file (N, T).

    Raises SurgeryError if they are not those of a conversion with these samples.
    """
    header = read_header(file)
    length = samples.inputs["input_ids"].shape[1]
    if (
        set(header) != {"input_ids"}
        or header["input_ids"].shape != (tokens // length, length)
        or header["input_ids"].dtype != "I64"
    ):
        raise SurgeryError(
            f"{file} must hold input_ids ({tokens // length}, {length}) int64. Remove {file.parent} to start again"
        )
    return read_tensor(header["input_ids"])


def with_generated_rows(samples: CalibrationSet, rows_NT: Tensor) -> CalibrationSet:
    """Return the samples with further rows to fit to, behind those of the text. Held-out rows stay the last ones."""
    fit = samples.n_fit

    def joined(x: Tensor, more: Tensor) -> Tensor:
        return torch.cat([x[:fit], more.to(x.dtype), x[fit:]])

    inputs = {"input_ids": joined(samples.inputs["input_ids"], rows_NT)}
    if "attention_mask" in samples.inputs:
        inputs["attention_mask"] = joined(samples.inputs["attention_mask"], torch.ones_like(rows_NT))
    return replace(samples, inputs=inputs, n_fit=fit + len(rows_NT), rows=samples.rows + len(rows_NT))


def draw_prompts(samples: CalibrationSet, count: int, seed: int) -> Tensor:
    """Return prompts (count, P): the tokens that begin all windows, such as BOS, and spans from random places of the
    rows to fit to.
    """
    ids_NT = samples.inputs["input_ids"][: samples.n_fit]
    mask_NT = samples.inputs.get("attention_mask")
    real = [len(row) for row in ids_NT] if mask_NT is None else mask_NT[: samples.n_fit].bool().sum(1).tolist()
    starts = [0] * len(ids_NT) if mask_NT is None else mask_NT[: samples.n_fit].long().argmax(1).tolist()
    rows = [row[start : start + tokens] for row, start, tokens in zip(ids_NT, starts, real)]
    size = min(PROMPT_TOKENS, max(1, ids_NT.shape[1] // 4))
    rows = [row for row in rows if len(row) > MAX_PREFIX + size] or [max(rows, key=len)]
    prefix = 0
    while len(rows) > 1 and prefix < MAX_PREFIX and len({int(row[prefix]) for row in rows}) == 1:
        prefix += 1
    size = min(size, min(map(len, rows)) - prefix)
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(count):
        row = rows[int(torch.randint(len(rows), (1,), generator=generator))]
        first = prefix + int(torch.randint(len(row) - prefix - size + 1, (1,), generator=generator))
        prompts.append(torch.cat([row[:prefix], row[first : first + size]]))
    return torch.stack(prompts)


def sample_rows(
    model: Any,
    samples: CalibrationSet,
    recipe: ConversionRecipe,
    device: torch.device,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Return rows (N, T) of token ids that the model samples, on the CPU.

    The checkpoint's own settings of generation have no effect.

    folder: where rows that were sampled together are stored, and read from if an interrupted run stored them.
    """
    length = samples.inputs["input_ids"].shape[1]
    prompts_NP = draw_prompts(samples, recipe.generated_tokens // length, recipe.seed)
    new = length - prompts_NP.shape[1]
    config, itemsize = model.config.get_text_config(), next(model.parameters()).element_size()
    together = rows_together(config.num_hidden_layers, config.hidden_size, itemsize, length, device.type)
    parts, batches = [], prompts_NP.split(together)
    bar = (progress or Progress()).bar("sampling text from the original", len(prompts_NP))
    try:
        with bar as tick:
            for index, prompts in enumerate(batches):
                file = None if folder is None else folder / PART_NAME.format(index)
                rows = None if file is None else _stored_part(file, prompts, length, config.vocab_size)
                if rows is None:
                    rows = sample_continuations(model, prompts, new, recipe.seed + SEED_STEP * index)
                    if file is not None:
                        write_shard(file, [TensorSource.from_tensor("input_ids", rows)])
                parts.append(rows)
                for _ in range(len(prompts)):
                    tick()
    except torch.OutOfMemoryError:
        raise SurgeryError(
            f"generated_tokens: {type(model).__name__} and the keys of {together} sampled windows of {length} tokens "
            "do "
            f"not fit on {device}. Set a smaller length, or leave generated_tokens out and give a longer calibration "
            "text"
        ) from None
    return torch.cat(parts)


def _stored_part(file: Path, prompts_NP: Tensor, length: int, vocabulary: int) -> Tensor | None:
    """Return the rows (N, T) that an interrupted run sampled from these prompts, None if the file is missing or holds
    others.
    """
    if not file.is_file():
        return None
    try:
        header = read_header(file)
    except SurgeryError:
        return None
    info = header.get("input_ids")
    if info is None or info.shape != (len(prompts_NP), length) or info.dtype != "I64":
        return None
    rows_NT = read_tensor(info)
    known = bool(((rows_NT >= 0) & (rows_NT < vocabulary)).all())
    return rows_NT if known and torch.equal(rows_NT[:, : prompts_NP.shape[1]], prompts_NP) else None


def rows_together(layers: int, width: int, itemsize: float, length: int, device: str) -> int:
    """Return how many rows of `length` tokens are sampled together.

    Counted are keys and values as wide as the hidden states.

    itemsize: bytes of an element. device: `cpu` or `cuda`.
    """
    row = 2 * layers * width * itemsize * length
    return int(max(1, min(MAX_TOGETHER, CACHE_BYTES.get(device, CACHE_BYTES["cpu"]) // row)))
