"""Optional layers of the linear attention mixer: short convolution of its inputs, norm and gate of its outputs.

The convolution and the gate are initialised as the identity: adding them to a converted model does not change its
outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.mixers.common.window_hybrid import apply_gate
from surgery.mixers.padding import Unpadder
from surgery.mixers.projections import InputDtypeLinear


class ShortConvolution(nn.Module):
    """Causal depthwise convolution, y_t = sum_w weight[w] x_(t - width + 1 + w), per channel.

    As in Mamba-2 and Gated DeltaNet, but without their activation, which would prevent an initialisation as the
    identity. The state is the last width - 1 inputs.
    """

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.channels, self.width = channels, width
        weight_CW = torch.zeros(channels, width)
        weight_CW[:, -1] = 1
        self.weight = nn.Parameter(weight_CW)

    def forward(self, x_BTC: Tensor, past_BWC: Tensor, unpadder: Unpadder) -> tuple[Tensor, Tensor]:
        """Return (y_BTC in the dtype of x, state (B, width - 1, C) after these tokens).

        x_BTC: unpadded tokens. past_BWC: state before them. State and sums are float32 or float64.
        """
        all_BSC = torch.cat([past_BWC, x_BTC.to(torch.promote_types(x_BTC.dtype, past_BWC.dtype))], dim=1)
        weight_C1W = self.weight.to(all_BSC.dtype).unsqueeze(1)
        y_BCT = F.conv1d(all_BSC.mT, weight_C1W, groups=weight_C1W.shape[0])
        return y_BCT.mT.to(x_BTC.dtype), unpadder.latest(all_BSC, self.width - 1, dim=1)


class HeadNorm(nn.Module):
    """RMS norm over the V dims of each head, with a weight per head and dim."""

    def __init__(self, heads: int, values: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, values))

    def forward(self, x_BTHV: Tensor) -> Tensor:
        """Return x / rms(x) * weight, (B, T, H, V)."""
        scale_BTH1 = (x_BTHV.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x_BTHV * scale_BTH1 * self.weight.to(x_BTHV.dtype)


class OutputGate(nn.Module):
    """Output gate, y <- 2 sigmoid(W x) y, per head (values=1) or per dim (values=V).

    Initially W = 0, which multiplies by 1.
    """

    def __init__(self, dim: int, heads: int, values: int):
        super().__init__()
        self.heads = heads
        self.projection = InputDtypeLinear(dim, heads * values)
        nn.init.zeros_(self.projection.weight)

    def forward(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        """Return the gated outputs (B, T, H, V). x_BTD: hidden states."""
        return apply_gate(y_BTHV, self.logits(x_BTD))

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Return W x (B, T, H, V), or (B, T, H, 1) of a gate per head."""
        gate_BTHV: Tensor = self.projection(x_BTD).unflatten(-1, (self.heads, -1))
        return gate_BTHV
