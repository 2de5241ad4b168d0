"""Log-linear attention with kernel scores (log-linear Mamba-2; Guo et al. 2025, "Log-Linear Attention", section 3.3).

Forward: the states of a Fenwick tree over chunks (kernels/log_linear/states.py), each written once; then every chunk reads its
log T slots into one sum (kernels/ssd/output.py). Backward: the states again, then what mirrors them; only inputs are saved.
Buckets that rows bring along, and those below a chunk that they leave, are few: plain torch, linear in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.custom_op import CustomOp
from surgery.kernels.log_linear.states import launch_build_slots, launch_slot_gradients
from surgery.kernels.ssd.backward import add_passing_gradients
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
from surgery.kernels.tuning import TOKENS_READER, is_fastest
from surgery.mixers.masks.log_linear import levels_after, log_linear
from surgery.mixers.masks.log_linear_chunked import bit_length


def forward(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, level: Tensor, closing_S: Tensor, levels: int, table: ChunkTable
) -> tuple[Tensor, Tensor]:
    """(out_BGJTV, final_SLGFV) of q_BGJTF, k_BGTF, v_BGTV, gates_BGT, level_BTGJL."""
    tokens = TokenTensors.from_inputs(q, k, v, gate_sums(table, gates), level)
    slots, totals, _, final = launch_build_slots(table, tokens, closing_S, levels)
    return launch_read(table, tokens, slots, totals), final


def backward(
    d_out: Tensor, d_final: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, level: Tensor, closing_S: Tensor,
    levels: int, table: ChunkTable,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    tokens, d_out = TokenTensors.from_inputs(q, k, v, gate_sums(table, gates), level), unit_last_stride(d_out)
    slots, totals, rights, _ = launch_build_slots(table, tokens, closing_S, 0)
    d_q, d_level, pull, shares = launch_read_grad(table, tokens, slots, totals, d_out)
    d_q = reduce_shared(d_q, q)
    d_slots = launch_slot_gradients(table, tokens, d_out, d_final.contiguous(), closing_S)
    d_k, d_v, d_gates, passing = launch_write_grad(table, tokens, slots, d_slots, rights, d_out, pull, levels > 0)
    groups, per_group, of_tree, _ = shares.shape
    add_passing_gradients[(table.places, groups)](
        shares, passing, d_gates, *table.tables(), table.count, table.length, table.places, of_tree, per_group,
        *d_gates.stride(), C=table.chunk, VARLEN=table.varlen, BLOCK=128, num_warps=1,
    )  # fmt: skip
    return d_q, reduce_shared(d_k, k), d_v, d_gates, d_level, None, None


class LogLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.levels, ctx.table = args
        ctx.save_for_backward(*tensors)
        return forward(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(*grads, *ctx.saved_tensors, ctx.levels, ctx.table), None


def _fake_outputs(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, level: Tensor, closing: Tensor, levels: int, *_: Any
) -> Any:
    return empty_out(q, v), empty_states(k, v, len(closing), levels)


LOG_LINEAR_OP = CustomOp(
    "log_linear",
    f"Tensor q, Tensor k, Tensor v, Tensor gates, Tensor level, Tensor closing, int levels, {ChunkTable.SCHEMA}",
    lambda q, k, v, gates, level, closing, levels, *table: forward(
        q, k, v, gates, level, closing, levels, ChunkTable.from_schema(v, *table)
    ),
    lambda d_out, d_final, q, k, v, gates, level, closing, levels, *table: (
        *backward(d_out, d_final, q, k, v, gates, level, closing, levels, ChunkTable.from_schema(v, *table)),
        *[None] * len(table),
    ),
    _fake_outputs,
)


def log_linear_chunks(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    gates_BGT: Tensor,
    level_BTGJL: Tensor,
    start_B: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int = 64,
) -> Tensor:
    """out_BGJTV in v's dtype, of rows that bring no buckets along. q and k may have 1 in place of G: shared by all
    heads. cu_seqlens: sequences packed into one row, B = 1, from position 0 each."""
    batch, length, chunk = len(v_BGTV), v_BGTV.shape[2], limit_chunk(chunk)
    if cu_seqlens is not None:
        table = ChunkTable.from_cu_seqlens(cu_seqlens, length, chunk)
    elif start_B is None:
        table = ChunkTable.from_rows(
            torch.zeros(batch, dtype=torch.int32, device=v_BGTV.device), length, chunk, aligned=True
        )
    else:
        table = ChunkTable.from_rows(start_B, length, chunk)
    return _apply(q_BGJTF, k_BGTF, v_BGTV, gates_BGT, level_BTGJL, table, table.start_B, 0)[0]


def _apply(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, level: Tensor, table: ChunkTable, closing_S: Tensor, levels: int
) -> tuple[Tensor, Tensor]:
    gates, level = gates.float().expand(v.shape[:3]), level.float()

    def run(q: Tensor, k: Tensor, v: Tensor, *_: slice) -> tuple[Tensor, Tensor]:
        given = unit_last_stride(q), unit_last_stride(k), unit_last_stride(v), gates, level, closing_S, levels
        return (
            LOG_LINEAR_OP(*given, *table.to_schema())
            if torch.compiler.is_compiling()
            else LogLinear.apply(*given, table)
        )

    return run_sliced(run, q, k, v)


def _accepts(q: Tensor, k: Tensor, v: Tensor, beta: Any, gates: Tensor, level: Tensor, *rest: Any) -> bool:
    return beta is None and fits_kernels(q, k, v, rest[3])


@register_kernel(log_linear, accepts=_accepts, is_faster=is_fastest("hierarchical", TOKENS_READER))
def log_linear_triton(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor | None,
    gates_BGT: Tensor,
    level_BTGJL: Tensor,
    start_B: Tensor,
    buckets_BLGFV: Tensor | None,
    count_B: Tensor,
    chunk: int,
    levels: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    table = ChunkTable.from_rows(start_B, v_BGTV.shape[2], limit_chunk(chunk))
    end_B = start_B + count_B
    if buckets_BLGFV is None:
        levels = 0
    elif levels is None:
        levels = levels_after(buckets_BLGFV, start_B, count_B)
    high = max(0, levels - table.bits)
    tokens = q_BGJTF, k_BGTF, v_BGTV, gates_BGT, level_BTGJL
    out_BGJTV, final_BLGFV = _apply(*tokens, table, end_B >> table.bits, high)
    if buckets_BLGFV is None:
        return out_BGJTV, None
    gates_BGT = gates_BGT.float().expand(v_BGTV.shape[:3])
    left = _FinalBuckets(k_BGTF, v_BGTV, gates_BGT, start_B, end_B, table.bits)
    after = F.pad(left.low(), (0, 0, 0, 0, 0, 0, 0, high))[:, :levels] + left.high(final_BLGFV, levels)
    if buckets_BLGFV.shape[1]:
        brought = _InitialBuckets(buckets_BLGFV.float(), gates_BGT, start_B, end_B)
        out_BGJTV = out_BGJTV + brought.read(q_BGJTF, level_BTGJL).to(out_BGJTV.dtype)
        after = after + brought.after(levels)
    return out_BGJTV, after


@dataclass
class _FinalBuckets:
    """The buckets behind the last of the row's own tokens."""

    k_BGTF: Tensor
    v_BGTV: Tensor
    gates_BGT: Tensor
    start_B: Tensor
    end_B: Tensor
    bits: int

    def _fade(self, at_BX: Tensor) -> Tensor:
        """Gates from the tokens of these indices on to the last token, (B, G, X)."""
        after_BGT = F.pad(self.gates_BGT.flip(-1).cumsum(-1).flip(-1), (0, 1))
        at_BX = at_BX.clamp(0, after_BGT.shape[2] - 1)
        return after_BGT.gather(2, at_BX.unsqueeze(1).expand(-1, after_BGT.shape[1], -1)).exp()

    def high(self, final_BLGFV: Tensor, levels: int) -> Tensor:
        """Of whole chunks, from the ends of their segments on."""
        level_L = torch.arange(final_BLGFV.shape[1], device=self.end_B.device) + self.bits
        ends_BL = (self.end_B.unsqueeze(1) >> level_L) << level_L
        fade_BLG = self._fade(ends_BL - self.start_B.unsqueeze(1)).transpose(1, 2)
        below = min(self.bits, levels)
        return F.pad(fade_BLG[..., None, None] * final_BLGFV, (0, 0, 0, 0, 0, 0, below, 0))

    def low(self) -> Tensor:
        """Of the chunk that the row ends in: (B, bits, G, F, V)."""
        at_C = torch.arange(1 << self.bits, device=self.end_B.device)
        first_B = self.end_B >> self.bits << self.bits
        place_BC = first_B.unsqueeze(1) + at_C
        token_BC = place_BC - self.start_B.unsqueeze(1)
        level_BC = bit_length(at_C ^ (self.end_B - first_B).unsqueeze(1), self.bits) - 1
        here_BC = (token_BC >= 0) & (place_BC < self.end_B.unsqueeze(1))
        into_BlC = (level_BC.unsqueeze(1) == torch.arange(self.bits, device=at_C.device)[:, None]) & here_BC.unsqueeze(
            1
        )
        index_BC = token_BC.clamp(0, self.v_BGTV.shape[2] - 1)
        k_BGCF, v_BGCV = (x.float().take_along_dim(index_BC[:, None, :, None], 2) for x in (self.k_BGTF, self.v_BGTV))
        k_BGCF = k_BGCF * self._fade(token_BC + 1).unsqueeze(-1)
        return (into_BlC[:, :, None, :, None] * k_BGCF.unsqueeze(1)).mT @ v_BGCV.unsqueeze(1)


@dataclass
class _InitialBuckets:
    """The buckets that rows bring along. What was carried in them is carried to the row's start already."""

    buckets_BLGFV: Tensor
    gates_BGT: Tensor
    start_B: Tensor
    end_B: Tensor

    def read(self, q_BGJTF: Tensor, level_BTGJL: Tensor) -> Tensor:
        """out_BGJTV: a token sees a bucket at the level where their positions part."""
        count, length = self.buckets_BLGFV.shape[1], q_BGJTF.shape[3]
        at_BT = self.start_B.unsqueeze(1) + torch.arange(length, device=self.start_B.device)
        differs_BT1 = bit_length(at_BT ^ self.start_B.unsqueeze(1), 62).unsqueeze(2)
        level_BTl = torch.maximum(differs_BT1, torch.arange(1, count + 1, device=at_BT.device))
        level_BGJTL = level_BTGJL.float().movedim(1, 3)
        index = level_BTl.clamp_max(level_BTGJL.shape[-1] - 1)[:, None, None]
        weight_BGJTl = level_BGJTL.gather(-1, index.expand(*level_BGJTL.shape[:-1], count))
        weight_BGJTl = weight_BGJTl * self.gates_BGT.cumsum(-1).exp()[:, :, None, :, None]
        dtype = q_BGJTF.dtype
        return sum(
            weight_BGJTl[..., i, None] * (q_BGJTF @ self.buckets_BLGFV[:, i, :, None].to(dtype)).float()
            for i in range(count)
        )  # type: ignore[return-value]

    def after(self, levels: int) -> Tensor:
        """Where they are behind the last token, (B, levels, G, F, V)."""
        count = self.buckets_BLGFV.shape[1]
        differs_B1 = (bit_length(self.end_B ^ self.start_B, 62) - 1).unsqueeze(1)
        into_Bl = torch.maximum(differs_B1, torch.arange(count, device=differs_B1.device))
        into_BLl = into_Bl.unsqueeze(1) == torch.arange(levels, device=into_Bl.device)[:, None]
        faded = self.buckets_BLGFV * self.gates_BGT.sum(-1).exp()[:, None, :, None, None]
        return torch.einsum("bLl,blgfv->bLgfv", into_BLl.to(faded.dtype), faded)
