"""Hybrid of softmax and another mixer inside one layer: some key/value heads keep softmax attention, the others get the
mixer.

    out[h] = softmax attention of head h      if the key/value head that h reads is in `softmax_heads`
             others(q, k, v of the other heads)[h]      otherwise

HydraHead (Tan et al. 2026, arXiv 2606.20097): heads of one layer differ more in what they do than layers do, so the
head is the unit of the choice. With grouped queries the unit is a key/value head together with its J query heads: a
query head cannot keep softmax without the keys and values that its group shares. The outputs are put side by side in
the model's order of heads, before the output projection. HydraHead's normalization of the two kinds of outputs is not
used here: the mixer is fitted to the outputs of the original heads, and the output projection is refitted to the
outputs of all heads.

The state holds `softmax.keys` and `softmax.values` of the kept heads, and the state of the other mixer under its own
names.

B batch, T tokens, H = G J query heads, G key/value heads, K key dim, V value dim, N heads of one part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.mixers.base import (
    MIXERS,
    AttentionShape,
    Mixer,
    MixerConfig,
    MixerCost,
    MixerInputs,
    MixerState,
    mixer_config,
)
from surgery.mixers.common.rope import rotate_inputs
from surgery.mixers.linear_config import LinearAttention, resolve_rope
from surgery.mixers.renamed import accept_old_options
from surgery.mixers.softmax import Softmax, SoftmaxAttention
from surgery.structures.base import MuP

OTHER_MIXERS = ("linear", "window")  # mixers that can stand beside softmax heads
PREFIX = "softmax."  # of the names of the kept heads' keys and values in the state


@accept_old_options
@dataclass(frozen=True)
class HeadHybrid(MixerConfig):
    """Config of a hybrid by heads.

    softmax_heads: numbers of the key/value heads that keep softmax attention. others: the mixer of all other heads, a
    config or a mapping {"mixer": "linear", ..}. softmax: options of the kept heads, a config or a mapping {"rope":
    "drop", ..}.
    """

    name: ClassVar[str] = "head_hybrid"
    softmax_heads: tuple[int, ...] = ()
    others: Any = None
    softmax: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "others", _nested_config("others", self.others, None))
        object.__setattr__(self, "softmax", _nested_config("softmax", self.softmax or {}, "softmax"))
        if self.others.name not in OTHER_MIXERS:
            raise SurgeryError(
                f"head_hybrid: the other heads can have the mixers {' and '.join(OTHER_MIXERS)} (got "
                f"{self.others.name!r})"
            )
        if not isinstance(self.softmax, Softmax):
            raise SurgeryError(f"head_hybrid: softmax must have options of mixer softmax (got {self.softmax.name!r})")
        numbers = list(self.softmax_heads)
        if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 0:
            raise SurgeryError(
                "head_hybrid: softmax_heads must be numbers of key/value heads, from 0, in order and without repeats "
                f"(got {numbers}); for "
                "example softmax_heads: [0, 2]"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain data, for recipes and checkpoints."""
        parts = {"others": self.others.to_dict(), "softmax": self.softmax.to_dict()}
        return {"mixer": self.name, "softmax_heads": list(self.softmax_heads), **parts}


def _nested_config(option: str, value: Any, default: str | None) -> MixerConfig:
    """Return the mixer config of an option, given as a config or as a mapping with the mixer's name."""
    if isinstance(value, MixerConfig):
        return value
    if not isinstance(value, Mapping) or ("mixer" not in value and default is None):
        raise SurgeryError(
            f"head_hybrid: {option} must be the options of a mixer with its name, for example {{mixer: linear}} (got "
            f"{value!r})"
        )
    if value.get("mixer") == HeadHybrid.name:
        raise SurgeryError(f"head_hybrid: {option} cannot be a head_hybrid itself")
    return mixer_config({"mixer": default, **value})


def part_shape(shape: AttentionShape, groups: int) -> AttentionShape:
    """Return the shape of `groups` of the key/value heads, with their query heads."""
    return replace(shape, groups=groups, heads=groups * (shape.heads // shape.groups))


def reads_rotated(config: MixerConfig, shape: AttentionShape) -> bool:
    """Return whether a mixer of this config reads q and k after RoPE."""
    if isinstance(config, LinearAttention):
        return resolve_rope(config, shape) == "keep"
    return config.rope == "keep" if isinstance(config, Softmax) else MIXERS[config].rotated


def check_rotation(name: str, shape: AttentionShape, softmax: MixerConfig, other: MixerConfig) -> None:
    """Raise SurgeryError if two mixers read different forms of q and k, and the rotation cannot be repeated here."""
    if reads_rotated(softmax, shape) != reads_rotated(other, shape) and shape.interleaved:
        raise SurgeryError(
            f"{name}: one part reads queries and keys after RoPE and the other before it, and this attention rotates "
            "interleaved "
            "pairs of dims, which can only be kept or dropped for both. Use the same rope in both parts"
        )


@MIXERS.register(HeadHybrid)
class HeadHybridAttention(Mixer):
    """Softmax attention in some key/value heads and another mixer in the others. softmax, others: the mixers of the two
    parts.

    kept_N, rest_N: key/value heads of each part. order_H: for each query head of the model its place in the joined
    outputs.
    """

    config: HeadHybrid
    softmax: SoftmaxAttention
    others: Mixer
    kept_N: Tensor
    rest_N: Tensor
    order_H: Tensor

    def __init__(self, config: HeadHybrid, shape: AttentionShape):
        super().__init__(config, shape)
        self.check_config(config, shape)
        softmax_N = torch.tensor(config.softmax_heads)
        rest = torch.tensor([group for group in range(shape.groups) if group not in config.softmax_heads])
        softmax: Any = MIXERS[config.softmax](config.softmax, part_shape(shape, len(softmax_N)))
        self.softmax = softmax
        self.others = MIXERS[config.others](config.others, part_shape(shape, len(rest)))
        # If the parts read different forms, both get q and k before RoPE, and one part rotates them.
        self.rotated = self.softmax.rotated and self.others.rotated
        self.reads_mask = self.others.reads_mask
        self.counts_tokens = self.softmax.counts_tokens or self.others.counts_tokens
        for name, index in (("kept_N", softmax_N), ("rest_N", rest)):
            self.register_buffer(name, index, persistent=False)
        order_H = torch.cat([query_heads(softmax_N, shape), query_heads(rest, shape)]).argsort()
        self.register_buffer("order_H", order_H, persistent=False)

    @classmethod
    def check_config(cls, config: HeadHybrid, shape: AttentionShape) -> None:
        """Raise SurgeryError if the config does not fit the attention shape."""
        check_heads(config, shape)
        softmax_shape, rest = (
            part_shape(shape, len(config.softmax_heads)),
            part_shape(shape, shape.groups - len(config.softmax_heads)),
        )
        MIXERS[config.softmax].check_config(config.softmax, softmax_shape)
        MIXERS[config.others].check_config(config.others, rest)
        check_rotation(config.name, shape, config.softmax, config.others)

    def part_inputs(self, inputs: MixerInputs, of_softmax: bool) -> MixerInputs:
        """Return the inputs of the softmax heads (of_softmax) or of the others, in the form that their mixer reads."""
        mixer, group_N = (self.softmax, self.kept_N) if of_softmax else (self.others, self.rest_N)
        if mixer.rotated and not self.rotated:
            inputs = rotate_inputs(inputs, self.shape, self.config.name)
        return select_heads(inputs, group_N, self.shape)

    def empty_state(self, batch: int, device: torch.device | str) -> MixerState:
        """Return the state of `batch` sequences before their first token."""
        others, softmax = self.others.empty_state(batch, device), self.softmax.empty_state(batch, device)
        return _join_states(others, softmax)

    def mix(self, inputs: MixerInputs, state: MixerState | None = None) -> tuple[Tensor, MixerState | None]:
        """Return (out_BHTV, state after these tokens, or None without a state)."""
        past = None if state is None else _split_state(state)
        softmax_out, softmax_after = self.softmax(self.part_inputs(inputs, True), None if past is None else past[0])
        out, after = self.others(self.part_inputs(inputs, False), None if past is None else past[1])
        joined = self.join(softmax_out, out)
        return joined, None if after is None or softmax_after is None else _join_states(after, softmax_after)

    def next_state(self, inputs: MixerInputs, state: MixerState) -> MixerState:
        """Return the state after these tokens, without their outputs."""
        softmax, others = _split_state(state)
        softmax_after = self.softmax.next_state(self.part_inputs(inputs, True), softmax)
        return _join_states(self.others.next_state(self.part_inputs(inputs, False), others), softmax_after)

    def join(self, softmax_BNTV: Tensor, others_BNTV: Tensor) -> Tensor:
        """Return the outputs of both parts in the model's order of heads, (B, H, T, V)."""
        return torch.cat([softmax_BNTV, others_BNTV.to(softmax_BNTV.dtype)], 1).index_select(1, self.order_H)

    def dense(self, inputs: MixerInputs) -> Tensor:
        """Return out_BHTV by the definition, in quadratic time."""
        return self.join(
            self.softmax.dense(self.part_inputs(inputs, True)), self.others.dense(self.part_inputs(inputs, False))
        )

    @classmethod
    def cost(cls, config: HeadHybrid, shape: AttentionShape, length: int) -> MixerCost:
        """Return cache size, multiply-accumulates and parameters for a context of `length` tokens."""
        softmax_shape, rest = (
            part_shape(shape, len(config.softmax_heads)),
            part_shape(shape, shape.groups - len(config.softmax_heads)),
        )
        softmax = MIXERS[config.softmax].cost(config.softmax, softmax_shape, length)
        others = MIXERS[config.others].cost(config.others, rest, length)
        return MixerCost(*(a + b for a, b in zip(softmax, others)))

    def mup(self) -> dict[str, MuP]:
        """Return fan-in and fan-out of the matrices of the other heads' mixer."""
        return {f"others.{name}": mup for name, mup in self.others.mup().items()}


def check_heads(config: HeadHybrid, shape: AttentionShape) -> None:
    """Raise SurgeryError if the layer has no key/value heads to choose from, or other ones than the config names."""
    if shape.groups == 1:
        raise SurgeryError(
            f"head_hybrid: this layer has one key/value head, which all its {shape.heads} query heads share "
            "(multi-query attention): "
            "softmax in any of them keeps the whole cache. Choose whole layers (attention.hybrid of: layers)"
        )
    if config.softmax_heads[-1] >= shape.groups:
        raise SurgeryError(
            f"head_hybrid: softmax_heads names key/value head {config.softmax_heads[-1]}, and this layer has heads 0 "
            f"to {shape.groups - 1}"
        )
    if len(config.softmax_heads) == shape.groups:
        raise SurgeryError(
            f"head_hybrid: softmax_heads names all {shape.groups} key/value heads, so nothing would be replaced. Leave "
            "the layer out instead"
        )


def query_heads(group_N: Tensor, shape: AttentionShape) -> Tensor:
    """Return the query heads that read these key/value heads, (N J)."""
    per = shape.heads // shape.groups
    return (group_N[:, None] * per + torch.arange(per, device=group_N.device)).flatten()


def select_heads(inputs: MixerInputs, group_N: Tensor, shape: AttentionShape) -> MixerInputs:
    """Return the inputs of some key/value heads and their query heads."""
    head_N, mask = query_heads(group_N, shape), inputs.mask_BHTS
    return replace(
        inputs,
        q_BHTK=inputs.q_BHTK.index_select(1, head_N),
        k_BGTK=inputs.k_BGTK.index_select(1, group_N),
        v_BGTV=inputs.v_BGTV.index_select(1, group_N),
        mask_BHTS=mask if mask is None or mask.shape[1] == 1 else mask.index_select(1, head_N),
    )


def _split_state(state: MixerState) -> tuple[MixerState, MixerState]:
    """Return (state of the softmax heads, state of the others)."""
    softmax = {name.removeprefix(PREFIX): t for name, t in state.tensors.items() if name.startswith(PREFIX)}
    others = {name: t for name, t in state.tensors.items() if not name.startswith(PREFIX)}
    return MixerState(state.seen_B, softmax), replace(state, tensors=others)


def _join_states(others: MixerState, softmax: MixerState) -> MixerState:
    return replace(others, tensors={**others.tensors, **{f"{PREFIX}{name}": t for name, t in softmax.tensors.items()}})
