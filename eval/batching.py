"""Score items in batches, longest first, divided among processes; a batch that does not fit in memory is halved.

Inputs that are expensive to build (a text of 128K tokens) are built in threads one batch ahead: the device waits for
the first item only, and memory holds two batches.
"""

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
from surgery.eval.suite import EvalModel, EvalOptions

T = TypeVar("T")
R = TypeVar("R")

BATCH_TOKENS = {"cpu": 2**13, "cuda": 2**17}  # tokens per batch that "auto" starts with


def score_in_batches(
    eval_model: EvalModel,
    options: EvalOptions,
    items: Sequence[T],
    score: Callable[[list[Any]], list[R]],
    size: Callable[[T], int],
    title: str,
    *,
    tokens: int | None = None,
    prepare: Callable[[T], Any] | None = None,
    request: Callable[[T], Any] = lambda item: item,
) -> list[R]:
    """Return score(batch) for all items, in their order, on every process.

    Every batch is written to the model's journal (eval/journal.py), if it has one. Items that an interrupted run
    finished are not scored again. Batches are divided as in a run without interruption, so that the scores are the same
    to the bit.

    Args:
        score: scores a list of prepared items.
        size: tokens of an item. The shortest item of a batch has at least half the tokens of its longest.
        title: label of the progress bar.
        tokens: tokens per batch that `batch_size="auto"` starts with; default by device (BATCH_TOKENS).
        prepare: item -> input of `score`, called in threads.
        request: item -> everything that its score depends on, for the journal: JSON data, or an object whose repr says
            all.
    """
    order = sorted(range(len(items)), key=lambda i: -size(items[i]))
    indices = order[eval_model.ranks.index :: eval_model.ranks.count]
    start = tokens or BATCH_TOKENS.get(eval_model.device.type, 2**17)
    journal = eval_model.journal
    keys = [journal.key_of(_kind(title, eval_model), request(item)) for item in items] if journal is not None else []
    batches = _BatchRunner(eval_model, options.batch_size, items, score, size, start, prepare, keys)
    scores = eval_model.ranks.together_or_raise(lambda: batches.run(indices, title))
    every: dict[int, R] = {}
    for rank_scores in eval_model.ranks.gather(scores):
        every |= rank_scores
    return [every[i] for i in range(len(items))]


def _kind(title: str, eval_model: EvalModel) -> str:
    """Return the title without the model's name, which may be a path that changes."""
    return title.replace(eval_model.name, "")


@contextlib.contextmanager
def _switch_interval(seconds: float | None) -> Iterator[None]:
    """Set Python's thread switch interval (seconds) for the context.

    The thread that feeds the device releases Python's lock at every operation and would wait up to 5 ms (the default)
    to get it back while others tokenize.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds or before)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@dataclass
class _BatchRunner(Generic[T, R]):
    """The batches of one process.

    Attributes:
        keys: keys of the items in the journal; empty without one.
        rows: largest number of rows that fit so far; later batches have shorter items.
    """

    eval_model: EvalModel
    batch_size: int | str
    items: Sequence[T]
    score: Callable[[list[Any]], list[R]]
    size: Callable[[T], int]
    tokens: int
    prepare: Callable[[T], Any] | None
    keys: list[str]
    rows: int | None = None

    def run(self, order: list[int], title: str) -> dict[int, R]:
        """Score the items of this process; return {index: score}."""
        results: dict[int, R] = {}
        bar, pool = self.eval_model.progress.bar(title, len(order)), ThreadPoolExecutor(self._threads())
        with bar as tick, pool as threads, _switch_interval(2e-4 if self.prepare else None):
            batch = self._next_batch(order)[: 1 if self.prepare else None]
            ready = self._prepare(threads, batch)
            while batch:
                remaining = order[len(results) + len(batch) :]
                after = self._next_batch(remaining)
                ahead = self._prepare(threads, after)
                results.update(self._finish_batch([future.result() for future in ready], batch))
                tick(len(batch))
                batch, ready = after, ahead
        return results

    def _finish_batch(self, made: list[Any], batch: list[int]) -> dict[int, R]:
        """Score the items of a batch that the journal lacks, and write them to it; return {index: score} of all."""
        journal = self.eval_model.journal
        todo = [i for i in batch if not self._is_stored(i)]
        scores = self._score_batch(made, todo)
        if journal is None:
            return dict(zip(todo, scores))
        if todo:
            journal.append([self.keys[i] for i in todo], scores)
        stored = {i: journal.stored[self.keys[i]] for i in batch if self._is_stored(i)}
        journal.used += len(stored)
        return dict(zip(todo, scores)) | stored

    def _is_stored(self, i: int) -> bool:
        return self.eval_model.journal is not None and self.keys[i] in self.eval_model.journal.stored

    def _next_batch(self, remaining: list[int]) -> list[int]:
        """Return the indices of the next batch: a prefix of `remaining`, which is sorted by decreasing size."""
        if not remaining:
            return []
        longest = max(1, self.size(self.items[remaining[0]]))
        largest = max(1, self.tokens // longest) if self.batch_size == "auto" else int(self.batch_size)
        rows = largest if self.rows is None else min(largest, self.rows)
        return [i for i in remaining[:rows] if 2 * self.size(self.items[i]) >= longest]

    def _threads(self) -> int:
        """Return the number of threads: tokenizers run outside Python's lock, but more than 8 threads would wait for
        it.
        """
        return max(1, min(8, (os.cpu_count() or 1) // self.eval_model.ranks.count))

    def _prepare(self, threads: ThreadPoolExecutor, batch: list[int]) -> list[Future[Any]]:
        """Prepare the items of a batch that are to be scored."""
        todo = [i for i in batch if not self._is_stored(i)]
        return [threads.submit(self.prepare or (lambda item: item), self.items[i]) for i in todo]

    def _score_batch(self, made: list[Any], batch: list[int]) -> list[R]:
        """Score a batch in as many parts as memory requires."""
        scores: list[R] = []
        while len(scores) < len(made):
            rows = len(made) if self.rows is None else self.rows
            inputs = made[len(scores) : len(scores) + rows]
            try:
                scores += self.score(inputs)
                continue
            except Exception as error:
                self._check_memory_error(error, len(inputs), self.size(self.items[batch[len(scores)]]))
            self._halve_rows(len(inputs))  # outside the except block: the error holds tensors
        return scores

    def _check_memory_error(self, error: Exception, rows: int, length: int) -> None:
        """Re-raise errors other than out-of-memory; raise SurgeryError if a single row does not fit."""
        from accelerate.utils.memory import should_reduce_batch_size

        if not should_reduce_batch_size(error):
            raise error
        if rows == 1:
            raise SurgeryError(
                f"{self.eval_model.name} on {self.eval_model.device}: out of memory at one row of {length:,} tokens; "
                "use shorter "
                "--lengths, or --dtype bfloat16"
            ) from None

    def _halve_rows(self, rows: int) -> None:
        gc.collect()
        if self.eval_model.device.type == "cuda":
            torch.cuda.empty_cache()
        self.rows = rows // 2
        self.eval_model.progress.say(f"out of memory at {rows} rows per batch; continuing with {self.rows}")
