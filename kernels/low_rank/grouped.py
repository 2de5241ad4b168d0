"""Two or three low-rank linears of one input, for a few tokens on a GPU: two launches of `grouped_matvec_kernel` for
all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.launch import CachedLaunch
from surgery.kernels.low_rank import accepts, is_faster
from surgery.kernels.matvec.kernel import supports_early_launch
from surgery.kernels.matvec.plan import GroupedSizes, grouped_launch
from surgery.structures.grouped import Biases, Tensors, low_rank_group, low_rank_stack

MAX_LINEARS = 3


def accepts_group(x: Tensor, rights: Tensors, lefts: Tensors, biases: Biases) -> bool:
    """Return whether the kernel computes this call: two or three linears that the kernel of one accepts, all with
    biases or none.
    """
    return (
        2 <= len(rights) <= MAX_LINEARS
        and len({bias is None for bias in biases}) == 1
        and all(accepts(x, *factors) for factors in zip(rights, lefts, biases))
    )


def is_group_faster(x: Tensor, rights: Tensors, lefts: Tensors, biases: Biases) -> bool:
    """Return whether each linear alone is faster by the kernel: together they have fewer launches."""
    return all(is_faster(x, *factors) for factors in zip(rights, lefts, biases))


class _Shape(NamedTuple):
    """What a plan depends on. strides: of both axes of x. side_by_side: whether the outputs are columns of one tensor."""

    tokens: int
    inputs: int
    ranks: tuple[int, ...]
    outputs: tuple[int, ...]
    strides: tuple[int, int]
    bias: bool
    early: bool
    side_by_side: bool = False


@lru_cache(maxsize=4096)
def _plan(shape: _Shape) -> tuple[CachedLaunch, CachedLaunch]:
    N, I, ranks, outputs, strides, bias, early, side_by_side = shape  # noqa: E741
    zeros, starts, width = (0,) * len(ranks), tuple(sum(ranks[:n]) for n in range(len(ranks))), sum(ranks)
    near = GroupedSizes((I,) * len(ranks), ranks, zeros, starts, (width,) * len(ranks))
    columns = tuple(sum(outputs[:n]) for n in range(len(outputs)))
    out_at, out_rows = (columns, (sum(outputs),) * len(outputs)) if side_by_side else (zeros, outputs)
    far = GroupedSizes(ranks, outputs, starts, out_at, out_rows)
    return (
        grouped_launch(N, strides, near, first=early),
        grouped_launch(N, (width, 1), far, bias=bias, second=early),
    )


def _plan_of(x_NI: Tensor, rights: Tensors, lefts: Tensors, biases: Biases) -> tuple[CachedLaunch, CachedLaunch]:
    (N, I), ranks, outputs = x_NI.shape, tuple(map(len, rights)), tuple(left.shape[1] for left in lefts)  # noqa: E741
    strides, early = (x_NI.stride(0), x_NI.stride(1)), supports_early_launch(x_NI.device)
    return _plan(_Shape(N, I, ranks, outputs, strides, biases[0] is not None, early))


def _three(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return three arguments of the kernel; with two matrices it reads no third one."""
    return (*tensors, tensors[-1])[:3]


def bind_kernel(x: Tensor, rights: Tensors, lefts: Tensors, biases: Biases) -> Callable[..., Tensors] | None:
    """Return the function that runs all calls with the key of this one; None where x is copied."""
    x_NI = x.reshape(-1, x.shape[-1])
    if x_NI.data_ptr() != x.data_ptr():
        return None
    plans = _plan_of(x_NI, rights, lefts, biases)
    z_size, y_sizes = (len(x_NI), sum(map(len, rights))), [(*x.shape[:-1], left.shape[1]) for left in lefts]
    first, second, no_bias = *(plan.bind(*[x] * 10) for plan in plans), biases[0] is None

    def run(x: Tensor, rights: Tensors, lefts: Tensors, biases: Biases) -> Tensors:
        z, ys = x.new_empty(z_size), tuple(x.new_empty(size) for size in y_sizes)
        outs = _three(ys)
        first(x, *_three(rights), z, z, z, z, z, z)
        second(z, *_three(lefts), *(outs if no_bias else _three(biases)), *outs)
        return ys

    return run


@register_kernel(low_rank_group, accepts=accepts_group, is_faster=is_group_faster, bind=bind_kernel)
def low_rank_group_triton(x: Tensor, rights: Tensors, lefts: Tensors, biases: Biases) -> Tensors:
    """Return the outputs (.., O_m); arguments as in `low_rank_group`."""
    if torch.compiler.is_compiling():
        return tuple(GROUP_OP(x, list(rights), list(lefts), [bias for bias in biases if bias is not None]))
    x_NI = x.reshape(-1, x.shape[-1])
    first, second = _plan_of(x_NI, rights, lefts, biases)
    z, ys = x.new_empty(len(x_NI), sum(map(len, rights))), [x.new_empty(len(x_NI), left.shape[1]) for left in lefts]
    outs = _three(tuple(ys))
    first(x_NI, *_three(rights), z, z, z, z, z, z)
    second(z, *_three(lefts), *(outs if biases[0] is None else _three(biases)), *outs)
    return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in ys)


def accepts_stack(x: Tensor, right_RI: Tensor, lefts: Tensors) -> bool:
    """Return whether the kernel computes this call: two or three linears that the kernel of one accepts."""
    return accepts_group(x, _rights(right_RI, lefts), lefts, (None,) * len(lefts)) and not torch.compiler.is_compiling()


def is_stack_faster(x: Tensor, right_RI: Tensor, lefts: Tensors) -> bool:
    """Return whether each linear alone is faster by the kernel."""
    return is_group_faster(x, _rights(right_RI, lefts), lefts, (None,) * len(lefts))


def _rights(right_RI: Tensor, lefts: Tensors) -> Tensors:
    return right_RI.split([left.shape[2] for left in lefts])


@register_kernel(low_rank_stack, accepts=accepts_stack, is_faster=is_stack_faster)
def low_rank_stack_triton(x: Tensor, right_RI: Tensor, lefts: Tensors) -> Tensor:
    """Return the outputs side by side, (.., sum of O_m); arguments as in `low_rank_stack`."""
    x_NI, rights, outputs = x.reshape(-1, x.shape[-1]), _rights(right_RI, lefts), tuple(t.shape[1] for t in lefts)
    shape = x_NI.shape[0], x_NI.shape[1], tuple(map(len, rights)), outputs, (x_NI.stride(0), x_NI.stride(1))
    first, second = _plan(_Shape(*shape, False, supports_early_launch(x.device), True))
    z, y = x.new_empty(len(x_NI), len(right_RI)), x.new_empty(len(x_NI), sum(outputs))
    first(x_NI, *_three(rights), z, z, z, z, z, z)
    second(z, *_three(lefts), y, y, y, y, y, y)
    return y.view(*x.shape[:-1], y.shape[1])


# -- torch.compile -----------------------------------------------------------------------------------------------------
def _op_forward(x: Tensor, rights: list[Tensor], lefts: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        right, left = (tuple(t.contiguous() for t in tensors) for tensors in (rights, lefts))
        ys = low_rank_group(x, right, left, tuple(biases) or (None,) * len(rights))
    return [y.contiguous() for y in ys]


def _op_fake(x: Tensor, rights: list[Tensor], lefts: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(*x.shape[:-1], left.shape[1]) for left in lefts]


GROUP_OP: Any = torch.library.custom_op(
    "surgery::low_rank_group",
    _op_forward,
    mutates_args=(),
    schema="(Tensor x, Tensor[] rights, Tensor[] lefts, Tensor[] biases) -> Tensor[]",
)  # without a gradient: groups run where autograd records nothing
GROUP_OP.register_fake(_op_fake)
