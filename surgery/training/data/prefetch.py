"""Prefetch training steps: in a thread for CPUs, in a separate process for GPUs.

Python runs one thread at a time. A thread that reads and packs text alternates with the thread that launches GPU
kernels, in slices of milliseconds, so that a small model mostly waits for launches. A process avoids this. On CPUs
matrix products run for longer than such a slice, and a thread needs no second copy of the data.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from surgery.core.errors import SurgeryError

PREFETCH_TOKENS = 2**21  # tokens to prefetch: text is tokenized a block at a time
TOKENIZERS_PARALLELISM = "TOKENIZERS_PARALLELISM"
NO = ("false", "off", "no", "n", "f", "0")  # its values that ask for one thread; all others ask for several
PREFETCH_FACTOR = 4  # steps in shared memory, in transit between the processes


def prefetch(items: Callable[[], Iterator[Any]], ahead: int, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that yields an iterator over the items, of which up to `ahead` are prefetched."""
    return ProcessPrefetcher(items, ahead) if device.type == "cuda" else ThreadPrefetcher(items(), ahead)


class ThreadPrefetcher:
    """Prefetches in a thread, which ends with the context."""

    def __init__(self, items: Iterator[Any], ahead: int):
        self.items, self.queue, self.stop_event = items, queue.Queue[Any](ahead), threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Iterator[Any]:
        self.thread.start()
        return self._iterate()

    def __exit__(self, *_: Any) -> None:
        self.stop_event.set()
        self.thread.join()

    def _read(self) -> None:
        try:
            for item in self.items:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:
            self._put((None, error))

    def _put(self, entry: Any) -> bool:
        while not self.stop_event.is_set():
            try:
                self.queue.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _iterate(self) -> Iterator[Any]:
        while True:
            item, error = self.queue.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item


class ProcessPrefetcher:
    """Prefetches in a forked process, which reads in its own thread and sends PREFETCH_FACTOR items at a time."""

    def __init__(self, items: Callable[[], Iterator[Any]], ahead: int):
        self.source = _ItemDataset(items, ahead)
        self.live: Any = None

    def __enter__(self) -> Iterator[Any]:
        pinned = torch.cuda.is_available()
        loader = DataLoader(
            self.source, batch_size=None, num_workers=1, prefetch_factor=PREFETCH_FACTOR, pin_memory=pinned,
            multiprocessing_context="fork", worker_init_fn=_ignore_interrupt,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # a fork of a process with threads: the child uses none of them
            self.live = iter(loader)
        return self._iterate()

    def __exit__(self, *_: Any) -> None:
        self.live = None  # the process ends with the iterator

    def _iterate(self) -> Iterator[Any]:
        while True:
            try:
                item = next(self.live)
            except StopIteration:
                return
            except RuntimeError as error:
                raise SurgeryError(
                    f"the data process exited ({str(error).splitlines()[0]}), possibly for lack of memory. Lower "
                    "data.shuffle to read fewer documents at a time, and continue with --resume."
                ) from None
            if isinstance(item, SurgeryError):
                raise item
            yield item


def limit_tokenizer_threads() -> None:
    """Make `tokenizers` use one thread in this process, so that it can be forked; the data process uses all cores.

    Its thread pool does not survive a fork: a forked process that used it would wait for its threads for ever. Call this
    at the start of a program. It sets TOKENIZERS_PARALLELISM to "", which the library reads as "false", unless the user
    asked for one thread everywhere. If `tokenizers` is already imported, as in a notebook, its pool may exist, and the
    data process uses one thread (`_ItemDataset`).
    """
    if "tokenizers" not in sys.modules and os.environ.get(TOKENIZERS_PARALLELISM, "").lower() not in NO:
        os.environ[TOKENIZERS_PARALLELISM] = ""


def _ignore_interrupt(_: int) -> None:
    """Ignore Ctrl-C in the data process: the training loop handles it, saves a checkpoint and ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _ItemDataset(IterableDataset):
    def __init__(self, items: Callable[[], Iterator[Any]], ahead: int):
        self.items, self.ahead = items, ahead

    def __iter__(self) -> Iterator[Any]:
        """Yield the items; a SurgeryError is yielded instead of raised, because DataLoader would wrap it in
        tracebacks.
        """
        # "" is the value of limit_tokenizer_threads: no pool was forked. Any other process may have used one.
        os.environ[TOKENIZERS_PARALLELISM] = "true" if os.environ.get(TOKENIZERS_PARALLELISM) == "" else "false"
        with ThreadPrefetcher(self.items(), self.ahead) as ready:
            try:
                yield from ready
            except SurgeryError as error:
                yield error
