"""Log-linear Gated DeltaNet on a GPU: log-linear masks with the delta rule's scores (`log_linear` with beta).

    o_t = sum_l lambda_t^(l) q_t S_t^(l)      S_t^(l): the gated delta rule's state of Fenwick bucket l of t's past

Guo et al. 2025, "Log-Linear Attention", sections 3.3 and 3.4. First every chunk by itself: the WY form of the plain
rule (kernels/gated_delta/wy.py), then outputs (kernels/log_linear_delta/chunk.py). Forward of rows without a past:
the slots of a Fenwick tree over chunks, each stored once, and one pass in which every chunk reads its slots
(kernels/log_linear_delta/slots.py). Their backward: every slot's gradient once, from all chunks that read it, then the
tree from its root to the chunks (kernels/log_linear_delta/slot_gradients.py). The tree level by level
(kernels/log_linear_delta/levels.py): rows with a past, features of more than twice the values, and backward those of
more than the values, three and more query heads of a group, or more reads of slots than fit into memory. The backward
recomputes the states; only the inputs are saved. Shapes as in kernels/gated_delta/__init__.py; level (B, T, G, J, L):
lambdas.

Counted floor for 64 tokens of a head, 256 chunks, V = K = 128, bf16: KiB moved between GPU memory and programs, where
what several programs of a kernel read counts once, and million FLOP of products.

| | KiB | MFLOP |
| --- | --- | --- |
| forward of the gated delta rule | 264 | 12 |
| forward by slots | 397 | 33 |
| forward level by level | 623 | 36 |
| backward of the gated delta rule | 720 | 34 |
| backward level by level | 2,180 | 95 |
| backward by slots | 1,540 | 99 |

Twice the chunks add 40 KiB and 5 MFLOP to the backward by slots, 152 KiB and 8 MFLOP to that level by level. Kernels
launched for 256 chunks of rows with a start: 22 by slots, 25 level by level, 32 with the levels in two groups.

With V = 64 the forward by slots moves 310 KiB instead of 424, with 24 MFLOP instead of 18.

One H200, bf16, B = 2, 48 heads, V = 64, K = 128, keys shared by the heads, all levels one by one (2026-11-21), ms forward
/ with its backward level by level: 0.91 / 4.7 for 4,096 tokens, 1.7 / 9.8 for 8,192, 7.5 / 50 for 32,768, 16 / 117 for
65,536. One H100, B = 1, 48 heads, V = K = 128, forward and backward by slots / level by level: 7.8 / 8.7 ms and 3.1 / 7.4
GB for 8,192 tokens, 15.6 / 20.6 ms and 6.2 / 13.6 GB for 16,384. The reference takes 36 times as long at 1,024, so the kernel is used wherever it
accepts the arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.chunked_op import ChunkedFunctions, ChunkedOp
from surgery.kernels.gated_delta.layout import (
    DEFAULT_CHUNK,
    MAX_FEATURES,
    MAX_LEVELS,
    SMALL_FEATURES,
    DeltaSizes,
    fits_kernels,
    limit_chunk,
    make_sizes,
    max_chunks,
)
from surgery.kernels.kernel_tensors import unit_last_stride
from surgery.kernels.log_linear_delta.boundary import BoundaryChunk, RowTokens, final_buckets
from surgery.kernels.log_linear_delta.pages import run_in_pages
from surgery.kernels.log_linear_delta.plan import LogLinearDeltaPlan
from surgery.kernels.tuning import TOKENS_READER, is_fastest
from surgery.mixers.common.packed_pieces import PackedPieces
from surgery.mixers.masks.log_linear import levels_after, log_linear, log_linear_in_pool, log_linear_packed

ALL_LEVELS = MAX_LEVELS  # `top` of calls in which no bit of a chunk's number may be dropped


class _TreeSizes(NamedTuple):
    """levels, top: see `LogLinearDeltaPlan`."""

    sizes: DeltaSizes
    levels: int
    top: int


def _make_sizes(
    tensors: tuple[Any, ...], start: Tensor | None, ends: Tensor | None, chunk: int, levels: int, top: int
) -> _TreeSizes:  # fmt: skip
    return _TreeSizes(make_sizes(tensors[0], tensors[2], chunk, start, ends), levels, top)


def _make_plan(tensors: tuple[Any, ...], tree: _TreeSizes) -> LogLinearDeltaPlan:
    q, k, v, beta, gates, level, bucket, extra, end = tensors
    return LogLinearDeltaPlan(
        q,
        k,
        v,
        beta,
        gates,
        tree.sizes,
        level=level,
        bucket_lRGKV=bucket,
        extra_RGKV=extra,
        end_R=end,
        levels=tree.levels,
        top=tree.top,
    )


def _forward(tensors: tuple[Any, ...], tree: _TreeSizes) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV, the buckets behind the tokens; an empty tensor without buckets)."""
    out, after = _make_plan(tensors, tree).forward()
    return out, out.new_empty(0, dtype=torch.float32) if after is None else after


def _backward(
    tensors: tuple[Any, ...], tree: _TreeSizes, d_out: Tensor, d_after: Tensor
) -> tuple[Tensor | None, ...]:  # fmt: skip
    plan = _make_plan(tensors, tree)
    d_buckets = None if plan.bucket_lRGKV is None else d_after.contiguous()
    return *plan.backward(unit_last_stride(d_out), d_buckets), None


def _fake_outputs(tensors: tuple[Any, ...], *_: Any) -> tuple[Tensor, Tensor]:
    q, _k, v, _beta, _gates, _level, bucket, *_rest = tensors
    after = v.new_empty(0, dtype=torch.float32) if bucket is None else torch.empty_like(bucket)
    return v.new_empty(*q.shape[:4], v.shape[-1]), after


LOG_LINEAR_DELTA_OP = ChunkedOp(
    "log_linear_delta",
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor gates, Tensor level, Tensor? bucket, Tensor? extra, Tensor? end",
    "Tensor? start, Tensor? ends, int chunk, int levels, int top",
    ChunkedFunctions(_make_sizes, _forward, _backward, _fake_outputs),
)


def log_linear_delta(
    q_BGJTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor,
    gates_BGT: Tensor,
    level_BTGJL: Tensor,
    *,
    start_B: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int = DEFAULT_CHUNK,
) -> Tensor:
    """Return out_BGJTV in v's dtype, for rows without a past. start: positions of the rows' first tokens, None for 0.
    cu_seqlens: borders of sequences packed into one row (B = 1), each without a past."""
    assert q_BGJTK.shape[-1] <= MAX_FEATURES, (
        f"log_linear_delta takes at most {MAX_FEATURES} features (got {q_BGJTK.shape[-1]})"
    )
    tokens = unit_last_stride(q_BGJTK), unit_last_stride(k_BGTK), unit_last_stride(v_BGTV)
    gates = gates_BGT.expand(v_BGTV.shape[:3])
    top = (max_chunks(v_BGTV, chunk, start_B) - 1).bit_length()
    geometry = start_B, cu_seqlens, chunk, top + (start_B is not None), top
    return LOG_LINEAR_DELTA_OP((*tokens, beta_BGT, gates, level_BTGJL, None, None, None), geometry)[0]


def run_with_buckets(
    rows: RowTokens, buckets_BLGKV: Tensor, chunk: int, levels: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (out_BGJTV, the buckets behind the tokens (B, levels, G, K, V)).

    The kernels compute buckets of whole chunks; smaller buckets are plain torch
    (kernels/log_linear_delta/boundary.py). Rows with `cu_seqlens` are pieces of one row of tokens.
    """
    q, k, v, beta, gates, level_BTGJL, start_B, count_B, _ = rows
    T, end_B, buckets = v.shape[2], start_B + count_B, buckets_BLGKV.float()
    C = limit_chunk(v, chunk)
    bits, high = C.bit_length() - 1, max(0, levels - C.bit_length() + 1)
    at_B, slot_B, low = start_B >> bits, start_B % C, buckets[:, :bits]
    first = BoundaryChunk.from_tokens(rows, at_B, slot_B, bits)
    low_BlGKV = first.carry_buckets(low)
    resumed = F.pad(buckets[:, bits:], (0, 0, 0, 0, 0, 0, 0, high - buckets[:, bits:].shape[1]))
    inputs = unit_last_stride(q), unit_last_stride(k), unit_last_stride(v), beta, gates, level_BTGJL
    at_ends = resumed.transpose(0, 1).contiguous(), low_BlGKV.sum(1), end_B
    out, after = LOG_LINEAR_DELTA_OP((*inputs, *at_ends), (start_B, rows.cu_seqlens, chunk, high, ALL_LEVELS))
    last = BoundaryChunk.from_tokens(rows, end_B >> bits, end_B % C, bits)
    passed_buckets = last.buckets_after() + final_buckets(first, low_BlGKV, end_B, at_B)
    out = out + first.read_buckets(low, T).to(out.dtype) if low.shape[1] else out
    return out, torch.cat([passed_buckets, after.transpose(0, 1)], 1)[:, :levels]


def expand_groups(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q, k, gates) of all groups of v, of stride 0 where groups share them."""
    groups = v.shape[1]
    return q.expand(-1, groups, -1, -1, -1), k.expand(-1, groups, -1, -1), gates.expand(v.shape[:3])


def _accepts(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, *_: Any, **__: Any) -> bool:
    return fits_kernels(q, k, v, beta)


@register_kernel(log_linear, accepts=_accepts, is_faster=is_fastest("hierarchical delta", TOKENS_READER))
def log_linear_delta_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gates: Tensor,
    level: Tensor,
    *,
    start_B: Tensor,
    count_B: Tensor,
    buckets_BLGFV: Tensor | None,
    chunk: int,
    levels: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`log_linear` with beta. Returns (out_BGJTV, the buckets behind the tokens, None if no buckets are given)."""
    q, k, gates = expand_groups(q, k, v, gates)
    if buckets_BLGFV is not None:
        levels = levels_after(buckets_BLGFV, start_B, count_B) if levels is None else levels
        rows = RowTokens(q, k, v, beta, gates, level, start_B, count_B)
        return run_with_buckets(rows, buckets_BLGFV, min(chunk, DEFAULT_CHUNK), levels)
    return log_linear_delta(q, k, v, beta, gates, level, start_B=start_B, chunk=min(chunk, DEFAULT_CHUNK)), None


@register_kernel(log_linear_packed, accepts=_accepts, is_faster=is_fastest("hierarchical delta", TOKENS_READER))
def log_linear_packed_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gates: Tensor,
    level: Tensor,
    *,
    buckets_SLGFV: Tensor,
    pieces: PackedPieces,
    chunk: int,
    levels: int,
) -> tuple[Tensor, Tensor]:
    """`log_linear_packed` with beta."""
    q, k, gates = expand_groups(q, k, v, gates)
    rows = RowTokens(q, k, v, beta, gates, level, pieces.seen_R, pieces.count_R, pieces.cu_seqlens)
    return run_with_buckets(rows, buckets_SLGFV, min(chunk, DEFAULT_CHUNK), levels)


def _accepts_pages(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, *_: Any, pool_PNGFV: Tensor, **__: Any
) -> bool:
    is_page = pool_PNGFV.dtype == torch.float32 and pool_PNGFV[0].is_contiguous()
    return is_page and q.shape[-1] <= SMALL_FEATURES and fits_kernels(q, k, v, beta)


@register_kernel(log_linear_in_pool, accepts=_accepts_pages, is_faster=is_fastest("hierarchical delta", TOKENS_READER))
@torch.no_grad()
def log_linear_in_pool_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gates: Tensor,
    level: Tensor,
    *,
    pool_PNGFV: Tensor,
    page_R: Tensor,
    pieces: PackedPieces,
    chunk: int,
    block_bits: int,
) -> Tensor:
    """`log_linear_in_pool` with beta."""
    q, k, gates = expand_groups(q, k, v, gates)
    tokens = unit_last_stride(q), unit_last_stride(k), unit_last_stride(v), beta, gates, level
    return run_in_pages(tokens, pool_PNGFV, page_R, pieces, min(chunk, DEFAULT_CHUNK), block_bits)
