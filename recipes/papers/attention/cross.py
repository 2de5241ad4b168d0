"""Structured masked attention between two sequences (Dao and Gu 2024, sections 4.1 to 4.3), in both orders of
contraction.

    Y = contract(TN, SN, SP, TS -> TP)(Q, K, V, L)          eq. 12; T queries, S keys and values, N and P their dims

    quadratic   G = Q K^T,  M = G . L,  Y = M V               eq. 13
    linear      Z = V K,    H = L Z,    Y = Q . H             eq. 15; H = L Z by the mask's own product

A mask takes two vectors of positions, one of the queries and one of the keys. With S = T and equal positions it is a
mask of self-attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError


class CrossMask(Protocol):
    """A structured matrix L (T, S)."""

    def dense(self) -> Tensor:
        """Return L (T, S)."""

    def product(self, z_SX: Tensor) -> Tensor:
        """Return L z (T, X) without forming L."""


@dataclass
class LowRankMask:
    """L = left right^T; all ones with columns of ones."""

    left_TR: Tensor
    right_SR: Tensor

    def dense(self) -> Tensor:
        """Return L (T, S)."""
        return self.left_TR @ self.right_SR.mT

    def product(self, z_SX: Tensor) -> Tensor:
        """Return L z (T, X), with R (S + T) multiplications per column."""
        return self.left_TR @ (self.right_SR.mT @ z_SX)


@dataclass
class CausalDecay:
    """L_ts = decay^(p_t - p_s) for keys at positions p_s <= p_t, else 0. decay: in (0, 1]; 1 is the causal mask.

    query_T, key_S: positions; those of the keys must not fall. Raises SurgeryError otherwise.
    """

    query_T: Tensor
    key_S: Tensor
    decay: float

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise SurgeryError(f"cross attention: decay must be in (0, 1] (got {self.decay})")
        if bool((self.key_S.diff() < 0).any()):
            raise SurgeryError("cross attention: positions of the keys fall; sort keys and values by position")

    def dense(self) -> Tensor:
        """Return L (T, S)."""
        distance_TS = (self.query_T.unsqueeze(1) - self.key_S).double()
        return torch.where(distance_TS >= 0, self.decay ** distance_TS.clamp_min(0), 0)

    def product(self, z_SX: Tensor) -> Tensor:
        """Return L z (T, X) by a recurrence over the keys, with one multiplication per key, query and column."""
        state_X, states = torch.zeros_like(z_SX[0]), [torch.zeros_like(z_SX[0])]
        for s, z_X in enumerate(z_SX):
            gap = int(self.key_S[s] - self.key_S[s - 1]) if s else 0
            state_X = self.decay**gap * state_X + z_X
            states.append(state_X)
        seen_T = torch.searchsorted(self.key_S.contiguous(), self.query_T.contiguous(), right=True)
        gap_T = self.query_T - self.key_S[(seen_T - 1).clamp_min(0)]
        fade_T = torch.where(seen_T > 0, self.decay ** gap_T.clamp_min(0).double(), 0).to(z_SX.dtype)
        return fade_T.unsqueeze(1) * torch.stack(states)[seen_T]


def quadratic_attention(q_TN: Tensor, k_SN: Tensor, v_SP: Tensor, mask: CrossMask) -> Tensor:
    """Return Y (T, P) in the order of eq. 13, with T S (N + P) multiplications."""
    return (q_TN @ k_SN.mT * mask.dense().to(q_TN.dtype)) @ v_SP


def linear_attention(q_TN: Tensor, k_SN: Tensor, v_SP: Tensor, mask: CrossMask) -> Tensor:
    """Return Y (T, P) in the order of eq. 15: no tensor has both axes T and S."""
    z_SPN = torch.einsum("sp,sn->spn", v_SP, k_SN)
    h_TPN = mask.product(z_SPN.flatten(1)).unflatten(1, z_SPN.shape[1:])
    return torch.einsum("tn,tpn->tp", q_TN, h_TPN)
