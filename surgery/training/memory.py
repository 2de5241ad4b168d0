"""Activations of a step in a GPU's memory: the choice of `memory: auto`, and what is left to try when memory runs out.

    choice = choose(measure, rows, length, available)      before the first step
    choice = reduce_choice(choice, can_checkpoint=True)    after torch.OutOfMemoryError; None: nothing is left to try

A smaller number of rows per forward leaves the batch as it is: there are more forwards per step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from surgery.training.stages import Batch

USABLE_SHARE = 0.9  # of the free memory; the rest is for fragmentation and workspaces of libraries
KEEP_TOKENS = 4096  # per forward: with fewer, recomputing activations of more rows is faster than keeping those of few


@dataclass(frozen=True)
class MemoryChoice:
    """memory: `keep` or `checkpoint` (recompute) the activations. rows: per forward on one device."""

    memory: str
    rows: int

    def __str__(self) -> str:
        kept = "activations are kept" if self.memory == "keep" else "activations are recomputed"
        return f"{kept}, {self.rows} row{'' if self.rows == 1 else 's'} per forward"


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a forward and backward pass takes: fixed + per_row * rows."""

    fixed: int
    per_row: int

    def total(self, rows: int) -> int:
        """Return the bytes of `rows` rows."""
        return self.fixed + self.per_row * rows


def choose(
    measure: Callable[[str], MemoryNeed | None], rows: int, length: int, available: int, can_checkpoint: bool = True
) -> MemoryChoice:
    """Return the choice that fits `available` bytes and is expected to be fastest: activations kept, if need be with
    fewer rows down to KEEP_TOKENS tokens per forward, otherwise recomputed.

    measure: returns the need of `keep` or `checkpoint`, None if one row ran out of memory. rows: of the recipe, the most
    per forward; the choice has a divisor. length: tokens per row.
    """
    divisors = [r for r in range(rows, 0, -1) if rows % r == 0]
    for memory in ("keep", "checkpoint") if can_checkpoint else ("keep",):
        need = measure(memory)
        for r in divisors if need is not None else ():
            is_small = r != rows and r * length < KEEP_TOKENS
            if memory == "keep" and is_small and can_checkpoint:
                break
            if need.total(r) <= available:  # type: ignore[union-attr]
                return MemoryChoice(memory, r)
    return MemoryChoice("checkpoint" if can_checkpoint else "keep", 1)


def reduce_choice(choice: MemoryChoice, can_checkpoint: bool) -> MemoryChoice | None:
    """Return the next choice that needs less memory: recompute activations, then divide the rows by their smallest
    prime factor. None: one row is recomputed already.
    """
    if choice.memory == "keep" and can_checkpoint:
        return MemoryChoice("checkpoint", choice.rows)
    if choice.rows == 1:
        return None
    factor = next(f for f in range(2, choice.rows + 1) if choice.rows % f == 0)
    return MemoryChoice(choice.memory, choice.rows // factor)


def read_choice(stored: Any, rows: int) -> MemoryChoice | None:
    """Return the choice that a checkpoint's notes hold; None if there is none, or it does not fit `rows`."""
    if not isinstance(stored, dict) or stored.get("memory") not in ("keep", "checkpoint"):
        return None
    chosen = stored.get("rows")
    if type(chosen) is not int or chosen < 1 or rows % chosen:
        return None
    return MemoryChoice(stored["memory"], chosen)


def split_rows(batches: list[Batch], rows: int) -> list[Batch]:
    """Divide micro-batches into ones of `rows` rows, in the same order."""
    parts: list[Batch] = []
    for batch in batches:
        split = {name: tensor.split(rows) for name, tensor in batch.items()}
        count = len(next(iter(split.values())))
        parts += [{name: tensors[i] for name, tensors in split.items()} for i in range(count)]
    return parts


def measure_need(run: Callable[[int], None], rows: int, device: torch.device) -> MemoryNeed | None:
    """Return the memory that `run(number of rows)` takes on a GPU, from its peaks with one and with two rows.

    None if one row runs out of memory. If two rows do, every row counts as much as the first one.
    """
    one = _peak(lambda: run(1), device)
    if one is None:
        return None
    if rows == 1:
        return MemoryNeed(one, 0)
    two = _peak(lambda: run(2), device)
    per_row = one if two is None else max(0, two - one)
    return MemoryNeed(one - per_row, per_row)


def _peak(run: Callable[[], None], device: torch.device) -> int | None:
    release_cached_memory(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        run()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated(device) - before


def available_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a GPU, less a share for fragmentation."""
    device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # since torch 2.8
    limit = int(total * fraction(device)) - reserved if fraction is not None else free
    return int(USABLE_SHARE * (min(free, limit) + reserved - torch.cuda.memory_allocated(device)))


def release_cached_memory(device: torch.device) -> None:
    """Free unreachable tensors and give cached GPU memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
