"""Softmax attention over a window and sinks, which linear mixers join with their far part: replaces `local_attention`.

    out_t = sum_s exp(score_ts - lse_t) v_s      lse_t = log sum_s exp(score_ts)

over the last `window` tokens and the first `sinks` ones (surgery/mixers/common/window_hybrid.py). Each program takes
all heads of a group, so that keys are loaded once for them, and only the band of keys that its queries see. Gradients
flow through out, lse and the largest score; out and the statistics are float32.

The join with the far part is left to the caller: it needs `out` by itself for the gradient of its weight, so that a
kernel that wrote the joined output would save a pass in inference only.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from surgery.core.dispatch import register_kernel
from surgery.kernels.custom_op import CustomOp
from surgery.kernels.kernel_tensors import (
    HAS_TUPLE_ARGUMENTS,
    GroupTensor,
    HeadTensor,
    needs_gradients,
    unit_last_stride,
)
from surgery.kernels.launch import open_launch
from surgery.kernels.local_attention.backward import local_keys, local_queries
from surgery.kernels.local_attention.forward import local_forward
from surgery.kernels.local_attention.plan import (
    SPLIT_TILES,
    LocalInputs,
    LocalPlan,
    LocalTiles,
    backward_tiles,
    forward_tiles,
    pow2,
)
from surgery.kernels.tuning import (
    CallReader,
    TuningQuery,
    is_capturing,
    is_fastest,
    named_sizes,
    step_pass,
    training_pass,
)
from surgery.mixers.base import AttentionShape
from surgery.mixers.common.window_hybrid import LocalOutput, RecentAndSinks, local_attention

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DIMS = 256  # of keys and of values
MAX_SINKS = 128

Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def query_options(inputs: LocalInputs, tiles: LocalTiles) -> dict[str, Any]:
    """Return the compile-time constants of the kernels that walk keys past queries."""
    split = inputs.plan.window >= SPLIT_TILES * tiles.N
    return {**inputs.options(tiles), "N": tiles.N, "BS": sink_tile(inputs, tiles), "SPLIT": split}


def sink_tile(inputs: LocalInputs, tiles: LocalTiles) -> int:
    """Return the sinks of a tile."""
    return min(tiles.N, pow2(inputs.plan.sinks))


def launch_forward(inputs: LocalInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (out_BGJTV, stats, largest_at_BGJT).

    stats: lse_BGJT and, if the plan asks for them, the largest scores, (1 or 2, B, G, J, T);
    largest_at: where those are, None if not asked for."""
    q, plan, tiles = inputs.q, inputs.plan, forward_tiles(inputs)
    new = {"device": q.device, "dtype": torch.float32}
    out = torch.empty(*q.shape[:4], inputs.v.shape[-1], **new)
    stats = torch.empty(1 + plan.largest, *q.shape[:4], **new)
    largest_at = torch.empty(q.shape[:4], device=q.device, dtype=torch.int32) if plan.largest else None
    open_launch(local_forward, query_options(inputs, tiles))(
        (inputs.lanes * -(-inputs.rows // tiles.M),),
        *inputs.tensors(), out, stats, largest_at, *inputs.sizes(), stats.numel() // len(stats),
    )  # fmt: skip
    return out, stats, largest_at


def launch_backward(
    inputs: LocalInputs, out: Tensor, stats: Tensor, largest_at: Tensor | None, dout: Tensor, dstats: Tensor
) -> Grads:
    """Return the gradients of q, k, v and of the sinks' k and v."""
    plan, tiles, lanes = inputs.plan, backward_tiles(inputs), inputs.lanes
    dq, dk, dv = (torch.empty_like(x) for x in (inputs.q, inputs.k, inputs.v))
    delta = torch.empty_like(stats[0])
    q, k, v, sink_k, sink_v, seen = inputs.tensors()
    d_out, sizes = HeadTensor.from_tensor(dout), (*inputs.sizes(), delta.numel())
    local_queries[(lanes * triton.cdiv(inputs.rows, tiles.M),)](
        *inputs.tensors(), out, d_out, stats, dstats, largest_at, delta, HeadTensor.from_tensor(dq), *sizes,
        **query_options(inputs, tiles),
    )  # fmt: skip
    known, options = (seen, d_out, stats, dstats, largest_at, delta), inputs.options(tiles)
    local_keys[(lanes * triton.cdiv(inputs.k.shape[2], tiles.N),)](
        q, k, v, *known, GroupTensor.from_tensor(dk), GroupTensor.from_tensor(dv), *sizes, 0, N=tiles.N, OF_SINKS=False,
        **options,
    )  # fmt: skip
    if plan.sinks == 0:
        return dq, dk, dv, torch.empty_like(inputs.sink_k), torch.empty_like(inputs.sink_v)
    spans = triton.cdiv(inputs.q.shape[3], inputs.span)
    sums = [
        torch.empty(*x.shape[:2], spans * plan.sinks, x.shape[-1], device=x.device, dtype=torch.float32)
        for x in (inputs.sink_k, inputs.sink_v)
    ]
    size = sink_tile(inputs, tiles)
    local_keys[(lanes * spans * triton.cdiv(plan.sinks, size),)](
        q, sink_k, sink_v, *known, *map(GroupTensor.from_tensor, sums), *sizes, inputs.span, N=size, OF_SINKS=True,
        **options,
    )  # fmt: skip
    dsink_k, dsink_v = (x.unflatten(2, (spans, plan.sinks)).sum(2).to(inputs.k.dtype) for x in sums)
    return dq, dk, dv, dsink_k, dsink_v


class LocalAttentionFunction(torch.autograd.Function):
    """(out, stats) of q, k, v and the sinks' k and v, as in `launch_forward`, with gradients."""

    @staticmethod
    def forward(ctx: Any, plan: LocalPlan, seen: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out, stats)."""
        inputs = LocalInputs(*tensors, seen, plan).with_unit_strides()
        out, stats, largest_at = launch_forward(inputs)
        ctx.plan = plan
        ctx.save_for_backward(
            inputs.q, inputs.k, inputs.v, inputs.sink_k, inputs.sink_v, inputs.seen, out, stats, largest_at
        )
        return out, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of the tensors."""
        *tensors, out, stats, largest_at = ctx.saved_tensors
        dout, dstats = unit_last_stride(grads[0]), grads[1].contiguous()
        return None, None, *launch_backward(LocalInputs(*tensors, ctx.plan), out, stats, largest_at, dout, dstats)


# -- as a node of a compiled graph ---------------------------------------------------------------------
def _inputs_of_node(inputs: tuple[Any, ...]) -> LocalInputs:
    *tensors, window, scaling, softcap, largest = inputs
    q, k, v, sink_k, sink_v, seen = tensors
    plan = LocalPlan(window, sink_k.shape[2], scaling, softcap, largest)
    return LocalInputs(q, k, v, sink_k, sink_v, seen, plan).with_unit_strides()


def _node_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    out, stats, _ = launch_forward(_inputs_of_node(inputs))
    return out, stats


def _node_backward(d_out: Tensor, d_stats: Tensor, *inputs: Any) -> tuple[Tensor | None, ...]:
    call = _inputs_of_node(inputs)
    grads = launch_backward(call, *launch_forward(call), unit_last_stride(d_out), d_stats.contiguous())
    return *grads, *[None] * (len(inputs) - len(grads))


def _node_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    q, v, largest = inputs[0], inputs[2], inputs[-1]
    out = q.new_empty(*q.shape[:4], v.shape[-1], dtype=torch.float32)
    return out, q.new_empty(1 + largest, *q.shape[:4], dtype=torch.float32)


LOCAL_ATTENTION_OP = CustomOp(
    "local_attention",
    "Tensor q, Tensor k, Tensor v, Tensor sink_k, Tensor sink_v, Tensor seen, int window, float scaling, float? "
    "softcap, "
    "bool largest",
    _node_forward,
    _node_backward,
    _node_fake,
)


# -- registration ------------------------------------------------------------------------------------
def accepts(
    q_BGJTK: Tensor,
    keys: RecentAndSinks,
    values: RecentAndSinks,
    seen_B: Tensor,
    shape: AttentionShape,
    block: int,
    *,
    with_largest: bool = False,
) -> bool:
    """Return whether the kernels compute this call: sizes and dtypes that fit tiles."""
    tensors = (q_BGJTK, *keys, *values)
    return (
        HAS_TUPLE_ARGUMENTS
        and shape.scaling > 0
        and q_BGJTK.dtype in DTYPES
        and all(x.dtype == q_BGJTK.dtype for x in tensors)
        and q_BGJTK.shape[-1] <= MAX_DIMS
        and values.recent.shape[-1] <= MAX_DIMS
        and keys.sinks.shape[2] <= MAX_SINKS
        and q_BGJTK.numel() > 0
        and values.recent.numel() > 0
        and q_BGJTK.shape[2] * (keys.recent.shape[2] + q_BGJTK.shape[3]) < 2**30  # rows and slots are 32-bit integers
    )


def tuning_query(q_BGJTK: Tensor, keys: RecentAndSinks, values: RecentAndSinks, *_: Any, **__: Any) -> TuningQuery:
    """Return the sizes of the call under which kernels/tuning.json lists its timings."""
    batch, groups, heads, length = q_BGJTK.shape[:4]
    window = keys.recent.shape[2] - length
    sizes = named_sizes(lanes=batch * groups * heads, tokens=length, window=window)
    pass_ = training_pass(q_BGJTK, keys.recent, values.recent)
    if length == 1 and pass_ != "backward":
        pass_ = step_pass(q_BGJTK)
    return TuningQuery(pass_, sizes, q_BGJTK)


def tuning_key(q_BGJTK: Tensor, keys: RecentAndSinks, values: RecentAndSinks, *_: Any, **__: Any) -> Hashable:
    """Return the key under which the choice for a call is remembered."""
    tensors = (q_BGJTK, keys.recent, values.recent)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    sizes = (q_BGJTK.shape, keys.recent.shape[2], q_BGJTK.dtype, q_BGJTK.get_device())
    return *sizes, grad, is_capturing(q_BGJTK), torch.is_autocast_enabled()


@register_kernel(
    local_attention,
    accepts=accepts,
    is_faster=is_fastest("local attention", CallReader(tuning_query, tuning_key)),
)
def local_attention_triton(
    q_BGJTK: Tensor,
    keys: RecentAndSinks,
    values: RecentAndSinks,
    seen_B: Tensor,
    shape: AttentionShape,
    block: int,
    *,
    with_largest: bool = False,
) -> LocalOutput:
    """Return the output of the softmax branch in float32; arguments as in `local_attention`, `block` is ignored."""
    window = keys.recent.shape[2] - q_BGJTK.shape[3]
    tensors = (q_BGJTK, keys.recent, values.recent, keys.sinks, values.sinks)
    if torch.compiler.is_compiling():
        out, stats = LOCAL_ATTENTION_OP(*tensors, seen_B, window, shape.scaling, shape.softcap, with_largest)
    else:
        plan = LocalPlan(window, keys.sinks.shape[2], shape.scaling, shape.softcap, with_largest)
        if needs_gradients(*tensors):
            out, stats = LocalAttentionFunction.apply(plan, seen_B, *tensors)
        else:
            out, stats, _ = launch_forward(LocalInputs(*tensors, seen_B, plan).with_unit_strides())
    return LocalOutput(out, stats[0], stats[1] if with_largest else None)
