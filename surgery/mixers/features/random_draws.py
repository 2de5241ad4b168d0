"""Random draws of feature maps: from a seed, always on the CPU, so that they are the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.structures import linalg


def draw_gaussian(seed: int, *shape: int) -> Tensor:
    """Standard normal numbers of that seed, on the default device (meta included)."""
    return _draw(seed, shape).to(torch.get_default_device())


def draw_orthogonal(seed: int, groups: int, features: int, dim: int) -> Tensor:
    """w_GFK with rows orthogonal within each run of `dim` and lengths as of a Gaussian's: marginally N(0, I), and
    with less variance (Choromanski et al. 2021, "Rethinking Attention with Performers", section 2.4)."""
    runs = -(-features // dim)
    square_GRKK, upper = linalg.qr(_draw(seed, (groups, runs, dim, dim)))
    # A Q uniform over all rotations: the sign that QR leaves open is set by R's diagonal.
    square_GRKK = square_GRKK * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    length_GF = _draw(seed + 1, (groups, features, dim)).norm(dim=-1)
    w_GFK = square_GRKK.flatten(1, 2)[:, :features] * length_GF.unsqueeze(-1)
    return w_GFK.to(torch.get_default_device())


def _draw(seed: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def project_groups(x_BHTK: Tensor, w_GFK: Tensor) -> Tensor:
    """w x with the w of each head's key/value group: (B, H, T, F); heads or groups."""
    heads, groups = x_BHTK.shape[1], w_GFK.shape[0]
    x_BGJTK = x_BHTK.unflatten(1, (groups, heads // groups))
    return torch.einsum("bgjtk,gfk->bgjtf", x_BGJTK, w_GFK.to(x_BHTK.dtype)).flatten(1, 2)
