"""How the kernels of gated masks are launched: where chunks lie, tiles, warps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.kernels.ssd_grad import read_grad, write_grad
from surgery.kernels.ssd_out import read
from surgery.kernels.ssd_parts import sum_gates

# One H200, 2026-11-21, B = 2, 48 heads, K = 128, V = 64, T = 8192, of what was measured the fastest.
READ: dict[str, Any] = {"num_warps": 4, "stages": 3}
READ_GRAD: dict[str, Any] = {"num_warps": 4, "stages": 2, "heads": 1}
WRITE_GRAD: dict[str, Any] = {"num_warps": 8, "stages": 2, "heads": 1}

MOST_FEATURES, MOST_VALUES = 256, 128


@dataclass(frozen=True)
class Lay:
    """Where chunks of C tokens lie, see ssd_parts.py. seqs: rows of a batch, or sequences packed into one row (`ends`);
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

    @classmethod
    def rows(cls, start_B: Tensor, length: int, chunk: int, aligned: bool = False) -> Lay:
        """aligned: starts are known to be multiples of the chunk."""
        count = -(-(length + (0 if aligned else chunk - 1)) // chunk)
        return cls(len(start_B), length, chunk, count, len(start_B) * count, count, start_B)

    @classmethod
    def packed(cls, cu_seqlens: Tensor, length: int, chunk: int) -> Lay:
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
class Tokens:
    """q_BGJTF, k_BGTF, v_BGTV with unit stride along the last axis; sums_GM2C of the log-gates; level_BTGJL or None. Axes of size 1 in
    place of G are expanded."""

    q: Tensor
    k: Tensor
    v: Tensor
    sums: Tensor
    level: Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """G, J, F, V"""
        return self.v.shape[1], self.q.shape[2], self.k.shape[-1], self.v.shape[-1]

    @property
    def last(self) -> int:
        return -1 if self.level is None else self.level.shape[-1] - 1

    def heads(self, most: int) -> int:
        """To a program: several only where they have the same queries and keys."""
        groups = self.v.shape[1]
        same = self.q.stride(1) == 0 and self.k.stride(1) == 0
        return next((n for n in range(most, 1, -1) if same and groups % n == 0), 1)

    def strides(self) -> tuple[int, ...]:
        return *self.q.stride()[:4], *self.k.stride()[:3], *self.v.stride()[:3]

    def levels(self) -> tuple[Any, ...]:
        """(tensor, strides) of lambda."""
        return (self.sums, (0, 0, 0, 0, 0)) if self.level is None else (self.level, level_strides(self.level))


def level_strides(level_BTGJL: Tensor) -> tuple[int, ...]:
    """In the order B, G, J, T, L."""
    return tuple(level_BTGJL.stride(i) for i in (0, 2, 3, 1, 4))


def options(how: dict[str, Any]) -> dict[str, Any]:
    """What the compiler is told."""
    return {name: how[name] for name in ("num_warps", "maxnreg") if name in how}


def power_of_two(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def products(dtype: torch.dtype) -> dict[str, Any]:
    """Half precision is multiplied as bfloat16, whose range states need; float32 in three products of tf32."""
    wide = dtype == torch.float32
    return {"DOT": tl.float32 if wide else tl.bfloat16, "PRECISION": "tf32x3" if wide else "tf32"}


def stored(dtype: torch.dtype) -> torch.dtype:
    """What states are held in, between kernels."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def gate_sums(lay: Lay, gates_BGT: Tensor) -> Tensor:
    """sums_GM2C, see `sum_gates`."""
    groups = gates_BGT.shape[1]
    sums = gates_BGT.new_empty(groups, lay.places, 2, lay.chunk, dtype=torch.float32)
    sum_gates[(lay.places, groups)](
        gates_BGT, sums, *lay.tables(), lay.count, lay.length, lay.places, *gates_BGT.stride(), C=lay.chunk,
        VARLEN=lay.varlen, num_warps=1,
    )  # fmt: skip
    return sums


def reads(lay: Lay, of: Tokens, slots: Tensor, totals: Tensor) -> Tensor:
    """out_BGJTV, laid out as (B, T, G, J, V)."""
    groups, per_group, features, values = of.sizes
    out = of.v.new_empty(len(of.v), lay.length, groups, per_group, values).permute(0, 2, 3, 1, 4)
    level, strides = of.levels()
    block = min(power_of_two(values), 64)
    read[(lay.places, groups * triton.cdiv(values, block), per_group)](
        of.q, of.k, of.v, of.sums, level, slots, totals, out, *lay.tables(), lay.count, lay.length, lay.places,
        *of.strides(), *strides, *out.stride()[:4], F=features, V=values, C=lay.chunk, BITS=lay.bits,
        BK=power_of_two(features), BV=block, LAST=of.last, VARLEN=lay.varlen, **products(of.v.dtype),
        STAGES=READ["stages"], **options(READ),
    )  # fmt: skip
    return out


def reads_grad(lay: Lay, of: Tokens, slots: Tensor, totals: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
    """(d_q in parts of heads that share it, d_level, pull_BGJT, shares_GJLM), see `read_grad`."""
    groups, per_group, features, values = of.sizes
    heads = of.heads(READ_GRAD["heads"])
    parts, batch = groups // heads, len(of.v)
    kept = of.q.dtype if heads == 1 else torch.float32
    d_q = of.q.new_empty(batch, lay.length, parts, per_group, features, dtype=kept).permute(0, 2, 3, 1, 4)
    level, strides = of.levels()
    d_level = of.sums if of.level is None else torch.zeros_like(level)
    pull = of.sums.new_empty(batch, groups, per_group, lay.length)
    levels = lay.most.bit_length() + 1
    shares = of.sums.new_empty(groups, per_group, 1 if of.level is None else levels, lay.places)
    read_grad[(lay.places, parts, per_group)](
        of.q, of.k, of.v, of.sums, level, slots, totals, d_out, d_q, d_level, pull, shares, *lay.tables(), lay.count,
        lay.length, lay.places, levels, *of.strides(), *strides, *d_out.stride()[:4], *d_q.stride()[:4],
        *(strides if of.level is None else level_strides(d_level)), *pull.stride(), F=features, V=values, C=lay.chunk,
        BITS=lay.bits, BK=power_of_two(features), BV=power_of_two(values), HEADS=heads, LAST=of.last,
        VARLEN=lay.varlen, **products(of.v.dtype), STAGES=READ_GRAD["stages"], **options(READ_GRAD),
    )  # fmt: skip
    return d_q, d_level, pull, shares


def writes_grad(
    lay: Lay, of: Tokens, slots: Tensor, d_slots: Tensor, rights: Tensor, d_out: Tensor, pull: Tensor, final: bool
) -> tuple[Tensor, ...]:
    """(d_k in parts of heads that share it, d_v, d_gates, passing_GM), see `write_grad`."""
    groups, per_group, features, values = of.sizes
    heads = of.heads(WRITE_GRAD["heads"])
    parts, batch = groups // heads, len(of.v)
    kept = of.k.dtype if heads == 1 else torch.float32
    d_k = of.k.new_empty(batch, lay.length, parts, features, dtype=kept).transpose(1, 2)
    d_v = of.v.new_empty(batch, lay.length, groups, values).transpose(1, 2)
    d_gates = of.sums.new_empty(batch, groups, lay.length)
    passing = of.sums.new_empty(groups, lay.places)
    level, strides = of.levels()
    write_grad[(lay.places, parts)](
        of.q, of.k, of.v, of.sums, level, slots, d_slots, rights, d_out, pull, d_k, d_v, d_gates, passing,
        *lay.tables(), lay.count, lay.length, lay.places, per_group, *of.strides(), *strides, *d_out.stride()[:4],
        *pull.stride(), *d_k.stride()[:3], *d_v.stride()[:3], *d_gates.stride(), F=features, V=values, C=lay.chunk,
        BITS=lay.bits, BK=power_of_two(features), BV=power_of_two(values), HEADS=heads, LAST=of.last, FINAL=final,
        VARLEN=lay.varlen, **products(of.v.dtype), STAGES=WRITE_GRAD["stages"], **options(WRITE_GRAD),
    )  # fmt: skip
    return d_k, d_v, d_gates, passing


def of_shared(d: Tensor, x: Tensor) -> Tensor:
    """A gradient in parts, as x lies: the parts' sum where x has one group for all; where x is one tensor expanded over
    its groups, every group gets its share of that sum."""
    if x.shape[1] == d.shape[1] and x.stride(1) != 0:
        return d.to(x.dtype)
    total = d.sum(1, keepdim=True, dtype=torch.float32)
    return (total / x.shape[1]).to(x.dtype).expand(x.shape)


def ready(x: Tensor) -> Tensor:
    """With unit stride along the last axis; expanded axes stay as they are."""
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    if x.stride(1) == 0:
        return x[:, :1].contiguous().expand(x.shape)
    return x.contiguous()


def accepted(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> bool:
    """Sizes and types that the kernels are right for."""
    return (
        q.dtype == k.dtype == v.dtype
        and v.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and 16 <= k.shape[-1] <= MOST_FEATURES
        and v.shape[-1] <= MOST_VALUES
        and v.shape[2] > 0
        and chunk >= 16
    )


def chunk_of(chunk: int) -> int:
    """A power of two that kernels have, at most the one asked for."""
    return min(64, 1 << (chunk.bit_length() - 1))
