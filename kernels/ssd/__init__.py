"""Masks of gates with kernel scores: SSD, RetNet, linear attention (Dao and Gu 2024, "Transformers are SSMs", sec. 6).

Forward: a walk over the chunks that leaves the state before each (kernels/ssd/states.py), then all chunks at once (kernels/ssd/output.py).
Backward: the states again, the walk back with their gradients, then all chunks at once (kernels/ssd/backward.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.custom_op import CustomOp
from surgery.kernels.ssd.layout import (
    ChunkTable,
    TokenTensors,
    empty_out,
    empty_states,
    fits_kernels,
    gate_sums,
    launch_read,
    launch_read_grad,
    launch_write_grad,
    limit_chunk,
    reduce_shared,
    run_sliced,
    unit_last_stride,
)
from surgery.kernels.ssd.states import launch_pass_backward, launch_pass_forward
from surgery.kernels.tuning import TOKENS_READER, is_fastest
from surgery.mixers.masks.semiseparable import semiseparable


def forward(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, first: Tensor | None, table: ChunkTable
) -> tuple[Tensor, Tensor]:
    """(out_BGJTV, last_SGFV) of q_BGJTF, k_BGTF, v_BGTV, gates_BGT, first_SGFV or None."""
    tokens = TokenTensors.from_inputs(q, k, v, gate_sums(table, gates))
    slots, last = launch_pass_forward(table, tokens, first)
    return launch_read(table, tokens, slots, slots), last


def backward(
    d_out: Tensor,
    d_last: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    first: Tensor | None,
    table: ChunkTable,
) -> tuple[Tensor | None, ...]:
    tokens, d_out = TokenTensors.from_inputs(q, k, v, gate_sums(table, gates)), unit_last_stride(d_out)
    slots, _ = launch_pass_forward(table, tokens, first)
    d_q, _, pull, _ = launch_read_grad(table, tokens, slots, slots, d_out)
    d_q = reduce_shared(d_q, q)
    d_slots, d_first = launch_pass_backward(table, tokens, d_out, d_last.contiguous())
    d_k, d_v, d_gates, _ = launch_write_grad(table, tokens, slots, d_slots, slots, d_out, pull, False)
    return d_q, reduce_shared(d_k, k), d_v, d_gates, None if first is None else d_first


class SSDFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.table = args
        ctx.save_for_backward(*tensors)
        return forward(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(*grads, *ctx.saved_tensors, ctx.table), None


def _fake_outputs(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, first: Tensor | None, start: Tensor, *_: Any) -> Any:
    return empty_out(q, v), empty_states(k, v, len(start))


SSD_OP = CustomOp(
    "ssd",
    f"Tensor q, Tensor k, Tensor v, Tensor gates, Tensor? first, {ChunkTable.SCHEMA}",
    lambda q, k, v, gates, first, *table: forward(q, k, v, gates, first, ChunkTable.from_schema(v, *table)),
    lambda d_out, d_last, q, k, v, gates, first, *table: (
        *backward(d_out, d_last, q, k, v, gates, first, ChunkTable.from_schema(v, *table)),
        *[None] * len(table),
    ),
    _fake_outputs,
)


def ssd(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    gates_BGT: Tensor,
    first_SGFV: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """(out_BGJTV in v's dtype, the state behind each sequence's last token, float32). q and k may have 1 in place of G:
    shared by all heads. cu_seqlens: sequences packed into one row, B = 1; S counts them, else S = B."""
    batch, groups, length, _ = v_BGTV.shape
    gates_BGT = gates_BGT.float().expand(batch, groups, length)
    if cu_seqlens is None:
        start_B = torch.zeros(batch, dtype=torch.int32, device=v_BGTV.device)
        table = ChunkTable.from_rows(start_B, length, limit_chunk(chunk), aligned=True)
    else:
        table = ChunkTable.from_cu_seqlens(cu_seqlens, length, limit_chunk(chunk))

    def run(q: Tensor, k: Tensor, v: Tensor, features: slice, values: slice) -> tuple[Tensor, Tensor]:
        first = None if first_SGFV is None else first_SGFV[..., features, values].float().contiguous()
        given = unit_last_stride(q), unit_last_stride(k), unit_last_stride(v), gates_BGT, first
        return SSD_OP(*given, *table.to_schema()) if torch.compiler.is_compiling() else SSDFunction.apply(*given, table)

    return run_sliced(run, q_BGJTF, k_BGTF, v_BGTV)


def _accepts(q: Tensor, k: Tensor, v: Tensor, beta: Any, gates: Tensor, weight: Any, first: Any, chunk: int) -> bool:
    return beta is None and gates.shape[1] == 1 and fits_kernels(q, k, v, chunk)


@register_kernel(semiseparable, accepts=_accepts, is_faster=is_fastest("gates", TOKENS_READER))
def semiseparable_ssd(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor | None,
    gates_BRGT: Tensor,
    weight_RGJ: Tensor | None,
    first_BRGFV: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """One component. What it weighs multiplies all that is read."""
    first = None if first_BRGFV is None else first_BRGFV.squeeze(1)
    out_BGJTV, last = ssd(q_BGJTF, k_BGTF, v_BGTV, gates_BRGT.squeeze(1), first, None, chunk)
    if weight_RGJ is not None:
        out_BGJTV = out_BGJTV * weight_RGJ[0, :, :, None, None].to(out_BGJTV.dtype)
    return out_BGJTV, last.unsqueeze(1)
