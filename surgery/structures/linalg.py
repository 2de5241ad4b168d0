"""Matrix factorizations with fallbacks: batched, then in parts of the batch, then on the CPU in float64.

cuSOLVER's batched routines fail for many matrices (98,304 of 2 x 2) and if GPU memory for the workspace is short
(CUSOLVER_STATUS_INTERNAL_ERROR), and float32 routines fail on some matrices that float64 can factor. Each function
returns the result of the first attempt that succeeds, in the dtype and on the device of its argument. The first
fallback of each function emits a RuntimeWarning. NumericalError if the input holds NaN or Inf, or if every attempt
fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from surgery.core.errors import NumericalError

_warned: set[str] = set()  # names of the functions that have warned in this process
# By function, device, sides and dtype: the smallest batch of such matrices that the solver refused in this process.
_too_many: dict[tuple[object, ...], int] = {}


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in ascending order (..., n) and eigenvectors as columns (..., n, n) of symmetric matrices."""
    values, vectors = _first_that_works("eigh", lambda m: torch.linalg.eigh(m), matrix)
    return values, vectors


def eigvalsh(matrix: Tensor) -> Tensor:
    """Return the eigenvalues of symmetric matrices in ascending order, (..., n)."""
    values: Tensor = _first_that_works("eigvalsh", lambda m: torch.linalg.eigvalsh(m), matrix)
    return values


def svd(matrix: Tensor, full_matrices: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, S, V^T with matrix = U diag(S) V^T."""
    u, s, vt = _first_that_works("svd", lambda m: torch.linalg.svd(m, full_matrices=full_matrices), matrix)
    return u, s, vt


def qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q and R of the reduced QR factorization."""
    q, r = _first_that_works("qr", lambda m: torch.linalg.qr(m), matrix)
    return q, r


def cholesky_ex(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Cholesky factor L and info, which is not 0 for each matrix that is not positive definite or holds
    NaN.
    """
    factor, info = _first_that_works("cholesky_ex", lambda m: torch.linalg.cholesky_ex(m), matrix, finite=False)
    return factor, info


def cholesky_solve(rhs: Tensor, factor: Tensor) -> Tensor:
    """Return (L L^T)^-1 rhs for a Cholesky factor L."""
    solution: Tensor = _first_that_works("cholesky_solve", lambda b, m: torch.cholesky_solve(b, m), rhs, factor)
    return solution


def lu_factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed LU factors and the pivots, counted from 1."""
    factors, pivots = _first_that_works("lu_factor", lambda m: torch.linalg.lu_factor(m), matrix)
    return factors, pivots


def solve(matrix: Tensor, rhs: Tensor, left: bool = True) -> Tensor:
    """Return matrix^-1 rhs for rhs (..., n, k), or rhs matrix^-1 for rhs (..., k, n) if not `left`."""
    solution: Tensor = _first_that_works("solve", lambda m, b: torch.linalg.solve(m, b, left=left), matrix, rhs)
    return solution


def solve_triangular(matrix: Tensor, rhs: Tensor, *, upper: bool, left: bool = True) -> Tensor:
    """Return matrix^-1 rhs for a triangular matrix, or rhs matrix^-1 if not `left`."""
    solution: Tensor = _first_that_works(
        "solve_triangular", lambda m, b: torch.linalg.solve_triangular(m, b, upper=upper, left=left), matrix, rhs
    )
    return solution


def _first_that_works(name: str, compute: Callable[..., Any], *operands: Tensor, finite: bool = True) -> Any:
    first, count, is_refused = operands[0], _count(operands), False
    key = (name, str(first.device), first.dtype, *(tensor.shape[-2:] for tensor in operands))
    single = all(tensor.dim() <= 2 for tensor in operands)
    try:
        if single or count < _too_many.get(key, count + 1):
            return compute(*operands)
        return _in_parts(compute, operands)  # an attempt that fails is slow: it takes and frees the workspace
    except RuntimeError as error:  # torch.linalg.LinAlgError is one, as are cuSOLVER's errors and those of memory
        reason, is_refused = str(error).strip().splitlines()[0][:200], not isinstance(error, torch.linalg.LinAlgError)
    if finite and not all(bool(torch.isfinite(tensor).all()) for tensor in operands):
        raise NumericalError(
            f"{name} of a matrix of shape {tuple(operands[0].shape)}: the matrix holds NaN or Inf, so weights or "
            "activations "
            "overflow float32. Check the checkpoint, or leave this matrix dense (a rule with structure: dense)"
        )
    for way, again in (("in parts of the batch", _in_parts), ("on the CPU in float64", _on_cpu)):
        if again is _in_parts and single:
            continue
        _empty_cache(operands[0])
        try:
            result = again(compute, operands)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0][:200]
            continue
        if again is _in_parts and is_refused:
            _too_many[key] = min(count, _too_many.get(key, count))
        if name not in _warned:
            _warned.add(name)
            warnings.warn(
                f"torch.linalg.{name} failed on {operands[0].device} for a matrix of shape {tuple(operands[0].shape)} "
                f"({reason}); "
                f"computed {way}, which is slower",
                RuntimeWarning,
                stacklevel=3,
            )
        return result
    raise NumericalError(
        f"{name} of a matrix of shape {tuple(operands[0].shape)} fails on {operands[0].device} and on the CPU "
        f"({reason}): the matrix is "
        "singular or too badly conditioned. Give more calibration text, or leave this matrix dense"
    )


def _count(operands: tuple[Tensor, ...]) -> int:
    """Return the number of matrices in the largest batch."""
    return max(prod(tensor.shape[:-2]) for tensor in operands)


def _in_parts(compute: Callable[..., Any], operands: tuple[Tensor, ...]) -> Any:
    """Return the results of halves of the batch, or of their halves; batch axes are broadcast against each other."""
    broadcast_shapes: Any = torch.broadcast_shapes  # has no types
    batch: torch.Size = broadcast_shapes(*(tensor.shape[:-2] for tensor in operands))
    flat = [tensor.expand(*batch, *tensor.shape[-2:]).flatten(0, len(batch) - 1) for tensor in operands]
    results = list(_computed_parts(compute, flat))
    if isinstance(results[0], Tensor):
        return _unflatten(torch.cat(results), batch)
    return tuple(_unflatten(torch.cat(parts), batch) for parts in zip(*results))


def _computed_parts(compute: Callable[..., Any], flat: list[Tensor]) -> Iterator[Any]:
    """Yield the results of both halves of a batch that failed.

    A half that fails is halved again, down to one matrix.
    """
    middle = -(-len(flat[0]) // 2)
    for half in ([tensor[:middle] for tensor in flat], [tensor[middle:] for tensor in flat]):
        if len(half[0]) == 0:
            continue
        if len(half[0]) == 1:  # by the routine for one matrix
            one = compute(*(tensor[0] for tensor in half))
            yield one[None] if isinstance(one, Tensor) else tuple(result[None] for result in one)
            continue
        try:
            result = compute(*half)
        except RuntimeError:
            yield from _computed_parts(compute, half)
        else:
            yield result


def _unflatten(flat: Tensor, batch: torch.Size) -> Tensor:
    return flat.reshape(*batch, *flat.shape[1:])


def _on_cpu(compute: Callable[..., Any], operands: tuple[Tensor, ...]) -> Any:
    first = operands[0]
    result = compute(*(tensor.detach().to("cpu", torch.float64) for tensor in operands))
    parts = (result,) if isinstance(result, Tensor) else result
    back = tuple(p.to(first.device, first.dtype if p.is_floating_point() else p.dtype) for p in parts)
    return back[0] if isinstance(result, Tensor) else back


def _empty_cache(tensor: Tensor) -> None:
    """Free torch's cached GPU memory: cuSOLVER allocates its workspace outside torch's memory pool."""
    if tensor.device.type == "cuda":
        torch.cuda.empty_cache()
