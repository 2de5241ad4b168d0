"""Linears: torch's dense product against structured ones, tokens N and shapes of real models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.bench.floors import linear_work
from surgery.bench.race import Call, Heat, Rival, backward, forward, graphed
from surgery.structures import STRUCTURES
from surgery.structures.btt import BTT
from surgery.structures.low_rank import LowRank

SHAPES = {
    "full": ((1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (4096, 11008)),
    "main": ((4096, 4096), (4096, 11008)),
    "small": ((64, 64), (64, 96)),
}
TOKENS = {"full": (1, 16, 512, 8192), "main": (1, 16, 512, 8192), "small": (1, 8)}
ROTATED, COPIES = (
    2**27,
    128,
)  # bytes of weights that runs of one token go through, past the L2 cache; and how many at most


def heats(sizes: str, device: torch.device, dtype: torch.dtype) -> Iterator[Heat]:
    for in_, out in SHAPES[sizes]:
        entries = list(linears(in_, out, device, dtype))
        for tokens in TOKENS[sizes]:
            where = {"in": in_, "out": out, "tokens": tokens}
            title = f"{in_:,} -> {out:,}"
            if tokens == 1:
                yield _graph_heat(f"linear {title}, forward, CUDA graph", where, entries, device, dtype)
                continue
            for back in (False, True) if tokens >= 512 or sizes == "small" else (False,):
                name = f"linear {title}, forward{' + backward' if back else ''}"
                yield _heat(name, where, entries, back, device, dtype)


def linears(in_: int, out: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Any, nn.Module, int]]:
    """(name, choice, module, numbers used a token)."""
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    yield "dense", "measured", nn.Linear(in_, out, bias=False, **factory), in_ * out
    for rank in (1, 4):
        btt = structured(BTT(rank=rank), in_, out, factory)
        name = f"BTT s={rank}{' (Monarch)' if rank == 1 else ''}"
        for choice in ("kernel", "reference", "measured"):
            shown = {"measured": "as chosen"}.get(choice, choice)
            yield f"{name}, {shown}", choice, btt, btt.macs()
        yield f"{name}, multiplied out", "measured", MultipliedOut(btt), btt.macs()
    half = structured(BTT(blocks=(4, 4)), in_, out, factory)
    yield "BTT 4 x 4, half, as chosen", "measured", half, half.macs()
    low = structured(LowRank(), in_, out, factory)
    yield "low rank, half", "measured", low, low.macs()


def structured(config: Any, in_: int, out: int, factory: dict[str, Any]) -> Any:
    """At random; without a rank of its own half of the dense numbers."""
    kind = STRUCTURES[config]
    return kind(in_, out, kind.fit(config, out, in_, in_ * out // 2), bias=False, **factory)


class MultipliedOut(nn.Module):
    """The dense matrix, made anew from the cores at each call."""

    def __init__(self, linear: Any):
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.dense())


def _heat(name: str, where: dict[str, int], entries: Any, back: bool, device: torch.device, dtype: torch.dtype) -> Heat:
    x_NI = torch.randn(where["tokens"], where["in"], device=device, dtype=dtype)

    def run(module: nn.Module) -> Call:
        call = lambda: module(x_NI)  # noqa: E731
        return backward(call, [x_NI, *module.parameters()]) if back else forward(call)

    rivals = [
        Rival(shown, lambda m=module: run(m), choice, _work(where, macs, back, dtype))  # type: ignore[misc]
        for shown, choice, module, macs in entries
    ]
    return Heat(name, where["tokens"], where, rivals)


def _graph_heat(name: str, where: dict[str, int], entries: Any, device: torch.device, dtype: torch.dtype) -> Heat:
    """One token. Weights take turns so that they come from memory, as in a model."""
    x_1I = torch.randn(1, where["in"], device=device, dtype=dtype)

    def run(module: nn.Module, copies: int) -> Call:
        turns = [module, *(twin(module) for _ in range(copies - 1))]
        return forward(graphed([forward(lambda m=m: m(x_1I)) for m in turns], device))  # type: ignore[misc]

    rivals = []
    for shown, choice, module, macs in entries:
        size = sum(p.numel() * p.element_size() for p in module.parameters())
        copies = max(1, min(COPIES, ROTATED // size)) if device.type == "cuda" else 1
        make = lambda m=module, n=copies: run(m, n)  # noqa: E731
        rivals.append(Rival(shown, make, choice, _work(where, macs, False, dtype), copies))
    return Heat(name, 1, where, rivals)


def twin(module: nn.Module) -> nn.Module:
    """The same with parameters of its own."""
    import copy

    return copy.deepcopy(module)


def _work(where: dict[str, int], macs: int, back: bool, dtype: torch.dtype) -> Any:
    return linear_work(where["tokens"], where["in"], where["out"], macs, back, dtype.itemsize)
