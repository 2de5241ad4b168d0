"""How linear-type attention is chosen, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from surgery.errors import SurgeryError
from surgery.mixers.base import AttentionShape, MixerConfig, from_options
from surgery.mixers.features.base import FEATURES
from surgery.mixers.masks.base import MASKS
from surgery.registry import Registry

SIGNED = ("toeplitz", "fourier")  # masks whose entries may be negative
BOTH_WAYS = ("blocks", "toeplitz_blocks")  # masks that are bidirectional themselves


@dataclass(frozen=True)
class LinearAttention(MixerConfig):
    """mask, features: configs, or how recipes write them: "decay", {"name": "decay", ..}.

    rope: whether q and k come rotated. chunk: tokens at once in training and prefill. convolution: width of a short
    one on q, k and v (0: none). gate: on the output, one number for each head or for each value. norm: of each
    head's output. window, sinks: tokens that softmax attends to (0: none). linear_weight: of the linear part's output
    at the start, learned per head; the softmax part starts at 1.
    """

    name: ClassVar[str] = "linear"
    mask: Any = "gates"
    features: Any = "identity"
    scores: Literal["kernel", "delta"] = "kernel"
    normalise: bool = False
    rope: Literal["keep", "drop"] = "keep"
    chunk: int = 64
    convolution: int = 0
    gate: Literal["head", "value"] | None = None
    norm: Literal["rms"] | None = None
    window: int = 0
    sinks: int = 0
    linear_weight: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", nested(MASKS, self.mask))
        object.__setattr__(self, "features", nested(FEATURES, self.features or "identity"))
        words = {"scores": ("kernel", "delta"), "rope": ("keep", "drop"), "gate": (None, "head", "value")}
        for option, valid in {**words, "norm": (None, "rms")}.items():
            if getattr(self, option) not in valid:
                raise SurgeryError(f"linear: {option} {getattr(self, option)!r}; valid: {', '.join(map(str, valid))}")
        for option, least in {"chunk": 1, "convolution": 0, "window": 0, "sinks": 0}.items():
            if getattr(self, option) < least:
                raise SurgeryError(f"linear: {option} {getattr(self, option)} must be {least} or more")


def nested(registry: Registry[Any], value: Any) -> Any:
    """A config from a config, its name, or a mapping with its name."""
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        if not hasattr(value, "name"):
            raise SurgeryError(f"linear: {registry.what} {value!r} is no {registry.what}; use {registry.names()[0]!r}")
        return value
    options = dict(value)
    return from_options(registry.config_type(str(options.pop("name", ""))), options)


def mask_shape(config: LinearAttention, shape: AttentionShape) -> AttentionShape:
    """What the mask is told: one that is causal by nature is read forwards and backwards."""
    return shape if config.mask.name in BOTH_WAYS else replace(shape, causal=True)


def refuse(config: LinearAttention, shape: AttentionShape) -> None:
    """SurgeryError where this config cannot serve that attention; says why."""
    if shape.heads % shape.groups:
        raise SurgeryError(f"linear: {shape.heads} query heads cannot share {shape.groups} key/value heads evenly")
    features = FEATURES[config.features]
    if config.normalise and config.scores == "delta":
        raise SurgeryError("linear: the delta rule's scores may be negative, so normalise: true has no meaning")
    if config.normalise and not (features.positive or features.least > 0):
        raise SurgeryError(
            f"linear: {config.features.name} scores may be negative and cannot be normalised; "
            "use normalise: false, or features such as elu, hedgehog or favor"
        )
    if not config.normalise and getattr(config.features, "queries", "exact") == "scaled":
        raise SurgeryError(
            f"linear: {config.features.name} with queries: scaled divides each query by a number of its own, which only "
            "a normaliser takes out; use normalise: true, or queries: exact"
        )
    if config.normalise and config.mask.name in SIGNED:
        raise SurgeryError(
            f"linear: a {config.mask.name} mask may be negative and cannot be normalised; "
            "use normalise: false, or a mask such as gates or toeplitz_blocks"
        )
    if not shape.causal and config.window + config.sinks > 0:
        raise SurgeryError(
            f"linear: window {config.window} and sinks {config.sinks} delay the linear part, which bidirectional "
            "attention cannot; use window: 0 and sinks: 0"
        )
    MASKS[config.mask].refuse(config.mask, mask_shape(config, shape), config.scores == "delta")
