"""Gated masks with kernel scores: SSD, RetNet, linear attention (Dao and Gu 2024, "Transformers are SSMs", section 6).

    S_t = e^(g_t) S_t-1 + k_t v_t^T      o_t = q_t S_t      log-gates g <= 0

Forward: a walk over the chunks stores the state before each (kernels/ssd/states.py), then all chunks compute their
outputs in parallel (kernels/ssd/output.py). Backward: the states again, the walk back with their gradients, then all
chunks in parallel (kernels/ssd/backward.py). Only the inputs are saved. Where another package's kernel is installed,
correct and faster, it runs instead (kernels/packages/contest.py).

Shapes: q (B, G, J, T, F), k (B, G, T, F), v (B, G, T, V), gates (B, G, T), states (S, G, F, V). B rows of the batch, G
groups of J query heads, T tokens, F features of queries and keys, V values, S sequences: the rows, or sequences packed
into one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.chunked_op import ChunkedFunctions, ChunkedOp
from surgery.kernels.kernel_tensors import empty_out, reduce_shared, unit_last_stride
from surgery.kernels.packages.adapters import SSD_KERNELS
from surgery.kernels.packages.chunked import with_packages
from surgery.kernels.packages.heads_last import RowTensors
from surgery.kernels.ssd.backward import launch_read_grad, launch_write_grad
from surgery.kernels.ssd.layout import (
    ChunkedPlan,
    ChunkTable,
    empty_states,
    fits_kernels,
    limit_chunk,
    run_sliced,
)
from surgery.kernels.ssd.output import launch_read
from surgery.kernels.ssd.states import launch_pass_backward, launch_pass_forward
from surgery.kernels.tuning import TOKENS_READER, is_fastest
from surgery.mixers.common.packed_pieces import PackedPieces, borders_of
from surgery.mixers.masks.semiseparable import semiseparable, semiseparable_packed


def _make_table(
    tensors: tuple[Tensor, ...], start: Tensor, ends: Tensor | PackedPieces | None, chunk: int, aligned: bool
) -> ChunkTable:
    if isinstance(ends, PackedPieces):
        return ChunkTable.from_pieces(ends, chunk)
    return ChunkTable.from_geometry(tensors[2], start, ends, chunk, aligned)


def _forward(tensors: tuple[Any, ...], table: ChunkTable) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV, last_SGFV) of q, k, v, gates and the first state or None."""
    *tokens, first = tensors
    plan = ChunkedPlan.from_inputs(table, *tokens)
    states, last = launch_pass_forward(plan, first)
    return launch_read(plan, states), last


def _backward(
    tensors: tuple[Any, ...], table: ChunkTable, d_out: Tensor, d_last: Tensor
) -> tuple[Tensor | None, ...]:  # fmt: skip
    q, k, v, gates, first = tensors
    plan, d_out = ChunkedPlan.from_inputs(table, q, k, v, gates), unit_last_stride(d_out)
    states, _ = launch_pass_forward(plan, first)
    read = launch_read_grad(plan, states, d_out)
    d_q = reduce_shared(read.d_q_BGJTF, q)
    d_slots, d_first = launch_pass_backward(plan, d_out, d_last.contiguous())
    write = launch_write_grad(plan, states, d_slots, d_out, read.pull_BGJT, final=False)
    d_k = reduce_shared(write.d_k_BGTF, k)
    return d_q, d_k, write.d_v_BGTV, write.d_gates_BGT, None if first is None else d_first


def _fake_outputs(
    tensors: tuple[Any, ...], start: Tensor, ends: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v, *_rest = tensors
    return empty_out(q, v), empty_states(k, v, len(start) if ends is None else len(ends) - 1)


SSD_OP = ChunkedOp(
    "ssd",
    "Tensor q, Tensor k, Tensor v, Tensor gates, Tensor? first",
    ChunkTable.GEOMETRY,
    with_packages(
        "SSD",
        ChunkedFunctions(_make_table, _forward, _backward, _fake_outputs),
        SSD_KERNELS,
        rows_of=lambda tensors: RowTensors(*tensors[:3], None, *tensors[3:]),
        borders_of=lambda start, ends, *_: borders_of(ends),
    ),
)


def ssd(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    gates_BGT: Tensor,
    first_SGFV: Tensor | None = None,
    *,
    cu_seqlens: Tensor | PackedPieces | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV in v's dtype, the state behind each sequence's last token in float32).

    q and k may have 1 in place of G: shared by all groups. first: states before the first tokens, None for zeros.
    cu_seqlens: borders (S + 1,) of S sequences packed into one row (B = 1), or the pieces.
    """
    batch, groups, length, _ = v_BGTV.shape
    gates_BGT = gates_BGT.float().expand(batch, groups, length)
    start = borders_of(cu_seqlens)
    if start is None:
        start = torch.zeros(batch, dtype=torch.int32, device=v_BGTV.device)
    geometry = start, cu_seqlens, limit_chunk(chunk), cu_seqlens is None

    def run(q: Tensor, k: Tensor, v: Tensor, features: slice, values: slice) -> tuple[Tensor, Tensor]:
        first = None if first_SGFV is None else first_SGFV[..., features, values].float().contiguous()
        return SSD_OP((unit_last_stride(q), unit_last_stride(k), unit_last_stride(v), gates_BGT, first), geometry)

    return run_sliced(run, q_BGJTF, k_BGTF, v_BGTV)


def _accepts(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, gates: Tensor, *_: Any, chunk: int, **__: Any
) -> bool:
    return beta is None and gates.shape[1] == 1 and fits_kernels(q, k, v, chunk)


@register_kernel(semiseparable, accepts=_accepts, is_faster=is_fastest("gates", TOKENS_READER))
def semiseparable_ssd(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor | None,
    gates_BRGT: Tensor,
    weight_RGJ: Tensor | None,
    *,
    first_BRGFV: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """`semiseparable` with one component, whose weight multiplies the output."""
    tokens = q_BGJTF, k_BGTF, v_BGTV, gates_BRGT, weight_RGJ
    return _mix_one_component(tokens, first_BRGFV, None, chunk)


@register_kernel(semiseparable_packed, accepts=_accepts, is_faster=is_fastest("gates", TOKENS_READER))
def semiseparable_packed_ssd(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor | None,
    gates_BRGT: Tensor,
    weight_RGJ: Tensor | None,
    *,
    first_SRGFV: Tensor,
    pieces: PackedPieces,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """`semiseparable_packed` with one component, whose weight multiplies the output."""
    tokens = q_BGJTF, k_BGTF, v_BGTV, gates_BRGT, weight_RGJ
    return _mix_one_component(tokens, first_SRGFV, pieces, chunk)


def _mix_one_component(
    tokens: tuple[Any, ...], first_BRGFV: Tensor | None, cu_seqlens: Tensor | PackedPieces | None, chunk: int
) -> tuple[Tensor, Tensor]:
    q_BGJTF, k_BGTF, v_BGTV, gates_BRGT, weight_RGJ = tokens
    first, gates_BGT = None if first_BRGFV is None else first_BRGFV.squeeze(1), gates_BRGT.squeeze(1)
    out_BGJTV, last = ssd(q_BGJTF, k_BGTF, v_BGTV, gates_BGT, first, cu_seqlens=cu_seqlens, chunk=chunk)
    if weight_RGJ is not None:
        out_BGJTV = out_BGJTV * weight_RGJ[0, :, :, None, None].to(out_BGJTV.dtype)
    return out_BGJTV, last.unsqueeze(1)
