"""Matrices in and out of a module: parts of fused linears, Conv1D's transposition, and the stand-ins."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from surgery.plan import Cut, Part
from surgery.shards import read_tensor
from surgery.skeleton import Skeleton
from surgery.structures import STRUCTURES, StructureConfig, StructuredLinear


def part_rows(part: Part) -> Tensor:
    """Which output rows of the fused linear compute this part, in the part's own order."""
    if not part.heads:
        start = sum(part.sizes[: part.place])
        return torch.arange(start, start + part.sizes[part.place])
    per_head = [size // part.heads for size in part.sizes]
    first = sum(per_head[: part.place])
    heads_H1 = torch.arange(part.heads)[:, None] * sum(per_head)
    return (heads_H1 + torch.arange(first, first + per_head[part.place])).flatten()


def rows_of(cut: Cut, tensor: Tensor) -> Tensor:
    """The cut's share of the fused linear's rows: of a matrix (O, I), a bias or diagonal (O,)."""
    return tensor if cut.part is None else tensor[part_rows(cut.part).to(tensor.device)]


def gram_of(cut: Cut, gram: Tensor) -> Tensor:
    """Its block of the outputs' Gram matrix (O, O), or of the diagonal (O,)."""
    block = rows_of(cut, gram)
    return block if gram.dim() == 1 or cut.part is None else block[:, part_rows(cut.part).to(gram.device)]


def matrix_of(skeleton: Skeleton, cut: Cut, device: torch.device) -> Tensor:
    """W (out, in) of a cut, float32, read from the file."""
    weight = read_tensor(skeleton.info(f"{cut.linear.path}.weight"), torch.float32)
    return rows_of(cut, weight.mT if cut.linear.transposed else weight).to(device).contiguous()


class SplitLinear(nn.Module):
    """A fused linear whose roles are computed by linears of their own; outputs in the fused order.

    `weight` is empty and 3-D: see StructuredLinear.
    """

    def __init__(self, in_features: int, parts: dict[str, nn.Module], sizes: tuple[int, ...], heads: int = 0):
        super().__init__()
        self.in_features, self.out_features = in_features, sum(sizes)
        self.sizes, self.heads = sizes, heads
        self.parts = nn.ModuleDict(parts)
        device = next(iter(parts.values())).weight.device
        self.register_buffer("weight", torch.zeros(1, 1, 1, device=device))

    def forward(self, x: Tensor) -> Tensor:
        ys = [part(x) for part in self.parts.values()]
        if self.heads:
            ys = [y.unflatten(-1, (self.heads, -1)) for y in ys]
        y = torch.cat(ys, dim=-1)
        return y.flatten(-2) if self.heads else y

    def _fused(self, rows: list[Tensor]) -> Tensor:
        if not self.heads:
            return torch.cat(rows)
        return torch.cat([r.unflatten(0, (self.heads, -1)) for r in rows], dim=1).flatten(0, 1)

    def dense(self) -> Tensor:
        """(out, in), rows in the fused order."""
        return self._fused([p.dense() if isinstance(p, StructuredLinear) else p.weight for p in self.parts.values()])  # type: ignore[misc]

    def fused_bias(self) -> Tensor | None:
        """(out,), or None."""
        biases = [part.bias for part in self.parts.values()]
        return None if any(b is None for b in biases) else self._fused(biases)  # type: ignore[arg-type]


def part_name(role: str) -> str:
    """attention.query -> query: the name of the part's module."""
    return role.rpartition(".")[2]


def empty_standin(
    spec: dict[str, Any], device: str | torch.device = "meta", dtype: torch.dtype | None = None
) -> nn.Module:
    """A module for an entry of the checkpoint's table: {"structure": .., "in_features": .., "out_features": ..,
    "bias": ..}, or {"structure": "split", "parts": {role: entry}, "heads": ..}."""
    from surgery.structures.base import config_from_dict

    spec = {k: v for k, v in spec.items() if k not in ("file_name", "transposed")}
    if spec.get("structure") == "split":
        parts = {name: empty_standin(entry, device, dtype) for name, entry in spec["parts"].items()}
        sizes = tuple(entry["out_features"] for entry in spec["parts"].values())
        return SplitLinear(next(iter(spec["parts"].values()))["in_features"], parts, sizes, spec.get("heads", 0))
    in_, out, bias = spec.pop("in_features"), spec.pop("out_features"), spec.pop("bias")
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    if spec["structure"] == "dense":
        return nn.Linear(in_, out, bias=bias, **factory)
    config = config_from_dict(spec)
    return STRUCTURES[config](in_, out, config, bias=bias, **factory)


def spec_of(cut: Cut, config: StructureConfig | None) -> dict[str, Any]:
    """The table's entry for one fitted cut (or part)."""
    structure = config.to_dict() if config is not None else {"structure": "dense"}
    return {**structure, "in_features": cut.in_, "out_features": cut.out, "bias": cut.linear.bias}
