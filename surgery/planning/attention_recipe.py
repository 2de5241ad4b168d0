"""The `attention` section of a recipe: the mixer and its options, its initialization, and the layers that keep softmax.

attention: {mixer: linear, mask: decay, layers: "2:-2", hybrid: {softmax: 0.25, choose_by: measured}}
attention: {mixer: linear, mask: decay, rules: [{layers: "4", states: per_head}]}       # layer 4 has larger states
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from surgery.core.config import check_layer_range, fields_at_default, is_layer_selected
from surgery.core.errors import SurgeryError, suggestion
from surgery.mixers import MIXERS, AttentionShape, MixerConfig, mixer_config
from surgery.mixers.head_hybrid import OTHER_MIXERS
from surgery.mixers.softmax import MIN_TRAINED, Softmax
from surgery.planning.renamed import renew_attention, warn_renamed

# Ends the message where `--set attention.hybrid.layers=..` adds a key to one that the recipe has.
WHOLE_KEY = ". To replace a recipe's choice, set the whole key: --set 'attention.hybrid={layers: [0, 8]}'"


class HybridRecipe(BaseModel):
    """Which layers, or which key/value heads of all layers, keep softmax attention (docs/attention.md).

    softmax: share of the units that keep it. unit: "layers" or "heads"; a key/value head comes with the query heads
    that read it. choose_by: "measured" takes the units that matter on the calibration text: layers
    (surgery.conversion.gated) or heads (surgery.conversion.hybrid); "restored" measures layers one by one, at many
    times the cost (surgery.conversion.restored); "every" takes evenly spaced ones. layers, heads: the layers, or the
    heads of each layer, by number instead.

    Of the softmax that is kept (surgery.mixers.softmax): rope: "drop" uses q and k before RoPE. scale: "length" scales
    logits of queries beyond `trained_length` tokens, by default the config's max_position_embeddings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    softmax: Annotated[float, Field(gt=0, lt=1)] | None = None
    choose_by: Literal["measured", "restored", "every"] = "measured"
    layers: tuple[int, ...] | None = None
    unit: Literal["layers", "heads"] = "layers"
    heads: dict[Annotated[int, Field(ge=0)], tuple[Annotated[int, Field(ge=0)], ...]] | None = None
    rope: Literal["keep", "drop"] = "keep"
    scale: Literal["none", "length"] = "none"
    trained_length: int | None = Field(None, ge=MIN_TRAINED)

    @model_validator(mode="after")
    def _check_exclusive_options(self) -> HybridRecipe:
        keys = [name for name in ("softmax", "layers", "heads") if getattr(self, name) is not None]
        if len(keys) != 1:
            raise SurgeryError(
                "attention.hybrid: give softmax, for example {softmax: 0.25}, or layers, for example {layers: [0, 8]}, "
                "or heads, for example "
                f"{{heads: {{0: [1, 3]}}}} (got {' and '.join(keys) or 'none of them'}){WHOLE_KEY if keys else ''}"
            )
        if self.layers is not None and not self.layers:
            raise SurgeryError(
                "attention.hybrid.layers names no layer; leave hybrid out, or name layers that keep softmax, for "
                "example [0, 8]"
            )
        if self.layers is not None and len(set(self.layers)) < len(self.layers):
            twice = next(layer for layer in self.layers if self.layers.count(layer) > 1)
            raise SurgeryError(f"attention.hybrid.layers must name each layer once (got {twice} more than once)")
        if self.of_heads and self.layers is not None:
            raise SurgeryError(
                "attention.hybrid: layers names whole layers and unit: heads asks for a choice of heads. Give heads, "
                "for example "
                "{heads: {0: [1, 3]}}, or set unit: layers"
            )
        if self.heads is not None and "unit" in self.model_fields_set and self.unit == "layers":
            raise SurgeryError(
                "attention.hybrid: heads names heads of layers, and unit: layers does not. Leave unit out"
            )
        for layer, heads in (self.heads or {}).items():
            if list(heads) != sorted(set(heads)):
                raise SurgeryError(
                    f"attention.hybrid.heads: layer {layer} must have numbers of key/value heads in order and without "
                    f"repeats (got {list(heads)})"
                )
        if self.softmax is None and self.choose_by != "measured":
            raise SurgeryError(
                f"attention.hybrid: {keys[0]} names what keeps softmax, so choose_by: {self.choose_by} has no effect. "
                "Leave choose_by out, or give softmax in place of "
                f"{keys[0]}, for example softmax: 0.25"
            )
        if self.of_heads and self.choose_by == "restored":
            raise SurgeryError(
                "attention.hybrid: choose_by: restored chooses whole layers, and unit: heads asks for a choice of heads. "
                "Set choose_by: measured, or unit: layers"
            )
        if self.trained_length is not None and self.scale == "none":
            raise SurgeryError(
                "attention.hybrid: trained_length is an option of scale: length. Set that too, or leave it out"
            )
        return self

    @model_serializer(mode="wrap")
    def _omit_defaults(self, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields without these at their defaults: `unit: layers` beside `heads` would be refused when it is
        read again.
        """
        defaults = fields_at_default(self, ("unit", "heads", "rope", "scale", "trained_length"))
        values: dict[str, Any] = to_dict(self)
        return {name: value for name, value in values.items() if name not in defaults}

    @property
    def of_heads(self) -> bool:
        """Whether heads keep softmax, not whole layers."""
        return self.unit == "heads" or self.heads is not None

    @property
    def is_measured(self) -> bool:
        """Whether the layers or heads are chosen by measurements on text during the conversion."""
        return self.softmax is not None and self.choose_by != "every"

    def kept_softmax(self, max_positions: int | None) -> Softmax:
        """Return the config of the softmax that is kept. max_positions: of the model's config, None if it has none."""
        if self.scale == "none":
            return Softmax(self.rope)
        trained = self.trained_length or max_positions
        if trained is None or trained < MIN_TRAINED:
            raise SurgeryError(
                "attention.hybrid scale: length needs the length of the sequences that the model was trained on, and "
                "its config has no "
                f"max_position_embeddings (got {trained}). Set attention.hybrid.trained_length, for example to 4096"
            )
        return Softmax(self.rope, "length", trained)

    def fixed_layers(self, targets: list[Any]) -> set[int]:
        """Return the numbers of the softmax layers that are known before any measurement; none if they are measured."""
        numbers = [target.index for target in targets]
        if self.layers is not None:
            for layer in self.layers:
                if layer not in numbers:
                    raise SurgeryError(f"attention.hybrid: layer {layer} must be one of the selected layers {numbers}")
            return set(self.layers)
        if self.is_measured:
            return set()
        softmax_count = self.softmax_count(len(numbers))
        return {numbers[(2 * i + 1) * len(numbers) // (2 * softmax_count)] for i in range(softmax_count)}

    def softmax_count(self, units: int) -> int:
        """Return how many of `units` layers, or of as many heads, keep softmax."""
        assert self.softmax is not None
        return min(units - 1, max(1, round(self.softmax * units)))

    def fixed_heads(self, targets: list[Any]) -> dict[int, tuple[int, ...]]:
        """Return the key/value heads that keep softmax, by layer number, without a measurement: those of `heads`, or
        evenly spaced ones.

        Raises SurgeryError for heads that the selected layers do not have.
        """
        groups = {target.index: target.shape.groups for target in targets}
        if self.heads is None:
            units = [(layer, head) for layer, count in groups.items() for head in range(count)]
            softmax_count = self.softmax_count(len(units))
            chosen = [units[(2 * i + 1) * len(units) // (2 * softmax_count)] for i in range(softmax_count)]
            return {layer: tuple(head for at, head in chosen if at == layer) for layer in groups}
        for layer, heads in self.heads.items():
            if layer not in groups:
                raise SurgeryError(
                    f"attention.hybrid.heads: layer {layer} must be one of the selected layers {list(groups)}"
                )
            if heads and heads[-1] >= groups[layer]:
                raise SurgeryError(
                    f"attention.hybrid.heads: layer {layer} has key/value heads 0 to {groups[layer] - 1} (got "
                    f"{heads[-1]})"
                )
        if not any(self.heads.values()):
            raise SurgeryError(
                "attention.hybrid.heads names no head; leave hybrid out, or name heads that keep softmax"
            )
        return {layer: self.heads.get(layer, ()) for layer in groups}


class AttentionRule(BaseModel):
    """Mixer options of some layers, put over those of the recipe.

    layers: range of layer numbers, counted among the layers with attention. mixer: another mixer, which has none of the
    recipe's options; None: the recipe's. cache (MLR attention): fraction of the key cache that each of these layers
    keeps by itself; ranks, extents and the order of dimensions are then chosen by measurement. All other keys are
    options of the mixer. A mask or feature map given by a mapping or name replaces the recipe's as a whole.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    layers: str
    mixer: str | None = None
    cache: Annotated[float, Field(gt=0, le=1)] | None = None

    _layers = field_validator("layers", mode="before")(check_layer_range)

    def over(self, mixer: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return (mixer, options) with this rule's put over the given ones."""
        base = options if self.mixer in (None, mixer) else {}
        if self.cache is not None:
            base = {key: value for key, value in base.items() if key not in ("ranks", "extents")}
        return self.mixer or mixer, {**base, **(self.model_extra or {})}

    @model_serializer(mode="wrap")
    def _omit_unset_cache(self, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields without `cache` if it is not given, which keeps recipes in reports and journals as they
        were.
        """
        values: dict[str, Any] = to_dict(self)
        return {name: value for name, value in values.items() if name != "cache" or value is not None}


class AttentionRecipe(BaseModel):
    """The mixer that replaces attention. Keys other than these are the mixer's options (docs/attention.md).

    start: "calibrated" fits the mixer to the original's outputs in `steps` local steps; "copied" takes the model's own
    projections and an untrained mixer. cache (MLR attention): share of the key cache kept for a sequence of `context`
    tokens (default: the length of a calibration window). ladder: candidate extents in tokens, by default the powers of
    two from 8. rules: other options in some layers; the later of two rules wins.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    mixer: str
    layers: str = ":"
    start: Literal["calibrated", "copied"] = "calibrated"
    steps: int = Field(60, ge=0, le=100_000)
    cache: Annotated[float, Field(gt=0, le=1)] | None = None
    context: int | None = Field(None, ge=2)
    ladder: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    hybrid: HybridRecipe | None = None
    rules: tuple[AttentionRule, ...] = ()

    _layers = field_validator("layers", mode="before")(check_layer_range)

    @model_validator(mode="before")
    @classmethod
    def _renew_words(cls, data: Any) -> Any:
        """Translate the words of older versions, with a warning for each."""
        if not isinstance(data, dict):
            return data
        renewed, notes = renew_attention(data)
        warn_renamed(notes)
        return renewed

    @model_validator(mode="after")
    def _check_mixer_options(self) -> AttentionRecipe:
        check_mixer_options("attention", self.mixer, self.model_extra or {}, type(self))
        check_has_ranks("attention", self.mixer, self.cache)
        chosen = [key for key in self.model_extra or {} if key in ("ranks", "extents")]
        if self.cache is not None and chosen:
            raise SurgeryError(f"attention: `cache` chooses {chosen[0]}; give one of the two")
        about_cache = [key for key in ("context", "ladder") if getattr(self, key) is not None]
        if about_cache and not self.chooses_ranks:
            raise SurgeryError(
                f"attention: {about_cache[0]} is about the ranks that `cache` chooses, and there is no `cache`. Add "
                f"one, for example cache: 0.5, or leave {about_cache[0]} out"
            )
        if self.cache is None and not any(rule.cache is not None for rule in self.rules):
            mixer_config({"mixer": self.mixer, **(self.model_extra or {})})
        elif self.cache is not None and self.rules:
            raise SurgeryError(
                "attention: `cache` chooses the ranks of every layer, so `rules` cannot give layers other options. "
                "Leave one of them out"
            )
        if self.hybrid is not None and self.hybrid.of_heads:
            check_head_mixer("attention", self.mixer)
        for number, rule in enumerate(self.rules):
            name = f"attention.rules.{number}"
            mixer, options = rule.over(self.mixer, self.model_extra or {})
            check_mixer_options(name, mixer, rule.model_extra or {}, AttentionRule)
            if self.hybrid is not None and self.hybrid.of_heads:
                check_head_mixer(name, mixer)
            check_has_ranks(name, mixer, rule.cache)
            if rule.mixer is None and rule.cache is None and not rule.model_extra:
                raise SurgeryError(
                    f"{name}: names layers {rule.layers!r} and no option. Add one, for example window: 128"
                )
            if rule.cache is not None:
                if given := [key for key in ("ranks", "extents") if key in options]:
                    raise SurgeryError(f"{name}: `cache` chooses {given[0]}; give one of the two")
                continue
            try:
                mixer_config({"mixer": mixer, **options})
            except SurgeryError as error:
                raise SurgeryError(f"{name}: {error}") from None
        return self

    @model_serializer(mode="wrap")
    def _omit_empty_rules(self, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields without `rules` if there are none, which keeps recipes in reports and journals as they
        were.
        """
        values: dict[str, Any] = to_dict(self)
        return {name: value for name, value in values.items() if name != "rules" or value}

    @property
    def refits_output(self) -> bool:
        """Whether the output projection is refitted to the mixer's output."""
        return self.start == "calibrated"

    @property
    def chooses_ranks(self) -> bool:
        """Whether measurements choose the ranks of MLR attention in some layers."""
        return self.cache is not None or any(rule.cache is not None for rule in self.rules)

    def cache_of(self, index: int, count: int) -> float | None:
        """Return the share of the key cache for which the ranks of layer `index` of `count` are chosen, None if they are
        not.
        """
        mixer, cache = self.mixer, self.cache
        for rule in self.rules:
            if is_layer_selected(rule.layers, index, count):
                replaced = rule.mixer not in (None, mixer) or (rule.model_extra or {}).keys() & {"ranks"}
                mixer, cache = rule.mixer or mixer, rule.cache if replaced or rule.cache is not None else cache
        return cache

    def config_for(self, shape: AttentionShape, index: int, count: int) -> MixerConfig:
        """Return the mixer's config for the attention of layer `index` of `count`, before fitting."""
        mixer, options, cache = self.mixer, dict(self.model_extra or {}), self.cache_of(index, count)
        for rule in self.rules:
            if is_layer_selected(rule.layers, index, count):
                mixer, options = rule.over(mixer, options)
        if cache is not None and "ranks" not in options:
            far = max(2, 2 * round(cache * shape.key / 2))
            options |= {"ranks": (far, shape.key - far), "extents": (128,)} if far < shape.key else {"ranks": (far,)}
        return mixer_config({"mixer": mixer, **options})


def check_has_ranks(where: str, mixer: str, cache: float | None) -> None:
    """Raise SurgeryError if `cache` is given for a mixer without ranks. where: the place in the recipe."""
    config_type: Any = MIXERS.config_type(mixer)
    if cache is not None and "ranks" not in config_type.__dataclass_fields__:
        raise SurgeryError(f"{where}: mixer {mixer!r} has no ranks for `cache` to choose; leave it out")


def check_mixer_options(where: str, mixer: str, options: dict[str, Any], model: type[BaseModel]) -> None:
    """Raise SurgeryError for an option that the mixer lacks, and for level weights, which replace no attention. where:
    the place in the recipe; model: its class, with the other keys.
    """
    config_type: Any = MIXERS.config_type(mixer)
    if not config_type.replaces_attention:
        raise SurgeryError(
            f"{where}: level weights belong to linear layers that a model has of its own, and {where} replaces softmax "
            "attention. Give the key native, for example native: {levels: 12, block: 64}"
        )
    known = {*config_type.__dataclass_fields__, *model.model_fields}
    for key in options:
        if key not in known:
            raise SurgeryError(f"{where}: mixer {mixer!r} has no option {key!r}{suggestion(key, known)}")


def check_head_mixer(where: str, mixer: str) -> None:
    """Raise SurgeryError if the mixer cannot stand beside softmax heads in one layer. where: the place in the
    recipe.
    """
    if mixer not in OTHER_MIXERS:
        raise SurgeryError(
            f"{where}: hybrid unit: heads needs mixer {' or '.join(OTHER_MIXERS)} for the heads without softmax (got "
            f"{mixer!r}). Use one of "
            "these, or hybrid unit: layers"
        )
