"""The metric of a projection: min tr(G (W - B) C (W - B)^T).

C_II is the second moment of the inputs, E[x x^T]; G_OO weighs output directions, E[g g^T] with g the
gradient of the loss at the output (the Fisher, or Gauss-Newton, factor of K-FAC: Martens & Grosse 2015,
eq. 13). With both, half the value is the expected rise of the loss in nats per token, to second order;
with C alone it is the mean squared output error; with neither, the squared Frobenius norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surgery.core.errors import NumbersError
from surgery.structures import linalg


def damp_(moment_II: Tensor, damping: float) -> float:
    """C += damping * mean(diag C) I, in place: a direction that the calibration text never showed still
    counts. Returns what was added to the diagonal."""
    scale = float(moment_II.diagonal().mean())
    # A moment of nothing (a dead input) leaves only the identity, so that no direction is free.
    ridge = damping * scale if scale > 0 else 1.0
    moment_II.diagonal().add_(ridge)
    return ridge


# Columns of a product that are added together: fewer save more of the half that symmetry gives.
MOMENT_BLOCK = {"cpu": 1024, "cuda": 4096}


def add_moment_(sum_XX: Tensor, rows_NX: Tensor) -> None:
    """sum += rows^T rows, in place: blocks below the diagonal are copied from above it."""
    width, block = rows_NX.shape[1], MOMENT_BLOCK.get(rows_NX.device.type, 1024)
    for i in range(0, width, block):
        for j in range(i, width, block):
            part = sum_XX[i : i + block, j : j + block]
            part.addmm_(rows_NX[:, i : i + block].mT, rows_NX[:, j : j + block])
            if i != j:
                sum_XX[j : j + block, i : i + block] = part.mT


def add_damping(moment_II: Tensor, damping: float) -> Tensor:
    """Return C + damping * mean(diag C) I as a new matrix."""
    out = moment_II.clone()
    damp_(out, damping)
    return out


def symmetric_roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """C^(1/2) and C^(-1/2) by eigh, of (a batch of) positive semidefinite matrices; eigenvalues below
    float32 rounding of the largest are raised to it."""
    values, vectors = linalg.eigh(matrix)
    values = torch.maximum(values, values[..., -1:].clamp_min(1e-30) * 1e-7)
    root = values.sqrt().unsqueeze(-2)
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


def input_root(moment_II: Tensor) -> Tensor:
    """R with R R^T = C, of (a batch of) C. Every such R gives W R the same left singular vectors and the same
    singular values, so the cheapest is taken: Cholesky's, and the symmetric one where that fails."""
    lower, failed = linalg.cholesky_ex(moment_II)
    return symmetric_roots(moment_II)[0] if bool(failed.any()) else lower


def output_roots(gram_OO: Tensor) -> tuple[Tensor, Tensor]:
    """T, T^-1 with T^T T = G, of (a batch of) G; any root serves on the output side too."""
    lower, failed = linalg.cholesky_ex(gram_OO)
    if bool(failed.any()):
        return symmetric_roots(gram_OO)
    eye = torch.eye(gram_OO.shape[-1], dtype=gram_OO.dtype, device=gram_OO.device)
    return lower.mT, linalg.solve_triangular(lower.mT, eye.expand_as(lower), upper=True)


def spd_factor(matrix: Tensor, ridges: tuple[float, ...] = (0.0, 1e-6, 1e-4, 1e-2)) -> Tensor:
    """Cholesky factor of (a batch of) positive semidefinite matrices, with the first of the ridges (relative
    to the mean of the diagonal) that makes one possible."""
    for ridge in ridges:
        ridged = matrix
        if ridge:
            mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None].clamp_min(1e-30)
            ridged = matrix.clone()
            ridged.diagonal(dim1=-2, dim2=-1).add_(ridge * mean)
        factor, failed = linalg.cholesky_ex(ridged)
        if not bool(failed.any()):
            return factor
    raise NumbersError(
        "a second moment is not positive semidefinite: activations hold NaN or Inf, or overflow float32 when squared; check "
        "the checkpoint and the calibration text"
    )


LARGE_MATRIX = 1024


def spd_inverse(matrix: Tensor) -> Tensor:
    """(A batch of) C^-1, for solving with many right-hand sides one after the other by products. Large ones are
    inverted one at a time: four copies of each are under way."""
    if matrix.dim() > 2 and matrix.shape[-1] >= LARGE_MATRIX:
        return torch.stack([spd_inverse(one) for one in matrix])
    factor = spd_factor(matrix)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    inverse = linalg.solve_triangular(factor, eye, upper=False)
    return inverse.mT @ inverse


def inner_product(a_OI: Tensor, b_OI: Tensor) -> float:
    """<a, b>: row by row in float32, the rows in float64."""
    return float(torch.linalg.vecdot(a_OI, b_OI).sum(dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class Metric:
    """c_II: (already damped) input second moment or None.
    g_OO: output Gram (damped), or its diagonal alone as (O,), or None."""

    c_II: Tensor | None = None
    g_OO: Tensor | None = None
    c_cache: dict[Any, Any] = field(default_factory=dict, repr=False)  # shared by metrics with one C
    _product: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    def compute_once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """compute(), a function of C alone, once for all metrics that share C."""
        if key not in self.c_cache:
            self.c_cache[key] = compute()
        return self.c_cache[key]

    def times_c(self, weight_OI: Tensor) -> Tensor:
        """W C, remembered for the last W asked for."""
        if self.c_II is None:
            return weight_OI
        if not self._product or self._product[0][0] is not weight_OI:
            self.cache_times_c(weight_OI, weight_OI @ self.c_II)
        return self._product[0][1]

    def cache_times_c(self, weight_OI: Tensor, product_OI: Tensor) -> None:
        """Store W C for the next call of `times_c` with the same W."""
        self._product[:] = [(weight_OI, product_OI)]

    @property
    def c_root(self) -> Tensor | None:
        """Root R (I, I) of C with R R^T = C, or None."""
        moment_II = self.c_II
        return None if moment_II is None else self.compute_once("root", lambda: input_root(moment_II))

    @cached_property
    def g_roots(self) -> tuple[Tensor, Tensor] | None:
        """Roots (T, T^-1) of G with T^T T = G; None without G or with a diagonal G."""
        return None if self.g_OO is None or self.g_OO.dim() == 1 else output_roots(self.g_OO)

    def apply_output_root(self, matrix_OX: Tensor) -> Tensor:
        """T X with T^T T = G."""
        if self.g_OO is None:
            return matrix_OX
        return self.g_OO.sqrt()[:, None] * matrix_OX if self.g_roots is None else self.g_roots[0] @ matrix_OX

    def apply_output_root_inverse(self, matrix_OX: Tensor) -> Tensor:
        """T^-1 X."""
        if self.g_OO is None:
            return matrix_OX
        return matrix_OX / self.g_OO.sqrt()[:, None] if self.g_roots is None else self.g_roots[1] @ matrix_OX

    def whiten(self, weight_OI: Tensor) -> Tensor:
        """T W R, R R^T = C: its Frobenius norm is the metric's norm of W."""
        weighed_OI = self.apply_output_root(weight_OI)
        return weighed_OI if self.c_root is None else weighed_OI @ self.c_root

    def left_gram(self, weight_OI: Tensor) -> Tensor:
        """T W C W^T T^T, (O, O)."""
        weighed_OI = self.apply_output_root(weight_OI)
        return self.apply_output_root(self.times_c(weight_OI)) @ weighed_OI.mT

    def apply(self, weight_OI: Tensor) -> Tensor:
        """G W C, the gradient of half the squared norm."""
        if self.g_OO is not None:
            weight_OI = self.g_OO[:, None] * weight_OI if self.g_OO.dim() == 1 else self.g_OO @ weight_OI
        return weight_OI if self.c_II is None else weight_OI @ self.c_II

    @torch.no_grad()
    def squared_norm(self, weight_OI: Tensor) -> float:
        """tr(G W C W^T)."""
        return inner_product(self.apply(weight_OI), weight_OI)

    @torch.no_grad()
    def relative_error(self, target_OI: Tensor, approx_OI: Tensor) -> float:
        """Relative error ||target - approx|| / ||target|| in this metric."""
        whole = self.squared_norm(target_OI)
        return (max(self.squared_norm(target_OI - approx_OI), 0.0) / whole) ** 0.5 if whole > 0 else 0.0


def damp_output_gram(gram: Tensor | None) -> Tensor | None:
    """5% of the mean: between 0.1% and 10% the result does not move (docs/quality.md)."""
    if gram is None:
        return None
    return add_damping(gram, 0.05) if gram.dim() == 2 else gram + 0.05 * gram.mean().clamp_min(1e-30)
