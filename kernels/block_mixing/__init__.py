"""Attention that mixes blocks, Toeplitz or freely: sums of blocks, their mixing, and the read-out, forward and backward.

Nothing but q, k, v and the parameters is kept for the backward pass: sums and mixed sums are made again. Sums of
bfloat16 tokens are stored in bfloat16, others in float32 (half would overflow), states in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.block_mixing.layout import BlockLayout, contiguous_rows, pack_state, unpack_state
from surgery.kernels.block_mixing.scan import (
    MAX_HEADS,
    OPERANDS,
    ToeplitzKernel,
    scan,
    scan_backward,
    scan_bidirectional,
    scan_bidirectional_backward,
)
from surgery.kernels.tuning import TOKENS_READER, is_fastest
from surgery.mixers.masks.block_mixing import blocks_bidirectional, blocks_from_zero
from surgery.mixers.masks.toeplitz_block_mixing import toeplitz_bidirectional, toeplitz_causal

MAX_BLOCK = 1024  # tokens in a block; inside it the work is quadratic


class BlockMixing(Protocol):
    """mix: sums (B, G, N, E) and parameters -> (mixed (B, G, J, N, E), more); mix_back: gradients of sums and of every
    parameter from those of both."""

    def mix(self, sums: Tensor, *parameters: Any) -> tuple[Tensor, Any]: ...

    def mix_back(self, sums: Tensor, grad: Tensor, grad_more: Any, *parameters: Any) -> tuple[Any, ...]: ...


class CausalMixing:
    """Parameters rate_RG, weight_RGJ, first (B, R, G, E) or None, count_B in blocks or None; more: the last state."""

    def mix(self, sums: Tensor, rate: Tensor, weight: Tensor, first: Any, count_B: Any) -> tuple[Tensor, Any]:
        return scan(
            sums, ToeplitzKernel.from_parameters(rate, weight), first=first, final=first is not None, count_B=count_B
        )

    def mix_back(
        self, sums: Tensor, grad: Tensor, last: Any, rate: Tensor, weight: Tensor, first: Any, count_B: Any
    ) -> tuple[Any, ...]:
        return *scan_backward(sums, ToeplitzKernel.from_parameters(rate, weight), grad, first, last, count_B), None


class BidirectionalMixing:
    """Parameters rate_RG, weight_RGJ."""

    def mix(self, sums: Tensor, rate: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        return scan_bidirectional(sums, ToeplitzKernel.from_parameters(rate, weight)), None

    def mix_back(self, sums: Tensor, grad: Tensor, _: Any, rate: Tensor, weight: Tensor) -> tuple[Any, ...]:
        return scan_bidirectional_backward(sums, ToeplitzKernel.from_parameters(rate, weight), grad)


@dataclass(frozen=True)
class DenseMixing:
    """Parameter weight_GJNN (its upper triangle zero where attention is causal): one matrix product for each group.
    more: the sums, if they are to be kept."""

    keep: bool

    def mix(self, sums: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        mixed = weight.flatten(1, 2) @ sums.to(weight.dtype)
        return mixed.unflatten(2, weight.shape[1:3]), sums if self.keep else None

    def mix_back(self, sums: Tensor, grad: Tensor, kept: Any, weight: Tensor) -> tuple[Any, ...]:
        grad = grad.flatten(2, 3).to(weight.dtype)
        sums_grad = weight.flatten(1, 2).mT @ grad
        weight_grad = (grad @ sums.to(grad.dtype).mT).sum(0, dtype=torch.float32)
        return sums_grad if kept is None else sums_grad + kept, weight_grad.view_as(weight)


class BlockMixingFunction(torch.autograd.Function):
    """(out (B, G, J, T, V), what the mixing gives beside) of q (B, G, J, T, F), k (B, G, T, F), v (B, G, T, V) and
    own_GJN, the weight of a block in itself (None: the mixing has it)."""

    @staticmethod
    def forward(
        ctx: Any,
        mixing: BlockMixing,
        grid: BlockLayout,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_GJN: Any,
        *parameters: Any,
    ) -> Any:
        ctx.mixing, ctx.grid = mixing, grid
        ctx.save_for_backward(q, k, v, own_GJN, *parameters)
        ctx.set_materialize_grads(False)
        mixed, more = mixing.mix(grid.sums(k, v), *parameters)
        return grid.read(q, k, v, mixed, own_GJN)[0], more

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_more: Any) -> Any:
        (q, k, v, own_GJN, *parameters), grid = ctx.saved_tensors, ctx.grid
        grad = q.new_zeros(*q.shape[:-1], v.shape[-1]) if grad is None else contiguous_rows(grad)
        sums = grid.sums(k, v)
        mixed, _ = ctx.mixing.mix(sums, *parameters)
        compared = None if own_GJN is None else q
        grad_q, grad_own = grid.read(grad, v, k, mixed, own_GJN, turned=True, compared=compared)
        del mixed
        mixed_grad = grid.sums(q, grad)
        grad_sums, *grads = ctx.mixing.mix_back(sums, mixed_grad, grad_more, *parameters)
        grad_k, grad_v = grid.backward(q, k, v, grad, grad_sums, own_GJN)
        return None, None, grad_q, grad_k, grad_v, grad_own, *grads


def fits_kernels(q: Tensor, k: Tensor, v: Tensor, block: int) -> bool:
    batch, groups, per_group, length, _ = q.shape
    same = q.dtype == k.dtype == v.dtype and q.dtype in OPERANDS
    return same and batch * groups * per_group < 2**16 and 0 < block <= MAX_BLOCK and length > 0


def accepts_causal(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    first_BRGFV: Tensor | None,
    start_B: Tensor,
    count_B: Tensor,
    block: int,
    chunk: int,
) -> bool:
    return accepts_bidirectional(q_BGJTF, k_BGTF, v_BGTV, rate_RG, weight_RGJ, block)


def accepts_bidirectional(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, block: int
) -> bool:
    return fits_kernels(q_BGJTF, k_BGTF, v_BGTV, block) and len(rate_RG) <= 16 and weight_RGJ.shape[2] <= MAX_HEADS


def accepts_dense(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    matrix_GJMM: Tensor,
    block: int,
    chunk: int = 0,
    keep: bool = False,
) -> bool:
    return fits_kernels(q_BGJTF, k_BGTF, v_BGTV, block)


def mixing_operand(matrix_GJMM: Tensor, grid: BlockLayout, q: Tensor) -> Tensor:
    """W of the call's blocks, as its product takes it."""
    dtype = q.dtype if q.dtype == torch.bfloat16 else torch.float32
    return matrix_GJMM[:, :, : grid.blocks, : grid.blocks].to(dtype)


@register_kernel(toeplitz_causal, accepts_causal, is_faster=is_fastest("toeplitz_blocks", TOKENS_READER))
def toeplitz_causal_triton(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    first_BRGFV: Tensor | None,
    start_B: Tensor,
    count_B: Tensor,
    block: int,
    chunk: int,
) -> tuple[Tensor, Tensor | None]:
    grid = BlockLayout.from_start(start_B, v_BGTV.shape[2], block)
    entering, count_blocks = None, None
    if first_BRGFV is not None:
        offset_B = start_B % block
        enters_B = (offset_B == 0) & (count_B > 0)
        gate_BRG = torch.exp(-rate_RG * enters_B[:, None, None])
        entering = pack_state(gate_BRG[..., None, None] * first_BRGFV.float())
        count_blocks = torch.where(count_B > 0, (offset_B + count_B + block - 1) // block, 0)
    own_GJN = weight_RGJ.float().sum(0).unsqueeze(-1).expand(-1, -1, grid.blocks)
    qkv = (contiguous_rows(x) for x in (q_BGJTF, k_BGTF, v_BGTV))
    out, last = BlockMixingFunction.apply(
        CausalMixing(), grid, *qkv, own_GJN, rate_RG, weight_RGJ, entering, count_blocks
    )
    return out, None if last is None else unpack_state(last, k_BGTF.shape[-1], v_BGTV.shape[-1])


@register_kernel(toeplitz_bidirectional, accepts_bidirectional, is_faster=is_fastest("toeplitz_blocks", TOKENS_READER))
def toeplitz_bidirectional_triton(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, block: int
) -> Tensor:
    grid = BlockLayout.from_zero(v_BGTV, v_BGTV.shape[2], block)
    qkv = (contiguous_rows(x) for x in (q_BGJTF, k_BGTF, v_BGTV))
    return BlockMixingFunction.apply(BidirectionalMixing(), grid, *qkv, None, rate_RG, weight_RGJ)[0]


@register_kernel(blocks_from_zero, accepts_dense, is_faster=is_fastest("blocks", TOKENS_READER))
def blocks_from_zero_triton(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, matrix_GJMM: Tensor, block: int, chunk: int, keep: bool
) -> tuple[Tensor, Tensor | None]:
    grid = BlockLayout.from_zero(v_BGTV, v_BGTV.shape[2], block, wide=keep)
    weight_GJNN = mixing_operand(matrix_GJMM, grid, q_BGJTF)
    own_GJN = matrix_GJMM[:, :, : grid.blocks, : grid.blocks].diagonal(dim1=-2, dim2=-1).float()
    qkv = (contiguous_rows(x) for x in (q_BGJTF, k_BGTF, v_BGTV))
    out, sums = BlockMixingFunction.apply(DenseMixing(keep), grid, *qkv, own_GJN, weight_GJNN.tril(-1))
    return out, unpack_state(sums, k_BGTF.shape[-1], v_BGTV.shape[-1]).transpose(1, 2) if keep else None


@register_kernel(blocks_bidirectional, accepts_dense, is_faster=is_fastest("blocks", TOKENS_READER))
def blocks_bidirectional_triton(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, matrix_GJMM: Tensor, block: int
) -> Tensor:
    grid = BlockLayout.from_zero(v_BGTV, v_BGTV.shape[2], block)
    qkv = (contiguous_rows(x) for x in (q_BGJTF, k_BGTF, v_BGTV))
    return BlockMixingFunction.apply(DenseMixing(False), grid, *qkv, None, mixing_operand(matrix_GJMM, grid, q_BGJTF))[
        0
    ]
