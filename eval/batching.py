"""Scores items in batches, longest first, shared over the processes; a batch that does not fit is halved. What must be made before it
can be scored (a text of 128K tokens) is made in threads meanwhile, a batch ahead: the device waits for the first item alone,
and memory holds two batches."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from surgery.core.errors import SurgeryError
from surgery.eval.suite import EvalOptions, EvalModel

T = TypeVar("T")
R = TypeVar("R")

BATCH_TOKENS = {"cpu": 2**13, "cuda": 2**17}  # of a batch that "auto" begins with


def score_in_batches(
    subject: EvalModel,
    options: EvalOptions,
    items: Sequence[T],
    score: Callable[[list[Any]], list[R]],
    size: Callable[[T], int],
    title: str,
    tokens: int | None = None,
    prepare: Callable[[T], Any] | None = None,
) -> list[R]:
    """score(batch) of all items, in their order, to every process. size: tokens of an item, and in a batch none is below half
    of the longest; tokens: what "auto" begins with; prepare: item -> what score gets, in threads, several at a time."""
    order = sorted(range(len(items)), key=lambda i: -size(items[i]))
    own = order[subject.ranks.index :: subject.ranks.count]
    start = tokens or BATCH_TOKENS.get(subject.device.type, 2**17)
    batches = _BatchRunner(subject, options.batch_size, items, score, size, start, prepare)
    found = subject.ranks.all_or_none(lambda: batches.run(own, title))
    every: dict[int, R] = {}
    for part in subject.ranks.gather(found):
        every |= part
    return [every[i] for i in range(len(items))]


@contextlib.contextmanager
def _switch_interval(seconds: float | None) -> Iterator[None]:
    """How long a thread keeps Python's lock that another wants: the one that feeds the device gives it away at every operation,
    and would get it back after 5 ms each time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds or before)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@dataclass
class _BatchRunner(Generic[T, R]):
    subject: EvalModel
    batch_size: int | str
    items: Sequence[T]
    score: Callable[[list[Any]], list[R]]
    size: Callable[[T], int]
    tokens: int
    prepare: Callable[[T], Any] | None
    rows: int | None = None  # what fitted: later batches are of shorter items

    def run(self, own: list[int], title: str) -> dict[int, R]:
        found: dict[int, R] = {}
        bar, pool = self.subject.progress.bar(title, len(own)), ThreadPoolExecutor(self._threads())
        with bar as tick, pool as threads, _switch_interval(2e-4 if self.prepare else None):
            batch = self._next(own)[: 1 if self.prepare else None]
            ready = self._made(threads, batch)
            while batch:
                left = own[len(found) + len(batch) :]
                after = self._next(left)
                ahead = self._made(threads, after)
                scores = self._scored([each.result() for each in ready], batch)
                found.update(zip(batch, scores))
                tick(len(batch))
                batch, ready = after, ahead
        return found

    def _next(self, left: list[int]) -> list[int]:
        if not left:
            return []
        longest = max(1, self.size(self.items[left[0]]))
        wanted = max(1, self.tokens // longest) if self.batch_size == "auto" else int(self.batch_size)
        rows = wanted if self.rows is None else min(wanted, self.rows)
        return [i for i in left[:rows] if 2 * self.size(self.items[i]) >= longest]

    def _threads(self) -> int:
        """Tokenizers work outside Python's lock, each on a core; more than a few would wait for each other's Python."""
        return max(1, min(8, (os.cpu_count() or 1) // self.subject.ranks.count))

    def _made(self, threads: ThreadPoolExecutor, batch: list[int]) -> list[Future[Any]]:
        return [threads.submit(self.prepare or (lambda item: item), self.items[i]) for i in batch]

    def _scored(self, made: list[Any], batch: list[int]) -> list[R]:
        """In as many parts as memory asks for."""
        scores: list[R] = []
        while len(scores) < len(made):
            rows = len(made) if self.rows is None else self.rows
            part = made[len(scores) : len(scores) + rows]
            try:
                scores += self.score(part)
                continue
            except Exception as error:
                self._check(error, len(part), self.size(self.items[batch[len(scores)]]))
            self._halve(len(part))  # now that the error holds no tensors any more
        return scores

    def _check(self, error: Exception, rows: int, length: int) -> None:
        from accelerate.utils.memory import should_reduce_batch_size

        if not should_reduce_batch_size(error):
            raise error
        if rows == 1:
            raise SurgeryError(
                f"{self.subject.name} on {self.subject.device}: out of memory at one row of {length:,} tokens; use shorter "
                "--lengths, or --dtype bfloat16"
            ) from None

    def _halve(self, rows: int) -> None:
        gc.collect()
        if self.subject.device.type == "cuda":
            torch.cuda.empty_cache()
        self.rows = rows // 2
        self.subject.progress.say(f"out of memory at {rows} rows: on with {self.rows}")
