"""Log-linear attention with kernel scores (log-linear Mamba-2; Guo et al. 2025, "Log-Linear Attention", section 3.3).

    o_t = sum_l lambda_t^(l) q_t S_t^(l)      S_t^(l): gated sum of k v^T over bucket l of the Fenwick tree of t's past

Forward: the states of a Fenwick tree over chunks (kernels/log_linear/states.py), each stored once; then every chunk
reads its log T slots into one sum (kernels/ssd/output.py). Backward: the states again, then the same passes in reverse;
only the inputs are saved. Buckets that rows resume from, and buckets smaller than a chunk, are few: plain torch, linear
in them.

Shapes as in kernels/ssd/__init__.py; level (B, T, G, J, L): lambda of each token, head and level; buckets (B, L, G, F,
V).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.core.dispatch import register_kernel
from surgery.kernels.chunked_op import ChunkedFunctions, ChunkedOp
from surgery.kernels.kernel_tensors import empty_out, reduce_shared, unit_last_stride
from surgery.kernels.log_linear.states import launch_build_slots, launch_slot_gradients
from surgery.kernels.ssd.backward import launch_add_passing_gradients, launch_read_grad, launch_write_grad
from surgery.kernels.ssd.layout import (
    ChunkedPlan,
    ChunkTable,
    empty_states,
    fits_kernels,
    limit_chunk,
    run_sliced,
)
from surgery.kernels.ssd.output import launch_read
from surgery.kernels.tuning import TOKENS_READER, is_fastest
from surgery.mixers.masks.log_linear import levels_after, log_linear
from surgery.mixers.masks.log_linear_chunked import bit_length


class _TreePlan(NamedTuple):
    """closing_S: the chunk of each sequence whose slots are returned, `levels` of them."""

    closing_S: Tensor
    levels: int
    table: ChunkTable


def _make_plan(tensors: tuple[Tensor, ...], closing_S: Tensor, levels: int, *geometry: Any) -> _TreePlan:
    return _TreePlan(closing_S, levels, ChunkTable.from_geometry(tensors[2], *geometry))


def _forward(tensors: tuple[Tensor, ...], tree: _TreePlan) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV, final_SLGFV) of q, k, v, gates and level."""
    plan = ChunkedPlan.from_inputs(tree.table, *tensors)
    states, final = launch_build_slots(plan, tree.closing_S, tree.levels)
    return launch_read(plan, states), final


def _backward(
    tensors: tuple[Tensor, ...], tree: _TreePlan, d_out: Tensor, d_final: Tensor
) -> tuple[Tensor | None, ...]:  # fmt: skip
    q, k, *_ = tensors
    plan, d_out = ChunkedPlan.from_inputs(tree.table, *tensors), unit_last_stride(d_out)
    states, _ = launch_build_slots(plan, tree.closing_S, 0)
    read = launch_read_grad(plan, states, d_out)
    d_q = reduce_shared(read.d_q_BGJTF, q)
    d_slots = launch_slot_gradients(plan, d_out, d_final.contiguous(), tree.closing_S)
    write = launch_write_grad(plan, states, d_slots, d_out, read.pull_BGJT, final=tree.levels > 0)
    launch_add_passing_gradients(plan, read, write)
    return d_q, reduce_shared(write.d_k_BGTF, k), write.d_v_BGTV, write.d_gates_BGT, read.d_level_BTGJL


def _fake_outputs(tensors: tuple[Tensor, ...], closing_S: Tensor, levels: int, *_: Any) -> tuple[Tensor, Tensor]:
    q, k, v, *_rest = tensors
    return empty_out(q, v), empty_states(k, v, len(closing_S), levels)


LOG_LINEAR_OP = ChunkedOp(
    "log_linear",
    "Tensor q, Tensor k, Tensor v, Tensor gates, Tensor level",
    f"Tensor closing, int levels, {ChunkTable.GEOMETRY}",
    ChunkedFunctions(_make_plan, _forward, _backward, _fake_outputs),
)


def run_log_linear_op(
    tokens: tuple[Tensor, Tensor, Tensor], gates: Tensor, level: Tensor, geometry: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Return (out_BGJTV, final_SLGFV) of LOG_LINEAR_OP, in slices of features and values that its kernels hold.

    tokens: q, k and v. geometry: the op's inputs from `closing` on.
    """
    gates, level = gates.float().expand(tokens[2].shape[:3]), level.float()

    def run(q: Tensor, k: Tensor, v: Tensor, *_: slice) -> tuple[Tensor, Tensor]:
        return LOG_LINEAR_OP((unit_last_stride(q), unit_last_stride(k), unit_last_stride(v), gates, level), geometry)

    return run_sliced(run, *tokens)


def _accepts(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, *_: Any, chunk: int, **__: Any) -> bool:
    return beta is None and fits_kernels(q, k, v, chunk)


@register_kernel(log_linear, accepts=_accepts, is_faster=is_fastest("hierarchical", TOKENS_READER))
def log_linear_triton(
    q_BGJTF: Tensor,
    k_BGTF: Tensor,
    v_BGTV: Tensor,
    beta_BGT: Tensor | None,
    gates_BGT: Tensor,
    level_BTGJL: Tensor,
    *,
    start_B: Tensor,
    count_B: Tensor,
    buckets_BLGFV: Tensor | None,
    chunk: int,
    levels: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`log_linear` without beta. Returns (out_BGJTV, the buckets behind the tokens, None if no buckets are given)."""
    chunk, end_B = limit_chunk(chunk), start_B + count_B
    bits = chunk.bit_length() - 1
    if buckets_BLGFV is None:
        levels = 0
    elif levels is None:
        levels = levels_after(buckets_BLGFV, start_B, count_B)
    high = max(0, levels - bits)
    geometry = end_B >> bits, high, start_B, None, chunk, False
    out_BGJTV, final_BLGFV = run_log_linear_op((q_BGJTF, k_BGTF, v_BGTV), gates_BGT, level_BTGJL, geometry)
    if buckets_BLGFV is None:
        return out_BGJTV, None
    gates_BGT = gates_BGT.float().expand(v_BGTV.shape[:3])
    buckets = _FinalBuckets(k_BGTF, v_BGTV, gates_BGT, start_B, end_B, bits)
    after = F.pad(buckets.low(), (0, 0, 0, 0, 0, 0, 0, high))[:, :levels] + buckets.high(final_BLGFV, levels)
    if buckets_BLGFV.shape[1]:
        initial = _InitialBuckets(buckets_BLGFV.float(), gates_BGT, start_B, end_B)
        out_BGJTV = out_BGJTV + initial.read(q_BGJTF, level_BTGJL).to(out_BGJTV.dtype)
        after = after + initial.after(levels)
    return out_BGJTV, after


@dataclass
class _FinalBuckets:
    """The buckets behind the last token that hold the row's own tokens. bits: log2 of the chunk."""

    k_BGTF: Tensor
    v_BGTV: Tensor
    gates_BGT: Tensor
    start_B: Tensor
    end_B: Tensor
    bits: int

    def _fade(self, at_BX: Tensor) -> Tensor:
        """exp of the log-gates from the tokens of these indices on to the last token, (B, G, X)."""
        after_BGT = F.pad(self.gates_BGT.flip(-1).cumsum(-1).flip(-1), (0, 1))
        at_BX = at_BX.clamp(0, after_BGT.shape[2] - 1)
        return after_BGT.gather(2, at_BX.unsqueeze(1).expand(-1, after_BGT.shape[1], -1)).exp()

    def high(self, final_BLGFV: Tensor, levels: int) -> Tensor:
        """Return (B, levels, G, F, V): the buckets of whole chunks, final_BLGFV decayed from the ends of their segments
        to the last token; zeros in the levels below a chunk."""
        level_L = torch.arange(final_BLGFV.shape[1], device=self.end_B.device) + self.bits
        ends_BL = (self.end_B.unsqueeze(1) >> level_L) << level_L
        fade_BLG = self._fade(ends_BL - self.start_B.unsqueeze(1)).transpose(1, 2)
        below = min(self.bits, levels)
        return F.pad(fade_BLG[..., None, None] * final_BLGFV, (0, 0, 0, 0, 0, 0, below, 0))

    def low(self) -> Tensor:
        """Return (B, bits, G, F, V): the buckets below a chunk, which hold tokens of the chunk that the row ends in."""
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
    """The buckets that rows resume from, decayed to the row's first token."""

    buckets_BLGFV: Tensor
    gates_BGT: Tensor
    start_B: Tensor
    end_B: Tensor

    def read(self, q_BGJTF: Tensor, level_BTGJL: Tensor) -> Tensor:
        """Return out_BGJTV: what tokens read of the buckets.

        The level is the bit length of the token's position xor the row's start, at least the bucket's own.
        """
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
        """Return (B, levels, G, F, V): the same buckets behind the last token, decayed and merged into higher
        levels.
        """
        count = self.buckets_BLGFV.shape[1]
        differs_B1 = (bit_length(self.end_B ^ self.start_B, 62) - 1).unsqueeze(1)
        into_Bl = torch.maximum(differs_B1, torch.arange(count, device=differs_B1.device))
        into_BLl = into_Bl.unsqueeze(1) == torch.arange(levels, device=into_Bl.device)[:, None]
        faded = self.buckets_BLGFV * self.gates_BGT.sum(-1).exp()[:, None, :, None, None]
        return torch.einsum("bLl,blgfv->bLgfv", into_BLl.to(faded.dtype), faded)
