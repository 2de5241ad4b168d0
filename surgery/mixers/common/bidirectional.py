"""Linear attention O = (A . M) V by the definition, and bidirectional attention with a causal mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from surgery.mixers.masks.base import Mask, MaskInputs
from surgery.mixers.masks.delta_rule import dense_scores
from surgery.mixers.padding import Unpadder, zero_outside


def dense_output(mask: Mask, rows: MaskInputs, block: int | None = None) -> Tensor:
    """Return out_BGJTV by the definition, with A and M (B, G, J, T, T) formed explicitly.

    block: queries read the state at the start of their block of that many tokens; None: the state after their own
    token.
    """
    length = rows.v_BGTV.shape[2]
    if block is None:
        m_BGJTT = mask("dense", rows.start_B, length, rows.signals)
    else:
        m_BGJTT = mask("dense_by_block", rows.start_B, length, rows.signals, block)
    scores = dense_scores(rows.q_BGJTF, rows.k_BGTF, rows.beta_BGT, block)
    return torch.einsum("bgjts,bgsv->bgjtv", scores * m_BGJTT, rows.v_BGTV)


def zero_padding_writes(rows: MaskInputs, written: tuple[str, ...]) -> MaskInputs:
    """Return the rows with k, v, beta and the signals named in `written` set to 0 for tokens past count_B (padding)."""
    real_BT = torch.arange(rows.v_BGTV.shape[2], device=rows.count_B.device) < rows.count_B.unsqueeze(1)
    return replace(
        rows,
        k_BGTF=zero_outside(rows.k_BGTF, real_BT, dim=2),
        v_BGTV=zero_outside(rows.v_BGTV, real_BT, dim=2),
        beta_BGT=None if rows.beta_BGT is None else zero_outside(rows.beta_BGT, real_BT, dim=2),
        signals={n: zero_outside(t, real_BT, dim=1) if n in written else t for n, t in rows.signals.items()},
    )


def bidirectional_output(
    causal: Callable[[MaskInputs], Tensor], mask: Mask, rows: MaskInputs, unpadder: Unpadder
) -> Tensor:
    """Return out_BGJTV of bidirectional attention with a causal mask: a forward and a backward pass.

    The backward pass is the causal one on the reversed sequence, which also begins at position 0. Both passes contain
    the diagonal t = s, which is subtracted once.
    """
    back = reverse_inputs(rows, unpadder)
    return causal(rows) + unpadder.reverse(causal(back) - diagonal_output(mask, back), dim=3)


def reverse_inputs(rows: MaskInputs, unpadder: Unpadder) -> MaskInputs:
    """Return the rows with the tokens of each row in reverse order."""
    return replace(
        rows,
        q_BGJTF=unpadder.reverse(rows.q_BGJTF, dim=3),
        k_BGTF=unpadder.reverse(rows.k_BGTF, dim=2),
        v_BGTV=unpadder.reverse(rows.v_BGTV, dim=2),
        beta_BGT=None if rows.beta_BGT is None else unpadder.reverse(rows.beta_BGT, dim=2),
        signals={name: unpadder.reverse(t, dim=1) for name, t in rows.signals.items()},
    )


def diagonal_output(mask: Mask, rows: MaskInputs) -> Tensor:
    """Return the term of the diagonal, M_tt A_tt v_t (B, G, J, T, V)."""
    m_BGJT1: Tensor = mask("diagonal", rows.start_B, rows.v_BGTV.shape[2], rows.signals).unsqueeze(-1)
    value_BGTV = rows.v_BGTV if rows.beta_BGT is None else rows.v_BGTV * rows.beta_BGT.unsqueeze(-1)
    score_BGJT1 = (rows.q_BGJTF * rows.k_BGTF.unsqueeze(2)).sum(-1, keepdim=True)
    return m_BGJT1 * score_BGJT1 * value_BGTV.unsqueeze(2)
