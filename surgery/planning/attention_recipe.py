"""The `attention` section of a recipe: the mixer and its options, its initialization, and the layers that keep softmax.

attention: {mixer: linear, mask: decay, layers: "2:-2", hybrid: {keep: 0.25, by: sensitivity}}
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from surgery.core.config import check_layer_range
from surgery.core.errors import SurgeryError, suggestion
from surgery.mixers import MIXERS, AttentionShape, MixerConfig, mixer_config


class HybridRecipe(BaseModel):
    """Which layers keep softmax attention.

    keep: fraction of the attention layers that keep it. by: "sensitivity" keeps those whose replacement alone increases the
    held-out loss most; "every" keeps evenly spaced layers. layers: numbers of the layers that keep it, instead of keep and by.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    keep: Annotated[float, Field(gt=0, lt=1)] | None = None
    by: Literal["sensitivity", "every"] = "sensitivity"
    layers: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _check_exclusive_options(self) -> HybridRecipe:
        if (self.keep is None) == (self.layers is None):
            raise SurgeryError(
                "attention.hybrid: give keep, for example {keep: 0.25}, or layers, for example {layers: [0, 8]}"
            )
        return self

    @property
    def is_measured(self) -> bool:
        """Whether the layers are chosen by measurements on text during the conversion."""
        return self.layers is None and self.by == "sensitivity"

    def fixed_layers(self, targets: list[Any]) -> set[int]:
        """Return the numbers of the softmax layers that are known before any measurement; none with by: sensitivity."""
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


class AttentionRecipe(BaseModel):
    """The mixer that replaces attention. Keys other than these are the mixer's options (docs/attention.md).

    start: "calibrated" fits the mixer to the original's outputs on the calibration text in `steps` local steps; "copied" takes
    the model's own projections and an untrained mixer. cache (MLR attention): fraction of the key cache kept for a sequence of
    `context` tokens (default: the length of a calibration sample). Ranks, extents and the order of dimensions are then
    chosen by measurement. ladder: candidate extents in tokens, by default the powers of two from 8.
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

    _layers = field_validator("layers", mode="before")(check_layer_range)

    @model_validator(mode="after")
    def _check_mixer_options(self) -> AttentionRecipe:
        config_type: Any = MIXERS.config_type(self.mixer)
        known = {*config_type.__dataclass_fields__, *type(self).model_fields}
        for key in self.model_extra or {}:
            if key not in known:
                raise SurgeryError(f"attention: mixer {self.mixer!r} has no option {key!r}{suggestion(key, known)}")
        if self.cache is not None and "ranks" not in config_type.__dataclass_fields__:
            raise SurgeryError(f"attention: mixer {self.mixer!r} has no ranks for `cache` to choose; leave it out")
        if self.cache is None:
            mixer_config({"mixer": self.mixer, **(self.model_extra or {})})
        return self

    @property
    def refits_output(self) -> bool:
        """Whether the output projection is refitted to the mixer's output."""
        return self.start == "calibrated"

    def config_for(self, shape: AttentionShape) -> MixerConfig:
        """Return the mixer's config for an attention shape, before fitting."""
        options = dict(self.model_extra or {})
        if self.cache is not None and "ranks" not in options:
            far = max(2, 2 * round(self.cache * shape.key / 2))
            options |= {"ranks": (far, shape.key - far), "extents": (128,)} if far < shape.key else {"ranks": (far,)}
        return mixer_config({"mixer": self.mixer, **options})
