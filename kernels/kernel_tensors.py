"""Tensors as kernel arguments: a pointer and its strides in one NamedTuple, which Triton passes as one argument.

A field named after an axis is the stride along it in elements: b row of the batch, g group, j query head of the group,
t token, l level. The last axis of q, k, v and their like has stride 1 (`unit_last_stride`) and no field.

Triton takes tuples as kernel arguments from 3.3 on. It specializes the integers in them even if the argument is named
in `do_not_specialize`, so sizes that change from call to call stay arguments of their own. The stride from row to row of
the batch is 0 if there is only one, as 16 may or may not divide the number of its tokens. torch.compile cannot trace a
launch with tuples: only kernels behind a custom op (kernels/chunked_op.py) use them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

HAS_TUPLE_ARGUMENTS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


class GroupTensor(NamedTuple):
    """A tensor (B, G, T) or (B, G, T, X), such as keys, values and log-gates."""

    ptr: Tensor
    b: int
    g: int
    t: int

    @classmethod
    def from_tensor(cls, x_BGT: Tensor) -> GroupTensor:
        """Take the strides of axes B, G and T."""
        b, g, t = x_BGT.stride()[:3]
        return cls(x_BGT, b if len(x_BGT) > 1 else 0, g, t)


class HeadTensor(NamedTuple):
    """A tensor (B, G, J, T) or (B, G, J, T, X), such as queries and outputs."""

    ptr: Tensor
    b: int
    g: int
    j: int
    t: int

    @classmethod
    def from_tensor(cls, x_BGJT: Tensor) -> HeadTensor:
        """Take the strides of axes B, G, J and T."""
        b, g, j, t = x_BGJT.stride()[:4]
        return cls(x_BGJT, b if len(x_BGJT) > 1 else 0, g, j, t)


class LevelTensor(NamedTuple):
    """lambda (B, T, G, J, L): the weight of each level at each token."""

    ptr: Tensor
    b: int
    g: int
    j: int
    t: int
    l: int  # noqa: E741

    @classmethod
    def from_tensor(cls, level_BTGJL: Tensor) -> LevelTensor:
        """Take all five strides."""
        b, t, g, j, l = level_BTGJL.stride()  # noqa: E741
        return cls(level_BTGJL, b if len(level_BTGJL) > 1 else 0, g, j, t, l)


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Return whether a call records a backward pass for one of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def unit_last_stride(x: Tensor) -> Tensor:
    """Return x with unit stride along the last axis: x itself if it has that, else a copy.

    Groups (axis 1) that x is expanded along are copied once and expanded again.
    """
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    if x.stride(1) == 0:
        return x[:, :1].contiguous().expand(x.shape)
    return x.contiguous()


def reduce_shared(d: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x from d (B, G, ..), the gradient of x expanded over the groups.

    It is the sum over the groups if x has one group; if x is a tensor expanded over its groups, each group gets an
    equal share of that sum.
    """
    if x.shape[1] == d.shape[1] and x.stride(1) != 0:
        return d.to(x.dtype)
    total = d.sum(1, keepdim=True, dtype=torch.float32)
    return (total / x.shape[1]).to(x.dtype).expand(x.shape)


def empty_out(q_BGJTF: Tensor, v_BGTV: Tensor) -> Tensor:
    """Return an uninitialized out_BGJTV, laid out as (B, T, G, J, V)."""
    batch, groups, length, values = v_BGTV.shape
    return v_BGTV.new_empty(batch, length, groups, q_BGJTF.shape[2], values).permute(0, 2, 3, 1, 4)
