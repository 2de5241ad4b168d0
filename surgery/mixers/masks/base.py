"""The masks M of linear-type attention, O = (A . M) V (Guo et al. 2025, "Log-Linear Attention", section 2).

A mask has three faces that agree to rounding: `dense` (the definition), `chunked` (training, prefill) and `step`
(a token at a time with a bounded state). It sees tokens as `MaskInputs`: packed to the front, padding behind them, each
row with its own position, so that masks that are not invariant under shifts are right for every row.
Leading axes B, G, J: a tensor that does not differ over the J query heads of a group has 1 there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from surgery.core.registry import Registry
from surgery.mixers.base import AttentionShape, MethodModule


@dataclass
class MaskInputs:
    """q reads at the position where k, v are written. Tokens past count_B (padding) write nothing: their k, v, beta
    and every signal that is written are 0; what they read is any number.

    q_BGJTF, k_BGTF features; v_BGTV; beta_BGT of the delta rule or None (kernel scores).
    start_B: position of each row's first token; signals: name -> what `Mask.signals` gave, (B, T, ..).
    max_seen: a bound of start_B + count_B, known without asking the device; None: none is known.
    """

    q_BGJTF: Tensor
    k_BGTF: Tensor
    v_BGTV: Tensor
    beta_BGT: Tensor | None
    start_B: Tensor
    count_B: Tensor
    signals: dict[str, Tensor]
    max_seen: int | None = None


class Mask(MethodModule):
    """One structured mask. `written_signals`: signals that belong to the written token (gates); others belong to the reader
    (lambda, mixing rows). Parameters and signals are float32."""

    config_type: ClassVar[type]
    written_signals: ClassVar[tuple[str, ...]] = ()
    has_bounded_state: ClassVar[bool] = True  # False: a step needs all keys and values so far

    def __init__(self, config: Any, shape: AttentionShape):
        super().__init__()
        self.config, self.shape = config, shape

    @classmethod
    def check_config(cls, config: Any, shape: AttentionShape, delta: bool) -> None:
        """SurgeryError where the mask cannot serve (bidirectional, with the delta rule, ..); says why."""

    def signals(self, x_BTD: Tensor) -> dict[str, Tensor]:
        """What the mask reads off the hidden states, (B, T, ..) each."""
        return {}

    def empty_state(self, rows: int, features: int, values: int, device: Any) -> dict[str, Tensor]:
        """The state of `rows` sequences before their first token: float32 tensors, batch first."""
        raise NotImplementedError

    def dense(self, start_B: Tensor, length: int, signals: dict[str, Tensor]) -> Tensor:
        """M_BGJTT of tokens at start .. start + length, lower triangular (G or J may be 1)."""
        raise NotImplementedError

    def chunked(
        self, rows: MaskInputs, state: dict[str, Tensor] | None, chunk: int
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """(out_BGJTV, state after the rows' tokens, or None where None was given)."""
        raise NotImplementedError

    def step(self, rows: MaskInputs, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The same for one token a row (T = 1), without chunks."""
        raise NotImplementedError

    @classmethod
    def state_size(cls, config: Any, shape: AttentionShape, features: int, values: int, length: int) -> int:
        """Numbers in the state after `length` tokens, per key/value head."""
        raise NotImplementedError


MASKS: Registry[Mask] = Registry("mask", "surgery.mixers.masks")
