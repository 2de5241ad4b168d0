"""Scores items in batches, longest first, shared over the processes; a batch that does not fit is halved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from surgery.errors import SurgeryError
from surgery.eval.suites import EvalOptions, Subject

T, R = TypeVar("T"), TypeVar("R")

TOKENS = {"cpu": 2**13, "cuda": 2**17}  # of a batch that "auto" begins with


def in_batches(
    subject: Subject,
    options: EvalOptions,
    items: Sequence[T],
    score: Callable[[list[T]], list[R]],
    size: Callable[[T], int],
    title: str,
    tokens: int | None = None,
) -> list[R]:
    """score(batch) of all items, in their order, to every process. size: tokens of an item, and of a batch none is below half
    of the longest; tokens: what "auto" begins with."""
    order = sorted(range(len(items)), key=lambda i: -size(items[i]))
    own = order[subject.ranks.index :: subject.ranks.count]
    found = subject.ranks.all_or_none(lambda: _own(subject, options, items, own, score, size, title, tokens))
    every: dict[int, R] = {}
    for part in subject.ranks.gather(found):
        every |= part
    return [every[i] for i in range(len(items))]


def _own(
    subject: Subject,
    options: EvalOptions,
    items: Sequence[T],
    own: list[int],
    score: Callable[[list[T]], list[R]],
    size: Callable[[T], int],
    title: str,
    tokens: int | None,
) -> dict[int, R]:
    found: dict[int, R] = {}
    tokens = tokens or TOKENS.get(subject.device.type, 2**17)
    rows: int | None = None  # what fitted: later batches are of shorter items
    with subject.progress.bar(title, len(own)) as tick:
        while len(found) < len(own):
            left = own[len(found) :]
            longest = max(1, size(items[left[0]]))
            wanted = max(1, tokens // longest) if options.batch_size == "auto" else options.batch_size
            rows = wanted if rows is None else min(wanted, rows)
            batch = [i for i in left[:rows] if 2 * size(items[i]) >= longest]
            try:
                scores = score([items[i] for i in batch])
            except Exception as error:
                rows = _halved(error, len(batch), longest, subject)
                continue
            found.update(zip(batch, scores))
            tick(len(batch))
    return found


def _halved(error: Exception, rows: int, length: int, subject: Subject) -> int:
    from accelerate.utils.memory import should_reduce_batch_size

    if not should_reduce_batch_size(error):
        raise error
    if subject.device.type == "cuda":
        torch.cuda.empty_cache()
    if rows == 1:
        raise SurgeryError(
            f"{subject.name} on {subject.device}: out of memory at one row of {length:,} tokens; use shorter --lengths, or "
            "--dtype bfloat16"
        ) from None
    subject.progress.say(f"out of memory at {rows} rows of {length:,} tokens: on with {rows // 2}")
    return rows // 2
