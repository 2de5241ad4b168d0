"""Protocol of the masks M of linear attention, O = (A . M) V (Guo et al. 2025, "Log-Linear Attention", section 2).

A mask has three implementations that agree up to rounding: `dense` (the definition, quadratic), `chunked` (training and
prefill) and `step` (one token with a state). Tokens come as `MaskInputs`: real tokens first in each row, padding behind
them, and the absolute position of each row's first token, because some masks depend on absolute positions.
A tensor that is the same for all J query heads of a group may have size 1 in axis J.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from surgery.core.registry import Registry
from surgery.mixers.base import AttentionShape, MethodModule

MaskState = dict[str, Tensor]  # state of a mask by name, float32, batch first
Signals = dict[str, Tensor]  # tensors (B, T, ..) that a mask computes from the hidden states, by name


@dataclass
class MaskInputs:
    """Inputs of a mask for one call. Token t is written to the state before query t reads it.

    q_BGJTF, k_BGTF: features of queries and keys. v_BGTV: values.
    beta_BGT: step sizes of the delta rule, or None for kernel scores.
    start_B: absolute position of each row's first token. count_B: number of real tokens per row; k, v, beta and the
    written signals of later tokens must be 0, and outputs of those tokens are arbitrary.
    signals: result of `Mask.signals`. max_seen: upper bound of start_B + count_B that needs no device synchronization, or
    None if no bound is known.
    """

    q_BGJTF: Tensor
    k_BGTF: Tensor
    v_BGTV: Tensor
    beta_BGT: Tensor | None
    start_B: Tensor
    count_B: Tensor
    signals: Signals
    max_seen: int | None = None


class Mask(MethodModule):
    """Base class of structured masks. Parameters and signals are float32.

    written_signals: names of the signals that belong to the written token (gates); the others belong to the query.
    has_bounded_state: False if a step needs all earlier keys and values.
    """

    config_type: ClassVar[type]
    written_signals: tuple[str, ...] = ()
    has_bounded_state: ClassVar[bool] = True

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__()
        self.config, self.shape = config, shape

    @classmethod
    def check_config(cls, config: Any, shape: AttentionShape, delta: bool) -> None:
        """Raise SurgeryError if the mask cannot be used for this attention. delta: whether scores are the delta rule's."""

    def signals(self, x_BTD: Tensor) -> Signals:
        """Return the tensors (B, T, ..) that the mask computes from the hidden states."""
        return {}

    def empty_state(self, rows: int, features: int, values: int, device: torch.device | str) -> MaskState:
        """Return the state of `rows` sequences before their first token."""
        raise NotImplementedError

    def dense(self, start_B: Tensor, length: int, signals: Signals) -> Tensor:
        """Return M_BGJTT of `length` tokens from position start_B on (G or J may be 1); lower triangular if causal."""
        raise NotImplementedError

    def chunked(self, rows: MaskInputs, state: MaskState | None, chunk: int) -> tuple[Tensor, MaskState | None]:
        """Return (out_BGJTV, state after the rows' tokens, or None without a state). chunk: tokens per chunk."""
        raise NotImplementedError

    def step(self, rows: MaskInputs, state: MaskState) -> tuple[Tensor, MaskState]:
        """Return (out_BGJTV, state after the token) for one token per row (T = 1)."""
        raise NotImplementedError

    @classmethod
    def state_size(cls, config: Any, shape: AttentionShape, features: int, values: int, length: int) -> int:
        """Return the number of elements in the state after `length` tokens, per key/value head."""
        raise NotImplementedError


MASKS: Registry[Mask] = Registry("mask", "surgery.mixers.masks")
