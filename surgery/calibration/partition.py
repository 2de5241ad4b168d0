"""Partition calibration rows over processes with bit-reproducible sums.

The division into row shards depends only on the number and length of the rows. One process sums a shard, chunk by
chunk, and the sums of the shards are added in the order of the shards. So a sum has the same bits for any number of
processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from surgery.core.distributed import DistContext

MAX_SHARDS = 7  # of the rows to fit to; the held-out rows (an eighth in the shipped recipes) make one more
MIN_SHARD_TOKENS = 2048  # fewest tokens of a shard

Segment = tuple[int, int, int]  # (first, last, most): rows first:last, in at most `most` shards


@dataclass(frozen=True)
class RowShard:
    """Rows first:last, summed by the process `owner`."""

    first: int
    last: int
    owner: int


@dataclass(frozen=True)
class Round:
    """Consecutive row shards, at most one for each process.

    owners: process of each shard, in order. own_rows: the rows of this process's shard, an empty range if it has none.
    """

    owners: tuple[int, ...]
    own_rows: range

    def chunks(self, step: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of this process's rows, `step` rows at a time."""
        return row_chunks(self.own_rows.start, self.own_rows.stop, step)


class RowPartition:
    """Division of rows over processes: segments, each divided into row shards.

    The division repeats every `period` rows. Without segments, this process is the only one and any range of rows is
    one shard. tokens: tokens per row.
    """

    def __init__(self, ranks: DistContext, tokens: int, segments: Sequence[Segment], period: int):
        self.ranks, self.period, self.shards = ranks, period, list[RowShard]()
        for first, last, most in segments:
            count = max(1, min(most, last - first, (last - first) * tokens // MIN_SHARD_TOKENS))
            edges = [first + (last - first) * i // count for i in range(count + 1)]
            for start, stop in pairwise(edges):
                self.shards.append(RowShard(start, stop, len(self.shards) % ranks.count))

    def rounds(self, first: int, last: int) -> list[Round]:
        """Return the rounds of a segment first:last, or of a segment repeated one or more periods later."""
        if not self.shards:
            return [Round((0,), range(first, last))]
        past = first // self.period * self.period
        shards = [shard for shard in self.shards if first - past <= shard.first < last - past]
        assert shards and (shards[0].first, shards[-1].last) == (first - past, last - past)
        count = self.ranks.count
        return [self._round(shards[i : i + count], past) for i in range(0, len(shards), count)]

    def _round(self, shards: list[RowShard], past: int) -> Round:
        ranges = [range(p.first + past, p.last + past) for p in shards if p.owner == self.ranks.index]
        return Round(tuple(shard.owner for shard in shards), ranges[0] if ranges else range(0))

    def row_owners(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first, last, owner) for all rows."""
        for past in range(0, rows, self.period):
            yield from ((shard.first + past, shard.last + past, shard.owner) for shard in self.shards)


def row_chunks(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of rows first:last, `step` rows at a time."""
    return ((start, min(start + step, last)) for start in range(first, last, step))
