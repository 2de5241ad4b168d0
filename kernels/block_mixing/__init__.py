"""Attention that mixes blocks, by a Toeplitz or a dense matrix: sums of blocks, their mixing, and the read-out, forward
and backward.

The backward pass keeps q, k, v and the parameters only, and computes sums and mixed sums again. Sums of bfloat16 tokens
are stored in bfloat16, others in float32 (float16 would overflow), states in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.core.dispatch import register_kernel
from surgery.kernels.block_mixing.layout import BlockLayout, contiguous_rows, pack_state, unpack_state
from surgery.kernels.block_mixing.scan import (
    MAX_HEADS,
    OPERANDS,
    ScanPlan,
    ToeplitzKernel,
    scan,
    scan_backward,
    scan_bidirectional,
    scan_bidirectional_backward,
)
from surgery.kernels.tuning import TOKENS_READER, is_fastest
from surgery.mixers.masks.block_mixing import blocks_bidirectional, blocks_from_zero
from surgery.mixers.masks.toeplitz_block_mixing import toeplitz_bidirectional, toeplitz_causal

MAX_BLOCK = 1024  # tokens of a block, inside of which the work is quadratic


class BlockMixing(Protocol):
    """How the sums of N blocks are mixed, with gradients. E: elements of a sum."""

    def mix(self, sums: Tensor, *parameters: Any) -> tuple[Tensor, Any]:
        """Return (mixed (B, G, J, N, E), state) of sums (B, G, N, E); the state is a tensor or None."""
        ...

    def mix_back(self, sums: Tensor, grad: Tensor, grad_state: Any, *parameters: Any) -> tuple[Any, ...]:
        """Return the gradients of the sums and of every parameter, from those of mixed and of the state."""
        ...


class CausalMixing:
    """Causal Toeplitz mixing.

    Parameters: rate_RG, weight_RGJ, first (B, R, G, E) or None, count_B in blocks or None. Its state is the last one of
    the scan, if `first` is given.
    """

    def mix(self, sums: Tensor, *parameters: Any) -> tuple[Tensor, Any]:
        """Return (mixed sums, last states (B, R, G, E) or None)."""
        rate, weight, first, count_B = parameters
        plan = ScanPlan(first=first, count_B=count_B)
        return scan(sums, ToeplitzKernel.from_parameters(rate, weight), plan, final=first is not None)

    def mix_back(self, sums: Tensor, grad: Tensor, grad_state: Any, *parameters: Any) -> tuple[Any, ...]:
        """Return the gradients of sums, rate, weight, first and (None) count_B."""
        rate, weight, first, count_B = parameters
        plan = ScanPlan(first=first, count_B=count_B)
        return *scan_backward(sums, ToeplitzKernel.from_parameters(rate, weight), plan, grad, grad_state), None


class BidirectionalMixing:
    """Toeplitz mixing in both directions. Parameters: rate_RG, weight_RGJ. No state."""

    def mix(self, sums: Tensor, *parameters: Any) -> tuple[Tensor, None]:
        """Return (mixed sums, None)."""
        return scan_bidirectional(sums, ToeplitzKernel.from_parameters(*parameters)), None

    def mix_back(self, sums: Tensor, grad: Tensor, grad_state: Any, *parameters: Any) -> tuple[Any, ...]:
        """Return the gradients of sums, rate and weight."""
        return scan_bidirectional_backward(sums, ToeplitzKernel.from_parameters(*parameters), grad)


@dataclass(frozen=True)
class DenseMixing:
    """Mixing by a matrix, one matrix product per group.

    Parameter: weight_GJNN, with a zero upper triangle where attention is causal. keep: return the sums as the state.
    """

    keep: bool

    def mix(self, sums: Tensor, *parameters: Any) -> tuple[Tensor, Any]:
        """Return (mixed sums, the sums or None)."""
        (weight,) = parameters
        mixed = weight.flatten(1, 2) @ sums.to(weight.dtype)
        return mixed.unflatten(2, weight.shape[1:3]), sums if self.keep else None

    def mix_back(self, sums: Tensor, grad: Tensor, grad_state: Any, *parameters: Any) -> tuple[Any, ...]:
        """Return the gradients of sums and weight."""
        (weight,) = parameters
        grad = grad.flatten(2, 3).to(weight.dtype)
        sums_grad = weight.flatten(1, 2).mT @ grad
        weight_grad = (grad @ sums.to(grad.dtype).mT).sum(0, dtype=torch.float32)
        return sums_grad if grad_state is None else sums_grad + grad_state, weight_grad.view_as(weight)


class BlockMixingFunction(torch.autograd.Function):
    """Attention that mixes blocks, (out (B, G, J, T, V), state of the mixing), with gradients.

    Inputs: q (B, G, J, T, F), k (B, G, T, F), v (B, G, T, V), the parameters of the mixing, and own_GJN, the weight of
    a block in itself (None if the mixing includes it).
    """

    @staticmethod
    def forward(
        ctx: Any,
        mixing: BlockMixing,
        layout: BlockLayout,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_GJN: Any,
        *parameters: Any,
    ) -> Any:
        """Return (out, state)."""
        ctx.mixing, ctx.layout = mixing, layout
        ctx.save_for_backward(q, k, v, own_GJN, *parameters)
        ctx.set_materialize_grads(False)
        mixed, state = mixing.mix(layout.sums(k, v), *parameters)
        return layout.read(q, k, v, mixed, own_GJN)[0], state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, grad_state: Any) -> Any:
        """Return the gradients of q, k, v, own_GJN and the parameters."""
        (q, k, v, own_GJN, *parameters), layout = ctx.saved_tensors, ctx.layout
        grad = q.new_zeros(*q.shape[:-1], v.shape[-1]) if grad is None else contiguous_rows(grad)
        sums = layout.sums(k, v)
        mixed, _ = ctx.mixing.mix(sums, *parameters)
        compared = None if own_GJN is None else q
        grad_q, grad_own = layout.read(grad, v, k, mixed, own_GJN, turned=True, compared=compared)
        del mixed
        mixed_grad = layout.sums(q, grad)
        grad_sums, *grads = ctx.mixing.mix_back(sums, mixed_grad, grad_state, *parameters)
        grad_k, grad_v = layout.backward(q, k, v, grad, grad_sums, own_GJN)
        return None, None, grad_q, grad_k, grad_v, grad_own, *grads


def fits_kernels(q: Tensor, k: Tensor, v: Tensor, block: int) -> bool:
    """Return whether q (B, G, J, T, F), k and v have one dtype and sizes that the kernels compute."""
    batch, groups, per_group, length, _ = q.shape
    same = q.dtype == k.dtype == v.dtype and q.dtype in OPERANDS
    return same and batch * groups * per_group < 2**16 and 0 < block <= MAX_BLOCK and length > 0


def accepts_causal(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, *, block: int, **_: Any
) -> bool:
    """Return whether the kernels compute a call of `toeplitz_causal`."""
    return accepts_bidirectional(q_BGJTF, k_BGTF, v_BGTV, rate_RG, weight_RGJ, block)


def accepts_bidirectional(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, block: int
) -> bool:
    """Return whether the kernels compute a call of `toeplitz_bidirectional`."""
    return fits_kernels(q_BGJTF, k_BGTF, v_BGTV, block) and len(rate_RG) <= 16 and weight_RGJ.shape[2] <= MAX_HEADS


def accepts_dense(q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, matrix_GJMM: Tensor, block: int, **_: Any) -> bool:
    """Return whether the kernels compute a call of `blocks_from_zero` or `blocks_bidirectional`."""
    return fits_kernels(q_BGJTF, k_BGTF, v_BGTV, block)


def mixing_operand(matrix_GJMM: Tensor, layout: BlockLayout, q: Tensor) -> Tensor:
    """Return the matrix of the call's blocks, (G, J, N, N), in the dtype of its product with the sums."""
    dtype = q.dtype if q.dtype == torch.bfloat16 else torch.float32
    return matrix_GJMM[:, :, : layout.blocks, : layout.blocks].to(dtype)


@register_kernel(toeplitz_causal, accepts_causal, is_faster=is_fastest("toeplitz_blocks", TOKENS_READER))
def toeplitz_causal_triton(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    rate_RG: Tensor,
    weight_RGJ: Tensor,
    *,
    first_BRGFV: Tensor | None,
    start_B: Tensor,
    count_B: Tensor,
    block: int,
    chunk: int,
) -> tuple[Tensor, Tensor | None]:
    """Return (out_BGJTV, last states_BRGFV or None); arguments as in `toeplitz_causal`."""
    layout = BlockLayout.from_start(start_B, v_BGTV.shape[2], block)
    entering, count_blocks = None, None
    if first_BRGFV is not None:
        offset_B = start_B % block
        enters_B = (offset_B == 0) & (count_B > 0)
        gate_BRG = torch.exp(-rate_RG * enters_B[:, None, None])
        entering = pack_state(gate_BRG[..., None, None] * first_BRGFV.float())
        count_blocks = torch.where(count_B > 0, (offset_B + count_B + block - 1) // block, 0)
    own_GJN = weight_RGJ.float().sum(0).unsqueeze(-1).expand(-1, -1, layout.blocks)
    qkv = (contiguous_rows(x) for x in (q_BGJTF, k_BGTF, v_BGTV))
    out, last = BlockMixingFunction.apply(
        CausalMixing(), layout, *qkv, own_GJN, rate_RG, weight_RGJ, entering, count_blocks
    )
    return out, None if last is None else unpack_state(last, k_BGTF.shape[-1], v_BGTV.shape[-1])


@register_kernel(toeplitz_bidirectional, accepts_bidirectional, is_faster=is_fastest("toeplitz_blocks", TOKENS_READER))
def toeplitz_bidirectional_triton(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, rate_RG: Tensor, weight_RGJ: Tensor, block: int
) -> Tensor:
    """Return out_BGJTV; arguments as in `toeplitz_bidirectional`."""
    layout = BlockLayout.from_zero(v_BGTV, v_BGTV.shape[2], block)
    qkv = (contiguous_rows(x) for x in (q_BGJTF, k_BGTF, v_BGTV))
    return BlockMixingFunction.apply(BidirectionalMixing(), layout, *qkv, None, rate_RG, weight_RGJ)[0]


@register_kernel(blocks_from_zero, accepts_dense, is_faster=is_fastest("blocks", TOKENS_READER))
def blocks_from_zero_triton(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, matrix_GJMM: Tensor, block: int, *, chunk: int, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return (out_BGJTV, the blocks' sums if `keep`); arguments as in `blocks_from_zero`."""
    layout = BlockLayout.from_zero(v_BGTV, v_BGTV.shape[2], block, wide=keep)
    weight_GJNN = mixing_operand(matrix_GJMM, layout, q_BGJTF)
    own_GJN = matrix_GJMM[:, :, : layout.blocks, : layout.blocks].diagonal(dim1=-2, dim2=-1).float()
    qkv = (contiguous_rows(x) for x in (q_BGJTF, k_BGTF, v_BGTV))
    out, sums = BlockMixingFunction.apply(DenseMixing(keep), layout, *qkv, own_GJN, weight_GJNN.tril(-1))
    return out, unpack_state(sums, k_BGTF.shape[-1], v_BGTV.shape[-1]).transpose(1, 2) if keep else None


@register_kernel(blocks_bidirectional, accepts_dense, is_faster=is_fastest("blocks", TOKENS_READER))
def blocks_bidirectional_triton(
    q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, matrix_GJMM: Tensor, block: int
) -> Tensor:
    """Return out_BGJTV; arguments as in `blocks_bidirectional`."""
    layout = BlockLayout.from_zero(v_BGTV, v_BGTV.shape[2], block)
    qkv = (contiguous_rows(x) for x in (q_BGJTF, k_BGTF, v_BGTV))
    return BlockMixingFunction.apply(
        DenseMixing(False), layout, *qkv, None, mixing_operand(matrix_GJMM, layout, q_BGJTF)
    )[0]
