"""How far a block-mixing matrix W depends on the distance of blocks alone, and the sum of exponentials that says so
(Toeplitz block mixing, its Figure 2):

    W_ij ~ c_i K(i - j),  K(d) = sum_r a_r exp(-lambda_r d),  a, lambda >= 0

c_i is a row's own scale: a normalised mixer divides it out again, and rows of a causal W that sum to one have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GRID = 32  # rates tried
ROUNDS = 16  # of scales against kernel


@dataclass(frozen=True)
class Toeplitz:
    """The fit of one or more matrices: r2, the share of W's variance over the entries it may use that the fit explains,
    (..); amplitude_R and rate_R (.., R)."""

    r2: Tensor
    amplitude: Tensor
    rate: Tensor

    def kernel(self, distance: Tensor) -> Tensor:
        """K (.., *distance)."""
        powers = torch.exp(-distance[..., None] * self.rate.view(*self.rate.shape[:-1], *[1] * distance.dim(), -1))
        return (powers * self.amplitude.view(*self.rate.shape[:-1], *[1] * distance.dim(), -1)).sum(-1)


@torch.no_grad()
def fit_toeplitz(w_MM: Tensor, components: int, causal: bool = True) -> Toeplitz:
    """Of matrices (.., M, M): kernel and row scales in turn, the kernel by nonnegative least squares over a grid of
    rates, of which each matrix keeps the `components` that weigh most."""
    lead, size = w_MM.shape[:-2], w_MM.shape[-1]
    w_XMM = w_MM.reshape(-1, size, size).double()
    at_M = torch.arange(size, device=w_MM.device)
    apart_MM = (at_M[:, None] - at_M).abs()
    seen_MM = apart_MM >= 0 if not causal else at_M[:, None] >= at_M
    # From hardly falling over all blocks to gone at the next one; a constant is the limit of the first.
    slow = -1.5 - math.log10(size)
    grid_N = torch.cat([torch.zeros(1), torch.logspace(slow, 1, GRID - 1)]).to(w_XMM)
    rate_XN = grid_N.expand(len(w_XMM), -1)
    scale_XM, a_XN = torch.ones_like(w_XMM[:, 0]), torch.zeros_like(rate_XN)
    for round_ in range(ROUNDS):
        basis_XNM = torch.exp(-rate_XN[..., None] * at_M)
        if round_ == ROUNDS // 2 and components < GRID:
            chosen_XN = (a_XN * basis_XNM.sum(-1)).topk(components).indices.sort().values
            rate_XN, a_XN = rate_XN.gather(-1, chosen_XN), a_XN.gather(-1, chosen_XN)
            basis_XNM = torch.exp(-rate_XN[..., None] * at_M)
        a_XN = _kernel(w_XMM, scale_XM, basis_XNM, apart_MM, seen_MM, a_XN)
        k_XMM = torch.where(seen_MM, (a_XN[:, None] @ basis_XNM)[:, 0][:, apart_MM], 0)
        scale_XM = (w_XMM * k_XMM).sum(-1) / k_XMM.square().sum(-1).clamp_min(1e-30)
    wrong_X = (w_XMM - scale_XM[..., None] * k_XMM)[:, seen_MM].square().sum(-1)
    entries_XE = w_XMM[:, seen_MM]
    spread_X = (entries_XE - entries_XE.mean(-1, keepdim=True)).square().sum(-1)
    r2_X, a_XN = 1 - wrong_X / spread_X.clamp_min(1e-30), a_XN * scale_XM.mean(-1, keepdim=True)
    return Toeplitz(r2_X.view(lead), a_XN.view(*lead, -1), rate_XN.reshape(*lead, -1))


def _kernel(
    w_XMM: Tensor, scale_XM: Tensor, basis_XNM: Tensor, apart_MM: Tensor, seen_MM: Tensor, start_XN: Tensor
) -> Tensor:
    """a (X, N) of least squares with the row scales as they are; distances weigh as many entries as they have."""
    rows_XMM = scale_XM[..., None].expand_as(w_XMM)
    weight_XM, wanted_XM = torch.zeros_like(scale_XM), torch.zeros_like(scale_XM)
    weight_XM.index_add_(1, apart_MM[seen_MM], rows_XMM[:, seen_MM].square())
    wanted_XM.index_add_(1, apart_MM[seen_MM], (rows_XMM * w_XMM)[:, seen_MM])
    gram_XNN = (basis_XNM * weight_XM[:, None]) @ basis_XNM.mT
    return nonnegative(gram_XNN, (basis_XNM @ wanted_XM[..., None])[..., 0], start_XN)


def nonnegative(gram_HNN: Tensor, wanted_HN: Tensor, start_HN: Tensor | None = None, rounds: int = 80) -> Tensor:
    """argmin x^T G x / 2 - w^T x over x >= 0 for each h, a coordinate at a time; a little ridge for terms that are
    alike."""
    gram_HNN = gram_HNN + 1e-6 * torch.diag_embed(gram_HNN.diagonal(dim1=-2, dim2=-1) + 1e-12)
    x_HN = torch.zeros_like(wanted_HN) if start_HN is None else start_HN.clone()
    for _ in range(rounds):
        for n in range(x_HN.shape[1]):
            rest_H = wanted_HN[:, n] - (gram_HNN[:, n] * x_HN).sum(-1) + gram_HNN[:, n, n] * x_HN[:, n]
            x_HN[:, n] = (rest_H / gram_HNN[:, n, n]).clamp_min(0)
    return x_HN
