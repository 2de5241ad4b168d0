"""What a training step does when GPU memory runs out: fewer rows a forward, then recomputed activations.

Stage key `memory`: `auto` tries to keep all activations and goes down this list where they do not fit; `keep` never
recomputes; `checkpoint` recomputes from the start. The batch stays the same: gradients of more forwards are added up.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

BUSY_TOKENS = 8192  # tokens a forward that keep a GPU busy: down to it, fewer rows cost less than recomputing


@dataclass(frozen=True)
class MemoryPlan:
    """How a step is divided. rows: rows a forward on one device. recompute: recompute the activations inside each layer
    in the backward pass (gradient checkpointing)."""

    rows: int
    recompute: bool = False

    def smaller(self, length: int, can_recompute: bool) -> MemoryPlan | None:
        """Return the next plan that needs less memory, or None. length: tokens of a row."""
        fewer = max((n for n in range(1, self.rows) if self.rows % n == 0), default=None)
        if fewer is not None and (self.recompute or not can_recompute or fewer * length >= BUSY_TOKENS):
            return replace(self, rows=fewer)
        return replace(self, recompute=True) if can_recompute and not self.recompute else None

    @classmethod
    def read(cls, stored: Any, rows: int, recompute: bool) -> MemoryPlan:
        """Return the plan that a checkpoint's notes hold, or that of the recipe if they hold none that divides its
        rows."""
        plan = cls(rows, recompute)
        if not isinstance(stored, dict) or type(stored.get("rows")) is not int or stored["rows"] < 1:
            return plan
        if rows % stored["rows"] or type(stored.get("recompute")) is not bool:
            return plan
        return cls(stored["rows"], recompute or stored["recompute"])

    @property
    def note(self) -> dict[str, Any]:
        """The plan as JSON data."""
        return asdict(self)

    def __str__(self) -> str:
        kept = "recomputed" if self.recompute else "kept"
        return f"{self.rows} row{'' if self.rows == 1 else 's'} a forward and {kept} activations"


@dataclass(frozen=True)
class RandomState:
    """State of the random number generators of the CPU and one device."""

    cpu: torch.Tensor
    device: torch.device
    gpu: torch.Tensor | None

    @classmethod
    def save(cls, device: torch.device) -> RandomState:
        """Return the current state."""
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), device, gpu)

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)


def split_rows(batch: dict[str, torch.Tensor], rows: int) -> list[dict[str, torch.Tensor]]:
    """Return the batch in parts of `rows` rows."""
    size = len(next(iter(batch.values())))
    if size <= rows:
        return [batch]
    return [{name: t[first : first + rows] for name, t in batch.items()} for first in range(0, size, rows)]


def release_memory(device: torch.device) -> None:
    """Give the allocator's unused memory back, also that of objects in reference cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
