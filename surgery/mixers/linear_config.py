"""Config of the linear attention mixer (surgery/mixers/linear.py), and the shapes and checks that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from surgery.core.errors import SurgeryError
from surgery.core.registry import Registry
from surgery.mixers.base import AttentionShape, MixerConfig, from_options
from surgery.mixers.common.near_chunks import ChunkBuffer
from surgery.mixers.common.window_hybrid import WindowBuffer
from surgery.mixers.features.base import FEATURES
from surgery.mixers.masks.base import MASKS
from surgery.mixers.renamed import accept_old_options

SIGNED_MASKS = ("toeplitz", "input_toeplitz", "fourier")  # masks whose entries may be negative
TWO_FORMS = ("window", "both")  # values of rope with which the branches read different forms of q and k
BIDIRECTIONAL_MASKS = ("blocks", "toeplitz_blocks", "block_diagonal")  # masks that are bidirectional themselves


@accept_old_options
@dataclass(frozen=True)
class LinearAttention(MixerConfig):
    """Config of the linear attention mixer.

    mask, features: configs, their names ("decay") or mappings ({"name": "decay", ..}), as in recipes.
    rope: which q and k the branches read.
        keep    both branches after RoPE
        drop    both branches before RoPE
        window  the softmax branch after RoPE, the linear branch before it
        both    the softmax branch after RoPE, the linear branch both forms side by side, with twice the key dims
        Attention without RoPE, or with RoPE of interleaved pairs, treats `window` and `both` as `keep`.
    states: one state per key/value head ("shared"), or a copy of k and v, a state and gates per query head
    ("per_head"). chunk: tokens per chunk in training and prefill. convolution: width in tokens of a causal convolution
    on q, k and v (0: none). output_gate: a sigmoid gate on the output per head or per value dim (None: none). norm: RMS
    norm of each head's output. window, sinks: number of last and of first tokens in the softmax branch (0: none).
    near_tokens: which last tokens are in the softmax branch.
        sliding  the last `window` tokens
        chunks   the query's block of `window` tokens, counted from the first token behind the sinks, up to the query, and the
                 block before it: window + 1 to 2 window tokens
    linear_weight: initial weight of the linear branch, learned per head; the softmax branch starts at 1.
    negative_eigenvalues: step sizes beta of the delta rule are in (0, 2) instead of (0, 1), so that the eigenvalue 1 -
    beta of a transition I - beta k k^T may be negative, down to -1 (Grazzi et al. 2025; Log-Linear Attention, footnote 5).
    """

    name: ClassVar[str] = "linear"
    mask: Any = "gates"
    features: Any = "identity"
    scores: Literal["kernel", "delta"] = "kernel"
    normalise: bool = False
    rope: Literal["keep", "drop", "window", "both"] = "keep"
    chunk: int = 64
    convolution: int = 0
    output_gate: Literal["head", "value"] | None = None
    norm: Literal["rms"] | None = None
    window: int = 0
    sinks: int = 0
    linear_weight: float = 1.0
    states: Literal["shared", "per_head"] = "shared"
    near_tokens: Literal["sliding", "chunks"] = "sliding"
    negative_eigenvalues: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", parse_nested_config(MASKS, self.mask))
        object.__setattr__(self, "features", parse_nested_config(FEATURES, self.features or "identity"))
        choices: dict[str, tuple[str | None, ...]] = {
            "scores": ("kernel", "delta"),
            "output_gate": (None, "head", "value"),
            "norm": (None, "rms"),
            "states": ("shared", "per_head"),
            "rope": ("keep", "drop", "window", "both"),
            "near_tokens": ("sliding", "chunks"),
        }
        for option, valid in choices.items():
            if getattr(self, option) not in valid:
                raise SurgeryError(
                    f"linear: {option} must be one of {', '.join(map(str, valid))} (got {getattr(self, option)!r})"
                )
        for option, minimum in {"chunk": 1, "convolution": 0, "window": 0, "sinks": 0}.items():
            if getattr(self, option) < minimum:
                raise SurgeryError(f"linear: {option} must be {minimum} or more (got {getattr(self, option)})")
        if self.negative_eigenvalues and self.scores != "delta":
            raise SurgeryError(
                "linear: negative_eigenvalues: true is the range of the delta rule's step sizes, which scores: "
                f"{self.scores} does not have; use scores: delta, or negative_eigenvalues: false"
            )

    @property
    def largest_step(self) -> int:
        """Return the upper bound of the delta rule's step sizes."""
        return 2 if self.negative_eigenvalues else 1


def parse_nested_config(registry: Registry[Any], value: Any) -> Any:
    """Return the config of a mask or feature map, given as a config, its name, or a mapping with its name."""
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        if not hasattr(value, "name"):
            raise SurgeryError(
                f"linear: {registry.what} must be the name of a {registry.what} or a mapping with it (got {value!r}); "
                f"for example {registry.names()[0]!r}"
            )
        return value
    options = dict(value)
    if "name" not in options:
        raise SurgeryError(
            f"linear: the options of a {registry.what} need its name (got {value}); for example {{name: "
            f"{registry.names()[0]}}}"
        )
    return from_options(registry.config_type(str(options.pop("name"))), options)


def linear_shape(config: LinearAttention, shape: AttentionShape) -> AttentionShape:
    """Return the shape of the linear branch: with states: per_head every query head has a key/value head of its own,
    and with rope: both the keys have two forms."""
    groups = shape.heads if config.states == "per_head" else shape.groups
    both = resolve_rope(config, shape) == "both"
    return replace(shape, groups=groups, key=2 * shape.key if both else shape.key)


def mask_shape(config: LinearAttention, shape: AttentionShape) -> AttentionShape:
    """Return the shape for the mask: its keys are features, and it is always causal, unless the mask itself supports
    bidirectional attention."""
    shape = linear_shape(config, shape)
    shape = replace(shape, key=FEATURES[config.features].features(config.features, shape))
    return shape if config.mask.name in BIDIRECTIONAL_MASKS else replace(shape, causal=True)


def resolve_rope(config: LinearAttention, shape: AttentionShape) -> str:
    """Return which q and k the branches read: `keep` where `window` or `both` needs RoPE in the half-split form and the
    attention has none."""
    half_split = shape.rotary and not shape.interleaved
    return config.rope if half_split or config.rope not in TWO_FORMS else "keep"


def has_signed_lambdas(mask: Any) -> bool:
    """Return whether the config is of a log-linear mask whose weights may be negative."""
    return bool(mask.name == "hierarchical" and (mask.form == "linear" or mask.matrix != "scalar"))


def check_config(config: LinearAttention, shape: AttentionShape) -> None:
    """Raise SurgeryError if the config does not fit the attention shape."""
    if shape.heads % shape.groups:
        raise SurgeryError(
            f"linear: the number of query heads ({shape.heads}) must be a multiple of the number of key/value heads "
            f"({shape.groups})"
        )
    features = FEATURES[config.features]
    if config.normalise and config.scores == "delta":
        raise SurgeryError(
            "linear: scores: delta may be negative and cannot be normalised; use normalise: false, or scores: kernel"
        )
    if config.normalise and not (features.positive or features.min_denominator > 0):
        raise SurgeryError(
            f"linear: {config.features.name} scores may be negative and cannot be normalised; "
            "use normalise: false, or features such as elu, hedgehog or favor"
        )
    if not config.normalise and getattr(config.features, "queries", "exact") == "scaled":
        raise SurgeryError(
            f"linear: {config.features.name} with queries: scaled divides the features of each query by their maximum, "
            "which cancels only in normalised attention; use normalise: true, or queries: exact"
        )
    if config.normalise and has_signed_lambdas(config.mask):
        raise SurgeryError(
            f"linear: log-linear weights with form: {config.mask.form} and matrix: {config.mask.matrix} may be "
            "negative and cannot be "
            "normalised; use normalise: false, or form: positive and matrix: scalar"
        )
    if config.normalise and config.mask.name in SIGNED_MASKS:
        raise SurgeryError(
            f"linear: mask {config.mask.name} may be negative and cannot be normalised; "
            "use normalise: false, or a mask such as gates or toeplitz_blocks"
        )
    if not shape.causal and config.window + config.sinks > 0:
        raise SurgeryError(
            f"linear: window {config.window} and sinks {config.sinks} need causal attention, and this module is "
            "bidirectional; use window: 0 and sinks: 0"
        )
    if config.near_tokens == "chunks" and not config.window:
        raise SurgeryError(
            "linear: near_tokens: chunks needs the number of tokens of a block, and window is 0; set window, for "
            "example window: 64, or "
            "use near_tokens: sliding"
        )
    if config.near_tokens == "chunks" and config.mask.name == "hierarchical" and config.window & (config.window - 1):
        raise SurgeryError(
            "linear: near_tokens: chunks with a hierarchical mask needs a window that is a power of two (got "
            f"{config.window}), so that "
            f"the blocks are nodes of the tree; for example window: {1 << (config.window.bit_length() - 1)}"
        )
    if config.rope in TWO_FORMS and not config.window + config.sinks:
        raise SurgeryError(
            f"linear: rope: {config.rope} gives the window and the linear branch different q and k, and there is no "
            "window; "
            "set window, or use rope: keep or rope: drop"
        )
    MASKS[config.mask].check_config(config.mask, mask_shape(config, shape), config.scores == "delta")


def make_buffer(config: LinearAttention) -> WindowBuffer | None:
    """Return the operations on the rings and sinks of the softmax branch, or None without that branch."""
    if not config.window + config.sinks:
        return None
    return (ChunkBuffer if config.near_tokens == "chunks" else WindowBuffer)(config.window, config.sinks)
