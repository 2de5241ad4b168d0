"""Conversion recipes: flat YAML files without loops, validated completely before anything runs.

structure: btt        # or auto (choose among candidates), or dense (leave unchanged)
blocks: [4, 4]
towers: all           # of a model of text and images: auto (the text tower if it generates text, else all), all, or names
keep: 0.5             # fraction of the parameters of the replaced weights; or {pattern: fraction}
speed: {decode: 1.4, device: NVIDIA H200}   # instead of keep: a target of time, see speed_recipe.py
rules:                # later rules win; match: a role or a path, with * and ?
  - {match: mlp.down, keep: 0.7}
  - {match: attention.key, structure: dense, layers: "2:-2"}
  - {match: "expert.*", structure: low_rank, share: experts}    # one basis for the experts of a layer, see shared_bases.py
  - {match: "attention.*", share: input}    # one matrix for query, key and value, see joined.py
  - {match: "mlp.*", structure: pruned}     # fewer neurons, see pruned_mlps.py; width: 768, or uniform: one for all layers
  - {match: "expert.*", structure: pruned}        # fewer neurons in every routed expert, one width for all
  - {match: "mlp.*", structure: dropped, layers: "20:24"}       # no MLP, see surgery/structures/dropped.py
  - {match: "attention.*", structure: pruned}     # fewer heads, see pruned_heads.py; groups: 4, or uniform
depth: {drop: 8}      # fewer layers, see depth_recipe.py; all other keys are of the model without them
experts: 6            # fewer routed experts in each layer, see fewer_experts.py; all other keys are of the model with these
attention: {mixer: linear, mask: decay}    # see attention_recipe.py
tune: {model: 20}     # epochs of training on the calibration text after the fit

Words of older versions are accepted, see renamed.py.
"""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, field_validator, model_validator

from surgery.architectures import ROLES
from surgery.core.config import MAX_BYTES, check_layer_range, is_layer_selected, read_yaml, section_keys
from surgery.core.errors import SurgeryError, suggestion
from surgery.planning.attention_recipe import AttentionRecipe
from surgery.planning.depth_recipe import DepthRecipe
from surgery.planning.renamed import OLD_HEALING_RECIPES, renew_override, renew_recipe, warn_renamed
from surgery.planning.speed_recipe import SpeedRecipe
from surgery.structures import STRUCTURES

if TYPE_CHECKING:
    from surgery.mixers.native_config import Native

Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1, strict=True)]
BlockShape = Literal["sqrt", "budget"] | Count | tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]
Rank = Literal["full"] | Annotated[int, Field(ge=1)]
Grid = tuple[Count, Count] | tuple[Count, Count, Count]  # with the largest block rank
Levels = Annotated[int, Field(ge=1, le=32, strict=True)] | tuple[Count | Grid | Literal["sqrt", "monarch"], ...]
Width = Literal["uniform"] | Count  # neurons of a pruned MLP, or key/value heads of pruned attention
Multiple = Annotated[int, Field(ge=1, le=4096, strict=True)]
Cores = Annotated[int, Field(ge=2, le=16, strict=True)]
LevelRanks = tuple[Annotated[int, Field(ge=0, strict=True)], ...]
Sharing = Literal["none", "experts", "input"]  # what shares one right factor
Epochs = Annotated[int, Field(ge=0, le=1000, strict=True)]
STRUCTURE_KEYS = (
    "blocks",
    "levels",
    "ranks",
    "cores",
    "rank",
    "order",
    "width",
    "multiple",
    "groups",
)  # keys that are options of the structure

SIZE_KEYS = ("rank", "ranks", "width", "groups")  # those that give a size, which the budget chooses otherwise


def is_given(size: Any) -> bool:
    """Return whether the value of a size key is a size, and not left to the budget."""
    return size not in (None, "uniform")


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _check_structure(name: str | None) -> str | None:
    if name is not None and name not in ("auto", "dense"):
        STRUCTURES.config_type(name)
    return name


class Rule(_StrictModel):
    """Settings for the modules that match a pattern. Omitted fields keep their values."""

    match: str
    layers: str | None = None
    structure: str | None = None
    keep: Share | None = None
    blocks: BlockShape | None = None
    levels: Levels | None = None
    ranks: LevelRanks | None = None
    cores: Cores | None = None
    rank: Rank | None = None
    order: Literal["contiguous", "strided"] | None = None
    width: Width | None = None
    multiple: Multiple | None = None
    groups: Width | None = None
    fused: Literal["whole", "split"] | None = None
    share: Sharing | None = None

    _structure = field_validator("structure")(_check_structure)
    _layers = field_validator("layers", mode="before")(check_layer_range)

    @field_validator("match")
    @classmethod
    def _check_match(cls, pattern: str) -> str:
        is_word = re.fullmatch(r"[a-z_]+(\.[a-z_]+)?", pattern) is not None
        if is_word and pattern.split(".")[0] in ("attention", "mlp", "expert", "head") and pattern not in ROLES:
            raise SurgeryError(f"rules: unknown role {pattern!r}{suggestion(pattern, ROLES)}")
        return pattern


class LinearSettings(BaseModel):
    """The settings of one linear after all rules are applied."""

    structure: str
    keep: float
    blocks: BlockShape | None = None
    levels: Levels | None = None
    ranks: LevelRanks | None = None
    cores: Cores | None = None
    rank: Rank | None = None
    order: Literal["contiguous", "strided"] | None = None
    width: Width | None = None
    multiple: Multiple | None = None
    groups: Width | None = None
    fused: Literal["whole", "split"] = "whole"
    share: Sharing = "none"


class TuneRecipe(_StrictModel):
    """Epochs of training on the calibration text after the fit; 0 switches a part off.

    layers: each converted layer, towards the output of the original layer. model: all converted layers together,
    towards the original's logits. norms: whether norms and the biases of linears are trained beside the new parameters.
    """

    layers: Epochs = 0
    model: Epochs = 0
    norms: StrictBool = False

    @property
    def is_on(self) -> bool:
        """Whether anything is trained."""
        return bool(self.layers or self.model)


class NativeRecipe(_StrictModel):
    """Level weights of native linear layers. levels, block: see `Native`. layers: range of layer numbers, counted among
    the native linear layers."""

    levels: int = 12
    block: int = 64
    layers: str = ":"

    _layers = field_validator("layers", mode="before")(check_layer_range)

    @model_validator(mode="after")
    def _check_options(self) -> NativeRecipe:
        self.config()
        return self

    def config(self) -> Native:
        """Return the config of the mixer."""
        # Imported by recipes that add level weights.
        from surgery.mixers.native_config import Native

        return Native(self.levels, self.block)


class StockRecipe(_StrictModel):
    """Linear attention as the layers of a class of transformers have it (surgery.planning.stock_classes).

    linear: gated-deltanet, of Qwen3.5, or kda, Kimi delta attention of Ling 3.0. interval: layers whose number, counted
    from 1, is a multiple of it keep softmax attention. layers: range of layer numbers; layers outside of it keep softmax
    too. steps: of Adam, which train each new layer towards the output of the attention that it replaces.
    """

    linear: Literal["gated-deltanet", "kda"] = "gated-deltanet"
    interval: Annotated[int, Field(ge=2, strict=True)] = 4
    layers: str = ":"
    steps: Annotated[int, Field(ge=0, le=100_000, strict=True)] = 100

    _layers = field_validator("layers", mode="before")(check_layer_range)


class CalibrationText(_StrictModel):
    """One of several calibration texts. path: a file or a Hub data set. weight: relative share of the tokens."""

    path: str
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)


CostValue = Annotated[int, Field(ge=0, lt=2**62, strict=True)]
Nats = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]  # per token


class FrontPoint(_StrictModel):
    """A point of a front. value: of the cost. loss, low, high: predicted loss and its interval, nats per token."""

    value: CostValue
    loss: Nats
    low: Nats
    high: Nats


class FrontRecipe(_StrictModel):
    """The front of `surgery search` that the recipe is a point of; it changes nothing about the conversion.

    cost: what the points differ in; times in nanoseconds. limit: of the cost. original: its value in the unconverted
    model. at: tokens of the sequence whose cache and times count. healing: whether losses are those after healing.
    chosen: the number of the recipe's own point, from 1.
    """

    cost: Literal["parameters", "bytes", "cache", "decode", "prefill"]
    limit: CostValue
    original: CostValue
    at: Annotated[int, Field(ge=1, lt=2**62, strict=True)]
    healing: StrictBool
    chosen: Annotated[int, Field(ge=1, strict=True)]
    points: Annotated[tuple[FrontPoint, ...], Field(min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _check_points(self) -> FrontRecipe:
        if self.chosen > len(self.points):
            raise SurgeryError(
                f"front: chosen must be the number of one of the {len(self.points)} points (got {self.chosen})"
            )
        if wrong := [point for point in self.points if not point.low <= point.loss <= point.high]:
            raise SurgeryError(f"front: loss must lie between low and high (got {wrong[0]})")
        return self

    @property
    def own(self) -> FrontPoint:
        """The point of the recipe."""
        return self.points[self.chosen - 1]


class ConversionRecipe(_StrictModel):
    """A conversion recipe. `surgery recipes` lists the shipped ones; docs/recipes.md explains every key."""

    description: str = ""
    aim: str = ""  # with `cost`: for `surgery recipes`
    cost: str = ""
    front: FrontRecipe | None = None  # of the search that wrote the recipe
    structure: str = "btt"
    keep: Share = 0.5  # or {pattern: share}, see _keep_patterns
    blocks: BlockShape | None = None
    levels: Levels | None = None
    ranks: LevelRanks | None = None
    cores: Cores | None = None
    rank: Rank | None = None
    order: Literal["contiguous", "strided"] | None = None
    width: Width | None = None
    multiple: Multiple | None = None
    groups: Width | None = None
    speed: SpeedRecipe | None = None  # instead of `keep`
    round_ranks: int = Field(1, ge=1, le=4096, strict=True)  # ranks chosen by the budget are multiples of it
    layers: str = ":"
    towers: str | tuple[str, ...] = "auto"
    fused: Literal["whole", "split"] = "whole"
    share: Sharing = "none"
    rules: tuple[Rule, ...] = ()
    depth: DepthRecipe | None = None
    experts: Annotated[int, Field(ge=1, strict=True)] | None = None
    attention: AttentionRecipe | None = None
    native: NativeRecipe | None = None
    stock: StockRecipe | None = None
    candidates: tuple[str, ...] = ("low_rank", "pivoted_low_rank", "btt", "monarch")

    allocate: Literal["measured", "uniform"] = "measured"
    curvature: Literal["auto", "full", "diagonal", "none"] = "auto"
    calibrate: Literal["sequential", "independent"] = "sequential"
    sweeps: int = Field(6, ge=0, le=1000)
    damping: float = Field(0.01, gt=0, le=1)
    tune: TuneRecipe | None = None

    calibration: str | tuple[CalibrationText, ...] | None = None
    tokens: int = Field(16384, ge=64)
    generated_tokens: int = Field(0, ge=0, le=2**31, strict=True)  # sampled from the original and fitted to as well
    length: int = Field(1024, ge=8)
    holdout: float = Field(0.125, gt=0, lt=1)
    seed: int = Field(0, ge=0, lt=2**63)

    _structure = field_validator("structure")(_check_structure)
    _layers = field_validator("layers", mode="before")(check_layer_range)

    @field_validator("tune", mode="before")
    @classmethod
    def _switch_tuning_off(cls, value: Any) -> Any:
        return None if value is False else value

    @field_validator("calibration", mode="before")
    @classmethod
    def _normalize_calibration(cls, value: Any) -> Any:
        """Accept paths alone, and one text in a list or without one."""
        if isinstance(value, (dict, CalibrationText)):
            value = (value,)
        if not isinstance(value, (list, tuple)):
            return value
        if not value:
            raise SurgeryError("calibration: name at least one text, for example [code.txt, english.txt]")
        texts = tuple({"path": one} if isinstance(one, str) else one for one in value)
        (only, *others), known = texts, CalibrationText.model_fields.keys()
        is_one = not others and isinstance(only, dict) and only.keys() <= known and isinstance(only.get("path"), str)
        return only["path"] if is_one else texts

    @field_validator("candidates")
    @classmethod
    def _check_candidates(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            raise SurgeryError("candidates: name at least one structure, for example [low_rank, btt]")
        for name in names:
            config_type: Any = STRUCTURES.config_type(name)
            if config_type.of_mlp and name != "pruned":
                pattern = "mlp.*" if name == "dropped" else "attention.value"
                raise SurgeryError(
                    f"candidates: {name} replaces several linears together whatever they hold, and a candidate replaces "
                    "one linear, or an MLP. Leave it out, and give these a rule, for example "
                    f"{{match: {pattern}, structure: {name}}}"
                )
        if set(names) == {"pruned"}:
            raise SurgeryError(
                "candidates: pruned replaces the linears of an MLP together, and needs a candidate for one linear "
                "beside it, for example [pruned, low_rank]. For MLPs alone give a rule {match: mlp.*, structure: pruned}"
            )
        return names

    @model_validator(mode="before")
    @classmethod
    def _renew_words(cls, data: Any) -> Any:
        """Translate the words of older versions, with a warning for each."""
        if not isinstance(data, dict):
            return data
        renewed, notes = renew_recipe(data)
        warn_renamed(notes)
        return renewed

    @model_validator(mode="before")
    @classmethod
    def _keep_patterns(cls, data: Any) -> Any:
        """Expand keep: {pattern: fraction} into rules that precede the written ones; '*' is the default."""
        if isinstance(data, dict) and isinstance(data.get("keep"), dict):
            shares = dict(data["keep"])
            for pattern, share in shares.items():
                if not isinstance(pattern, str):
                    raise SurgeryError(
                        f"keep: {pattern!r} is not a pattern; write a role or a path, in which * and ? are wildcards"
                    )
                if type(share) not in (int, float) or not 0 < share <= 1:
                    raise SurgeryError(f"keep: {pattern!r} must have a fraction over 0 and at most 1 (got {share!r})")
            default = shares.pop("*", 1.0)
            rules = [{"match": pattern, "keep": share} for pattern, share in shares.items()]
            written = data.get("rules") or []
            data = {**data, "keep": default}
            if isinstance(written, list | tuple):  # otherwise validation refuses `rules` by name
                data["rules"] = rules + list(written)
        return data

    @model_validator(mode="after")
    def _check_one_removal(self) -> ConversionRecipe:
        if self.depth is not None and self.experts is not None:
            raise SurgeryError(
                "depth and experts remove layers and experts before all else, one of them in a conversion. Convert with "
                "one of the two, then convert the result with the other"
            )
        return self

    @model_validator(mode="after")
    def _check_stock_alone(self) -> ConversionRecipe:
        """Refuse other replacements beside `stock`, which writes a class without a place for them."""
        if self.stock is None:
            return self
        others = ("rules", "depth", "experts", "attention", "native", "speed", "tune")
        beside = next((name for name in others if getattr(self, name)), None)
        if beside is None and self.structure != "dense":
            beside = f"structure: {self.structure}"
        if beside is not None:
            raise SurgeryError(
                f"stock writes a model class of transformers, which has no place for {beside}. Leave it out (structure "
                "must be dense), or convert the result again by a recipe with it"
            )
        return self

    @model_validator(mode="after")
    def _check_one_budget(self) -> ConversionRecipe:
        """Refuse parameters and ranks beside `speed`, which spends time."""
        if self.speed is None:
            return self
        sizes = ("keep", *SIZE_KEYS)
        keys = [name for name in sizes if name in self.model_fields_set]
        keys += [name for rule in self.rules for name in sizes if getattr(rule, name) is not None]
        if keys:
            raise SurgeryError(
                f"speed chooses ranks by time, so {keys[0]} has no effect beside it. Leave {keys[0]} out, in rules "
                "too; a rule "
                "{match: .., structure: dense} leaves matrices dense"
            )
        return self

    @property
    def fitted_tokens(self) -> int:
        """The tokens of the calibration text, held-out ones included, and those that the original samples."""
        return self.tokens + self.generated_tokens

    @property
    def calibration_texts(self) -> tuple[CalibrationText, ...]:
        """The calibration texts, or other inputs, with their shares of the tokens; () without any."""
        if isinstance(self.calibration, str):
            return (CalibrationText(path=self.calibration, weight=1.0),)
        return self.calibration or ()

    @property
    def calibration_label(self) -> str | None:
        """The calibration texts in words; None without any."""
        weights = {text.weight for text in self.calibration_texts}
        named = (f"{t.path} (weight {t.weight:g})" if len(weights) > 1 else t.path for t in self.calibration_texts)
        return ", ".join(named) or None

    def tokens_of(self, text: CalibrationText) -> int:
        """Return how many of `tokens` are read of one of the calibration texts."""
        return round(self.tokens * text.weight / sum(one.weight for one in self.calibration_texts))

    @property
    def linear_candidates(self) -> tuple[str, ...]:
        """The candidates of `structure: auto` that replace one linear."""
        return tuple(name for name in self.candidates if name != "pruned")

    @property
    def tries_pruning(self) -> bool:
        """Whether `structure: auto` also compares MLPs and routed experts with fewer neurons."""
        return "pruned" in self.candidates

    @property
    def epochs(self) -> TuneRecipe:
        """The epochs of tuning, 0 where `tune` is off."""
        return self.tune or TuneRecipe()

    def settings(self, matches: Any, index: int | None, count: int) -> LinearSettings:
        """Return the settings of a linear in layer `index` of `count` (None: outside the layers).

        matches(pattern): returns whether a pattern matches the linear's role or path.
        """
        inside = index is not None and is_layer_selected(self.layers, index, count)
        base: dict[str, Any] = {
            "structure": self.structure if inside else "dense",
            "keep": self.keep,
            "blocks": self.blocks,
            "levels": self.levels,
            "ranks": self.ranks,
            "cores": self.cores,
            "rank": self.rank,
            "order": self.order,
            "width": self.width,
            "multiple": self.multiple,
            "groups": self.groups,
            "fused": self.fused,
            "share": self.share,
        }
        for rule in self.rules:
            if not matches(rule.match):
                continue
            if rule.layers is not None and (index is None or not is_layer_selected(rule.layers, index, count)):
                continue
            if index is None and base["structure"] == "dense":
                base["structure"] = self.structure
            if rule.structure not in (None, base["structure"]):
                base.update(dict.fromkeys(STRUCTURE_KEYS))  # these options belong to the structure that was replaced
            base.update({k: v for k in base if (v := getattr(rule, k)) is not None})
        has_size = base["keep"] < 1 or any(is_given(base[key]) for key in SIZE_KEYS)
        if not has_size and base["structure"] != "dropped":  # which keeps nothing, whatever keep says
            base["structure"] = "dense"
        return LinearSettings(**base)


def recipes_folder() -> Path:
    """Return the folder of the `surgery.recipes` package."""
    return Path(str(importlib.resources.files("surgery.recipes").joinpath("convert"))).parent


def conversion_recipes_folder() -> Path:
    """Return the folder of the shipped conversion recipes."""
    return recipes_folder() / "convert"


def shipped_recipes() -> dict[str, str]:
    """Return the descriptions of the shipped conversion recipes by name."""
    return {p.stem: load_recipe(p.stem).description for p in sorted(conversion_recipes_folder().glob("*.yaml"))}


def load_recipe(name: str, overrides: list[str] | tuple[str, ...] = ()) -> ConversionRecipe:
    """Load a shipped recipe by name or a YAML file by path, with overrides of the form "a.b=value"."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = conversion_recipes_folder() / f"{name}.yaml"
        healing = recipes_folder() / "healing" / f"{Path(name).name}.yaml"
        if not path.is_file() and (healing.is_file() or name in OLD_HEALING_RECIPES):
            raise SurgeryError(
                f"{name} is a healing recipe, for `surgery finetune`. Give a conversion recipe (`surgery recipes` "
                "lists them)"
            )
        if not path.is_file():
            raise SurgeryError(
                f"no recipe {name!r}{suggestion(name, [p.stem for p in conversion_recipes_folder().glob('*.yaml')])} "
                "(`surgery recipes` lists them; a file is given by its path, ending in .yaml)"
            )
    if not path.is_file():
        raise SurgeryError(f"recipe file {path} does not exist")
    if path.stat().st_size > MAX_BYTES:
        raise SurgeryError(f"recipe file {path} must have at most {MAX_BYTES:,} bytes (got {path.stat().st_size:,})")
    return parse_recipe(path.read_text(encoding="utf-8", errors="replace"), str(path), overrides)


def parse_recipe(text: str, where: str, overrides: list[str] | tuple[str, ...] = ()) -> ConversionRecipe:
    """Parse and validate a recipe's YAML text. `where` names it in error messages."""
    try:
        data = read_yaml(text)
    except ValueError as error:
        raise SurgeryError(f"recipe {where} is not YAML: {error}") from None
    check_mapping(data, where, "structure: btt")
    if overrides:  # in today's words, so that an override and the recipe name a key alike
        data, notes = renew_recipe(data)
        warn_renamed(notes)
    for override in overrides:
        _apply_override(data, override)
    return validate_recipe(data, " with override ".join([where, *overrides]))


def check_mapping(data: Any, where: str, example: str) -> None:
    """Raise SurgeryError if the YAML of a recipe is no mapping. example: of a line, for the error message."""
    if data is None:
        raise SurgeryError(
            f"recipe {where} has no keys (got an empty file, or comments only). Write keys into it, for example {example}, "
            "or give a shipped recipe by name"
        )
    if not isinstance(data, dict):
        raise SurgeryError(
            f"recipe {where} must be a mapping of keys to values (got {data!r:.60}). Write keys, for example {example}"
        )


def validate_recipe(data: dict[str, Any], where: str) -> ConversionRecipe:
    """Validate a recipe given as a dictionary. `where` names it in error messages."""
    try:
        return ConversionRecipe.model_validate(data)
    except ValidationError as error:
        # One clause per key: for a union type pydantic reports an error for every alternative.
        messages = dict.fromkeys(_explain_error(e, data) for e in error.errors())
        raise SurgeryError(f"recipe {where}: " + "; ".join(messages)) from None


# Accepted values of keys that have several forms.
EXPECTED_VALUES = {
    "keep": "a fraction over 0 and at most 1, for example 0.5, or {pattern: fraction}",
    "attention.hybrid.softmax": "a fraction over 0 and at most 1, for example 0.25",
    "blocks": "two whole numbers over 0, for example [4, 4], or sqrt, or budget, or (monarch) one number",
    "levels": "a whole number from 1 to 32, for example 4, or (mlbtc) a list of blocks and grids, for example [1, [4, 4]]",
    "ranks": "one whole number for each level, 0 allowed, for example [8, 0, 4]",
    "cores": "a whole number from 2 to 16, for example 3",
    "rank": "a whole number over 0, or full",
    "order": "contiguous or strided",
    "width": "a whole number over 0, for example 768, or uniform",
    "multiple": "a whole number from 1 to 4096, for example 64",
    "groups": "a whole number over 0, for example 4, or uniform",
    "share": "experts, input or none",
    "round_ranks": "a whole number from 1 to 4096, for example 64",
    "speed": "a ratio over 1 and the GPU that it was measured on, for example {prefill: 1.4, tokens: 8192, device: NVIDIA H200}",
    "experts": "a whole number over 0, for example 6",
    "towers": "auto, all, or names of towers, for example [text, vision]",
    "tune": "false, or epochs from 0 to 1000, for example {layers: 0, model: 20}, with norms: true or false",
}


def _explain_error(error: Any, data: dict[str, Any]) -> str:
    loc = list(error["loc"])
    if loc[0] == "rules" and len(loc) > 1 and isinstance(data.get("keep"), dict):
        loc[1] -= len(set(data["keep"]) - {"*"})  # the rules made from `keep` precede the written ones
    if error["type"] == "extra_forbidden":
        key = str(loc[-1])
        if ":" in key and error["input"] is None:  # {model:2} is a key without a value in YAML
            name, _, value = key.partition(":")
            return f"unknown key {_dotted_path(loc)!r}; write a space behind the colon: {name}: {value}"
        return f"unknown key {_dotted_path(loc)!r}{suggestion(key, section_keys(ConversionRecipe, loc))}"
    for depth, key in enumerate(loc):
        path = _dotted_path(loc[: depth + 1])
        if expected := EXPECTED_VALUES.get(path) or EXPECTED_VALUES.get(key):
            return f"{path}: write {expected} (got {_value_at(data, loc[: depth + 1])!r})"
    return f"{_dotted_path(loc)}: {error['msg']}" + (f" (got {error['input']!r})" if error["type"] != "missing" else "")


def _dotted_path(loc: list[Any]) -> str:
    # Keys are lower-case; pydantic adds the type of each alternative (TuneRecipe, tuple[..]), which is no key.
    return ".".join(str(key) for key in loc if not str(key)[:1].isupper() and "[" not in str(key))


def _value_at(data: Any, loc: list[Any]) -> Any:
    for key in loc:
        data = data[key]
    return data


def _apply_override(data: dict[str, Any], text: str) -> None:
    """Apply a `--set a.b=value` override in place. The value is parsed as YAML, except a layer range."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise SurgeryError(f"--set {text!r}: write key=value, for example --set keep=0.75")
    node: Any = data
    try:
        names = path.strip().split(".")
        is_range = names[-1] == "layers" and (names[:-1] in ([], ["attention"]) or names[-2].isdigit())
        keys, parsed, notes = renew_override(names, value if is_range else read_yaml(value), data)
        warn_renamed(notes)
        if not keys:
            return
        *parents, last = keys
        for key in parents:
            if isinstance(node, dict) and (
                node.get(key) is None or node[key] is False
            ):  # tune.model=3 after tune: false
                node[key] = {}
            node = node[int(key)] if isinstance(node, list) else node[key]
        if isinstance(node, list):
            node[int(last)] = parsed
        else:
            node[last] = parsed
    except (IndexError, ValueError, TypeError, AttributeError):
        raise SurgeryError(f"--set {text!r}: the recipe has no such key, or the value is not a YAML value") from None
