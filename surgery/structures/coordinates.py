"""Coordinates of a core in which an optimizer makes its steps, where the stored values are badly scaled for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from surgery.structures import linalg

MIN_SINGULAR_VALUE = 1e-6  # of the largest, that a component of a matrix counts with at least


class Coordinates(NamedTuple):
    """Coordinates Z of a core: core = matrix @ Z if `on_rows`, else Z @ matrix. inverse: of `matrix`, both (R, R)."""

    matrix: Tensor
    inverse: Tensor
    on_rows: bool

    def to(self, device: torch.device) -> Coordinates:
        """Return the same with its matrices on a device."""
        return Coordinates(self.matrix.to(device), self.inverse.to(device), self.on_rows)

    def of(self, core: Tensor) -> Tensor:
        """Return Z of a core."""
        return self.inverse @ core if self.on_rows else core @ self.inverse

    def core(self, z: Tensor) -> Tensor:
        """Return the core of Z; it is linear, so it also turns a step of Z into one of the core."""
        return self.matrix @ z if self.on_rows else z @ self.matrix

    def gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient in Z from that in the core."""
        return self.matrix.mT @ gradient if self.on_rows else gradient @ self.matrix.mT


@torch.no_grad()
def balanced_pivots(coefficients_NR: Tensor, right_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Return A = left[pivots] (R, R) and its inverse, for B = left @ (A^-1 right) with singular vectors as balanced
    factors.

    B = [I; coefficients] right is U s V^T, and left = U sqrt(s): the columns of `left` are orthogonal, and column r has
    the norm of row r of A^-1 right. Computed in float64 from [I; coefficients] = Q S, S right = U' s V^T: A = S^-1 U'
    sqrt(s).
    """
    right, eye = right_RI.double(), torch.eye(len(right_RI), dtype=torch.float64, device=right_RI.device)
    upper_RR = linalg.qr(torch.cat([eye, coefficients_NR.double()]))[1]
    u_RR, values_R, _ = linalg.svd(upper_RR @ right, full_matrices=False)
    floor = MIN_SINGULAR_VALUE * float(values_R[0])
    root_R = (values_R.clamp_min(floor) if floor else torch.ones_like(values_R)).sqrt()
    pivots_RR = linalg.solve_triangular(upper_RR, u_RR, upper=True) * root_R
    inverse_RR = (u_RR.mT @ upper_RR) / root_R[:, None]
    return pivots_RR.to(right_RI.dtype), inverse_RR.to(right_RI.dtype)
