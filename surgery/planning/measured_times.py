"""Measured times of linears: tables from kernels/tuning.json or from files of `surgery bench linear`, and times between
measured sizes.
"""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from surgery.core.errors import SurgeryError
from surgery.core.timing_table import IMPLEMENTATIONS, MAX_DISTANCE, distance, has_names, is_complete_row

MAX_FILE_BYTES = 50_000_000
MAX_ROWS = 10_000  # of linears in a file of times
MAX_NAME = 200  # characters of a device's name in a file of times
SIZE_NAMES = ("tokens", "inputs", "outputs", "lanes", "context")  # lanes: heads of all rows
LINEAR_OPS = ("btt", "low_rank")
LINEAR_SIZES: dict[str, tuple[str, ...]] = {"low_rank": ("tokens", "inputs", "outputs", "rank")}
LINEAR_SIZES["btt"] = (*LINEAR_SIZES["low_rank"], "rows", "columns")
# Largest factor between a size and the nearest measured one at which a choice by time trusts the time between them.
COVERED = {"tokens": 4.0, "inputs": 2.0, "outputs": 2.0, "rank": 4.0, "rows": 2.0, "columns": 2.0}
CAPTURED, IN_A_ROW = "CUDA graph", "calls in a row"  # ends of titles: how the calls of a case without launches ran
PHASES = {"prefill": "forward", "decode": "captured"}  # decoding steps in a CUDA graph


# -- times between measured sizes ------------------------------------------------------------------------
class Predicted(NamedTuple):
    """A predicted time in milliseconds. measured: whether a measured row has exactly these sizes."""

    ms: float
    measured: bool


class MeasuredTimes:
    """Times of linears on the GPU of one table, in the format of kernels/tuning.json.

    Between measured sizes, a time is its lower bound times the mean ratio of time and lower bound of the measured rows,
    weighted by distance^-4 in log sizes. Ranks whose rows of memory fill whole 16-byte words, which GPUs read fastest,
    are predicted from such ranks alone where one was measured. The lower bound is the largest of operations / rate,
    bytes / bandwidth and the shortest measured time; rate and bandwidth are the highest that the table's dense linears
    reached.
    """

    def __init__(self, table: dict[str, Any]):
        self.dtype, self.width = table["dtype"], element_bytes(table["dtype"])
        rows = [row for row in table["rows"] if row["op"] in LINEAR_OPS and row["pass"] in PHASES.values()]
        self.rows = rows
        dense = [(row["original"], _dense_sizes(row["sizes"])) for row in rows if row.get("original")]
        self.rate = max((2 * n * i * o / ms for ms, (n, i, o) in dense), default=0.0)
        self.bandwidth = max((self._bytes(n, i, o, i * o) / ms for ms, (n, i, o) in dense), default=0.0)
        self.shortest = {
            pass_: min((t for row in rows if row["pass"] == pass_ for t in _times(row)), default=0.0)
            for pass_ in PHASES.values()
        }

    def _bytes(self, tokens: int, in_: int, out: int, params: int) -> float:
        return float(self.width * (tokens * (in_ + out) + params))

    def _bound(self, pass_: str, sizes: tuple[int, int, int], params: int) -> float:
        """Return the lower bound of a linear's time. sizes: tokens, inputs, outputs."""
        work, moved = 2 * sizes[0] * params / self.rate, self._bytes(*sizes, params) / self.bandwidth
        return max(work, moved, self.shortest[pass_])

    def _nearby(
        self, ops: tuple[str, ...], phase: str, at: dict[str, int], farthest: float = MAX_DISTANCE
    ) -> list[tuple[float, dict[str, Any]]]:
        """Return (weight, row) of every row of the ops; an empty list if all are more than eight times away, or than
        `farthest`.
        """
        rows = self._rows_of(ops, phase)
        apart = [distance(row["sizes"], at) for row in rows]
        return [((d * d + 1e-6) ** -2, row) for d, row in zip(apart, rows)] if rows and min(apart) <= farthest else []

    def dense(self, phase: str, tokens: int, out: int, in_: int, farthest: float = MAX_DISTANCE) -> Predicted | None:
        """Return the time of a dense linear; None if no size within the distance `farthest` was measured."""
        rows = self._nearby(LINEAR_OPS, phase, {"tokens": tokens, "inputs": in_, "outputs": out}, farthest)
        known = [(w, row["original"], _dense_sizes(row["sizes"])) for w, row in rows if row.get("original")]
        return self._predict(phase, (tokens, in_, out), in_ * out, [(w, ms, s, s[1] * s[2]) for w, ms, s in known])

    def structured(self, phase: str, tokens: int, config: dict[str, Any], shape: tuple[int, int]) -> Predicted | None:
        """Return the time of a structured linear by its fastest implementation; None if its structure or no nearby size
        was measured.

        Tables hold contiguous order. In strided order the copy of the outputs is added, at the bandwidth of the table.
        """
        (out, in_), terms = shape, _table_terms(config, shape, tokens)
        if terms is None:
            return None
        name, at = terms
        rows = same_alignment(self._nearby((name,), phase, at), at, self.dtype)
        known = [(w, min(_times(row)), _dense_sizes(row["sizes"]), _stored(row["sizes"])) for w, row in rows]
        prediction = self._predict(phase, (tokens, in_, out), _stored(at), known)
        if prediction is None or config.get("order") != "strided":
            return prediction
        copy = max(2 * self.width * tokens * out / self.bandwidth, self.shortest[PHASES[phase]])
        return Predicted(prediction.ms + copy, measured=False)

    def scaled(self, phase: str, tokens: int, params: int, shape: tuple[int, int]) -> Predicted | None:
        """Return the time of a linear (out, in) with `params` stored elements whose structure was not measured: its lower
        bound, times the ratio of time and lower bound of the dense linear. None without times of dense linears.
        """
        out, in_ = shape
        dense = self.dense(phase, tokens, out, in_, farthest=math.inf)
        if dense is None:
            return None
        sizes, pass_ = (tokens, in_, out), PHASES[phase]
        return Predicted(dense.ms * self._bound(pass_, sizes, params) / self._bound(pass_, sizes, in_ * out), False)

    def covers_dense(self, phase: str, tokens: int, out: int, in_: int) -> bool:
        """Return whether a dense linear was measured within the factors of COVERED."""
        at = {"tokens": tokens, "inputs": in_, "outputs": out}
        return any(row.get("original") and _is_covered(row["sizes"], at) for row in self._rows_of(LINEAR_OPS, phase))

    def covers(self, phase: str, tokens: int, config: dict[str, Any], shape: tuple[int, int]) -> bool:
        """Return whether a structured linear of this alignment was measured within the factors of COVERED."""
        terms = _table_terms(config, shape, tokens)
        if terms is None:
            return False
        name, at = terms
        rows, aligned = self._rows_of((name,), phase), _is_aligned(at, self.dtype)
        return any(_is_covered(row["sizes"], at) and _is_aligned(row["sizes"], self.dtype) == aligned for row in rows)

    def measured_ranks(self, phase: str, config: dict[str, Any]) -> set[int]:
        """Return the ranks that were measured with the structure and blocks of a config."""
        name, blocks = config["structure"], config.get("blocks")
        sizes = [row["sizes"] for row in self._rows_of((name,), phase)]
        return {at["rank"] for at in sizes if blocks is None or [at.get("rows"), at.get("columns")] == list(blocks)}

    def _rows_of(self, ops: tuple[str, ...], phase: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["op"] in ops and row["pass"] == PHASES[phase] and _times(row)]

    def _predict(self, phase: str, sizes: tuple[int, int, int], params: int, rows: list[Any]) -> Predicted | None:
        if not rows or not self.rate:
            return None
        ratios = [(w, math.log(ms / self._bound(PHASES[phase], at, stored))) for w, ms, at, stored in rows]
        mean = sum(w * ratio for w, ratio in ratios) / sum(w for w, _ in ratios)
        exact = [ms for _, ms, at, stored in rows if (at, stored) == (sizes, params)]
        return Predicted(exact[0] if exact else math.exp(mean) * self._bound(PHASES[phase], sizes, params), bool(exact))


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element of a table's dtype."""
    return 4 if dtype == "float32" else 2


def _is_aligned(sizes: dict[str, int], dtype: str) -> bool:
    return sizes["rank"] * element_bytes(dtype) % 16 == 0


def same_alignment(
    rows: list[tuple[float, dict[str, Any]]], at: dict[str, int], dtype: str
) -> list[tuple[float, dict[str, Any]]]:
    """Return the (weight, row) whose rank fills whole 16-byte words if and only if that of `at` does; all rows if there
    are none.
    """
    aligned = _is_aligned(at, dtype)
    return [(weight, row) for weight, row in rows if _is_aligned(row["sizes"], dtype) == aligned] or rows


def _table_terms(config: dict[str, Any], shape: Sequence[int], tokens: int) -> tuple[str, dict[str, int]] | None:
    """Return (op, sizes) of a structured linear in the terms of kernels/tuning.json; None for one that tables do not
    have.

    config: a structure as plain data, possibly from a report that anyone may have written.
    """
    name = {"monarch": "btt"}.get(config["structure"], config["structure"])
    at = {"tokens": tokens, "inputs": shape[1], "outputs": shape[0], "rank": config.get("rank") or 1}
    if name not in LINEAR_OPS or "bits" in config:
        return None
    if name == "btt":
        blocks = config.get("blocks")
        if not isinstance(blocks, (list, tuple)) or len(blocks) != 2:
            return None
        at |= dict(zip(("rows", "columns"), blocks))
    return (name, at) if all(type(n) is int and n > 0 for n in at.values()) else None


def _is_covered(sizes: dict[str, int], at: dict[str, int]) -> bool:
    """Return whether all sizes that both have are within the factors of COVERED."""
    return all(max(n / sizes[name], sizes[name] / n) <= COVERED[name] for name, n in at.items() if name in sizes)


def _dense_sizes(sizes: dict[str, int]) -> tuple[int, int, int]:
    return sizes["tokens"], sizes["inputs"], sizes["outputs"]


def _stored(sizes: dict[str, int]) -> int:
    """Return the stored elements of a structured linear in the terms of kernels/tuning.json."""
    if "rows" not in sizes:
        return sizes["rank"] * (sizes["inputs"] + sizes["outputs"])
    b, c = sizes["rows"], sizes["columns"]
    return b * c * sizes["rank"] * (-(-sizes["outputs"] // b) + -(-sizes["inputs"] // c))


def _times(row: dict[str, Any]) -> list[float]:
    return [row[name] for name in IMPLEMENTATIONS if row.get(name)]


# -- reading tables --------------------------------------------------------------------------------------
@cache
def included_tables() -> tuple[dict[str, Any], ...]:
    """Return the tables of kernels/tuning.json, their rows of linears alone.

    Raises SurgeryError if the file is damaged.
    """
    path = Path(str(importlib.resources.files("surgery.kernels").joinpath("tuning.json")))
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
        rows = [[row for row in table["rows"] if row["op"] in LINEAR_OPS] for table in tables]
        linear_tables = [{**table, "rows": of_linears} for table, of_linears in zip(tables, rows) if of_linears]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SurgeryError(
            f"{path} cannot be read ({type(error).__name__}: {str(error)[:100]}). Install the package again, or give a "
            "file of "
            "`surgery bench linear --out` as `measured`"
        ) from None
    return tuple(check_measured_times(table, str(path)) for table in linear_tables)


def read_measured_times(path: Path) -> dict[str, Any]:
    """Return the times of linears in a file of `surgery bench linear --out`, as a table of kernels/tuning.py.

    Raises SurgeryError if it is damaged.
    """
    if not path.is_file():
        raise SurgeryError(f"{path} does not exist. Measure this machine with: surgery bench linear --out {path.name}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise SurgeryError(f"{path} must have at most {MAX_FILE_BYTES:,} bytes (got {path.stat().st_size:,})")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        table = tuning_tables([result])[0] if result["kind"] == "linear" else None
        linears = [row for row in table["rows"] if row["op"] in LINEAR_OPS] if table else []
        return check_measured_times(table and {**table, "rows": linears}, str(path))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError) as error:
        raise SurgeryError(
            f"{path} is no file of `surgery bench linear --out` ({type(error).__name__}: {str(error)[:100]}). Write it "
            "again"
        ) from None


def check_measured_times(table: Any, where: str) -> dict[str, Any]:
    """Return a table of times from a file.

    Raises SurgeryError unless its device and dtype are plain text, and its at most MAX_ROWS rows of linears have whole
    sizes over 0 and times over 0.
    """
    if not isinstance(table, dict) or not has_names(table):
        raise SurgeryError(f"{where} has no measured times of linears. Write it with: surgery bench linear --out FILE")
    for name in ("device", "dtype"):
        if not table[name].isprintable() or len(table[name]) > MAX_NAME:
            raise SurgeryError(
                f"{where}: {name} must be plain text of at most {MAX_NAME} characters (got {table[name][:40]!r})"
            )
    if len(table["rows"]) > MAX_ROWS:
        raise SurgeryError(
            f"{where} must have at most {MAX_ROWS:,} rows of linears (got {len(table['rows']):,}). Measure fewer sizes"
        )
    for row in table["rows"]:
        sizes = row.get("sizes") if isinstance(row, dict) and row.get("op") in LINEAR_OPS else None
        whole = isinstance(sizes, dict) and all(
            type(sizes.get(name)) is int and 0 < sizes[name] < 2**31 for name in LINEAR_SIZES[row["op"]]
        )
        if not whole or not is_complete_row(row) or not _times(row):
            raise SurgeryError(
                f"{where}: a row of times reads {str(row)[:200]}; sizes must be whole numbers over 0 and times numbers "
                "over 0. Measure again"
            )
    if not table["rows"]:
        raise SurgeryError(
            f"{where} has no measured times of structured linears. Write it with: surgery bench linear --out FILE"
        )
    return table


# -- tables of results of `surgery bench` ----------------------------------------------------------------
def tuning_tables(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tables of kernels/tuning.py, one per device and dtype: times of each op's implementations and of what
    it replaces.
    """
    tables: dict[tuple[str, str], dict[str, Any]] = {}
    for result in results:
        head = {name: result[name] for name in ("device", "capability", "dtype", "date", "versions")}
        head["capability"] = head["capability"] or []
        into = tables.setdefault((result["device"], result["dtype"]), {**head, "rows": []})["rows"]
        for table in dict.fromkeys(row["table"] for row in result["rows"]):
            for x in dict.fromkeys(row["x"] for row in result["rows"] if row["table"] == table):
                case = [row for row in result["rows"] if (row["table"], row["x"]) == (table, x) and row["ms"]]
                into += _case_rows(case, pass_of_table(table), launch_times(result["rows"], pass_of_table(table), x))
    return list(tables.values())


def launch_times(rows: list[dict[str, Any]], kind: str, x: int) -> dict[str, float]:
    """Return the CPU's launch time of each implementation in ms: the least over sizes of at least x.

    Larger sizes launch no less, and a busy CPU only adds time.
    """
    launches: dict[str, float] = {}
    for row in rows:
        if row["x"] >= x and "launch" in row and pass_of_table(row["table"]) == kind:
            launches[row["rival"]] = min(row["launch"], launches.get(row["rival"], row["launch"]))
    return launches


def decoding_call(device: str) -> str:
    """Return a decoding step in words, as it was measured on a device (surgery.core.device.device_name)."""
    return "decoding step" if device.startswith("cpu") else "decoding step in a CUDA graph"


def pass_of_table(table: str) -> str:
    """Return forward, backward (with forward) or step (decoding); captured, captured step: inside a CUDA graph,
    or on a CPU in a row.
    """
    if table.startswith("decode"):
        return "captured step" if table.endswith((CAPTURED, IN_A_ROW)) else "step"
    if table.endswith((CAPTURED, IN_A_ROW)):
        return "captured"
    return "backward" if table.endswith("backward") else "forward"


def _case_rows(case: list[dict[str, Any]], kind: str, launches: dict[str, float]) -> list[dict[str, Any]]:
    """Return a case's rows, one per op and options.

    The original's time is that of torch's fastest. Without a CUDA graph a call takes at least its launch time.
    """
    least = {} if "captured" in kind else launches
    took = {row["rival"]: max(row["ms"], least.get(row["rival"], 0.0)) for row in case}
    original = min((took[row["rival"]] for row in case if row.get("op") == "original"), default=None)
    entries: dict[str, dict[str, Any]] = {}
    for row in case:
        if row.get("op") in (None, "original"):
            continue
        sizes = {**{k: v for k, v in row["sizes"].items() if k in SIZE_NAMES}, **row["options"]}
        entry = {
            "op": row["op"],
            "pass": kind,
            "sizes": sizes,
            **({"original": round_ms(original)} if original else {}),
        }
        entries.setdefault(json.dumps(entry), entry)[row["way"]] = round_ms(took[row["rival"]])
    return list(entries.values())


def round_ms(ms: float) -> float:
    """Round milliseconds for the table."""
    return float(f"{ms:.3g}")
