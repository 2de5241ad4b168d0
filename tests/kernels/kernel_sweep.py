"""Every kernel at many lanes: forward, backward and step, each call against the same rows in small calls and the
reference.

    python tests/kernels/kernel_sweep.py                      # every case, about four minutes on one H200
    python tests/kernels/kernel_sweep.py --reduced            # smaller cases, for compute-sanitizer, which is 10 to 100 times slower
    python tests/kernels/kernel_sweep.py --only log_linear btt --seconds 60
    python tests/kernels/kernel_sweep.py --far                # a few rows, laid out beyond what 32 bits count
    python tests/kernels/kernel_sweep.py --tiny               # a few rows, under Triton's interpreter where there is no GPU

A lane is what one program or a few of them work on: a row of the batch, a group of heads, a chunk of tokens. Each case
is one batched call, outputs and gradients, with guard bands around all that it allocates (canaries.py). Then (a) its
rows one by one, or, where they are many, a few at a time, by the same kernel: no row may depend on its neighbours; (b)
some of its rows by the reference in float64. Differences are taken row by row, |ours - exact| / |exact|, and the
largest counts: one wrong row among thousands is seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import mmap
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (2, 1)]  # the checkout, tests/

import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read as kernels are imported

from helpers.canaries import guard_allocations  # noqa: E402

from surgery.core.dispatch import load_kernels, record_dispatch, use_kernels  # noqa: E402

Leaves = dict[str, torch.Tensor]
F32, BF16 = torch.float32, torch.bfloat16
# Of one row, where the kernels' own tests have 1e-5 and 1e-2 to 2e-2 of all rows together.
TOLERANCE = {F32: 5e-5, BF16: 4e-2, torch.float16: 2e-2}
# Gradients that are small differences of large sums: of a rate's in 257 tokens, 1/240 to 1/1,200 of the terms' sizes is
# left.
LOOSER = {"gates": 10, "bias": 10, "rate": 10}
GRIDS = ("full", "reduced", "tiny", "far")


@dataclass
class Case:
    """Inputs of one operation, on which the kernel is compared with the reference.

    Attributes:
        rows: tensors whose first axis is the rows; floating-point ones get gradients.
        shared: parameters.
        call: reference: (rows and shared) -> outputs, whose first axis is the rows; run in float64.
        kernel: the kernel's call, if it differs from `call`.
    """

    name: str
    dtype: torch.dtype
    lanes: int
    rows: Leaves
    call: Callable[[Leaves], list[torch.Tensor | None]]
    shared: Leaves = field(default_factory=dict)
    kernel: Callable[[Leaves], list[torch.Tensor | None]] | None = None
    names: tuple[str, ...] = ()  # of ops that a kernel has to have stood in for
    gradients: bool = True
    step: int = 0  # rows of a small call; 0: by their number
    sample: int = 3  # rows for the reference

    def part(self, index: Any) -> Leaves:
        return {**{name: x[index] for name, x in self.rows.items()}, **self.shared}

    @property
    def count(self) -> int:
        return len(next(iter(self.rows.values())))


def run(
    case: Case,
    leaves: Leaves,
    weights: list[torch.Tensor] | None,
    exact: bool,
    copy: Callable = torch.clone,
    declined: bool = False,
) -> Leaves:
    """Return outputs and gradients by name. weights: gradient of each output, rows first; None: random."""
    given = {}
    for name, x in leaves.items():
        x = x.detach()
        x = x.double() if exact and x.is_floating_point() else copy(x)
        given[name] = x.requires_grad_(case.gradients and x.is_floating_point())
    with (
        torch.set_grad_enabled(case.gradients),
        use_kernels("reference" if exact else "kernel"),
        record_dispatch() as taken,
    ):
        outs = (case.call if exact or case.kernel is None else case.kernel)(given)
    assert exact or declined or set(case.names) <= taken, f"no kernel stood in for {set(case.names) - taken}"
    outs = [x for x in outs if x is not None]
    made = {f"output {i}": x.detach() for i, x in enumerate(outs)}
    if case.gradients:
        weights = weights or [directions(x) for x in outs]
        pairs = [(x, w.to(x.dtype)) for x, w in zip(outs, weights) if x.requires_grad]
        wanted = {name: x for name, x in given.items() if x.requires_grad}
        ends, ways = ([pair[i] for pair in pairs] for i in (0, 1))
        grads = torch.autograd.grad(ends, list(wanted.values()), ways, allow_unused=True)
        made |= {
            f"gradient of {name}": torch.zeros_like(x) if d is None else d
            for (name, x), d in zip(wanted.items(), grads)
        }
    if CUDA:
        torch.cuda.synchronize()
    return made


def directions(x: torch.Tensor) -> torch.Tensor:
    """Return random output gradients of x's shape, the same in every call."""
    generator = torch.Generator(x.device).manual_seed(1)
    return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype if x.is_floating_point() else F32)


def weights_of(case: Case, outs: Leaves) -> list[torch.Tensor]:
    """Return random gradients of the outputs."""
    return [directions(x) for name, x in outs.items() if name.startswith("output")]


def miss(got: torch.Tensor, want: torch.Tensor, rows: bool) -> float:
    """Return the largest relative error of a row; the norm of a small row counts as at least a tenth of the others'."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if got.numel() == 0:
        return 0.0
    got, want = (x.double().reshape(len(x) if rows else 1, -1) for x in (got, want))
    size = want.norm(dim=1)
    return float(((got - want).norm(dim=1) / size.clamp_min(0.1 * size.square().mean().sqrt() + 1e-30)).max())


def worst(case: Case, got: Leaves, want: Leaves, index: Any, shared: bool) -> float:
    """Return the largest ratio of an error to its tolerance, over outputs and gradients."""
    most = 0.0
    for name, x in want.items():
        leaf = name.removeprefix("gradient of ")
        if leaf in case.shared:
            if not shared:
                continue
            found_here, ratio = miss(got[name], x, False), LOOSER.get(leaf, 2)
        else:
            found_here, ratio = miss(got[name] if index is None else got[name][index], x, True), LOOSER.get(leaf, 1)
        found_here /= ratio * TOLERANCE[case.dtype]
        if not found_here <= 1:
            raise AssertionError(f"{name} misses by {found_here:.3g} times its tolerance")
        most = max(most, found_here)
    return most


def check(case: Case, guards: bool = True) -> tuple[int, float]:
    """Return (calls of the kernel, largest ratio of an error to its tolerance); raise AssertionError on a failure."""
    if guards:
        with guard_allocations() as buffers:
            batched = run(case, case.part(slice(None)), None, False, buffers.copy)
        buffers.check()
        del buffers
    else:
        batched = run(case, case.part(slice(None)), None, False)
    calls, rows = 1, case.count
    weights = weights_of(case, batched)
    step = case.step or (1 if rows <= 64 else 8 if rows <= 512 else 32)
    parts: dict[str, Any] = {}
    for first in range(0, rows, step):
        index = slice(first, min(first + step, rows))
        made = run(case, case.part(index), [w[index] for w in weights], False)
        for name, x in made.items():
            if name.removeprefix("gradient of ") in case.shared:
                parts[name] = x.double() + parts.get(name, 0)
            else:
                parts.setdefault(name, []).append(x)
        calls += 1
    joined = {name: torch.cat(x) if isinstance(x, list) else x for name, x in parts.items()}
    most = worst(case, batched, joined, None, True)
    generator = torch.Generator().manual_seed(rows)
    index = torch.cat([torch.randperm(rows, generator=generator)[: case.sample], torch.tensor([0, rows - 1])])
    index = index.unique().to(DEVICE)
    sampled = case.part(index)
    exact = run(case, sampled, [w[index] for w in weights], True)
    most = max(most, worst(case, batched, exact, index, False))
    if case.shared and case.gradients:
        few = run(case, sampled, [w[index] for w in weights], False)
        most, calls = max(most, worst(case, few, exact, None, True)), calls + 1
    return calls, most


FAR = 2**31 + 2**16


def stride_far(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Return x with one axis strided so far that offsets of its last entries exceed 32 bits.

    The memory between entries is never touched, so on a CPU it is not allocated.
    """
    if x.dim() <= axis + 1 or x.shape[axis] < 2 or not x.is_floating_point():
        return x
    strides = list(torch.empty(x.shape, device="meta").stride())
    strides[axis] = -(-FAR // (x.shape[axis] - 1) // 64) * 64
    numbers = 1 + sum((n - 1) * step for n, step in zip(x.shape, strides))
    if x.is_cuda:
        memory = torch.empty(numbers, dtype=x.dtype, device=x.device)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        memory = torch.frombuffer(mmap.mmap(-1, numbers * x.element_size(), flags=flags), dtype=x.dtype)
    return memory.as_strided(x.shape, strides).copy_(x)


def check_far(case: Case, guards: bool = True) -> tuple[int, float]:
    """Compare rows with the same rows laid out far apart, along each axis but the last, output gradients included."""
    rows = case.part(slice(None))
    near = run(case, rows, None, False)
    most, calls, weights = 0.0, 1, weights_of(case, near)
    for axis in range(max(x.dim() for x in case.rows.values()) - 1):  # kernels may decline a layout
        far = {name: stride_far(x, axis) if name in case.rows else x for name, x in rows.items()}
        if all(far[name] is x for name, x in rows.items()):
            continue
        try:
            made = run(case, far, [stride_far(w, axis) for w in weights], False, lambda x: x, declined=True)
            most, calls = max(most, worst(case, made, near, None, True)), calls + 1
        except AssertionError as error:
            raise AssertionError(f"{error}, with axis {axis} far apart") from error
    return calls, most


# -- cases -----------------------------------------------------------------------------------------------------------
CASES: dict[str, Callable[[str], Iterator[Case]]] = {}


def cases(op: str) -> Callable[[Callable[[str], Iterator[Case]]], Callable[[str], Iterator[Case]]]:
    """Register a generator of cases: grid ("full", "reduced", "tiny", "far") -> cases of an operation."""

    def add(made: Callable[[str], Iterator[Case]]) -> Callable[[str], Iterator[Case]]:
        CASES[op] = made
        return made

    return add


def sizes_of(table: dict[str, Any], grid: str) -> Any:
    """Return the sizes of a grid; a grid without sizes of its own has those of "tiny"."""
    return table[grid] if grid in table else table["tiny"]


def normal(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Draw normal values on the device."""
    return torch.randn(*shape, device=DEVICE).to(dtype)


def uniform(*shape: int) -> torch.Tensor:
    """Draw values in [0, 1) on the device."""
    return torch.rand(*shape, device=DEVICE)


# B rows, G groups, J query heads of each, T tokens, F features, V values, dtype; starts: whether rows go on from states
LINEAR = {
    "full": [
        (64, 1, 7, 1024, 64, 64, F32, False),
        (33, 2, 1, 1000, 64, 64, F32, True),
        (512, 4, 1, 257, 64, 64, BF16, False),
        (32, 2, 1, 1024, 64, 64, BF16, True),
        (3000, 3, 1, 33, 16, 17, F32, False),
        (8, 48, 1, 1023, 128, 64, BF16, False),
        (1, 4, 1, 40000, 64, 64, BF16, False),
    ],
    "reduced": [
        (26, 1, 1, 1024, 16, 16, F32, False),
        (9, 2, 2, 225, 16, 17, F32, True),
        (40, 2, 1, 129, 64, 64, BF16, True),
    ],
    "tiny": [(2, 1, 2, 21, 16, 17, F32, True)],
    "far": [(3, 1, 1, 3, 16, 16, F32, True), (1, 3, 1, 3, 16, 16, F32, True), (1, 1, 3, 3, 16, 16, F32, True)],
}
# The same for log-linear Gated DeltaNet alone, whose backward goes through slots: large tiles, two heads, many levels
SLOTS = {
    "full": [
        (2, 24, 1, 4160, 128, 128, BF16, False),
        (3, 8, 2, 2100, 128, 128, torch.float16, False),
        (2, 4, 2, 5000, 64, 64, F32, False),
    ],
    "reduced": [(3, 2, 2, 700, 16, 17, F32, False)],
    "tiny": [(2, 1, 2, 170, 16, 17, F32, False)],
    "far": [(2, 1, 2, 70, 16, 16, F32, False), (1, 2, 1, 70, 16, 16, F32, False)],
}


def tokens(B: int, G: int, J: int, T: int, F: int, V: int, dtype: torch.dtype, delta: bool, levels: int = 0) -> Leaves:
    """Draw inputs laid out as mixers pass them, tokens before heads: q_BTGJF, k_BTGF, v_BTGV, gates_BTG, beta_BTG,
    level_BTGJL.
    """
    torch.manual_seed(B + T)
    k = torch.nn.functional.normalize(normal(B, T, G, F) + 0.5, dim=-1) if delta else normal(B, T, G, F) / F**0.5
    made = {
        "q": normal(B, T, G, J, F, dtype=dtype), "k": k.to(dtype), "v": normal(B, T, G, V, dtype=dtype),
        "gates": -0.1 * uniform(B, T, G),
    }  # fmt: skip
    made |= {"beta": uniform(B, T, G)} if delta else {}
    return made | ({"level": 0.1 + uniform(B, T, G, J, levels)} if levels else {})


def laid_out(x: Leaves) -> tuple[Any, ...]:
    """Return the inputs laid out as operations take them: q_BGJTF, k_BGTF, v_BGTV, beta_BGT or None, gates_BGT."""
    beta = x["beta"].mT if "beta" in x else None
    return x["q"].permute(0, 2, 3, 1, 4), x["k"].transpose(1, 2), x["v"].transpose(1, 2), beta, x["gates"].mT


def positions(B: int, starts: bool) -> torch.Tensor:
    """Return the position of each row's first token: up to 1,500 if rows continue from a state, otherwise 0."""
    return (
        (torch.arange(B, device=DEVICE) * 397 + 5) % 1501
        if starts
        else torch.zeros(B, dtype=torch.int64, device=DEVICE)
    )


def gated_cases(grid: str, delta: bool) -> Iterator[Case]:
    """Yield cases of gated linear attention. delta: with the delta rule."""
    from surgery.mixers.masks.semiseparable import semiseparable

    for B, G, J, T, F, V, dtype, first in sizes_of(LINEAR, grid):
        rows = tokens(B, G, J, T, F, V, dtype, delta)
        rows |= {"first": normal(B, 1, G, F, V)} if first else {}
        shared = {"weight": 0.5 + uniform(1, G, J)} if first else {}

        def call(x: Leaves) -> list[Any]:
            q, k, v, beta, gates = laid_out(x)
            operands = q, k, v, beta, gates.unsqueeze(1), x.get("weight")
            return [*semiseparable(*operands, first_BRGFV=x.get("first"), chunk=64)]

        name = f"{B} x {G} x {J} heads, {T} tokens of {F} x {V}{', with a state' if first else ''}"
        yield Case(name, dtype, B * G * -(-T // 64), rows, call, shared, names=("semiseparable",))


@cases("ssd")
def _(grid: str) -> Iterator[Case]:
    return gated_cases(grid, False)


@cases("gated_delta")
def _(grid: str) -> Iterator[Case]:
    return gated_cases(grid, True)


def tree(grid: str, delta: bool) -> Iterator[Case]:
    """Yield cases of log-linear attention. delta: with the delta rule."""
    from surgery.mixers.masks.log_linear import log_linear

    for B, G, J, T, F, V, dtype, starts in sizes_of(LINEAR, grid) + (sizes_of(SLOTS, grid) if delta else []):
        rows = tokens(B, G, J, T, F, V, dtype, delta, (T + 1500 * starts).bit_length() + 1)
        rows["start"] = positions(B, starts)
        if starts:
            full_BL = (rows["start"].unsqueeze(1) >> torch.arange(11, device=DEVICE)) & 1
            rows["buckets"] = normal(B, 11, G, F, V) * full_BL[..., None, None, None]

        def call(x: Leaves, T: int = T, F: int = F) -> list[Any]:
            q, k, v, beta, gates = laid_out(x)
            count = torch.full_like(x["start"], T)
            buckets = x.get("buckets")
            if buckets is not None:  # of which those of the position's bits are there
                full = (x["start"].unsqueeze(1) >> torch.arange(11, device=DEVICE)) & 1
                buckets = buckets * full[..., None, None, None]
            levels = None if buckets is None else (1500 + T).bit_length()
            chunk = 16 if F == 16 and not delta else 64  # many chunks of few numbers
            state = {"start_B": x["start"], "count_B": count, "buckets_BLGFV": buckets}
            return [*log_linear(q, k, v, beta, gates, x["level"], **state, chunk=chunk, levels=levels)]

        name = f"{B} x {G} x {J} heads, {T} tokens of {F} x {V}{', from any position, with buckets' if starts else ''}"
        yield Case(name, dtype, B * G * -(-T // 64), rows, call, names=("log_linear",))


@cases("log_linear")
def _(grid: str) -> Iterator[Case]:
    return tree(grid, False)


@cases("log_linear_delta")
def _(grid: str) -> Iterator[Case]:
    return tree(grid, True)


# Sequences packed into one row (cu_seqlens): how many, the longest, G, F, V
PACKED = {
    "full": [(400, 300, 2, 64, 64, BF16), (60, 1500, 2, 64, 64, F32)],
    "reduced": [(40, 150, 1, 16, 16, F32)],
    "tiny": [(3, 40, 1, 16, 16, F32)],
}


def packed_cases(grid: str, kind: str) -> Iterator[Case]:
    """Yield cases whose rows are sequences of different lengths, some empty, packed into one row; padding is
    ignored.
    """
    from helpers.log_linear_chunks import log_linear_chunks

    from surgery.kernels.gated_delta import gated_delta
    from surgery.kernels.log_linear_delta import log_linear_delta
    from surgery.kernels.ssd import ssd
    from surgery.mixers.masks.log_linear import log_linear
    from surgery.mixers.masks.semiseparable import semiseparable

    delta, leveled = "delta" in kind, "log_linear" in kind
    for S, T, G, F, V, dtype in sizes_of(PACKED, grid):
        rows = tokens(S, G, 1, T, F, V, dtype, delta, T.bit_length() + 1 if leveled else 0)
        rows["length"] = (torch.arange(S, device=DEVICE) * 97 + T) % (T + 1)

        def one(x: Leaves) -> tuple[torch.Tensor, torch.Tensor, Leaves]:
            here = torch.arange(x["q"].shape[1], device=DEVICE) < x["length"].unsqueeze(1)
            ends = torch.nn.functional.pad(x["length"].cumsum(0), (1, 0))
            return here, ends, {name: t[here].unsqueeze(0) for name, t in x.items() if name != "length"}

        def kernel(x: Leaves) -> list[Any]:
            here, ends, row = one(x)
            if not bool(here.any()):
                return [x["v"].unsqueeze(3) * 0 + 0 * x["q"].sum() + 0 * x["k"].sum()]
            q, k, v, beta, gates = laid_out(row)
            if leveled:
                given = (q, k, v, gates, row["level"]) if beta is None else (q, k, v, beta, gates, row["level"])
                out = (log_linear_delta if delta else log_linear_chunks)(*given, cu_seqlens=ends)
            else:
                given = (q, k, v, gates) if beta is None else (q, k, v, beta, gates)
                out, _ = (gated_delta if delta else ssd)(*given, None, cu_seqlens=ends)
            whole = out.new_zeros(*here.shape, *out.shape[1:3], out.shape[-1])
            return [whole.masked_scatter(here[..., None, None, None], out[0].permute(2, 0, 1, 3))]

        def call(x: Leaves) -> list[Any]:
            here, _, _ = one(x)
            q, k, v, beta, gates = laid_out(x)
            if leveled:
                zero = torch.zeros_like(x["length"])
                state = {"start_B": zero, "count_B": zero + q.shape[3], "buckets_BLGFV": None}
                out, _ = log_linear(q, k, v, beta, gates, x["level"], **state, chunk=64)
            else:
                out, _ = semiseparable(q, k, v, beta, gates.unsqueeze(1), None, first_BRGFV=None, chunk=64)
            return [out.permute(0, 3, 1, 2, 4) * here[..., None, None, None]]

        yield Case(f"{S} sequences of up to {T} tokens in one row, {G} groups of {F} x {V}", dtype, S * G * -(-T // 64),
                   rows, call, kernel=kernel)  # fmt: skip


def piece_cases(grid: str, kind: str) -> Iterator[Case]:
    """Yield cases of pieces of sequences in one row, which go on from states."""
    from surgery.mixers.common.packed_pieces import PackedPieces
    from surgery.mixers.masks.log_linear import log_linear, log_linear_in_pool, log_linear_packed
    from surgery.mixers.masks.semiseparable import semiseparable, semiseparable_packed

    delta, leveled, paged = "delta" in kind, "log_linear" in kind, "pages" in kind
    for S, T, G, F, V, dtype in sizes_of(PACKED, grid):
        levels = (1500 + T).bit_length()
        rows = tokens(S, G, 1, T, F, V, dtype, delta, levels + 1 if leveled else 0)
        rows["length"], rows["start"] = (torch.arange(S, device=DEVICE) * 97 + T) % T + 1, positions(S, True)
        rows["state"] = normal(S, levels if leveled else 1, G, F, V)
        if leveled:
            full_SL = (rows["start"].unsqueeze(1) >> torch.arange(levels, device=DEVICE)) & 1
            rows["state"] *= full_SL[..., None, None, None]

        def kernel(x: Leaves, levels: int = levels) -> list[Any]:
            here = torch.arange(x["q"].shape[1], device=DEVICE) < x["length"].unsqueeze(1)
            pieces = PackedPieces(x["length"].tolist(), x["start"].tolist(), DEVICE)
            apart = ("length", "start", "state")
            q, k, v, beta, gates = laid_out(row := {n: t[here].unsqueeze(0) for n, t in x.items() if n not in apart})
            if paged:
                page_R = torch.randperm(len(here), generator=torch.Generator().manual_seed(0)).to(DEVICE)
                pool = torch.empty_like(x["state"]).index_copy_(0, page_R, x["state"])
                state = {"pool_PNGFV": pool, "page_R": page_R, "pieces": pieces, "chunk": 64, "block_bits": 0}
                out, after = log_linear_in_pool(q, k, v, beta, gates, row["level"], **state), pool[page_R]
            elif leveled:
                state = {"buckets_SLGFV": x["state"], "pieces": pieces, "chunk": 64, "levels": levels}
                out, after = log_linear_packed(q, k, v, beta, gates, row["level"], **state)
            else:
                state = {"first_SRGFV": x["state"], "pieces": pieces, "chunk": 64}
                out, after = semiseparable_packed(q, k, v, beta, gates.unsqueeze(1), None, **state)
            whole = out.new_zeros(*here.shape, *out.shape[1:3], out.shape[-1])
            return [whole.masked_scatter(here[..., None, None, None], out[0].permute(2, 0, 1, 3)), after]

        def call(x: Leaves, levels: int = levels) -> list[Any]:
            here = torch.arange(x["q"].shape[1], device=DEVICE) < x["length"].unsqueeze(1)
            written = {n: x[n] * here[..., None] for n in ("gates", "beta") if n in x}
            q, k, v, beta, gates = laid_out({**x, **written, "k": x["k"] * here[..., None, None]})
            if leveled:
                state = {"start_B": x["start"], "count_B": x["length"], "buckets_BLGFV": x["state"]}
                out, after = log_linear(q, k, v, beta, gates, x["level"], **state, chunk=64, levels=levels)
            else:
                first = {"first_BRGFV": x["state"], "chunk": 64}
                out, after = semiseparable(q, k, v, beta, gates.unsqueeze(1), None, **first)
            return [out.permute(0, 3, 1, 2, 4) * here[..., None, None, None], after]

        name = f"pieces of {S} sequences of up to {T} tokens in one row, {G} groups of {F} x {V}"
        op = "log_linear_in_pool" if paged else "log_linear_packed" if leveled else "semiseparable_packed"
        yield Case(name, dtype, S * G * -(-T // 64), rows, call, kernel=kernel, names=(op,), gradients=False)


@cases("window_pieces")
def window_pieces(grid: str) -> Iterator[Case]:
    """Yield windows of pieces of sequences in one row: what is written to the states, rings and sinks behind the pieces."""
    from surgery.mixers.common.packed_pieces import PackedPieces
    from surgery.mixers.common.window_hybrid import gather_window, store_window

    window, sinks = 7, 2
    for S, T, G, F, V, dtype in sizes_of(PACKED, grid):
        torch.manual_seed(S + T)
        sizes = {"k": (G, F), "v": (G, V), "gate": (G,)}
        rows = {name: normal(S, T, *size, dtype=dtype) for name, size in sizes.items()}
        rows |= {f"ring.{name}": normal(S, window + 1, *size) for name, size in sizes.items()}
        rows |= {f"sink.{name}": normal(S, sinks, *sizes[name]) for name in "kv"}
        rows["length"], rows["start"] = (torch.arange(S, device=DEVICE) * 97 + T) % T + 1, positions(S, True) % 20

        def run(x: Leaves, gather: Any, store: Any, sizes: Any = sizes) -> list[Any]:
            here = torch.arange(x["k"].shape[1], device=DEVICE) < x["length"].unsqueeze(1)
            pieces = PackedPieces(x["length"].tolist(), x["start"].tolist(), DEVICE)
            plan, page_R = pieces.window_plan(window, sinks, window + 1, 64), torch.arange(len(here), device=DEVICE)
            new, pool = {n: x[n][here] for n in sizes}, {n: t.clone() for n, t in x.items() if "." in n}
            found = gather(new["k"], new, pool, page_R, plan, list(sizes))
            store(new["k"], new, pool, page_R, plan)
            written = {n: torch.zeros_like(new[n]).index_copy(0, plan.far_query_L, t[0]) for n, t in found.far.items()}
            return [*(torch.zeros_like(x[n]).masked_scatter(here.view(*here.shape, *[1] * (x[n].dim() - 2)), t)
                      for n, t in written.items()), *pool.values()]  # fmt: skip

        def call(x: Leaves, run: Any = run) -> list[Any]:
            return run(x, gather_window.reference, store_window.reference)

        def kernel(x: Leaves, run: Any = run) -> list[Any]:
            return run(x, gather_window, store_window)

        name = f"window of pieces of {S} sequences of up to {T} tokens, {G} groups of {F} x {V}"
        ops = ("gather_window", "store_window")
        yield Case(name, dtype, S, rows, call, kernel=kernel, names=ops, gradients=False)


# Requests, pages of each, tokens of a page
REQUESTS = {
    "full": [(60_000, 40, 16), (60_000, 3, 0)],
    "reduced": [(1000, 9, 16), (300, 2, 0)],
    "tiny": [(5, 3, 16), (3, 2, 0)],
    "far": [],
}


@cases("request_rows")
def request_rows(grid: str) -> Iterator[Case]:
    """Yield requests whose pages and lengths are written to buffers, every seventh one padding."""
    from surgery.mixers.common.request_rows import write_request_rows

    for R, P, block in REQUESTS[grid]:
        torch.manual_seed(R)
        count = torch.arange(R, device=DEVICE) % 7
        length = torch.where(count > 0, count + torch.randint(0, max(1, P * block - 7), (R,), device=DEVICE), 0)
        rows = {"length": length.int(), "count": count.int()}
        rows["page"] = torch.randint(1, 2**31 - 1, (R, P), dtype=torch.int32, device=DEVICE)

        def run(x: Leaves, write: Any, block: int = block) -> list[Any]:
            starts = torch.nn.functional.pad(x["count"].cumsum(0), (1, 0)).int()
            to = [torch.full((len(x["count"]) + 5,), 77, dtype=torch.int32, device=DEVICE) for _ in range(2)]
            write(x["length"], starts, x["page"], *to, block=block, no_page=0)
            return [t[: len(x["count"])].double() for t in to]

        def call(x: Leaves, run: Any = run) -> list[Any]:
            return run(x, write_request_rows.reference)

        def kernel(x: Leaves, run: Any = run) -> list[Any]:
            return run(x, write_request_rows)

        name = f"rows of {R} requests with {P} pages of {block} tokens"
        yield Case(name, F32, R, rows, call, kernel=kernel, names=("write_request_rows",), gradients=False)


for _kind in ("ssd", "gated_delta", "log_linear_delta", "log_linear_delta_pages"):
    CASES[f"{_kind}_pieces"] = lambda grid, kind=_kind: piece_cases(grid, kind)

for _kind in ("ssd", "gated_delta", "log_linear", "log_linear_delta"):
    CASES[f"{_kind}_packed"] = lambda grid, kind=_kind: packed_cases(grid, kind)

# B, G, J, F, V, dtype
STEPS = {
    "full": [
        (64, 1, 7, 64, 64, F32),
        (9000, 4, 2, 64, 64, BF16),
        (5001, 3, 1, 20, 33, F32),
        (20001, 1, 1, 16, 16, BF16),
    ],
    "reduced": [(300, 2, 3, 20, 33, F32), (1000, 1, 1, 16, 16, BF16)],
    "tiny": [(3, 2, 2, 20, 17, F32)],
    "far": [(3, 3, 3, 16, 16, F32)],
}


def token(B: int, G: int, J: int, F: int, V: int, dtype: torch.dtype) -> Leaves:
    """Draw the inputs of one decoding step."""
    torch.manual_seed(B)
    k = torch.nn.functional.normalize(normal(B, G, F), dim=-1)
    return {"q": normal(B, G, J, F, dtype=dtype), "k": k.to(dtype), "v": normal(B, G, V, dtype=dtype),
            "beta": uniform(B, G), "gates": -uniform(B, G)}  # fmt: skip


@cases("ssd_step")
def _(grid: str) -> Iterator[Case]:
    from surgery.mixers.masks.semiseparable import semiseparable_step

    for B, G, J, F, V, dtype in sizes_of(STEPS, grid):
        for delta in (False, True):
            rows = {**token(B, G, J, F, V, dtype), "state": normal(B, 1, G, F, V)}

            def call(x: Leaves, delta: bool = delta) -> list[Any]:
                beta = x["beta"] if delta else None
                operands = x["q"], x["k"], x["v"], beta, x["gates"].unsqueeze(1), x["weight"]
                return [*semiseparable_step(*operands, sum_BRGFV=x["state"])]

            yield Case(f"a token of {B} x {G} x {J} heads, {F} x {V}{', delta' if delta else ''}", dtype, B * G * J, rows,
                       call, {"weight": 0.5 + uniform(1, G, J)}, names=("semiseparable_step",), gradients=False)  # fmt: skip


@cases("log_linear_step")
def _(grid: str) -> Iterator[Case]:
    from surgery.mixers.masks.log_linear import log_linear_step

    for B, G, J, F, V, dtype in sizes_of(STEPS, grid):
        for delta in (False, True):
            rows = token(B, G, J, F, V, dtype)
            rows["start"] = torch.arange(B, device=DEVICE) % 16
            rows["count"] = (torch.arange(B, device=DEVICE) % 5 != 4).long()
            full_BL = (rows["start"].unsqueeze(1) >> torch.arange(4, device=DEVICE)) & 1
            rows |= {"level": uniform(B, G, J, 6), "buckets": normal(B, 4, G, F, V) * full_BL[..., None, None, None]}
            there = rows["count"].view(-1, 1)
            for name in ("k", "v", "beta", "gates"):  # of a row without a token, zeros
                rows[name] = rows[name] * there.view(-1, *[1] * (rows[name].dim() - 1)).to(rows[name].dtype)

            def call(x: Leaves, delta: bool = delta) -> list[Any]:
                beta = x["beta"] if delta else None
                operands = x["q"], x["k"], x["v"], beta, x["gates"], x["level"]
                state = {"start_B": x["start"], "count_B": x["count"], "buckets_BLGFV": x["buckets"]}
                return [*log_linear_step(*operands, **state, levels=5)]

            yield Case(f"a token of {B} x {G} x {J} heads, {F} x {V}{', delta' if delta else ''}", dtype, B * G * J, rows,
                       call, names=("log_linear_step",), gradients=False)  # fmt: skip


def mixer_of(config: Any, shape: Any) -> Any:
    """Return a mixer whose parameters differ from their initial values."""
    from surgery.mixers import MIXERS

    torch.manual_seed(0)
    mixer = MIXERS[config](config, shape)
    for parameter in mixer.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return mixer.to(DEVICE)


def inputs_of(B: int, T: int, shape: Any, dtype: torch.dtype) -> Leaves:
    """Draw q, k, v and x of a mixer."""
    torch.manual_seed(B + T)
    sizes = ((shape.heads, T, shape.key), (shape.groups, T, shape.key), (shape.groups, T, shape.value), (T, shape.dim))
    return {name: normal(B, *size, dtype=dtype) for name, size in zip("qkvx", sizes)}


def of_mixer(mixer: Any) -> Any:
    """Return a function inputs -> the mixer, or its float64 copy for float64 inputs."""
    import copy

    wide = copy.deepcopy(mixer).double()
    return lambda x: wide if x.dtype == torch.float64 else mixer


@cases("mixer")
def _(grid: str) -> Iterator[Case]:
    """Yield whole attention modules as models call them, and a case that once failed: 64 windows of 1,024 tokens."""
    from surgery.mixers.base import AttentionShape, MixerInputs
    from surgery.mixers.linear_config import LinearAttention

    shape = AttentionShape(dim=448, heads=7, groups=1, key=64, value=64, scaling=0.125)
    two = AttentionShape(dim=448, heads=8, groups=2, key=64, value=64, scaling=0.125)
    small = AttentionShape(dim=24, heads=2, groups=1, key=16, value=16, scaling=0.25)
    sizes = {
        "full": [
            (64, 1024, shape, 0, F32), (64, 1024, shape, 64, F32), (32, 1024, shape, 0, BF16), (64, 1000, two, 0, F32),
            (64, 1024, two, 64, BF16),
        ],
        "reduced": [(26, 1024, small, 0, F32)],
        "tiny": [(2, 21, small, 4, F32)],
    }  # fmt: skip
    for B, T, shape, window, dtype in sizes_of(sizes, grid):
        for training in (False, True):
            config = LinearAttention(mask={"name": "hierarchical"}, window=window)
            at = of_mixer(mixer_of(config, shape))

            def call(x: Leaves, at: Any = at) -> list[Any]:
                return [at(x["q"]).mix(MixerInputs(x["q"], x["k"], x["v"], x["x"]), None)[0]]

            name = f"{B} x {T} tokens, {shape.heads} heads of {shape.groups} groups, window {window}"
            yield Case(f"{name}, {'with gradients' if training else 'inference'}", dtype, B * shape.groups * -(-T // 64),
                       inputs_of(B, T, shape, dtype), call, names=("log_linear",), gradients=training)  # fmt: skip
        if grid in ("tiny", "far"):
            return


@cases("one_token")
def _(grid: str) -> Iterator[Case]:
    from surgery.mixers.base import AttentionShape, MixerInputs, MixerState
    from surgery.mixers.linear_config import LinearAttention

    shape = AttentionShape(dim=64, heads=4, groups=2, key=24, value=17, scaling=24**-0.5)
    for B in sizes_of({"full": (3001, 20000), "reduced": (100,), "tiny": (2,)}, grid):
        for mask, scores in (
            ("gates", "kernel"),
            ("gates", "delta"),
            ("hierarchical", "kernel"),
            ("hierarchical", "delta"),
        ):
            mixer = mixer_of(LinearAttention(mask=mask, scores=scores), shape)
            at, rows = of_mixer(mixer), inputs_of(B, 1, shape, F32)
            seen = torch.arange(B, device=DEVICE) % 16
            with torch.no_grad(), use_kernels("reference"):
                before = mixer.mix(MixerInputs(*inputs_of(1, 15, shape, F32).values()), mixer.empty_state(1, DEVICE))[1]
            ((state, past),) = before.tensors.items()
            rows |= {"seen": seen if mask == "hierarchical" else torch.full_like(seen, 15)}
            rows["state"] = normal(B, *past.shape[1:])
            if mask == "hierarchical":
                full_BL = (seen.unsqueeze(1) >> torch.arange(past.shape[1], device=DEVICE)) & 1
                rows["state"] *= full_BL[..., None, None, None]

            def call(x: Leaves, at: Any = at, state: str = state) -> list[Any]:
                inputs = MixerInputs(x["q"], x["k"], x["v"], x["x"])
                out, after = at(x["q"]).mix(inputs, MixerState(x["seen"], {state: x["state"]}, 15))
                return [out, after.seen_B, *after.tensors.values()]

            yield Case(f"{B} rows, {mask}, {scores}", F32, B * shape.groups, rows, call, names=("one_token",),
                       gradients=False)  # fmt: skip


# B, query heads, groups, K = F, V, window, sinks, dtype
WINDOW_STEPS = {
    "full": [
        (64, 32, 8, 64, 64, 64, 4, BF16),
        (9000, 4, 2, 24, 17, 5, 2, F32),
        (40000, 2, 2, 16, 16, 3, 0, F32),  # 80,000 groups: more than an axis of a grid has but the first
        (7, 14, 2, 128, 128, 256, 4, BF16),
    ],
    "reduced": [(300, 4, 2, 24, 17, 5, 2, F32), (40, 8, 2, 64, 64, 64, 4, BF16)],
    "tiny": [(3, 4, 2, 24, 17, 5, 2, F32)],
}


def step_rows(mixer: Any, B: int, shape: Any, dtype: torch.dtype) -> Leaves:
    """Draw tokens and states of a step behind a window, at all positions around its end."""
    window, sinks = mixer.config.window, mixer.config.sinks
    rows = inputs_of(B, 1, shape, dtype)
    rows["seen"] = (7 * torch.arange(B, device=DEVICE) + 5) % (window + sinks + 16)
    for name, t in mixer.empty_state(1, DEVICE).tensors.items():
        waits = name in ("ring.k", "ring.v", "ring.linear_k", "sink.k", "sink.v")
        rows[name] = normal(B, *t.shape[1:], dtype=dtype if waits else F32)
    for name in {"ring.gate", "ring.beta"} & set(rows):
        rows[name] = rows[name].sigmoid() - float(name == "ring.gate")
    come_BS = (torch.arange(sinks, device=DEVICE) < rows["seen"].unsqueeze(1))[..., None, None]
    rows |= {name: rows[name] * come_BS for name in ("sink.k", "sink.v") if name in rows}
    if "mask.buckets" in rows:
        far = (rows["seen"] - window - sinks).clamp_min(0)
        full_BL = (far.unsqueeze(1) >> torch.arange(4, device=DEVICE)) & 1
        rows["mask.buckets"] = normal(B, 4, *rows["mask.buckets"].shape[2:]) * full_BL[..., None, None, None]
    if "mask.sum" in rows:
        rows["mask.sum"] *= ((rows["seen"] > window + sinks).float())[:, None, None, None, None]
    if mixer.config.normalise:
        rows["mask.sum"].abs_()
    if mixer.rope == "both":
        angle = normal(B, 1, shape.rotary // 2).repeat(1, 1, 2)
        rows |= {"cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}
    return rows


def rope_of(x: Leaves) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the angles of `step_rows`, None without."""
    return (x["cos"], x["sin"]) if "cos" in x else None


LOLCATS = {"mask": "ones", "features": "hedgehog", "normalise": True}
STEP_OPTIONS = [
    *({"mask": mask, "scores": scores} for mask in ("gates", "hierarchical") for scores in ("kernel", "delta")),
    {"mask": "hierarchical", "scores": "delta", "states": "per_head"},
    LOLCATS,
    {"mask": "hierarchical", "scores": "delta", "features": "hedgehog", "rope": "both", "output_gate": "value"},
]


@cases("window_step")
def _(grid: str) -> Iterator[Case]:
    """Yield steps of `one_token` behind a window, some rows without a token."""
    from surgery.mixers.base import AttentionShape, MixerInputs, MixerState
    from surgery.mixers.linear_config import LinearAttention

    for B, heads, groups, K, V, window, sinks, dtype in sizes_of(WINDOW_STEPS, grid):
        plain = AttentionShape(dim=64, heads=heads, groups=groups, key=K, value=V, scaling=K**-0.5)
        for option in STEP_OPTIONS:
            shape = dataclasses.replace(plain, rotary=K if "rope" in option else 0)
            mixer = mixer_of(LinearAttention(**option, window=window, sinks=sinks), shape)
            at, rows = of_mixer(mixer), step_rows(mixer, B, shape, dtype)
            rows["valid"] = (torch.arange(B, device=DEVICE) % 5 != 4).unsqueeze(1)
            names = [name for name in rows if "." in name]

            def call(x: Leaves, at: Any = at, names: Any = names, bound: int = window + sinks + 15) -> list[Any]:
                inputs = MixerInputs(x["q"], x["k"], x["v"], x["x"], x["valid"], rope=rope_of(x))
                state = MixerState(x["seen"], {name: x[name] for name in names}, bound)
                out, after = at(x["q"]).mix(inputs, state)
                return [out, after.seen_B, *(after.tensors[name] for name in names)]

            name = f"{B} rows, {heads} heads on {groups} of {K} x {V}, window {window}, {sinks} sinks, {option}"
            yield Case(name, dtype, B * groups, rows, call, names=("one_token",), gradients=False)


# Longest sequences of 4 buckets behind a window; without one 15 tokens fill them.
PAGED_STEPS = {
    "full": [
        (64, 32, 8, 64, 64, 64, 4, BF16),
        (9000, 4, 2, 24, 17, 0, 0, F32),
        (256, 32, 8, 128, 128, 64, 4, BF16),
        (64, 9, 3, 64, 64, 0, 0, BF16),
    ],
    "reduced": [(300, 4, 2, 24, 17, 5, 2, F32), (40, 8, 2, 64, 64, 0, 0, BF16)],
    "tiny": [(3, 4, 2, 24, 17, 5, 2, F32), (3, 4, 2, 24, 17, 0, 0, F32)],
}


@cases("paged_step")
def _(grid: str) -> Iterator[Case]:
    """Yield steps in place in pages out of order, which hold NaN where a sequence has not written; some rows are
    padding."""
    from surgery.mixers.base import AttentionShape, MixerInputs, MixerState
    from surgery.mixers.linear import one_token, step_in_pool
    from surgery.mixers.linear_config import LinearAttention
    from surgery.vllm.mixer_state import StateLayout

    for B, heads, groups, K, V, window, sinks, dtype in sizes_of(PAGED_STEPS, grid):
        plain = AttentionShape(dim=64, heads=heads, groups=groups, key=K, value=V, scaling=K**-0.5)
        for option in STEP_OPTIONS if window else STEP_OPTIONS[:-1]:  # two forms of q and k need a window
            shape = dataclasses.replace(plain, rotary=K if "rope" in option else 0)
            mixer = mixer_of(LinearAttention(**option, window=window, sinks=sinks), shape)
            at, rows, longest = of_mixer(mixer), step_rows(mixer, B, shape, dtype), window + sinks + 15
            names = [name for name in rows if "." in name]
            rows["seen"] = (rows["seen"] % longest).where(torch.arange(B, device=DEVICE) % 5 != 4, -1)
            layout = StateLayout(mixer, longest)
            for name in names:  # sequences whose number of tokens has changed
                rows[name] = rows[name].masked_fill(~layout.is_written(name, rows[name], rows["seen"].clamp_min(0)), 0)

            def finish(out: Any, after: Any, x: Leaves, names: Any = names, layout: Any = layout) -> list[Any]:
                """Return the output and what the sequences have written of their states; zeros for padding."""
                real, outs = x["seen"] >= 0, [out.masked_fill((x["seen"] < 0)[:, None, None, None], 0)]
                for name in names:
                    t = after[name]
                    written = layout.is_written(name, t, x["seen"] + 1) & real.view(-1, *[1] * (t.dim() - 1))
                    outs.append(t.masked_fill(~written, 0))
                return outs

            def call(
                x: Leaves, at: Any = at, names: Any = names, finish: Any = finish, most: int = longest - 1
            ) -> list[Any]:
                inputs = MixerInputs(x["q"], x["k"], x["v"], x["x"], rope=rope_of(x))
                state = MixerState(x["seen"].clamp_min(0), {name: x[name] for name in names}, most)
                out, after = one_token.reference(x["q"], at(x["q"]), inputs, state)
                return finish(out, after.tensors, x)

            def kernel(
                x: Leaves, at: Any = at, names: Any = names, finish: Any = finish, layout: Any = layout
            ) -> list[Any]:
                rows, seen = len(x["seen"]), x["seen"]
                cache = torch.full((rows + 3, layout.size), torch.nan, device=DEVICE)
                page_B = torch.randperm(rows + 3, generator=torch.Generator().manual_seed(0))[:rows].to(DEVICE)
                pool = layout.views(cache)
                for name in names:
                    pool[name][page_B] = x[name].float().masked_fill(~layout.is_written(name, x[name], seen), torch.nan)
                given = MixerInputs(x["q"], x["k"], x["v"], x["x"], rope=rope_of(x))
                number_B = page_B.where(seen >= 0, -1).int()
                out = step_in_pool(x["q"], at(x["q"]), given, seen.int(), pool, number_B)
                return finish(out, {name: pool[name][page_B] for name in names}, x)

            name = f"{B} rows, {heads} heads on {groups} of {K} x {V}, window {window}, {sinks} sinks, {option}"
            yield Case(name, dtype, B * groups, rows, call, kernel=kernel, names=("step_in_pool",), gradients=False)


PAPER = (32, 8, 6, 4, 4, 4, 4, 2)
HALVES = tuple(1024 >> i for i in range(1, 8))
# B, G, J, T, S, ranks, extents, V, dtype, what else
SCORES = {
    "full": [
        (16, 8, 2, 1024, 1024, PAPER, HALVES, 64, BF16, {}),
        (3, 4, 1, 1025, 1025, PAPER, HALVES, 64, BF16, {"form": "nested"}),
        (2, 2, 2, 2500, 2500, (32, 16, 16), (800, 100), 64, BF16, {"window": 1100}),
        (5, 2, 2, 200, 515, (16, 8, 8), (100, 30), 24, F32, {"holes": True, "window": 190}),
        (64, 3, 1, 333, 333, (32,), (), 32, F32, {"window": 64}),
        (2200, 15, 2, 33, 33, (16, 16), (9,), 16, BF16, {}),  # 66,000 heads: more than an axis of a grid has
    ],
    "reduced": [
        (3, 2, 2, 200, 200, (16, 16), (64,), 16, BF16, {}),
        (5, 1, 2, 65, 130, (16, 8, 8), (40, 9), 24, F32, {"holes": True, "window": 70}),
    ],
    "tiny": [(2, 1, 2, 20, 40, (16, 8), (10,), 16, F32, {"holes": True})],
    "far": [(3, 1, 1, 3, 5, (16, 8), (2,), 16, F32, {}), (1, 3, 3, 3, 5, (16, 8), (2,), 16, F32, {"holes": True})],
}
CACHES = {
    "full": [
        (64, 8, 4, 1, 3000, PAPER, HALVES, 64, BF16, {}),
        (5, 4, 2, 3, 1001, (32, 16, 16), (256, 64), 64, F32, {"holes": True, "window": 700}),
        (2100, 32, 1, 1, 129, (16, 16), (50,), 16, BF16, {}),
    ],
    "reduced": [(40, 2, 2, 1, 300, (16, 16), (64,), 16, F32, {})],
    "tiny": [(2, 1, 2, 1, 40, (16, 8), (10,), 16, F32, {"holes": True})],
}


def softmax(table: list[Any], step: bool) -> Iterator[Case]:
    """Yield cases of MLR attention. step: decoding steps instead of whole sequences."""
    from surgery.mixers.base import AttentionShape
    from surgery.mixers.common.kv_layout import KVLayout
    from surgery.mixers.common.softmax import ScoreTerm, attend

    for B, G, J, T, S, ranks, extents, V, dtype, more in table:
        torch.manual_seed(B + T)
        form, window, holes = more.get("form", "sliding"), more.get("window"), more.get("holes", False)
        R, shape = sum(ranks), AttentionShape(8, G * J, G, sum(ranks), V, 0.3, True, window)
        rows = {"q": normal(B, G, J, T, R, dtype=dtype), "k": normal(B, G, S, R, dtype=dtype)}
        rows["v"] = normal(B, G, S, V, dtype=dtype)
        rows["end"] = (
            T + (torch.arange(B, device=DEVICE) * 97 + S) % (S + 60) if holes else torch.full((B,), S, device=DEVICE)
        )

        def call(x: Leaves, T: int = T, S: int = S, ranks: Any = ranks, extents: Any = extents, form: str = form,
                 holes: bool = holes, shape: Any = shape) -> list[Any]:  # fmt: skip
            frame = KVLayout(x["end"] if holes else x["end"][:1], T, S, holes)
            terms = []
            for q, k, extent, at in zip(x["q"].split(ranks, -1), x["k"].split(ranks, -1), (None, *extents), range(9)):
                bias = x["bias"][..., at - 1] if at else None
                slots = S if extent is None or form == "nested" or not step else min(S, extent + T + 2)
                terms.append(ScoreTerm(q, k[:, :, S - slots :], extent, form, bias))
            out = attend(terms, x["v"], frame, shape)
            return [out * (frame.positions(S - T, S) >= 0)[:, None, :, None]]

        name = f"{B} x {G} x {J} heads, {T} queries of {S} slots, {len(ranks)} levels, {more or 'all'}"
        yield Case(name, dtype, B * G * J * -(-T // 64), rows, call, {"bias": normal(G, J, len(extents))},
                   names=("attend",), gradients=not step)  # fmt: skip


@cases("mlr")
def _(grid: str) -> Iterator[Case]:
    return softmax(sizes_of(SCORES, grid), False)


@cases("mlr_decode")
def _(grid: str) -> Iterator[Case]:
    return softmax(sizes_of(CACHES, grid), True)


# B, G, J, T, window, sinks, K, V, dtype, what else
WINDOWS = {
    "full": [
        (64, 1, 7, 1024, 64, 4, 64, 64, BF16, {}),
        (16, 8, 2, 1024, 256, 4, 64, 64, BF16, {}),
        (4, 2, 4, 4097, 1024, 17, 128, 128, BF16, {"seen": True}),
        (3, 1, 5, 1000, 100, 64, 80, 65, F32, {"softcap": 5.0, "seen": True}),
        (5000, 15, 2, 33, 12, 2, 16, 16, BF16, {}),  # 75,000 key heads: more than most axes of a grid have
        (1, 2, 2, 40000, 64, 4, 64, 64, BF16, {"largest": True}),
        (2100, 8, 4, 1, 64, 4, 64, 64, BF16, {"seen": True}),
        (2, 1, 2, 300, 128, 4, 256, 256, BF16, {"largest": True}),
    ],
    "reduced": [
        (20, 2, 2, 200, 33, 4, 16, 16, BF16, {"largest": True}),
        (5, 1, 7, 65, 70, 17, 24, 17, F32, {"softcap": 5.0, "seen": True}),
        (40, 2, 4, 1, 64, 4, 64, 64, F32, {"seen": True}),
    ],
    "tiny": [(2, 1, 2, 21, 6, 3, 16, 17, F32, {"seen": True, "largest": True})],
    "far": [(3, 3, 3, 3, 2, 3, 16, 16, F32, {"seen": True}), (2, 1, 1, 5, 3, 3, 16, 17, F32, {"largest": True})],
}


@cases("local_attention")
def _(grid: str) -> Iterator[Case]:
    from surgery.mixers.base import AttentionShape
    from surgery.mixers.common.window_hybrid import RecentAndSinks, local_attention

    for B, G, J, T, window, sinks, K, V, dtype, more in sizes_of(WINDOWS, grid):
        torch.manual_seed(B + T)
        largest, step = more.get("largest", False), T == 1
        shape = AttentionShape(8, G * J, G, K, V, K**-0.5, softcap=more.get("softcap"))
        sizes = {"q": (T, G, J, K), "k": (window + T, G, K), "v": (window + T, G, V), "sink_k": (sinks, G, K)}
        sizes["sink_v"] = (sinks, G, V)
        rows = {name: normal(B, *size, dtype=dtype) for name, size in sizes.items()}
        rows["seen"] = positions(B, more.get("seen", False))

        def call(x: Leaves, shape: Any = shape, largest: bool = largest) -> list[Any]:
            k, v, sink_k, sink_v = (x[name].transpose(1, 2) for name in ("k", "v", "sink_k", "sink_v"))
            q, keys, values = x["q"].permute(0, 2, 3, 1, 4), RecentAndSinks(k, sink_k), RecentAndSinks(v, sink_v)
            return [*local_attention(q, keys, values, x["seen"], shape, 64, with_largest=largest)]

        name = f"{B} x {G} x {J} heads, {T} tokens of {K} x {V}, window {window}, {sinks} sinks, {more or 'plain'}"
        yield Case(name, dtype, B * G * -(-T * J // 64), rows, call, names=("local_attention",), gradients=not step)


@cases("features")
def _(grid: str) -> Iterator[Case]:
    from surgery.mixers.base import AttentionShape
    from surgery.mixers.common.linear_features import FeaturePlan, linear_features
    from surgery.mixers.features.hedgehog import Hedgehog, HedgehogMap

    sizes = {  # B rows, T tokens, H heads, K dims, dtype
        "full": [(64, 1023, 9, 64, BF16), (3000, 33, 24, 16, BF16), (4, 4097, 8, 128, BF16), (33, 257, 3, 80, F32)],
        "reduced": [(40, 70, 3, 16, F32), (9, 200, 2, 24, BF16)],
        "tiny": [(2, 21, 2, 16, F32)],
    }
    for B, T, H, K, dtype in sizes_of(sizes, grid):
        torch.manual_seed(B + T)
        rows = {"x": normal(B, T, H, K, dtype=dtype), "at": torch.randint(0, 900, (B, T), device=DEVICE)}
        shared = {"w": normal(H, 2 * K, 2 * K) / K**0.5}
        plan = FeaturePlan("queries", "both", True, K**-0.25, True, 3, T - 1, 1, dtype)
        shape = AttentionShape(8, H, H, 2 * K, K, K**-0.5)

        def call(x: Leaves, plan: Any = plan, shape: Any = shape, K: int = K) -> list[Any]:
            wide = torch.promote_types(x["x"].dtype, F32)
            speed_R = torch.logspace(0, -2, K // 2, device=DEVICE, dtype=wide).repeat(2)
            angle_BTR = x["at"].to(wide).unsqueeze(-1) * speed_R
            feature_map = HedgehogMap(Hedgehog(), shape)
            del feature_map.query_HKK
            feature_map.query_HKK = x["w"]  # type: ignore[assignment]
            return [*linear_features(x["x"], (angle_BTR.cos(), angle_BTR.sin()), feature_map, x["at"], plan)]

        name = f"features of {B} x {H} heads of {K}, {T} tokens"
        yield Case(name, dtype, B * H * T, rows, call, shared, names=("linear_features",))


@cases("join")
def _(grid: str) -> Iterator[Case]:
    from surgery.mixers.common.window_hybrid import join_and_gate

    sizes = {  # B rows, T tokens, of which `late` have no far part, H heads, V values, dtype
        "full": [(64, 1023, 68, 9, 64, BF16), (3000, 33, 5, 20, 17, F32), (4, 4097, 0, 8, 128, BF16)],
        "reduced": [(40, 70, 9, 3, 16, F32), (9, 200, 0, 2, 24, BF16)],
        "tiny": [(2, 21, 4, 2, 16, F32)],
    }
    for B, T, late, H, V, dtype in sizes_of(sizes, grid):
        torch.manual_seed(B + T)
        rows = {"near": normal(B, T, H, V), "far": normal(B, T - late, H, V, dtype=dtype)}
        rows["gate"] = normal(B, T, H, V, dtype=dtype)
        shared = {"near_H": normal(H), "far_H": normal(H)}

        def call(x: Leaves, dtype: torch.dtype = dtype) -> list[Any]:
            near, far = x["near"].transpose(1, 2), x["far"].transpose(1, 2)
            return [join_and_gate(near, far, x["near_H"], x["far_H"], x["gate"], dtype)]

        name = f"join of {B} x {H} heads of {V}, {T} tokens, {late} without a far part"
        yield Case(name, dtype, B * H * T, rows, call, shared, names=("join_and_gate",))


@cases("logits")
def _(grid: str) -> Iterator[Case]:
    from surgery.core.logit_rows import LogitTransform, RowSpec, row_gradient_, row_stats

    sizes = {  # N rows, V logits, dtype
        "full": [(8192, 49152, BF16), (70_000, 1000, F32), (2048, 151_936, BF16)],
        "reduced": [(100, 70, F32), (40, 1000, BF16)],
        "tiny": [(5, 70, F32)],
    }
    for N, V, dtype in sizes_of(sizes, grid):
        torch.manual_seed(N + V)
        rows = {"logits": 3 * normal(N, V, dtype=dtype), "teacher": 3 * normal(N, V + 4, dtype=dtype)}
        rows |= {"labels": torch.randint(0, V, (N,), device=DEVICE), "soft": uniform(N), "hard": uniform(N)}
        spec = RowSpec(V, True, True, 1.5, transform=LogitTransform(1.0, 30.0))

        def call(x: Leaves, spec: Any = spec) -> list[Any]:
            logits_NV = x["logits"].clone()
            stats = row_stats(logits_NV, x["teacher"], spec)
            row_gradient_(logits_NV, x["teacher"], stats, x["soft"], x["hard"], x["labels"], spec=spec)
            return [stats.kl_N, stats.hard_N, logits_NV]

        name = f"{N} rows of {V} logits"
        yield Case(name, dtype, N, rows, call, names=("row_stats", "row_gradient_"), gradients=False)


@cases("slots")
def _(grid: str) -> Iterator[Case]:
    from surgery.mixers.common.kv_layout import write_slots

    sizes = {
        "full": [(64, 8, 1, 512, BF16), (3001, 7, 2, 65, F32)],
        "reduced": [(50, 3, 1, 65, F32)],
        "tiny": [(2, 2, 1, 5, F32)],
    }
    for B, G, T, size, dtype in sizes_of(sizes, grid):
        ranks = (*PAPER, 33)[1:]
        rows = {"new": normal(B, G, T, sum(ranks[:-1]), dtype=dtype), "value": normal(B, G, T, ranks[-1], dtype=dtype)}
        rows |= {f"room {i}": normal(B, G, size + i, rank, dtype=dtype) for i, rank in enumerate(ranks)}

        def call(x: Leaves, ranks: Any = ranks, size: int = size) -> list[Any]:
            rooms = [torch.empty_like(x[f"room {i}"]).copy_(x[f"room {i}"]) for i in range(len(ranks))]
            news = [*x["new"].split(ranks[:-1], -1), x["value"]]
            write_slots(
                news[0] if x["new"].dtype == torch.float64 else x["new"],
                rooms,
                [size - 3 + i for i in range(len(ranks))],
                news,
            )
            return rooms

        yield Case(f"{T} new slots of {B} x {G}, {len(ranks)} rooms of {size}", dtype, B * G * T, rows, call,
                   names=("write_slots",), gradients=False)  # fmt: skip


# B, G, J, T, F, V, components, block, dtype
BLOCKS = {
    "full": [
        (64, 2, 2, 1024, 64, 64, 8, 64, BF16),
        (50, 3, 1, 1000, 64, 65, 4, 64, F32),
        (6000, 5, 2, 33, 16, 17, 3, 16, F32),
        (3, 12, 1, 4097, 64, 64, 4, 32, BF16),
    ],
    "reduced": [(20, 2, 2, 130, 16, 17, 3, 16, F32), (9, 1, 1, 257, 64, 64, 2, 64, BF16)],
    "tiny": [(2, 1, 2, 21, 3, 17, 2, 16, F32)],
    "far": [(3, 1, 1, 18, 3, 17, 2, 16, F32), (1, 3, 3, 3, 3, 17, 2, 16, F32)],
}


def kernel_of(components: int, G: int, J: int) -> Leaves:
    rate_RG = torch.logspace(-2, 0.2, components, device=DEVICE)[:, None].repeat(1, G)
    return {"rate": rate_RG * (1 + 0.1 * uniform(components, G)), "weight": uniform(components, G, J) + 0.1}


def block_rows(B: int, G: int, J: int, T: int, F: int, V: int, dtype: torch.dtype) -> Leaves:
    torch.manual_seed(B + T)
    return {
        "q": normal(B, G, J, T, F, dtype=dtype),
        "k": normal(B, G, T, F, dtype=dtype),
        "v": normal(B, G, T, V, dtype=dtype),
    }


@cases("toeplitz")
def _(grid: str) -> Iterator[Case]:
    from surgery.mixers.masks.toeplitz_block_mixing import toeplitz_bidirectional, toeplitz_causal

    for B, G, J, T, F, V, R, block, dtype in sizes_of(BLOCKS, grid):
        for way in ("whole", "goes on", "both ways"):
            rows = block_rows(B, G, J, T, F, V, dtype)
            rows["start"] = positions(B, way == "goes on")
            rows |= {"state": normal(B, R, G, F, V)} if way == "goes on" else {}

            def call(x: Leaves, T: int = T, block: int = block, way: str = way) -> list[Any]:
                given = x["q"], x["k"], x["v"], x["rate"], x["weight"]
                if way == "both ways":
                    return [toeplitz_bidirectional(*given, block)]
                count, state = torch.full_like(x["start"], T), x.get("state")  # states come out where one went in
                place = {"start_B": x["start"], "count_B": count, "block": block, "chunk": block}
                return [*toeplitz_causal(*given, first_BRGFV=state, **place)][: 1 if state is None else 2]

            yield Case(f"{B} x {G} x {J} heads, {T} tokens of {F} x {V}, {way}", dtype, B * G * J * -(-T // block), rows, call,
                       kernel_of(R, G, J), names=("toeplitz_bidirectional" if way == "both ways" else "toeplitz_causal",))  # fmt: skip
            if grid in ("tiny", "far") and way == "goes on":
                return


@cases("toeplitz_step")
def _(grid: str) -> Iterator[Case]:
    from surgery.mixers.masks.toeplitz_block_mixing import toeplitz_step

    for B, G, J, F, V, dtype in sizes_of(STEPS, grid):
        rows = {**block_rows(B, G, J, 1, F, V, dtype), "state": normal(B, 3, G, F, V)}
        rows |= {"start": positions(B, True), "count": (torch.arange(B, device=DEVICE) % 3 > 0).long()}
        rows["v"] = rows["v"] * rows["count"][:, None, None, None].to(dtype)

        def call(x: Leaves) -> list[Any]:
            operands = x["q"], x["k"], x["v"], x["rate"], x["weight"]
            place = {"start_B": x["start"], "count_B": x["count"], "block": 16}
            return [*toeplitz_step(*operands, sum_BRGFV=x["state"], **place)]

        yield Case(f"a token of {B} x {G} x {J} heads, {F} x {V}", dtype, B * G * J, rows, call, kernel_of(3, G, J),
                   names=("toeplitz_step",), gradients=False)  # fmt: skip


@cases("block_scan")
def _(grid: str) -> Iterator[Case]:
    from surgery.mixers.masks.toeplitz_block_mixing import block_scan, block_scan_bidirectional

    sizes = {
        "full": [(64, 4, 2, 65, 16, 17, 4, BF16), (4000, 16, 1, 5, 8, 9, 3, F32), (2, 3, 4, 1000, 32, 32, 8, F32)],
        "reduced": [(30, 3, 2, 21, 5, 7, 3, F32)],
        "tiny": [(2, 1, 2, 19, 3, 5, 2, F32)],
    }
    for B, G, J, M, F, V, R, dtype in sizes_of(sizes, grid):
        for both in (False, True):
            rows = {"x": normal(B, G, M, F, V, dtype=dtype)}
            if not both:
                rows |= {"first": normal(B, R, G, F, V), "count": (torch.arange(B, device=DEVICE) * 7 + M) % (M + 1)}

            def call(x: Leaves, both: bool = both) -> list[Any]:
                if both:
                    return [block_scan_bidirectional(x["x"], x["rate"], x["weight"])]
                return [*block_scan(x["x"], x["rate"], x["weight"], x["first"], x["count"])]

            yield Case(f"{B} x {G} x {J} heads, {M} blocks of {F} x {V}{', both ways' if both else ''}", dtype, B * G * J * M,
                       rows, call, kernel_of(R, G, J), names=("block_scan_bidirectional" if both else "block_scan",))  # fmt: skip


@cases("blocks")
def _(grid: str) -> Iterator[Case]:
    from surgery.mixers.masks.block_mixing import blocks_bidirectional, blocks_from_zero, pad_blocks

    for B, G, J, T, F, V, _, block, dtype in sizes_of(BLOCKS, grid):
        for both in (False, True):
            count = -(-T // block) + 1

            def call(x: Leaves, block: int = block, both: bool = both, count: int = count) -> list[Any]:
                if both:
                    return [blocks_bidirectional(x["q"], x["k"], x["v"], x["matrix"], block)]
                operands = x["q"], x["k"], x["v"], x["matrix"].tril()
                out, sums = blocks_from_zero(*operands, block, chunk=block, keep=True)
                assert sums is not None
                return [
                    out,
                    pad_blocks(sums, count),
                ]  # one may hold the empty block behind the last token, the other not

            yield Case(f"{B} x {G} x {J} heads, {T} tokens of {F} x {V}{', both ways' if both else ''}", dtype,
                       B * G * J * count, block_rows(B, G, J, T, F, V, dtype), call,
                       {"matrix": normal(G, J, count, count) / count**0.5},
                       names=("blocks_bidirectional" if both else "blocks_from_zero",))  # fmt: skip


# tokens, c, d, b, a, rank, inputs, outputs, dtype, tokens of a small call
LINEARS = {
    "full": [
        (65536, 32, 32, 32, 32, 1, None, None, BF16, 9001),
        (8191, 16, 16, 16, 16, 2, None, None, F32, 1001),
        (20001, 5, 7, 3, 11, 1, 33, 31, F32, 997),
        (4097, 64, 64, 64, 64, 4, None, None, BF16, 300),
        (16, 64, 64, 64, 64, 1, None, None, BF16, 1),
        (15, 5, 11, 17, 9, 3, 52, 150, F32, 1),
        (300, 4, 512, 4, 512, 20, None, None, BF16, 17),
    ],
    "reduced": [(513, 5, 7, 3, 11, 2, 33, 31, F32, 100), (7, 5, 11, 17, 9, 3, 52, 150, F32, 1)],
    "tiny": [(21, 2, 7, 3, 11, 2, 13, 31, F32, 10)],
    "far": [(21, 2, 7, 3, 11, 2, 13, 31, F32, 10), (3, 2, 7, 3, 11, 2, 13, 31, F32, 10)],
}


def linears(grid: str, way: str) -> Iterator[Case]:
    from surgery.structures.btt import btt_linear

    load_kernels()
    for N, c, d, b, a, s, inputs, out, dtype, step in sizes_of(LINEARS, grid):
        if way == "dense" and max(a, d) > 128:
            continue
        torch.manual_seed(N)
        width, out = inputs or c * d, out or b * a
        shared = {
            "right": normal(c, d, b, s) / d**0.5,
            "left": normal(b, c, s, a) / (c * s) ** 0.5,
            "offset": normal(out),
        }
        shared = {name: x.to(dtype) for name, x in shared.items()}
        op: Any = btt_linear
        stand_in = next(kernel for kernel in op.kernels if kernel.implementation == way)

        def of(function: Any, out: int = out) -> Callable[[Leaves], list[Any]]:
            return lambda leaves: [function(*(leaves[name] for name in ("x", "right", "left", "offset")), out)]

        for training in (True, False):
            name = (
                f"{N} tokens, {c} x {d} to {b} x {a} blocks of rank {s}, "
                f"{'with gradients' if training else 'inference'}"
            )
            yield Case(name, dtype, N, {"x": normal(N, width, dtype=dtype)}, of(op.reference), shared, of(stand_in.run),
                       gradients=training, step=step, sample=64)  # fmt: skip


@cases("btt")
def _(grid: str) -> Iterator[Case]:
    return linears(grid, "kernel")


@cases("btt_dense")
def _(grid: str) -> Iterator[Case]:
    return linears(grid, "dense")


@cases("btt_products")
def _(grid: str) -> Iterator[Case]:
    return linears(grid, "products")


# -- low rank --------------------------------------------------------------------------------------------------------
LOW_RANKS = {  # rows (one token each, in calls of up to four), inputs, ranks, outputs, dtype
    "full": [
        (5000, 300, (24, 8, 9), (65, 17, 17), F32), (2000, 2048, (512, 192, 192), (2048, 512, 512), BF16),
        (500, 2048, (768, 768), (8192, 8192), BF16), (300, 5001, (33,), (4097,), F32),
    ],
    "reduced": [(40, 300, (24, 8, 9), (65, 17, 17), F32), (20, 2048, (192, 192), (512, 511), BF16), (12, 5001, (33,), (97,), F32)],
    "tiny": [(6, 40, (7, 3), (33, 20), F32), (5, 300, (24,), (65,), F32)],
    "far": [(4, 40, (7, 3), (33, 20), F32)],
}  # fmt: skip


@cases("low_rank")
def _(grid: str) -> Iterator[Case]:
    from surgery.structures.grouped import low_rank_group, low_rank_stack
    from surgery.structures.low_rank import low_rank_linear

    for N, inputs, ranks, outs, dtype in sizes_of(LOW_RANKS, grid):
        torch.manual_seed(N)
        shared = {"bias": normal(sum(outs))}
        for m, (rank, out) in enumerate(zip(ranks, outs)):
            shared |= {f"right {m}": normal(rank, inputs) / inputs**0.5, f"left {m}": normal(1, out, rank) / rank**0.5}
        shared = {name: x.to(dtype) for name, x in shared.items()}

        def call(leaves: Leaves, outs: tuple[int, ...] = outs) -> list[torch.Tensor | None]:
            biases = tuple(b.clone() for b in leaves["bias"].split(outs))
            rights, lefts = (tuple(leaves[f"{name} {m}"] for m in range(len(outs))) for name in ("right", "left"))
            parts = []
            for x in leaves["x"].split(4):  # more tokens run as PyTorch's products
                if len(outs) == 1:
                    parts.append((low_rank_linear(x, rights[0], lefts[0], biases[0]),))
                else:
                    parts.append(low_rank_group(x, rights, lefts, biases))
            return [torch.cat(y) for y in zip(*parts)]

        name = f"{N} tokens, {inputs} to {outs} of rank {ranks}"
        names = ("low_rank_linear" if len(outs) == 1 else "low_rank_group",)
        yield Case(name, dtype, N, {"x": normal(N, inputs, dtype=dtype)}, call, shared, names=names,
                   gradients=False, step=3, sample=16)  # fmt: skip
        if len(outs) == 1:
            continue

        def stacked(leaves: Leaves, count: int = len(outs)) -> list[torch.Tensor | None]:
            right, lefts = (torch.cat([leaves[f"right {m}"] for m in range(count)]),
                            tuple(leaves[f"left {m}"] for m in range(count)))  # fmt: skip
            return [torch.cat([low_rank_stack(x, right, lefts) for x in leaves["x"].split(4)])]

        yield Case(f"{name}, side by side", dtype, N, {"x": normal(N, inputs, dtype=dtype)}, stacked, shared,
                   names=("low_rank_stack",), gradients=False, step=3, sample=16)  # fmt: skip


# tokens, groups, inputs, outputs, bits, group of a scale, dtype
QUANTIZED: dict[str, list[tuple[int, int, int, int, int, int | None, torch.dtype]]] = {
    "full": [
        (1, 1, 4096, 14336, 8, None, BF16), (16, 1, 4097, 11007, 8, None, BF16), (64, 1, 4096, 4096, 4, 64, BF16),
        (7, 64, 64, 512, 8, 32, BF16), (1000, 4, 1471, 2049, 4, 32, torch.float16), (33, 1, 85, 70001, 4, 256, F32),
    ],
    "reduced": [(16, 1, 2049, 1023, 8, None, BF16), (33, 4, 471, 257, 4, 32, torch.float16), (3, 1, 85, 70001, 4, 64, F32)],
    "tiny": [(5, 2, 37, 33, 8, None, F32), (3, 1, 85, 17, 4, 32, F32)],
    "far": [(3, 1, 40, 33, 4, 8, F32)],
}  # fmt: skip


@cases("quantized")
def _(grid: str) -> Iterator[Case]:
    from surgery.structures.quantized import FEW_TOKENS, Storage, dequantize_rows, quantize_rows, quantized_product

    for N, G, inputs, outs, bits, group, dtype in sizes_of(QUANTIZED, grid):
        torch.manual_seed(N)
        storage = Storage(bits, group)
        integers, scale = quantize_rows(normal(G, outs, inputs, dtype=dtype) / inputs**0.5, storage)
        weight = dequantize_rows(integers, scale, inputs, storage)

        def multiplied_out(leaves: Leaves) -> list[torch.Tensor | None]:
            return [torch.einsum("ngk,grk->ngr", leaves["x"], leaves["weight"])]

        def call(leaves: Leaves, storage: Storage = storage) -> list[torch.Tensor | None]:
            stored, parts = (leaves["integers"], leaves["scale"], storage), leaves["x"].split(FEW_TOKENS)
            return [torch.cat([quantized_product(x, *stored) for x in parts])]  # more tokens are PyTorch's product

        name = f"{N} tokens, {G} x {inputs} to {outs}, {storage.bits} bits, groups of {storage.group}"
        shared = {"weight": weight, "integers": integers, "scale": scale}
        yield Case(name, dtype, N, {"x": normal(N, G, inputs, dtype=dtype)}, multiplied_out, shared, call,
                   names=("quantized_product",), gradients=False, step=7, sample=16)  # fmt: skip


# tokens, inputs
TOKENS_IN_FP8: dict[str, list[tuple[int, int]]] = {
    "full": [(65536, 64), (8192, 4096), (4099, 11007), (17, 70001)],
    "reduced": [(4099, 64), (33, 20001)],
    "tiny": [(5, 37), (3, 20001)],
    "far": [(3, 40)],
}


@cases("fp8_tokens")
def _(grid: str) -> Iterator[Case]:
    from surgery.structures.fp8 import LARGEST, quantize_tokens

    def exact(leaves: Leaves) -> list[torch.Tensor | None]:
        return [leaves["x"].abs().amax(-1, keepdim=True) / LARGEST, leaves["x"] if CUDA else None]

    def rounded(leaves: Leaves) -> list[torch.Tensor | None]:
        """The interpreter rounds some values to e4m3 wrongly."""
        x, scale = quantize_tokens(leaves["x"])
        return [scale, x.float() * scale if CUDA else None]

    for N, inputs in sizes_of(TOKENS_IN_FP8, grid):
        torch.manual_seed(N)
        yield Case(f"{N} tokens of {inputs}", BF16, N, {"x": normal(N, inputs, dtype=BF16)}, exact, {}, rounded,
                   names=("quantize_tokens",), gradients=False, step=7, sample=16)  # fmt: skip


# -- running ---------------------------------------------------------------------------------------------------------
@contextmanager
def interpreter_settings() -> Iterator[None]:
    """What Triton's interpreter needs: loops whose bounds are tensors, small tiles."""
    if CUDA:
        yield
        return
    import pytest
    from helpers.kernel_rows import patch_tensor_loops
    from triton.runtime import interpreter

    from surgery.kernels import local_attention, mlr_attention
    from surgery.kernels.local_attention import plan as local_attention_plan
    from surgery.kernels.mlr_attention import decode as mlr_attention_decode

    def bounds(*args: Any) -> range:
        return range(*(int(a.handle.data.item()) if hasattr(a, "handle") else int(a) for a in args))

    with pytest.MonkeyPatch.context() as patch:
        patch_tensor_loops(patch)
        patch.setattr(interpreter, "range", bounds, raising=False)
        tiles = mlr_attention.AttentionTiles(16, 16, 4, 1, run=2, hold=True)
        patch.setattr(mlr_attention, "forward_tiles", lambda *_: tiles)
        patch.setattr(mlr_attention, "backward_tiles", lambda *_: (tiles, tiles))
        near_tiles = local_attention_plan.LocalTiles(16, 16, 4, 1)
        patch.setattr(local_attention, "forward_tiles", lambda _: near_tiles)
        patch.setattr(local_attention, "backward_tiles", lambda _: near_tiles)
        patch.setattr(local_attention_plan, "MIN_SPAN", 16)
        patch.setattr(mlr_attention_decode, "TILE_SLOTS", 16)
        patch.setattr(mlr_attention_decode, "TARGET_PROGRAMS", 6)
        # An integer that does not fit its 32 bits is an error; tensors on a CPU are not copied back to where they are.
        options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
        patch.setattr(interpreter.interpreter_builder, "options", options)
        patch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)
        yield


@dataclass
class Total:
    calls: int = 0
    lanes: int = 0
    seconds: float = 0.0
    failures: int = 0
    left_out: int = 0

    def line(self) -> str:
        words = f"total: {self.calls} calls, {self.lanes} lanes, {self.seconds:.0f} seconds, {self.failures} failures"
        return words + (f", {self.left_out} operations not finished in time" if self.left_out else "")


def sweep(
    grid: str, only: list[str], seconds: float = float("inf"), guards: bool = True, say: Callable[[str], Any] = print
) -> Total:
    """One line a case. After a failure on a GPU the process is left: what follows an illegal access means nothing."""
    total, began = Total(), time.monotonic()
    load_kernels()
    with interpreter_settings():
        for op in only:
            for case in CASES[op](grid):
                if time.monotonic() - began > seconds:
                    total.left_out += 1
                    break
                start = time.monotonic()
                try:
                    calls, most = (check_far if grid == "far" else check)(case, guards)
                    total.calls += calls
                    words = f"{calls} calls, worst {most:.2g} of tolerance"
                except Exception as error:
                    total.failures += 1
                    words = f"FAILED: {type(error).__name__}: {error}"
                    if not isinstance(error, AssertionError):
                        traceback.print_exc()
                total.lanes += case.lanes
                took = time.monotonic() - start
                dtype = str(case.dtype).removeprefix("torch.")
                say(f"{op}: {case.name}, {dtype}: {case.lanes} lanes, {took:.1f} seconds, {words}")
                if "CUDA error" in words or "illegal" in words:
                    total.seconds = time.monotonic() - began
                    return total
    total.seconds = time.monotonic() - began
    return total


def beside_each_other(grid: str, only: list[str], seconds: float, guards: bool, jobs: int) -> Total:
    """Each operation in a process of its own, `jobs` at a time: most of the time goes into compiling."""
    began, total = time.monotonic(), Total()

    def one(op: str) -> subprocess.CompletedProcess[str]:
        left = seconds - (time.monotonic() - began)
        words = [sys.executable, __file__, "--grid", grid, "--only", op, "--jobs", "1", "--seconds", str(max(left, 0))]
        return subprocess.run(
            words + ["--unguarded"] * (not guards), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    with ThreadPoolExecutor(jobs) as pool:
        for op, done in zip(only, pool.map(one, only)):
            lines = done.stdout.rstrip().splitlines()
            if not lines or not lines[-1].startswith("total: "):
                print("\n".join(lines[-30:]), f"\n{op}: FAILED: exit code {done.returncode}", flush=True)
                total.failures += 1
                continue
            print("\n".join(lines[:-1]), flush=True)
            numbers = [int(word) for word in lines[-1].replace(",", "").split() if word.isdigit()]
            total.calls, total.lanes = total.calls + numbers[0], total.lanes + numbers[1]
            total.failures += numbers[3]
            total.left_out += numbers[4] if len(numbers) > 4 else 0
    total.seconds = time.monotonic() - began
    return total


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check every GPU kernel at many lanes.")
    parser.add_argument("--grid", choices=GRIDS, default="full", help="sizes of the cases (default: full)")
    parser.add_argument(
        "--reduced", dest="grid", action="store_const", const="reduced", help="the same as --grid reduced"
    )
    parser.add_argument("--tiny", dest="grid", action="store_const", const="tiny", help="the same as --grid tiny")
    parser.add_argument(
        "--far", dest="grid", action="store_const", const="far", help="tiny cases whose rows lie 2^31 numbers apart"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="OP", default=list(CASES), choices=list(CASES), help="operations (default: all)"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no case after so many seconds (default: no limit)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=8 if CUDA else 1,
        help="operations at a time, a process each (default: 8, 1 without a GPU)",
    )
    parser.add_argument(
        "--unguarded",
        action="store_true",
        help="without guard bands, for compute-sanitizer, which sees where tensors end",
    )
    given = parser.parse_args(words)
    if given.jobs > 1 and len(given.only) > 1:
        total = beside_each_other(given.grid, given.only, given.seconds, not given.unguarded, given.jobs)
    else:
        total = sweep(given.grid, given.only, given.seconds, not given.unguarded, lambda line: print(line, flush=True))
    print(total.line(), flush=True)
    return 1 if total.failures or total.left_out else 0


if __name__ == "__main__":
    sys.exit(main())
