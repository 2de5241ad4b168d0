"""`surgery bench serve`: decoding throughput over batch sizes and contexts, original and converted, beside counted
bytes.

Models of a Llama's shape with random weights; one row is prefilled with random tokens and its cache copied to all rows
(eval/speed/generation.py). All models decode in the same way: the memory of their caches is allocated in advance, and a
step is one CUDA graph. They take turns in one process, and a cell is the median of the turns. Between turns a model
gives back its cache, so that the next one has the memory. Tokens per second = 1000 B / ms of a step of B rows. Beside
each cell stands what memory traffic alone predicts: with W bytes of weights and C(T) bytes of one row's cache
(surgery/speculation/bound.py), a step reads W + B C(T), so

    predicted speed over the original = (W_o + B C_o(T)) / (W + B C(T)),    crossover  B* = (W - W_o) / (C_o(T) - C(T))

A cell is a row of the JSON file, which is written after each (batch, context). The same command goes on where a killed
run stopped.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from surgery.architectures.attention import attention_paths
from surgery.core.errors import SurgeryError
from surgery.core.files import explain_disk_errors, read_json, size_text, write_json
from surgery.core.progress import Progress
from surgery.eval.speed.attention import split_ranks
from surgery.eval.speed.generation import (
    FULL_ROWS,
    RepeatedStep,
    cache_bytes,
    is_out_of_memory,
    prefill,
    repeat_rows,
    synchronized_time,
)
from surgery.eval.speed.model import (
    EXTENT,
    FAST_HALF,
    ORIGINAL,
    RANK_MULTIPLE,
    SHAPES,
    allow_cudnn,
    install_mixers,
    make_model,
    replace_linears,
)
from surgery.eval.speed.selection import is_selected
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.mlr import MLR
from surgery.modeling.attention import install
from surgery.speculation.bound import cache_bytes as counted_cache_bytes
from surgery.speculation.bound import weight_bytes
from surgery.structures.low_rank import LowRank

CONTEXTS = {"full": (2048, 8192, 32768, 65536), "main": (2048, 65536), "small": (16, 48)}
BATCHES = {"full": (1, 4, 16, 64, 256), "main": (1, 16, 64), "small": (1, 2)}
STEPS = {"full": 16, "main": 16, "small": 2}  # tokens of a run
RUNS = {"full": 3, "main": 3, "small": 2}  # turns of each model
FILL_TOKENS = 4096  # tokens at once while the row is prefilled
KEPT_EVERY = 4  # the hybrid keeps softmax in one of four layers
NO_MEMORY = "does not fit: out of memory"
LOOP = "captured steps, models in turns"
SAME = ("kind", "sizes", "device", "dtype", "versions", "shape")  # must match for a file to be continued


def model_changes(sizes: str) -> dict[str, Callable[[Any], None]]:
    """Return, by name, the functions that change the original model."""
    ranks, extents = split_ranks(SHAPES[sizes]["head_dim"], EXTENT[sizes])
    log_linear = LinearAttention(mask="hierarchical")

    def hybrid(model: Any) -> None:
        paths = attention_paths(model)
        every = min(KEPT_EVERY, len(paths))
        install(model, {path: log_linear for i, path in enumerate(paths) if i % every != every - 1})

    return {
        ORIGINAL: lambda model: None,
        "MLR attention": lambda model: install_mixers(model, MLR(ranks=ranks, extents=extents)),
        "log-linear Mamba-2": lambda model: install_mixers(model, log_linear),
        "hybrid, softmax in one of four": hybrid,
        FAST_HALF: lambda model: replace_linears(model, LowRank(), RANK_MULTIPLE),
    }


def serve(
    sizes: str,
    only: str | None,
    device: torch.device,
    dtype: torch.dtype,
    deadline: float,
    *,
    out: Path | None,
    progress: Progress,
    about: dict[str, Any],
) -> dict[str, Any]:
    """Measure all cells that `out` does not hold yet. Return JSON data, written to `out` after every cell."""
    result = {
        "kind": "serve",
        "loop": LOOP,
        "sizes": sizes,
        **about,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": SHAPES[sizes],
    }
    result |= {"rows": continued_rows(out, result, is_cell, ("loop", *SAME)), "complete": False}
    names = [name for name in model_changes(sizes) if name == ORIGINAL or is_selected(name, only)]
    models: dict[str, ServedModel] = {}
    for context, batch in ((t, b) for t in CONTEXTS[sizes] for b in BATCHES[sizes]):
        here = [row for row in result["rows"] if (row["batch"], row["context"]) == (batch, context)]
        if set(names) <= {row["model"] for row in here}:
            continue
        if time.monotonic() > deadline:
            return result
        if not models:
            models = {n: ServedModel(model_changes(sizes)[n], sizes, device, dtype) for n in names}
        cells = measure_cells(models, batch, context, sizes=sizes, device=device)
        result["rows"] = [row for row in result["rows"] if row not in here or row["model"] not in names] + cells
        save(out, result)
        shown = ", ".join(f"{c['model']} {cell_text(c)}" for c in cells)
        progress.say(f"batch {batch}, context {context:,}: {shown}")
    result["complete"] = True
    save(out, result)
    return result


def cell_text(cell: dict[str, Any]) -> str:
    """Return the throughput of a cell, or why it has none."""
    return f"{1e3 * cell['batch'] / cell['ms']:,.0f} tokens/s" if cell["ms"] else cell["note"]


def continued_rows(
    out: Path | None,
    result: dict[str, Any],
    is_whole: Callable[[dict[str, Any]], bool],
    same: Sequence[str] = SAME,
) -> list[dict[str, Any]]:
    """Return the rows of an earlier, unfinished run of the same benchmark.

    Raise SurgeryError if the file holds anything else.

    is_whole: whether a row has the names and numbers of this benchmark. same: what must be equal in both runs.
    """
    kind = result["kind"]
    if out is None or not out.exists():
        return []
    stored = read_json(out)
    if not isinstance(stored, dict) or stored.get("kind") != kind or not isinstance(stored.get("rows"), list):
        raise SurgeryError(f"{out} is not a result of bench {kind}. Give another --out, or remove it")
    differ = [key for key in same if stored.get(key) != result[key]]
    if differ:
        raise SurgeryError(
            f"{out} holds measurements with other {', '.join(differ)}, to which this run cannot add. Give another "
            "--out, or remove it"
        )
    if not all(isinstance(row, dict) and is_whole(row) for row in stored["rows"]):
        raise SurgeryError(f"{out} has damaged rows. Give another --out, or remove it")
    return stored["rows"]


def is_cell(row: dict[str, Any]) -> bool:
    """Return whether a row of a file has the names and numbers of a cell."""
    numbers = (row.get("batch"), row.get("context"), row.get("weight_bytes"), row.get("row_bytes"))
    runs = row.get("runs_ms")
    is_timed = isinstance(runs, list) and all(
        isinstance(ms, float) and 0 < ms < math.inf for ms in (row.get("ms"), *runs)
    )
    measured = isinstance(row.get("note"), str) or (is_timed and runs)
    return (
        isinstance(row.get("model"), str) and bool(measured) and all(type(n) is int and 0 < n < 2**63 for n in numbers)
    )


def measure_cells(
    models: dict[str, ServedModel],
    batch: int,
    context: int,
    *,
    sizes: str,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Return the cell (batch, context) of every model. The models run in turns, RUNS times each."""
    cells = {name: empty_cell(name, model, batch, context, device) for name, model in models.items()}
    for _ in range(RUNS[sizes]):
        for name, model in models.items():
            cell = cells[name]
            if "note" in cell:
                continue
            try:
                model.fill(context)
                measured = measure_once(model.model, model.row, batch, sizes, device)
                cell["runs_ms"].append(measured.pop("ms"))
                cell |= measured
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                cell |= {"note": NO_MEMORY, "runs_ms": []}
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for cell in cells.values():
        cell["ms"] = median(cell["runs_ms"]) if cell["runs_ms"] else None
    return list(cells.values())


def empty_cell(name: str, model: ServedModel, batch: int, context: int, device: torch.device) -> dict[str, Any]:
    """Return a cell with its counted bytes, and a note if it cannot fit."""
    cell: dict[str, Any] = {"model": name, "batch": batch, "context": context, "ms": None, "runs_ms": []}
    cell |= {"weight_bytes": weight_bytes(model.model), "row_bytes": counted_cache_bytes(model.model, context)}
    if note := too_large(cell, device) or (NO_MEMORY if context >= model.longest else None):
        cell["note"] = note
    return cell


def too_large(cell: dict[str, Any], device: torch.device) -> str | None:
    """Return why a cell cannot fit on a GPU, by counted bytes; None: it may fit."""
    needed = cell["weight_bytes"] + cell["batch"] * cell["row_bytes"]
    if device.type != "cuda" or needed <= torch.cuda.get_device_properties(device).total_memory:
        return None
    return f"does not fit: needs {size_text(needed)}"


class ServedModel:
    """A model and the cache of one row of random tokens, which grows from context to context.

    longest: a context whose prefill ran out of memory, which leaves no cache to go on from.
    """

    def __init__(self, change: Callable[[Any], None], sizes: str, device: torch.device, dtype: torch.dtype):
        from transformers import DynamicCache

        self.model = make_model(sizes, device, dtype)
        change(self.model)
        self.model.config._attn_implementation = FULL_ROWS
        self.row, self.longest = DynamicCache(config=self.model.config), math.inf

    def fill(self, context: int) -> None:
        """Extend the row's cache to `context` random tokens."""
        self.longest = context
        fill_row(self.model, self.row, context)
        self.longest = math.inf


@torch.inference_mode()
def fill_row(model: Any, cache: Any, context: int) -> None:
    """Extend a row's cache to `context` random tokens."""
    while (seen := cache.get_seq_length()) < context:
        tokens = min(FILL_TOKENS, context - seen)
        prefill(model, torch.randint(model.config.vocab_size, (1, tokens), device=model.device), cache)


def measure_once(model: Any, row_cache: Any, batch: int, sizes: str, device: torch.device) -> dict[str, Any]:
    """Return ms of a step, whether it was captured, the bytes of the cache and, on a GPU, the peak memory of the
    device's process.

    The peak leaves out the weights and rows of the other models.
    """
    gpu = device.type == "cuda"
    others = 0
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
        others = torch.cuda.memory_allocated(device) - weight_bytes(model) - cache_bytes(row_cache)
    with torch.inference_mode(), allow_cudnn(False):  # as in the decoding rows of bench model
        cache = repeat_rows(row_cache, batch, RepeatedStep.WARMUPS + 2)
        held = cache_bytes(cache)
        step = RepeatedStep(model, cache, torch.zeros(batch, 1, dtype=torch.long, device=device))
        step()
        began = synchronized_time(device)
        for _ in range(STEPS[sizes]):
            step()
        ms = 1e3 * (synchronized_time(device) - began) / STEPS[sizes]
    measured = {"ms": ms, "cache_bytes": held, "captured": gpu and step.problem is None}
    if step.problem:
        measured["problem"] = step.problem
    return measured | ({"peak_bytes": torch.cuda.max_memory_allocated(device) - others} if gpu else {})


def save(out: Path | None, result: dict[str, Any]) -> None:
    """Write the result as JSON."""
    if out is not None:
        with explain_disk_errors(out):
            write_json(out, result)
