"""Models that draft something else than their original now and then."""

from __future__ import annotations

from typing import Any

import torch

from surgery.speculation.drafter import twin_of


def noisy(model: Any, noise: float) -> Any:
    """Return a copy with other weights, which drafts something else now and then."""
    torch.manual_seed(1)
    twin = twin_of(model)
    with torch.no_grad():
        for module in twin.modules():
            for name, p in list(module._parameters.items()):
                if p is not None and p.dim() > 1:
                    module._parameters[name] = torch.nn.Parameter(p + noise * p.abs().mean() * torch.randn_like(p))
    return twin
