"""Launch plans of the kernels of gated masks: where chunks lie, tile sizes, warps, buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.kernel_tensors import HAS_TUPLE_ARGUMENTS, GroupTensor, HeadTensor, LevelTensor
from surgery.kernels.ssd.chunk import ChunkPointers, sum_gates
from surgery.mixers.common.packed_pieces import PackedPieces

# Stages of pipelined loops: the fastest on one H200, 2026-11-21, B = 2, 48 heads, K = 128, V = 64, T = 8192.
STAGES = 2

MAX_FEATURES, MAX_VALUES = 256, 128
MOST_HEADS = 2**15  # of a row: heads and tiles of values share an axis of a grid, which is limited to 65,535


@dataclass(frozen=True)
class ChunkTable:
    """Where chunks of C tokens lie (kernels/ssd/chunk.py).

    Attributes:
        seqs: rows of a batch, or sequences packed into one row.
        length: tokens of a row (T).
        chunk: tokens of a chunk (C), a power of two.
        count: chunks of a row of a batch; 0 for packed sequences.
        places: chunks of all sequences (M).
        most: chunks of one sequence at most.
        start_B: position of each row's first token.
        ends: borders of packed sequences (cu_seqlens), else None.
        first_of: first place of each packed sequence, else None.
        owner_of: sequence of each place, if it is known.
    """

    seqs: int
    length: int
    chunk: int
    count: int
    places: int
    most: int
    start_B: Tensor
    ends: Tensor | None = None
    first_of: Tensor | None = None
    owner_of: Tensor | None = None

    # Schema of the arguments of `from_geometry` (kernels/chunked_op.py).
    GEOMETRY = "Tensor start, Tensor? ends, int chunk, bool aligned"

    @classmethod
    def from_rows(cls, start_B: Tensor, length: int, chunk: int, aligned: bool = False) -> ChunkTable:
        """Lay out rows of a batch. aligned: all starts are known to be multiples of the chunk."""
        count = -(-(length + (0 if aligned else chunk - 1)) // chunk)
        return cls(len(start_B), length, chunk, count, len(start_B) * count, count, start_B)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, length: int, chunk: int) -> ChunkTable:
        """Lay out sequences packed into one row, each from position 0 on. Does not wait for the device."""
        chunks = (cu_seqlens.diff() + chunk - 1) // chunk
        first_of, places = (chunks.cumsum(0) - chunks).int(), length // chunk + len(chunks)
        return cls(len(chunks), length, chunk, 0, places, length // chunk + 1, cu_seqlens, cu_seqlens, first_of)

    @classmethod
    def from_pieces(cls, pieces: PackedPieces, chunk: int) -> ChunkTable:
        """Lay out pieces as `from_cu_seqlens`, by tables that the layers of a step share."""
        length, seqs = pieces.length, len(pieces.counts)
        places = length // chunk + seqs

        def tables(_first_R: Tensor, _seen_R: Tensor, count_R: Tensor) -> list[Tensor]:
            chunks = (count_R + chunk - 1) // chunk
            table = cls(seqs, length, chunk, 0, places, 0, chunks, chunks, (chunks.cumsum(0) - chunks).int())
            return [table.pointers().first_of, table.owners(0)]

        first_of, owner_of = pieces.tables(("ssd", chunk), tables, torch.int32)
        most = max(1, *(-(-count // chunk) for count in pieces.counts))
        ends = pieces.cu_seqlens
        return cls(seqs, length, chunk, 0, places, most, ends, ends, first_of, owner_of)

    @classmethod
    def from_geometry(
        cls, v_BGTV: Tensor, start_B: Tensor, ends: Tensor | None, chunk: int, aligned: bool
    ) -> ChunkTable:
        """Lay out packed sequences if `ends` (cu_seqlens) is given, else rows of a batch."""
        length = v_BGTV.shape[2]
        if ends is None:
            return cls.from_rows(start_B, length, chunk, aligned)
        return cls.from_cu_seqlens(ends, length, chunk)

    @property
    def bits(self) -> int:
        """log2 of the chunk."""
        return self.chunk.bit_length() - 1

    @property
    def varlen(self) -> bool:
        """Whether sequences are packed into one row."""
        return self.ends is not None

    def units(self, shift: int) -> int:
        """Return an upper bound on the segments of 2^shift chunks of all sequences, shift > 0.

        Segments lie on a grid from position 0, so a sequence may begin and end inside one.
        """
        if self.varlen:
            return (self.places >> shift) + self.seqs
        return self.seqs * ((self.count >> shift) + 2)

    def owners(self, shift: int) -> Tensor:
        """Return the sequence of each segment of 2^shift chunks, int32; only for packed sequences."""
        if self.first_of is None:
            return self.start_B
        if self.owner_of is not None and not shift:
            return self.owner_of
        at, units = self.first_of >> shift, self.places
        if shift:
            at, units = at + torch.arange(self.seqs, device=at.device, dtype=at.dtype), self.units(shift)
        which = torch.arange(units, device=at.device, dtype=at.dtype)
        return (torch.searchsorted(at, which, right=True) - 1).clamp_min(0).int()

    def pointers(self, shift: int = 0) -> ChunkPointers:
        """Return the tables for a kernel whose programs take segments of 2^shift chunks.

        Absent tables are `start_B`, unread.
        """
        ends, first_of = (self.start_B if x is None else x for x in (self.ends, self.first_of))
        return ChunkPointers(self.start_B, ends, self.owners(shift), first_of)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(count, T, M), arguments of every kernel."""
        return self.count, self.length, self.places


class SlotStates(NamedTuple):
    """States between chunks. slots_GMFV: for gated masks the state before each chunk; for log-linear masks the slots of
    a Fenwick tree, with the summed log-gates of each slot's segment (totals_GM) and of its right sibling
    (rights_GM).
    """

    slots_GMFV: Tensor
    totals_GM: Tensor | None = None
    rights_GM: Tensor | None = None

    @property
    def totals(self) -> Tensor:
        """totals_GM, or a tensor that kernels of gated masks do not read."""
        return self.slots_GMFV if self.totals_GM is None else self.totals_GM

    @property
    def rights(self) -> Tensor:
        """rights_GM, or a tensor that kernels of gated masks do not read."""
        return self.slots_GMFV if self.rights_GM is None else self.rights_GM


@dataclass(frozen=True)
class ChunkedPlan:
    """Inputs of one call, laid out in chunks, and what its launches share.

    q (B, G, J, T, F), k (B, G, T, F), v (B, G, T, V): unit stride along the last axis, axes of size 1 in place of G
    expanded. sums (G, M, 2, C): summed log-gates (`sum_gates`). level (B, T, G, J, L): lambdas, None for gated masks.
    """

    table: ChunkTable
    q: Tensor
    k: Tensor
    v: Tensor
    sums: Tensor
    level: Tensor | None

    @classmethod
    def from_inputs(
        cls, table: ChunkTable, q: Tensor, k: Tensor, v: Tensor, gates_BGT: Tensor, level: Tensor | None = None
    ) -> ChunkedPlan:
        """Expand q and k over the groups and sum the log-gates."""
        groups = v.shape[1]
        sums = gate_sums(table, gates_BGT)
        return cls(table, q.expand(-1, groups, -1, -1, -1), k.expand(-1, groups, -1, -1), v, sums, level)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(G, J, F, V)"""
        return self.v.shape[1], self.q.shape[2], self.k.shape[-1], self.v.shape[-1]

    @property
    def last(self) -> int:
        """The last level with a lambda of its own; -1 for gated masks."""
        return -1 if self.level is None else self.level.shape[-1] - 1

    @property
    def inputs(self) -> tuple[HeadTensor, GroupTensor, GroupTensor, Tensor, LevelTensor]:
        """q, k, v, sums, level as kernel arguments."""
        level = LevelTensor(self.sums, 0, 0, 0, 0, 0) if self.level is None else LevelTensor.from_tensor(self.level)
        tokens = HeadTensor.from_tensor(self.q), GroupTensor.from_tensor(self.k), GroupTensor.from_tensor(self.v)
        return *tokens, self.sums, level

    def options(self, block_k: int, block_v: int) -> dict[str, Any]:
        """Return the constants of kernels that work on a chunk with a tile of block_k features and block_v values."""
        *_, features, values = self.sizes
        return {
            "F": features, "V": values, "C": self.table.chunk, "BK": block_k, "BV": block_v,
            "VARLEN": self.table.varlen, **product_options(self.v.dtype),
        }  # fmt: skip

    def whole_options(self, block_v: int | None = None) -> dict[str, Any]:
        """Return the constants of kernels whose programs hold all features, and all values unless block_v is given."""
        *_, features, values = self.sizes
        block_k, block_v = power_of_two(features), power_of_two(values) if block_v is None else block_v
        constants = {"BITS": self.table.bits, "LAST": self.last, "STAGES": STAGES}
        return {**self.options(block_k, block_v), **constants, "num_warps": num_warps(block_k, block_v, self.v.dtype)}

    def state_tiles(self, most_k: int, most_v: int) -> tuple[int, int, int]:
        """Return (block_k, block_v, tiles): a state in tiles of at most most_k features and most_v values."""
        *_, features, values = self.sizes
        block_k, block_v = min(power_of_two(features), most_k), min(power_of_two(values), most_v)
        return block_k, block_v, triton.cdiv(features, block_k) * triton.cdiv(values, block_v)

    def empty_slots(self) -> Tensor:
        """Return an uninitialized (G, M, F, V) in the dtype of states between kernels: float32 for float32, else
        bfloat16.
        """
        groups, _, features, values = self.sizes
        dtype = torch.float32 if self.v.dtype == torch.float32 else torch.bfloat16
        return self.v.new_empty(groups, self.table.places, features, values, dtype=dtype)


def power_of_two(n: int) -> int:
    """Return the next power of two, at least 16: the smallest side of a tile that tl.dot takes."""
    block: int = max(16, triton.next_power_of_2(n))
    return block


def num_warps(block_k: int, block_v: int, dtype: torch.dtype) -> int:
    """Return 4 for a tile of up to 128 x 64 in half precision, which takes half the time of 8 on that H200; else 8."""
    return 4 if block_k * block_v <= 128 * 64 and dtype != torch.float32 else 8


def product_options(dtype: torch.dtype) -> dict[str, Any]:
    """Return the dtype and precision of matrix products: bfloat16 for half precision, since states need its range, and
    for float32 three products of tf32."""
    wide = dtype == torch.float32
    return {"DOT": tl.float32 if wide else tl.bfloat16, "PRECISION": "tf32x3" if wide else "tf32"}


def empty_states(k_BGTF: Tensor, v_BGTV: Tensor, *rows: int) -> Tensor:
    """Return an uninitialized float32 tensor (*rows, G, F, V)."""
    return v_BGTV.new_empty(*rows, v_BGTV.shape[1], k_BGTF.shape[-1], v_BGTV.shape[-1], dtype=torch.float32)


def gate_sums(table: ChunkTable, gates_BGT: Tensor) -> Tensor:
    """Return sums_GM2C of the log-gates (`sum_gates`)."""
    groups = gates_BGT.shape[1]
    sums = gates_BGT.new_empty(groups, table.places, 2, table.chunk, dtype=torch.float32)
    sum_gates[(table.places, groups)](
        GroupTensor.from_tensor(gates_BGT), sums, table.pointers(), *table.sizes, C=table.chunk, VARLEN=table.varlen,
        num_warps=1,
    )  # fmt: skip
    return sums


def fits_kernels(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> bool:
    """Return whether the kernels take these sizes and dtypes, and Triton takes the kernels' tuples of arguments."""
    return (
        HAS_TUPLE_ARGUMENTS
        and q.dtype == k.dtype == v.dtype
        and v.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and k.shape[-1] >= 16
        and v.numel() > 0
        and v.shape[1] * q.shape[2] < MOST_HEADS
        and chunk >= 16
    )


def run_sliced(
    run: Callable[[Tensor, Tensor, Tensor, slice, slice], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV, states_xFV) from calls of `run` on slices of features and values whose tiles fit into shared
    memory.

    Values are independent of each other, and scores are sums over features: outputs of slices of features, each rounded
    to v's dtype, add up in float32.
    """
    features, values = k.shape[-1], v.shape[-1]
    step_F, step_V = MAX_FEATURES, MAX_VALUES
    if v.dtype == torch.float32:
        step_F = min(features, MAX_FEATURES // 2)
        step_V = min(MAX_VALUES, MAX_FEATURES * MAX_VALUES // 4 // power_of_two(step_F))
    outs, states = [], []
    for at_V in (slice(i, i + step_V) for i in range(0, values, step_V)):
        at_F = [slice(i, i + step_F) for i in range(0, features, step_F)]
        made = [run(q[..., f], k[..., f], v[..., at_V], f, at_V) for f in at_F]
        out, *others = [out for out, _ in made]
        outs.append(sum((other.float() for other in others), out.float()).to(out.dtype) if others else out)
        states.append(_concatenate([state for _, state in made], -2))
    return _concatenate(outs, -1), _concatenate(states, -1)


def _concatenate(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def limit_chunk(chunk: int) -> int:
    """Return the largest power of two that is at most `chunk` and 64, the longest chunk that the kernels take."""
    return min(64, 1 << (chunk.bit_length() - 1))
