"""Fit of a block-mixing matrix W by a Toeplitz matrix of exponentials (FARS 2026, "Toeplitz Block Mixing", Figure 2):

    W_ij ~ c_i K(i - j),  K(d) = sum_r a_r exp(-lambda_r d),  a, lambda >= 0

c_i is a scale per row, needed because the rows of a causal W sum to one. It cancels in a normalised mixer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RATE_GRID_SIZE = 24  # candidate rates
FIT_ROUNDS = 10  # alternations between row scales and kernel


@dataclass(frozen=True)
class ToeplitzFit:
    """Fit of one or more matrices. r2 (..): explained share of the variance of W's entries (the causal ones, if
    causal). amplitude, rate (.., R): a and lambda."""

    r2: Tensor
    amplitude: Tensor
    rate: Tensor

    def kernel(self, distance: Tensor) -> Tensor:
        """Return K at the distances (in blocks), (.., *distance.shape)."""
        powers = torch.exp(-distance[..., None] * self.rate.view(*self.rate.shape[:-1], *[1] * distance.dim(), -1))
        return (powers * self.amplitude.view(*self.rate.shape[:-1], *[1] * distance.dim(), -1)).sum(-1)


@torch.no_grad()
def fit_toeplitz(w_MM: Tensor, components: int, causal: bool = True, rate: Tensor | None = None) -> ToeplitzFit:
    """Return the fit of matrices w_MM (.., M, M).

    Alternates between the row scales and the kernel, which is a nonnegative least-squares fit: first over a grid of
    rates, then over `components` rates log-spaced over those with weight. rate (.., R): fixed rates instead of the
    grid.
    """
    lead, size = w_MM.shape[:-2], w_MM.shape[-1]
    w_XMM = w_MM.reshape(-1, size, size).double()
    at_M = torch.arange(size, device=w_MM.device)
    apart_MM = (at_M[:, None] - at_M).abs()
    seen_MM = apart_MM >= 0 if not causal else at_M[:, None] >= at_M
    # From nearly constant over all blocks to e^-10 at the next block; rate 0 is a constant.
    slow = -1.5 - math.log10(size)
    grid_N = torch.cat([torch.zeros(1), torch.logspace(slow, 1, RATE_GRID_SIZE - 1)]).to(w_XMM)
    rate_XN = grid_N.expand(len(w_XMM), -1) if rate is None else rate.reshape(len(w_XMM), -1).double()
    scale_XM, a_XN = torch.ones_like(w_XMM[:, 0]), torch.zeros_like(rate_XN)
    for round_ in range(FIT_ROUNDS):
        basis_XNM = torch.exp(-rate_XN[..., None] * at_M)
        if round_ == FIT_ROUNDS // 2 and components < rate_XN.shape[1]:
            rate_XN = spread_rates(rate_XN, a_XN * basis_XNM.sum(-1), components)
            basis_XNM, a_XN = torch.exp(-rate_XN[..., None] * at_M), torch.zeros_like(rate_XN)
        a_XN = _fit_kernel(w_XMM, scale_XM, basis_XNM, apart_MM, seen_MM, a_XN)
        k_XMM = torch.where(seen_MM, (a_XN[:, None] @ basis_XNM)[:, 0][:, apart_MM], 0)
        scale_XM = (w_XMM * k_XMM).sum(-1) / k_XMM.square().sum(-1).clamp_min(1e-30)
    residual_X = (w_XMM - scale_XM[..., None] * k_XMM)[:, seen_MM].square().sum(-1)
    entries_XE = w_XMM[:, seen_MM]
    spread_X = (entries_XE - entries_XE.mean(-1, keepdim=True)).square().sum(-1)
    r2_X, a_XN = 1 - residual_X / spread_X.clamp_min(1e-30), a_XN * scale_XM.mean(-1, keepdim=True)
    return ToeplitzFit(r2_X.view(lead), a_XN.view(*lead, -1), rate_XN.reshape(*lead, -1))


def fit_heads(w_GJMM: Tensor, components: int, causal: bool = True) -> ToeplitzFit:
    """Return the fit of W per query head with rates shared by the heads of a key/value head. r2 (G, J); amplitude and
    rate (G, J, R)."""
    alone = fit_toeplitz(w_GJMM, RATE_GRID_SIZE, causal)
    mass_GJN = alone.amplitude / (1e-3 + alone.rate)
    mass_GN = (mass_GJN / mass_GJN.sum(-1, keepdim=True).clamp_min(1e-30)).amax(1)
    rate_GR = spread_rates(alone.rate[:, 0], mass_GN, components)
    return fit_toeplitz(w_GJMM, components, causal, rate_GR[:, None].expand(*w_GJMM.shape[:2], -1))


def spread_rates(rate_XN: Tensor, mass_XN: Tensor, components: int) -> Tensor:
    """Return R = `components` rates (X, R), log-spaced from the slowest to the fastest rate with weight.

    rate_XN, mass_XN: candidate rates and their weights. The first rate is 0 if a constant has weight.
    """
    weighs_XN = mass_XN > 1e-3 * mass_XN.sum(-1, keepdim=True)
    moving_XN = weighs_XN & (rate_XN > 0)
    some_X1 = moving_XN.any(-1, keepdim=True)
    low_X1 = torch.where(moving_XN, rate_XN, torch.inf).amin(-1, keepdim=True)
    high_X1 = torch.where(moving_XN, rate_XN, 0).amax(-1, keepdim=True)
    slowest_X1 = torch.where(rate_XN > 0, rate_XN, torch.inf).amin(-1, keepdim=True)
    low_X1, high_X1 = torch.where(some_X1, low_X1, slowest_X1), torch.where(some_X1, high_X1, slowest_X1)
    constant_X1 = (weighs_XN & (rate_XN == 0)).any(-1, keepdim=True)
    # A constant takes the first component; the others are placed at 0 .. 1 on the log scale.
    at_R = torch.arange(components, device=rate_XN.device)
    first_X1 = constant_X1.to(rate_XN) if components > 1 else torch.zeros_like(low_X1)
    place_XR = ((at_R - first_X1) / (components - 1 - first_X1).clamp_min(1)).clamp_min(0)
    rate_XR = low_X1 * (high_X1 / low_X1) ** place_XR
    return torch.where((at_R == 0) & constant_X1, 0.0, rate_XR)


def _fit_kernel(
    w_XMM: Tensor, scale_XM: Tensor, basis_XNM: Tensor, apart_MM: Tensor, seen_MM: Tensor, start_XN: Tensor
) -> Tensor:
    """Return a (X, N) of the nonnegative least-squares fit with fixed row scales. start_XN: initial value."""
    rows_XMM = scale_XM[..., None].expand_as(w_XMM)
    weight_XM, wanted_XM = torch.zeros_like(scale_XM), torch.zeros_like(scale_XM)
    weight_XM.index_add_(1, apart_MM[seen_MM], rows_XMM[:, seen_MM].square())
    wanted_XM.index_add_(1, apart_MM[seen_MM], (rows_XMM * w_XMM)[:, seen_MM])
    gram_XNN = (basis_XNM * weight_XM[:, None]) @ basis_XNM.mT
    return nonnegative_lstsq(gram_XNN, (basis_XNM @ wanted_XM[..., None])[..., 0], start_XN)


def nonnegative_lstsq(gram_HNN: Tensor, wanted_HN: Tensor, start_HN: Tensor | None = None, rounds: int = 40) -> Tensor:
    """Return argmin over x >= 0 of x^T G x / 2 - w^T x for each h, (H, N), by coordinate descent.

    G gets a ridge of 1e-6 times its diagonal, because neighbouring exponentials are nearly collinear.
    """
    gram_HNN = gram_HNN + 1e-6 * torch.diag_embed(gram_HNN.diagonal(dim1=-2, dim2=-1) + 1e-12)
    x_HN = torch.zeros_like(wanted_HN) if start_HN is None else start_HN.clone()
    # Views of column n of x, G and w, taken once: a step takes as long as the few operations on them.
    steps = [(x_HN[:, n], gram_HNN[:, n], gram_HNN[:, n, n], wanted_HN[:, n]) for n in range(x_HN.shape[1])]
    for _ in range(rounds):
        for x_H, gram_HN, pivot_H, wanted_H in steps:
            rest_H = wanted_H - (gram_HN * x_HN).sum(-1) + pivot_H * x_H
            x_H.copy_((rest_H / pivot_H).clamp_min(0))
    return x_HN
