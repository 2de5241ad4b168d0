"""Sweeps of the papers' experiments: runs, their JSON lines, rates tuned for each method alike, and paired intervals.

    experiment.train(setting, cell, runs, device)      one stack of runs of one shape: a row for each
    run_sweep(experiment, ..)                          trains what the file lacks; may be killed at any moment
    paired_difference(rows, a, b)                      mean over pairs of equal width and seed, with its 95% interval

A sweep first trains every cell (method, width) with all rates and the first `rate_seeds` seeds. If the best rate lies
at an end of the grid, one more value beyond this end is tried. Then come the other seeds at the best rate, or at all
rates (`every_rate`). The best rate has the lowest mean `loss` of its rows, which is of held-out examples, over the
seeds that have rows at all rates, for every method alike.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from surgery.core.errors import SurgeryError
from surgery.eval.results.statistics import student_quantile

KEYS = ("setting", "method", "width", "rate", "seed")  # of a row: what was run
MAX_LINE = 100_000  # characters of a row
PHASES = ("rates", "beyond", "seeds")  # of the runs of a cell: rates of the grid, one beyond it, the other seeds
THREAD_STACK = 256 << 20  # bytes, of each thread: a launch of a CUDA graph with many nodes may overflow the default
Row = dict[str, Any]
BestRows = dict[tuple[str, int, int], Row]  # (method, width, seed) -> row at the best rate of its cell


class Cell(NamedTuple):
    """A method at a width."""

    method: str
    width: int


@dataclass(frozen=True)
class Setting:
    """Size of a sweep.

    where: `cpu` or `gpu`. rates: peak learning rates that every method tries. seeds: runs at the best rate. steps,
    rows, length: of training. options: what only the experiment reads. graph: whether a GPU records the step as a CUDA
    graph. every_rate: train all seeds at every rate, for claims about the best rate itself. rate_seeds: seeds on which
    rates are chosen. as_printed: whether data, sizes and rates are the paper's.
    """

    name: str
    where: str
    widths: tuple[int, ...]
    methods: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: int
    steps: int
    rows: int
    length: int
    layers: int
    options: dict[str, Any]
    graph: bool = True
    every_rate: bool = False
    rate_seeds: int = 2
    as_printed: bool = False

    def lengthened(self, steps: int) -> Setting:
        """Return the setting with another number of steps, whose rows have a name of their own: `gpu@20000`."""
        return self if steps == self.steps else replace(self, name=f"{self.name}@{steps}", steps=steps)

    @property
    def runs(self) -> int:
        """Number of runs, without rates beyond the grid."""
        return len(self.cells) * (self.choosing_runs + self.later_runs)

    @property
    def choosing_seeds(self) -> int:
        """Number of seeds that train at all rates."""
        return self.seeds if self.every_rate else min(self.rate_seeds, self.seeds)

    @property
    def choosing_runs(self) -> int:
        """Number of runs of a cell that choose its rate."""
        return self.choosing_seeds * len(self.rates)

    @property
    def later_runs(self) -> int:
        """Number of runs of a cell at the other seeds."""
        return self.seeds - self.choosing_seeds

    @property
    def cells(self) -> list[Cell]:
        """Every method at `widths`, or at those that options["widths"] gives it; the narrow ones first."""
        own = self.options.get("widths", {})
        return sorted((Cell(m, w) for m in self.methods for w in own.get(m, self.widths)), key=lambda cell: cell.width)


class Difference(NamedTuple):
    """Mean of paired differences, its standard error and 95% interval (Student's t); the interval is infinite for one
    pair. unit: of `pairs`. lost: degrees of freedom that estimates take away.
    """

    mean: float
    error: float
    low: float
    high: float
    pairs: int
    unit: str = "pairs"
    lost: int = 1

    @property
    def freedom(self) -> float:
        """Degrees of freedom."""
        return float(self.pairs - self.lost)

    def at_level(self, level: float) -> Difference:
        """Return the difference with the interval of another level."""
        if self.freedom < 1:
            return self._replace(low=-math.inf, high=math.inf)
        reach = student_quantile(self.freedom, level) * self.error if self.error else 0.0
        return self._replace(low=self.mean - reach, high=self.mean + reach)

    def __str__(self) -> str:
        return f"{self.mean:+.4g} [{self.low:+.4g}, {self.high:+.4g}], {self.pairs} {self.unit}"


# -- rows -----------------------------------------------------------------------------------------------
def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file, without a last line that a killed run did not finish.

    Raises SurgeryError for other damage.
    """
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        rows.append(_parse_row(line, f"{path}, line {number}"))
    return rows


def _parse_row(line: str, where: str) -> Row:
    try:
        row = json.loads(line) if len(line) <= MAX_LINE else None
    except (ValueError, RecursionError):
        row = None
    kinds: dict[str, Any] = {
        "setting": str,
        "method": str,
        "width": int,
        "rate": (int, float),
        "seed": int,
        "loss": (int, float, type(None)),
    }
    if not isinstance(row, dict) or not all(isinstance(row.get(k, ...), kind) for k, kind in kinds.items()):
        raise SurgeryError(
            f"{where} is not a result row, which is a JSON object with {', '.join(kinds)}. Remove the line; `run` "
            "trains it again."
        )
    return row


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append rows, each complete or not at all; a part of a line that a killed run left is removed first.

    Several processes may append to one file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        file.flush()
        os.fsync(file.fileno())


def key_of(row: Row) -> tuple[Any, ...]:
    """Return what identifies the run of a row."""
    return tuple(row[name] for name in KEYS)


# -- the sweep ------------------------------------------------------------------------------------------
TrainFn = Callable[[Setting, Cell, list[tuple[float, int]], Any], list[Row]]


class Turns:
    """Threads of which one runs at a time, in a fixed order, until it passes its turn on.

    Python code of two stacks never runs at once, so that it may change global state between two calls of `pass_on`;
    what they started on a GPU does.
    """

    def __init__(self) -> None:
        self.lock, self.running = threading.Lock(), False
        self.waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        """Wait for a turn."""
        with self.lock:
            if not self.running:
                self.running = True
                return
            mine = threading.Event()
            self.waiting.append(mine)
        mine.wait()

    def __exit__(self, *error: object) -> None:
        """Give the turn to the thread that waits longest."""
        with self.lock:
            if self.waiting:
                self.waiting.popleft().set()
            else:
                self.running = False

    def pass_on(self) -> None:
        """Let every thread that waits have a turn first. Without such threads, nothing happens."""
        if self.waiting:
            self.__exit__()
            self.__enter__()


TURNS = Turns()  # of the stacks that one process trains side by side


def run_sweep(
    setting: Setting,
    train: TrainFn,
    out: Path,
    device: Any,
    *,
    stack: Callable[[Cell], int],
    cells: list[Cell] | None = None,
    minutes: float = math.inf,
    say: Callable[[str], None] = print,
    side_by_side: int = 1,
    stream: Callable[[], AbstractContextManager[Any]] = nullcontext,
    origin: Row | None = None,
) -> bool:
    """Train the runs that `out` lacks and append their rows. Return whether all runs of the cells have rows.

    stack: the largest number of runs at once. cells: those to train; None: all of the setting. minutes: no stack is
    started whose forecast, from the time of earlier stacks of this call, ends later. side_by_side: number of cells that
    are trained at a time, each in a thread inside the context `stream()`. origin: what every row says about the
    machine and the code. Raises the error of the first cell that fails after the others are trained.
    """
    chosen = setting.cells if cells is None else cells
    left = [(phase, cell) for phase in PHASES for cell in chosen]
    busy: set[Cell] = set()
    began, slowest, stopped = time.monotonic(), 0.0, False
    errors: list[Exception] = []

    def next_part() -> tuple[str, Cell] | None:
        """Return the next phase of a cell of which no other thread trains a phase."""
        return next((part for part in left if part[1] not in busy), None)

    def train_part(phase: str, cell: Cell) -> None:
        nonlocal slowest, stopped
        for runs in _stacks(_missing(setting, cell, phase, read_rows(out)), stack(cell)):
            spent = time.monotonic() - began
            if stopped or spent + slowest * len(runs) > 60 * minutes:
                if not stopped:
                    say(f"stopped after {spent / 60:.1f} minutes; the same command goes on")
                stopped = True
                return
            start = time.monotonic()
            rows = train(setting, cell, runs, device)
            seconds = time.monotonic() - start
            slowest = max(slowest, seconds / len(runs))
            shared = {"seconds": round(seconds / len(runs), 3), "stack": len(runs), "device": str(device)}
            shared |= {"side_by_side": side_by_side} if side_by_side > 1 else {}
            append_rows(out, [{**row, **shared, **(origin or {})} for row in rows])
            known = read_rows(out)
            more = sum(len(_missing(setting, c, p, known)) for c in chosen for p in PHASES) * slowest / 60
            best = min((row["loss"] for row in rows if row["loss"] is not None), default=math.nan)
            say(
                f"{setting.name} {cell.method} {cell.width}: {len(runs)} runs, {seconds:.1f} s, lowest loss "
                f"{best:.4f}; at most {more / side_by_side:.0f} minutes left"
            )

    def work() -> None:
        with TURNS, stream():
            while not stopped and (part := next_part()) is not None:
                left.remove(part)
                busy.add(part[1])
                try:
                    train_part(*part)
                except Exception as error:
                    errors.append(error)
                    left[:] = [(phase, cell) for phase, cell in left if cell != part[1]]
                busy.discard(part[1])

    if side_by_side == 1:
        work()
    else:
        default = threading.stack_size(THREAD_STACK)
        threads = [threading.Thread(target=work, daemon=True) for _ in range(side_by_side)]
        for thread in threads:
            thread.start()
        threading.stack_size(default)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return not stopped


def _stacks(runs: list[tuple[float, int]], most: int) -> list[list[tuple[float, int]]]:
    """Return the runs in groups of nearly equal size, `most` or fewer."""
    count = -(-len(runs) // max(1, most))
    size = -(-len(runs) // count) if count else 1
    return [runs[i : i + size] for i in range(0, len(runs), size)]


def _missing(setting: Setting, cell: Cell, phase: str, rows: list[Row]) -> list[tuple[float, int]]:
    """Return the (rate, seed) of the phase that have no row."""
    done, choosing = {key_of(row) for row in rows}, range(setting.choosing_seeds)
    if phase == "rates":
        wanted = [(rate, seed) for seed in choosing for rate in setting.rates]
    elif phase == "beyond":
        wanted = [(rate, seed) for seed in choosing for rate in rates_beyond(rows, setting, cell)]
    else:
        best = best_rate(rows, setting, cell)
        wanted = [] if best is None else [(best, seed) for seed in range(setting.choosing_seeds, setting.seeds)]
    return [(rate, seed) for rate, seed in wanted if (setting.name, *cell, rate, seed) not in done]


def rates_beyond(rows: list[Row], setting: Setting, cell: Cell) -> list[float]:
    """Return the rate to try beyond the end of the grid at which the best of its rates lies, or none."""
    rates = sorted(setting.rates)
    if len(rates) < 2 or len(seeds_at(rows, setting, cell, rates)) < setting.choosing_seeds:
        return []
    best = _lowest(rows, setting, cell, rates)
    found = {rates[0]: rates[0] ** 2 / rates[1], rates[-1]: rates[-1] ** 2 / rates[-2]}
    return [float(f"{found[best]:.3g}")] if best in found else []


def tried_rates(rows: list[Row], setting: Setting, cell: Cell) -> list[float]:
    """Return the rates from which the best is chosen, ascending: those of the grid that seed 0 has tried, and the one
    beyond it if it has all its rows.
    """
    known = [rate for rate in setting.rates if 0 in seeds_at(rows, setting, cell, [rate])]
    beyond = rates_beyond(rows, setting, cell)
    complete = len(seeds_at(rows, setting, cell, beyond)) >= setting.choosing_seeds
    return sorted([*known, *(beyond if complete else [])])


def seeds_at(rows: list[Row], setting: Setting, cell: Cell, rates: Iterable[float]) -> list[int]:
    """Return the seeds that have rows at all these rates."""
    done, every = {key_of(row) for row in rows}, tuple(rates)
    return [s for s in range(setting.seeds) if all(done.issuperset(_keys(setting, cell, rate, [s])) for rate in every)]


def _keys(setting: Setting, cell: Cell, rate: float, seeds: Iterable[int]) -> list[tuple[Any, ...]]:
    """Return what identifies the runs of a cell at a rate."""
    return [(setting.name, *cell, rate, seed) for seed in seeds]


def _lowest(rows: list[Row], setting: Setting, cell: Cell, rates: list[float]) -> float | None:
    """Return the rate with the lowest mean loss over the seeds that have rows at all rates; None if all diverged."""
    seeds = seeds_at(rows, setting, cell, rates)
    losses = {key_of(row): row["loss"] for row in rows}
    found = {rate: [losses[key] for key in _keys(setting, cell, rate, seeds)] for rate in rates}
    means = {rate: fmean(own) for rate, own in found.items() if own and None not in own}
    return min(means, key=means.__getitem__) if means else None


def best_rate(rows: list[Row], setting: Setting, cell: Cell) -> float | None:
    """Return the rate with the lowest mean loss over the seeds that tried all; None if none has only finite losses."""
    return _lowest(rows, setting, cell, tried_rates(rows, setting, cell))


def at_edge(rows: list[Row], setting: Setting, cell: Cell) -> bool:
    """Return whether the best rate lies at an end of the rates that were tried, so that a better one may lie
    outside.
    """
    rates = tried_rates(rows, setting, cell)
    return len(rates) > 1 and best_rate(rows, setting, cell) in (rates[0], rates[-1])


def finite_or_none(value: float) -> float | None:
    """Return the value rounded for JSON, None if it is not finite."""
    return round(value, 6) if math.isfinite(value) else None


def gpu_minutes(setting: Setting, heads: Callable[[Cell], int], stack: Callable[[Cell], int]) -> float:
    """Return the forecast of a sweep on one H200 in minutes, counted and not measured.

    A step takes at least 1.5 ms (the launches of a CUDA graph), else the time to move its tensors at 4.1 TB/s: 50 kB a
    token and layer at width 64, in proportion to the width, and 30 float32 matrices T x T for each head, layer and row.
    Doubled for safety.
    """
    return sum(cell_minutes(setting, cell, heads(cell), stack(cell)) for cell in setting.cells)


def cell_minutes(setting: Setting, cell: Cell, heads: int, stack: int) -> float:
    """Return the part of one cell in `gpu_minutes`."""
    tokens, total = setting.rows * setting.length, 0.0
    moved = tokens * setting.layers * (50_000 * cell.width / 64 + 120 * heads * setting.length)
    for count in (setting.choosing_runs, setting.later_runs):
        for some in _stacks([(0.0, 0)] * count, stack):
            total += 2 * setting.steps * max(1.5e-3, len(some) * moved / 4.1e12)
    return total / 60


def split_cells(
    setting: Setting, parts: int, minutes: Callable[[Cell], float], cells: list[Cell] | None = None
) -> list[list[Cell]]:
    """Return the cells in disjoint parts of similar `minutes` each: longest first, to the part with the least so
    far. cells: those to divide; None: all of the setting.
    """
    found: list[list[Cell]] = [[] for _ in range(parts)]
    times = [0.0] * parts
    for cell in sorted(setting.cells if cells is None else cells, key=minutes, reverse=True):
        least = times.index(min(times))
        found[least].append(cell)
        times[least] += minutes(cell)
    return found


def stack_size(setting: Setting, heads: Callable[[Cell], int], memory: float) -> Callable[[Cell], int]:
    """Return the number of runs of a cell that fit in `memory` GB, by the tensors that `gpu_minutes` counts."""

    def size(cell: Cell) -> int:
        tokens = setting.rows * setting.length * setting.layers
        moved = tokens * (50_000 * cell.width / 64 + 120 * heads(cell) * setting.length)
        return max(1, int(memory * 1e9 / moved))

    return size


# -- statistics -----------------------------------------------------------------------------------------
def _rows_of(rows: list[Row], setting: Setting, cell: Cell) -> list[Row]:
    """Return the rows of a cell, which are all that a choice for it reads: each look at all rows takes long."""
    method, width = cell
    return [row for row in rows if row["method"] == method and row["width"] == width and row["setting"] == setting.name]


def best_rows(rows: list[Row], setting: Setting) -> BestRows:
    """Return the rows at the best rate of each cell.

    Each also has `edge`: whether that rate lies at an end of the rates that were tried, and `chosen_on`: the number of
    seeds that chose it, or all where the grid has one rate.
    """
    found = {}
    for cell in setting.cells:
        own = _rows_of(rows, setting, cell)
        rate, edge = best_rate(own, setting, cell), at_edge(own, setting, cell)
        seeds = len(seeds_at(own, setting, cell, setting.rates)) if len(setting.rates) > 1 else setting.seeds
        for row in own:
            if row["rate"] == rate:
                found[cell.method, cell.width, row["seed"]] = {**row, "edge": edge, "chosen_on": seeds}
    return found


def is_complete(rows: list[Row], setting: Setting) -> bool:
    """Return whether there are rows of all seeds at the best rates, and of seed 0 at least at all rates."""
    for cell in setting.cells:
        own = _rows_of(rows, setting, cell)
        done, best = seeds_at(own, setting, cell, setting.rates), best_rate(own, setting, cell)
        if 0 not in done:
            return False
        if not setting.every_rate:
            done = list(range(setting.seeds)) if best is None else seeds_at(own, setting, cell, [best])
        if len(done) < setting.seeds:
            return False
    return True


def missing_runs(rows: list[Row], setting: Setting) -> int:
    """Return how many runs `run` would train, as far as the rows tell."""
    return sum(len(_missing(setting, cell, phase, rows)) for cell in setting.cells for phase in PHASES)


def edge_mark(own: Sequence[Row]) -> str:
    """Return the rate of rows at the best rate of a cell, marked if it lies at an end of the grid."""
    return f"{own[0]['rate']:g}{' (edge)' if own[0]['edge'] else ''}"


def edge_words(best: BestRows, methods: Iterable[str]) -> str:
    """Return which of the methods have a best rate at an end of the grid, as a clause for verdicts; empty if none."""
    chosen = set(methods)
    found = {f"{m} {w}" for (m, w, _), row in best.items() if m in chosen and row["edge"]}
    return f"the best rate of {', '.join(sorted(found))} lies at an end of the grid" if found else ""


def difference(values: Sequence[float]) -> Difference:
    """Return the mean of paired differences with its interval."""
    mean, error = mean_and_error(values)
    return Difference(mean, error, math.nan, math.nan, len(values)).at_level(0.95)


def paired_difference(
    rows: BestRows, a: str, b: str, metric: str, widths: Iterable[int] | None = None
) -> Difference | None:
    """Return metric(a) - metric(b) over pairs of equal width and seed; None without a pair."""
    pairs = [
        row[metric] - rows[b, width, seed][metric]
        for (method, width, seed), row in rows.items()
        if method == a and (b, width, seed) in rows and (widths is None or width in widths)
    ]
    return difference(pairs) if pairs else None


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return (mean, standard error); the error is NaN for one value."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
