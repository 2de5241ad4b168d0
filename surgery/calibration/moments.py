"""Second moments of the inputs and outputs of linear layers, summed over calibration rows. No activation is stored.

For a linear y = W x, x is its input from the layers already converted, and y* the output to reproduce, that of the
original layer on the original model's input x0:

    C = E[x x^T]    K = E[y* x^T]    e = E|y*|^2        error(B) = e - 2 <B, K> + <B C, B>

so the best unconstrained matrix is K C^-1, and the best structured one is its projection in the metric C (the "Hessian"
of GPTQ, up to a factor). If the bias is fitted too, C, K and e are those of x - E[x] and y* - E[y*], and the bias grows
by E[y*] - B E[x].
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
    """Statistics of one output y*.

    k_OI: K = E[y* x^T] (O, I). If y* = W x0 and O > I, it is None, and K = W E[x0 x^T] is computed on demand from the
    (I, I) matrix shared by all linears that read x0. residual: whether the gap of the residual stream is added to y*.
    energy: E|y*|^2. mean_O: E[y*], None if the bias is not fitted.
    """

    weight_OI: Tensor
    residual: bool
    k_OI: Tensor | None = None
    energy: float = 0.0
    mean_O: Tensor | None = None

    @property
    def uses_shared_cross(self) -> bool:
        """Whether K is computed from the shared matrix E[x0 x^T]."""
        return not self.residual and self.weight_OI.shape[0] > self.weight_OI.shape[1]


class InputMoments:
    """Second moments for the linears that read one input.

    `add` accumulates sums over rows, and `means` divides them by the number of rows, once, in place. weights: name ->
    (W, whether the gap of the residual stream is added to its output). fits_bias: whether the biases are fitted too.
    """

    def __init__(self, weights: dict[str, tuple[Tensor, bool]], fits_bias: bool = False):
        first = next(iter(weights.values()))[0]
        self.count, self.diverged, self.summing = 0, False, True
        self.borrowed = 0  # rows of other experts, or of white inputs, among `count`
        self.cache: dict[Any, Any] = {}  # results of Metric.compute_once, shared by all linears that read this input
        self.targets = {name: OutputMoments(w, residual) for name, (w, residual) in weights.items()}
        self.c_II = first.new_zeros(first.shape[1], first.shape[1])
        shared = not fits_bias and any(t.uses_shared_cross for t in self.targets.values())
        self.cross_II = torch.zeros_like(self.c_II) if shared else None  # E[x0 x^T]
        self.original_II = torch.zeros_like(self.c_II) if shared else None  # E[x0 x0^T]
        self.mean_I = first.new_zeros(first.shape[1]) if fits_bias else None  # E[x]
        for target in self.targets.values():
            if fits_bias or not target.uses_shared_cross:
                target.k_OI = torch.zeros_like(target.weight_OI)
            target.mean_O = target.weight_OI.new_zeros(len(target.weight_OI)) if fits_bias else None

    def add(self, x_NI: Tensor, x0_NI: Tensor, gap_NO: Tensor | None = None) -> None:
        """Add rows of the input.

        x_NI: input in the converted model. x0_NI: input in the original model (the same tensor before the first
        converted layer). gap_NO: residual stream of the original model minus that of the converted one.
        """
        assert self.summing
        self.count += len(x_NI)
        add_moment_(self.c_II, x_NI)
        if self.mean_I is not None:
            self.mean_I += x_NI.sum(0)
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
            if target.mean_O is not None:
                target.mean_O += y_NO.sum(0)
            target.k_OI.addmm_(y_NO.mT, x_NI)

    def ordered_reduce(self, addend: InputMoments, round_: Round, ranks: DistContext, first: bool) -> None:
        """Add the sums of the row shards of a round, in the order of the shards.

        Each process adds some of the matrix rows.

        addend: the sums of this process's shard. first: whether this is the first round.
        """
        for mine, other in zip(self.tensors(), addend.tensors()):
            ranks.ordered_reduce_(mine, other, round_.owners, first)
        energies = {name: target.energy for name, target in addend.targets.items()}
        per_rank = ranks.gather((addend.count, addend.diverged, energies))
        for count, diverged, of_rank in (per_rank[owner] for owner in round_.owners):
            self.count, self.diverged = self.count + count, self.diverged or diverged
            for name, energy in of_rank.items():
                self.targets[name].energy += energy

    def borrow(self, shared: InputMoments, rows: int) -> None:
        """Add the statistics of `rows` average rows of `shared`, the sums over the rows of all experts of a layer.

        shared: made with `surgery.calibration.routing.shared_weight`, so that it has E[x0 x^T] and E[x0 x0^T].
        """
        assert self.summing and shared.cross_II is not None and shared.original_II is not None
        share = rows / max(1, shared.count)
        self.count, self.borrowed = self.count + rows, self.borrowed + rows
        self.diverged = self.diverged or shared.diverged
        self.c_II.add_(shared.c_II, alpha=share)
        if self.cross_II is not None and self.original_II is not None:
            self.cross_II.add_(shared.cross_II, alpha=share)
            self.original_II.add_(shared.original_II, alpha=share)
        for target in self.targets.values():
            if target.k_OI is not None:
                target.k_OI.addmm_(target.weight_OI, shared.cross_II, alpha=share)
                target.energy += share * Metric(shared.original_II).squared_norm(target.weight_OI)

    def add_white(self, rows: int) -> None:
        """Add the statistics of `rows` rows of white inputs, E[x x^T] = e I, whose outputs are W x: a ridge that draws a
        fit towards W.

        e is the mean of diag E[x x^T] of the rows that were added before; 1 without any.
        """
        assert self.summing
        trace = float(self.c_II.trace())
        added = rows * (trace / self.count / len(self.c_II) if trace > 0 else 1.0)
        self.count, self.borrowed = self.count + rows, self.borrowed + rows
        for total_II in (self.c_II, self.cross_II, self.original_II):
            if total_II is not None:
                total_II.diagonal().add_(added)
        for target in self.targets.values():
            if target.k_OI is not None:
                target.k_OI.add_(target.weight_OI, alpha=added)
                target.energy += added * inner_product(target.weight_OI, target.weight_OI)

    def means(self) -> InputMoments:
        """Turn the sums into means, in place, and return self. Raises SurgeryError for NaN or Inf."""
        assert self.summing
        for total in self.tensors():
            total /= self.count
            if not is_finite(total):
                raise SurgeryError(
                    f"calibration: the input of {', '.join(self.targets)} holds NaN or Inf, or overflows float32 when "
                    "it is "
                    "squared, so this text gives no usable statistics. Check the checkpoint"
                )
        for target in self.targets.values():
            target.energy /= self.count
        if self.mean_I is not None:
            self._center(self.mean_I)
        self.summing = False
        return self

    def _center(self, mean_I: Tensor) -> None:
        """Turn the moments of x and y* into those of x - E[x] and y* - E[y*], in place."""
        self.c_II.addr_(mean_I, mean_I, alpha=-1)
        for target in self.targets.values():
            assert target.mean_O is not None and target.k_OI is not None
            target.k_OI.addr_(target.mean_O, mean_I, alpha=-1)
            target.energy -= inner_product(target.mean_O, target.mean_O)

    def bias_change(self, name: str, matrix_OI: Tensor) -> Tensor | None:
        """Return E[y*] - B E[x] (O,), by which the bias grows beside B; None if it is not fitted."""
        mean_O = self.targets[name].mean_O
        return None if mean_O is None or self.mean_I is None else mean_O - matrix_OI @ self.mean_I

    def cross(self, name: str) -> Tensor:
        """Return K = E[y* x^T] (O, I) of a linear."""
        target = self.targets[name]
        if target.k_OI is not None:
            return target.k_OI
        assert self.cross_II is not None
        return target.weight_OI @ self.cross_II

    def energy(self, name: str) -> float:
        """Return E|y*|^2 of a linear."""
        target = self.targets[name]
        if target.k_OI is not None:
            return target.energy
        assert self.original_II is not None
        return Metric(self.original_II).squared_norm(target.weight_OI)

    def tensors(self) -> list[Tensor]:
        """Return all stored matrices, in a fixed order."""
        held = [self.c_II, self.cross_II, self.original_II, *(t.k_OI for t in self.targets.values())]
        held += [self.mean_I, *(t.mean_O for t in self.targets.values())]
        return [t for t in held if t is not None]


ERROR_ROWS = 1024  # rows of a matrix whose error is computed at a time


class HeldOutError:
    """Error of an approximation B of one linear, computed from moments of held-out rows."""

    def __init__(self, moments: InputMoments, name: str, g_OO: Tensor | None):
        assert not moments.summing
        self.c_II, self.k_OI = moments.c_II, moments.cross(name)
        self.g_OO = g_OO
        self.target_energy = moments.energy(name)

    def measure(self, b_OI: Tensor) -> tuple[float, float]:
        """Return (loss, error) of B (O, I).

        loss: <G (B C - 2 K), B>, the squared error in the metric up to a constant. error: the relative error
        sqrt(E|y* - B x|^2 / E|y*|^2), without G. Computed for ERROR_ROWS rows at a time to save memory.
        """
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
