"""Benchmark of linear layers: torch's dense product against structured linears, N tokens, shapes of real models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.core.dispatch import DispatchedOp, KernelChoice, load_kernels
from surgery.core.errors import SurgeryError
from surgery.eval.speed.roofline import linear_work
from surgery.eval.speed.timer import (
    BenchmarkCase,
    Call,
    TimedImplementation,
    backward,
    forward,
    graph_call,
    graph_title,
)
from surgery.modeling.quantize import make_storage, quantize_module
from surgery.structures import STRUCTURES
from surgery.structures.btt import BTT, btt_linear
from surgery.structures.low_rank import FEW_TOKENS, LowRank
from surgery.structures.quantized import QuantizedLinear

SHAPES = {
    "full": ((1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192), (4096, 11008)),
    "main": ((4096, 4096), (4096, 11008)),
    "compressed": ((4096, 4096), (8192, 8192), (4096, 11008)),
    "small": ((64, 64), (64, 96)),
}
TOKENS = {"full": (1, 16, 512, 8192), "main": (1, 16, 512, 8192), "compressed": (1, 8192), "small": (1, 8)}
MODEL_TOKENS = {"cuda": (1, 512, 8192), "cpu": (1, 128)}  # of the shapes of a model
SHARES = {"half": 2, "quarter": 4}  # of the dense parameters, in the sizes "compressed": 1 / share
RANK_MULTIPLE = 64
RANKS = (1, 4, 16)  # 16 stores half of the dense parameters at 4,096 x 4,096
ROTATED_BYTES, MAX_COPIES = (
    2**27,
    128,
)  # runs of one token take turns with copies of the weights, which together exceed the L2 cache; most copies


def checkpoint_shapes(name: str) -> tuple[tuple[int, int], ...]:
    """Return the shapes (in, out) of a checkpoint's linears, from its config alone.

    Routed experts, of which few compute a token, are left out. Raises SurgeryError if nothing else is there.
    """
    from surgery.architectures.linears import find_linears
    from surgery.checkpoint.outline import describe_checkpoint
    from surgery.checkpoint.source import open_checkpoint

    layout = find_linears(describe_checkpoint(open_checkpoint(name, weights=False), False).model)
    shapes = sorted({(linear.in_, linear.out) for linear in layout.linears if not linear.experts})
    if not shapes:
        raise SurgeryError(f"bench: {name} has no linears outside routed experts. Leave model out, and give sizes")
    return tuple(shapes)


def benchmark_cases(
    sizes: str, device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, int]] | None = None
) -> Iterator[BenchmarkCase]:
    """Yield the cases of all shapes and numbers of tokens. shapes: (in, out) of a model's linears, instead of
    SHAPES.
    """
    counts = TOKENS[sizes]
    if shapes is not None:
        sizes, counts = "compressed", MODEL_TOKENS["cuda" if device.type == "cuda" else "cpu"]
    for in_, out in shapes or SHAPES[sizes]:
        make = compressed_linears if sizes == "compressed" else linears
        entries = list(make(in_, out, device, dtype))
        for tokens in counts:
            where = {"inputs": in_, "outputs": out, "tokens": tokens}
            title = f"{in_:,} -> {out:,}"
            if tokens == 1:
                yield _make_graph_case(f"linear {title}, forward, {graph_title(device)}", where, entries, device, dtype)
                name = f"linear {title}, CPU time of an eager call"
                yield _make_host_case(name, where, entries, "no grad", device, dtype)
                yield _make_host_case(f"{name} with gradients", where, entries, "grad", device, dtype)
            for back in (False, True) if shapes is None and (tokens >= 512 or sizes == "small") else (False,):
                name = f"linear {title}, forward{' + backward' if back else ''}"
                yield _make_case(name, where, entries, back, device, dtype)


class LinearEntry(NamedTuple):
    """A linear under one kernel choice. params: stored parameters, each used once per token."""

    name: str
    choice: KernelChoice
    module: nn.Module
    params: int
    op: str | None = None
    options: dict[str, int] = {}  # noqa: RUF012
    way: str | None = None


def linears(in_: int, out: int, device: torch.device, dtype: torch.dtype) -> Iterator[LinearEntry]:
    """Yield the linears of one shape."""
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    yield LinearEntry("dense", "measured", nn.Linear(in_, out, bias=False, **factory), in_ * out, "original")
    choices: tuple[KernelChoice, ...] = ("kernel", "reference", "measured")
    for rank in RANKS:
        btt = random_structured(BTT(rank=rank), in_, out, factory)
        name, options = f"BTT s={rank}{' (Monarch)' if rank == 1 else ''}", grid_options(btt)
        for choice in choices:
            shown, op = ("as chosen", None) if choice == "measured" else (choice, "btt")
            yield LinearEntry(f"{name}, {shown}", choice, btt, btt.macs(), op, options)
        yield LinearEntry(
            f"{name}, multiplied out", "measured", DenseFromCores(btt), btt.macs(), "btt", options, "dense"
        )
    for blocks in (4, 16):
        half = random_structured(BTT(blocks=(blocks, blocks)), in_, out, factory)
        ways: tuple[KernelChoice, ...] = ("kernel", "products", "reference")
        for choice in ways:
            yield LinearEntry(
                f"BTT {blocks} x {blocks}, half, {choice}", choice, half, half.macs(), "btt", grid_options(half)
            )
    low = random_structured(LowRank(), in_, out, factory)
    yield from low_rank_entries("low rank, half", low)


def compressed_linears(in_: int, out: int, device: torch.device, dtype: torch.dtype) -> Iterator[LinearEntry]:
    """Yield dense, and at half and a quarter of its parameters low rank and BTT 4 x 4: the kernel, the library's two
    products, the reference, and each in FP8. Ranks are those of the share, and rounded down to multiples of
    RANK_MULTIPLE where these differ.
    """
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    dense = nn.Linear(in_, out, bias=False, **factory)
    yield LinearEntry("dense", "measured", dense, in_ * out, "original")
    yield fp8_entry("dense", dense, in_ * out)
    for name, divisor in SHARES.items():
        for config in (LowRank(), BTT(blocks=(4, 4))):
            try:
                exact = STRUCTURES[config].fit(config, out, in_, in_ * out // divisor)
            except SurgeryError:  # too small a matrix for this structure
                continue
            rounded = replace(exact, rank=max(1, exact.rank // RANK_MULTIPLE) * RANK_MULTIPLE)
            for shown in (exact, rounded) if 0 < rounded.rank < exact.rank else (exact,):
                linear = STRUCTURES[shown](in_, out, shown, bias=False, **factory)
                suffix = f"{name}, rank {shown.rank:,}"
                if isinstance(shown, LowRank):
                    yield from low_rank_entries(f"low rank, {suffix}", linear)
                    yield fp8_entry(f"low rank, {suffix}", linear, linear.macs())
                    continue
                choices: tuple[KernelChoice, ...] = ("kernel", "products", "reference")
                for choice in choices:
                    title = f"BTT 4 x 4, {suffix}, {choice}"
                    yield LinearEntry(title, choice, linear, linear.macs(), "btt", grid_options(linear))
                yield fp8_entry(f"BTT 4 x 4, {suffix}", linear, linear.macs())


def low_rank_entries(name: str, linear: Any) -> Iterator[LinearEntry]:
    """Yield a low-rank linear by PyTorch's products and by the kernel."""
    options = {"rank": linear.config.rank}
    yield LinearEntry(name, "reference", linear, linear.macs(), "low_rank", options)
    yield LinearEntry(f"{name}, kernel", "kernel", linear, linear.macs(), "low_rank", options)


def fp8_entry(name: str, linear: Any, macs: int) -> LinearEntry:
    """Return the linear with its weights in FP8, as chosen. It has no gradients."""
    stored = quantize_module(copy.deepcopy(linear), make_storage(8, format="fp8"))
    return LinearEntry(f"{name}, FP8", "measured", stored, macs)


def has_gradients(entry: LinearEntry) -> bool:
    """Return whether an entry is measured with its backward."""
    return (entry.op, entry.choice) != ("low_rank", "kernel") and not isinstance(entry.module, QuantizedLinear)


def without_refused(entries: list[LinearEntry], tokens: int) -> list[LinearEntry]:
    """Return the entries without those of kernels that refuse so many tokens and would run the reference."""
    return [e for e in entries if (e.op, e.choice) != ("low_rank", "kernel") or tokens <= FEW_TOKENS]


def grid_options(btt: Any) -> dict[str, int]:
    """Return a BTT's options as in kernels/tuning.json."""
    return {"rank": btt.config.rank, "rows": btt.config.blocks[0], "columns": btt.config.blocks[1]}


def random_structured(config: Any, in_: int, out: int, factory: dict[str, Any]) -> Any:
    """Return a random structured linear; without a rank in the config, with half of the dense parameters."""
    kind = STRUCTURES[config]
    return kind(in_, out, kind.fit(config, out, in_, in_ * out // 2), bias=False, **factory)


class DenseFromCores(nn.Module):
    """Multiply by the dense matrix, rebuilt from the cores in each call, by a kernel if there is one."""

    def __init__(self, linear: Any):
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T, with W rebuilt from the cores."""
        cores = x, self.linear.right, self.linear.weight, None, self.linear.out_features
        kernel = next((k for k in dense_kernels(x.is_cuda) if k.accepts(*cores)), None)
        return F.linear(x, self.linear.dense()) if kernel is None else kernel.run(*cores)


def dense_kernels(gpu: bool) -> list[Any]:
    """Return the kernels of the op that rebuild the dense matrix."""
    if gpu:
        load_kernels()
    return [k for k in cast(DispatchedOp, btt_linear).kernels if k.implementation == "dense"] if gpu else []


def _make_case(
    name: str, where: dict[str, int], entries: list[LinearEntry], back: bool, device: torch.device, dtype: torch.dtype
) -> BenchmarkCase:
    x_NI = torch.randn(where["tokens"], where["inputs"], device=device, dtype=dtype)

    def run(module: nn.Module) -> Call:
        call = lambda: module(x_NI)  # noqa: E731
        return backward(call, [x_NI, *module.parameters()]) if back else forward(call)

    timed = [entry for entry in entries if not back or has_gradients(entry)]
    implementations = [
        _make_implementation(entry, lambda m=entry.module: run(m), where, back, dtype)  # type: ignore[misc]
        for entry in without_refused(timed, where["tokens"])
    ]
    return BenchmarkCase(name, where["tokens"], where, implementations)


def _make_graph_case(
    name: str, where: dict[str, int], entries: list[LinearEntry], device: torch.device, dtype: torch.dtype
) -> BenchmarkCase:
    """Return the case of one token.

    Copies of the weights take turns, so that they are read from memory as in a model.
    """
    x_1I = torch.randn(1, where["inputs"], device=device, dtype=dtype)

    def run(module: nn.Module, copies: int) -> Call:
        turns = [module, *(copy.deepcopy(module) for _ in range(copies - 1))]
        return graph_call([forward(lambda m=m: m(x_1I)) for m in turns], device)

    implementations = []
    for entry in entries:
        size = sum(t.numel() * t.element_size() for t in entry.module.state_dict().values())
        copies = max(1, min(MAX_COPIES, ROTATED_BYTES // size)) if device.type == "cuda" else 1
        make = lambda m=entry.module, n=copies: run(m, n)  # noqa: E731
        implementations.append(_make_implementation(entry, make, where, False, dtype, copies))
    return BenchmarkCase(name, 1, where, implementations)


def _make_host_case(
    name: str,
    where: dict[str, int],
    entries: list[LinearEntry],
    host: Literal["no grad", "grad"],
    device: torch.device,
    dtype: torch.dtype,
) -> BenchmarkCase:
    """Return the case of the CPU's time for a call with one token; of dense, F.linear without a module around it."""
    x_1I = torch.randn(1, where["inputs"], device=device, dtype=dtype)

    def run(module: nn.Module) -> Call:
        if isinstance(module, nn.Linear):
            return lambda: F.linear(x_1I, module.weight)
        return lambda: module(x_1I)

    implementations = [
        TimedImplementation(entry.name, lambda m=entry.module: run(m), entry.choice) for entry in entries
    ]
    return BenchmarkCase(name, 1, where, implementations, host=host)


def _make_implementation(
    entry: LinearEntry, make: Callable[[], Call], where: dict[str, int], back: bool, dtype: torch.dtype, times: int = 1
) -> TimedImplementation:
    work = linear_work(where["tokens"], where["inputs"], where["outputs"], entry.params, back, dtype.itemsize)
    return TimedImplementation(entry.name, make, entry.choice, work, times, entry.op, entry.options, entry.way)
