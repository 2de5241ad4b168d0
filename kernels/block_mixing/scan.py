"""block_scan and block_scan_both on the GPU: one pass over the blocks' sums each way, gradients by the same pass from
the other end (kernels/block_mixing/scan_kernels.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.block_mixing.scan_kernels import parameter_grad_tiles, scan_tiles, toeplitz_tables
from surgery.mixers.masks.toeplitz_block_mixing import block_scan, block_scan_bidirectional

# How operands of dots come, and their precision: half is exact in tf32, whose range does not end at 65,504. Triton's
# interpreter has no products of bfloat16.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OPERANDS = {
    torch.bfloat16: (torch.float32, tl.float32, "ieee") if INTERPRETED else (torch.bfloat16, tl.bfloat16, "tf32"),
    torch.float16: (torch.float32, tl.float32, "tf32"),
    torch.float32: (torch.float32, tl.float32, "tf32x3"),
}
MAX_HEADS = 16  # unrolled in the adjoint


@dataclass(frozen=True)
class ScanTile:
    """blocks x numbers of one program's tile."""

    blocks: int
    numbers: int
    warps: int
    stages: int


# The fastest of 30 on one H200 (2026-11-21, 12 heads of 64 x 64): 0.80 ms for 16,384 blocks, whose bytes take 0.77.
SCAN_TILES = {
    torch.bfloat16: ScanTile(16, 128, 4, 4),
    torch.float16: ScanTile(16, 64, 4, 3),
    torch.float32: ScanTile(16, 64, 4, 3),
}
PARAMETER_GRAD_TILES = {
    torch.bfloat16: ScanTile(32, 64, 4, 4),
    torch.float16: ScanTile(16, 32, 2, 3),
    torch.float32: ScanTile(16, 32, 2, 2),
}


def count_tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def next_power_of_2(size: int) -> int:
    """The next one."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class ToeplitzKernel:
    """K(d) of every query head, in float32."""

    rate_RG: Tensor
    weight_RGJ: Tensor

    @classmethod
    def from_parameters(cls, rate_RG: Tensor, weight_RGJ: Tensor) -> ToeplitzKernel:
        """Without gradients."""
        return cls(rate_RG.float().contiguous(), weight_RGJ.float().contiguous())

    def table(self, dtype: torch.dtype, diagonal: bool, blocks: int) -> Tensor:
        """K written out for tiles of that many blocks."""
        components, groups, per_group = self.weight_RGJ.shape
        table = torch.empty(groups, per_group, blocks, blocks, dtype=OPERANDS[dtype][0], device=self.rate_RG.device)
        toeplitz_tables[(groups * per_group,)](
            table, self.rate_RG, self.weight_RGJ, groups, per_group, components, diagonal, blocks
        )
        return table


def scan(
    x: Tensor,
    kernel: ToeplitzKernel,
    adjoint: bool = False,
    reverse: bool = False,
    diagonal: bool = False,
    first: Tensor | None = None,
    final: bool = False,
    count_B: Tensor | None = None,
    onto: Tensor | None = None,
    tile: ScanTile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x (B, G, M, E) -> mixed (B, G, J, M, E) and the state behind its last block; the adjoint the other way round.
    onto: added to, in place. States are (B, R, G, E)."""
    batch, groups, blocks, numbers = x.shape[0], x.shape[1], x.shape[-2], x.shape[-1]
    components, _, per_group = kernel.weight_RGJ.shape
    tile = tile or SCAN_TILES[x.dtype]
    shape = (batch, groups, blocks, numbers) if adjoint else (batch, groups, per_group, blocks, numbers)
    if onto is None:
        out = x.new_empty(shape) if count_B is None else x.new_zeros(shape)
    else:
        out = onto
    last = None
    if final:
        last = torch.empty(batch, components, groups, numbers, dtype=torch.float32, device=x.device)
    heads = 1 if adjoint else per_group
    scan_tiles[(count_tiles(numbers, tile.numbers) * heads, batch * groups)](
        x, kernel.table(x.dtype, diagonal, tile.blocks) if adjoint and per_group > 1 else x,
        kernel.rate_RG, kernel.weight_RGJ,
        x if first is None else first, out, x if last is None else last, x if count_B is None else count_B,
        groups, blocks, numbers,
        R=components, J=per_group, ADJOINT=adjoint, REVERSE=reverse, DIAGONAL=diagonal, ADD=onto is not None,
        INITIAL=first is not None, FINAL=final, COUNTED=count_B is not None,
        BM=tile.blocks, BE=tile.numbers, RP=16, OP=OPERANDS[x.dtype][1], PRECISION=OPERANDS[x.dtype][2],
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return out, last


def parameter_grads(
    x: Tensor,
    grad: Tensor,
    kernel: ToeplitzKernel,
    reverse: bool = False,
    diagonal: bool = False,
    first: Tensor | None = None,
    grad_last: Tensor | None = None,
    count_B: Tensor | None = None,
    tile: ScanTile | None = None,
) -> tuple[Tensor, Tensor]:
    """(drate_RG, dweight_RGJ) of a scan of x (B, G, M, E) whose result has the gradient grad (B, G, J, M, E)."""
    batch, groups, per_group, blocks, numbers = grad.shape
    components = len(kernel.rate_RG)
    tile = tile or PARAMETER_GRAD_TILES[x.dtype]
    parts = count_tiles(numbers, tile.numbers)
    sums = torch.empty(batch, groups, per_group, parts, 2, 16, dtype=torch.float32, device=x.device)
    parameter_grad_tiles[(parts * per_group, batch * groups)](
        x, grad, kernel.rate_RG, kernel.weight_RGJ, x if first is None else first, x if grad_last is None else grad_last, sums,
        x if count_B is None else count_B, groups, blocks, numbers,
        R=components, J=per_group, REVERSE=reverse, DIAGONAL=diagonal, INITIAL=first is not None, FINAL=grad_last is not None,
        COUNTED=count_B is not None, BM=tile.blocks, BE=tile.numbers, RP=16,
        OP=OPERANDS[x.dtype][1], PRECISION=OPERANDS[x.dtype][2], STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    weight_GJR, rate_GJR = sums.sum((0, 3))[..., :components].unbind(2)
    return rate_GJR.sum(1).T, weight_GJR.permute(2, 0, 1)


class ScanFunction(torch.autograd.Function):
    """Causal; x (B, G, M, E), states (B, R, G, E)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, first: Any, count_B: Any) -> Any:
        ctx.save_for_backward(x, rate_RG, weight_RGJ, first, count_B)
        ctx.set_materialize_grads(False)
        return scan(x, ToeplitzKernel.from_parameters(rate_RG, weight_RGJ), first=first, final=True, count_B=count_B)

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_last: Any) -> Any:
        x, rate_RG, weight_RGJ, first, count_B = ctx.saved_tensors
        kernel = ToeplitzKernel.from_parameters(rate_RG, weight_RGJ)
        if grad is None:
            grad = x.new_zeros(len(x), x.shape[1], weight_RGJ.shape[2], *x.shape[2:])
        weighed = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        return *scan_backward(x, kernel, grad.contiguous(), first, grad_last, count_B, weighed), None


def scan_backward(
    x: Tensor,
    kernel: ToeplitzKernel,
    grad: Tensor,
    first: Tensor | None,
    grad_last: Tensor | None,
    count_B: Tensor | None,
    weighed: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, rate_RG and weight_RGJ (where they are wanted) and first."""
    grad_last = None if grad_last is None else grad_last.float().contiguous()
    grad_x, grad_first = scan(
        grad, kernel, adjoint=True, reverse=True, first=grad_last, final=first is not None, count_B=count_B
    )
    if not weighed:
        return grad_x, None, None, grad_first
    return grad_x, *parameter_grads(x, grad, kernel, first=first, grad_last=grad_last, count_B=count_B), grad_first


class BidirectionalScanFunction(torch.autograd.Function):
    """Both ways; K(|d|) is symmetric, so the adjoint is the same but for where a stands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate_RG: Tensor, weight_RGJ: Tensor) -> Tensor:
        ctx.save_for_backward(x, rate_RG, weight_RGJ)
        return scan_bidirectional(x, ToeplitzKernel.from_parameters(rate_RG, weight_RGJ))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, rate_RG, weight_RGJ = ctx.saved_tensors
        return scan_bidirectional_backward(x, ToeplitzKernel.from_parameters(rate_RG, weight_RGJ), grad.contiguous())


def scan_bidirectional(x: Tensor, kernel: ToeplitzKernel, adjoint: bool = False) -> Tensor:
    out, _ = scan(x, kernel, adjoint, diagonal=True)
    return scan(x, kernel, adjoint, reverse=True, onto=out)[0]


def scan_bidirectional_backward(x: Tensor, kernel: ToeplitzKernel, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, rate_RG and weight_RGJ."""
    ahead, back = parameter_grads(x, grad, kernel, diagonal=True), parameter_grads(x, grad, kernel, reverse=True)
    return scan_bidirectional(grad, kernel, adjoint=True), ahead[0] + back[0], ahead[1] + back[1]


def accepts(sum_BGMFV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, *_: Any, **__: Any) -> bool:
    components, _, per_group = weight_RGJ.shape
    batch, groups = sum_BGMFV.shape[:2]
    return sum_BGMFV.dtype in OPERANDS and components <= 16 and per_group <= MAX_HEADS and batch * groups < 2**16


@register_kernel(block_scan, accepts)
def block_scan_triton(
    sum_BGMFV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    first_BRGFV: Tensor | None = None,
    count_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    first = None if first_BRGFV is None else first_BRGFV.flatten(3).float().contiguous()
    mixed, last = ScanFunction.apply(sum_BGMFV.flatten(3).contiguous(), rate_RG, weight_RGJ, first, count_B)
    values = sum_BGMFV.shape[3:]
    return mixed.view(*mixed.shape[:4], *values), last.view(*last.shape[:3], *values)


@register_kernel(block_scan_bidirectional, accepts)
def block_scan_bidirectional_triton(sum_BGMFV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor) -> Tensor:
    mixed = BidirectionalScanFunction.apply(sum_BGMFV.flatten(3).contiguous(), rate_RG, weight_RGJ)
    return mixed.unflatten(-1, sum_BGMFV.shape[3:])
