"""Linear layers of mixers, computed in float32 or in the dtype of their input, and two checks of how they may be
called.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MM_HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype")  # torch.mm(bfloat16, bfloat16, out_dtype=float32), torch 2.8


def autocast_disabled(device: torch.device) -> AbstractContextManager[None]:
    """Return a context without autocast, so that sums over thousands of tokens stay in float32 in mixed-precision
    training.
    """
    is_common = device.type in ("cpu", "cuda")  # torch.compile cannot trace is_autocast_available, so it is called last
    has_autocast = is_common or torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if has_autocast else nullcontext()


class Float32Linear(nn.Linear):
    """Linear layer computed in float32 or wider, whatever dtype the hidden states and the checkpoint are stored in."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return W x + b (B, T, O) in float32, or float64 if the input or the weight is float64."""
        if x_BTD.is_cuda and x_BTD.dtype == torch.bfloat16 and MM_HAS_OUT_DTYPE and not torch.is_grad_enabled():
            return self._split_bfloat16(x_BTD)
        wide = torch.promote_types(torch.promote_types(x_BTD.dtype, self.weight.dtype), torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.linear(x_BTD.to(wide), self.weight.to(wide), bias)

    def _split_bfloat16(self, x_BTD: Tensor) -> Tensor:
        """Return W x + b (B, T, O) in float32 for x in bfloat16, on tensor cores.

        A product of two bfloat16 numbers is exact in float32, so the weight is split into a sum of two bfloat16
        matrices that hold its first 16 mantissa bits. This is several times faster than a float32 product.
        """
        x_ND, weight_OD = x_BTD.flatten(0, -2), self.weight
        first_OD = weight_OD.to(torch.bfloat16)
        parts = [first_OD]
        if weight_OD.dtype != torch.bfloat16:
            parts.append((weight_OD - first_OD).to(torch.bfloat16))
        out_NO = sum(torch.mm(x_ND, part_OD.mT, out_dtype=torch.float32) for part_OD in parts)
        out_NO = out_NO if self.bias is None else out_NO + self.bias.to(torch.float32)
        out_BTO: Tensor = out_NO.unflatten(0, x_BTD.shape[:-1])
        return out_BTO


class InputDtypeLinear(nn.Linear):
    """Linear layer without bias, computed in the dtype of its input."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return W x (B, T, O) in the dtype of x."""
        return F.linear(x_BTD, self.weight.to(x_BTD.dtype))


def is_hooked(module: nn.Module) -> bool:
    """Return whether a call of the module does more than its class's `forward`.

    That is so with forward hooks, with a replaced `forward` (accelerate's offloading), or with parameters that are not
    in memory now (on the meta device). A fused kernel that reads parameters directly must not bypass such a module.
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
        or any(p.is_meta for p in module.parameters(recurse=False))
    )
