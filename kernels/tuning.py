"""The fastest implementation of an op, from measured times: rows of kernels/tuning.json per op, pass and sizes.

    fastest_measured("btt", "forward", named_sizes(tokens=512, inputs=4096, outputs=4096, rank=4), HOPPER)  ->  "kernel"

A row has the milliseconds of the kernel, of the reference that it replaces, and of the original layer (a dense linear,
SDPA). Rows of BTT also have those of the dense matrix ("dense") and of two batched products of the library
("products"). The original is another function and only a choice where it computes the same
(kernels/mlr_attention/sdpa.py). `surgery bench` measures rows, and recipes.papers.speed.update_tables writes them.

Between and beyond the measured sizes, the log of an implementation's time over the kernel's is the rows' mean, weighted
by distance^-4 in log sizes (Shepard 1968, A two-dimensional interpolation function): at a measured size it is the
measured value. A GPU reads its own times, and for sizes that it was not measured at those of other GPUs of its compute
capability; times of bfloat16 hold for float16 too. Where every row is more than eightfold away, or the GPU's capability
or the dtype was not measured, the kernel's own rule decides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from surgery.core.timing_table import (
    IMPLEMENTATIONS,
    MAX_DISTANCE,
    Implementation,
    distance,
    has_names,
    is_complete_row,
)

TABLE = Path(__file__).with_name("tuning.json")
Pass = Literal["forward", "backward", "step", "captured", "captured step"]
CACHE_SIZE = 4096  # remembered choices of an op
EAGER_PASS: dict[Pass, Pass] = {"captured": "forward", "captured step": "step"}
NamedSizes = tuple[tuple[str, int], ...]
Choice = TypeVar("Choice")


class DeviceKey(NamedTuple):
    """What a table of times holds for. name: as torch gives it, NVIDIA H100 80GB HBM3; "" prefers no GPU."""

    capability: tuple[int, ...]
    dtype: str
    name: str = ""


class TuningQuery(NamedTuple):
    """A call in the table's terms. x: one of its tensors, which gives device and dtype. implementations: those that
    accept the call.
    """

    pass_: Pass
    sizes: NamedSizes
    x: Tensor
    implementations: tuple[Implementation, ...] = IMPLEMENTATIONS


@cache
def tables() -> list[dict[str, Any]]:
    """Return the tables of kernels/tuning.json; none if the file cannot be read.

    [{"device": .., "capability": [9, 0], "dtype": .., "date": .., "versions": .., "rows": [{"op", "pass", "sizes":
    {name: integer}, "kernel", "reference", "dense", "products", "original"}]}]. Times are milliseconds of the GPU, or
    of the CPU's launches if these take longer. Passes: forward, backward (forward included), step (of decoding),
    captured and captured step (in a CUDA graph, where launches cost nothing).
    """
    try:
        stored = json.loads(TABLE.read_text(encoding="utf-8"))["tables"]
        return [
            {**table, "rows": [row for row in table["rows"] if is_complete_row(row)]}
            for table in stored
            if has_names(table)
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # a broken table must not stop a model: the kernels' own rules decide


@lru_cache(maxsize=4096)
def fastest_measured(
    op: str,
    pass_: Pass,
    at: NamedSizes,
    device: DeviceKey,
    implementations: tuple[Implementation, ...] = IMPLEMENTATIONS,
) -> Implementation | None:
    """Return the implementation with the least interpolated time, or None if no nearby size was measured."""
    near = nearby_rows(op, pass_, at, device)
    scores = {implementation: log_ratio_to_kernel(near, implementation) for implementation in implementations}
    known = [(score, implementation) for implementation, score in scores.items() if score is not None]
    return min(known)[1] if len(known) > 1 else None


def nearby_rows(op: str, pass_: str, at: NamedSizes, device: DeviceKey) -> list[tuple[float, dict[str, Any]]]:
    """Return (weight, row) of every row of the op and pass; an empty list if all are farther than MAX_DISTANCE."""
    rows = [row for row in device_rows(device) if (row["op"], row["pass"]) == (op, pass_)]
    apart = [distance(row["sizes"], dict(at)) for row in rows]
    if not rows or min(apart) > MAX_DISTANCE:
        return []
    return [((d * d + 1e-6) ** -2, row) for d, row in zip(apart, rows)]


def log_ratio_to_kernel(near: list[tuple[float, dict[str, Any]]], implementation: Implementation) -> float | None:
    """Return the weighted mean of log(time / kernel's time); None if rows with less than half of the weight have both
    times.
    """
    both = [
        (w, math.log(row[implementation] / row["kernel"]))
        for w, row in near
        if row.get(implementation) and row.get("kernel")
    ]
    weight = sum(w for w, _ in both)
    return sum(w * score for w, score in both) / weight if weight > 0.5 * sum(w for w, _ in near) else None


@cache
def device_rows(device: DeviceKey) -> list[dict[str, Any]]:
    """Return the rows for a device and dtype: its own, and those of other GPUs of its capability at sizes that it lacks.

    Of several other GPUs, the first table that has a size gives its row.
    """
    dtype = "bfloat16" if device.dtype == "float16" else device.dtype
    alike = [t for t in tables() if (tuple(t["capability"]), t["dtype"]) == (device.capability, dtype)]
    rows: dict[Hashable, dict[str, Any]] = {}
    for table in sorted(alike, key=lambda table: bool(table["device"] != device.name)):  # its own first
        for row in table["rows"]:
            rows.setdefault((row["op"], row["pass"], *sorted(row["sizes"].items())), row)
    return list(rows.values())


# -- the choice for a call ---------------------------------------------------------------------------------
class CallReader(NamedTuple):
    """How the calls of an op are looked up. query: returns a call in the table's terms; key: returns, in a few
    microseconds, a key that only calls of the same query share."""

    query: Callable[..., TuningQuery]
    key: Callable[..., Hashable]


def is_fastest(
    op: str,
    reader: CallReader,
    implementation: Implementation = "kernel",
    otherwise: Callable[..., bool] = lambda *_, **__: True,
) -> Callable[..., bool]:
    """Return the `is_faster` of a kernel: whether the table names `implementation` the fastest; `otherwise` decides
    where the table has no answer, and under torch.compile, whose symbolic sizes cannot be looked up."""

    def decide(*args: Any, **kwargs: Any) -> bool:
        fastest = choose_implementation(op, reader.query(*args, **kwargs))
        return otherwise(*args, **kwargs) if fastest is None else fastest == implementation

    choose = remember(reader.key, decide)

    def is_faster(*args: Any, **kwargs: Any) -> bool:
        return otherwise(*args, **kwargs) if torch.compiler.is_compiling() else choose(*args, **kwargs)

    return is_faster


def remember(key: Callable[..., Hashable], decide: Callable[..., Choice]) -> Callable[..., Choice]:
    """Return `decide`, called once for all arguments of one key. Its results must not be None."""
    choices: dict[Hashable, Choice] = {}

    def choose(*args: Any, **kwargs: Any) -> Choice:
        at = key(*args, **kwargs)
        chosen = choices.get(at)
        if chosen is None:
            if len(choices) >= CACHE_SIZE:
                choices.clear()
            chosen = choices[at] = decide(*args, **kwargs)
        return chosen

    return choose


def is_measured(op: str, query: TuningQuery, implementation: Implementation) -> bool:
    """Return whether rows near a call have times of an implementation, so that `choose_implementation` can name it."""
    device = device_key(query.x.device, query.x.dtype)
    passes = dict.fromkeys((query.pass_, EAGER_PASS.get(query.pass_, query.pass_)))
    return any(
        log_ratio_to_kernel(nearby_rows(op, pass_, query.sizes, device), implementation) is not None for pass_ in passes
    )


def choose_implementation(op: str, query: TuningQuery) -> Implementation | None:
    """Return the fastest implementation for a call, or None if nothing near was measured.

    In a CUDA graph, eager times are used where there are no captured ones.
    """
    device, dtype = query.x.device, query.x.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    device_of_query = device_key(device, dtype)
    fastest = fastest_measured(op, query.pass_, query.sizes, device_of_query, query.implementations)
    if fastest is None and query.pass_ in EAGER_PASS:
        return fastest_measured(op, EAGER_PASS[query.pass_], query.sizes, device_of_query, query.implementations)
    return fastest


def named_sizes(**named: int) -> NamedSizes:
    """Return sizes as a tuple of (name, size), in the order given."""
    return tuple(named.items())


@cache
def device_key(device: torch.device, dtype: torch.dtype) -> DeviceKey:
    """Return the key of the tables for a device and dtype."""
    capability: tuple[int, ...] = torch.cuda.get_device_capability(device) if device.type == "cuda" else ()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return DeviceKey(capability, str(dtype).removeprefix("torch."), name)


def training_pass(*tensors: Tensor) -> Pass:
    """Return "backward" if a gradient is required, else "captured" or "forward"."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "backward"
    return "captured" if is_capturing(tensors[0]) else "forward"


def step_pass(x: Tensor) -> Pass:
    """Return "captured step" while a CUDA graph is captured, else "step"."""
    return "captured step" if is_capturing(x) else "step"


def is_capturing(x: Tensor) -> bool:
    """Return whether a CUDA graph is being captured."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def three_tensor_key(x: Tensor, y: Tensor, z: Tensor, *_: Any, **__: Any) -> Hashable:
    """Return the key of a call whose sizes and dtype follow from its first three tensors."""
    grad = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad or z.requires_grad)
    return x.shape, y.shape, z.shape, x.dtype, x.get_device(), grad, is_capturing(x), torch.is_autocast_enabled()


def _tokens_query(q_BGJTF: Tensor, k_BGTF: Tensor, v_BGTV: Tensor, *_: Any, **__: Any) -> TuningQuery:
    batch, groups, tokens = v_BGTV.shape[:3]
    at = named_sizes(lanes=batch * groups * q_BGJTF.shape[2], tokens=tokens)
    return TuningQuery(training_pass(q_BGJTF, k_BGTF, v_BGTV), at, v_BGTV)


def _step_query(q_BGJF: Tensor, k_BGF: Tensor, v_BGV: Tensor, *_: Any, **__: Any) -> TuningQuery:
    return TuningQuery(step_pass(v_BGV), named_sizes(lanes=q_BGJF.numel() // q_BGJF.shape[-1]), v_BGV)


TOKENS_READER = CallReader(
    _tokens_query, three_tensor_key
)  # masks over T tokens; sizes: lanes (heads of all rows) and tokens
STEP_READER = CallReader(_step_query, three_tensor_key)  # one decoding step of a mask; sizes: lanes


def is_fastest_mask_step(mask: str) -> Callable[..., bool]:
    """Return the `is_faster` of a mask's decoding step; with beta, the times of the delta rule decide."""
    plain, delta = is_fastest(mask, STEP_READER), is_fastest(f"{mask} delta", STEP_READER)

    def is_faster(q: Tensor, k: Tensor, v: Tensor, beta: Any, *rest: Any, **more: Any) -> bool:
        return (plain if beta is None else delta)(q, k, v)

    return is_faster
