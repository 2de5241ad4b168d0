"""Matrix factorizations with fallbacks: batched, then one matrix at a time, then on the CPU in float64.

cuSOLVER's batched routines fail if GPU memory for the workspace is short (CUSOLVER_STATUS_INTERNAL_ERROR), and float32
routines fail on some matrices that float64 can factor. Each function returns the result of the first attempt that
succeeds, in the dtype and on the device of its argument. The first fallback of each function emits a RuntimeWarning.
NumbersError if the input holds NaN or Inf, or if every attempt fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from surgery.core.errors import NumbersError

_told: set[str] = set()  # functions that have warned in this process


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(eigenvalues ascending (.., n), eigenvectors in columns (.., n, n))."""
    return _first_that_works("eigh", lambda m: torch.linalg.eigh(m), matrix)


def eigvalsh(matrix: Tensor) -> Tensor:
    """Eigenvalues ascending (.., n)."""
    return _first_that_works("eigvalsh", lambda m: torch.linalg.eigvalsh(m), matrix)


def svd(matrix: Tensor, full_matrices: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(U, S, V^T)."""
    return _first_that_works("svd", lambda m: torch.linalg.svd(m, full_matrices=full_matrices), matrix)


def qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(Q, R), reduced."""
    return _first_that_works("qr", lambda m: torch.linalg.qr(m), matrix)


def cholesky_ex(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(L, info): info is not zero where a matrix of the batch is not positive definite, NaN included."""
    return _first_that_works("cholesky_ex", lambda m: torch.linalg.cholesky_ex(m), matrix, finite=False)


def cholesky_solve(rhs: Tensor, factor: Tensor) -> Tensor:
    """(L L^T)^-1 rhs."""
    return _first_that_works("cholesky_solve", lambda b, m: torch.cholesky_solve(b, m), rhs, factor)


def lu_factor(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(LU, pivots counted from 1)."""
    return _first_that_works("lu_factor", lambda m: torch.linalg.lu_factor(m), matrix)


def solve(matrix: Tensor, rhs: Tensor, left: bool = True) -> Tensor:
    """matrix^-1 rhs, or rhs matrix^-1 where not `left`; rhs is a matrix (.., n, k), or (.., k, n)."""
    return _first_that_works("solve", lambda m, b: torch.linalg.solve(m, b, left=left), matrix, rhs)


def solve_triangular(matrix: Tensor, rhs: Tensor, *, upper: bool, left: bool = True) -> Tensor:
    """Return matrix^-1 rhs for a triangular matrix, or rhs matrix^-1 if not `left`."""
    return _first_that_works(
        "solve_triangular", lambda m, b: torch.linalg.solve_triangular(m, b, upper=upper, left=left), matrix, rhs
    )


def _first_that_works(name: str, compute: Callable[..., Any], *given: Tensor, finite: bool = True) -> Any:
    try:
        return compute(*given)
    except RuntimeError as error:  # torch.linalg.LinAlgError is one, as are cuSOLVER's errors and those of memory
        reason = str(error).strip().splitlines()[0][:200]
    if finite and not all(bool(torch.isfinite(tensor).all()) for tensor in given):
        raise NumbersError(
            f"a matrix of shape {tuple(given[0].shape)} to be factored ({name}) holds NaN or Inf: weights or activations "
            "overflow float32; check the checkpoint, or leave this matrix dense (a rule with structure: dense)"
        )
    single = all(tensor.dim() <= 2 for tensor in given)
    for way, again in (("one matrix at a time", _one_by_one), ("on the CPU in float64", _on_cpu)):
        if way.startswith("one") and single:
            continue
        _empty_cache(given[0])
        try:
            result = again(compute, given)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0][:200]
            continue
        if name not in _told:
            _told.add(name)
            warnings.warn(
                f"torch.linalg.{name} failed on {given[0].device} for a matrix of shape {tuple(given[0].shape)} ({reason}); "
                f"computed {way}, which is slower",
                RuntimeWarning,
                stacklevel=3,
            )
        return result
    raise NumbersError(
        f"{name} of a matrix of shape {tuple(given[0].shape)} fails on {given[0].device} and on the CPU ({reason}); the matrix is "
        "singular, or its numbers differ too much in size: give more calibration text, or leave this matrix dense"
    )


def _one_by_one(compute: Callable[..., Any], given: tuple[Tensor, ...]) -> Any:
    """The same for each matrix of the batch, batch axes broadcast against each other."""
    batch = torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in given))
    flat = [tensor.expand(*batch, *tensor.shape[-2:]).flatten(0, len(batch) - 1) for tensor in given]
    found = [compute(*(tensor[i] for tensor in flat)) for i in range(len(flat[0]))]
    if isinstance(found[0], Tensor):
        return torch.stack(found).unflatten(0, batch)
    return tuple(torch.stack(parts).unflatten(0, batch) for parts in zip(*found))


def _on_cpu(compute: Callable[..., Any], given: tuple[Tensor, ...]) -> Any:
    first = given[0]
    found = compute(*(tensor.detach().to("cpu", torch.float64) for tensor in given))
    parts = (found,) if isinstance(found, Tensor) else found
    back = tuple(p.to(first.device, first.dtype if p.is_floating_point() else p.dtype) for p in parts)
    return back[0] if isinstance(found, Tensor) else back


def _empty_cache(tensor: Tensor) -> None:
    """Workspaces are allocated outside torch's pool."""
    if tensor.device.type == "cuda":
        torch.cuda.empty_cache()
