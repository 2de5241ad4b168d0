"""Linears: torch's dense product against structured ones, tokens N and shapes of real models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.core.dispatch import Choice, Op, found
from surgery.eval.speed.roofline import linear_work
from surgery.eval.speed.timer import Call, Heat, Rival, backward, forward, graphed
from surgery.structures import STRUCTURES
from surgery.structures.btt import BTT, btt_linear
from surgery.structures.low_rank import LowRank

SHAPES = {
    "full": ((1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (4096, 11008)),
    "main": ((4096, 4096), (4096, 11008)),
    "small": ((64, 64), (64, 96)),
}
TOKENS = {"full": (1, 16, 512, 8192), "main": (1, 16, 512, 8192), "small": (1, 8)}
RANKS = (1, 4, 16)  # 16 stores half of the dense numbers at 4,096 x 4,096
ROTATED, COPIES = (
    2**27,
    128,
)  # bytes of weights that runs of one token go through, past the L2 cache; and how many at most


def heats(sizes: str, device: torch.device, dtype: torch.dtype) -> Iterator[Heat]:
    for in_, out in SHAPES[sizes]:
        entries = list(linears(in_, out, device, dtype))
        for tokens in TOKENS[sizes]:
            where = {"inputs": in_, "outputs": out, "tokens": tokens}
            title = f"{in_:,} -> {out:,}"
            if tokens == 1:
                yield _graph_heat(f"linear {title}, forward, CUDA graph", where, entries, device, dtype)
            for back in (False, True) if tokens >= 512 or sizes == "small" else (False,):
                name = f"linear {title}, forward{' + backward' if back else ''}"
                yield _heat(name, where, entries, back, device, dtype)


class Entry(NamedTuple):
    """A linear under one choice; numbers: stored, each used once a token."""

    name: str
    choice: Choice
    module: nn.Module
    numbers: int
    op: str | None = None
    options: dict[str, int] = {}  # noqa: RUF012
    way: str | None = None


def linears(in_: int, out: int, device: torch.device, dtype: torch.dtype) -> Iterator[Entry]:
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    yield Entry("dense", "measured", nn.Linear(in_, out, bias=False, **factory), in_ * out, "original")
    choices: tuple[Choice, ...] = ("kernel", "reference", "measured")
    for rank in RANKS:
        btt = structured(BTT(rank=rank), in_, out, factory)
        name, options = f"BTT s={rank}{' (Monarch)' if rank == 1 else ''}", grid(btt)
        for choice in choices:
            shown, op = ("as chosen", None) if choice == "measured" else (choice, "btt")
            yield Entry(f"{name}, {shown}", choice, btt, btt.macs(), op, options)
        yield Entry(f"{name}, multiplied out", "measured", MultipliedOut(btt), btt.macs(), "btt", options, "dense")
    for blocks in (4, 16):
        half = structured(BTT(blocks=(blocks, blocks)), in_, out, factory)
        for choice in choices[:2]:
            yield Entry(f"BTT {blocks} x {blocks}, half, {choice}", choice, half, half.macs(), "btt", grid(half))
    low = structured(LowRank(), in_, out, factory)
    yield Entry("low rank, half", "reference", low, low.macs(), "low_rank", {"rank": low.config.rank})


def grid(btt: Any) -> dict[str, int]:
    return {"rank": btt.config.rank, "rows": btt.config.blocks[0], "columns": btt.config.blocks[1]}


def structured(config: Any, in_: int, out: int, factory: dict[str, Any]) -> Any:
    """At random; without a rank of its own half of the dense numbers."""
    kind = STRUCTURES[config]
    return kind(in_, out, kind.fit(config, out, in_, in_ * out // 2), bias=False, **factory)


class MultipliedOut(nn.Module):
    """The dense matrix, made anew from the cores at each call: by the kernel that does so, else in plain torch."""

    def __init__(self, linear: Any):
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        cores = x, self.linear.right, self.linear.weight, None, self.linear.out_features
        kernel = next((k for k in of_dense(x.is_cuda) if k.accepts(*cores)), None)
        return F.linear(x, self.linear.dense()) if kernel is None else kernel.run(*cores)


def of_dense(gpu: bool) -> list[Any]:
    """Kernels of the op that multiply out."""
    if gpu:
        found()
    return [k for k in cast(Op, btt_linear).kernels if k.way == "dense"] if gpu else []


def _heat(
    name: str, where: dict[str, int], entries: list[Entry], back: bool, device: torch.device, dtype: torch.dtype
) -> Heat:
    x_NI = torch.randn(where["tokens"], where["inputs"], device=device, dtype=dtype)

    def run(module: nn.Module) -> Call:
        call = lambda: module(x_NI)  # noqa: E731
        return backward(call, [x_NI, *module.parameters()]) if back else forward(call)

    rivals = [_rival(entry, lambda m=entry.module: run(m), where, back, dtype) for entry in entries]  # type: ignore[misc]
    return Heat(name, where["tokens"], where, rivals)


def _graph_heat(
    name: str, where: dict[str, int], entries: list[Entry], device: torch.device, dtype: torch.dtype
) -> Heat:
    """One token. Weights take turns so that they come from memory, as in a model."""
    x_1I = torch.randn(1, where["inputs"], device=device, dtype=dtype)

    def run(module: nn.Module, copies: int) -> Call:
        turns = [module, *(copy.deepcopy(module) for _ in range(copies - 1))]
        return graphed([forward(lambda m=m: m(x_1I)) for m in turns], device)  # type: ignore[misc]

    rivals = []
    for entry in entries:
        size = sum(p.numel() * p.element_size() for p in entry.module.parameters())
        copies = max(1, min(COPIES, ROTATED // size)) if device.type == "cuda" else 1
        make = lambda m=entry.module, n=copies: run(m, n)  # noqa: E731
        rivals.append(_rival(entry, make, where, False, dtype, copies))
    return Heat(name, 1, where, rivals)


def _rival(
    entry: Entry, make: Callable[[], Call], where: dict[str, int], back: bool, dtype: torch.dtype, times: int = 1
) -> Rival:
    work = linear_work(where["tokens"], where["inputs"], where["outputs"], entry.numbers, back, dtype.itemsize)
    return Rival(entry.name, make, entry.choice, work, times, entry.op, entry.options, entry.way)
