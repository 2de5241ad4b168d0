"""What the kernels of the delta rule share: where tokens lie in chunks, gates inside a chunk, sizes.

A row is a run of tokens with a state of its own: a whole row of a batch, or one of several sequences packed in one
(cu_seqlens). Chunks of C slots lie on the grid of absolute positions, so that a row's first and last one may have slots
without a token: all of theirs read as zeros, and a chunk of zeros changes no state.

Table of rows, int64: batch, first token there, tokens, position of the first, then its first entry in the buffers of
every level (level 0: chunks, level l: segments of 2^l chunks, see kernels/log_linear_delta/levels.py).

Log-gates g <= 0 are summed inside chunks only, as two numbers, hi + lo: hi in steps of 2^-8, of which sums of 64 down
to -60 each are exact, so that exp(c_t - c_s) has a small gate right behind a large one (exp(-60) is nothing).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_LEVELS = 44  # in the table, of chunks' indices
MOST_HEADS = 2**16  # of a row: they lie on an axis of a grid, which holds 65,535


@triton.jit
def load_row(rows, r, WIDTH: tl.constexpr):
    """(batch, first token, tokens, first position, first chunk in the buffers)."""
    at = rows + r * WIDTH
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def chunk_tokens(n, bos, length, start, C: tl.constexpr):
    """(the token in each slot of the row's n-th chunk, whether there is one)."""
    at_C = n * C + tl.arange(0, C) - start % C
    return bos + at_C, (at_C >= 0) & (at_C < length)


@triton.jit
def count_chunks(length, start, C: tl.constexpr):
    return (start % C + length + C - 1) // C


@triton.jit
def program_chunk(rows, N, g, G, WIDTH: tl.constexpr, C: tl.constexpr):
    """Of the program's chunk, the first axis of the grid (rows x N): (its row's batch, its place in the buffers, the token
    in each slot, whether there is one, whether the row has such a chunk)."""
    r, n = tl.program_id(0) // N, tl.program_id(0) % N
    batch, bos, length, start, base = load_row(rows, r, WIDTH)
    t_C, here_C = chunk_tokens(n, bos, length, start, C)
    return batch, (base + n) * G + g, t_C, here_C, n < count_chunks(length, start, C)


@triton.jit
def program_chunk_index(rows, N, WIDTH: tl.constexpr):
    """(the program's chunk, counted in its row; the position of the row's first token)."""
    return tl.program_id(0) % N, tl.load(rows + tl.program_id(0) // N * WIDTH + 3)


@triton.jit
def load_tile(base, rows_X, stride, here_X, size, first, BLOCK: tl.constexpr):
    """x[rows, first : first + BLOCK], zeros outside."""
    at_B = first + tl.arange(0, BLOCK)
    return tl.load(
        base + rows_X[:, None] * stride + at_B[None, :], mask=here_X[:, None] & (at_B < size)[None, :], other=0.0
    )


@triton.jit
def store_tile(base, rows_X, stride, here_X, size, first, x, BLOCK: tl.constexpr):
    at_B = first + tl.arange(0, BLOCK)
    mask = here_X[:, None] & (at_B < size)[None, :]
    tl.store(base + rows_X[:, None] * stride + at_B[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_matrix(base, rows, size, first, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """x[:, first : first + BLOCK] of a contiguous (rows, size) matrix, zeros outside."""
    at_R = tl.arange(0, ROWS)
    return load_tile(base, at_R, size, at_R < rows, size, first, BLOCK)


@triton.jit
def store_matrix(base, rows, size, first, x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at_R = tl.arange(0, ROWS)
    store_tile(base, at_R, size, at_R < rows, size, first, x, BLOCK)


@triton.jit
def decay_from_start(c, at, C: tl.constexpr):
    """D_t = exp(c_t): gates from the chunk's start to a token."""
    at_C = tl.arange(0, C)
    return tl.exp(tl.load(c + at * 2 * C + at_C) + tl.load(c + at * 2 * C + C + at_C))


@triton.jit
def decay_to_end(c, at, C: tl.constexpr):
    """(e_s = exp(c_last - c_s): from a token to the chunk's end, all of the chunk)."""
    at_C = tl.arange(0, C)
    here = c + at * 2 * C
    hi, lo = tl.load(here + C - 1), tl.load(here + 2 * C - 1)
    return tl.exp((hi - tl.load(here + at_C)) + (lo - tl.load(here + C + at_C))), tl.exp(hi + lo)


@triton.jit
def decay_mask(c, at, C: tl.constexpr):
    """M_ts = exp(c_t - c_s) for s <= t, else 0."""
    at_C = tl.arange(0, C)
    hi_C, lo_C = tl.load(c + at * 2 * C + at_C), tl.load(c + at * 2 * C + C + at_C)
    log_CC = (hi_C[:, None] - hi_C[None, :]) + (lo_C[:, None] - lo_C[None, :])
    return tl.exp(tl.where(at_C[:, None] >= at_C[None, :], log_CC, float("-inf")))


@dataclass
class DeltaSizes:
    """Of one call. R rows, N chunks a row at most, C slots; table as above; `most`: entries in each level's buffers."""

    table: Tensor
    R: int
    N: int
    C: int
    most: list[int]
    G: int
    J: int
    K: int
    V: int
    dtype: torch.dtype

    @property
    def kernel(self) -> dict[str, Any]:
        """What every kernel is told."""
        return {
            "G": self.G, "K": self.K, "V": self.V, "WIDTH": self.table.shape[1], "C": self.C,
            "BK": max(16, triton.next_power_of_2(self.K)), "BV": self.block, "P": self.precision,
        }  # fmt: skip

    @property
    def precision(self) -> str:
        return "tf32x3" if self.dtype == torch.float32 else "tf32"

    @property
    def block(self) -> int:
        """Of values: few, without much padding; what a state of it takes up is bounded."""
        wide = self.K > 128 or self.dtype == torch.float32
        return min((32, 16) if wide else (64, 32, 16), key=lambda b: -(-self.V // b) * (b + 32))

    @property
    def features(self) -> int:
        """A block of features, where they are taken one after the other."""
        return min(64, self.kernel["BK"])

    @property
    def blocks(self) -> int:
        return -(-self.V // self.block)

    def warps(self, wide: int) -> int:
        """Eight where a program holds more than `wide` numbers of a state in registers."""
        return 8 if self.kernel["BK"] * self.block > wide else 4

    def stages(self, small: int) -> int:
        """Of a pipeline: `small` where tiles are."""
        return small if self.K <= 128 and self.dtype != torch.float32 else 2

    def buffer(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """One entry for every chunk and head."""
        return torch.empty(self.most[0], self.G, *shape, dtype=dtype or self.dtype, device=self.table.device)


def limit_chunk(v_BGTV: Tensor, chunk: int) -> int:
    """C; of float32 no more than 32 fits a program."""
    longest = 32 if v_BGTV.dtype == torch.float32 else 64
    return 64 if min(longest, v_BGTV.shape[2], chunk) > 32 else 32


def max_chunks(v_BGTV: Tensor, chunk: int, start_B: Tensor | None) -> int:
    """N of a row: where it starts is the device's, so one may begin before it."""
    C = limit_chunk(v_BGTV, chunk)
    spare = 0 if start_B is None else C - 1
    return max(1, -(-(v_BGTV.shape[2] + spare) // C))


def make_sizes(
    q_BGJTF: Tensor, v_BGTV: Tensor, chunk: int, start_B: Tensor | None, cu_seqlens: Tensor | None
) -> DeltaSizes:
    """start None: rows begin at position 0. No word of what is on the device is waited for."""
    batch, G, J, T, K = q_BGJTF.shape
    device = q_BGJTF.device
    if cu_seqlens is None:
        R, count_R, batch_R = batch, torch.full((batch,), T, device=device), torch.arange(batch, device=device)
        bos_R = torch.zeros_like(batch_R)
    else:
        assert batch == 1, f"cu_seqlens is for one packed row, these are {batch}"
        R, bos_R, count_R = len(cu_seqlens) - 1, cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        batch_R = torch.zeros_like(bos_R)
    start_R = torch.zeros_like(bos_R) if start_B is None else start_B.to(device, torch.int64)
    C, N = limit_chunk(v_BGTV, chunk), max_chunks(v_BGTV, chunk, start_B)
    chunks_R = (start_R % C + count_R + C - 1) // C
    level_L = torch.arange(MAX_LEVELS, device=device)
    every_RL = (chunks_R.unsqueeze(1) >> level_L) + 2 * (level_L > 0)
    bound = R * N if cu_seqlens is None else -(-T // C) + 2 * R
    most = [bound, *((bound >> level) + 2 * R for level in range(1, MAX_LEVELS))]
    table = torch.cat([torch.stack([batch_R, bos_R, count_R, start_R], 1), every_RL.cumsum(0) - every_RL], 1)
    return DeltaSizes(table, R, N, C, most, G, J, K, v_BGTV.shape[-1], v_BGTV.dtype)
