"""The metric of a projection: min tr(G (W - B) C (W - B)^T).

C_II is the second moment of the inputs, E[x x^T]. G_OO weighs output directions: E[g g^T] with g the gradient of the
loss at the output, the Fisher (or Gauss-Newton) factor of K-FAC (Martens & Grosse 2015, eq. 13). With both, half the
value is the expected rise of the loss in nats per token, to second order. With C alone it is the mean squared output
error. Without C and G it is the squared Frobenius norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from surgery.core.errors import NumericalError
from surgery.structures import linalg

# Diagonal of the damped C of an input that is always zero, and of the damped G of an output on which the loss does not
# depend. Every direction has a weight, so the matrix is fitted as by the identity, and its errors cost next to nothing
# beside those of others (in nats).
DEAD_MOMENT = 1e-12


def damp_(moment_II: Tensor, damping: float) -> float:
    """Add damping * mean(diag C) to the diagonal of C, in place, and return the number added.

    With it, input directions that do not occur in the calibration text keep a weight.
    """
    scale = float(moment_II.diagonal().mean())
    ridge = damping * scale if scale > 0 else DEAD_MOMENT
    moment_II.diagonal().add_(ridge)
    return ridge


# Columns per block of a symmetric product. Only blocks on and above the diagonal are computed, so small blocks save
# more.
MOMENT_BLOCK = {"cpu": 1024, "cuda": 4096}


def add_moment_(sum_XX: Tensor, rows_NX: Tensor) -> None:
    """Add rows^T rows (X, X) to the sum in place. Blocks below the diagonal are copied from above it."""
    width, block = rows_NX.shape[1], MOMENT_BLOCK.get(rows_NX.device.type, 1024)
    for i in range(0, width, block):
        for j in range(i, width, block):
            block_sum = sum_XX[i : i + block, j : j + block]
            block_sum.addmm_(rows_NX[:, i : i + block].mT, rows_NX[:, j : j + block])
            if i != j:
                sum_XX[j : j + block, i : i + block] = block_sum.mT


def add_damping(moment_II: Tensor, damping: float) -> Tensor:
    """Return C + damping * mean(diag C) I as a new matrix."""
    out = moment_II.clone()
    damp_(out, damping)
    return out


def inverse_size(matrix: Tensor) -> Tensor:
    """Return 1 / max |m|, rounded to a power of two, of (a batch of) matrices (..., 1, 1); 1 for zeros.

    Multiplied by it, a matrix keeps its precision, and its products with itself are numbers of float32.
    """
    largest = matrix.abs().amax((-2, -1), keepdim=True)
    return torch.where(largest > 0, largest, 1.0).log2().round().clamp(-126, 126).neg().exp2()


def symmetric_roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return C^(1/2) and C^(-1/2) of (a batch of) positive semidefinite matrices, by `eigh`.

    Eigenvalues below 1e-7 of the largest, the rounding error of float32, are raised to that bound. A matrix of zeros
    counts as one of 1e-30.
    """
    values, vectors = linalg.eigh(matrix)
    largest = torch.where(values[..., -1:] > 0, values[..., -1:], 1e-30)
    values = torch.maximum(values, largest * 1e-7)
    root = values.sqrt().unsqueeze(-2)
    return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT


def input_root(moment_II: Tensor) -> Tensor:
    """Return R with R R^T = C, for (a batch of) C: the Cholesky factor, or the symmetric root if Cholesky fails.

    W R has the same left singular vectors and singular values for every such R, so the cheapest one is used.
    """
    lower, failed = linalg.cholesky_ex(moment_II)
    return symmetric_roots(moment_II)[0] if bool(failed.any()) else lower


def output_roots(gram_OO: Tensor) -> tuple[Tensor, Tensor]:
    """Return T and T^-1 with T^T T = G, for (a batch of) G: from Cholesky, or the symmetric root if Cholesky fails."""
    lower, failed = linalg.cholesky_ex(gram_OO)
    if bool(failed.any()):
        return symmetric_roots(gram_OO)
    eye = torch.eye(gram_OO.shape[-1], dtype=gram_OO.dtype, device=gram_OO.device)
    return lower.mT, linalg.solve_triangular(lower.mT, eye.expand_as(lower), upper=True)


def spd_factor(matrix: Tensor, ridges: tuple[float, ...] = (0.0, 1e-6, 1e-4, 1e-2)) -> Tensor:
    """Return the Cholesky factor of (a batch of) positive semidefinite matrices.

    ridges: values added to the diagonal, relative to its mean; they are tried in order until the factorization
    succeeds. With a ridge each matrix is divided by its size while it is factored: of a batch, one may be of 1e-38.
    """
    for ridge in ridges:
        ridged, root = matrix, None
        if ridge:
            root = inverse_size(matrix).log2().div(2).round().exp2()  # a power of two, so that no precision is lost
            ridged = matrix * root * root
            mean = ridged.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None]
            ridged.diagonal(dim1=-2, dim2=-1).add_(ridge * torch.where(mean > 0, mean, 1.0))
        factor, failed = linalg.cholesky_ex(ridged)
        if not bool(failed.any()):
            return factor if root is None else factor.div_(root)
    raise NumericalError(
        "a second moment is not positive semidefinite: activations hold NaN or Inf, or overflow float32 when squared. "
        "Check "
        "the checkpoint and the calibration text"
    )


LARGE_MATRIX = 1024  # rows from which the matrices of a batch are inverted one at a time


def spd_inverse(matrix: Tensor) -> Tensor:
    """Return C^-1 of (a batch of) C, for solving with many right-hand sides in turn.

    Large matrices are inverted one at a time, because the computation holds four copies of each.
    """
    if matrix.dim() > 2 and matrix.shape[-1] >= LARGE_MATRIX:
        return torch.stack([spd_inverse(one) for one in matrix])
    factor = spd_factor(matrix)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
    inverse = linalg.solve_triangular(factor, eye, upper=False)
    return inverse.mT @ inverse


def inner_product(a_OI: Tensor, b_OI: Tensor) -> float:
    """Return <a, b>. Products within a row are summed in float32, the rows in float64."""
    return float(torch.linalg.vecdot(a_OI, b_OI).sum(dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class Metric:
    """The weights of a projection error, tr(G E C E^T) for an error E (O, I).

    c_II: damped input second moment C, or None for the identity. g_OO: damped output Gram matrix G, or only its
    diagonal (O,), or None for the identity. c_cache: results of `compute_once`, shared by metrics with one C.
    """

    c_II: Tensor | None = None
    g_OO: Tensor | None = None
    c_cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    _product: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    def compute_once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return compute(), a function of C alone, cached under `key` for all metrics that share C."""
        if key not in self.c_cache:
            self.c_cache[key] = compute()
        return self.c_cache[key]

    def times_c(self, weight_OI: Tensor) -> Tensor:
        """Return W C (O, I), cached for the last W."""
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
        """Return T X (O, X) with T^T T = G."""
        if self.g_OO is None:
            return matrix_OX
        return self.g_OO.sqrt()[:, None] * matrix_OX if self.g_roots is None else self.g_roots[0] @ matrix_OX

    def apply_output_root_inverse(self, matrix_OX: Tensor) -> Tensor:
        """Return T^-1 X (O, X) with T^T T = G."""
        if self.g_OO is None:
            return matrix_OX
        return matrix_OX / self.g_OO.sqrt()[:, None] if self.g_roots is None else self.g_roots[1] @ matrix_OX

    def whiten(self, weight_OI: Tensor) -> Tensor:
        """Return T W R (O, I) with R R^T = C and T^T T = G. Its Frobenius norm is the norm of W in the metric."""
        weighed_OI = self.apply_output_root(weight_OI)
        return weighed_OI if self.c_root is None else weighed_OI @ self.c_root

    def left_gram(self, weight_OI: Tensor) -> Tensor:
        """Return T W C W^T T^T (O, O)."""
        product_OI, weighed_OI = self.left_gram_factors(weight_OI)
        return product_OI @ weighed_OI.mT

    def left_gram_factors(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """Return T W C and T W (O, I), with T^T T = G."""
        return self.apply_output_root(self.times_c(weight_OI)), self.apply_output_root(weight_OI)

    def apply(self, weight_OI: Tensor) -> Tensor:
        """Return G W C (O, I), the gradient of half the squared norm of W."""
        if self.g_OO is not None:
            weight_OI = self.g_OO[:, None] * weight_OI if self.g_OO.dim() == 1 else self.g_OO @ weight_OI
        return weight_OI if self.c_II is None else weight_OI @ self.c_II

    @torch.no_grad()
    def squared_norm(self, weight_OI: Tensor) -> float:
        """Return the squared norm tr(G W C W^T)."""
        return inner_product(self.apply(weight_OI), weight_OI)

    @torch.no_grad()
    def relative_error(self, target_OI: Tensor, approx_OI: Tensor) -> float:
        """Return the relative error ||target - approx|| / ||target|| in this metric; 0 for a target of norm 0."""
        norm = self.squared_norm(target_OI)
        return (max(self.squared_norm(target_OI - approx_OI), 0.0) / norm) ** 0.5 if norm > 0 else 0.0


def damp_output_gram(gram: Tensor | None) -> Tensor | None:
    """Return G, or its diagonal (O,), plus 5% of the mean of its diagonal.

    Any share between 0.1% and 10% gives the same result (docs/quality.md).
    """
    if gram is None:
        return None
    if gram.dim() == 2:
        return add_damping(gram, 0.05)
    mean = gram.mean()
    return gram + torch.where(mean > 0, 0.05 * mean, DEAD_MOMENT)
