"""Healing recipes: the training stages in order and the settings they share. YAML, validated completely before a run.

description: ..
data: {sources: [{path: corpus.jsonl}], validation: 0.01}
common: {batch: 64, schedule: {name: cosine}}          # defaults of all stages
stages:
  - {kind: align, length: 512, tokens: 100M, rate: 1e-3}
  - {kind: distill, length: 4096, tokens: 600M, rate: 1e-5, trains: [all]}
tiny: {stages.*.tokens: 4096}                           # overrides that --tiny applies
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny, ValidationError, field_validator

from surgery.core.config import (
    MAX_BYTES,
    Count,
    Real,
    StrictModel,
    apply_override,
    deep_merge,
    read_yaml,
    set_by_path,
    validation_error,
)
from surgery.core.errors import SurgeryError, suggestion
from surgery.planning.recipe import check_mapping, recipes_folder
from surgery.planning.renamed import OLD_HEALING_RECIPES, renew_healing_path, renew_healing_recipe, warn_renamed
from surgery.training.data.recipe import DataConfig
from surgery.training.stages import STAGES, StageConfig


class TeacherConfig(StrictModel):
    """Settings of the teacher.

    device: for example cuda:1; None: the student's device. dtype: of its weights; auto: float32 on the CPU, bfloat16
    elsewhere. cache: a folder written by `surgery teacher-cache`, used instead of a model by stages that only need
    logits.
    """

    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    cache: str | None = None


class GuardConfig(StrictModel):
    """When a run stops as diverged.

    diverged: factor over the best mean loss above which a loss counts as diverged (at least 1 nat above).
    patience: consecutive log entries above that limit before the run stops.
    """

    diverged: Annotated[Real, Field(gt=1)] = 3.0
    patience: Annotated[int, Field(ge=1)] = 3


class HealingRecipe(StrictModel):
    """The recipe of `surgery finetune` (docs/finetune.md).

    log, evaluate, checkpoint: intervals in steps. evaluate: None is a tenth of the run; 0 evaluates only after stages.
    checkpoints: number of the latest checkpoints that are kept. precision: of autocast (weights stay in float32); auto is
    bf16 on GPUs that support it. deliver: `best`, the weights with the lowest validation loss (those at the start are a
    candidate), or `last`. rates_to_try: peak rates of the last stage; each trains a share `trial_share` of the tokens, and
    the best on validation text is used. cuda_graph: run loss and backward pass as a CUDA graph (one GPU, data.packing:
    stream).
    """

    description: str = ""
    data: dict[str, Any] = Field(default_factory=dict)
    stages: tuple[SerializeAsAny[StageConfig], ...]
    teacher: TeacherConfig = TeacherConfig()
    guard: GuardConfig = GuardConfig()
    precision: Literal["auto", "float32", "bf16", "fp16"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    log: Annotated[Count, Field(ge=1)] = 10
    evaluate: Annotated[Count, Field(ge=0)] | None = None
    deliver: Literal["best", "last"] = "best"
    checkpoint: Annotated[Count, Field(ge=0)] = 500
    checkpoints: Annotated[int, Field(ge=1)] = 2
    rates_to_try: tuple[Annotated[Real, Field(gt=0, allow_inf_nan=False)], ...] = ()
    trial_share: Annotated[Real, Field(gt=0, le=1)] = 0.25
    cuda_graph: bool = False

    @field_validator("rates_to_try")
    @classmethod
    def _check_rates(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        if len(rates) == 1 or len({f"{rate:g}" for rate in rates}) < len(rates):
            raise ValueError(f"must be two or more different rates, or empty (got {list(rates)})")
        return rates

    @property
    def evaluates(self) -> int:
        """Steps between two evaluations on validation text; 0: only after stages."""
        return self.evaluate if self.evaluate is not None else -(-sum(stage.steps for stage in self.stages) // 10)


def load_healing_recipe(
    name: str | Mapping[str, Any],
    overrides: list[str] | tuple[str, ...] = (),
    tiny: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> HealingRecipe:
    """Load a shipped recipe by name, a YAML file by path, or a recipe given as a dict. overrides: texts KEY=VALUE; tiny: apply the recipe's `tiny`
    block. settings: values by dotted path that replace the file's before both (auto_recipe.py).

    Names of version 0.2 are accepted with a RenamedWarning.
    """
    old = OLD_HEALING_RECIPES.get(name) if isinstance(name, str) else None
    data, where = read_recipe_file(name if old is None else old.recipe, _healing_folder(), "healing")
    if old is not None:
        data = old.change(data)
        warn_renamed([f"{name} is now {old.words}"])
    for path, value in (settings or {}).items():
        set_by_path(data, path, value)
    return parse_healing_recipe(apply_settings(data, where, overrides, tiny), with_overrides(where, overrides))


def with_overrides(where: str, overrides: list[str] | tuple[str, ...]) -> str:
    """Return the name of a recipe for messages, with its overrides."""
    return " with override ".join([where, *overrides])


def read_recipe_file(name: str | Mapping[str, Any], folder: Path, kind: str) -> tuple[dict[str, Any], str]:
    """Read a recipe, shipped in `folder`, a YAML file or a dict. Return (its keys, its name for messages)."""
    if isinstance(name, Mapping):
        data, notes = renew_healing_recipe(copy.deepcopy(dict(name)))
        warn_renamed(notes)
        return data, "recipe (given as a dict)"
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = folder / f"{name}.yaml"
        if not path.is_file():
            names = [p.stem for p in folder.glob("*.yaml")]
            raise SurgeryError(
                f"no {kind} recipe is named {name!r}{suggestion(name, names)} (a file is given by its path, ending in "
                ".yaml)"
            )
    data, notes = renew_healing_recipe(_read_yaml_mapping(path))
    warn_renamed(notes)
    return data, f"recipe {path}"


def apply_settings(
    data: dict[str, Any], where: str, overrides: list[str] | tuple[str, ...], tiny: bool
) -> dict[str, Any]:
    """Return a recipe's keys without its block `tiny`, which is applied if asked for, and with the overrides
    KEY=VALUE.
    """
    small = data.pop("tiny", None)
    if tiny:
        if not isinstance(small, dict):
            raise SurgeryError(
                f"{where} has no block `tiny`, which --tiny needs. Add one, for example tiny: {{stages.*.tokens: 4096}}"
            )
        for key, value in small.items():
            set_by_path(data, _renew_path(str(key), data), value)
    for text in overrides:
        key, equals, value = text.partition("=")
        apply_override(data, f"{_renew_path(key.strip(), data)}{equals}{value}")
    return data


def _renew_path(path: str, data: dict[str, Any]) -> str:
    """Return the path of an override in today's words, with a warning of an old one."""
    renewed, notes = renew_healing_path(path, data)
    warn_renamed(notes)
    return renewed


def parse_healing_recipe(data: dict[str, Any], where: str = "recipe") -> HealingRecipe:
    """Validate the keys of a healing recipe. where: name of the recipe in error messages."""
    data, notes = renew_healing_recipe(data)
    warn_renamed(notes)
    common, stages = data.pop("common", None) or {}, data.pop("stages", None)
    if not isinstance(common, dict):
        raise SurgeryError(
            f"{where}: common must be a mapping of keys that all stages share, for example {{batch: 64}}"
        )
    if not isinstance(stages, list) or not stages:
        raise SurgeryError(
            f"{where}: stages must list at least one stage, for example [{{kind: lm, tokens: 20M, rate: 1e-4}}]"
        )
    data["stages"] = tuple(_parse_stage(stage, common, f"{where}, stage {i}") for i, stage in enumerate(stages))
    try:
        recipe = HealingRecipe.model_validate(data)
    except ValidationError as error:
        raise validation_error(error, where, HealingRecipe, ("common", "tiny")) from None
    for stage in recipe.stages:
        _check_rows(stage, stage_data_config(recipe, stage), where)
    return recipe


def _check_rows(stage: StageConfig, data: DataConfig | None, where: str) -> None:
    """Raise SurgeryError if the rows of the data are not what the stage reads."""
    rows = data.generated.inputs if data is not None and data.generated is not None else "ids"
    reads = STAGES[stage].reads
    if data is not None and rows != reads:
        fitting = " or ".join(new_model_stages(rows))
        raise SurgeryError(
            f"{where}: stage {stage.kind} reads rows of {reads}, and its data has rows of {rows}. Use a stage of kind "
            f"{fitting}."
        )
    if data is not None and data.generated is not None:
        data.generated.check_length(stage.length)


def new_model_stages(rows: str | None = None) -> list[str]:
    """Return the kinds of stages that train a new model, without a teacher. rows: only those that read `ids` or
    `values`.
    """
    types = {name: STAGES[STAGES.config_type(name)] for name in STAGES.names()}
    return [name for name, stage in types.items() if stage.fits_new_models and rows in (None, stage.reads)]


def stage_data_config(recipe: HealingRecipe, stage: StageConfig) -> DataConfig | None:
    """Return the recipe's data settings with the stage's overrides, or None if neither a source nor a generated task is
    named (--data names a source)."""
    both = deep_merge(recipe.data, stage.data)
    try:
        config = DataConfig.model_validate(both if both.get("generated") else {"sources": ".", **both})
    except ValidationError as error:
        raise validation_error(error, f"stage {stage.kind}: data", DataConfig) from None
    return config if both.get("sources") or both.get("generated") else None


def _parse_stage(data: Any, common: dict[str, Any], where: str) -> StageConfig:
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise SurgeryError(f"{where}: a stage must be a mapping with a kind, one of {', '.join(STAGES.names())}")
    config_type: Any = STAGES.config_type(data["kind"])
    shared = {k: v for k, v in common.items() if k in config_type.model_fields}
    every: list[Any] = list(STAGES)
    unknown_keys = [k for k in common if not any(k in t.model_fields for t in every)]
    if unknown_keys:
        raise SurgeryError(f"{where}: common has {unknown_keys[0]!r}, which no stage has as a key")
    try:
        return config_type.model_validate(deep_merge(shared, data))
    except ValidationError as error:
        raise validation_error(error, where, config_type) from None


def _healing_folder() -> Path:
    return recipes_folder() / "healing"


def _read_yaml_mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SurgeryError(f"recipe file {path} does not exist")
    if path.stat().st_size > MAX_BYTES:
        raise SurgeryError(f"recipe file {path} must have at most {MAX_BYTES:,} bytes (got {path.stat().st_size:,})")
    try:
        data = read_yaml(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        raise SurgeryError(f"recipe {path} is not YAML: {error}") from None
    check_mapping(data, str(path), "stages: [{kind: lm, tokens: 20M, rate: 1e-4}]")
    return dict(data)
