"""Linears stored in 8 or 4 bits, for up to 16 tokens on a GPU: `quantized_matvec_kernel` (kernels/quantized/kernel.py),
and the inputs of products in FP8: `quantize_rows_kernel` (kernels/quantized/tokens.py).

Without gradients. Not yet measured on a GPU: the tiles follow from the bytes that a program keeps in flight. The
reference writes and reads every weight in 16 bits before the product, at least four times the bytes of 8 bits, so the
kernel is used wherever it accepts the arguments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.launch import CachedLaunch
from surgery.kernels.quantized.kernel import quantized_matvec_kernel
from surgery.kernels.quantized.tokens import quantize_rows_kernel
from surgery.structures.btt_products import PLAIN
from surgery.structures.fp8 import E4M3, quantize_tokens
from surgery.structures.quantized import FEW_TOKENS, Storage, quantized_product

DTYPES = {torch.float16, torch.bfloat16, torch.float32}
MAX_COLUMNS = 2**14  # of a row that a program reads once
MAX_ELEMENTS = 2**31  # between the first and the last of x: the kernel counts them in 32 bits


def accepts(x_NGK: Tensor, integers_GRX: Tensor, scale_GRS: Tensor, storage: Storage) -> bool:
    """Return whether the kernel computes this call: a few tokens in the dtype of the scales, no gradients."""
    tensors = x_NGK, integers_GRX, scale_GRS
    extent = sum((size - 1) * stride for size, stride in zip(x_NGK.shape, x_NGK.stride()))
    return (
        not torch.compiler.is_compiling()
        and (x_NGK.is_cuda or x_NGK.is_cpu)
        and all(type(t) in PLAIN and t.device == x_NGK.device for t in tensors)
        and x_NGK.dtype == scale_GRS.dtype
        and x_NGK.dtype in DTYPES
        and not torch.is_autocast_enabled(x_NGK.device.type)
        and 0 < len(x_NGK) <= FEW_TOKENS
        and x_NGK.shape[-1] > 0
        and integers_GRX.shape[1] > 0
        and extent < MAX_ELEMENTS
        and integers_GRX.is_contiguous()
        and scale_GRS.is_contiguous()
        and not (torch.is_grad_enabled() and x_NGK.requires_grad)
    )


class _Sizes(NamedTuple):
    N: int
    K: int
    R: int
    WIDTH: int
    GROUPS: int
    x_n: int
    x_g: int
    x_k: int


@lru_cache(maxsize=4096)
def _launch(sizes: _Sizes, G: int, storage: Storage, dtype: torch.dtype) -> CachedLaunch:
    group = 0 if sizes.GROUPS == 1 else storage.group_size(sizes.K)
    longest = max(32, triton.next_power_of_2(sizes.K))
    single = sizes.N == 1
    columns = max(group, min(longest, (1024 if single else 256) * 8 // storage.bits))
    rows = (8 if single else 16) * (1 if sizes.R <= 8192 else 2)
    tiles = -(-sizes.R // rows)
    options = {
        "BITS": storage.bits, "GROUP": group, "BK": columns, "BR": rows, "BN": 1 if single else FEW_TOKENS,
        "P": "ieee" if dtype == torch.float32 else "tf32", "num_warps": 4, "num_stages": 4,
    }  # fmt: skip
    return CachedLaunch(quantized_matvec_kernel, (G * tiles,), (*sizes, tiles, G), options)


@register_kernel(quantized_product, accepts=accepts)
def quantized_product_triton(x_NGK: Tensor, integers_GRX: Tensor, scale_GRS: Tensor, storage: Storage) -> Tensor:
    """Return out_NGR; arguments as in `quantized_product`."""
    (N, G, K), (_, R, width) = x_NGK.shape, integers_GRX.shape
    sizes = _Sizes(N, K, R, width, scale_GRS.shape[-1], *x_NGK.stride())
    out_NGR = x_NGK.new_empty(N, G, R)
    _launch(sizes, G, storage, x_NGK.dtype)(x_NGK, integers_GRX, scale_GRS, out_NGR)
    return out_NGR


def accepts_tokens(x_NK: Tensor) -> bool:
    """Return whether the kernel rounds these rows: floats on a GPU that has e4m3, no gradients, not compiled."""
    return (
        not torch.compiler.is_compiling()
        and type(x_NK) in PLAIN
        and (x_NK.is_cpu or (x_NK.is_cuda and torch.cuda.get_device_capability(x_NK.device) >= (8, 9)))
        and x_NK.dtype in DTYPES
        and x_NK.numel() > 0
        and x_NK.shape[-1] * max(1, x_NK.stride(-1)) < MAX_ELEMENTS
        and not (torch.is_grad_enabled() and x_NK.requires_grad)
    )


@register_kernel(quantize_tokens, accepts=accepts_tokens)
def quantize_tokens_triton(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 rows and their scales, as `quantize_tokens`."""
    N, K = x_NK.shape
    rounded_NK = torch.empty(N, K, dtype=E4M3, device=x_NK.device)
    scale_N1 = torch.empty(N, 1, dtype=torch.float32, device=x_NK.device)
    columns = min(triton.next_power_of_2(K), MAX_COLUMNS)
    warps = max(1, min(8, columns // 512))
    quantize_rows_kernel[(N,)](
        x_NK, rounded_NK, scale_N1, K, *x_NK.stride(), BK=columns, SINGLE=columns >= K, num_warps=warps
    )
    return rounded_NK, scale_N1
