"""`surgery bench speed`, and the suite `speed` of `surgery eval`: what a user waits for and what memory holds, by
context.

    first_token_ms   time to first token: one row is read, and the likeliest next token is chosen
    step_ms          a step of decoding B rows after that; tokens per second = 1000 B / step_ms
    cache_bytes      live bytes of the cache of all rows after the steps: keys, values and states, without room allocated in advance
    peak_bytes       on a GPU: the most memory allocated meanwhile, with the model's weights and without other models

All models are in memory at once and take turns in one process: in each round every model runs once, so that other load
on the machine affects all of them. The first round of a context compiles kernels and fills allocators, and is
discarded. B rows are copies of the one that was read (eval/speed/generation.py).

The JSON data has a row for each model, context and batch, with every measured time. A context is measured for all
models or not at all; the file is written after each, and the same command continues a run that was killed or that
reached its time limit.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.eval.speed import model as llama
from surgery.eval.speed.generation import (
    cache_bytes,
    decode,
    is_out_of_memory,
    prefill,
    repeat_rows,
    synchronized_time,
)
from surgery.eval.speed.model import ORIGINAL, SHAPES, WITHOUT_CUDNN, allow_cudnn, make_model
from surgery.eval.speed.selection import is_selected
from surgery.eval.speed.serve import NO_MEMORY, SAME, continued_rows, save
from surgery.speculation.bound import weight_bytes

CONTEXTS = {"full": (2048, 8192, 32768, 131072), "main": (2048, 131072), "small": (16, 48)}
MANY = {"full": 16, "main": 16, "small": 2}  # rows of the second batch
RUNS = {"full": 5, "main": 3, "small": 2}  # rounds after the discarded one
STEPS = {"full": 16, "main": 16, "small": 3}  # tokens that a run writes
SLOW_ROUND, SLOW_RUNS = 10.0, 3  # seconds of a round, and the number of rounds where one takes longer
NAMES = (ORIGINAL, "MLR attention", "log-linear Mamba-2", "BTT half, 4 x 4")  # of eval.speed.model.model_changes
Row = dict[str, Any]


def speed(
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
    """Measure a Llama with random weights and its conversions at all contexts that `out` does not hold yet.

    Return JSON data, written to `out` after every context. deadline: by time.monotonic(); no context starts after it.
    """
    names = [name for name in NAMES if name == ORIGINAL or is_selected(name, only)]
    result = {
        "kind": "speed",
        "sizes": sizes,
        **about,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": SHAPES[sizes],
        "models": names,
    }
    batches = (1, MANY[sizes])
    known = continued_rows(out, result, is_row, (*SAME, "models"))
    done = {row["context"] for row in known if is_whole_context(known, row["context"], names, batches)}
    result |= {"rows": [row for row in known if row["context"] in done], "complete": False}
    models: dict[str, Any] = {}
    for context in (length for length in CONTEXTS[sizes] if length not in done):
        if time.monotonic() > deadline:
            return result
        models = models or make_models(names, sizes, device, dtype)
        rows = measure_context(
            models,
            context,
            batches,
            runs=RUNS[sizes],
            steps=STEPS[sizes],
            device=device,
            slow_runs=SLOW_RUNS,
            deadline=deadline,
        )
        result["rows"] += rows
        save(out, result)
        for row in rows:
            progress.say(row_line(row))
    result["complete"] = True
    save(out, result)
    return result


def is_whole_context(rows: Sequence[Row], context: int, names: Sequence[str], batches: Sequence[int]) -> bool:
    """Return whether the rows have each model and batch at a context once."""
    held = [(row["model"], row["batch"]) for row in rows if row["context"] == context]
    return sorted(held) == sorted((name, batch) for name in names for batch in batches)


def make_models(names: Sequence[str], sizes: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the models by name, each a Llama with random weights that was changed."""
    changes = {name: change for name, _, change in llama.model_changes(sizes) if not name.endswith(WITHOUT_CUDNN)}
    models = {}
    for name in names:
        models[name] = make_model(sizes, device, dtype)
        changes[name](models[name])
    return models


def measure_context(
    models: Mapping[str, Any],
    context: int,
    batches: Sequence[int],
    *,
    runs: int,
    steps: int,
    device: torch.device,
    slow_runs: int | None = None,
    deadline: float = math.inf,
    seed: int = 0,
) -> list[Row]:
    """Return the rows of all models and batches at one context (tokens of random input). The first batch must be 1.

    Args:
        runs: rounds that are measured. slow_runs: the same if a round takes longer than SLOW_ROUND; None: `runs`.
        steps: tokens that each run writes, at least 2. The first is not timed, because a cache may get a larger buffer
            for it.
        deadline: by time.monotonic(); at least one round is measured, and no further one starts after it.
    """
    size = min(model.config.get_text_config().vocab_size for model in models.values())
    generator = torch.Generator().manual_seed(seed)
    ids_1T = torch.randint(size, (1, context), generator=generator).to(device)
    rows = {(name, batch): new_row(name, model, context, batch) for name, model in models.items() for batch in batches}
    for turn in range(1 + runs):
        began = time.monotonic()
        for name, model in models.items():
            _run_once(model, ids_1T, {batch: rows[name, batch] for batch in batches}, steps, keep=turn > 0)
        turns = runs if slow_runs is None or time.monotonic() - began < SLOW_ROUND else slow_runs
        if turn and (time.monotonic() > deadline or turn >= turns):
            break
    return list(rows.values())


def new_row(name: str, model: Any, context: int, batch: int) -> Row:
    """Return a row without measurements. Only that of batch 1 has times to the first token."""
    times: Row = {"first_token_ms": []} if batch == 1 else {}
    return {
        "model": name,
        "context": context,
        "batch": batch,
        **times,
        "step_ms": [],
        "weight_bytes": weight_bytes(model),
    }


@torch.inference_mode()
def _run_once(model: Any, ids_1T: Tensor, rows: Mapping[int, Row], steps: int, keep: bool) -> None:
    """Read the input once and decode in each batch; add the times to the rows if `keep`.

    What does not fit gets a note.
    """
    device = ids_1T.device
    if rows[1].get("note"):
        return
    try:
        memory = _Memory(model, device)
        began = synchronized_time(device)
        out = prefill(model, ids_1T)
        token_11 = out.logits[:, -1:].argmax(-1)
        first_ms = 1e3 * (synchronized_time(device) - began)
        read, peak = out.past_key_values, memory.peak()
        del out
    except Exception as error:
        _note_out_of_memory(error, list(rows.values()))
        return
    for batch, row in rows.items():
        if row.get("note"):
            continue
        try:
            decoded = _decode_rows(model, read, token_11, batch, steps)
        except Exception as error:
            _note_out_of_memory(error, [row])
            continue
        row["cache_bytes"] = decoded["cache_bytes"]
        if decoded["peak_bytes"] is not None:
            row["peak_bytes"] = max(decoded["peak_bytes"], peak or 0) if batch == 1 else decoded["peak_bytes"]
        if keep:
            row["step_ms"].append(decoded["ms"])
            if batch == 1:
                row["first_token_ms"].append(first_ms)


def _decode_rows(model: Any, read: Any, token_11: Tensor, batch: int, steps: int) -> dict[str, Any]:
    """Return ms of a step of `batch` copies of a row's cache, the live bytes of that cache, and the peak memory."""
    device, memory = token_11.device, _Memory(model, token_11.device)
    cache = repeat_rows(read, batch, steps)
    memory.forget_peak()  # of copying
    with allow_cudnn(False):  # it builds a plan for every length of a growing cache
        token_B1 = token_11.expand(batch, 1).contiguous()
        decode(model, token_B1, cache, 1)
        ms = decode(model, token_B1, cache, steps - 1)
    synchronized_time(device)
    return {"ms": ms, "cache_bytes": cache_bytes(cache, allocated=False), "peak_bytes": memory.peak()}


class _Memory:
    """Peak memory on a GPU: of one model's weights, and of what is allocated after this object was made; None
    elsewhere.
    """

    def __init__(self, model: Any, device: torch.device):
        self.device, self.others = device, 0
        if device.type == "cuda":
            model_bytes = sum(
                t.numel() * t.element_size()
                for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
            )
            self.others = torch.cuda.memory_allocated(device) - model_bytes
            self.forget_peak()

    def forget_peak(self) -> None:
        """Count from what is allocated at this moment."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int | None:
        """Return the most bytes allocated since."""
        return torch.cuda.max_memory_allocated(self.device) - self.others if self.device.type == "cuda" else None


def _note_out_of_memory(error: Exception, rows: Sequence[Row]) -> None:
    """Note in the rows that memory ran out; raise other errors."""
    if not is_out_of_memory(error):
        raise error
    for row in rows:
        row["note"] = NO_MEMORY
        row["step_ms"] = []
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_row(row: Mapping[str, Any]) -> bool:
    """Return whether a row of a file has the names and numbers of a measurement, or says why it has none."""
    whole = (row.get("batch"), row.get("context"), row.get("weight_bytes"))
    if not isinstance(row.get("model"), str) or not all(type(n) is int and 0 < n < 2**63 for n in whole):
        return False
    if isinstance(row.get("note"), str):
        return True
    held = row.get("cache_bytes"), row.get("peak_bytes", 1)
    lists = [row.get("step_ms"), *([row.get("first_token_ms")] if row["batch"] == 1 else [])]
    return all(type(n) is int and 0 < n < 2**63 for n in held) and all(_are_times(times) for times in lists)


def _are_times(times: Any) -> bool:
    return isinstance(times, list) and len(times) > 0 and all(type(t) is float and 0 < t < math.inf for t in times)


def row_line(row: Row) -> str:
    """Return a row on one line."""
    where = f"{row['model']}, context {row['context']:,}, batch {row['batch']}"
    if row.get("note"):
        return f"{where}: {row['note']}"
    said = [f"{1e3 * row['batch'] / median(row['step_ms']):,.0f} tokens/s"]
    if row.get("first_token_ms"):
        said.insert(0, f"first token {median(row['first_token_ms']):.4g} ms")
    return f"{where}: {', '.join(said)}, cache {row['cache_bytes'] / 1e6:.4g} MB"


def check_rows(rows: Sequence[Row]) -> None:
    """Raise SurgeryError if nothing was measured."""
    if not any(row["step_ms"] for row in rows):
        notes = dict.fromkeys(f"{row['context']:,} tokens: {row['note']}" for row in rows if row.get("note"))
        raise SurgeryError(
            f"speed: no length was measured; {'; '.join(notes) or 'the time limit came first'}. Give shorter lengths, "
            "or more time"
        )
