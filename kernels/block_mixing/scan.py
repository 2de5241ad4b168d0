"""block_scan and block_scan_bidirectional on the GPU: one pass over the blocks' sums in each direction, and gradients
by the same pass from the other end (kernels/block_mixing/scan_kernels.py).

Shapes: sums (B, G, M, E), mixed sums (B, G, J, M, E), states (B, R, G, E); M blocks, E = F V elements of a flat sum.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.core.dispatch import register_kernel
from surgery.kernels.block_mixing.scan_kernels import parameter_grad_tiles, scan_tiles, toeplitz_tables
from surgery.mixers.masks.toeplitz_block_mixing import block_scan, block_scan_bidirectional

# Per dtype of the sums: dtype of tables, dtype of products' operands and precision of products. float16 is exact in
# tf32, whose range does not end at 65,504. Triton's interpreter has no products of bfloat16.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OPERANDS = {
    torch.bfloat16: (torch.float32, tl.float32, "ieee") if INTERPRETED else (torch.bfloat16, tl.bfloat16, "tf32"),
    torch.float16: (torch.float32, tl.float32, "tf32"),
    torch.float32: (torch.float32, tl.float32, "tf32x3"),
}
MAX_HEADS = 16  # query heads of a group, which the adjoint unrolls
RANK_TILE = 16  # the power of two of R that kernels compute with


@dataclass(frozen=True)
class ScanTile:
    """A tile of blocks x elements."""

    blocks: int
    elements: int
    warps: int
    stages: int


# The fastest of 30 on one H200 (2026-11-21, 12 heads of 64 x 64): 0.80 ms for 16,384 blocks; reading and writing them
# takes 0.77 ms.
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
    """Return size / tile, rounded up."""
    return -(-size // tile)


def next_power_of_2(size: int) -> int:
    """Return the least power of two that is `size` or more."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True)
class ToeplitzKernel:
    """Parameters of K(d) = sum_r a_r e^(-lambda_r d) of every query head, in float32: rate (lambda) and weight (a)."""

    rate_RG: Tensor
    weight_RGJ: Tensor

    @classmethod
    def from_parameters(cls, rate_RG: Tensor, weight_RGJ: Tensor) -> ToeplitzKernel:
        """Return the kernel of parameters of any floating-point dtype."""
        return cls(rate_RG.float().contiguous(), weight_RGJ.float().contiguous())

    def table(self, dtype: torch.dtype, diagonal: bool, blocks: int) -> Tensor:
        """Return K (G, J, blocks, blocks) of a tile, for sums of `dtype`."""
        components, groups, per_group = self.weight_RGJ.shape
        table = torch.empty(groups, per_group, blocks, blocks, dtype=OPERANDS[dtype][0], device=self.rate_RG.device)
        toeplitz_tables[(groups * per_group,)](
            table, self.rate_RG, self.weight_RGJ, groups, per_group, components, diagonal, blocks
        )
        return table


@dataclass(frozen=True)
class ScanPlan:
    """Direction and boundaries of a scan.

    adjoint: from mixed sums to sums. reverse: from the last block to the first. diagonal: with the block's own sum.
    first (B, R, G, E): states that enter, None for zeros. count_B: blocks of each row, None for all M. tile: None for
    the fastest one of the dtype.
    """

    adjoint: bool = False
    reverse: bool = False
    diagonal: bool = False
    first: Tensor | None = None
    count_B: Tensor | None = None
    tile: ScanTile | None = None

    def options(self, x: Tensor, kernel: ToeplitzKernel, tile: ScanTile) -> dict[str, Any]:
        """Return the compile-time constants that both kernels share."""
        components, _, per_group = kernel.weight_RGJ.shape
        return {
            "R": components, "J": per_group, "REVERSE": self.reverse, "DIAGONAL": self.diagonal,
            "INITIAL": self.first is not None, "COUNTED": self.count_B is not None, "BM": tile.blocks, "BE": tile.elements,
            "RP": RANK_TILE, "OP": OPERANDS[x.dtype][1], "PRECISION": OPERANDS[x.dtype][2], "STAGES": tile.stages,
            "num_warps": tile.warps,
        }  # fmt: skip


def scan(
    x: Tensor,
    kernel: ToeplitzKernel,
    plan: ScanPlan | None = None,
    *,
    final: bool = False,
    onto: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return (mixed sums of x, the state behind the last block if `final`), or the adjoint's (sums, state).

    onto: a result of the same shape, to which this one is added in place.
    """
    plan = plan or ScanPlan()
    batch, groups, blocks, elements = x.shape[0], x.shape[1], x.shape[-2], x.shape[-1]
    components, _, per_group = kernel.weight_RGJ.shape
    tile, first, count_B = plan.tile or SCAN_TILES[x.dtype], plan.first, plan.count_B
    shape = (batch, groups, blocks, elements) if plan.adjoint else (batch, groups, per_group, blocks, elements)
    if onto is None:
        out = x.new_empty(shape) if count_B is None else x.new_zeros(shape)
    else:
        out = onto
    last = None
    if final:
        last = torch.empty(batch, components, groups, elements, dtype=torch.float32, device=x.device)
    heads = 1 if plan.adjoint else per_group
    scan_tiles[(count_tiles(elements, tile.elements) * heads, batch * groups)](
        x, kernel.table(x.dtype, plan.diagonal, tile.blocks) if plan.adjoint and per_group > 1 else x,
        kernel.rate_RG, kernel.weight_RGJ,
        x if first is None else first, out, x if last is None else last, x if count_B is None else count_B,
        groups, blocks, elements,
        ADJOINT=plan.adjoint, ADD=onto is not None, FINAL=final, **plan.options(x, kernel, tile),
    )  # fmt: skip
    return out, last


def parameter_grads(
    x: Tensor, grad: Tensor, kernel: ToeplitzKernel, plan: ScanPlan | None = None, grad_last: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (drate_RG, dweight_RGJ) of the scan `plan` of sums x. grad: of its mixed sums; grad_last: of its last
    state.
    """
    plan = plan or ScanPlan()
    batch, groups, per_group, blocks, elements = grad.shape
    components = len(kernel.rate_RG)
    tile, first, count_B = plan.tile or PARAMETER_GRAD_TILES[x.dtype], plan.first, plan.count_B
    parts = count_tiles(elements, tile.elements)
    sums = torch.empty(batch, groups, per_group, parts, 2, RANK_TILE, dtype=torch.float32, device=x.device)
    parameter_grad_tiles[(parts * per_group, batch * groups)](
        x, grad, kernel.rate_RG, kernel.weight_RGJ, x if first is None else first, x if grad_last is None else grad_last, sums,
        x if count_B is None else count_B, groups, blocks, elements,
        FINAL=grad_last is not None, **plan.options(x, kernel, tile),
    )  # fmt: skip
    weight_GJR, rate_GJR = sums.sum((0, 3))[..., :components].unbind(2)
    return rate_GJR.sum(1).T, weight_GJR.permute(2, 0, 1)


class ScanFunction(torch.autograd.Function):
    """Causal scan of x (B, G, M, E) with states (B, R, G, E), and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, first: Any, count_B: Any) -> Any:
        """Return (mixed sums, last state)."""
        ctx.save_for_backward(x, rate_RG, weight_RGJ, first, count_B)
        ctx.set_materialize_grads(False)
        plan = ScanPlan(first=first, count_B=count_B)
        return scan(x, ToeplitzKernel.from_parameters(rate_RG, weight_RGJ), plan, final=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, grad_last: Any) -> Any:
        """Return the gradients of x, rate_RG, weight_RGJ and first."""
        x, rate_RG, weight_RGJ, first, count_B = ctx.saved_tensors
        kernel = ToeplitzKernel.from_parameters(rate_RG, weight_RGJ)
        if grad is None:
            grad = x.new_zeros(len(x), x.shape[1], weight_RGJ.shape[2], *x.shape[2:])
        plan, grad = ScanPlan(first=first, count_B=count_B), grad.contiguous()
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            return *scan_backward(x, kernel, plan, grad, grad_last), None
        grad_x, grad_first = scan_adjoint(kernel, plan, grad, grad_last)
        return grad_x, None, None, grad_first, None


def scan_adjoint(
    kernel: ToeplitzKernel, plan: ScanPlan, grad: Tensor, grad_last: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the sums and of `first` of a causal scan, from those of its mixed sums and last state."""
    last = None if grad_last is None else grad_last.float().contiguous()
    adjoint = ScanPlan(adjoint=True, reverse=True, first=last, count_B=plan.count_B)
    return scan(grad, kernel, adjoint, final=plan.first is not None)


def scan_backward(
    x: Tensor, kernel: ToeplitzKernel, plan: ScanPlan, grad: Tensor, grad_last: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, rate_RG, weight_RGJ and first of the causal scan `plan`."""
    last = None if grad_last is None else grad_last.float().contiguous()
    grad_x, grad_first = scan_adjoint(kernel, plan, grad, last)
    return grad_x, *parameter_grads(x, grad, kernel, plan, last), grad_first


class BidirectionalScanFunction(torch.autograd.Function):
    """Scan of x (B, G, M, E) in both directions, and its gradients.

    K(|d|) is symmetric, so that the adjoint differs only in the side on which a_r is multiplied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate_RG: Tensor, weight_RGJ: Tensor) -> Tensor:
        """Return the mixed sums."""
        ctx.save_for_backward(x, rate_RG, weight_RGJ)
        return scan_bidirectional(x, ToeplitzKernel.from_parameters(rate_RG, weight_RGJ))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of x, rate_RG and weight_RGJ."""
        x, rate_RG, weight_RGJ = ctx.saved_tensors
        return scan_bidirectional_backward(x, ToeplitzKernel.from_parameters(rate_RG, weight_RGJ), grad.contiguous())


def scan_bidirectional(x: Tensor, kernel: ToeplitzKernel, adjoint: bool = False) -> Tensor:
    """Return mixed[i] = sum_k K(|i - k|) x[k], or its adjoint."""
    out, _ = scan(x, kernel, ScanPlan(adjoint, diagonal=True))
    return scan(x, kernel, ScanPlan(adjoint, reverse=True), onto=out)[0]


def scan_bidirectional_backward(x: Tensor, kernel: ToeplitzKernel, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, rate_RG and weight_RGJ."""
    forward = parameter_grads(x, grad, kernel, ScanPlan(diagonal=True))
    backward = parameter_grads(x, grad, kernel, ScanPlan(reverse=True))
    return scan_bidirectional(grad, kernel, adjoint=True), forward[0] + backward[0], forward[1] + backward[1]


def accepts(sum_BGMFV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, *_: Any, **__: Any) -> bool:
    """Return whether the kernels compute this call: dtype, and sizes within the grid and what kernels unroll."""
    components, per_group = len(weight_RGJ), weight_RGJ.shape[2]
    batch, groups = sum_BGMFV.shape[:2]
    return sum_BGMFV.dtype in OPERANDS and components <= RANK_TILE and per_group <= MAX_HEADS and batch * groups < 2**16


@register_kernel(block_scan, accepts)
def block_scan_triton(
    sum_BGMFV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    first_BRGFV: Tensor | None = None,
    count_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (mixed sums (B, G, J, M, F, V), last states (B, R, G, F, V)); arguments as in `block_scan`."""
    first = None if first_BRGFV is None else first_BRGFV.flatten(3).float().contiguous()
    mixed, last = ScanFunction.apply(sum_BGMFV.flatten(3).contiguous(), rate_RG, weight_RGJ, first, count_B)
    values = sum_BGMFV.shape[3:]
    return mixed.view(*mixed.shape[:4], *values), last.view(*last.shape[:3], *values)


@register_kernel(block_scan_bidirectional, accepts)
def block_scan_bidirectional_triton(sum_BGMFV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor) -> Tensor:
    """Return mixed sums (B, G, J, M, F, V); arguments as in `block_scan_bidirectional`."""
    mixed = BidirectionalScanFunction.apply(sum_BGMFV.flatten(3).contiguous(), rate_RG, weight_RGJ)
    return mixed.unflatten(-1, sum_BGMFV.shape[3:])
