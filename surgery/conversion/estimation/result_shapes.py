"""Results of PyTorch operations on the meta device, made from shapes alone.

torch computes most results on the meta device by Python code, which imports torch._dynamo and sympy (three seconds) and
takes some tenths of a millisecond for each operation. `result` has rules for the operations that conversions use most.
An operation without a rule is left to torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

SAME_KIND = {
    "add",
    "sub",
    "mul",
    "div",
    "clamp",
    "clamp_min",
    "maximum",
    "minimum",
    "bitwise_or",
    "bitwise_and",
    "where",
}
SAME_KIND |= {"abs", "neg", "sqrt", "rsqrt", "exp", "exp2", "log", "log2", "round", "floor", "square", "reciprocal"}
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isfinite"}
FLOATING = {"div", "sqrt", "rsqrt", "exp", "exp2", "log", "log2", "reciprocal"}  # integers give floating-point results
IN_PLACE = {"add_", "sub_", "mul_", "div_", "copy_", "addmm_", "clamp_min_", "zero_", "fill_"}
REDUCTIONS = {"sum", "mean", "any", "all", "amax", "amin", "linalg_vector_norm"}
LIKE = {"clone", "flip", "cumsum", "zeros_like", "ones_like"}


def result(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation on meta tensors, of the right shape and dtype, or None if there is no rule for
    it.

    name: as aten calls the operation, without the overload. args, kwargs: as a TorchDispatchMode gets them.
    """
    first = args[0] if args else None
    if not isinstance(first, Tensor):
        return _from_sizes(name, args, kwargs)
    if any(isinstance(value, Tensor) and not value.is_meta and value.dim() for value in args):
        return None
    if name in IN_PLACE:
        return first
    if name in SAME_KIND or name in COMPARISONS:
        return _elementwise(name, [value for value in args if isinstance(value, (Tensor, int, float))])
    if name in REDUCTIONS:
        return _reduced(name, first, args[1:], kwargs)
    if name in LIKE and set(kwargs) <= {"pin_memory", "memory_format"}:
        keeps_strides = kwargs.get("memory_format") is None and name != "cumsum"
        return _like(first) if keeps_strides else _empty(first.shape, first.dtype)
    if name == "new_zeros":
        return _empty(args[1], kwargs.get("dtype") or first.dtype)
    return _of_matrices(name, args)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor whose dimensions lie in memory in the order of the tensor's."""
    strides: tuple[int, ...] = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda i: (-strides[i], i))
    if order == list(range(tensor.dim())) or 0 in strides:
        return _empty(tensor.shape, dtype or tensor.dtype)
    laid_out = _empty([tensor.shape[i] for i in order], dtype or tensor.dtype)
    return laid_out.permute([order.index(i) for i in range(tensor.dim())])


def _broadcast(tensors: list[Tensor]) -> list[int]:
    reversed_shapes = zip_longest(*(reversed(tensor.shape) for tensor in tensors), fillvalue=1)
    return [next((size for size in sizes if size != 1), 1) for sizes in reversed_shapes][::-1]


def _elementwise(name: str, values: list[Any]) -> Tensor:
    tensors = [value for value in values if isinstance(value, Tensor)]
    counted = values[1:] if name == "where" else values  # the condition has no say in the dtype
    dtype = counted[0].dtype if isinstance(counted[0], Tensor) else torch.get_default_dtype()
    if name in COMPARISONS:
        dtype = torch.bool
    elif len(counted) > 1:
        dtype = torch.result_type(*counted[:2])
    if name in FLOATING and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    shape = _broadcast(tensors)
    full = next((tensor for tensor in tensors if list(tensor.shape) == shape), None)
    return _empty(shape, dtype) if full is None else _like(full, dtype)


def _reduced(name: str, tensor: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    if name == "linalg_vector_norm":
        args = args[1:]  # after the order of the norm
    dims = args[0] if args else None
    keep = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    dims = [dims] if isinstance(dims, int) else dims
    gone = {dim % tensor.dim() for dim in dims} if dims else set(range(tensor.dim()))
    shape = [1 if i in gone else size for i, size in enumerate(tensor.shape) if keep or i not in gone]
    integers = name == "sum" and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    dtype = kwargs.get("dtype") or (torch.int64 if integers else tensor.dtype)
    return _empty(shape, torch.bool if name in ("any", "all") else dtype)


def _of_matrices(name: str, args: Sequence[Any]) -> Any:
    """Products and factorizations. Factors and solutions of torch.linalg lie in memory column by column."""
    first = args[0]
    if name in ("mm", "bmm"):
        return _empty([*first.shape[:-1], args[1].shape[-1]], first.dtype)
    if name in ("addmm", "baddbmm"):
        return _empty([*args[1].shape[:-1], args[2].shape[-1]], first.dtype)
    if name == "linalg_cholesky_ex":
        return _columns(first), _empty(first.shape[:-2], torch.int32)
    if name == "_linalg_eigh":
        values_only = len(args) > 2 and not args[2]
        return None if values_only else (_empty(first.shape[:-1], first.dtype), _columns(first))
    if name == "linalg_solve_triangular":
        return None if first.dim() != args[1].dim() else _columns(args[1])
    if name == "cholesky_solve":
        return _columns(first)
    return None


def _columns(tensor: Tensor) -> Tensor:
    return _empty(tensor.mT.shape, tensor.dtype).mT


def _from_sizes(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Operations whose first argument is no tensor: constants, and those of a list of tensors."""
    if name in ("stack", "cat") and all(isinstance(value, Tensor) and value.is_meta for value in args[0]):
        return _joined(name, args[0], args[1] if len(args) > 1 else 0)
    if torch.device(kwargs.get("device") or "cpu").type != "meta":
        return None
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    if name in ("zeros", "ones"):
        return _empty(args[0], dtype)
    if name == "eye":
        return _empty([args[0], args[1] if len(args) > 1 else args[0]], dtype)
    return _empty([], dtype) if name == "scalar_tensor" else None


def _joined(name: str, tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    shape = list(tensors[0].shape)
    if len({tensor.dtype for tensor in tensors}) > 1 or any(tensor.dim() != len(shape) for tensor in tensors):
        return None
    if name == "stack":
        shape.insert(dim if dim >= 0 else dim + len(shape) + 1, len(tensors))
    else:
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return _empty(shape, tensors[0].dtype)
