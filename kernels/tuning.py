"""Which way was measured to be fastest: rows of kernels/tuning.json, one for each op, pass and size.

    choice("btt", "forward", sizes(tokens=512, inputs=4096, outputs=4096, rank=4), HOPPER)  ->  "kernel"

A row has the ms of the kernel, of the reference that it stands in for, of the matrix multiplied out (BTT: "dense"), and of
the original that all of them replace (a dense linear, SDPA: another function, the choice only where it comes to the same,
kernels/mlr_attention/sdpa.py). `surgery bench` measures the rows and surgery.eval.speed.update_tables writes them.

Between and beyond measured sizes a way's log time beside the kernel's is the rows' mean, weighted by distance^-4 in log
sizes (Shepard 1968): a measured size speaks for itself. GPUs speak for those of their generation (compute capability),
bfloat16 for float16. What is more than eightfold away from every row, or of a GPU or dtype not measured, is left to
the kernel's own rule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

TABLE = Path(__file__).with_name("tuning.json")
Implementation = Literal["kernel", "reference", "dense", "original"]
Pass = Literal["forward", "backward", "step", "captured", "captured step"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("kernel", "reference", "dense")
MAX_DISTANCE = math.log(8.0)
CACHE_SIZE = 4096  # calls remembered
EAGER_PASS: dict[Pass, Pass] = {"captured": "forward", "captured step": "step"}
NamedSizes = tuple[tuple[str, int], ...]


class DeviceKey(NamedTuple):
    """What a table holds for."""

    capability: tuple[int, ...]
    dtype: str


class TuningQuery(NamedTuple):
    """A call as the table knows it. x: a tensor of it, for its device and dtype; implementations: those that can take it."""

    pass_: Pass
    sizes: NamedSizes
    x: Tensor
    implementations: tuple[Implementation, ...] = IMPLEMENTATIONS


@cache
def tables() -> list[dict[str, Any]]:
    """[{"device": .., "capability": [9, 0], "dtype": .., "date": .., "versions": .., "rows": [{"op", "pass", "sizes":
    {name: number}, "kernel": ms, "reference": ms, "dense": ms, "original": ms}]}]. ms: the GPU's or, where that is more, what
    the CPU takes to launch. Passes: forward, backward (with its forward), step (of decoding); captured, captured step: in a
    CUDA graph, where launches cost nothing."""
    try:
        found = json.loads(TABLE.read_text(encoding="utf-8"))["tables"]
        return [
            {**table, "rows": [row for row in table["rows"] if _is_complete_row(row)]}
            for table in found
            if _has_names(table)
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # no model ends at a table of times: kernels go by rules of their own


def _has_names(table: dict[str, Any]) -> bool:
    texts = all(isinstance(table[name], str) for name in ("device", "dtype"))
    return texts and all(isinstance(table[name], list) for name in ("capability", "rows"))


def _is_complete_row(row: dict[str, Any]) -> bool:
    counts = row["sizes"].values() if isinstance(row["sizes"], dict) else (None,)
    times = [
        row[implementation] for implementation in (*IMPLEMENTATIONS, "original") if row.get(implementation) is not None
    ]
    named = isinstance(row["op"], str) and isinstance(row["pass"], str)
    return named and all(type(n) is int and n < 2**62 for n in counts) and all(_is_time(ms) for ms in times)


def _is_time(ms: Any) -> bool:
    return type(ms) in (int, float) and 0 < ms < 1e12


@lru_cache(maxsize=4096)
def fastest_measured(
    op: str,
    pass_: Pass,
    at: NamedSizes,
    place: DeviceKey,
    implementations: tuple[Implementation, ...] = IMPLEMENTATIONS,
) -> Implementation | None:
    """None: nothing near was measured."""
    near = nearby_rows(op, pass_, at, place)
    scores = {implementation: log_ratio_to_kernel(near, implementation) for implementation in implementations}
    known = [(score, implementation) for implementation, score in scores.items() if score is not None]
    return min(known)[1] if len(known) > 1 else None


def nearby_rows(op: str, pass_: str, at: NamedSizes, place: DeviceKey) -> list[tuple[float, dict[str, Any]]]:
    """(weight, row), none where all are far."""
    rows = [row for row in device_rows(place) if (row["op"], row["pass"]) == (op, pass_)]
    apart = [distance(row["sizes"], dict(at)) for row in rows]
    if not rows or min(apart) > MAX_DISTANCE:
        return []
    return [((d * d + 1e-6) ** -2, row) for d, row in zip(apart, rows)]


def log_ratio_to_kernel(near: list[tuple[float, dict[str, Any]]], implementation: Implementation) -> float | None:
    """Mean log of the way's time over the kernel's; None where what is nearest does not have it."""
    both = [
        (w, math.log(row[implementation] / row["kernel"]))
        for w, row in near
        if row.get(implementation) and row.get("kernel")
    ]
    weight = sum(w for w, _ in both)
    return sum(w * score for w, score in both) / weight if weight > 0.5 * sum(w for w, _ in near) else None


@cache
def device_rows(place: DeviceKey) -> list[dict[str, Any]]:
    dtype = "bfloat16" if place.dtype == "float16" else place.dtype
    found = [t for t in tables() if (tuple(t["capability"]), t["dtype"]) == (place.capability, dtype)]
    return [row for table in found for row in table["rows"]]


def distance(one: dict[str, int], other: dict[str, int]) -> float:
    """Root of the summed squares of log ratios: 0.7 is a factor of two in one size. Sizes that only one of the two has do
    not count."""
    return math.hypot(*(math.log(max(n, 1) / max(other[name], 1)) for name, n in one.items() if name in other))


# -- asking for a call -------------------------------------------------------------------------------------
class CallReader(NamedTuple):
    """How calls of an op are read. query: as the table knows them; key: two calls of the same key ask the same, found in a
    few microseconds."""

    query: Callable[..., TuningQuery]
    key: Callable[..., Hashable]


def is_fastest(
    op: str,
    reader: CallReader,
    implementation: Implementation = "kernel",
    otherwise: Callable[..., bool] = lambda *_, **__: True,
) -> Callable[..., bool]:
    """Return `is_faster` of a kernel: whether the table says so; `otherwise` where it says nothing. Compiling, torch traces sizes that
    are no numbers, so there the latter decides as well."""
    known: dict[Hashable, bool] = {}

    def is_faster(*args: Any, **kwargs: Any) -> bool:
        if torch.compiler.is_compiling():
            return otherwise(*args, **kwargs)
        key = reader.key(*args, **kwargs)
        verdict = known.get(key)
        if verdict is None:
            if len(known) >= CACHE_SIZE:
                known.clear()
            found = choose_implementation(op, reader.query(*args, **kwargs))
            verdict = known[key] = otherwise(*args, **kwargs) if found is None else found == implementation
        return verdict

    return is_faster


def choose_implementation(op: str, query: TuningQuery) -> Implementation | None:
    device, dtype = query.x.device, query.x.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    where = device_key(device, dtype)
    found = fastest_measured(op, query.pass_, query.sizes, where, query.implementations)
    if found is None and query.pass_ in EAGER_PASS:
        return fastest_measured(op, EAGER_PASS[query.pass_], query.sizes, where, query.implementations)
    return found


def named_sizes(**named: int) -> NamedSizes:
    return tuple(named.items())


@cache
def device_key(device: torch.device, dtype: torch.dtype) -> DeviceKey:
    capability: tuple[int, ...] = torch.cuda.get_device_capability(device) if device.type == "cuda" else ()
    return DeviceKey(capability, str(dtype).removeprefix("torch."))


def training_pass(*tensors: Tensor) -> Pass:
    """backward where gradients are asked for."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "backward"
    return "captured" if is_capturing(tensors[0]) else "forward"


def step_pass(x: Tensor) -> Pass:
    return "captured step" if is_capturing(x) else "step"


def is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being made."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def three_tensor_key(x: Tensor, y: Tensor, z: Tensor, *_: Any, **__: Any) -> Hashable:
    """The key of calls whose first three arguments are tensors that say all."""
    grad = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad or z.requires_grad)
    return x.shape, y.shape, z.shape, x.dtype, x.get_device(), grad, is_capturing(x), torch.is_autocast_enabled()


def _tokens_query(q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, *_: Any, **__: Any) -> TuningQuery:
    batch, groups, tokens = v_BGTV.shape[:3]
    at = named_sizes(lanes=batch * groups * q_BGJTF.shape[2], tokens=tokens)
    return TuningQuery(training_pass(q_BGJTF, k_BGTF, v_BGTV), at, v_BGTV)


def _step_query(q_BGJF: Tensor, k_BGF: Tensor, v_BGV: Tensor, *_: Any, **__: Any) -> TuningQuery:
    return TuningQuery(step_pass(v_BGV), named_sizes(lanes=q_BGJF.numel() // q_BGJF.shape[-1]), v_BGV)


TOKENS_READER = CallReader(_tokens_query, three_tensor_key)  # masks over T tokens; lanes: heads of all rows
STEP_READER = CallReader(_step_query, three_tensor_key)  # masks, one token more


def is_fastest_mask_step(mask: str) -> Callable[..., bool]:
    """`is_faster` of a step with kernel scores, or the delta rule's where beta is given."""
    plain, delta = is_fastest(mask, STEP_READER), is_fastest(f"{mask} delta", STEP_READER)

    def is_faster(q: Tensor, k: Tensor, v: Tensor, beta: Any, *rest: Any, **more: Any) -> bool:
        return (plain if beta is None else delta)(q, k, v)

    return is_faster
