"""Random projections of feature maps, drawn on the CPU from a seed, so that they are the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.structures import linalg


def draw_gaussian(seed: int, *shape: int) -> Tensor:
    """Return standard normal numbers (*shape) on the default device (which may be meta)."""
    return _draw(seed, shape).to(default_device())


def draw_orthogonal(seed: int, groups: int, features: int, dim: int) -> Tensor:
    """Return w_GFK with F = `features` rows that are orthogonal within each group of K = `dim` rows.

    Each row is N(0, I), and estimates have a lower variance than with independent rows (Choromanski et al. 2021,
    "Rethinking Attention with Performers", section 2.4).
    """
    runs = -(-features // dim)
    square_GRKK, upper = linalg.qr(_draw(seed, (groups, runs, dim, dim)))
    # QR determines Q up to signs; with R's diagonal positive, Q is uniform over orthogonal matrices.
    square_GRKK = square_GRKK * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    length_GF = _draw(seed + 1, (groups, features, dim)).norm(dim=-1)
    w_GFK: Tensor = square_GRKK.flatten(1, 2)[:, :features] * length_GF.unsqueeze(-1)
    return w_GFK.to(default_device())


def default_device() -> torch.device:
    """Return the device on which torch makes tensors.

    `torch.get_default_device` imports a module that `surgery plan` does without.
    """
    return torch.zeros(0).device


def _draw(seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def project_groups(x_BHTK: Tensor, w_GFK: Tensor) -> Tensor:
    """Return w x (B, H, T, F) with the w of each head's key/value head. Axis H of x may be query or key/value heads."""
    heads, groups = x_BHTK.shape[1], w_GFK.shape[0]
    x_BGJTK = x_BHTK.unflatten(1, (groups, heads // groups))
    return torch.einsum("bgjtk,gfk->bgjtf", x_BGJTK, w_GFK.to(x_BHTK.dtype)).flatten(1, 2)
