"""Calibration: text to windows of tokens, windows to second moments. No activation is kept.

For a linear y = W x, with x the input that the already converted layers give and y* the output to be
reproduced (the original layer's, on the original input):

    C = E[x x^T]    K = E[y* x^T]    e = E|y*|^2        error(B) = e - 2 <B, K> + <B C, B>

so the best unconstrained matrix is K C^-1, and its structured stand-in is the projection of that in C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.partition import Round
from surgery.checkpoint.safetensors_io import is_finite
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.structures import Metric
from surgery.structures.metric import add_moment_, inner_product


# -- moments ---------------------------------------------------------------------------------------
@dataclass
class OutputMoments:
    """Statistics of one output y*. Stores K = E[y* x^T] (O, I). If y* = W x0 and O > I, K = W E[x0 x^T] is formed on
    demand from the (I, I) matrix shared by all linears that read x0."""

    weight_OI: Tensor
    residual: bool
    k_OI: Tensor | None = None
    energy: float = 0.0  # E|y*|^2

    @property
    def uses_shared_cross(self) -> bool:
        """Whether K is formed from the shared E[x0 x^T] instead of being stored."""
        return not self.residual and self.weight_OI.shape[0] > self.weight_OI.shape[1]


class InputMoments:
    """Means over rows for the matrices that read one input; weights: name -> (W, whether the residual stream's
    gap is added to its output). Rows are `add`ed, `means` ends that: sums become means where they lie."""

    def __init__(self, weights: dict[str, tuple[Tensor, bool]]):
        first = next(iter(weights.values()))[0]
        self.count, self.diverged, self.summing = 0, False, True
        self.cache: dict[Any, Any] = {}  # functions of C, once for every matrix of the stage
        self.targets = {name: OutputMoments(w, residual) for name, (w, residual) in weights.items()}
        self.c_II = first.new_zeros(first.shape[1], first.shape[1])
        shared = any(t.uses_shared_cross for t in self.targets.values())
        self.cross_II = torch.zeros_like(self.c_II) if shared else None  # E[x0 x^T]
        self.original_II = torch.zeros_like(self.c_II) if shared else None  # E[x0 x0^T]
        for target in self.targets.values():
            if not target.uses_shared_cross:
                target.k_OI = torch.zeros_like(target.weight_OI)

    def add(self, x_NI: Tensor, x0_NI: Tensor, gap_NO: Tensor | None = None) -> None:
        """x: the converted stream's input; x0: the original's (the same tensor while the streams are one);
        gap: original minus converted residual stream."""
        assert self.summing
        self.count += len(x_NI)
        add_moment_(self.c_II, x_NI)
        if x_NI is not x0_NI or gap_NO is not None:
            self.diverged = True
        if self.cross_II is not None and self.original_II is not None:
            self.cross_II.addmm_(x0_NI.mT, x_NI)
            add_moment_(self.original_II, x0_NI)
        for target in self.targets.values():
            if target.k_OI is None:
                continue
            y_NO = x0_NI @ target.weight_OI.mT
            if target.residual and gap_NO is not None:
                y_NO += gap_NO
            target.energy += inner_product(y_NO, y_NO)
            target.k_OI.addmm_(y_NO.mT, x_NI)

    def ordered_reduce(self, part: InputMoments, round_: Round, ranks: DistContext, first: bool) -> None:
        """Add the shards of a round in order; each process adds some of the matrices' rows."""
        for mine, other in zip(self.tensors(), part.tensors()):
            ranks.ordered_reduce_(mine, other, round_.owners, first)
        energies = {name: target.energy for name, target in part.targets.items()}
        per_rank = ranks.gather((part.count, part.diverged, energies))
        for count, diverged, found in (per_rank[owner] for owner in round_.owners):
            self.count, self.diverged = self.count + count, self.diverged or diverged
            for name, energy in found.items():
                self.targets[name].energy += energy

    def means(self) -> InputMoments:
        """Divide the sums by the number of rows, in place; no rows can be added afterwards.

        Raises SurgeryError if a sum is not finite.
        """
        assert self.summing
        for total in self.tensors():
            total /= self.count
            if not is_finite(total):
                raise SurgeryError(
                    f"calibration: what reaches {', '.join(self.targets)} holds NaN or Inf, or overflows float32 when it is "
                    "squared; the original model computes no usable numbers on this text: check the checkpoint"
                )
        for target in self.targets.values():
            target.energy /= self.count
        self.summing = False
        return self

    def cross(self, name: str) -> Tensor:
        """Return K = E[y* x^T] (O, I) of an output."""
        target = self.targets[name]
        if target.k_OI is not None:
            return target.k_OI
        assert self.cross_II is not None
        return target.weight_OI @ self.cross_II

    def energy(self, name: str) -> float:
        """Return E|y*|^2 of an output."""
        target = self.targets[name]
        if target.k_OI is not None:
            return target.energy
        assert self.original_II is not None
        return Metric(self.original_II).squared_norm(target.weight_OI)

    def tensors(self) -> list[Tensor]:
        """Return all stored second moments."""
        held = [self.c_II, self.cross_II, self.original_II, *(t.k_OI for t in self.targets.values())]
        return [t for t in held if t is not None]


ERROR_ROWS = 1024  # of a matrix, judged at a time


class HeldOutError:
    """Judgement of one matrix by moments: how far B x is from y*, on the rows they were gathered from."""

    def __init__(self, moments: InputMoments, name: str, g_OO: Tensor | None):
        assert not moments.summing
        self.c_II, self.k_OI = moments.c_II, moments.cross(name)
        self.g_OO = g_OO
        self.target_energy = moments.energy(name)

    def measure(self, b_OI: Tensor) -> tuple[float, float]:
        """(loss, error): <G (B C - 2 K), B>, the weighted squared error up to a constant; and, unweighted,
        sqrt(E|y* - B x|^2 / E|y*|^2). A few rows of B C - 2 K at a time: all of them are as large as B."""
        plain = loss = 0.0
        for first in range(0, len(b_OI), ERROR_ROWS):
            rows = slice(first, first + ERROR_ROWS)
            change_RI = torch.addmm(self.k_OI[rows], b_OI[rows], self.c_II, beta=-2)
            each_R = torch.linalg.vecdot(change_RI, b_OI[rows])
            plain += float(each_R.sum(dtype=torch.float64))
            if self.g_OO is not None and self.g_OO.dim() == 1:
                loss += float((self.g_OO[rows] * each_R).sum(dtype=torch.float64))
            elif self.g_OO is not None:
                loss += float((self.g_OO[rows] * (change_RI @ b_OI.mT)).sum(dtype=torch.float64))
        error = (max(plain + self.target_energy, 0.0) / max(self.target_energy, 1e-30)) ** 0.5
        return (plain if self.g_OO is None else loss), error
