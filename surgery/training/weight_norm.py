"""Weight normalisation of structured cores, and of factors of bilinear scores (Kuang et al. 2025, appendix F.1):

    core = gamma min(1, size / rms(M)) M                    gamma learnable, one at first

Keeps a core's entries from outgrowing the size they began with, which is what makes BTT diverge at large rates (Qiu et
al. 2024, section 5.1, where size is that of the muP initialisation; here it is the start's own root mean square, since
calibrated cores begin where they do, and muP's for a core that begins at zero). Folded into the cores when the stage ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from surgery.mixers import Mixer
from surgery.structures import StructuredLinear


class CoreNorm(nn.Module):
    """size is a parameter that never trains, so that it is kept in checkpoints."""

    def __init__(self, core: Tensor, default_size: float):
        """default_size: size of a core of zeros."""
        super().__init__()
        own = rms(core.detach())
        self.gamma = nn.Parameter(torch.ones(1, dtype=core.dtype, device=core.device))  # numbers alone cannot be spread
        self.size = nn.Parameter(
            torch.where(core.detach().any(), own, default_size).to(own).reshape(1), requires_grad=False
        )

    def forward(self, core: Tensor) -> Tensor:
        return self.gamma * (self.size / rms(core)).clamp(max=1.0) * core

    def right_inverse(self, core: Tensor) -> Tensor:
        return core


def rms(core: Tensor) -> Tensor:
    """Over 1e-12, so that zeros have a gradient."""
    return core.square().mean().clamp_min(1e-24).sqrt()


def structured_cores(model: nn.Module) -> Iterable[tuple[str, Any, str]]:
    """(path, module, core) of every structured linear, and of every mixer that says its cores' fans."""
    for path, module in list(model.named_modules()):
        if isinstance(module, (StructuredLinear, Mixer)):
            yield from ((path, module, name) for name in module.mup())


def add_core_norms(model: nn.Module, names: set[str]) -> set[str]:
    """Those of the cores that are among the names, reparametrised; the names as they are now."""
    now = set(names)
    for path, module, core in structured_cores(model):
        name = f"{path}.{core}"
        if name not in names:
            continue
        parametrize.register_parametrization(module, core, CoreNorm(getattr(module, core), module.mup()[core].std))
        now.remove(name)
        now |= {f"{path}.parametrizations.{core}.original", f"{path}.parametrizations.{core}.0.gamma"}
    return now


def fold_core_norms(model: nn.Module) -> None:
    """Ordinary cores again, with the numbers they have now."""
    for _, module, core in structured_cores(model):
        if parametrize.is_parametrized(module, core):
            parametrize.remove_parametrizations(module, core, leave_parametrized=True)
