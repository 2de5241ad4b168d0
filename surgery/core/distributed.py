"""Processes of one run, started by `accelerate launch -m surgery ..` or torchrun, each with its own GPU or share of the
CPU.

With a single process no function here communicates.

No process waits forever for a failed peer. A process that raises writes its error to the TCP store, which waiting
processes poll. A killed process breaks its connection. A hung process misses its heartbeat (180 s).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from surgery.core.errors import Interrupted, SurgeryError

T = TypeVar("T")
LOST_PEER_MESSAGE = (
    "another process of this run has ended or stopped responding. Finished work is kept; run the same command with "
    "--resume to continue"
)
HEARTBEAT_SECONDS = 5.0  # seconds between heartbeats
HEARTBEAT_TIMEOUT = 180.0  # seconds without a heartbeat until a process counts as lost
ERROR_GRACE_SECONDS = 10.0  # seconds that a failing process waits for the others to read its error
FAILED_KEY, MESSAGE_KEY, NOTICED_KEY = "failed", "said", "noticed"  # keys of the store


@dataclass(frozen=True)
class DistContext:
    """This process among those of a run. index: its rank; count: world size; store: the TCP store for errors and
    heartbeats.
    """

    index: int = 0
    count: int = 1
    store: Any = field(default=None, compare=False, repr=False)

    @property
    def main(self) -> bool:
        """Whether this process (rank 0) writes files and prints."""
        return self.index == 0

    # -- objects -----------------------------------------------------------------------------------
    def gather(self, value: T) -> list[T]:
        """Return the objects of all processes, ordered by rank, on every process."""
        if self.count == 1:
            return [value]
        self._barrier()
        every: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(every, value)
        return every

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's object on every process."""
        if self.count == 1:
            return value
        self._barrier()
        payload = [value]
        torch.distributed.broadcast_object_list(payload)
        return payload[0]

    def together_or_raise(self, do: Callable[[], T]) -> T:
        """Return do(), or raise on every process if it raises on any. do() must not communicate."""
        result, error = None, None
        try:
            result = do()
        except Exception as exception:
            error = exception
        failed = [e for e in self.gather(error) if e is not None] if self.count > 1 else [error] if error else []
        if failed:
            raise error or failed[0]
        return result  # type: ignore[return-value]

    def on_main(self, do: Callable[[], T]) -> T:
        """Run do() on rank 0 and return its result, or raise its error, on every process. do() must not communicate."""
        return self.broadcast_object(self.together_or_raise(lambda: do() if self.main else None))  # type: ignore[return-value]

    def assign_jobs(self, costs: Sequence[float]) -> list[int]:
        """Return the rank that does each job: the most expensive job first, each to the rank with the least load."""
        load, owners = [0.0] * self.count, [0] * len(costs)
        for job in sorted(range(len(costs)), key=lambda i: -costs[i]):
            owners[job] = load.index(min(load))
            load[owners[job]] += costs[job]
        return owners

    # -- tensors -----------------------------------------------------------------------------------
    def broadcast_(self, tensor: Tensor, owner: int) -> Tensor:
        """Overwrite `tensor` in place with the values of the rank `owner`."""
        if self.count > 1 and tensor.numel():
            self._wait(torch.distributed.broadcast(tensor, owner, async_op=True))
        return tensor

    def ordered_reduce_(self, total: Tensor, addend: Tensor, owners: Sequence[int], first: bool) -> None:
        """Add each owner's `addend` to `total` in place, in the order of `owners`, so that the sum is deterministic.

        Each process sums only its slice of the rows; `gather_rows_` then distributes them. first: overwrite `total`
        instead of adding to it.
        """
        if self.count == 1:
            total.copy_(addend) if first else total.add_(addend)
            return
        for rank, rows in enumerate(self._row_slices(total)):
            if not len(total[rows]):
                continue
            rows_of_owner = addend[rows].contiguous()
            got = [torch.empty_like(rows_of_owner) for _ in range(self.count)] if rank == self.index else None
            self._wait(torch.distributed.gather(rows_of_owner, got, rank, async_op=True))
            for owner in owners if got is not None else ():
                total[rows].copy_(got[owner]) if first else total[rows].add_(got[owner])  # type: ignore[index]
                first = False

    def ordered_sum(self, total: Tensor | None, addend: Tensor, owners: Sequence[int]) -> Tensor:
        """Return `total` (None: zero) plus each owner's part, as `ordered_reduce_`.

        A single process returns its first part itself.
        """
        if total is None and self.count == 1:
            return addend
        whole = torch.empty_like(addend) if total is None else total
        self.ordered_reduce_(whole, addend, owners, total is None)
        return whole

    def gather_rows_(self, total: Tensor) -> None:
        """Distribute the row slices summed by `ordered_reduce_`, so that every process has all of `total`."""
        for rank, rows in enumerate(self._row_slices(total)):
            self.broadcast_(total[rows], rank)

    def _row_slices(self, total: Tensor) -> list[slice]:
        edges = [len(total) * rank // self.count for rank in range(self.count + 1)]
        return [slice(first, last) for first, last in pairwise(edges)]

    # -- failing together ----------------------------------------------------------------------------
    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """End all processes if one fails inside the context; the error is reported once."""
        try:
            yield
        except BaseException as error:
            if self.count > 1 and not getattr(error, "reported_by_peer", False):
                self._publish_error(error)
            raise

    def _publish_error(self, error: BaseException) -> None:
        """Write an error to the store, or raise the peer's error if another process failed first."""
        with suppress(torch.distributed.DistError):
            if self.store.add(FAILED_KEY, 1) > 1:
                self._wait_until(lambda: self.store.check([MESSAGE_KEY]))
                raise self._peer_error() from None
            refused = isinstance(error, SurgeryError) and not isinstance(error, Interrupted)
            kind = "" if isinstance(error, SurgeryError) else f"{type(error).__name__}: "
            self.store.set(MESSAGE_KEY, f"{'refused' if refused else 'kept'} {kind}{error}")
            self._wait_until(lambda: self.store.add(NOTICED_KEY, 0) >= self.count - 1)

    def _wait_until(self, seen: Callable[[], bool]) -> None:
        until = time.monotonic() + ERROR_GRACE_SECONDS
        while time.monotonic() < until and not seen():
            time.sleep(0.02)

    def _peer_error(self) -> SurgeryError:
        how, _, sentence = self.store.get(MESSAGE_KEY).decode().partition(" ")
        self.store.add(NOTICED_KEY, 1)
        error = (SurgeryError if how == "refused" else Interrupted)(sentence)
        error.reported_by_peer = True
        return error

    def _check_peers(self, heard: dict[int, tuple[bytes, float]]) -> None:
        """Raise if another process has failed, or has sent no heartbeat for HEARTBEAT_TIMEOUT seconds."""
        try:
            if self.store.check([MESSAGE_KEY]):
                raise self._peer_error()
            for rank, beat in enumerate(self.store.multi_get([f"beat{rank}" for rank in range(self.count)])):
                if rank not in heard or heard[rank][0] != beat:
                    heard[rank] = beat, time.monotonic()
                elif time.monotonic() - heard[rank][1] > HEARTBEAT_TIMEOUT:
                    raise Interrupted(f"process {rank}: {LOST_PEER_MESSAGE}")
        except torch.distributed.DistError:
            raise Interrupted(LOST_PEER_MESSAGE) from None

    def _barrier(self) -> None:
        """Wait until every process is here. Uses gloo, also with GPUs."""
        self._wait(torch.distributed.all_reduce(torch.zeros(1), async_op=True))

    def _wait(self, work: Any) -> None:
        """Wait for a collective operation, checking once a second that the other processes are alive."""
        heard: dict[int, tuple[bytes, float]] = {}
        looked = time.monotonic()
        while not work.is_completed():
            time.sleep(2e-4)
            if time.monotonic() - looked > 1.0:
                self._check_peers(heard)
                looked = time.monotonic()
        try:
            work.wait()
        except RuntimeError:
            with suppress(torch.distributed.DistError):
                self._wait_until(lambda: self.store.check([MESSAGE_KEY]) or not self.store.check([FAILED_KEY]))
            self._check_peers({})
            raise Interrupted(LOST_PEER_MESSAGE) from None


_contexts: list[DistContext] = []


def init_distributed(device: str | None) -> DistContext:
    """Return the process group set up by `accelerate launch` or torchrun, initialized once per process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return DistContext()
    if not _contexts:
        gpus = device != "cpu" and torch.cuda.is_available()
        distributed: Any = torch.distributed  # does not export these names to type checkers
        store, index, count = next(distributed.rendezvous("env://", timeout=timedelta(minutes=10)))
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if gpus else "gloo",
            store=distributed.PrefixStore("group", store),
            rank=index,
            world_size=count,
            timeout=timedelta(days=2),  # a process may work alone for long; lost peers are detected by heartbeats
        )
        if gpus:
            torch.cuda.set_device(local_device(DistContext(index, count), device))
        _contexts.append(DistContext(index, count, distributed.PrefixStore("surgery", store)))
        _send_heartbeat(_contexts[0])
        threading.Thread(target=_heartbeat_loop, args=(_contexts[0],), daemon=True).start()
        _contexts[0].gather(None)  # every process has sent its first heartbeat
    return _contexts[0]


def _send_heartbeat(ranks: DistContext) -> None:
    ranks.store.add(f"beat{ranks.index}", 1)


def _heartbeat_loop(ranks: DistContext) -> None:
    with suppress(torch.distributed.DistError, RuntimeError):  # the process that hosts the store may end first
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            _send_heartbeat(ranks)


def local_device(ranks: DistContext, device: str | None) -> str | None:
    """Return the device of this process: with several processes, a GPU of its own."""
    if ranks.count == 1 or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{int(os.environ.get('LOCAL_RANK', ranks.index)) % torch.cuda.device_count()}"
