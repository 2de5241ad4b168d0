"""Weight normalisation of structured cores, and of factors of bilinear scores (Kuang et al. 2025, appendix F.1):

    core = gamma min(1, size / rms(M)) M                    gamma learnable, one at first

Keeps the root mean square of a core from growing above its initial value, which makes BTT diverge at large rates (Qiu
et al. 2024, section 5.1, where size is that of the muP initialization; here it is the initial root mean square, since
calibrated cores start elsewhere, and muP's for a core of zeros). Folded into the cores when the stage ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from surgery.mixers import Mixer
from surgery.structures import StructuredLinear
from surgery.training.sharded_tensors import any_sharded


class CoreNorm(nn.Module):
    """Parametrization of one core. size is a frozen parameter, so that checkpoints store it."""

    def __init__(self, core: Tensor, default_size: float):
        """default_size: size of a core of zeros."""
        super().__init__()
        size = rms(core.detach())
        self.gamma = nn.Parameter(torch.ones(1, dtype=core.dtype, device=core.device))  # FSDP cannot shard scalars
        self.size = nn.Parameter(
            torch.where(core.detach().any(), size, default_size).to(size).reshape(1), requires_grad=False
        )

    def forward(self, core: Tensor) -> Tensor:
        """Return the normalized core."""
        return self.gamma * (self.size / rms(core)).clamp(max=1.0) * core

    def right_inverse(self, core: Tensor) -> Tensor:
        """Return the unnormalized core for an assigned one (required by torch.nn.utils.parametrize)."""
        return core


def rms(core: Tensor) -> Tensor:
    """Return the root mean square, at least 1e-12 so that a core of zeros has a finite gradient."""
    return core.square().mean().clamp_min(1e-24).sqrt()


def structured_cores(model: nn.Module) -> Iterable[tuple[str, Any, str]]:
    """Yield (path, module, name of the core) for all structured linears and mixers that give muP fans for their
    cores.
    """
    for path, module in list(model.named_modules()):
        if isinstance(module, (StructuredLinear, Mixer)):
            yield from ((path, module, name) for name in module.mup())


def add_core_norms(model: nn.Module, names: set[str]) -> set[str]:
    """Reparametrize the cores among `names`; return the names of trained parameters afterwards."""
    now = set(names)
    for path, module, core in structured_cores(model):
        name = f"{path}.{core}"
        if name not in names:
            continue
        parametrize.register_parametrization(module, core, CoreNorm(getattr(module, core), module.mup()[core].std))
        now.remove(name)
        now |= {f"{path}.parametrizations.{core}.original", f"{path}.parametrizations.{core}.0.gamma"}
    return now


@torch.no_grad()
def fold_core_norms(model: nn.Module) -> None:
    """Replace parametrized cores by plain parameters with the normalized values.

    FSDP2 gathers a parameter into the module that held it when it was sharded. There the parametrization stays, with
    gamma one and size infinite, so that it returns the folded core unchanged.
    """
    for _, module, core in structured_cores(model):
        if not parametrize.is_parametrized(module, core):
            continue
        original, norm = module.parametrizations[core].original, module.parametrizations[core][0]
        if any_sharded([original]):
            original.copy_(getattr(module, core))
            norm.gamma.fill_(1)
            norm.size.fill_(torch.inf)
        else:
            parametrize.remove_parametrizations(module, core, leave_parametrized=True)


def folded_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name after `fold_core_norms`, every core under its name without a parametrization."""
    parameters: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        path, inside, core = name.partition("parametrizations.")
        if not inside:
            parameters[name] = parameter
        elif core.endswith(".original"):
            parameters[path + core.removesuffix(".original")] = parameter
    return parameters
