"""The `attention` section of a recipe: the mixer and its options, its initialization, and the layers that keep softmax.

attention: {mixer: linear, mask: decay, layers: "2:-2", hybrid: {keep: 0.25, by: sensitivity}}
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

from surgery.core.config import check_layer_range, is_layer_selected
from surgery.core.errors import SurgeryError, suggestion
from surgery.mixers import MIXERS, AttentionShape, MixerConfig, mixer_config

RESTORED_OPTIONS = ("align_steps", "weights", "repeated")


class HybridRecipe(BaseModel):
    """Which layers keep softmax attention.

    keep: fraction of the attention layers that keep it. by: "sensitivity" keeps those whose replacement alone increases the
    held-out loss most; "restored" keeps those whose softmax attention lowers the KL divergence of a briefly aligned student
    most (surgery.conversion.restored); "every" keeps evenly spaced layers. layers: numbers of the layers that keep it,
    instead of keep and by.

    Options of by: restored. align_steps: Adam steps of each layer's alignment. weights: "far" weights each token by what the
    original loses on it with a short window, "even" weights all tokens alike. repeated: share of the scored rows that end
    with a copy of an earlier part of the row.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: Annotated[float, Field(gt=0, lt=1)] | None = None
    by: Literal["sensitivity", "restored", "every"] = "sensitivity"
    layers: tuple[int, ...] | None = None
    align_steps: int = Field(100, ge=0, le=10_000)
    weights: Literal["far", "even"] = "far"
    repeated: float = Field(0.5, ge=0, le=1)

    @model_validator(mode="after")
    def _check_exclusive_options(self) -> HybridRecipe:
        if (self.keep is None) == (self.layers is None):
            raise SurgeryError(
                "attention.hybrid: give keep, for example {keep: 0.25}, or layers, for example {layers: [0, 8]}"
            )
        unread = [name for name in RESTORED_OPTIONS if name in self.model_fields_set]
        if unread and not self.is_restored:
            raise SurgeryError(
                f"attention.hybrid: {unread[0]} is an option of by: restored, and the layers are chosen by "
                f"{'layers' if self.layers is not None else self.by}. Set by: restored, or leave {unread[0]} out"
            )
        return self

    @model_serializer(mode="wrap")
    def _omit_unread_options(self, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields without the options of another choice, which keeps recipes in reports and journals as they were."""
        values: dict[str, Any] = to_dict(self)
        return {name: value for name, value in values.items() if self.is_restored or name not in RESTORED_OPTIONS}

    @property
    def is_restored(self) -> bool:
        """Whether the layers are chosen by restoring softmax in an aligned student."""
        return self.layers is None and self.by == "restored"

    @property
    def is_measured(self) -> bool:
        """Whether the layers are chosen by measurements on text during the conversion."""
        return self.layers is None and self.by != "every"

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
        kept = self.softmax_count(len(numbers))
        return {numbers[(2 * i + 1) * len(numbers) // (2 * kept)] for i in range(kept)}

    def softmax_count(self, layers: int) -> int:
        """Return how many of `layers` layers keep softmax."""
        assert self.keep is not None
        return min(layers - 1, max(1, round(self.keep * layers)))


class AttentionRule(BaseModel):
    """Mixer options of some layers, put over those of the recipe.

    layers: range of layer numbers, counted among the layers with attention. mixer: another mixer, which has none of the recipe's
    options; None: the recipe's. All other keys are options of the mixer. A mask or feature map given by a mapping or name replaces the
    recipe's as a whole.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    layers: str
    mixer: str | None = None

    _layers = field_validator("layers", mode="before")(check_layer_range)

    def over(self, mixer: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return (mixer, options) with this rule's put over the given ones."""
        kept = options if self.mixer in (None, mixer) else {}
        return self.mixer or mixer, {**kept, **(self.model_extra or {})}


class AttentionRecipe(BaseModel):
    """The mixer that replaces attention. Keys other than these are the mixer's options (docs/attention.md).

    start: "calibrated" fits the mixer to the original's outputs on the calibration text in `steps` local steps; "copied" takes
    the model's own projections and an untrained mixer. cache (MLR attention): fraction of the key cache kept for a sequence of
    `context` tokens (default: the length of a calibration sample). Ranks, extents and the order of dimensions are then
    chosen by measurement. ladder: candidate extents in tokens, by default the powers of two from 8. rules: other options in
    some layers; of two rules for a layer the later one wins.
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

    @model_validator(mode="after")
    def _check_mixer_options(self) -> AttentionRecipe:
        config_type: Any = MIXERS.config_type(self.mixer)
        check_mixer_options("attention", self.mixer, self.model_extra or {}, type(self))
        if self.cache is not None and "ranks" not in config_type.__dataclass_fields__:
            raise SurgeryError(f"attention: mixer {self.mixer!r} has no ranks for `cache` to choose; leave it out")
        if self.cache is None:
            mixer_config({"mixer": self.mixer, **(self.model_extra or {})})
        elif self.rules:
            raise SurgeryError(
                "attention: `cache` chooses the ranks of every layer, so `rules` cannot give layers other options. Leave one of them out"
            )
        for number, rule in enumerate(self.rules):
            name = f"attention.rules.{number}"
            mixer, options = rule.over(self.mixer, self.model_extra or {})
            check_mixer_options(name, mixer, rule.model_extra or {}, AttentionRule)
            if rule.mixer is None and not rule.model_extra:
                raise SurgeryError(
                    f"{name}: names layers {rule.layers!r} and no option. Add one, for example window: 128"
                )
            try:
                mixer_config({"mixer": mixer, **options})
            except SurgeryError as error:
                raise SurgeryError(f"{name}: {error}") from None
        return self

    @model_serializer(mode="wrap")
    def _omit_empty_rules(self, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields without `rules` if there are none, which keeps recipes in reports and journals as they were."""
        values: dict[str, Any] = to_dict(self)
        return {name: value for name, value in values.items() if name != "rules" or value}

    @property
    def refits_output(self) -> bool:
        """Whether the output projection is refitted to the mixer's output."""
        return self.start == "calibrated"

    def config_for(self, shape: AttentionShape, index: int, count: int) -> MixerConfig:
        """Return the mixer's config for the attention of layer `index` of `count`, before fitting."""
        mixer, options = self.mixer, dict(self.model_extra or {})
        for rule in self.rules:
            if is_layer_selected(rule.layers, index, count):
                mixer, options = rule.over(mixer, options)
        if self.cache is not None and "ranks" not in options:
            far = max(2, 2 * round(self.cache * shape.key / 2))
            options |= {"ranks": (far, shape.key - far), "extents": (128,)} if far < shape.key else {"ranks": (far,)}
        return mixer_config({"mixer": mixer, **options})


def check_mixer_options(where: str, mixer: str, options: dict[str, Any], model: type[BaseModel]) -> None:
    """Raise SurgeryError for an option that the mixer lacks. where: the place in the recipe; model: its class, with the other keys."""
    config_type: Any = MIXERS.config_type(mixer)
    known = {*config_type.__dataclass_fields__, *model.model_fields}
    for key in options:
        if key not in known:
            raise SurgeryError(f"{where}: mixer {mixer!r} has no option {key!r}{suggestion(key, known)}")
