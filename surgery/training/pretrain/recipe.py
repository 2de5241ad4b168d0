"""Pretraining recipes: the model, the structures of its linears and attention, the tokenizer; other keys as in a
healing recipe.

model: {model_type: gpt2, n_embd: 768, n_layer: 12, n_head: 12}      # keys of the family's config in transformers
layers: {structure: btt, blocks: sqrt, rank: 4, fused: split}         # of a conversion recipe, or its name; null: all dense
tokenizer: {kind: bpe, vocab_size: 32768}
common: {optimiser: {base_width: 256}}                                # the width whose best rate `rate` is
stages:
  - {kind: lm, tokens: 10B, length: 1024, rate: 2e-3}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from surgery.core.config import Real, StrictModel, deep_merge, validation_error
from surgery.core.errors import SurgeryError
from surgery.planning.recipe import ConversionRecipe, load_recipe, recipes_folder, validate_recipe
from surgery.training.pretrain.initialize import LowRankStart
from surgery.training.pretrain.tokenizer import TokenizerConfig
from surgery.training.recipe import (
    HealingRecipe,
    apply_settings,
    new_model_stages,
    parse_healing_recipe,
    read_recipe_file,
    with_overrides,
)
from surgery.training.stages import STAGES

FOLDER = "pretrain"


class NewModelConfig(StrictModel):
    """The keys that a healing recipe does not have. embedding_std: initial standard deviation of token and position
    embeddings. low_rank_start: initialization of the first factor of low-rank layers, "spectral" or "unit" (see
    pretrain/initialize.py)."""

    model: dict[str, Any]
    layers: dict[str, Any] | str | None = None
    tokenizer: TokenizerConfig = TokenizerConfig()
    embedding_std: Annotated[Real, Field(gt=0)] = 0.02
    low_rank_start: LowRankStart = "spectral"


class PretrainRecipe(StrictModel):
    """A pretraining recipe. new: the model; structure: conversion recipe of its layers, None for dense; training: the
    stages.
    """

    new: NewModelConfig
    structure: ConversionRecipe | None
    training: HealingRecipe


def pretrain_folder() -> Path:
    """Return the folder of the shipped pretraining recipes."""
    return recipes_folder() / FOLDER


def load_pretrain_recipe(name: str, overrides: list[str] | tuple[str, ...] = (), tiny: bool = False) -> PretrainRecipe:
    """Load a shipped recipe by name or a YAML file by path. tiny: apply the recipe's `tiny` block."""
    data, where = read_recipe_file(name, pretrain_folder(), "pretraining")
    return parse_pretrain_recipe(apply_settings(data, where, overrides, tiny), with_overrides(where, overrides))


def parse_pretrain_recipe(data: dict[str, Any], where: str = "recipe") -> PretrainRecipe:
    """Validate the keys of a pretraining recipe. where: name of the recipe in error messages."""
    model_keys = {key: data[key] for key in NewModelConfig.model_fields if key in data}
    rest = {key: value for key, value in data.items() if key not in model_keys}
    try:
        new = NewModelConfig.model_validate(model_keys)
    except ValidationError as error:
        raise validation_error(error, where, NewModelConfig) from None
    if not isinstance(new.model.get("model_type"), str):
        raise SurgeryError(
            f"{where}: model must have a model_type, for example model: {{model_type: gpt2, n_embd: 256}}"
        )
    common = rest.get("common") or {}
    if isinstance(common, dict):  # anything else is rejected by parse_healing_recipe
        common = deep_merge({"trains": ["all"]}, common)
    training = parse_healing_recipe({**rest, "common": common}, where)
    for stage in training.stages:
        if not STAGES[stage].fits_new_models:
            raise SurgeryError(
                f"{where}: stage {stage.kind} needs a teacher, which a new model does not have. Use stages of kind "
                f"{' or '.join(new_model_stages())}."
            )
    structure = _conversion_recipe(new.layers, where)
    if structure is not None and "auto" in (structure.structure, *(rule.structure for rule in structure.rules)):
        raise SurgeryError(
            f"{where}: layers: auto chooses the structure that fits trained weights best, and a new model has none. "
            "Name a structure, e.g. btt."
        )
    if structure is not None and structure.speed is not None:
        raise SurgeryError(
            f"{where}: layers: speed spreads time by the error of trained weights, and a new model has none. Give keep "
            "and round_ranks"
        )
    return PretrainRecipe(new=new, structure=structure, training=training)


def _conversion_recipe(layers: dict[str, Any] | str | None, where: str) -> ConversionRecipe | None:
    if not layers:
        return None
    return load_recipe(layers) if isinstance(layers, str) else validate_recipe(layers, f"{where}, layers")
