"""Steps read ahead of the loop: beside it in a thread, or, for a GPU, in a process of its own.

Python runs one thread at a time. A thread that reads and packs text takes turns with the one that launches a GPU's
kernels, milliseconds each, and a small model then waits for launches most of the time; a process does not. On CPUs
products run for longer than that, and a thread costs no second copy of anything.
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

PREFETCH_TOKENS = 2**21  # read ahead: tokenising comes in bursts of a block
TOKENIZERS_PARALLELISM = "TOKENIZERS_PARALLELISM"
PREFETCH_FACTOR = 4  # steps on their way from process to process, which lie in shared memory


def prefetch(items: Callable[[], Iterator[Any]], ahead: int, device: torch.device) -> AbstractContextManager[Any]:
    """with prefetch(..) as ready: the items, `ahead` of them read before they are asked for."""
    return ProcessPrefetcher(items, ahead) if device.type == "cuda" else ThreadPrefetcher(items(), ahead)


class ThreadPrefetcher:
    """In a thread; used as a context so that it ends with the loop."""

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
    """In a forked process, which reads ahead in a thread of its own and sends a few items at a time."""

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
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: the child uses none of them
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
                    f"the process that reads the data ended ({str(error).splitlines()[0]}); is there memory left? A "
                    "smaller data.shuffle reads less at a time; go on with --resume"
                ) from None
            if isinstance(item, SurgeryError):
                raise item
            yield item


def limit_tokenizer_threads() -> None:
    """Tokenizers use one thread in this process, all cores in the one that reads: threads that have run once cannot be
    forked, and there is no asking whether they have. Called where a program begins; "" means no to them, as "false"
    does, which a user may have said. Where they are imported already, as in a notebook, they may have: nothing is said
    then, and the library itself keeps a forked process to one thread."""
    if "tokenizers" not in sys.modules:
        os.environ.setdefault(TOKENIZERS_PARALLELISM, "")


def _ignore_interrupt(_: int) -> None:
    """A Ctrl-C is for the loop, which ends this process when it has written its checkpoint."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _ItemDataset(IterableDataset):
    def __init__(self, items: Callable[[], Iterator[Any]], ahead: int):
        self.items, self.ahead = items, ahead

    def __iter__(self) -> Iterator[Any]:
        """What a person can put right is handed over as it is: DataLoader would wrap it in tracebacks."""
        if os.environ.get(TOKENIZERS_PARALLELISM) == "":  # see limit_tokenizer_threads
            os.environ[TOKENIZERS_PARALLELISM] = "true"
        with ThreadPrefetcher(self.items(), self.ahead) as ready:
            try:
                yield from ready
            except SurgeryError as error:
                yield error
