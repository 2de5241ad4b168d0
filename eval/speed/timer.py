"""Time implementations side by side: warm up each, then run all alternately; report medians.

    rows = Benchmark(device, ..).run(
        BenchmarkCase("attention, forward", x=8192, sizes={..}, implementations=[TimedImplementation("SDPA flash",
        make), ..])
    )

On a GPU, device events measure time, with the L2 cache flushed before each run. Launches are queued behind a pause as
long as they take, unless the case includes launch time or the host synchronizes. On a CPU the clock measures time. A
failure of one implementation (out of memory, unsupported) is noted in its row and does not stop the others.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from surgery.core.dispatch import KernelChoice, record_dispatch, use_kernels
from surgery.core.errors import SurgeryError
from surgery.planning.measured_times import CAPTURED, IN_A_ROW

FLUSH_BYTES = 2**27  # bytes, twice the L2 cache of an H200
CYCLES_PER_MS, MAX_PAUSE_MS = 2_000_000, 5.0  # of a GPU's clock in a millisecond, about; ms of a pause at most
LONG_RUN_MS = 1000.0  # ms of a run
Call = Callable[[], Any]
ResultRow = dict[str, Any]


class WorkEstimate(NamedTuple):
    """Least work of a run: bytes read and written once, and floating-point operations."""

    bytes: float
    flops: float


@dataclass
class TimedImplementation:
    """An implementation to be timed.

    Attributes:
        make: prepares the inputs and returns the run.
        choice: kernel choice during the run; with "kernel" or "products", an implementation for which none runs is not
            timed, because the reference would be measured in its place.
        times: calls per run.
        op, options: its key in kernels/tuning.json; op "original" is what others replace.
        way: implementation name in kernels/tuning.json if different from the choice.
    """

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
    """One column of a table: implementations at one size x, compared with the first.

    launches: whether times include the CPU's launch time. host: "no grad" or "grad" where the CPU's time per call is
    measured (eval/speed/host_time.py), without or with gradients recorded.
    """

    table: str
    x: int
    sizes: dict[str, Any]
    implementations: list[TimedImplementation]
    launches: bool = False
    host: Literal["no grad", "grad"] | None = None


class LastRun(NamedTuple):
    """The last run of an implementation in a table: size, ms, and the bytes and operations it took."""

    x: int
    ms: float
    work: WorkEstimate | None

    def growth(self, x: int, work: WorkEstimate | None) -> float:
        """Return a lower bound of time at size x over the time at the last size, proportional to x where the work is
        unknown.

        One token of a linear takes the time in which its weights are read, and 8,192 tokens do not take 8,192 times as
        long.
        """
        if work is None or self.work is None or not self.work.bytes or not self.work.flops:
            return x / self.x
        return min(work.bytes / self.work.bytes, work.flops / self.work.flops)


class TimedRun(NamedTuple):
    """A run: ms until the CPU had launched it and, on a GPU, the events around it."""

    launch: float
    events: tuple[Any, Any] | None

    def ms(self) -> float:
        """Milliseconds of the run."""
        return self.launch if self.events is None else self.events[0].elapsed_time(self.events[1])


class Benchmark:
    """Runs cases on one device.

    Args:
        budget_ms: time for the runs of one implementation at one size, in ms; at least `min_runs` runs.
        max_ms: implementations slower than this are not run again, nor at larger sizes (references: a third of this).
        deadline: when to stop, by time.monotonic().
    """

    def __init__(
        self, device: torch.device, budget_ms: float, max_ms: float, deadline: float = float("inf"), min_runs: int = 3
    ):
        self.device, self.budget_ms, self.max_ms, self.deadline, self.min_runs = (
            device,
            budget_ms,
            max_ms,
            deadline,
            min_runs,
        )
        self.last: dict[tuple[str, str], LastRun] = {}
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def run(self, case: BenchmarkCase) -> list[ResultRow]:
        """Time all implementations of a case and return their rows."""
        rows, calls = [], []
        for implementation in case.implementations:
            row: ResultRow = {
                "table": case.table,
                "x": case.x,
                "sizes": case.sizes,
                "rival": implementation.name,
                "ms": None,
            }
            if implementation.op is not None:
                row |= {
                    "op": implementation.op,
                    "way": implementation.way or implementation.choice,
                    "options": implementation.options,
                }
            rows.append(row)
            if note := self._skip_reason(case, implementation):
                row["note"] = note
                continue
            call = self._warm_up(implementation, row, case.launches)
            if call is not None:
                calls.append((implementation, call, row))
        self._run_in_turns([entry for entry in calls if entry[2]["ms"] < self.max_ms])
        for implementation, _, row in calls:
            self.last[case.table, implementation.name] = LastRun(case.x, row["ms"], implementation.work)
            for unit in ("ms", "launch"):
                if unit in row:
                    row[unit] /= implementation.times
        return rows

    def _skip_reason(self, case: BenchmarkCase, implementation: TimedImplementation) -> str | None:
        if time.monotonic() > self.deadline:
            return "time limit"
        last = self.last.get((case.table, implementation.name))
        max_ms = self.max_ms / 3 if implementation.choice == "reference" else self.max_ms
        if last is not None and case.x > last.x and last.ms * last.growth(case.x, implementation.work) > max_ms:
            return f"left out: {last.ms:,.3g} ms at {last.x:,}"
        return None

    def _warm_up(self, implementation: TimedImplementation, row: ResultRow, launches: bool) -> Call | None:
        """Compile and take a first time; return None on failure.

        An implementation is not warmed up again if a long run of it succeeded at a smaller size.
        """
        last = self.last.get((row["table"], implementation.name))
        warm = False
        if last is not None and row["x"] > last.x and implementation.choice != "kernel":
            warm = last.ms * last.growth(row["x"], implementation.work) > LONG_RUN_MS
        call = self.prepare(implementation, row, warm)
        if call is None:
            return None
        try:
            with use_kernels(implementation.choice):
                row["ms"], launch, row["peak"] = self._time_with_memory(call)
                if (
                    not launches
                    and self.flush is not None
                    and row["ms"] < LONG_RUN_MS / 10
                    and not self._synchronizes(call)
                ):
                    row["launch"] = min(launch, self._time_with_memory(call)[1], self._time_with_memory(call)[1])
                if row["ms"] > self.max_ms and self.min_runs > 1:  # that run may have compiled for this size
                    row["ms"] = min(row["ms"], self._time_ms(call))
            return call
        except Exception as error:
            self._note_failure(error, row)
        return None

    def prepare(self, implementation: TimedImplementation, row: ResultRow, warm: bool = False) -> Call | None:
        """Return the run, called once unless it is `warm`; None, with a note in the row, if it fails or no kernel
        computes it.
        """
        try:
            with use_kernels(implementation.choice), record_dispatch() as used:
                call = implementation.make()
                if not warm:
                    self._time_ms(call)
            if implementation.choice in ("kernel", "products") and not used:
                row["note"] = "no kernel"
                return None
            row["kernels"] = sorted(used)
            return call
        except Exception as error:
            self._note_failure(error, row)
        return None

    def _note_failure(self, error: Exception, row: ResultRow) -> None:
        """Say in the row what failed, and free the GPU's memory."""
        first = (str(error).splitlines() or [""])[0][:160]
        row["note"] = (
            "out of memory" if isinstance(error, torch.OutOfMemoryError) else f"{type(error).__name__}: {first}"
        )
        self._recover_gpu(row)

    def _recover_gpu(self, row: ResultRow) -> None:
        gc.collect()
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        except RuntimeError:
            raise SurgeryError(
                f"{row['rival']} at {row['x']:,} left the GPU unusable ({row['note']}); please report it. Name the "
                "others "
                "with --only to measure without it"
            ) from None

    def _time_with_memory(self, call: Call) -> tuple[float, float, int | None]:
        """Return ms, ms until all was launched, and bytes allocated above what was there before."""
        if self.device.type != "cuda":
            return self._time_ms(call), 0.0, None
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        timed_run = self._run_once(call)
        torch.cuda.synchronize(self.device)
        return timed_run.ms(), timed_run.launch, torch.cuda.max_memory_allocated(self.device) - before

    def _synchronizes(self, call: Call) -> bool:
        """Return whether the host waits for the device; launches then cannot be queued, and the time includes them."""
        try:
            with forbid_synchronization():
                call()
        except RuntimeError as error:
            if "synchronizing" in str(error):
                return True
            raise
        return False

    def _run_in_turns(self, entries: list[tuple[TimedImplementation, Call, ResultRow]]) -> None:
        """Set the medians of as many runs as `budget_ms` allows, at most 50."""
        run_counts = [
            max(self._min_runs(row), min(50, int(self.budget_ms / max(row["ms"], 1e-3)))) for _, _, row in entries
        ]
        taken: list[list[TimedRun]] = [[] for _ in entries]
        for turn in range(max(run_counts, default=0)):
            for (implementation, call, row), runs, into in zip(entries, run_counts, taken):
                if turn < runs and (turn < 1 or time.monotonic() < self.deadline + 2):
                    with use_kernels(implementation.choice):
                        into.append(self._run_once(call, row.get("launch", 0.0)))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for (_, _, row), runs_taken in zip(entries, taken):
            row["ms"], row["runs"] = median(timed_run.ms() for timed_run in runs_taken), len(runs_taken)

    def _min_runs(self, row: ResultRow) -> int:
        return self.min_runs if row["ms"] < LONG_RUN_MS / 10 else 1

    def _time_ms(self, call: Call) -> float:
        timed_run = self._run_once(call)
        if self.flush is not None:
            torch.cuda.synchronize(self.device)
        return timed_run.ms()

    def _run_once(self, call: Call, pause: float = 0.0) -> TimedRun:
        """Run once. pause: ms for which the device waits while the CPU launches."""
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
    """Return the call without gradients."""

    def run() -> None:
        with torch.no_grad():
            call()

    return run


def backward(call: Call, leaves: list[Tensor]) -> Call:
    """Return forward and backward to every leaf; the incoming gradient is drawn once."""
    gradients: list[Tensor] = []
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def run() -> None:
        with torch.enable_grad():
            out = call()
        if not gradients:
            gradients.append(torch.randn_like(out))
        torch.autograd.grad(out, leaves, gradients[0], allow_unused=True)

    return run


def graph_title(device: torch.device) -> str:
    """Return how `graph_call` runs its calls, as the titles of tables end (surgery.planning.measured_times)."""
    return CAPTURED if device.type == "cuda" else IN_A_ROW


def graph_call(calls: list[Call], device: torch.device) -> Call:
    """Return all calls as one CUDA graph, free of launch time; on a CPU, one after the other."""

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
    captured = graph, calls, stream  # replays read the memory of all that was captured

    def replay() -> None:
        captured[0].replay()

    return replay


@contextmanager
def forbid_synchronization() -> Iterator[None]:
    """Raise RuntimeError if the host waits for the device.

    Such a call cannot be captured, and the attempt would leave random generator and allocator unusable.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
