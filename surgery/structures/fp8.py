"""Products in FP8, e4m3: weights with one scale per output, inputs with one scale per token (torch's `_scaled_mm`).

    y[n, r] = s_n t_r sum_k a[n, k] w[r, k]      a = e4m3(x[n] / s_n), s_n = max |x[n]| / 448      t_r: of the stored weight

Micikevicius et al. 2022, "FP8 Formats for Deep Learning". 448 is the largest value of e4m3. The scales of inputs are
taken at every call. Where `_scaled_mm` does not run, the same rounded values are multiplied in float32, so every device
computes the same function up to the order and the rounding of sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.dispatch import dispatched

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
DIVISOR = 16  # of the sizes of a matrix that `_scaled_mm` takes
RESULTS = (torch.bfloat16,)  # dtypes of y that `_scaled_mm` writes with scales per row


def to_e4m3(rows_XK: Tensor, scale_X1: Tensor) -> Tensor:
    """Return rows / scale in e4m3, at most 448."""
    return (rows_XK.float() / scale_X1).clamp(-LARGEST, LARGEST).to(E4M3)


def token_scales(x_NK: Tensor) -> Tensor:
    """Return max |x| / 448 of each token (N, 1) in float32; 1 for tokens of zeros."""
    scale_N1 = x_NK.abs().amax(-1, keepdim=True).float() / LARGEST
    return torch.where(scale_N1 == 0, 1.0, scale_N1)


@dispatched
def quantize_tokens(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / s in e4m3 (N, K) and the scales s (N, 1) of `token_scales`. On a GPU a kernel computes them."""
    scale_N1 = token_scales(x_NK)
    return to_e4m3(x_NK, scale_N1), scale_N1


def fp8_product(x_NK: Tensor, weight_RK: Tensor, scale_R: Tensor) -> Tensor:
    """Return y (N, R) in x's dtype. weight: e4m3."""
    rounded_NK, scale_N1 = quantize_tokens(x_NK)
    if supports_scaled_mm(x_NK):
        a_NK, w_RK, t_R = pad_sizes(rounded_NK, weight_RK, scale_R.float())
        y: Tensor = torch._scaled_mm(
            a_NK, w_RK.t(), scale_a=scale_N1, scale_b=t_R.unsqueeze(0), out_dtype=x_NK.dtype, use_fast_accum=True
        )
        return y[:, : len(weight_RK)]
    sum_NR = F.linear(rounded_NK.float(), weight_RK.float())  # in float16 products of 448 would overflow
    return (sum_NR * scale_N1 * scale_R.float()).to(x_NK.dtype)


def pad_sizes(rounded_NK: Tensor, weight_RK: Tensor, scale_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, weights and scales with zeros up to multiples of 16 inputs and outputs, which `_scaled_mm` takes."""
    outputs, inputs = (-size % DIVISOR for size in weight_RK.shape)
    if not inputs and not outputs:
        return rounded_NK, weight_RK, scale_R
    a_NK = F.pad(rounded_NK.view(torch.uint8), (0, inputs)).view(E4M3)  # a byte of zeros is 0 in e4m3
    w_RK = F.pad(weight_RK.view(torch.uint8), (0, inputs, 0, outputs)).view(E4M3)
    return a_NK, w_RK, F.pad(scale_R, (0, outputs))


def supports_scaled_mm(x_NK: Tensor) -> bool:
    """Return whether `_scaled_mm` computes a product with scales per row: on Hopper and later GPUs, in bfloat16."""
    if not x_NK.is_cuda or torch.version.hip is not None or x_NK.dtype not in RESULTS:
        return False
    return torch.cuda.get_device_capability(x_NK.device) >= (9, 0)
