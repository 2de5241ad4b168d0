"""Protocol of sequence mixers, which replace softmax(Q K^T) V in an attention module and keep its projections.

    config = LinearAttention(mask=Gates(), ...)
    mixer = MIXERS[config](config, shape)
    out_BHTV, state = mixer.mix(inputs, mixer.empty_state(batch, device))    prefill, chunks or single steps
    out_BHTV, _ = mixer.mix(inputs)                                          training: no state is kept
    mixer.dense(inputs)                                                      the definition, quadratic

States are immutable values: `mix` returns a new state, so a cache can return to an earlier one. Only a state that its
holder donates (`MixerState.donate`) may be overwritten by a call. B batch, T tokens, D model width, H query heads, G
key/value heads, J = H / G, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from surgery.core.errors import SurgeryError, suggestion
from surgery.core.registry import Registry, validate_config
from surgery.mixers.renamed import renew_options
from surgery.structures.base import MuP


@dataclass(frozen=True)
class AttentionShape:
    """Shape and options of the attention module that a mixer belongs to.

    scaling: factor on q . k. window: the module's own sliding window, None for all tokens. softcap: of the scores.
    rotary: how many of a head's K dims rotate (0: no RoPE), the first ones; pair f of them is (f, f + rotary / 2),
    or (2 f, 2 f + 1) if `interleaved`. norm: whether q and k are normalized after their projections.
    """

    dim: int
    heads: int
    groups: int
    key: int
    value: int
    scaling: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    rotary: int = 0
    interleaved: bool = False
    norm: bool = False


@dataclass
class MixerInputs:
    """Inputs of one call.

    q_BHTK, k_BGTK: after RoPE if the mixer's `rotated` is True, before it otherwise. x_BTD: the hidden states that the
    projections read. valid_BT: False at padding; None: no padding. mask_BHTS: the additive or boolean mask that
    transformers made, in causal attention also for earlier tokens; None: only causality, if any. dropout: probability
    of dropping an attention weight. rope: (cos, sin) of this call's tokens, (1 or B, T, rotary) each, for mixers that
    rotate q and k themselves; None: the module passes none.
    """

    q_BHTK: Tensor
    k_BGTK: Tensor
    v_BGTV: Tensor
    x_BTD: Tensor
    valid_BT: Tensor | None = None
    mask_BHTS: Tensor | None = None
    dropout: float = 0.0
    rope: tuple[Tensor, Tensor] | None = None

    def at_tokens(self, index: slice | Tensor) -> MixerInputs:
        """Return the inputs of some tokens. mask_BHTS keeps all keys, which the caller selects."""
        mask, rope = self.mask_BHTS, self.rope
        return replace(
            self,
            q_BHTK=self.q_BHTK[:, :, index],
            k_BGTK=self.k_BGTK[:, :, index],
            v_BGTV=self.v_BGTV[:, :, index],
            x_BTD=self.x_BTD[:, index],
            valid_BT=None if self.valid_BT is None else self.valid_BT[:, index],
            mask_BHTS=None if mask is None else mask[:, :, index],
            rope=None if rope is None else (rope[0][:, index], rope[1][:, index]),
        )


@dataclass
class MixerState:
    """State of a mixer: tensors by name, batch first, and seen_B, the number of real tokens of each row.

    max_seen: upper bound of seen_B that needs no device synchronization, or None if no bound is known.
    donated: whether a call may overwrite the tensors, because nothing reads them after the call. The state that the
    call returns is not donated.
    """

    seen_B: Tensor
    tensors: dict[str, Tensor] = field(default_factory=dict)
    max_seen: int | None = None
    donated: bool = False

    def donate(self) -> MixerState:
        """Return the state as one that the next call may overwrite.

        It and the states that share its tensors are not read again.
        """
        return replace(self, donated=True)

    def rows(self, index_B: Tensor) -> MixerState:
        """Return the state of the rows in `index_B`; repeats are allowed (beam search)."""
        index = index_B.to(self.seen_B.device)
        return MixerState(
            self.seen_B[index], {n: t.index_select(0, index) for n, t in self.tensors.items()}, self.max_seen
        )

    def to(self, device: torch.device | str) -> MixerState:
        """Return the state with all tensors on `device`."""
        return MixerState(self.seen_B.to(device), {n: t.to(device) for n, t in self.tensors.items()}, self.max_seen)

    def nbytes(self) -> int:
        """Return the size of the tensors in bytes."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


class MixerCost(NamedTuple):
    """Cost of one layer and sequence at a context of T tokens.

    cache: elements of the state after these tokens. macs: multiply-accumulates for the next token. params: stored
    parameters. float32: how many elements of the state are float32 in a model of 16 bits too, such as recurrent sums;
    the others have the model's dtype. `surgery.mixers.cache_size.cache_bytes` counts the bytes.
    """

    cache: int
    macs: int
    params: int
    float32: int = 0


@dataclass(frozen=True)
class MixerConfig:
    """Base class of mixer configs. name: of the mixer, in recipes and checkpoints. replaces_attention: whether the
    mixer replaces softmax attention; if not, it is beside a linear layer that the model has of its own (`native`).
    reads_projections: whether the output depends on the module's projections; if not, they are dropped
    (surgery.structures.dropped). is_trained: whether a calibrated conversion trains it in local steps.

    Options that are configs themselves are written as mappings with their name: {"mask": {"name": "decay"}}.
    """

    name: ClassVar[str]
    replaces_attention: ClassVar[bool] = True
    reads_projections: ClassVar[bool] = True
    is_trained: ClassVar[bool] = True

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data, for recipes and checkpoints."""
        return {"mixer": self.name, **{f.name: to_plain(getattr(self, f.name)) for f in fields(self)}}


def to_plain(value: Any) -> Any:
    """Return the value in JSON types; a nested config keeps its name."""
    if isinstance(value, (tuple, list)):
        return [to_plain(v) for v in value]
    if hasattr(value, "name"):
        return {"name": value.name, **{f.name: to_plain(getattr(value, f.name)) for f in fields(value)}}
    return value


def from_options(config_type: Any, options: dict[str, Any]) -> Any:
    """Return a config built from a mapping. SurgeryError for unknown options, with the nearest valid name."""
    known = {f.name for f in fields(config_type)}
    for key in options:
        if key not in known:
            raise SurgeryError(f"{config_type.name!r} has no option {key!r}{suggestion(key, known)}")
    try:
        return validate_config(config_type, options)
    except (TypeError, ValueError) as error:
        raise SurgeryError(f"{config_type.name!r}: {error}") from None


class Mixer(nn.Module):
    """Base class of mixers, see the module's docstring.

    __init__ initializes the parameters of an untrained mixer; `surgery convert` then sets calibrated values.
    """

    config_type: ClassVar[type]
    rotated: bool = True  # whether q and k come after RoPE
    reads_mask: bool = False  # whether calls without a state apply mask_BHTS, such as a custom mask
    counts_tokens: bool = (
        False  # whether the output depends on how many tokens come before a query, beside those that a mask shows it
    )
    by_definition: bool = False  # whether calls without a state compute `dense`: for short rows, and for vmap

    REQUIRED = ("mix",)

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__()
        self.config, self.shape = config, shape

    @classmethod
    def check_config(cls, config: Any, shape: AttentionShape) -> None:
        """Raise SurgeryError if the config does not fit the attention shape."""

    def empty_state(self, batch: int, device: torch.device | str) -> MixerState:
        """Return the state of `batch` sequences before their first token."""
        raise NotImplementedError

    def forward(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Run `mix` as a call of the module, so that hooks (offloading, sharding) apply."""
        if self.by_definition and state is None:
            return self.dense(inputs), None
        return self.mix(inputs, state)

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return (out_BHTV, the state after these tokens, or None without a state).

        Outputs of padding are arbitrary.
        """
        raise NotImplementedError

    def next_state(self, inputs: MixerInputs, state: MixerState) -> MixerState:
        """Return the state after these tokens, without their outputs.

        A cache recomputes states with it after tokens were removed.

        Mixers whose state holds keys and values need no scores for it.
        """
        after = self.mix(inputs, state)[1]
        assert after is not None
        return after

    def dense(self, inputs: MixerInputs) -> Tensor:
        """Return out_BHTV of whole sequences by the definition, in quadratic time, in the dtype of the inputs."""
        raise NotImplementedError

    @classmethod
    def cost(cls, config: Any, shape: AttentionShape, length: int) -> MixerCost:
        """Return cache size, multiply-accumulates and parameters for a context of `length` tokens."""
        raise NotImplementedError

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of the mixer's matrices over features, which set initial scales and learning rates.

        Other parameters have the learning rate of their kind.
        """
        return {}


class MethodModule(nn.Module):
    """A module with several methods that read its parameters. Callers run them as `module("method", *args)`.

    Offloading (accelerate), sharding (FSDP, ZeRO-3) and user hooks act on the call of a module, not on its methods.
    Parameters that are offloaded exist only during such a call.
    """

    def forward(self, method: str, *args: Any) -> Any:
        """Return what the method of that name returns for `args`."""
        return getattr(self, method)(*args)


MIXERS: Registry[Mixer] = Registry(
    "mixer", "surgery.mixers", dict.fromkeys(("window", "global_window"), "sliding_window")
)


def mixer_config(data: dict[str, Any]) -> MixerConfig:
    """Return the config of a mapping: {"mixer": "mlr", "ranks": [32, 16]} -> MLR(...).

    Options may have the names of older versions.
    """
    options = dict(data)
    mixer = str(options.pop("mixer", ""))
    config: MixerConfig = from_options(MIXERS.config_type(mixer), renew_options(mixer, options))
    return config
