"""What recipes put around a linear-type mixer: a short convolution before it, a norm and a gate behind it. The
convolution and the gate start as the identity, so that adding them to a converted model changes nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.mixers.common.padding import Unpadder
from surgery.mixers.projections import InputDtypeLinear


class ShortConvolution(nn.Module):
    """y_t = sum_w weight[w] x_(t - width + 1 + w), a causal filter for each channel (Mamba-2; Gated DeltaNet, without
    their activation, which no weight could make the identity). It remembers the last width - 1 inputs."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.channels, self.width = channels, width
        weight_CW = torch.zeros(channels, width)
        weight_CW[:, -1] = 1
        self.weight = nn.Parameter(weight_CW)

    def forward(self, x_BTC: Tensor, past_BWC: Tensor, unpadder: Unpadder) -> tuple[Tensor, Tensor]:
        """(y in the dtype of x, the past after these tokens); the past and all sums in float32 or more."""
        all_BSC = torch.cat([past_BWC, x_BTC.to(torch.promote_types(x_BTC.dtype, past_BWC.dtype))], dim=1)
        weight_C1W = self.weight.to(all_BSC.dtype).unsqueeze(1)
        y_BCT = F.conv1d(all_BSC.mT, weight_C1W, groups=weight_C1W.shape[0])
        return y_BCT.mT.to(x_BTC.dtype), unpadder.latest(all_BSC, self.width - 1, dim=1)


class HeadNorm(nn.Module):
    """RMS norm over the V numbers of each head, with a weight for each."""

    def __init__(self, heads: int, values: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, values))

    def forward(self, x_BTHV: Tensor) -> Tensor:
        scale_BTH1 = (x_BTHV.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x_BTHV * scale_BTH1 * self.weight.to(x_BTHV.dtype)


class OutputGate(nn.Module):
    """y = 2 sigmoid(W x) * y for each head (values 1) or each number of it (values V). W = 0 at the start: times 1."""

    def __init__(self, dim: int, heads: int, values: int):
        super().__init__()
        self.heads = heads
        self.projection = InputDtypeLinear(dim, heads * values)
        nn.init.zeros_(self.projection.weight)

    def forward(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        gate_BTX = self.projection(x_BTD)
        return y_BTHV * (2 * gate_BTX.unflatten(-1, (self.heads, -1)).to(y_BTHV.dtype).sigmoid())
