"""Log-linear Gated DeltaNet on a GPU: the hierarchical mask with the delta rule's scores (`log_linear` with beta).

    o_t = sum_l lambda_t^(l) q_t S_t^(l)      S_t^(l): the gated delta rule's state of Fenwick bucket l of t's past

Guo et al. 2025, "Log-Linear Attention", sections 3.3 and 3.4. Chunks by themselves (kernels/log_linear_delta/chunk.py), then
the Fenwick tree over chunks, level by level (kernels/log_linear_delta/levels.py). Backwards the states are computed once more:
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

from surgery.core.dispatch import register_kernel
from surgery.kernels.custom_op import CustomOp
from surgery.kernels.gated_delta import DEFAULT_CHUNK, DTYPES, unit_last_stride
from surgery.kernels.gated_delta.layout import MAX_LEVELS, MOST_HEADS, DeltaSizes, limit_chunk, make_sizes, max_chunks
from surgery.kernels.log_linear_delta.boundary import BoundaryChunk, final_buckets
from surgery.kernels.log_linear_delta.plan import DeltaCall
from surgery.kernels.tuning import TOKENS_READER, is_fastest
from surgery.mixers.masks.log_linear import levels_after, log_linear

ALL_LEVELS = MAX_LEVELS  # where no bit of a chunk's index may be dropped
MAX_FEATURES = 256  # more of a state than a program can hold


class _LogLinearDelta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gates: Tensor, level: Tensor, bucket: Tensor | None,
        extra: Tensor | None, end: Tensor | None, s: DeltaSizes, levels: int, top: int,
    ) -> Any:  # fmt: skip
        ctx.save_for_backward(q, k, v, beta, gates, level, bucket, extra, end)
        ctx.sizes = s, levels, top
        return DeltaCall(q, k, v, beta, gates, level, bucket, extra, end, s, levels, top).forward()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *backward(*grads, DeltaCall(*ctx.saved_tensors, *ctx.sizes)), *[None] * 4


def backward(dout: Tensor, dafter: Tensor | None, call: DeltaCall) -> tuple[Tensor | None, ...]:
    """Of the call's first eight tensors, each in its dtype."""
    tensors = call.q, call.k, call.v, call.beta, call.gates, call.level, call.bucket_lRGKV, call.extra_RGKV
    dafter = None if call.bucket_lRGKV is None or dafter is None else dafter.contiguous()
    made = call.backward(unit_last_stride(dout), dafter)
    return tuple(None if d is None or t is None else d.to(t.dtype) for d, t in zip(made, tensors))


def _make_call(*given: Any) -> DeltaCall:
    """Of what the node is given."""
    *tensors, start, ends, chunk, levels, top = given
    return DeltaCall(*tensors, make_sizes(tensors[0], tensors[2], chunk, start, ends), levels, top)


def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    out, after = _make_call(*given).forward()
    return out, out.new_empty(0, dtype=torch.float32) if after is None else after


def _fake_outputs(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    after = v.new_empty(0, dtype=torch.float32) if rest[3] is None else torch.empty_like(rest[3])
    return v.new_empty(*q.shape[:4], v.shape[-1]), after


LOG_LINEAR_DELTA_OP = CustomOp(
    "log_linear_delta",
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor gates, Tensor level, Tensor? bucket, Tensor? extra, Tensor? end, "
    "Tensor? start, Tensor? ends, int chunk, int levels, int top",
    _forward,
    lambda dout, dafter, *given: (*backward(dout, dafter, _make_call(*given)), *[None] * 6),
    _fake_outputs,
)


def _apply(
    inputs: tuple[Tensor, ...], beside: tuple[Tensor | None, ...], chunk: int, start: Tensor | None,
    ends: Tensor | None, levels: int | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out_BGJTV, the buckets behind). beside: bucket, extra, end, see `DeltaCall`. levels None: those the chunks need."""
    q, _, v = inputs[:3]
    if levels is None:
        N = max_chunks(v, chunk, start)
        levels = top = (N - 1).bit_length()
        levels += start is not None
    else:
        top = ALL_LEVELS
    if torch.compiler.is_compiling():
        return LOG_LINEAR_DELTA_OP(*inputs, *beside, start, ends, chunk, levels, top)
    return _LogLinearDelta.apply(*inputs, *beside, make_sizes(q, v, chunk, start, ends), levels, top)


def log_linear_delta(
    q_BGJTK: Tensor,
    k_BGTK: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor,
    gates_BGT: Tensor,
    level_BTGJL: Tensor,
    start_B: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int = DEFAULT_CHUNK,
) -> Tensor:
    """out_BGJTV in v's dtype, nothing before the tokens. start: positions of the rows' first tokens, None: 0.
    cu_seqlens: borders of sequences packed in one row (B = 1), each with a past of its own."""
    assert q_BGJTK.shape[-1] <= MAX_FEATURES, (
        f"log_linear_delta takes up to {MAX_FEATURES} features, not {q_BGJTK.shape[-1]}"
    )
    gates = gates_BGT.expand(v_BGTV.shape[:3])
    inputs = unit_last_stride(q_BGJTK), unit_last_stride(k_BGTK), unit_last_stride(v_BGTV), beta_BGT, gates, level_BTGJL
    return _apply(inputs, (None, None, None), chunk, start_B, cu_seqlens, None)[0]


def run_with_buckets(
    tokens: tuple[Tensor, ...], level_BTGJL: Tensor, start_B: Tensor, count_B: Tensor, buckets_BLGKV: Tensor, chunk: int,
    levels: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out_BGJTV, the buckets after the tokens, as many as `levels`): those of chunks by the kernels, smaller ones
    beside them."""
    q, k, v, beta, gates = tokens
    T, end_B, buckets = v.shape[2], start_B + count_B, buckets_BLGKV.float()
    C = limit_chunk(v, chunk)
    bits, high = C.bit_length() - 1, max(0, levels - C.bit_length() + 1)
    at_B, slot_B, low = start_B >> bits, start_B % C, buckets[:, :bits]
    first = BoundaryChunk.from_tokens(tokens, level_BTGJL, start_B, count_B, at_B, slot_B, bits)
    low_BlGKV = first.through(low)
    brought = F.pad(buckets[:, bits:], (0, 0, 0, 0, 0, 0, 0, high - buckets[:, bits:].shape[1]))
    inputs = unit_last_stride(q), unit_last_stride(k), unit_last_stride(v), beta, gates, level_BTGJL
    beside = brought.transpose(0, 1).contiguous(), low_BlGKV.sum(1), end_B
    out, after = _apply(inputs, beside, chunk, start_B, None, high)
    last = BoundaryChunk.from_tokens(tokens, level_BTGJL, start_B, count_B, end_B >> bits, end_B % C, bits)
    own = last.low() + final_buckets(first, low_BlGKV, end_B, at_B)
    out = out + first.reads(low, T).to(out.dtype) if low.shape[1] else out
    return out, torch.cat([own, after.transpose(0, 1)], 1)[:, :levels]


def accepts(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, gates: Tensor, level: Tensor, start: Tensor,
    buckets: Tensor | None, count: Tensor, chunk: int, levels: int | None = None,
) -> bool:  # fmt: skip
    alike = q.dtype == k.dtype == v.dtype and v.dtype in DTYPES
    return (
        beta is not None
        and alike
        and q.shape[-1] <= MAX_FEATURES
        and v.numel() > 0
        and v.shape[1] * q.shape[2] < MOST_HEADS
    )


@register_kernel(log_linear, accepts=accepts, is_faster=is_fastest("hierarchical delta", TOKENS_READER))
def log_linear_delta_triton(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gates: Tensor, level: Tensor, start: Tensor,
    buckets: Tensor | None, count: Tensor, chunk: int, levels: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    gates = gates.expand(v.shape[:3])
    if buckets is not None:
        levels = levels_after(buckets, start, count) if levels is None else levels
        return run_with_buckets((q, k, v, beta, gates), level, start, count, buckets, min(chunk, DEFAULT_CHUNK), levels)
    return log_linear_delta(q, k, v, beta, gates, level, start, chunk=min(chunk, DEFAULT_CHUNK)), None
