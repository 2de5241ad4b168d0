"""`surgery bench draft`: how many drafts of a drafter its original accepts, and the bound on the speedup that follows.

Prompts are windows of a text; both models continue each greedily. Beside the acceptance stands, for contexts T and
batches B, the bound

    speedup <= tokens(a, k) (W + B C(T)) / (k (W_d + B C_d(T)) + W + B C(T)),    tokens(a, k) = (1 - a^(k+1)) / (1 - a)

with W, C(T): bytes of the weights and of one row's cache that a step of the original reads, W_d, C_d(T): those of the
drafter, a: the measured probability that a draft is accepted, k: drafts per round, the best from 0 to 16
(surgery/speculation/bound.py). Both loops, the original's own `generate` and the one with drafts, are also timed in
turns, at batch 1 and 8. A converted model with mixers takes drafts too, by default those that are looked up in the text
(`prompt-lookup`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from surgery.calibration.data import document_stream, text_windows
from surgery.core.device import choose_device
from surgery.core.errors import SurgeryError, suggestion
from surgery.core.files import explain_disk_errors, size_text, write_json
from surgery.core.progress import Progress
from surgery.eval.model import load
from surgery.eval.speed.draft_replay import replay, replay_lines
from surgery.eval.speed.run import DTYPES, check_result_file, describe_environment
from surgery.eval.speed.serve_tables import reproduction
from surgery.planning.recipe import load_recipe
from surgery.speculation.bound import best_length, speedup
from surgery.speculation.decode import SpeculativeOutput
from surgery.speculation.drafter import Drafter, has_mixers, make_drafter

SIZES = {
    "small": (2, 384, 24),
    "main": (16, 2048, 64),
    "full": (64, 8192, 128),
}  # prompts, their tokens, tokens written
CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144)
BATCHES = (1, 16, 64)
DRAFTS = 4  # per round, while acceptance is measured
TIMED = {"cuda": 5, "cpu": 3}  # runs of each loop, after one that is not counted
TIMED_BATCHES = (1, 8)
LOOKUP = "prompt-lookup"


def bench_draft(
    model: str | os.PathLike[str] | None,
    drafter: str | os.PathLike[str] | None,
    text: str | os.PathLike[str] | None,
    sizes: str | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
    replayed: str | os.PathLike[str] | None = None,
    time_limit: float | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure a drafter on a checkpoint and a text. Return JSON data, written to `out`.

    Args:
        model: checkpoint of the original, a local folder or a Hub id.
        drafter: name or file of a conversion recipe that needs no calibration, the folder of a checkpoint, or
            prompt-lookup. None: sliding-window, or prompt-lookup for an original with mixers.
        text: text file, or Hub data set, of the prompts.
        sizes: small, main or full; None: main on a GPU, else small.
        device, dtype: as in `bench`.
        out: JSON file.
        progress: progress display.
        replayed: result of an earlier run, whose acceptance pattern is timed on random weights
            (eval/speed/draft_replay.py), in place of model, drafter and text.
        time_limit: seconds after which no further case of a replay starts.
        command: the command line's arguments, recorded in the result.
    """
    check_result_file(out)
    others = [n for n, value in {"model": model, "drafter": drafter, "text": text}.items() if value is not None]
    if replayed is not None and others:
        raise SurgeryError(f"--replay takes the place of --{', --'.join(others)}. Leave out one or the other")
    if replayed is None and (model is None or text is None):
        raise SurgeryError("bench draft needs a checkpoint and a text: surgery bench draft --model SRC --text FILE")
    run_device = choose_device(device)
    sizes = sizes or ("main" if run_device.type == "cuda" else "small")
    for what, choice, valid in (("--sizes", sizes, tuple(SIZES)), ("--dtype", dtype or DTYPES[0], DTYPES)):
        if choice not in valid:
            raise SurgeryError(f"{what} {choice!r} is not one of {', '.join(valid)}{suggestion(choice, valid)}")
    count, prompt, new = SIZES[sizes]
    number = getattr(torch, dtype or ("bfloat16" if run_device.type == "cuda" else "float32"))
    if replayed is not None:
        deadline = time.monotonic() + time_limit if time_limit else math.inf
        shown = {"deadline": deadline, "progress": progress or Progress(), "save": partial(save, out)}
        return replay(replayed, sizes, run_device, number, **shown, about=describe_environment(run_device, command))
    assert model is not None and text is not None
    original, tokenizer = load(os.fspath(model), run_device, str(number).removeprefix("torch."), False)
    name = os.fspath(drafter or (LOOKUP if has_mixers(original) else "sliding-window"))
    is_folder = (Path(name) / "config.json").is_file()
    chosen = Path(name) if is_folder else None if name == LOOKUP else load_recipe(name)
    made = make_drafter(original, chosen, progress=progress)
    ids_NP = text_windows(document_stream(os.fspath(text)), tokenizer, count * prompt, prompt, str(text)).to(run_device)
    result = {
        "kind": "draft",
        "sizes": sizes,
        **describe_environment(run_device, command),
        "dtype": str(number).removeprefix("torch."),
    }
    result |= {
        "model": os.fspath(model),
        "drafter": name,
        "prompts": len(ids_NP),
        "prompt_tokens": prompt,
        "new_tokens": new,
    }
    result["window"] = made.sight.window if made.sight else None
    result["sinks"] = made.sight.sinks if made.sight else None
    measured = measure_acceptance(made, ids_NP, new)
    result |= {"extra_bytes": made.extra_bytes, "acceptance": measured.to_dict(), "patterns": measured.patterns}
    result["bounds"] = bounds(made, result["acceptance"]["probability"])
    result["timing"] = [time_loops(made, ids_NP, new, batch) for batch in TIMED_BATCHES]
    save(out, result)
    return result


def save(out: Path | None, result: dict[str, Any]) -> None:
    """Write the result as JSON."""
    if out is not None:
        with explain_disk_errors(out):
            write_json(out, result)


def measure_acceptance(drafter: Drafter, ids_NP: Tensor, new: int) -> SpeculativeOutput:
    """Return the statistics of greedy drafts, summed over the prompts, and the pattern of each prompt."""
    options = {"max_new_tokens": new, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    total = SpeculativeOutput(ids_NP)
    for ids_1P in ids_NP.split(1):
        output = drafter.generate(ids_1P, torch.ones_like(ids_1P), draft_tokens=DRAFTS, **options)
        for name in ("drafted", "accepted", "tested", "rounds", "forwards", "draft_forwards", "generated"):
            setattr(total, name, getattr(total, name) + getattr(output, name))
        total.patterns += output.patterns
    return total


def bounds(drafter: Drafter, probability: float) -> list[dict[str, Any]]:
    """Return, for each context and batch, the bytes of a step of both models, the best number of drafts and the
    bound.
    """
    rows = []
    for context in CONTEXTS:
        for batch in BATCHES:
            whole, draft = drafter.step_bytes(context, batch)
            best = best_length(probability, draft / whole)
            row = {"context": context, "batch": batch, "original_bytes": whole, "draft_bytes": draft}
            rows.append({**row, "drafts": best, "bound": speedup(probability, best, draft / whole)})
    return rows


def time_loops(drafter: Drafter, ids_NP: Tensor, new: int, batch: int) -> dict[str, float]:
    """Return the median seconds of `generate` of the original and of the drafter, run in turns, for a batch of the
    prompts.

    Prompts are repeated where the batch is larger than their number.
    """
    ids = ids_NP[torch.arange(batch) % len(ids_NP)]
    mask, options = torch.ones_like(ids), {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    calls = {
        "original": lambda: drafter.model.generate(ids, attention_mask=mask, **options),
        "drafter": lambda: drafter.generate(ids, mask, draft_tokens=DRAFTS, **options),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TIMED.get(ids.device.type, TIMED["cpu"]) + 1):
        for name, call in calls.items():
            synchronize(ids.device)
            began = time.perf_counter()
            call()
            synchronize(ids.device)
            seconds[name].append(time.perf_counter() - began)
    medians = {name: median(times[1:]) for name, times in seconds.items()}
    return {"batch": batch, **medians, "speedup": medians["original"] / medians["drafter"]}


def synchronize(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def draft_tables(result: dict[str, Any]) -> list[Any]:
    """Return the result as rich tables and lines."""
    from rich.markup import escape
    from rich.table import Table

    if result["kind"] == "draft replay":
        return [*replay_lines(result), *map(escape, reproduction(result))]
    acceptance = result["acceptance"]
    table = Table(
        title="bound on the speedup (drafts per round)",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    table.add_column("context")
    for batch in BATCHES:
        table.add_column(f"batch {batch}", justify="right", no_wrap=True)
    for context in CONTEXTS:
        cells = [f"{r['bound']:.2f}x ({r['drafts']})" for r in result["bounds"] if r["context"] == context]
        table.add_row(f"{context:,}", *cells)
    lines = [
        f"{result['drafter']} drafts for {result['model']}: {size_text(result['extra_bytes'])} of extra weights",
        f"{acceptance['acceptance']:.1%} of {acceptance['drafted']} drafts accepted, {acceptance['probability']:.1%} "
        "of those that were reached; "
        f"{acceptance['mean_run']:.2f} per round of {DRAFTS}; {acceptance['generated']} tokens in "
        f"{acceptance['forwards']} forwards of the original",
    ]
    if result["window"] and result["window"] >= result["prompt_tokens"] + result["new_tokens"]:
        lines.append("the whole text fits into the drafter's window, so the acceptance says nothing about longer texts")
    lines += [
        f"batch {row['batch']}: {row['original']:.3f} s alone, {row['drafter']:.3f} s with drafts, "
        f"{row['speedup']:.2f}x"
        for row in result["timing"]
    ]
    where = (
        f"{result['device']}, {result['dtype']}, {result['prompts']} prompts of {result['prompt_tokens']} tokens, "
        f"{result['date']}"
    )
    return [
        *lines,
        "",
        table,
        "bytes read per step: weights once, cache of each row",
        where,
        *map(escape, reproduction(result)),
    ]
