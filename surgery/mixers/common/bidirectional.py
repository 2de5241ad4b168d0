"""Rows read through a mask: O = (A . M) V by the definition, and in both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from surgery.mixers.common.padding import Unpadder, zero_outside
from surgery.mixers.masks.base import Mask, MaskInputs
from surgery.mixers.masks.delta_rule import dense_scores


def dense_output(mask: Mask, rows: MaskInputs) -> Tensor:
    """out_BGJTV with A and M written out."""
    m_BGJTT = mask("dense", rows.start_B, rows.v_BGTV.shape[2], rows.signals)
    return torch.einsum(
        "bgjts,bgsv->bgjtv", dense_scores(rows.q_BGJTF, rows.k_BGTF, rows.beta_BGT) * m_BGJTT, rows.v_BGTV
    )


def zero_padding_writes(rows: MaskInputs, written: tuple[str, ...]) -> MaskInputs:
    """Tokens past count_B write nothing."""
    real_BT = torch.arange(rows.v_BGTV.shape[2], device=rows.count_B.device) < rows.count_B.unsqueeze(1)
    return replace(
        rows,
        k_BGTF=zero_outside(rows.k_BGTF, real_BT, dim=2),
        v_BGTV=zero_outside(rows.v_BGTV, real_BT, dim=2),
        beta_BGT=None if rows.beta_BGT is None else zero_outside(rows.beta_BGT, real_BT, dim=2),
        signals={n: zero_outside(t, real_BT, dim=1) if n in written else t for n, t in rows.signals.items()},
    )


def bidirectional_output(
    read: Callable[[MaskInputs], Tensor], mask: Mask, rows: MaskInputs, unpadder: Unpadder
) -> Tensor:
    """A causal mask for bidirectional attention: the tokens before and with each one, those after and with it in the
    reversed sequence (which is read from position 0 too), less the token itself, which both have."""
    back = reverse_inputs(rows, unpadder)
    return read(rows) + unpadder.reverse(read(back) - diagonal_output(mask, back), dim=3)


def reverse_inputs(rows: MaskInputs, unpadder: Unpadder) -> MaskInputs:
    """The rows the other way round."""
    return replace(
        rows,
        q_BGJTF=unpadder.reverse(rows.q_BGJTF, dim=3),
        k_BGTF=unpadder.reverse(rows.k_BGTF, dim=2),
        v_BGTV=unpadder.reverse(rows.v_BGTV, dim=2),
        beta_BGT=None if rows.beta_BGT is None else unpadder.reverse(rows.beta_BGT, dim=2),
        signals={name: unpadder.reverse(t, dim=1) for name, t in rows.signals.items()},
    )


def diagonal_output(mask: Mask, rows: MaskInputs) -> Tensor:
    """The diagonal's share, M_tt A_tt v_t (B, G, J, T, V): M of sequences of one token each, at their positions."""
    batch, length = rows.v_BGTV.shape[0], rows.v_BGTV.shape[2]
    position_BT = rows.start_B.unsqueeze(1) + torch.arange(length, device=rows.start_B.device)
    signals = {name: t.flatten(0, 1).unsqueeze(1) for name, t in rows.signals.items()}
    m_XGJ = mask("dense", position_BT.flatten(), 1, signals)[..., 0, 0]
    m_BGJT1 = m_XGJ.expand(batch * length, -1, -1).unflatten(0, (batch, length)).permute(0, 2, 3, 1).unsqueeze(-1)
    value_BGTV = rows.v_BGTV if rows.beta_BGT is None else rows.v_BGTV * rows.beta_BGT.unsqueeze(-1)
    score_BGJT1 = (rows.q_BGJTF * rows.k_BGTF.unsqueeze(2)).sum(-1, keepdim=True)
    return m_BGJT1 * score_BGJT1 * value_BGTV.unsqueeze(2)
