"""Rivals timed side by side: each is warmed up, then all run in turns; medians.

    rows = Race(device, ..).run(Heat("attention, forward", x=8192, sizes={..}, rivals=[Rival("SDPA flash", make), ..]))

On a GPU time is taken by device events with the L2 cache flushed before each run, and, unless a heat counts the CPU's
part or the host waits for the device, with the launches queued behind a pause as long as they take; else by the clock. Nothing that goes
wrong with one rival (no memory, a refusal) stops the others: its row says so.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgery.core.dispatch import KernelChoice, use_kernels, record_dispatch
from surgery.core.errors import SurgeryError

FLUSH_BYTES = 2**27  # bytes, twice the L2 cache of an H200
CYCLES_PER_MS, MAX_PAUSE_MS = 2_000_000, 5.0  # of a GPU's clock in a millisecond, about; ms of a pause at most
LONG_RUN_MS = 1000.0  # ms of a run
Call = Callable[[], Any]
ResultRow = dict[str, Any]


class WorkEstimate(NamedTuple):
    """The least that a run must do: bytes read and written once, floating-point operations."""

    bytes: float
    flops: float


@dataclass
class TimedImplementation:
    """make: lays out what a run needs and returns the run. times: calls in one run. op, options: what kernels/tuning.json
    calls this, and what it depends on beside the heat's sizes; way: where it is not the choice. "original" is what others
    replace. A rival of the choice
    "kernel" for which no kernel came by is not timed: the reference would pass for it."""

    name: str
    make: Callable[[], Call]
    choice: KernelChoice = "measured"
    work: WorkEstimate | None = None
    times: int = 1
    op: str | None = None
    options: dict[str, int] = field(default_factory=dict)
    way: str | None = None


@dataclass
class BenchmarkCase:
    """One column of a table: rivals at one size x, the first of them the one that others are compared with. launches:
    whether a run's time is to hold what the CPU takes to launch it."""

    table: str
    x: int
    sizes: dict[str, Any]
    rivals: list[TimedImplementation]
    launches: bool = False


class TimedRun(NamedTuple):
    """A run: ms until the CPU was done with it, and the events around it on a GPU, to be read once it is over."""

    launch: float
    events: tuple[Any, Any] | None

    def ms(self) -> float:
        return self.launch if self.events is None else self.events[0].elapsed_time(self.events[1])


class Benchmark:
    """patience: ms after which a rival is not run again, here nor at sizes to come whose run would take longer (a
    reference's is a third of that). spend: ms
    for the runs of a rival at a size, at least `least` of them. ends: when to stop, by time.monotonic()."""

    def __init__(self, device: torch.device, spend: float, patience: float, ends: float = float("inf"), least: int = 3):
        self.device, self.spend, self.patience, self.ends, self.least = device, spend, patience, ends, least
        self.last: dict[tuple[str, str], tuple[int, float]] = {}
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def run(self, heat: BenchmarkCase) -> list[ResultRow]:
        rows, calls = [], []
        for rival in heat.rivals:
            row: ResultRow = {"table": heat.table, "x": heat.x, "sizes": heat.sizes, "rival": rival.name, "ms": None}
            if rival.op is not None:
                row |= {"op": rival.op, "way": rival.way or rival.choice, "options": rival.options}
            rows.append(row)
            if note := self._left_out(heat, rival):
                row["note"] = note
                continue
            call = self._started(rival, row, heat.launches)
            if call is not None:
                calls.append((rival, call, row))
        self._turns([entry for entry in calls if entry[2]["ms"] < self.patience])
        for rival, _, row in calls:
            self.last[heat.table, rival.name] = heat.x, row["ms"]
            for part in ("ms", "launch"):
                if part in row:
                    row[part] /= rival.times
        return rows

    def _left_out(self, heat: BenchmarkCase, rival: TimedImplementation) -> str | None:
        if time.monotonic() > self.ends:
            return "time limit"
        x, ms = self.last.get((heat.table, rival.name), (heat.x, 0.0))
        patience = self.patience / 3 if rival.choice == "reference" else self.patience
        if heat.x > x and ms * heat.x / x > patience:
            return f"left out: {ms:,.0f} ms at {x:,}"
        return None

    def _started(self, rival: TimedImplementation, row: ResultRow, launches: bool) -> Call | None:
        """Warms up, which compiles, and takes a first time; None where that goes wrong. A long run that did well at a
        smaller size is warm."""
        x, ms = self.last.get((row["table"], rival.name), (row["x"], 0.0))
        warm = row["x"] > x and ms * row["x"] / x > LONG_RUN_MS and rival.choice != "kernel"
        try:
            with use_kernels(rival.choice), record_dispatch() as used:
                call = rival.make()
                if not warm:
                    self._ms(call)
            if rival.choice == "kernel" and not used:
                row["note"] = "no kernel"
                return None
            row["kernels"] = sorted(used)
            with use_kernels(rival.choice):
                row["ms"], launch, row["peak"] = self._second(call)
                if not launches and self.flush is not None and row["ms"] < LONG_RUN_MS / 10 and not self._waits(call):
                    row["launch"] = min(launch, self._second(call)[1], self._second(call)[1])
                if row["ms"] > self.patience and self.least > 1:  # was that compiling too, for another kind of size?
                    row["ms"] = min(row["ms"], self._ms(call))
            return call
        except torch.OutOfMemoryError:
            row["note"] = "out of memory"
        except Exception as error:
            row["note"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        self._recovered(row)
        return None

    def _recovered(self, row: ResultRow) -> None:
        gc.collect()
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        except RuntimeError:
            raise SurgeryError(
                f"{row['rival']} at {row['x']:,} left the GPU unusable ({row['note']}); please report it. Name the others "
                "with --only to measure without it"
            ) from None

    def _second(self, call: Call) -> tuple[float, float, int | None]:
        """ms, those until all was launched, and bytes allocated above what lay there before."""
        if self.device.type != "cuda":
            return self._ms(call), 0.0, None
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        mark = self._marked(call)
        torch.cuda.synchronize(self.device)
        return mark.ms(), mark.launch, torch.cuda.max_memory_allocated(self.device) - before

    def _waits(self, call: Call) -> bool:
        """Whether the host waits for the device: then launches cannot be queued, and the time holds them."""
        try:
            with forbid_synchronization():
                call()
        except RuntimeError as error:
            if "synchronizing" in str(error):
                return True
            raise
        return False

    def _turns(self, entries: list[tuple[TimedImplementation, Call, ResultRow]]) -> None:
        """The medians of as many runs as `spend` pays for, at most 50."""
        wanted = [max(self._least(row), min(50, int(self.spend / max(row["ms"], 1e-3)))) for _, _, row in entries]
        taken: list[list[TimedRun]] = [[] for _ in entries]
        for turn in range(max(wanted, default=0)):
            for (rival, call, row), runs, into in zip(entries, wanted, taken):
                if turn < runs and (turn < 1 or time.monotonic() < self.ends + 2):
                    with use_kernels(rival.choice):
                        into.append(self._marked(call, row.get("launch", 0.0)))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for (_, _, row), marks in zip(entries, taken):
            row["ms"], row["runs"] = median(mark.ms() for mark in marks), len(marks)

    def _least(self, row: ResultRow) -> int:
        return self.least if row["ms"] < LONG_RUN_MS / 10 else 1

    def _ms(self, call: Call) -> float:
        mark = self._marked(call)
        if self.flush is not None:
            torch.cuda.synchronize(self.device)
        return mark.ms()

    def _marked(self, call: Call, pause: float = 0.0) -> TimedRun:
        """A run. pause: ms in which the CPU launches ahead."""
        events = None
        if self.flush is not None:
            self.flush.zero_()
            if pause:
                torch.cuda._sleep(int(min(1.2 * pause, MAX_PAUSE_MS) * CYCLES_PER_MS))
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
        start = time.perf_counter()
        call()
        launch = (time.perf_counter() - start) * 1e3
        if events is not None:
            events[1].record()
        return TimedRun(launch, events)


# -- runs ----------------------------------------------------------------------------------------------
def forward(call: Call) -> Call:
    def run() -> None:
        with torch.no_grad():
            call()

    return run


def backward(call: Call, leaves: list[Tensor]) -> Call:
    """Forward and backward, to every leaf; the gradient that comes in is drawn once."""
    given: list[Tensor] = []
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def run() -> None:
        with torch.enable_grad():
            out = call()
        if not given:
            given.append(torch.randn_like(out))
        torch.autograd.grad(out, leaves, given[0], allow_unused=True)

    return run


def graph_call(calls: list[Call], device: torch.device) -> Call:
    """All calls as one CUDA graph: what they take without the launches of a busy CPU. Elsewhere one after the other."""

    def one_by_one() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return one_by_one
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), forbid_synchronization():
        for call in calls[:2]:
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        one_by_one()
    kept = graph, calls, stream  # replays read the memory of all that was captured

    def replay() -> None:
        kept[0].replay()

    return replay


@contextmanager
def forbid_synchronization() -> Iterator[None]:
    """RuntimeError where the host waits for the device: such a call cannot be captured, and trying leaves the random
    generator and the allocator unusable."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
