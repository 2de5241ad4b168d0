"""`surgery bench serve`: decoding throughput over batch sizes and contexts, original and converted, beside counted bytes.

Models of a Llama's shape with random weights; one row is prefilled with random tokens and its cache copied to all rows
(eval/speed/generation.py). Tokens per second = 1000 B / ms of a step of B rows. Beside each cell stands what memory traffic alone
predicts: with W bytes of weights and C(T) bytes of one row's cache (surgery/speculation/bound.py), a step reads W + B C(T), so

    predicted speed over the original = (W_o + B C_o(T)) / (W + B C(T)),    crossover  B* = (W - W_o) / (C_o(T) - C(T))

A cell is a row of the JSON file, which is written after each. The same command goes on where a killed run stopped.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from surgery.architectures.attention import attention_paths
from surgery.core.errors import SurgeryError
from surgery.core.files import explain_disk_errors, read_json, size_text, write_json
from surgery.core.progress import Progress
from surgery.eval.speed.attention import split_ranks
from surgery.eval.speed.generation import cache_bytes, decode, is_out_of_memory, prefill, repeat_rows, rewind
from surgery.eval.speed.model import EXTENT, ORIGINAL, SHAPES, allow_cudnn, install_mixers, make_model, replace_linears
from surgery.mixers.linear_config import LinearAttention
from surgery.mixers.mlr import MLR
from surgery.modeling.attention import install
from surgery.speculation.bound import cache_bytes as counted_cache_bytes
from surgery.speculation.bound import weight_bytes
from surgery.structures.low_rank import LowRank

CONTEXTS = {"full": (2048, 8192, 32768, 65536), "main": (2048, 65536), "small": (16, 48)}
BATCHES = {"full": (1, 4, 16, 64, 128, 256), "main": (1, 16, 64), "small": (1, 2)}
STEPS = {"full": 8, "main": 8, "small": 2}  # tokens of a run
RUNS = {"full": 5, "main": 3, "small": 1}  # after one that compiles kernels and fills allocators
FILL_TOKENS = 4096  # tokens at once while the row is prefilled
RANK_MULTIPLE = 64  # as in the recipe fast-half
KEPT_EVERY = 4  # the hybrid keeps softmax in one of four layers
NO_MEMORY = "does not fit: out of memory"
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
        "fast-half": lambda model: replace_linears(model, LowRank(), RANK_MULTIPLE),
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
        "sizes": sizes,
        **about,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": SHAPES[sizes],
    }
    result |= {"rows": continued_rows(out, result), "complete": False}
    done = {(row["model"], row["batch"], row["context"]) for row in result["rows"]}
    words = [word for word in (only or "").lower().split(",") if word]
    for name, change in model_changes(sizes).items():
        if words and name != ORIGINAL and not any(word in name.lower() for word in words):
            continue
        cells = [(b, t) for t in CONTEXTS[sizes] for b in BATCHES[sizes] if (name, b, t) not in done]
        if cells and not measure_model(
            name, change, cells, result, device=device, dtype=dtype, deadline=deadline, out=out, progress=progress
        ):
            return result
    result["complete"] = True
    save(out, result)
    return result


def continued_rows(out: Path | None, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an earlier, unfinished run of the same benchmark. Raise SurgeryError if the file holds anything else."""
    if out is None or not out.exists():
        return []
    found = read_json(out)
    if not isinstance(found, dict) or found.get("kind") != "serve" or not isinstance(found.get("rows"), list):
        raise SurgeryError(f"{out} is not a result of bench serve. Give another --out, or remove it")
    differ = [key for key in SAME if found.get(key) != result[key]]
    if differ:
        raise SurgeryError(
            f"{out} holds measurements with other {', '.join(differ)}, to which this run cannot add. Give another --out, or remove it"
        )
    if not all(isinstance(row, dict) and is_cell(row) for row in found["rows"]):
        raise SurgeryError(f"{out} has damaged rows. Give another --out, or remove it")
    return found["rows"]


def is_cell(row: dict[str, Any]) -> bool:
    """Return whether a row of a file has the names and numbers of a cell."""
    numbers = (row.get("batch"), row.get("context"), row.get("weight_bytes"), row.get("row_bytes"))
    measured = isinstance(row.get("note"), str) or (isinstance(row.get("ms"), float) and 0 < row["ms"] < math.inf)
    return isinstance(row.get("model"), str) and measured and all(type(n) is int and 0 < n < 2**63 for n in numbers)


def measure_model(
    name: str,
    change: Callable[[Any], None],
    cells: list[tuple[int, int]],
    result: dict[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype,
    deadline: float,
    out: Path | None,
    progress: Progress,
) -> bool:
    """Append the cells (B, T) of one model to the result, contexts ascending. Return False if the deadline came first."""
    from transformers import DynamicCache

    sizes = result["sizes"]
    model = make_model(sizes, device, dtype)
    change(model)
    row_cache, seen, longest = DynamicCache(config=model.config), 0, math.inf
    for batch, context in cells:
        if time.monotonic() > deadline:
            return False
        cell: dict[str, Any] = {"model": name, "batch": batch, "context": context, "ms": None}
        cell |= {"weight_bytes": weight_bytes(model), "row_bytes": counted_cache_bytes(model, context)}
        if note := too_large(cell, device) or (NO_MEMORY if context >= longest else None):
            cell["note"] = note
        else:
            try:
                longest = context  # a prefill that runs out of memory leaves no cache to go on from
                seen, longest = fill(model, row_cache, seen, context, device), math.inf
                cell |= measure_cell(model, row_cache, batch, sizes, device)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                cell["note"] = NO_MEMORY
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        result["rows"].append(cell)
        save(out, result)
        shown = f"{1e3 * batch / cell['ms']:,.0f} tokens/s" if cell["ms"] else cell["note"]
        progress.say(f"{name}, batch {batch}, context {context:,}: {shown}")
    return True


def too_large(cell: dict[str, Any], device: torch.device) -> str | None:
    """Return why a cell cannot fit on a GPU, by counted bytes; None: it may fit."""
    needed = cell["weight_bytes"] + cell["batch"] * cell["row_bytes"]
    if device.type != "cuda" or needed <= torch.cuda.get_device_properties(device).total_memory:
        return None
    return f"does not fit: needs {size_text(needed)}"


@torch.inference_mode()
def fill(model: Any, cache: Any, seen: int, context: int, device: torch.device) -> int:
    """Extend a row's cache from `seen` to `context` random tokens and return `context`."""
    while seen < context:
        tokens = min(FILL_TOKENS, context - seen)
        prefill(model, torch.randint(model.config.vocab_size, (1, tokens), device=device), cache)
        seen += tokens
    return seen


def measure_cell(model: Any, row_cache: Any, batch: int, sizes: str, device: torch.device) -> dict[str, Any]:
    """Return ms of a step (median of the runs), the bytes of the cache and, on a GPU, the peak memory with weights and one row's cache."""
    steps, gpu = STEPS[sizes], device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode(), allow_cudnn(False):  # it builds a plan for every length of a growing cache
        cache = repeat_rows(row_cache, batch, steps)
        held = cache_bytes(cache)
        token_B1 = torch.zeros(batch, 1, dtype=torch.long, device=device)
        times = []
        for _ in range(1 + RUNS[sizes]):
            rewind(cache)
            times.append(decode(model, token_B1, cache, steps))
    found = {"ms": median(times[1:]), "cache_bytes": held}
    return found | ({"peak_bytes": torch.cuda.max_memory_allocated(device)} if gpu else {})


def save(out: Path | None, result: dict[str, Any]) -> None:
    """Write the result as JSON."""
    if out is not None:
        with explain_disk_errors(out):
            write_json(out, result)
