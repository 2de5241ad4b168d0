"""Linear layers of mixers, computed in float32 or in the dtype of their input, and two checks of how they may be
called.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
        return float32_linear(x_BTD, self.weight, self.bias)


def float32_linear(x_BTD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return W x + b (B, T, O) in float32, or float64 if the input or the weight is float64."""
    if x_BTD.is_cuda and x_BTD.dtype == torch.bfloat16 and MM_HAS_OUT_DTYPE:
        return split_linear(x_BTD, weight_OD, bias_O)
    wide = torch.promote_types(torch.promote_types(x_BTD.dtype, weight_OD.dtype), torch.float32)
    bias = None if bias_O is None else bias_O.to(wide)
    return F.linear(x_BTD.to(wide), weight_OD.to(wide), bias)


def split_linear(x_BTD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return W x + b (B, T, O) in float32 for x in bfloat16, on tensor cores.

    A product of two bfloat16 numbers is exact in float32, so the weight is split into a sum of two bfloat16 matrices
    that hold its first 16 mantissa bits. This is several times faster than a float32 product. Gradients are products of
    bfloat16 numbers summed in float32, as those of a linear under autocast.
    """
    x_ND = x_BTD.flatten(0, -2)
    if torch.is_grad_enabled() and (x_BTD.requires_grad or weight_OD.requires_grad):
        apply: Any = _SplitProduct.apply  # this function has no types
        out_NO: Tensor = apply(x_ND, weight_OD)
    else:
        out_NO = _split_product(x_ND, weight_OD)
    out_NO = out_NO if bias_O is None else out_NO + bias_O.to(torch.float32)
    return out_NO.view(*x_BTD.shape[:-1], len(weight_OD))


def _split_product(x_ND: Tensor, weight_OD: Tensor) -> Tensor:
    """Return x W^T (N, O) in float32, for x (N, D) in bfloat16."""
    first_OD = weight_OD.to(torch.bfloat16)
    out_NO = _float32_product(x_ND, first_OD.mT)
    if weight_OD.dtype != torch.bfloat16:
        out_NO = out_NO + _float32_product(x_ND, (weight_OD - first_OD).to(torch.bfloat16).mT)
    return out_NO


class _SplitProduct(torch.autograd.Function):
    """x W^T (N, O) in float32, for x (N, D) in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_OD: Tensor) -> Tensor:
        """Return the product."""
        ctx.save_for_backward(x_ND, weight_OD)
        return _split_product(x_ND, weight_OD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and W in their dtypes."""
        x_ND, weight_OD = ctx.saved_tensors
        grad_NO = grads[0].to(torch.bfloat16)
        dx = grad_NO @ weight_OD.to(torch.bfloat16) if ctx.needs_input_grad[0] else None
        dw = _float32_product(grad_NO.mT, x_ND).to(weight_OD.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw


def _float32_product(a_NK: Tensor, b_KM: Tensor) -> Tensor:
    """Return the product of two bfloat16 matrices in float32; CPUs have no such product and widen them."""
    return torch.mm(a_NK, b_KM, out_dtype=torch.float32) if a_NK.is_cuda else a_NK.float() @ b_KM.float()


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
