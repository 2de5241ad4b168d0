"""Kernels of the delta rule: where tokens lie in chunks, gates inside a chunk, and the launch plan.

A row is a run of tokens with a state of its own: a row of the batch, or one of several sequences packed into one
(cu_seqlens). Chunks of C slots lie on a grid of absolute positions, so the first and last chunk of a row may have slots
without a token. Their inputs read as zeros; a chunk of zeros leaves the state as it is.

Table of rows, int64 (R, WIDTH): batch, first token there, tokens, position of the first token, then the row's first
entry in the buffers of each level (level 0: chunks; level l: segments of 2^l chunks, see
kernels/log_linear_delta/levels.py).

Log-gates g <= 0 are summed inside chunks only, as two numbers hi + lo. hi is a multiple of 2^-8: sums of 64 of them
down to -60 each are exact in float32, so exp(c_t - c_s) keeps a small gate right behind a large one (exp(-60) is 0).

Suffixes: C slots of a chunk, K features, V values, X a block of features; R rows, G groups, J query heads of a group.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from surgery.core.import_hooks import run_after_import
from surgery.kernels.kernel_tensors import HAS_TUPLE_ARGUMENTS, GroupTensor, HeadTensor
from surgery.mixers.common.packed_pieces import PackedPieces

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_FEATURES, DEFAULT_CHUNK = 1024, 64
SMALL_FEATURES = 256  # up to which a program's tiles fit into the shared memory of every GPU
LARGE_SHARED_MEMORY = 160 * 1024  # bytes of a program on A100, H100 and later ones, which more features need
MAX_LEVELS = 44  # levels in the table: bits of a chunk's index
MOST_HEADS = 2**16  # of a row: they lie on an axis of a grid, which is limited to 65,535


class Row(NamedTuple):
    """A row of the table as kernels read it: row of the batch, first token there, tokens, position of the first token,
    its first chunk in the buffers."""

    batch: tl.tensor
    bos: tl.tensor
    length: tl.tensor
    start: tl.tensor
    base: tl.tensor


@triton.jit
def load_row(rows, r, WIDTH: tl.constexpr):
    """Return the `Row` of number r. rows: the table."""
    at = rows + r * WIDTH
    return Row(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4))


@triton.jit
def chunk_tokens(n, row, C: tl.constexpr):
    """Return (the token in each slot of the row's n-th chunk, whether the slot has a token)."""
    at_C = n * C + tl.arange(0, C) - row.start % C
    return row.bos + at_C, (at_C >= 0) & (at_C < row.length)


@triton.jit
def count_chunks(row, C: tl.constexpr):
    """Return how many chunks the row has."""
    return (row.start % C + row.length + C - 1) // C


@triton.jit
def program_chunk(rows, N, g, G, WIDTH: tl.constexpr, C: tl.constexpr):
    """Return the program's chunk, from the first axis of the grid (rows x N): (row of the batch, place in the buffers,
    the token in each slot, whether the slot has a token, whether the row has such a chunk)."""
    r, n = tl.program_id(0) // N, tl.program_id(0) % N
    row = load_row(rows, r, WIDTH)
    t_C, here_C = chunk_tokens(n, row, C)
    return row.batch, (row.base + n) * G + g, t_C, here_C, n < count_chunks(row, C)


@triton.jit
def program_chunk_index(rows, N, WIDTH: tl.constexpr):
    """Return (the program's chunk, counted in its row; the position of the row's first token)."""
    return tl.program_id(0) % N, tl.load(rows + tl.program_id(0) // N * WIDTH + 3)


@triton.jit
def repeat(x_C, C: tl.constexpr, HEADS: tl.constexpr):
    """Return x (C), HEADS times behind each other (HEADS x C): the same values for each head of a program."""
    if HEADS == 1:
        return x_C
    return tl.reshape(tl.broadcast_to(x_C[None, :], [HEADS, C]), [HEADS * C])


@triton.jit
def load_rows(at_M, here_M, size, first, BLOCK: tl.constexpr):
    """Return x[first : first + BLOCK] of each row, zeros outside. at_M: pointers to rows of `size` elements."""
    at_B = first + tl.arange(0, BLOCK)
    return tl.load(at_M[:, None] + at_B[None, :], mask=here_M[:, None] & (at_B < size)[None, :], other=0.0)


@triton.jit
def load_tile(base, rows_X, stride, here_X, size, first, BLOCK: tl.constexpr):
    """Return x[rows, first : first + BLOCK], zeros outside. x: rows of `size` elements, `stride` apart."""
    at_B = first + tl.arange(0, BLOCK)
    return tl.load(
        base + rows_X[:, None] * stride + at_B[None, :], mask=here_X[:, None] & (at_B < size)[None, :], other=0.0
    )


@triton.jit
def store_tile(base, rows_X, stride, here_X, size, first, x, BLOCK: tl.constexpr):
    """Store x as [rows, first : first + BLOCK] of a tensor laid out as in `load_tile`, in its dtype."""
    at_B = first + tl.arange(0, BLOCK)
    mask = here_X[:, None] & (at_B < size)[None, :]
    tl.store(base + rows_X[:, None] * stride + at_B[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_matrix(base, rows, size, first, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return x[:, first : first + BLOCK] of a contiguous (rows, size) matrix, zeros outside."""
    at_R = tl.arange(0, ROWS)
    return load_tile(base, at_R, size, at_R < rows, size, first, BLOCK)


@triton.jit
def store_matrix(base, rows, size, first, x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Store x as [:, first : first + BLOCK] of a contiguous (rows, size) matrix, in its dtype."""
    at_R = tl.arange(0, ROWS)
    store_tile(base, at_R, size, at_R < rows, size, first, x, BLOCK)


@triton.jit
def state_product(
    s_VK, stored, rows_V, x, t_C, stride, here_C, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BX: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Return S^T X^T (V, C). X (C, K): rows t_C of x, `stride` apart.

    s_VK: S^T in X's dtype, which the program has stored at `stored`, a (rows_V, K) matrix. With BX < BK it is read from
    there in blocks of BX features, because every warp needs all of it.
    """
    if BX >= BK:
        return tl.dot(s_VK, tl.trans(load_tile(x, t_C, stride, here_C, K, 0, BK)), input_precision=P)
    tl.debug_barrier()  # the other warps have stored their parts
    sum_VC = tl.zeros([BV, C], tl.float32)
    for first in range(0, K, BX):
        x_CX = load_tile(x, t_C, stride, here_C, K, first, BX)
        s_VX = load_matrix(stored, rows_V, K, first, BV, BX)
        sum_VC = tl.dot(s_VX, tl.trans(x_CX), sum_VC, input_precision=P)
    return sum_VC


@triton.jit
def decay_from_start(c, at, C: tl.constexpr):
    """Return D_t = exp(c_t): the gates from the chunk's start up to each token. at: the chunk's place."""
    at_C = tl.arange(0, C)
    return tl.exp(tl.load(c + at * 2 * C + at_C) + tl.load(c + at * 2 * C + C + at_C))


@triton.jit
def decay_to_end(c, at, C: tl.constexpr):
    """Return (e_s = exp(c_last - c_s): the gates behind each token, exp(c_last): those of the whole chunk)."""
    at_C = tl.arange(0, C)
    here = c + at * 2 * C
    hi, lo = tl.load(here + C - 1), tl.load(here + 2 * C - 1)
    return tl.exp((hi - tl.load(here + at_C)) + (lo - tl.load(here + C + at_C))), tl.exp(hi + lo)


@triton.jit
def decay_mask(c, at, C: tl.constexpr, HEADS: tl.constexpr = 1):
    """Return M_ts = exp(c_t - c_s) for s <= t, else 0, for each of the program's heads (HEADS x C, C)."""
    at_C = tl.arange(0, C)
    hi_C, lo_C = tl.load(c + at * 2 * C + at_C), tl.load(c + at * 2 * C + C + at_C)
    hi_M, lo_M, at_M = repeat(hi_C, C, HEADS), repeat(lo_C, C, HEADS), repeat(at_C, C, HEADS)
    log_MC = (hi_M[:, None] - hi_C[None, :]) + (lo_M[:, None] - lo_C[None, :])
    return tl.exp(tl.where(at_M[:, None] >= at_C[None, :], log_MC, float("-inf")))


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of one call.

    Attributes:
        table: the table of rows.
        R: rows.
        N: chunks of a row at most.
        C: slots of a chunk.
        most: entries in the buffers of each level.
        G, J, K, V: groups, query heads of a group, features, values.
        dtype: of q, k, v and of buffers between kernels.
    """

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

    @cached_property
    def kernel(self) -> dict[str, Any]:
        """Constants of every kernel."""
        return {
            "G": self.G, "K": self.K, "V": self.V, "WIDTH": self.table.shape[1], "C": self.C,
            "BK": self.block_k, "BV": self.block, "P": self.precision,
        }  # fmt: skip

    @cached_property
    def precision(self) -> str:
        """Precision of float32 products: three products of tf32."""
        return "tf32x3" if self.dtype == torch.float32 else "tf32"

    @cached_property
    def is_large(self) -> bool:
        """Whether a tile of all features takes so much of a program's memory that it needs settings of its own."""
        return self.K > SMALL_FEATURES

    @cached_property
    def block(self) -> int:
        """Values in a block: few blocks without much padding, of a size that bounds a program's part of a state."""
        if self.is_large and (self.K > 512 or self.dtype == torch.float32):
            return 16
        wide = self.K > 128 or self.dtype == torch.float32
        return min((32, 16) if wide else (64, 32, 16), key=lambda b: -(-self.V // b) * (b + 32))

    @cached_property
    def wide_block(self) -> int:
        """Values in a block, in kernels that hold no state of all features."""
        if not self.is_large:
            return self.block
        return min((64, 32, 16), key=lambda b: -(-self.V // b) * (b + 32))

    @cached_property
    def wide_blocks(self) -> int:
        """Blocks of `wide_block` values."""
        return -(-self.V // self.wide_block)

    @cached_property
    def wide_kernel(self) -> dict[str, Any]:
        """Constants of kernels that hold no state of all features."""
        return {**self.kernel, "BV": self.wide_block}

    @cached_property
    def features(self) -> int:
        """Features in a block, in kernels that loop over blocks of features."""
        return min(64, self.block_k)

    @cached_property
    def state_kernel(self) -> dict[str, Any]:
        """Constants of kernels that pass states through chunks. BX: features in a block of products that sum over
        features.
        """
        in_blocks = self.is_large and (self.K > 512 or self.dtype == torch.float32)
        return {**self.kernel, "BX": self.features if in_blocks else self.block_k}

    @cached_property
    def loop_warps(self) -> int:
        """Warps of kernels that loop over blocks of values and of features."""
        return 8 if self.is_large else 4

    @cached_property
    def tile_features(self) -> int:
        """Features in a block, in kernels that hold tiles of all features unless these are many."""
        return self.features if self.is_large else self.block_k

    @cached_property
    def block_k(self) -> int:
        """All features, padded to a power of two."""
        block: int = max(16, triton.next_power_of_2(self.K))
        return block

    @cached_property
    def blocks(self) -> int:
        """Blocks of values."""
        return -(-self.V // self.block)

    def warps(self, wide: int) -> int:
        """Return 8 if a program holds more than `wide` elements of a state in registers, else 4."""
        return 8 if self.is_large or self.block_k * self.block > wide else 4

    def tile_options(self, warps: int) -> dict[str, int]:
        """Launch options of kernels with `tile_features`; warps: those of tiles of all features."""
        return {"num_warps": 4, "num_stages": 2} if self.is_large else {"num_warps": warps}

    def stages(self, small: int) -> int:
        """Return the stages of a pipelined loop: `small` if tiles are small, 1 if two do not fit, else 2."""
        if self.is_large:
            return 1
        return small if self.K <= 128 and self.dtype != torch.float32 else 2

    @cached_property
    def max_registers(self) -> int | None:
        """Register limit of the largest kernels, so that two of their programs fit on a multiprocessor; None if tiles
        are large.
        """
        return 168 if self.stages(3) == 3 else None

    def buffer(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialized tensor (chunks, G, *shape), in `self.dtype` by default."""
        return torch.empty(self.most[0], self.G, *shape, dtype=dtype or self.dtype, device=self.table.device)


@dataclass(frozen=True)
class DeltaPlan:
    """Inputs of one call and their sizes: q (B, G, J, T, K), k (B, G, T, K), v (B, G, T, V), beta and log-gates (B, G,
    T).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    gates: Tensor
    sizes: DeltaSizes

    @property
    def queries_keys(self) -> tuple[HeadTensor, GroupTensor]:
        """q and k as kernel arguments."""
        return HeadTensor.from_tensor(self.q), GroupTensor.from_tensor(self.k)

    @property
    def values_beta(self) -> tuple[GroupTensor, GroupTensor]:
        """v and beta as kernel arguments."""
        return GroupTensor.from_tensor(self.v), GroupTensor.from_tensor(self.beta)


def longest_chunk(v_BGTV: Tensor) -> int:
    """Return the largest C; for float32 only 32 fits into a program."""
    return 32 if v_BGTV.dtype == torch.float32 else 64


def limit_chunk(v_BGTV: Tensor, chunk: int) -> int:
    """Return C, 32 or 64."""
    return 64 if min(longest_chunk(v_BGTV), v_BGTV.shape[2], chunk) > 32 else 32


def max_chunks(v_BGTV: Tensor, chunk: int, start_B: Tensor | None) -> int:
    """Return N. With start_B the first chunk may begin before the row; by how much is known on the device only."""
    C = limit_chunk(v_BGTV, chunk)
    spare = 0 if start_B is None else C - 1
    return max(1, -(-(v_BGTV.shape[2] + spare) // C))


def make_sizes(
    q_BGJTF: Tensor, v_BGTV: Tensor, chunk: int, start_B: Tensor | None, cu_seqlens: Tensor | None
) -> DeltaSizes:
    """Return the sizes of a call. start_B None: rows begin at position 0. Does not wait for the device."""
    batch, G, J, T, K = q_BGJTF.shape
    device = q_BGJTF.device
    if cu_seqlens is None:
        R, count_R, batch_R = batch, torch.full((batch,), T, device=device), torch.arange(batch, device=device)
        bos_R = torch.zeros_like(batch_R)
    else:
        assert batch == 1, f"cu_seqlens needs sequences packed into one row (got a batch of {batch})"
        R, bos_R, count_R = len(cu_seqlens) - 1, cu_seqlens[:-1].long(), cu_seqlens.diff().long()
        batch_R = torch.zeros_like(bos_R)
    start_R = torch.zeros_like(bos_R) if start_B is None else start_B.to(device, torch.int64)
    C, N = limit_chunk(v_BGTV, chunk), max_chunks(v_BGTV, chunk, start_B)
    bound = R * N if cu_seqlens is None else -(-T // C) + 2 * R
    table = row_table(batch_R, bos_R, count_R, start_R, C)
    return DeltaSizes(table, R, N, C, level_bounds(bound, R), G, J, K, v_BGTV.shape[-1], v_BGTV.dtype)


def row_table(batch_R: Tensor, bos_R: Tensor, count_R: Tensor, start_R: Tensor, C: int) -> Tensor:
    """Return the table of rows."""
    chunks_R = (start_R % C + count_R + C - 1) // C
    level_L = torch.arange(MAX_LEVELS, device=batch_R.device)
    every_RL = (chunks_R.unsqueeze(1) >> level_L) + 2 * (level_L > 0)
    return torch.cat([torch.stack([batch_R, bos_R, count_R, start_R], 1), every_RL.cumsum(0) - every_RL], 1)


def level_bounds(chunks: int, rows: int) -> list[int]:
    """Return `DeltaSizes.most` of so many chunks at most."""
    return [chunks, *((chunks >> level) + 2 * rows for level in range(1, MAX_LEVELS))]


def packed_sizes(q_BGJTF: Tensor, v_BGTV: Tensor, chunk: int, pieces: PackedPieces, *, resumes: bool) -> DeltaSizes:
    """Return `make_sizes` of pieces in one row, whose table the layers of a step share. resumes: whether chunks lie on the
    grid of positions in the sequences, or of tokens of the pieces."""
    key = "delta sizes", q_BGJTF.shape, v_BGTV.shape, v_BGTV.dtype, chunk, resumes
    return pieces.once(key, lambda: _packed_sizes(q_BGJTF, v_BGTV, chunk, pieces, resumes))


def _packed_sizes(
    q_BGJTF: Tensor, v_BGTV: Tensor, chunk: int, pieces: PackedPieces, resumes: bool
) -> DeltaSizes:  # fmt: skip
    _, G, J, T, K = q_BGJTF.shape
    # Not fewer for few tokens: kernels are compiled for a size of chunks.
    C, R = 64 if min(longest_chunk(v_BGTV), chunk) > 32 else 32, len(pieces.counts)

    def tables(first_R: Tensor, seen_R: Tensor, count_R: Tensor) -> list[Tensor]:
        zero_R = torch.zeros_like(first_R)
        return [row_table(zero_R, first_R, count_R, seen_R if resumes else zero_R, C)]

    (table,) = pieces.tables(("delta", C, resumes), tables)
    starts = pieces.seen if resumes else [0] * R
    N = max(1, *(-(-(start % C + count) // C) for start, count in zip(starts, pieces.counts, strict=True)))
    most = level_bounds(-(-T // C) + 2 * R, R)
    return DeltaSizes(table, R, N, C, most, G, J, K, v_BGTV.shape[-1], v_BGTV.dtype)


def fits_kernels(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None) -> bool:
    """Return whether the kernels take these sizes and dtypes, and Triton takes the kernels' tuples of arguments."""
    return (
        HAS_TUPLE_ARGUMENTS
        and beta is not None
        and q.dtype == k.dtype == v.dtype
        and v.dtype in DTYPES
        and (q.shape[-1] <= SMALL_FEATURES or q.shape[-1] <= max_features(v))
        and v.numel() > 0
        and v.shape[1] * q.shape[2] < MOST_HEADS
    )


def max_features(v: Tensor) -> int:
    """Return the features that the kernels take of tensors on v's device. More than 256 need the shared memory of a
    data-center GPU.
    """
    return MAX_FEATURES if not v.is_cuda or has_large_shared_memory(v.get_device()) else SMALL_FEATURES


def has_large_shared_memory(device: int) -> bool:
    """Return whether programs on a GPU may take LARGE_SHARED_MEMORY. torch.compile treats the result as a constant."""
    return _shared_memory(device) >= LARGE_SHARED_MEMORY


@functools.cache
def _shared_memory(device: int) -> int:
    """Return the bytes of shared memory that one program may take; 0 if torch does not know."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def _mark_constant() -> None:
    import torch._dynamo

    dynamo: Any = torch._dynamo  # this function has no types
    dynamo.assume_constant_result(has_large_shared_memory)


run_after_import("torch._dynamo", _mark_constant)  # torch._dynamo takes seconds to import
