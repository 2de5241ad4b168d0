"""How the kernels of gated masks are launched: where chunks lie, tiles, warps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.ssd.backward import read_grad, write_grad
from surgery.kernels.ssd.chunk import sum_gates
from surgery.kernels.ssd.output import read

# Loops are pipelined so deep: the fastest on one H200, 2026-11-21, B = 2, 48 heads, K = 128, V = 64, T = 8192.
STAGES = 2

MAX_FEATURES, MAX_VALUES = 256, 128
MOST_HEADS = 2**15  # of a row: they lie, with tiles of values, on an axis of a grid, which holds 65,535


@dataclass(frozen=True)
class ChunkTable:
    """Where chunks of C tokens lie, see kernels/ssd/chunk.py. seqs: rows of a batch, or sequences packed into one row (`ends`);
    count: chunks of a row; places: of all; most: of one sequence at most."""

    seqs: int
    length: int
    chunk: int
    count: int
    places: int
    most: int
    start_B: Tensor
    ends: Tensor | None = None
    first_of: Tensor | None = None
    aligned: bool = False

    SCHEMA: ClassVar[str] = (
        "Tensor start, Tensor? ends, int chunk, bool aligned"  # of `to_schema`, see kernels/custom_op.py
    )

    @classmethod
    def from_rows(cls, start_B: Tensor, length: int, chunk: int, aligned: bool = False) -> ChunkTable:
        """aligned: starts are known to be multiples of the chunk."""
        count = -(-(length + (0 if aligned else chunk - 1)) // chunk)
        return cls(len(start_B), length, chunk, count, len(start_B) * count, count, start_B, aligned=aligned)

    @classmethod
    def from_schema(cls, v_BGTV: Tensor, start_B: Tensor, ends: Tensor | None, chunk: int, aligned: bool) -> ChunkTable:
        """From what `to_schema` gave."""
        length = v_BGTV.shape[2]
        return (
            cls.from_rows(start_B, length, chunk, aligned) if ends is None else cls.from_cu_seqlens(ends, length, chunk)
        )

    def to_schema(self) -> tuple[Any, ...]:
        return self.start_B, self.ends, self.chunk, self.aligned

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, length: int, chunk: int) -> ChunkTable:
        """From position 0 each. Nothing here waits for the device."""
        chunks = (cu_seqlens.diff() + chunk - 1) // chunk
        first_of, places = (chunks.cumsum(0) - chunks).int(), length // chunk + len(chunks)
        return cls(len(chunks), length, chunk, 0, places, length // chunk + 1, cu_seqlens, cu_seqlens, first_of)

    @property
    def bits(self) -> int:
        return self.chunk.bit_length() - 1

    @property
    def varlen(self) -> bool:
        return self.ends is not None

    def units(self, shift: int) -> int:
        """Of 2^shift chunks, shift > 0: a sequence may begin and end inside one."""
        if self.varlen:
            return (self.places >> shift) + self.seqs
        return self.seqs * ((self.count >> shift) + 2)

    def owners(self, shift: int) -> Tensor:
        """The sequence of each unit."""
        if self.first_of is None:
            return self.start_B
        at, units = self.first_of >> shift, self.places
        if shift:
            at, units = at + torch.arange(self.seqs, device=at.device, dtype=at.dtype), self.units(shift)
        which = torch.arange(units, device=at.device, dtype=at.dtype)
        return (torch.searchsorted(at, which, right=True) - 1).clamp_min(0).int()

    def tables(self, shift: int = 0) -> tuple[Tensor, ...]:
        ends, first_of = (self.start_B if x is None else x for x in (self.ends, self.first_of))
        return self.start_B, ends, self.owners(shift), first_of


@dataclass
class TokenTensors:
    """q_BGJTF, k_BGTF, v_BGTV with unit stride along the last axis, axes of size 1 in place of G expanded; sums_GM2C of
    the log-gates; level_BTGJL or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    sums: Tensor
    level: Tensor | None

    @classmethod
    def from_inputs(cls, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, level: Tensor | None = None) -> TokenTensors:
        groups = v.shape[1]
        return cls(q.expand(-1, groups, -1, -1, -1), k.expand(-1, groups, -1, -1), v, sums, level)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """G, J, F, V"""
        return self.v.shape[1], self.q.shape[2], self.k.shape[-1], self.v.shape[-1]

    @property
    def last(self) -> int:
        return -1 if self.level is None else self.level.shape[-1] - 1

    def strides(self) -> tuple[int, ...]:
        return *self.q.stride()[:4], *self.k.stride()[:3], *self.v.stride()[:3]

    def levels(self) -> tuple[Any, ...]:
        """(tensor, strides) of lambda."""
        return (self.sums, (0, 0, 0, 0, 0)) if self.level is None else (self.level, level_strides(self.level))


def level_strides(level_BTGJL: Tensor) -> tuple[int, ...]:
    """In the order B, G, J, T, L."""
    return tuple(level_BTGJL.stride(i) for i in (0, 2, 3, 1, 4))


def power_of_two(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def num_warps(block_k: int, block_v: int, dtype: torch.dtype) -> int:
    """Four hold a tile of 128 x 64 in half precision, on that H200 in half the time that eight need."""
    return 4 if block_k * block_v <= 128 * 64 and dtype != torch.float32 else 8


def product_options(dtype: torch.dtype) -> dict[str, Any]:
    """Half precision is multiplied as bfloat16, whose range states need; float32 in three products of tf32."""
    wide = dtype == torch.float32
    return {"DOT": tl.float32 if wide else tl.bfloat16, "PRECISION": "tf32x3" if wide else "tf32"}


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What states are held in, between kernels."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def empty_out(q_BGJTF: Tensor, v_BGTV: Tensor) -> Tensor:
    """out_BGJTV, not filled, laid out as (B, T, G, J, V)."""
    batch, groups, length, values = v_BGTV.shape
    return v_BGTV.new_empty(batch, length, groups, q_BGJTF.shape[2], values).permute(0, 2, 3, 1, 4)


def empty_states(k_BGTF: Tensor, v_BGTV: Tensor, *rows: int) -> Tensor:
    """float32, not filled: (.., G, F, V)."""
    return v_BGTV.new_empty(*rows, v_BGTV.shape[1], k_BGTF.shape[-1], v_BGTV.shape[-1], dtype=torch.float32)


def gate_sums(table: ChunkTable, gates_BGT: Tensor) -> Tensor:
    """sums_GM2C, see `sum_gates`."""
    groups = gates_BGT.shape[1]
    sums = gates_BGT.new_empty(groups, table.places, 2, table.chunk, dtype=torch.float32)
    sum_gates[(table.places, groups)](
        gates_BGT, sums, *table.tables(), table.count, table.length, table.places, *gates_BGT.stride(), C=table.chunk,
        VARLEN=table.varlen, num_warps=1,
    )  # fmt: skip
    return sums


def launch_read(table: ChunkTable, tokens: TokenTensors, slots: Tensor, totals: Tensor) -> Tensor:
    """out_BGJTV, laid out as (B, T, G, J, V)."""
    groups, per_group, features, values = tokens.sizes
    out = empty_out(tokens.q, tokens.v)
    level, strides = tokens.levels()
    block = min(power_of_two(values), 64)
    read[(table.places, groups * triton.cdiv(values, block), per_group)](
        tokens.q, tokens.k, tokens.v, tokens.sums, level, slots, totals, out, *table.tables(), table.count, table.length, table.places,
        *tokens.strides(), *strides, *out.stride()[:4], F=features, V=values, C=table.chunk, BITS=table.bits,
        BK=power_of_two(features), BV=block, LAST=tokens.last, VARLEN=table.varlen, **product_options(tokens.v.dtype),
        STAGES=STAGES, num_warps=num_warps(power_of_two(features), block, tokens.v.dtype),
    )  # fmt: skip
    return out


def launch_read_grad(
    table: ChunkTable, tokens: TokenTensors, slots: Tensor, totals: Tensor, d_out: Tensor
) -> tuple[Tensor, ...]:
    """(d_q_BGJTF of every head, d_level, pull_BGJT, shares_GJLM), see `read_grad`."""
    groups, per_group, features, values = tokens.sizes
    batch, block_k, block_v = len(tokens.v), power_of_two(features), power_of_two(values)
    d_q = tokens.q.new_empty(batch, table.length, groups, per_group, features).permute(0, 2, 3, 1, 4)
    level, strides = tokens.levels()
    d_level = tokens.sums if tokens.level is None else torch.zeros_like(level)
    pull = tokens.sums.new_empty(batch, groups, per_group, table.length)
    levels = table.most.bit_length() + 1
    shares = tokens.sums.new_empty(groups, per_group, 1 if tokens.level is None else levels, table.places)
    read_grad[(table.places, groups, per_group)](
        tokens.q, tokens.k, tokens.v, tokens.sums, level, slots, totals, d_out, d_q, d_level, pull, shares, *table.tables(), table.count,
        table.length, table.places, levels, *tokens.strides(), *strides, *d_out.stride()[:4], *d_q.stride()[:4],
        *(strides if tokens.level is None else level_strides(d_level)), *pull.stride(), F=features, V=values, C=table.chunk,
        BITS=table.bits, BK=block_k, BV=block_v, LAST=tokens.last,
        VARLEN=table.varlen, **product_options(tokens.v.dtype), STAGES=STAGES, num_warps=num_warps(block_k, block_v, tokens.v.dtype),
    )  # fmt: skip
    return d_q, d_level, pull, shares


def launch_write_grad(
    table: ChunkTable,
    tokens: TokenTensors,
    slots: Tensor,
    d_slots: Tensor,
    rights: Tensor,
    d_out: Tensor,
    pull: Tensor,
    final: bool,
) -> tuple[Tensor, ...]:
    """(d_k_BGTF of every head, d_v, d_gates, passing_GM), see `write_grad`."""
    groups, per_group, features, values = tokens.sizes
    batch, block_k, block_v = len(tokens.v), power_of_two(features), power_of_two(values)
    d_k = tokens.k.new_empty(batch, table.length, groups, features).transpose(1, 2)
    d_v = tokens.v.new_empty(batch, table.length, groups, values).transpose(1, 2)
    d_gates = tokens.sums.new_empty(batch, groups, table.length)
    passing = tokens.sums.new_empty(groups, table.places)
    level, strides = tokens.levels()
    write_grad[(table.places, groups)](
        tokens.q, tokens.k, tokens.v, tokens.sums, level, slots, d_slots, rights, d_out, pull, d_k, d_v, d_gates, passing,
        *table.tables(), table.count, table.length, table.places, per_group, *tokens.strides(), *strides, *d_out.stride()[:4],
        *pull.stride(), *d_k.stride()[:3], *d_v.stride()[:3], *d_gates.stride(), F=features, V=values, C=table.chunk,
        BITS=table.bits, BK=block_k, BV=block_v, LAST=tokens.last, FINAL=final,
        VARLEN=table.varlen, **product_options(tokens.v.dtype), STAGES=STAGES, num_warps=num_warps(block_k, block_v, tokens.v.dtype),
    )  # fmt: skip
    return d_k, d_v, d_gates, passing


def reduce_shared(d: Tensor, x: Tensor) -> Tensor:
    """A gradient of every head, as x lies: the heads' sum where x has one group for all; where x is one tensor expanded
    over its groups, every group gets its share of that sum."""
    if x.shape[1] == d.shape[1] and x.stride(1) != 0:
        return d.to(x.dtype)
    total = d.sum(1, keepdim=True, dtype=torch.float32)
    return (total / x.shape[1]).to(x.dtype).expand(x.shape)


def unit_last_stride(x: Tensor) -> Tensor:
    """With unit stride along the last axis; expanded axes stay as they are."""
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    if x.stride(1) == 0:
        return x[:, :1].contiguous().expand(x.shape)
    return x.contiguous()


def fits_kernels(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> bool:
    """Sizes and types that the kernels are right for."""
    return (
        q.dtype == k.dtype == v.dtype
        and v.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and k.shape[-1] >= 16
        and (v.dtype == torch.float32 or k.shape[-1] <= MAX_FEATURES)
        and v.numel() > 0
        and v.shape[1] * q.shape[2] < MOST_HEADS
        and chunk >= 16
    )


def run_sliced(
    run: Callable[[Tensor, Tensor, Tensor, slice, slice], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """(out_BGJTV, states_xFV) of `run` over slices of features and values whose tiles fit into shared memory: values know
    nothing of each other, and scores are sums over features, which float32 adds up to rounding."""
    features, values = k.shape[-1], v.shape[-1]
    step_F, step_V = MAX_FEATURES, MAX_VALUES
    if v.dtype == torch.float32:
        step_F = min(features, MAX_FEATURES // 2)
        step_V = min(MAX_VALUES, MAX_FEATURES * MAX_VALUES // 4 // power_of_two(step_F))
    outs, states = [], []
    for at_V in (slice(i, i + step_V) for i in range(0, values, step_V)):
        at_F = [slice(i, i + step_F) for i in range(0, features, step_F)]
        made = [run(q[..., f], k[..., f], v[..., at_V], f, at_V) for f in at_F]
        outs.append(sum((out for out, _ in made[1:]), made[0][0]))
        states.append(_concatenate([state for _, state in made], -2))
    return _concatenate(outs, -1), _concatenate(states, -1)


def _concatenate(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def limit_chunk(chunk: int) -> int:
    """A power of two that kernels have, at most the one asked for."""
    return min(64, 1 << (chunk.bit_length() - 1))
