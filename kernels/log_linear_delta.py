"""Log-linear Gated DeltaNet on a GPU: the hierarchical mask with the delta rule's scores (`log_linear` with beta).

    o_t = sum_l lambda_t^(l) q_t S_t^(l)      S_t^(l): the gated delta rule's state of Fenwick bucket l of t's past

Guo et al. 2025, "Log-Linear Attention", sections 3.3 and 3.4. Chunks by themselves (log_linear_delta_chunks.py), then
the Fenwick tree over chunks, level by level (log_linear_delta_levels.py). Backwards the states are computed once more:
saved are the inputs alone.

One H200, bf16, B = 2, 48 heads, V = 64, K = 128, keys shared by the heads (2026-11-21), ms forward / with its backward:
0.91 / 4.7 for 4,096 tokens, 1.7 / 9.8 for 8,192, 7.5 / 50 for 32,768, 16 / 117 for 65,536. The reference takes 36 times
as long at 1,024: where the kernel is right it wins.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.kernels.gated_delta import CHUNK, DTYPES, packed
from surgery.kernels.gated_delta_rows import LEVELS, Sizes, sizes
from surgery.kernels.log_linear_delta_edges import Edge, falls
from surgery.kernels.log_linear_delta_launch import Call
from surgery.kernels.measured import fastest, of_tokens
from surgery.mixers.masks.hierarchical import levels_after, log_linear
from surgery.op import kernel_for

ALL = LEVELS  # where no bit of a chunk's index may be dropped
FEATURES = 256  # more of a state than a program can hold


class _LogLinearDelta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gates: Tensor, level: Tensor, bucket: Tensor | None,
        extra: Tensor | None, end: Tensor | None, s: Sizes, levels: int, top: int,
    ) -> Any:  # fmt: skip
        ctx.save_for_backward(q, k, v, beta, gates, level, bucket, extra, end)
        ctx.sizes = s, levels, top
        return Call(q, k, v, beta, gates, level, bucket, extra, end, s, levels, top).forward()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors = ctx.saved_tensors
        bucket = tensors[6]
        dafter = None if bucket is None else grads[1].contiguous()
        made = Call(*tensors, *ctx.sizes).backward(packed(grads[0]), dafter)
        made = (None if made_one is None else made_one.to(t.dtype) for made_one, t in zip(made, tensors))
        return *made, None, None, None, None


def log_linear_delta(
    q_BGJTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor,
    gates_BGT: Tensor,
    level_BTGJL: Tensor,
    start_B: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """out_BGJTV in v's dtype, nothing before the tokens. start: positions of the rows' first tokens, None: 0.
    cu_seqlens: borders of sequences packed in one row (B = 1), each with a past of its own."""
    assert q_BGJTK.shape[-1] <= FEATURES, f"log_linear_delta takes up to {FEATURES} features, not {q_BGJTK.shape[-1]}"
    s = sizes(q_BGJTK, v_BGTV, chunk, start_B, cu_seqlens)
    top = (s.N - 1).bit_length()
    gates = gates_BGT.expand(v_BGTV.shape[:3])
    inputs = packed(q_BGJTK), packed(k_BGTK), packed(v_BGTV), beta_BGT, gates, level_BTGJL
    levels = top if start_B is None else top + 1
    return _LogLinearDelta.apply(*inputs, None, None, None, s, levels, top)[0]


def with_buckets(
    tokens: tuple[Tensor, ...], level_BTGJL: Tensor, start_B: Tensor, count_B: Tensor, buckets_BLGKV: Tensor, chunk: int,
    levels: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out_BGJTV, the buckets after the tokens, as many as `levels`): those of chunks by the kernels, smaller ones
    beside them."""
    q, k, v, beta, gates = tokens
    T, end_B, buckets = v.shape[2], start_B + count_B, buckets_BLGKV.float()
    s = sizes(q, v, chunk, start_B, None)
    bits, high = s.C.bit_length() - 1, max(0, levels - s.C.bit_length() + 1)
    at_B, slot_B, low = start_B >> bits, start_B % s.C, buckets[:, :bits]
    first = Edge.of(tokens, level_BTGJL, start_B, count_B, at_B, slot_B, bits)
    low_BlGKV = first.through(low)
    brought = F.pad(buckets[:, bits:], (0, 0, 0, 0, 0, 0, 0, high - buckets[:, bits:].shape[1]))
    inputs = packed(q), packed(k), packed(v), beta, gates, level_BTGJL, brought.transpose(0, 1).contiguous()
    out, after = _LogLinearDelta.apply(*inputs, low_BlGKV.sum(1), end_B, s, high, ALL)
    last = Edge.of(tokens, level_BTGJL, start_B, count_B, end_B >> bits, end_B % s.C, bits)
    own = last.low() + falls(first, low_BlGKV, end_B, at_B)
    out = out + first.reads(low, T).to(out.dtype) if low.shape[1] else out
    return out, torch.cat([own, after.transpose(0, 1)], 1)[:, :levels]


def accepts(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, gates: Tensor, level: Tensor, start: Tensor,
    buckets: Tensor | None, count: Tensor, chunk: int, levels: int | None = None,
) -> bool:  # fmt: skip
    alike = q.dtype == k.dtype == v.dtype and v.dtype in DTYPES
    return beta is not None and alike and q.shape[-1] <= FEATURES and v.numel() > 0


@kernel_for(log_linear, accepts=accepts, wins=fastest("hierarchical delta", of_tokens))
def log_linear_with_delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gates: Tensor, level: Tensor, start: Tensor,
    buckets: Tensor | None, count: Tensor, chunk: int, levels: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    gates = gates.expand(v.shape[:3])
    if buckets is not None:
        levels = levels_after(buckets, start, count) if levels is None else levels
        return with_buckets((q, k, v, beta, gates), level, start, count, buckets, min(chunk, CHUNK), levels)
    return log_linear_delta(q, k, v, beta, gates, level, start, chunk=min(chunk, CHUNK)), None
