"""The stock layers of linear attention under common names: how softmax attention is copied into them.

Gated DeltaNet         f = SiLU, g = -exp(A_log) softplus(W_a x + dt_bias), one for each head
Kimi delta attention   f = sigmoid, g = -5 sigmoid(exp(A_log) (W_f x + dt_bias)), one for each key channel

See `surgery.conversion.stock_layer` for the rest of the layer. H heads of K dims, D hidden states, F = H K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from surgery.mixers.masks.chunking import inverse_softplus

GATE = 4.0  # z at the start: SiLU(4) = 3.93, almost linear, and sigmoid(4) = 0.98
NO_DECAY = -20.0


class StockModule(ABC):
    """A layer of linear attention. module: of the library, called with hidden states alone."""

    def __init__(self, module: Any):
        self.module = module

    @property
    @abstractmethod
    def output(self) -> nn.Linear:
        """The output projection."""

    @abstractmethod
    def qkv(self, x_ND: Tensor) -> tuple[Tensor, ...]:
        """Return what the convolution reads for queries, keys and values, (N, F) each."""

    @abstractmethod
    def copy(self, rows: tuple[Tensor, Tensor, Tensor], output_DF: Tensor, constant_D: Tensor) -> None:
        """Copy the rows (F, D) of q, k, v and the output projection. No decay, beta 1/2, z = GATE, norm weights 1.

        constant_D: u with u . x close to 1.
        """

    @abstractmethod
    def set_gates(self, rate_H: Tensor, beta_H: Tensor, constant_D: Tensor) -> None:
        """Set constant decay rates per token, and step sizes."""


class GatedDeltaNet(StockModule):
    """Of Qwen3.5."""

    @property
    def output(self) -> nn.Linear:
        """The output projection."""
        output: nn.Linear = self.module.out_proj
        return output

    def qkv(self, x_ND: Tensor) -> tuple[Tensor, ...]:
        """Return what the convolution reads."""
        module = self.module
        parts: tuple[Tensor, ...] = module.in_proj_qkv(x_ND).split(
            [module.key_dim, module.key_dim, module.value_dim], dim=-1
        )
        return parts

    @torch.no_grad()
    def copy(self, rows: tuple[Tensor, Tensor, Tensor], output_DF: Tensor, constant_D: Tensor) -> None:
        """Copy the rows of q, k, v and the output projection."""
        module = self.module
        module.in_proj_qkv.weight.copy_(torch.cat(rows))
        module.in_proj_z.weight.copy_(GATE * constant_D.expand_as(module.in_proj_z.weight))
        for parameter in (module.in_proj_a.weight, module.in_proj_b.weight, module.A_log):
            parameter.zero_()
        module.dt_bias.fill_(NO_DECAY)
        module.norm.weight.fill_(1.0)
        module.out_proj.weight.copy_(output_DF)

    @torch.no_grad()
    def set_gates(self, rate_H: Tensor, beta_H: Tensor, constant_D: Tensor) -> None:
        """Set constant decay rates per token, and step sizes."""
        self.module.dt_bias.copy_(inverse_softplus(rate_H))
        self.module.in_proj_b.weight.copy_(beta_H.logit()[:, None] * constant_D)


class KimiDeltaAttention(StockModule):
    """Of Ling 3.0."""

    @property
    def output(self) -> nn.Linear:
        """The output projection."""
        output: nn.Linear = self.module.o_proj
        return output

    def qkv(self, x_ND: Tensor) -> tuple[Tensor, ...]:
        """Return what the convolution reads."""
        return self.module.q_proj(x_ND), self.module.k_proj(x_ND), self.module.v_proj(x_ND)

    @torch.no_grad()
    def copy(self, rows: tuple[Tensor, Tensor, Tensor], output_DF: Tensor, constant_D: Tensor) -> None:
        """Copy the rows of q, k, v and the output projection."""
        module, gate = self.module, self.module.forget_gate
        for name, rows_FD in zip("qkv", rows):
            getattr(module, f"{name}_proj").weight.copy_(rows_FD)
        module.g_proj.weight.copy_(GATE * constant_D.expand_as(module.g_proj.weight))
        for parameter in (gate.f_proj.weight, module.b_proj.weight, gate.A_log):
            parameter.zero_()
        gate.dt_bias.fill_(NO_DECAY)
        module.o_norm.weight.fill_(1.0)
        module.o_proj.weight.copy_(output_DF)

    @torch.no_grad()
    def set_gates(self, rate_H: Tensor, beta_H: Tensor, constant_D: Tensor) -> None:
        """Set constant decay rates per token, and step sizes."""
        gate = self.module.forget_gate
        gate.dt_bias.copy_((rate_H / -gate.lower_bound).logit().repeat_interleave(gate.head_dim))
        self.module.b_proj.weight.copy_(beta_H.logit()[:, None] * constant_D)


STOCK_MODULES: dict[str, type[StockModule]] = {"gated-deltanet": GatedDeltaNet, "kda": KimiDeltaAttention}
